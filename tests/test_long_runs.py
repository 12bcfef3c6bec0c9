"""Long runs: checkpoints by the clock, the profiler, the cost of compilation, and memory."""

import importlib.util
import itertools
import json
import re
import shutil
import time
import types
from pathlib import Path

import pytest

from configs import demo
from input_pipeline import builtin
from input_pipeline.data import open_data
from runtime.errors import UserError
from tests.tiny_run import log, outcome, start, steps, tiny_config  # noqa: F401 (fixture)
from training import loop, profiling


@pytest.mark.parametrize('minutes, last, expected', [
    (0.3, 3, [1, 2, 3]), pytest.param(1.0, 12, [3, 6, 9, 12], marks=pytest.mark.slow)])
def test_minutes_between_checkpoints(tmp_path, cache, monkeypatch, minutes, last, expected):
    clock = itertools.count(0.0, 20.0).__next__  # read before the first step, in each step and after each save
    monkeypatch.setattr(loop, 'time', types.SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter))
    start(tmp_path / 'run', tiny_config(cache, checkpoint__every=1000, checkpoint__every_minutes=minutes,
                                        checkpoint__keep_last=99, eval__every=1000, train__steps=last,
                                        optimizer__warmup=1))
    assert steps(tmp_path / 'run') == expected


@pytest.mark.slow
def test_a_resume_draws_the_segmentations_that_it_would_have_drawn(tmp_path, cache):
    """With BPE-dropout, a stop within an epoch leads to the same parameters, bit for bit, as no stop."""
    (tmp_path / 'data').mkdir()
    pairs = builtin.make_corpus('en', 'fr', seed=0, sizes={'train': 90})
    for split, count in ('train', 90), ('validation', 8):
        lines = zip(*pairs['train'][:count], strict=True)
        for language, text in zip(('en', 'fr'), lines, strict=True):
            (tmp_path / 'data' / f'{split}.{language}').write_text('\n'.join(text) + '\n')
    config = demo.get_config()
    config.update_from_flattened_dict({
        'cache_dir': str(cache), 'data.source': 'files', 'data.dir': str(tmp_path / 'data'), 'data.seed': 0,
        'data.plain_spaces': 0.5, 'data.tokenizer.vocab_size': 420, 'data.tokenizer.dropout': 0.2,
        'model.num_layers': 1, 'model.d_model': 16, 'model.d_ff': 32, 'model.num_heads': 2, 'batch.tokens': 1536,
        'batch.buckets': 2, 'optimizer.warmup': 4, 'train.steps': 16, 'train.log_every': 1, 'eval.every': 8,
        'checkpoint.every': 5, 'checkpoint.keep_last': 9, 'eval.metric': 'loss', 'eval.bleu_sentences': 2})
    start(tmp_path / 'run', config)
    plan = open_data(config).plan('train')
    assert 10 % len(plan) and len(plan) < 8, 'it stops within an epoch that is not the first'
    shutil.copytree(tmp_path / 'run', tmp_path / 'copy')
    for step in 15, 16:
        shutil.rmtree(tmp_path / 'copy' / 'checkpoints' / str(step))
    start(tmp_path / 'copy', config)
    assert outcome(tmp_path / 'copy') == outcome(tmp_path / 'run')


@pytest.mark.slow
def test_the_profile_and_what_is_measured(tmp_path, cache, caplog):
    caplog.set_level('INFO', logger='allyouneed')
    start(tmp_path / 'run', tiny_config(cache, train__steps=5), '3:4')
    traces = list((tmp_path / 'run' / 'tensorboard' / 'plugins' / 'profile').rglob('*'))
    assert any(path.name.endswith('.xplane.pb') and path.stat().st_size > 1000 for path in traces)
    assert any(path.name == 'perfetto_trace.json.gz' and path.stat().st_size > 1000 for path in traces)
    [advice] = re.findall('profile, run (tensorboard --logdir=.*), or open perfetto_trace.json.gz below', caplog.text)
    missing = [name for name in ('tensorboard', 'xprof') if importlib.util.find_spec(name) is None]
    assert advice.endswith(f'(after pip install {" ".join(missing)})' if missing else '/tensorboard')
    assert re.search(r'compilation 1: batches of 64, \d+\.\d s', caplog.text)
    evaluated = json.loads((tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()[-1])
    assert evaluated['compile_seconds'] > 0 and 0.1 < evaluated['resident_gb'] < 100


@pytest.mark.slow
def test_the_peak_that_is_logged_is_the_peak_of_linux(tmp_path, cache, caplog):
    caplog.set_level('INFO', logger='allyouneed')
    if not Path('/proc/self/status').exists():
        pytest.skip('asks Linux')
    start(tmp_path / 'run', tiny_config(cache, train__steps=1))
    kilobytes = int(re.search(r'VmHWM:\s+(\d+) kB', Path('/proc/self/status').read_text())[1])
    logged = float(re.search(r'peak memory (\d+\.\d+) GiB', caplog.text)[1])
    assert logged == pytest.approx(kilobytes / 2 ** 20, abs=0.02)


def test_a_window_of_steps_that_a_resumed_run_has_made_is_reported(copy, cache, monkeypatch, log):
    monkeypatch.setattr(loop, 'train_steps', lambda *_: None)
    start(copy, tiny_config(cache), '2:9')
    assert '--profile_steps=2:9 has no effect, because this run resumes at step 9. To profile' in log.text


@pytest.mark.parametrize('leader', [True, False])
def test_only_the_leader_traces_and_the_training_continues_if_the_trace_cannot_be_written(tmp_path, monkeypatch, caplog,
                                                                                          leader):
    def stop_trace():
        calls.append('stop')
        raise ValueError('Invalid trace folder')

    calls = []
    monkeypatch.setattr(profiling, 'is_leader', lambda: leader)
    monkeypatch.setattr('jax.profiler.start_trace', lambda *_, **__: calls.append('start'))
    monkeypatch.setattr('jax.profiler.stop_trace', stop_trace)
    profiler = profiling.ProfilerWindow('2:3', tmp_path)
    for step in range(1, 5):
        profiler.before(step)
        profiler.after(step, None)
    assert calls == (['start', 'stop'] if leader else [])
    assert ('the profile cannot be written (Invalid trace folder)' in caplog.text) == leader


@pytest.mark.parametrize('window', ['5', '5:', 'a:b', '0:3', '7:5', '-1:4'])
def test_a_malformed_profiler_window_is_refused(tmp_path, cache, window):
    with pytest.raises(UserError, match='--profile_steps=.*such as 100:110'):
        start(tmp_path / 'run', tiny_config(cache), window)
