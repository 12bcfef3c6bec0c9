"""The command line, as a user meets it: train, resume, decode, and every mistake of the bad-input list."""

import io
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sacrebleu

import inference
from analysis.compare import load_runs
from configs import base
from configs.options import flatten
from errors import UserError
from inference.scores import read_table
from inference.text import SearchOptions, search_options
from tools.show_run import describe

ROOT = Path(__file__).parent.parent
WORDS = ['one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten']
STEPS = 24


def script(name, *arguments, stdin=None):
    """Runs a script to its end."""
    return subprocess.run([sys.executable, name, *map(str, arguments)], cwd=ROOT, input=stdin, capture_output=True,
                          timeout=300)


def explained(page):
    """What a page of --explain holds."""
    data = re.search('<script type="application/json" id="data">(.*?)</script>', page.read_text('utf-8'), re.DOTALL)[1]
    return json.loads(data)['items']


def train_arguments(workdir, data, cache, **changes):
    """A model that is trained in seconds, on text files."""
    values = {
        'cache_dir': cache, 'data.source': 'files', 'data.dir': data, 'data.source_lang': 'en',
        'data.target_lang': 'xx',
        'data.max_length': 24, 'data.tokenizer.vocab_size': 285, 'model.num_layers': 1, 'model.d_model': 16,
        'model.d_ff': 32, 'model.num_heads': 2, 'batch.tokens': 512, 'batch.buckets': 2, 'optimizer.warmup': 8,
        'train.steps': STEPS, 'train.log_every': 4, 'eval.every': 12, 'checkpoint.every': 6, 'checkpoint.keep_last': 3,
        'decode.extra_length': 4, 'decode.batch_size': 16, 'seed': 1,  # with 0 some translations are empty
    } | {key.replace('__', '.'): value for key, value in changes.items()}
    return ['train.py', '--config=configs/demo.py', f'--workdir={workdir}',
            *(f'--config.{key}={value}' for key, value in values.items())]


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp('cache')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """The target is the source backwards. One training line is empty, one far too long; the first test lines hold what
    a table must escape, and what ends a line for some readers."""
    folder = tmp_path_factory.mktemp('data')
    rng = np.random.default_rng(0)
    for split, count in (('train', 400), ('validation', 20), ('test', 20)):
        lines = [' '.join(rng.choice(WORDS, rng.integers(1, 5))) for _ in range(count)]
        if split == 'train':
            lines += ['', ' '.join(WORDS * 20)]
        if split == 'test':
            lines[:3] = ['one\u202ftwo\u00a0three', 'C:\\two\tthree \\t', ' four  five\u2028six\x85']
        (folder / f'{split}.en').write_text('\n'.join(lines) + '\n')
        (folder / f'{split}.xx').write_text('\n'.join(' '.join(line.split()[::-1]) for line in lines) + '\n')
    return folder


@pytest.fixture(scope='module')
def run(tmp_path_factory, data, cache):
    """A finished training, and what it said."""
    workdir = tmp_path_factory.mktemp('runs') / 'whole'
    result = script(*train_arguments(workdir, data, cache))
    assert result.returncode == 0, result.stderr.decode()
    return workdir, result.stderr.decode()


def parameters(workdir):
    import jax
    return jax.tree.leaves(inference.load(workdir, 'latest').model.params)


def test_a_run_directory_holds_everything(run):
    workdir, said = run
    assert {'config.json', 'data', 'checkpoints', 'metrics.jsonl', 'tensorboard'} <= {
        path.name for path in workdir.iterdir()}
    lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines if 'train_loss' in line] == [4, 8, 12, 16, 20, 24]
    assert [line['step'] for line in lines if 'validation_bleu' in line] == [12, 24]
    evaluated = lines[-1]
    assert {'validation_loss', 'validation_perplexity', 'validation_accuracy', 'validation_bleu'} <= evaluated.keys()
    events = b''.join(path.read_bytes() for path in (workdir / 'tensorboard').iterdir())
    assert b'samples/text_summary' in events and b'attention' in events and b'PNG' in events
    assert said.count('    ? ') == 6  # three translations at each of two evaluations
    assert 'dropped 1 with an empty side, 1 longer than 24' in said
    assert 'compilations of the train step' in said


