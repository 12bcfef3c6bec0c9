"""The command blocks of README.md, CONTRIBUTING.md and docs/ run unchanged in a copy of the tree.

The blocks of docs/results.md are the longest experiments: only the options of their trainings and sweeps are checked.
Blocks that need the extra `interchange` are tested in tests/interchange/test_commands.py, and the Python of
docs/inside.md in tests/docs/test_inside.py. Blocks with RUN do not run, because RUN may be a run of any kind.
Trainings in text or tables do not run, but their options are checked. tests/launch tests launch/multi30k_best.sh.

In the blocks, `python` makes each training tiny (`SHORTER`), each benchmark short, and pictures few; sweeps have
one seed, the built-in corpus has a tenth of its sentences, and `make` does nothing, because other tests run its
targets. DIR, IMAGES, FILE, PAIRS.tsv and other names of files exist.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from input_pipeline.builtin import make_corpus
from tests.scripts import ROOT

pytestmark = pytest.mark.slow

BLOCKS = {'model.num_layers': 1, 'model.d_model': 16, 'model.d_ff': 32, 'model.num_heads': 2}
PAIRS = {'data.tokenizer.vocab_size': 600, 'batch.tokens': 1024, 'batch.buckets': 1, 'decode.extra_length': 2,
         'eval.bleu_sentences': 8}
RECURRENT = {'model.d_model': 16, 'model.recurrent.d_hidden': 16}
SHORTER = {
    'demo': BLOCKS | PAIRS, 'multi30k': BLOCKS | PAIRS, 'multi30k_best': BLOCKS | PAIRS,
    'rnnsearch_demo': RECURRENT | PAIRS, 'rnnsearch_multi30k': RECURRENT | PAIRS,
    'shakespeare_char': BLOCKS | {'decode.extra_length': 4}, 'stdlib_lm': BLOCKS,
    'digits_vit': BLOCKS, 'co2_forecast': BLOCKS,
    'llama_tiny': BLOCKS | {'model.num_key_value_heads': 1, 'decode.extra_length': 4},
}
ALWAYS = {'cache_dir': 'cache', 'train.steps': 4, 'train.log_every': 2, 'eval.every': 4, 'checkpoint.every': 2,
          'optimizer.warmup': 1}  # a sweep halves the steps of some runs
SHIM = """import os, re, sys
shorter, always = {shorter!r}, {always!r}
recipes = filter(None, map(re.compile(r'--config=configs/(\\w+).py(:.*)?').fullmatch, sys.argv))
changes = {{key: value for recipe in recipes for key, value in (shorter.get(recipe[1], {{}}) | always).items()}}
if any(each.startswith('--config.data.tokenizer.kind=') for each in sys.argv):
    changes.pop('data.tokenizer.vocab_size', None)
sys.argv += ['--sentences=1000'] * ('tools.distil' in sys.argv)
sys.argv += ['--picture_count=2'] * any(each.startswith('--pictures=') for each in sys.argv)
if any(each in ('benchmarks.train_step', 'benchmarks.decode') for each in sys.argv):
    sys.argv += ['--turns=1', '--peers=']  # the default peer of a trained run is CTranslate2, which needs an extra
sys.argv = [each.replace('average:10', 'average:2') for each in sys.argv]  # the number of checkpoints
os.execv({python!r}, [{python!r}, *sys.argv[1:], *(f'--config.{{key}}={{value}}' for key, value in changes.items())])
"""
CHECKED = """import os, sys
checks = {{'train.py': '--print_config', 'sweep.py': '--dry_run'}}
if sys.argv[1] in checks:
    os.execv({python!r}, [{python!r}, *sys.argv[1:], checks[sys.argv[1]]])
