"""docs/extending.md, followed step by step in a copy of the tree."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / 'docs' / 'extending.md').read_text()
TINY = {'data.max_length': 64, 'model.num_layers': 1, 'model.d_model': 16, 'model.d_ff': 16, 'model.num_heads': 2,
        'optimizer.warmup': 2, 'train.steps': 4, 'eval.bleu_sentences': 4, 'decode.extra_length': 4}


def blocks(language):
    return re.findall(rf'^```{language}\n(.*?)^```$', PAGE, flags=re.DOTALL | re.MULTILINE)


def commands(script):
    lines = [line for block in blocks('bash') for line in block.replace('\\\n', '').splitlines()]
    return [line.split('python ', 1)[1] for line in lines if script in line]


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
    """A copy of the tree with the changes of the page."""
    copy = tmp_path_factory.mktemp('extended') / 'tree'
    tracked = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, tracked.split('\0')):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for patch in blocks('diff'):
        # The temporary folder may be inside a repository, in which git would skip the files silently.
        done = subprocess.run(['git', 'apply', '-'], cwd=copy, input=patch, text=True, capture_output=True,
                              env=os.environ | {'GIT_CEILING_DIRECTORIES': str(copy.parent)})
        assert done.returncode == 0, f'docs/extending.md no longer fits the code: {done.stderr}\n{patch}'
    return copy


def run(tree, command, **options):
    """Runs a command of the page in the tree, with the imports of the tree."""
    done = subprocess.run(f'{shlex.quote(sys.executable)} {command}', shell=True, cwd=tree, capture_output=True,
                          text=True, timeout=600, env=os.environ | {'PYTHONPATH': str(tree)}, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_changes_fit_and_name_the_score(tree):
    assert len(blocks('diff')) == 3
    assert "'gaussian'" in (tree / 'model' / 'attention.py').read_text()
    planned = run(tree, *commands('sweep.py'))
    assert 'score=gaussian' in planned and planned.rstrip().endswith('# 5 runs')


@pytest.mark.slow
def test_the_new_tests_pass(tree):
    stdout = run(tree, *[f'{command} --numprocesses=0' for command in commands('pytest')])
    assert re.search(r'\b1[0-9] passed', stdout) and 'failed' not in stdout


@pytest.mark.slow
def test_the_score_is_trained_and_shown(tree):
    train, = commands('train.py')
    # Absl uses the last value of a flag that is set twice.
    run(tree, f'{train} ' + ' '.join(f'--config.{option}={value}' for option, value in TINY.items()))
    scored, pictured = commands('decode.py')
    assert '"exact_match"' in run(tree, scored)
    for line in (line for block in blocks('bash') for line in block.splitlines() if line.startswith('echo')):
        subprocess.run(line, shell=True, cwd=tree, check=True)
    run(tree, pictured)
    assert (tree / 'pictures' / '000001.png').read_bytes().startswith(b'\x89PNG')
    code, = blocks('py')
    stdout = run(tree, '-', input=code + "\nprint(panels.shape, run.config.model.score)")
    assert stdout.split()[-1] == 'gaussian' and stdout.startswith('(3, ')