@pytest.mark.slow
def test_the_config_is_printed_as_flags_that_make_it_again(data, cache, tmp_path):
    arguments = [argument for argument in train_arguments(tmp_path / 'run', data, cache) if '--workdir' not in argument]
    printed = script(*arguments, '--print_config')
    assert printed.returncode == 0 and not (tmp_path / 'run').exists()
    options = shlex.split(printed.stdout.decode())
    assert len(options) == len(flatten(base.get_config())) and set(arguments[2:]) <= set(options)
    assert b'options are not the defaults of configs/options.py: ' in printed.stderr
    again = script('train.py', '--config=configs/base.py', *options, '--print_config')
    assert again.stdout == printed.stdout


def test_show_run_tells_of_a_run(run):
    shown = dict(describe(load_runs(run[0])[0]))
    parameters_said = int(shown['model'][1].split()[0].replace(',', ''))
    assert parameters_said == sum(leaf.size for leaf in parameters(run[0]))
    assert shown['checkpoints'][0].startswith('12 (')


def test_starting_a_finished_run_again_does_nothing(run, data, cache):
    workdir, _ = run
    before = (workdir / 'metrics.jsonl').read_text()
    again = script(*train_arguments(workdir, data, cache))
    assert again.returncode == 0 and b'finished' in again.stderr
    assert (workdir / 'metrics.jsonl').read_text() == before


@pytest.mark.slow
def test_a_run_killed_twice_ends_bit_for_bit_as_one_left_alone(run, data, cache, tmp_path):
    workdir = tmp_path / 'killed'
    arguments = train_arguments(workdir, data, cache)
    for checkpoint in (6, 12):
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stderr=subprocess.DEVNULL)
        deadline = time.time() + 200
        while not (workdir / 'checkpoints' / str(checkpoint)).exists() and process.poll() is None:
            assert time.time() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    final = script(*arguments)
    assert final.returncode == 0, final.stderr.decode()
    for one, other in zip(parameters(run[0]), parameters(workdir), strict=True):
        np.testing.assert_array_equal(one, other)

    def losses(folder):
        lines = map(json.loads, (folder / 'metrics.jsonl').read_text().splitlines())
        return [(line['step'], line['validation_loss']) for line in lines if 'validation_loss' in line]
    assert losses(run[0]) == losses(workdir)


def test_another_config_on_the_same_directory_is_refused(run, data, cache):
    workdir, _ = run
    before = (workdir / 'config.json').read_text()
    result = script(*train_arguments(workdir, data, cache, model__d_ff=64, optimizer__peak=0.5))
    assert result.returncode == 2
    assert b'model.d_ff: 32 there, 64 asked for' in result.stderr and b'optimizer.peak' in result.stderr
    assert b'Traceback' not in result.stderr
    assert (workdir / 'config.json').read_text() == before


MISTAKES = {
    'missing file': ({'data__target_lang': 'de'}, ['train.de']),
    'unknown key': ({'model__num_layer': 3}, ['num_layer', 'num_layers']),
    'mistyped value': ({'model__num_layers': 'three'}, ['num_layers', 'three']),
    'heads that do not divide': ({'model__num_heads': 3}, ['model.num_heads=3', 'divide']),
    'negative dropout': ({'model__dropout': -0.1}, ['model.dropout=-0.1', 'at least 0']),
    'vocabulary too large': ({'data__tokenizer__vocab_size': 9000}, ['vocab_size=9000', 'at most']),
    'batch too small': ({'batch__tokens': 64}, ['batch.tokens=64', 'at least']),
    'unknown architecture choice': ({'model__norm': 'mid'}, ['model.norm', 'post, pre']),
}


