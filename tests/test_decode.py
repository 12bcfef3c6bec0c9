"""decode.py: input and output lines, scores, error messages, and the times in the log."""

import dataclasses
import functools
import json
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu

import inference
from analysis import answering
from analysis.explain import Page
from analysis.request import FILES, Request
from configs import recipe
from inference import arriving, constraints
from inference.edits import Edit
from inference.options import SearchOptions
from inference.outputs import Hypothesis, Output
from inference.scores import read_table
from input_pipeline.data import LabelledData, PairData, open_data
from model.patches import grid_sinusoids
from model.positional import sinusoids
from runtime.errors import UserError
from tests.inference.test_text import Echo, Parrot
from tests.input_pipeline.helpers import in_memory
from tests.random_run import random_run
from tests.scripts import ROOT, explained, script, train_arguments

ANSWERING = '''
import logging, time
import jax
from analysis import answering
from analysis.request import Request
from inference.options import SearchOptions
from inference.outputs import Hypothesis, Output

class Slow:
    """Compiles for 0.6 s, then answers ten lines in 0.4 s."""
    multiline, unit = False, 'line'

    def respond_all(self, lines, options):
        jax.jit(lambda x: time.sleep(0.6) or x + 1)(0.0)
        time.sleep(0.4)
        yield [Output(line, [4], [Hypothesis(line.upper(), [4], 0.0, 0.0)]) for line in lines]

answering.log.setLevel(logging.INFO)
answering.log.addHandler(logging.StreamHandler())
answering.answer_file(Request(input='-'), Slow(), SearchOptions(), None)
'''


@pytest.mark.slow
def test_the_logged_time_separates_compiling_from_answering():
    done = subprocess.run([sys.executable, '-c', ANSWERING], cwd=ROOT, input='one\n' * 10, capture_output=True,
                          text=True, timeout=120)
    assert done.stdout == 'ONE\n' * 10, done.stderr
    total = re.search(r'^10 lines in (.*) s: (.*) s of compilation, and (.*) lines per second in the remaining time$',
                      done.stderr, re.MULTILINE)
    seconds, compiling, rate = map(float, total.groups())
    assert 0.6 <= compiling < seconds - 0.3 and 0 < rate <= 25  # at least 0.4 s for ten lines
    start = re.search(r'^first line after (.*) s: imports (.*), opening the run (.*), compiling the search (.*)$',
                      done.stderr, re.MULTILINE)
    first, *parts = map(float, start.groups())
    assert parts[0] > 0 and parts[2] == pytest.approx(compiling, abs=0.051)
    assert first > sum(parts) + 0.15  # the search takes at least 0.4 s, and the four numbers are rounded to 0.1 s


@pytest.mark.parametrize('model, text, first, count', [
    (Echo(), 'one\n', 'first line after', '1 line in'), (Echo(), 'one\ntwo\n', 'first line after', '2 lines in'),
    (Parrot(), 'one\n', 'first text after', '1 text in'), (Echo(), '', '', '0 lines in')])
def test_the_log_has_the_name_of_an_input_and_its_plural(tmp_path, monkeypatch, caplog, model, text, first, count):
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    caplog.set_level('INFO', logger='allyouneed')
    (tmp_path / 'in.txt').write_text(text)
    answering.answer_file(Request(input=f'{tmp_path}/in.txt', output=f'{tmp_path}/out.txt'), model,
                          SearchOptions(method='greedy', extra_length=2), None)
    *started, ended = caplog.messages
    assert ended.startswith(count) and [message[:16] for message in started] == [first] * bool(first)


