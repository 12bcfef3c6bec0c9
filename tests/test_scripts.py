"""The scripts as a user runs them: train, resume, decode, and run directories of unknown origin."""

import io
import json
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import inference
from analysis.compare import is_metric, load_runs
from configs import base
from configs.options import flatten
from inference.options import SearchOptions, search_options
from runtime.errors import UserError
from tests.scripts import ROOT, parameters, script, train_arguments
from tools.show_run import describe


def test_a_run_directory_holds_everything(run):
    workdir, log = run
    assert {'config.json', 'data', 'checkpoints', 'metrics.jsonl', 'tensorboard'} <= {
        path.name for path in workdir.iterdir()}
    lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines if 'train_loss' in line] == [4, 8, 12, 16, 20, 24]
    assert [line['step'] for line in lines if 'validation_bleu' in line] == [12, 24]
    assert all(map(is_metric, {name for line in lines for name in line} - {'step'}))  # values of sweep.py --metric
    evaluated = lines[-1]
    assert {'validation_loss', 'validation_perplexity', 'validation_accuracy', 'validation_bleu'} <= evaluated.keys()
    events = b''.join(path.read_bytes() for path in (workdir / 'tensorboard').iterdir())
    assert b'samples/text_summary' in events and b'attention' in events and b'PNG' in events
    assert log.count('    ? ') == 6  # three translations at each of two evaluations
    assert 'dropped 1 pairs with an empty side, and 1 with more than 24 tokens' in log
    assert 'compilations of the train step' in log


@pytest.mark.slow
def test_the_config_is_printed_as_flags_that_make_it_again(data, cache, tmp_path):
    arguments = [argument for argument in train_arguments(tmp_path / 'run', data, cache) if '--workdir' not in argument]
    printed = script(*arguments, '--print_config')
    assert printed.returncode == 0 and not (tmp_path / 'run').exists()
    options = shlex.split(printed.stdout.decode())
    assert len(options) == len(flatten(base.get_config())) and set(arguments[2:]) <= set(options)
    assert b'options differ from the defaults in configs/options.py: ' in printed.stderr
    again = script('train.py', '--config=configs/base.py', *options, '--print_config')
    assert again.stdout == printed.stdout


def test_show_run_prints_a_summary_of_a_run(run):
    shown = dict(describe(load_runs(run[0])[0]))
    parameters_shown = int(shown['model'][1].split()[0].replace(',', ''))
    assert parameters_shown == sum(leaf.size for leaf in parameters(run[0]))
    assert shown['checkpoints'][0].startswith('12 (')


def test_starting_a_finished_run_again_does_nothing(run, data, cache):
    workdir, _ = run
    before = (workdir / 'metrics.jsonl').read_text()
    again = script(*train_arguments(workdir, data, cache))
    assert again.returncode == 0 and b'finished' in again.stderr
    assert (workdir / 'metrics.jsonl').read_text() == before


@pytest.mark.slow
def test_a_run_killed_twice_ends_bit_for_bit_as_an_uninterrupted_run(run, data, cache, tmp_path):
    workdir = tmp_path / 'killed'
    arguments = train_arguments(workdir, data, cache)
    for checkpoint in (6, 12):
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stderr=subprocess.DEVNULL)
        deadline = time.time() + 600
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
    assert b'model.d_ff: 32 in the run, 64 now' in result.stderr and b'optimizer.peak' in result.stderr
    assert b'Traceback' not in result.stderr
    assert (workdir / 'config.json').read_text() == before


def test_a_directory_of_other_files_is_not_used(data, cache, tmp_path):
    (tmp_path / 'thesis.tex').write_text('precious')
    result = script(*train_arguments(tmp_path, data, cache))
    assert result.returncode == 2 and b'is not empty and has no config.json' in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ['thesis.tex']


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


@pytest.mark.slow
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