@pytest.mark.parametrize('mistake', MISTAKES)
def test_a_mistake_is_explained_and_nothing_is_written(mistake, data, cache, tmp_path):
    changes, expected = MISTAKES[mistake]
    result = script(*train_arguments(tmp_path / 'run', data, cache, **changes))
    said = result.stderr.decode()
    assert result.returncode != 0
    assert 'Traceback' not in said
    assert all(part in said for part in expected), said
    assert not (tmp_path / 'run').exists()


def damaged(data, folder, name, content):
    folder.mkdir()
    for path in data.iterdir():
        (folder / path.name).write_bytes(content if path.name == name else path.read_bytes())
    return folder


def test_files_of_different_line_counts_are_refused(data, cache, tmp_path):
    folder = damaged(data, tmp_path / 'data', 'train.xx', b'one\ntwo\n')
    result = script(*train_arguments(tmp_path / 'run', folder, cache))
    assert result.returncode == 2 and b'402 lines' in result.stderr and b'2 lines' in result.stderr


def test_invalid_utf8_is_refused_with_its_place(data, cache, tmp_path):
    folder = damaged(data, tmp_path / 'data', 'train.xx', b'one\n' * 7 + b'caf\xe9\n' + b'one\n' * 394)
    result = script(*train_arguments(tmp_path / 'run', folder, cache))
    assert result.returncode == 2 and b'train.xx:8: not UTF-8' in result.stderr


def test_an_empty_corpus_is_refused(data, cache, tmp_path):
    folder = damaged(data, tmp_path / 'data', 'train.xx', b'')
    folder.joinpath('train.en').write_bytes(b'')
    result = script(*train_arguments(tmp_path / 'run', folder, cache))
    assert result.returncode == 2 and b'no text' in result.stderr


def test_a_directory_of_other_files_is_not_used(data, cache, tmp_path):
    (tmp_path / 'thesis.tex').write_text('precious')
    result = script(*train_arguments(tmp_path, data, cache))
    assert result.returncode == 2 and b'holds files but no run' in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ['thesis.tex']


def test_lines_in_are_lines_out(run):
    text = ('\ufeffone two\n\nthree\r\n   \nfour \u2581 \x00 \u202e \U0001f600 five\n'
            'one\rtwo\x0b\x0c\x1c\x85\u2028\u2029three\n'
            '\u05e2\u05d1\u05e8 \u6f22\u5b57 \x1b[31m\n' + 'ten ' * 250_000 + '\n' + 'x' * 1_000_000)
    result = script('decode.py', f'--workdir={run[0]}', '--input=-', '--format=jsonl', stdin=text.encode())
    assert result.returncode == 0, result.stderr.decode()
    lines = result.stdout.decode().split('\n')
    assert len(lines) == 10 and lines.pop() == ''  # nine lines, each ended
    answers = [json.loads(line) for line in lines]
    assert [answer['source'] for answer in answers] == [
        line.removesuffix('\r').removeprefix('\ufeff') for line in text.split('\n')]
    assert not answers[1]['text'] and not answers[3]['text']
    assert result.stdout.decode().splitlines() == lines  # none ends early for those who end one at U+2028
    said = result.stderr.decode()
    assert 'line 8 has ' in said and 'line 9 has ' in said and said.count('only the first 23 are translated') == 2