@pytest.mark.slow
def test_answering_does_not_import_libraries_that_it_does_not_need(run):
    line = [sys.executable, '-X', 'importtime', 'decode.py', f'--workdir={run[0]}', '--input=-']
    done = subprocess.run(line, cwd=ROOT, input='one\n', capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1
    imported = {each.rpartition('|')[2].strip() for each in done.stderr.splitlines()}
    assert 'jax' in imported
    assert not imported & {'orbax.checkpoint', 'grain', 'sacrebleu', 'matplotlib', 'tensorboardX',
                           'tensorflow_datasets', 'sklearn'}


@pytest.mark.slow
def test_all_programs_of_a_start_are_kept_for_the_next(run, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != 'JAX_COMPILATION_CACHE_DIR'}
    subprocess.run([sys.executable, 'decode.py', f'--workdir={run[0]}', '--input=-'], cwd=ROOT, input=b'one\n',
                   env=environment | {'XDG_CACHE_HOME': str(tmp_path)}, capture_output=True, timeout=120, check=True)
    kept = {path.name.partition('-')[0] for path in (tmp_path / 'allyouneed' / 'xla').iterdir()}
    assert kept == {'jit__read', 'jit__go_on'}, 'a program more delays the first line'


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
    stderr = result.stderr.decode()
    assert 'line 8 has ' in stderr and 'line 9 has ' in stderr
    assert stderr.count('only the first 23 tokens are read') == 2


def test_jsonl_has_all_entries_and_pictures_are_drawn(run, tmp_path):
    (tmp_path / 'in.txt').write_text('one two\n\n')
    result = script('decode.py', f'--workdir={run[0]}', f'--input={tmp_path}/in.txt', f'--output={tmp_path}/out.jsonl',
                    '--format=jsonl', '--n_best=2', '--attention', f'--pictures={tmp_path}/pictures',
                    '--checkpoint=average:2', f'--explain={tmp_path}/page.html')
    assert result.returncode == 0, result.stderr.decode()
    assert b'page.html: 1 explanation\n' in result.stderr
    page, = explained(tmp_path / 'page.html')  # the empty line has no explanation
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
            'parameters', 'tokens_per_second', 'checkpoint', 'dtype', 'matmul_precision', 'decoding',
            'bleu_lowercased_tokenised'} <= written.keys()
    assert written['n'] == 20


@pytest.fixture(scope='module')
def with_sets(run, data, tmp_path_factory):
    """The run, with two sets of the test."""
    folder = tmp_path_factory.mktemp('sets')
    shutil.copytree(data, folder / 'data')
    for language in ('en', 'xx'):
        lines = (data / f'train.{language}').read_text().splitlines()[:32]
        (folder / 'data' / f'other.{language}').write_text('\n'.join(lines) + '\n')
    shutil.copytree(run[0], folder / 'run', ignore=shutil.ignore_patterns('results'))
    change_config(folder / 'run', dir=str(folder / 'data'), splits__test='test,other')
    return folder


def change_config(workdir, **values):
    """Other values of config.data."""
    config = json.loads((workdir / 'config.json').read_text())
    for name, value in values.items():
        *parents, last = name.split('__')
        functools.reduce(dict.__getitem__, parents, config['data'])[last] = value
    (workdir / 'config.json').write_text(json.dumps(config))


def score(workdir, *flags):
    result = script('decode.py', f'--workdir={workdir}', *flags)
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout), result.stderr.decode()


@pytest.mark.slow
def test_all_sets_of_a_test_are_scored_and_one_by_its_name(run, with_sets):
    workdir, results = with_sets / 'run', with_sets / 'run' / 'results'
    printed, _ = score(workdir, '--split=test', '--confidence')
    assert list(printed) == ['test', 'other'] and [printed[name]['n'] for name in printed] == [20, 32]
    assert sorted(path.name for path in results.iterdir()) == ['other.json', 'other.tsv', 'test.json', 'test.tsv']
    for name, scores in printed.items():
        assert scores == json.loads((results / f'{name}.json').read_text())
        low, high = scores['confidence']['bleu_lowercased_moses']
        assert low <= scores['bleu_lowercased_moses'] <= high and scores['confidence']['ter'][0] <= scores['ter']
    before = (results / 'test.json').read_text()
    printed_other, _ = score(workdir, '--split=other')
    for name in ('n', 'bleu', 'perplexity', 'chrf++', 'ter'):
        assert printed_other[name] == printed['other'][name]
    assert 'confidence' not in printed_other and (results / 'test.json').read_text() == before
    alone, _ = score(run[0], '--split=test')  # the same sentences, in a run with one set
    assert alone['bleu'] == printed['test']['bleu'] and alone['ter'] == printed['test']['ter']