"""
RESULTS = 'docs/results.md'


PAGES = ['README.md', 'CONTRIBUTING.md', *sorted(f'docs/{path.name}' for path in (ROOT / 'docs').glob('*.md'))]


def blocks(interchange):
    """Returns (page, language, code) of the fenced blocks that need the extra `interchange`, or of all others."""
    found = [(page, language, code) for page in PAGES for language, code in
             re.findall(r'^```(sh|python)\n(.*?)^```', (ROOT / page).read_text(), re.DOTALL | re.M)]
    return [(page, language, code) for page, language, code in found
            if not re.search('--workdir=RUN|multi30k_best', code) and (page, language) != ('docs/inside.md', 'python')
            and interchange == (page == 'docs/deploying.md' or 'ctranslate2' in code)]


def trainings():
    """Yields (page, command) of each training outside of the blocks, as in the tables of docs/results.md."""
    for page in PAGES:
        for command in re.findall(r'`((?:\w+=\S+ )?python train\.py [^`]+)`', (ROOT / page).read_text()):
            if '...' not in command:
                yield page, ' '.join(command.split())


def shorten(path, old, new):
    code = path.read_text()
    assert code.count(old) == 1
    path.write_text(code.replace(old, new))


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
    """A copy of the tree with the data of the reader, and the environment of the blocks."""
    tree = tmp_path_factory.mktemp('docs') / 'allyouneed'
    tracked = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, tracked.split('\0')):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    shorten(tree / 'configs' / 'sweeps' / '__init__.py', 'range(count)', 'range(1)')
    shorten(tree / 'input_pipeline' / 'builtin.py', "{'train': 20000, 'validation': 1000, 'test': 1000}",
            "{'train': 2000, 'validation': 100, 'test': 100}")
    corpus, folder = make_corpus('en', 'de'), tree / 'DIR'
    folder.mkdir()
    for split in 'train', 'validation', 'val', 'test', 'test_2016_flickr':
        pairs = corpus['train'][:2000] if split == 'train' else corpus['test'][:20]
        for language, lines in zip(('en', 'de'), zip(*pairs, strict=True), strict=True):
            (folder / f'{split}.{language}').write_text('\n'.join(lines) + '\n')
    for number in range(60):
        path = tree / 'IMAGES' / ('cat', 'dog')[number % 2] / f'{number}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 24), number, np.uint8)).save(path)
    (tree / 'FILE').write_text('\n'.join(lines * 20) + '\n')
    (tree / 'SERIES.csv').write_text('x\n' + ''.join(f'{step % 12 + step / 100}\n' for step in range(240)))
    (tree / 'PAIRS.tsv').write_text(''.join(f'{line}\t{line}\n' for line in lines))
    (tree / 'FILE.tsv').write_text(''.join(f'{line}\tle \n' for line in lines))
    (tree / 'WORDS').write_text('samedi\nil y a\n')
    commands, checked = tree / 'bin', tree / 'checked'
    shim = SHIM.format(python=sys.executable, shorter=SHORTER, always=ALWAYS)
    for folder, script in (commands, shim), (checked, CHECKED.format(python=sys.executable)):
        folder.mkdir(exist_ok=True)
        (folder / 'shim.py').write_text(script)
        (folder / 'python').write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/shim.py" "$@"\n')
    (commands / 'make').write_text('#!/bin/sh\n')
    for path in commands / 'python', commands / 'make', checked / 'python':
        path.chmod(0o755)
    environment = os.environ | {'PATH': f'{commands}:{os.environ["PATH"]}'}
    for name in 'demo', 'rnnsearch_demo':
        bash(f'python train.py --config=configs/{name}.py --workdir=runs/{name}', tree, environment)
    return tree, environment


def bash(code, tree, environment):
    done = subprocess.run(['bash', '-euo', 'pipefail', '-c', code], cwd=tree, env=environment, input='one two\n',
                          text=True, capture_output=True, timeout=1000)
    assert done.returncode == 0, f'{code}\n{done.stdout}\n{done.stderr}'
    return done.stdout


def run_block(tree, page, language, code):
    if page == RESULTS:
        folder, environment = tree
        bash(code, folder, environment | {'PATH': f'{folder / "checked"}:{os.environ["PATH"]}'})
        return
    changes = {key: value for key, value in (SHORTER['demo'] | ALWAYS).items() if key not in code}
    shorten = f'config.update_from_flattened_dict({changes})\n'
    code = code.replace('run = allyouneed.train', shorten + 'run = allyouneed.train')
    bash(code if language == 'sh' else f'python - <<"END"\n{code}\nEND', *tree)


@pytest.mark.parametrize('page, language, code', blocks(interchange=False))
def test_a_block_of_the_documentation_runs(tree, page, language, code):
    run_block(tree, page, language, code)


@pytest.mark.parametrize('page, command', list(trainings()))
def test_a_training_in_the_text_has_options_that_exist(tree, page, command):
    stdout = bash(f'{command} --print_config'.replace('python', shlex.quote(sys.executable), 1), *tree)
    for option, value in re.findall(r'--config\.([\w.]+)=(\S+)', command):
        assert re.search(rf"^'?--config\.{re.escape(option)}={re.escape(value)}(\.0)?'?$", stdout, re.M), option


def test_the_tables_of_results_have_trainings():
    assert len([page for page, _ in trainings() if page == RESULTS]) >= 10