def test_jsonl_tells_all_and_pictures_are_drawn(run, tmp_path):
    (tmp_path / 'in.txt').write_text('one two\n\n')
    result = script('decode.py', f'--workdir={run[0]}', f'--input={tmp_path}/in.txt', f'--output={tmp_path}/out.jsonl',
                    '--format=jsonl', '--n_best=2', '--attention', f'--pictures={tmp_path}/pictures',
                    '--checkpoint=average:2', f'--explain={tmp_path}/page.html')
    assert result.returncode == 0, result.stderr.decode()
    page, = explained(tmp_path / 'page.html')  # of the empty line there is nothing to tell
    assert page['texts'][0] == ['source', 'one two'] and len(page['answers']) > 3  # header, and the whole beam
    first, second = map(json.loads, (tmp_path / 'out.jsonl').read_text().splitlines())
    assert first['source'] == 'one two' and len(first['n_best']) == 2
    assert first['n_best'][0]['score'] >= first['n_best'][1]['score']
    assert np.shape(first['attention']) == (1, 2, len(first['tokens']) + 1, len(first['source_tokens']) + 1)
    np.testing.assert_allclose(np.sum(first['attention'], -1), 1, rtol=1e-4)
    assert second['text'] == '' and second['tokens'] == []
    assert (tmp_path / 'pictures' / '000001.png').read_bytes().startswith(b'\x89PNG')
    assert not (tmp_path / 'pictures' / '000002.png').exists()


def test_a_split_is_scored(run, tmp_path):
    result = script('decode.py', f'--workdir={run[0]}', '--split=test', f'--explain={tmp_path}/page.html',
                    '--explain_count=3')
    assert result.returncode == 0, result.stderr.decode()
    pages = explained(tmp_path / 'page.html')
    assert [each['texts'][0][1] for each in pages] == [
        source for source, *_ in read_table(run[0] / 'results' / 'test.tsv')[:3]]
    assert pages[0]['texts'][2][0] == 'reference'
    printed, written = json.loads(result.stdout), json.loads((run[0] / 'results' / 'test.json').read_text())
    assert printed == written
    assert {'n', 'bleu', 'bleu_signature', 'chrf', 'chrf_signature', 'exact_match', 'perplexity', 'seconds',
            'parameters', 'tokens_per_second', 'checkpoint', 'decoding', 'bleu_lowercased_tokenised'} <= written.keys()
    assert written['n'] == 20


def test_the_sources_of_a_table_decoded_again_give_its_score(run, data, tmp_path):
    done = script('decode.py', f'--workdir={run[0]}', '--split=test')
    assert done.returncode == 0, done.stderr.decode()
    sources, references, translations = zip(*read_table(run[0] / 'results' / 'test.tsv'), strict=True)
    assert list(sources) == (data / 'test.en').read_bytes().decode().split('\n')[:-1]
    assert list(references) == (data / 'test.xx').read_bytes().decode().split('\n')[:-1]
    (tmp_path / 'again.txt').write_bytes('\n'.join([*sources, '']).encode())
    again = script('decode.py', f'--workdir={run[0]}', f'--input={tmp_path}/again.txt', '--format=jsonl')
    outputs = [json.loads(line)['text'] for line in again.stdout.decode().split('\n')[:-1]]
    assert outputs == list(translations)
    results = json.loads((run[0] / 'results' / 'test.json').read_text())
    assert sacrebleu.corpus_bleu(outputs, [references]).score == results['bleu']
    assert sacrebleu.corpus_chrf(outputs, [references]).score == results['chrf']
    assert sum(map(str.__eq__, outputs, references)) / 20 == results['exact_match']


def test_decoding_and_training_agree_on_the_perplexity(run):
    result = script('decode.py', f'--workdir={run[0]}', '--split=validation', '--checkpoint=latest', '--method=greedy')
    measured = json.loads((run[0] / 'metrics.jsonl').read_text().splitlines()[-1])
    assert json.loads(result.stdout)['perplexity'] == pytest.approx(measured['validation_perplexity'], rel=1e-4)
    assert json.loads(result.stdout)['bleu'] == pytest.approx(measured['validation_bleu'], rel=1e-6)