@pytest.mark.slow
def test_a_run_is_compared_with_another(run, with_sets):
    """With itself: no difference; with a greedy search of another checkpoint, under another name: one that is real."""
    workdir = with_sets / 'run'
    first, _ = score(workdir, '--split=test')
    again, _ = score(workdir, '--split=other', f'--compare={workdir}')
    assert again['compared']['with'] == str(workdir)
    assert again['compared']['bleu'] == {'other': again['bleu'], 'difference': 0, 'p_value': 1}
    other, _ = score(run[0], '--split=test', '--checkpoint=18', '--method=greedy', f'--compare={workdir}')
    assert other['checkpoint_steps'] == [18] and other['decoding']['method'] == 'greedy'
    assert other['compared']['chrf']['difference'] != 0 and other['compared']['chrf']['p_value'] < 1
    for name in ('bleu', 'bleu_lowercased_moses', 'chrf', 'chrf++', 'ter'):
        compared = other['compared'][name]
        assert compared['other'] == pytest.approx(first['test'][name])
        assert compared['difference'] == pytest.approx(other[name] - first['test'][name])
        assert 0 < compared['p_value'] <= 1
    result = script('decode.py', f'--workdir={workdir}', '--split=other', f'--compare={run[0]}')
    assert result.returncode == 2 and b'no translations of the sentences of other' in result.stderr
    result = script('decode.py', f'--workdir={workdir}', '--split=other', '--compare=nowhere')
    assert result.returncode == 2 and b'--compare=nowhere: there is no such directory' in result.stderr


@pytest.mark.slow
def test_a_missing_set_is_reported_before_the_other_sets_are_scored(with_sets, tmp_path):
    shutil.copytree(with_sets / 'run', tmp_path / 'run', ignore=shutil.ignore_patterns('results'))
    change_config(tmp_path / 'run', splits__test='test,none')
    result = script('decode.py', f'--workdir={tmp_path}/run', '--split=test')
    assert result.returncode == 2 and b'none.en' in result.stderr and not result.stdout
    assert not list((tmp_path / 'run').glob('results/*'))


@pytest.mark.slow
def test_the_scores_of_a_run_that_folds_case_have_a_note(data, cache, tmp_path):
    """It reads text of any case as the same."""
    (tmp_path / 'data').mkdir()
    for path in data.iterdir():
        (tmp_path / 'data' / path.name).write_text(path.read_text().title())
    workdir = tmp_path / 'run'
    done = script(*train_arguments(workdir, tmp_path / 'data', cache, data__tokenizer__normalization='nfkc_cf',
                                   eval__metric='bleu_lowercased_tokenised'))
    assert done.returncode == 0, done.stderr.decode()
    evaluated = json.loads((workdir / 'metrics.jsonl').read_text().splitlines()[-1])
    assert evaluated['validation_bleu_lowercased_tokenised'] >= evaluated['validation_bleu']
    scores, stderr = score(workdir, '--split=test')
    assert 'have no capitals' in scores['note'] and scores['note'] in stderr
    assert scores['bleu'] <= scores['bleu_lowercased_tokenised'] and scores['exact_match'] == 0
    cases = [script('decode.py', f'--workdir={workdir}', '--input=-', stdin=text).stdout
             for text in (b'one two three\n', b'One TWO Three\n')]
    assert cases[0] == cases[1] and cases[0].strip()


@pytest.mark.slow
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


@pytest.mark.slow
def test_decoding_and_training_agree_on_the_perplexity(run):
    result = script('decode.py', f'--workdir={run[0]}', '--split=validation', '--checkpoint=latest', '--method=greedy')
    measured = json.loads((run[0] / 'metrics.jsonl').read_text().splitlines()[-1])
    assert json.loads(result.stdout)['perplexity'] == pytest.approx(measured['validation_perplexity'], rel=1e-4)
    assert json.loads(result.stdout)['bleu'] == pytest.approx(measured['validation_bleu'], rel=1e-6)