@pytest.mark.parametrize('arguments, expected', [
    (['--workdir={empty}', '--input=-'], 'not a run directory'),
    (['--workdir={started}', '--input=-'], 'no checkpoint'),
    (['--workdir={run}', '--input={empty}/none.txt'], 'none.txt'),
    (['--workdir={run}'], '--split=test'),
    (['--workdir={run}', '--input=-', '--checkpoint=average:99'], 'checkpoints are kept'),
    pytest.param(['--workdir={run}', '--input=-', '--n_best=9', '--format=jsonl'], 'n_best=9', marks=pytest.mark.slow),
    pytest.param(['--workdir={run}', '--input=-', '--top_p=1.5'], 'top_p=1.5', marks=pytest.mark.slow),
])
def test_mistakes_in_decoding_are_explained(run, tmp_path, arguments, expected):
    empty, started = tmp_path / 'empty', tmp_path / 'started'
    empty.mkdir()
    started.mkdir()
    (started / 'config.json').write_bytes((run[0] / 'config.json').read_bytes())
    result = script('decode.py', *(argument.format(run=run[0], empty=empty, started=started) for argument in arguments),
                    stdin=b'one\n')
    assert result.returncode == 2
    assert expected in result.stderr.decode() and b'Traceback' not in result.stderr


def test_a_failed_decode_leaves_the_old_output(run, tmp_path):
    (tmp_path / 'bad.txt').write_bytes(b'one\n\xff\n')
    (tmp_path / 'out.txt').write_text('precious')
    result = script('decode.py', f'--workdir={run[0]}', f'--input={tmp_path}/bad.txt', f'--output={tmp_path}/out.txt')
    assert result.returncode == 2 and b'bad.txt:2' in result.stderr
    assert (tmp_path / 'out.txt').read_text() == 'precious'


@pytest.mark.slow
@pytest.mark.parametrize('output, message', [
    ('{tmp_path}', 'Is a directory'), ('{tmp_path}/none/out.txt', 'No such file'), ('/dev/full', 'No space left'),
    (None, 'stdout cannot be written: No space left on device')])
def test_an_output_that_cannot_be_written_is_explained(run, tmp_path, output, message):
    with open('/dev/full', 'w') as full:
        result = subprocess.run(
            [sys.executable, 'decode.py', f'--workdir={run[0]}', '--input=-', '--method=greedy',
             *([f'--output={output.format(tmp_path=tmp_path)}'] if output else [])],
            cwd=ROOT, input=b'one\n', stdout=full, stderr=subprocess.PIPE, timeout=300)
    said = result.stderr.decode()
    assert result.returncode == 2 and message in said and 'Traceback' not in said and 'Exception' not in said
    assert list(tmp_path.iterdir()) == [] and stat.S_ISCHR(os.stat('/dev/full').st_mode)


def test_a_reader_that_leaves_ends_decoding(run):
    process = subprocess.Popen([sys.executable, 'decode.py', f'--workdir={run[0]}', '--input=-', '--method=greedy'],
                               cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    process.stdin.write(b'one\n')
    process.stdin.close()
    said = process.stderr.read().decode()
    assert process.wait(300) == 141 and 'Traceback' not in said and 'Exception' not in said


class Canary:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # Orbax on damaged files
def test_a_run_directory_from_elsewhere_runs_no_code(run, tmp_path):
    """Each of its files in turn is a pickle, or an array of pickled objects."""
    array = io.BytesIO()
    np.save(array, np.array([Canary(tmp_path / 'canary')]), allow_pickle=True)
    pickles = pickle.dumps(Canary(tmp_path / 'canary')), array.getvalue()
    shutil.copytree(run[0], tmp_path / 'run', ignore=shutil.ignore_patterns('tensorboard', 'results'))
    latest = max(int(path.name) for path in (run[0] / 'checkpoints').iterdir() if path.name.isdecimal())
    for checkpoint in (tmp_path / 'run' / 'checkpoints').iterdir():
        if checkpoint.name != str(latest):
            shutil.rmtree(checkpoint)
    refused = set()
    for path in [path for path in (tmp_path / 'run').rglob('*') if path.is_file()]:
        whole = path.read_bytes()
        for content in pickles:
            path.write_bytes(content)
            try:
                inference.load(tmp_path / 'run', 'latest').translate(['one'])
            except UserError:
                refused.add(path.name)
            except Exception as error:  # a damaged checkpoint: checked elsewhere
                assert 'checkpoints' in path.parts, (path, error)
        path.write_bytes(whole)
    assert refused >= {'config.json', 'sizes.json', 'source.model', 'target.model'}
    assert not (tmp_path / 'canary').exists()
    pickle.loads(pickles[0])
    assert (tmp_path / 'canary').exists()  # it would have


def test_loading_and_decoding_unpickle_nothing(run):
    code = """
import sys
import inference
met = []
sys.addaudithook(lambda event, arguments: event == 'pickle.find_class' and met.append(arguments))
inference.load(sys.argv[1]).translate(['one two', ''])
assert not met, met
import pickle
pickle.loads(pickle.dumps(print))
assert met == [('builtins', 'print')]
"""
    result = subprocess.run([sys.executable, '-c', code, run[0]], cwd=ROOT, capture_output=True, timeout=300)
    assert result.returncode == 0, result.stderr.decode()


@pytest.mark.parametrize('name', ['train', 'decode'])
def test_no_tensorflow_is_imported(name):
    code = f'import sys, {name}; assert "tensorflow" not in sys.modules'
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0


def test_the_notebook_interface(run):
    loaded = inference.load(run[0])
    sentences = ['one two three', '', 'ten']
    translations = loaded.translate(sentences)
    assert [translation.source for translation in translations] == sentences
    assert translations[1].text == ''
    sampled = loaded.translate(sentences, SearchOptions(method='sample', n_best=3, seed=5, extra_length=4))
    assert len(sampled[0].hypotheses) == 3
    again = loaded.model.translate(sentences[2:], SearchOptions(method='sample', n_best=3, seed=5, extra_length=4),
                                        first=2)
    # A draw depends on the seed and the line, not on the company (but for rounding of the scores).
    assert [h.text for h in again[0].hypotheses] == [h.text for h in sampled[2].hypotheses]
    assert os.fspath(loaded.workdir) == os.fspath(run[0])
    weights = loaded.model.attention(translations[0])
    length = len(translations[0].source_tokens) + 1
    assert weights['encoder'].shape == (1, 2, length, length)


def test_log_probability_of_a_translation_is_its_teacher_forced_one(run):
    loaded = inference.load(run[0])
    found = loaded.translate(['one two', 'six seven eight nine'], search_options(loaded.config, n_best=2))
    for translation in found:
        for hypothesis in translation.hypotheses:
            [log_probs] = loaded.model.token_log_probs([(translation.source_tokens, hypothesis.tokens)])
            assert sum(log_probs) == pytest.approx(hypothesis.log_prob, abs=1e-4)


@pytest.mark.slow
def test_early_stopping_ends_a_run_that_does_not_improve(data, cache, tmp_path):
    arguments = train_arguments(tmp_path / 'run', data, cache, eval__patience=2, eval__every=4, optimizer__peak=0.0)
    result = script(*arguments)
    assert result.returncode == 0, result.stderr.decode()
    assert b'stopped at step 12' in result.stderr  # the best at 4, then twice no better
    again = script(*arguments)
    assert again.returncode == 0 and b'finished, at step 12' in again.stderr


@pytest.mark.slow
def test_learned_positions_limit_the_output_and_not_the_padding(data, cache, tmp_path):
    arguments = train_arguments(tmp_path / 'run', data, cache, model__position='learned', model__max_length=25,
                                train__steps=12)
    assert script(*arguments).returncode == 0
    loaded = inference.load(tmp_path / 'run')
    [translation] = loaded.translate(['ten ' * 40], SearchOptions(extra_length=50))
    assert len(translation.source_tokens) == 23
    assert len(translation.hypotheses[0].tokens) < 25
    assert loaded.model.attention(translation)['encoder'].shape == (1, 2, 24, 24)
    scored = script('decode.py', f'--workdir={tmp_path / "run"}', '--split=train', '--method=greedy')
    assert scored.returncode == 0 and json.loads(scored.stdout)['n'] == 402, scored.stderr.decode()
    assert b'1 of 402 references have more than 25 tokens' in scored.stderr