def test_a_failed_decode_leaves_the_old_output(run, tmp_path):
    (tmp_path / 'bad.txt').write_bytes(b'one\n\xff\n')
    (tmp_path / 'out.txt').write_text('precious')
    result = script('decode.py', f'--workdir={run[0]}', f'--input={tmp_path}/bad.txt', f'--output={tmp_path}/out.txt')
    assert result.returncode == 2 and b'bad.txt:2' in result.stderr
    assert (tmp_path / 'out.txt').read_text() == 'precious'


@pytest.mark.parametrize('model, flags, options, message', [
    (Echo(), {'input': 'none.txt'}, SearchOptions(), 'none.txt cannot be read'),
    (Echo(), {'input': 'in.txt', 'score': True}, SearchOptions(), 'in.txt:1: a line must be SOURCE<tab>TARGET'),
    (Parrot(), {'input': '-'}, SearchOptions(extra_length=65), 'extra_length=65: must be at most 64'),
    (Echo(), {'input': '-'}, SearchOptions(avoid=['a' * 1000]), 'avoid: the table for 1 phrases is too large')])
def test_a_wrong_request_leaves_the_incomplete_output_of_an_earlier_request(
        tmp_path, monkeypatch, model, flags, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constraints, 'MAX_ENTRIES', 10)
    monkeypatch.setattr(arriving, 'piped_lines', lambda: pytest.fail('a line is read'))
    Path('in.txt').write_text('one\n')
    Path('out.txt.partial').write_text('precious')
    with pytest.raises(UserError, match=message):
        answering.answer_file(Request(output='out.txt', **flags), model, options, None)
    assert Path('out.txt.partial').read_text() == 'precious'


@pytest.mark.parametrize('name', [
    'config.json', 'changes.jsonl', 'model.safetensors', 'lock', 'owner', 'data/source.model', 'metrics.jsonl',
    'recipe.py', 'checkpoints/6/x'])
def test_an_output_replaces_no_file_of_the_run(tmp_path, name):
    with pytest.raises(UserError, match=f'--output={tmp_path}/{name} is a file of the run itself'):
        Request(input='-', output=str(tmp_path / name)).check_files([tmp_path], [])


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
    stderr = result.stderr.decode()
    assert result.returncode == 2 and message in stderr and 'Traceback' not in stderr and 'Exception' not in stderr
    assert list(tmp_path.iterdir()) == [] and stat.S_ISCHR(os.stat('/dev/full').st_mode)


@pytest.mark.slow
def test_a_reader_that_leaves_ends_decoding(run):
    process = subprocess.Popen([sys.executable, 'decode.py', f'--workdir={run[0]}', '--input=-', '--method=greedy'],
                               cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    process.stdin.write(b'one\n')
    process.stdin.close()
    stderr = process.stderr.read().decode()
    assert process.wait(300) == 141 and 'Traceback' not in stderr and 'Exception' not in stderr


@pytest.mark.slow
def test_another_dtype_computes_in_it(run):
    as_trained, half = (inference.load(run[0], 'latest', dtype) for dtype in (None, 'bfloat16'))
    assert as_trained.config.model.dtype == 'float32' and half.config.model.dtype == 'bfloat16'
    output = as_trained.translate(['one two three'])[0]
    exact, rounded = ([each.probability for each in each_run.model.token_probabilities(output)]
                      for each_run in (as_trained, half))
    np.testing.assert_allclose(rounded, exact, rtol=0.2)
    assert rounded != exact
    assert half.translate(['one two three'])[0].hypotheses
    with pytest.raises(UserError, match="dtype='float64' must be one of float32, bfloat16"):
        inference.load(run[0], 'latest', 'float64')


@pytest.mark.slow
@pytest.mark.parametrize('flags, dtype, edits', [
    ({'without': 'cross:1:1'}, None, [Edit('zero', 'decoder/layers_0/cross_attention/heads', heads=[0])]),
    ({'edit': 'edits.json'}, None, [Edit('scale', 'decoder', 0.5)]), ({'dtype': 'bfloat16'}, 'bfloat16', [])])
def test_flags_that_change_the_model_change_its_scores(run, tmp_path, monkeypatch, flags, dtype, edits):
    monkeypatch.chdir(tmp_path)
    Path('pairs.tsv').write_text('one two\ttwo one\n')
    Path('edits.json').write_text(json.dumps([edit.as_json() for edit in edits]))
    search = dict.fromkeys(('method', 'beam', 'patience', 'n_best', 'seed', 'temperature', 'top_k', 'top_p'))
    answering.decode(Request(workdir=str(run[0]), input='pairs.tsv', output='scores', score=True, search=search,
                             **flags))
    unchanged, changed = (opened.forced([('one two', 'two one')])[0].hypotheses[0].log_prob for opened in (
        inference.load(run[0]), inference.load(run[0], dtype=dtype).edited(edits)))
    assert float(Path('scores').read_text()) == pytest.approx(changed, abs=1e-5)
    assert abs(changed - unchanged) > 1e-4


@pytest.mark.parametrize('workdir, kind, options, attributes, flags, message', [
    ('{}', 'transformer', {}, {}, {'look': 'cross:9:1', 'pictures': '{}/p'}, "there is no layer '9'"),
    ('{}', 'rnnsearch', {'recurrent': {'attention': False}}, {}, {}, 'this model has no attention weights'),
    ('{}', 'patches', {}, {'shape': (2, 2, 2, 1), 'attention': lambda example: {}}, {}, '--explain supports only'),
    ('{},{}', 'transformer', {}, {}, {'look': 'positions', 'pictures': '{}/p'}, '^--explain cannot be used with'),
    ('{}', 'language_model', {}, {}, {'look': 'positions', 'pictures': '{}/p'}, 'the run has model.position=learned'),
    ('{}', 'rnnsearch', {}, {}, {'look': 'positions', 'pictures': '{}/p'}, 'the run has model.kind=rnnsearch'),
])
def test_attention_that_cannot_be_shown_is_refused_before_a_split_is_scored(
        tmp_path, monkeypatch, workdir, kind, options, attributes, flags, message):
    run: Any = random_run(kind, **options)
    run.workdirs = [tmp_path] * len(workdir.split(','))
    vars(run.model).update(attributes)
    monkeypatch.setattr(answering, 'read_config', lambda path: run.config)
    monkeypatch.setattr(answering, 'load', lambda *arguments: run)
    monkeypatch.setattr(answering, 'score_splits', lambda *arguments: pytest.fail('the split is scored'))
    names = {'workdir': workdir, 'explain': '{}/page.html', **flags}
    with pytest.raises(UserError, match=message):
        answering.decode(Request(split='test', search={'seed': None}, **{
            name: value.replace('{}', str(tmp_path)) for name, value in names.items()}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('kind, expected', [
    ('transformer', sinusoids(np.arange(100), 8)), ('language_model', sinusoids(np.arange(100), 8)),
    ('patches', grid_sinusoids((4, 4), 8))])
def test_the_positions_of_the_run_are_drawn(tmp_path, monkeypatch, kind, expected):
    run, figures = random_run(kind, position='sinusoidal'), {}
    monkeypatch.setattr(answering, 'read_config', lambda path: run.config)
    monkeypatch.setattr(answering, 'load', lambda *arguments: run)
    monkeypatch.setattr(answering, 'score_splits', lambda *arguments: None)
    monkeypatch.setattr(answering, 'save_figure', lambda figure, path: figures.update({path: figure}))
    answering.decode(Request(workdir=str(tmp_path), split='test', look='positions', pictures=str(tmp_path / 'p'),
                             search={'seed': None}))
    image, = figures.pop(tmp_path / 'p' / 'positions.png').axes[0].images
    np.testing.assert_allclose(image.get_array(), expected, atol=1e-5)


class Pairs(PairData):
    """Pairs of the splits that it was made of."""

    def __init__(self, splits):
        self.pairs, self._source = splits.__getitem__, None  # no split is held out from files


class Images(LabelledData):
    """The images of the arrays that it was made of."""

    def __init__(self, arrays):
        self.arrays = self._source = arrays


@pytest.fixture
def scoring(tmp_path, monkeypatch):
    """A function that scores pairs as decode.py --split=test does, with random parameters, and returns the results."""
    monkeypatch.setattr(answering, 'changed_data', lambda *arguments: [])

    def score_pairs(request, pairs, **attributes):
        run = random_run('transformer')
        run.workdir, run.workdirs = tmp_path, [tmp_path]
        run.model.max_length = 8
        vars(run.model).update(attributes)
        run.data = lambda: Pairs(pairs)
        answering.score_splits(request, run, ['test'], SearchOptions(method='greedy', extra_length=2), None)
        return json.loads((tmp_path / 'results' / 'test.json').read_text())

    return score_pairs


@pytest.mark.slow
def test_references_longer_than_a_translation_are_scored_in_their_buckets(scoring):
    """They are scored as in the perplexity: the log-probabilities of both references are the whole cross-entropy."""
    references = ['eno', 'x' * 40]
    pairs = {'test': [('one', references[0]), ('two', references[1])]}
    results = scoring(Request(split='test', by='target_length'), pairs)
    [bucket] = results['by']['target_length']
    tokens = sum(len(reference) + 1 for reference in references)
    assert -2 * bucket['scores']['log_prob'][0] / tokens == pytest.approx(np.log(results['perplexity']), rel=1e-5)


@pytest.mark.parametrize('split', ['train', 'test'])
def test_images_that_were_saved_again_in_another_encoding_give_the_same_results(tmp_path, monkeypatch, split):
    monkeypatch.setattr(answering, 'changed_data', lambda *arguments: [])
    images = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 1), np.uint8)
    run: Any = random_run('patches')
    run.workdir, run.workdirs = tmp_path, [tmp_path]
    run.model.form = dataclasses.replace(run.model.form, dtype='uint8', encoding='bytes')

    def results(inputs):
        run.data = lambda: Images(in_memory(inputs, np.arange(9) % 3))
        shown = []
        monkeypatch.setattr(answering, 'draw_examples', lambda *arguments: shown.append(arguments[2].outputs))
        request = Request(split=split, pictures=str(tmp_path / 'pictures'), picture_count=2)
        answering.score_splits(request, run, [split], SearchOptions(), None)
        mean = run.edited([Edit('mean', 'pooled', split)])._numbers[-1]['pooled']
        return [(tmp_path / f'results/{split}.json').read_text(), shown[0].tolist(), np.asarray(mean).tolist()]

    assert results((images / 255).astype(np.float32)) == results(images)


@pytest.fixture
def score_held_out(cache, tmp_path, monkeypatch, caplog):
    """A function that writes a table and scores a split that is held out from it. Returns the log and the data.

    The first table is the data on which the run was trained.
    """
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    monkeypatch.setattr(answering, 'score_split', lambda *arguments: {})

    def score(name, file, lines, options, split):
        path, kept, config = tmp_path / file, tmp_path / 'run/data/fingerprints.json', recipe(name)
        place = {'data.file': str(path)} if name == 'co2_forecast' else {'data.dir': str(tmp_path)}
        config.update_from_flattened_dict({'cache_dir': str(cache), 'data.source': 'files', **place, **options})
        path.write_text('\n'.join(lines) + '\n')
        data: Any = open_data(config)
        if not kept.exists():
            kept.parent.mkdir(parents=True)
            kept.write_text(json.dumps({each: data.fingerprint(each) for each in ('train', 'validation')}))
        run: Any = types.SimpleNamespace(workdir=tmp_path / 'run', data=lambda: data)
        caplog.clear()
        answering.score_splits(Request(split=split), run, [split], SearchOptions(), None)
        return caplog.text, data

    return score


@pytest.mark.parametrize('name, file, header, row, options', [
    ('demo', 'train.tsv', '', '{0}\t{1}', {'data.tokenizer.kind': 'char'}),
    ('stdlib_lm', 'train.txt', '', '{0} {1}', {'data.tokenizer.kind': 'char', 'data.documents': 'line'}),
    ('pendulum', 'train.csv', 'series,x,target', '{0},{0},{1}', {}),
    ('co2_forecast', 'train.csv', 'x', '{1}', {'data.context': 4, 'data.horizon': 2, 'data.season': 1}),
])
def test_a_test_split_that_is_held_out_from_changed_training_data_is_warned_of(name, file, header, row, options,
                                                                              score_held_out):
    def warnings(count):
        lines = [header] * bool(header) + [row.format(number, number ** 2) for number in range(count)]
        return score_held_out(name, file, lines, options, 'test')[0]

    assert 'may contain examples' not in warnings(60)
    assert re.search(rf'trained: {file}.*\. The test split is held out .* may contain examples', warnings(90))


def test_an_unchanged_split_that_is_held_out_from_changed_training_data_is_not_warned_of(score_held_out):
    """A target of a training example changes. The run has a fingerprint of the validation split, but not of 'test'."""
    lines = ['series,x,target', *(f'{number},{number},{number ** 2}' for number in range(60))]
    _, data = score_held_out('pendulum', 'train.csv', lines, {}, 'validation')
    lines[1 + int(data.arrays.inputs('train')[0, 0, 0])] += '1'
    assert 'differs' not in score_held_out('pendulum', 'train.csv', lines, {}, 'validation')[0]
    assert 'may contain examples' in score_held_out('pendulum', 'train.csv', lines, {}, 'test')[0]


def test_a_missing_training_split_is_reported_before_a_split_is_translated(scoring):
    with pytest.raises(KeyError, match='train'):
        scoring(Request(split='test', by='frequency'), {'test': [('one', 'eno')]}, translate=None)


@pytest.mark.slow
def test_empty_targets_have_the_attention_of_their_end_token(tmp_path):
    model, page = random_run('transformer').model, Page(tmp_path / 'page.html', '', 5)
    request = Request(input='-', score=True, format='jsonl', attention=True, pictures=str(tmp_path / 'pictures'))
    report = answering.Report(model, scored=False)
    first, second = (json.loads(answering.output_line(request, report, answer, number, 1, page))
                     for number, answer in enumerate(model.forced_all([('one', ''), ('', '')]), 1))
    assert np.shape(first['attention'])[2:] == (1, 4) and np.shape(second['attention'])[2:] == (1, 1)
    assert page.count == 2 == len([*(tmp_path / 'pictures').iterdir()])


@pytest.mark.parametrize('score', [True, False])
def test_an_empty_pair_is_shown_and_an_empty_line_is_not(score, tmp_path, monkeypatch):
    model = Echo()
    monkeypatch.setattr(model, 'attention', lambda output: {'cross': np.ones((1, 1, 1, 1))})
    monkeypatch.setattr(model, 'token_probabilities', lambda *_: [])
    request, page = Request(input='-', score=score, format='jsonl', attention=True), Page(tmp_path / 'page.html', '', 5)
    line = json.loads(answering.output_line(request, answering.Report(model, scored=False),
                                            Output('', [], [Hypothesis('', [], -1.0, -1.0)]), 1, 1, page))
    assert (page.count, line.get('attention')) == ((1, [[[[1.0]]]]) if score else (0, None))


def test_a_prompt_with_an_empty_continuation_has_attention(monkeypatch):
    model, request = Parrot(), Request(input='-', format='jsonl', attention=True)
    monkeypatch.setattr(model, 'attention', lambda output: {'encoder': np.zeros((1, 1, 2, 2))})
    report = answering.Report(model, scored=False)
    first, second = (json.loads(answering.output_line(request, report, answer, number, 1, None))
                     for number, answer in enumerate(model.generate(['ab', 'a'], SearchOptions(
                         method='greedy', extra_length=0)), 1))
    assert np.shape(first['attention']) == (1, 1, 2, 2)
    assert 'attention' not in second, 'a single token is not predicted'


def test_home_folders_in_the_names_of_files_are_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv('HOME', str(tmp_path))
    request = Request(**dict.fromkeys(FILES, '~/file'))
    assert {getattr(request, name) for name in FILES} == {f'{tmp_path}/file'}
    assert Request(input='-').input == '-' and Request(input='./-').input == './-'  # stdin, and a file


@pytest.mark.slow
def test_no_pictures_are_drawn_if_their_number_is_0(scoring, tmp_path):
    request = Request(split='test', pictures=str(tmp_path / 'pictures'), picture_count=0)
    assert scoring(request, {'test': [('one', 'eno')]})['n'] == 1
    assert not (tmp_path / 'pictures').exists()
    assert random_run('transformer').model.examples(Pairs({'test': [('one', 'eno')]}), 'test', 0, SearchOptions()) == []
