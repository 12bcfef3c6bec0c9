"""Faults during a training, after which nothing is lost: the table of docs/faults.md."""

import contextlib
import errno
import itertools
import json
import os
import queue
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import inference
from input_pipeline.array_batches import ArrayPlan
from model.build import build_model
from run_directory.checkpoints import Checkpoints
from run_directory.progress import due_at
from run_directory.records import read_metrics
from runtime import preemption
from runtime.errors import UserError, full_disk, full_disk_explained
from runtime.stopping import SAME_REQUEST
from tests.tiny_run import log, outcome, script_arguments, start, steps, tiny_config  # noqa: F401 (fixture)
from training import loop
from training.metrics import MetricsWriter
from training.optimizer import make_optimizer

ROOT = Path(__file__).parent.parent


def at_batch(monkeypatch, number, act):
    """Replaces batch `number` of the training, counted from 0, by `act(batch)`."""
    batch = ArrayPlan.batch

    def changed(self, step, *part):
        made = batch(self, step, *part)
        return act(made) or made if step == number and self._split == 'train' else made
    monkeypatch.setattr(ArrayPlan, 'batch', changed)


# Damaged checkpoints

def files_of(checkpoint):
    return sorted(path for path in checkpoint.rglob('*') if path.is_file())


def flip(path):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle:middle + 64] = (byte ^ 0x10 for byte in content[middle:middle + 64])
    path.write_bytes(content)


def damage_values(checkpoint):
    """Returns the file that contains the arrays."""
    [path] = (checkpoint / 'state' / 'd').iterdir()
    flip(path)


DAMAGES = {'flipped': flip, 'truncated': lambda path: os.truncate(path, path.stat().st_size // 2), 'missing': os.remove}


@pytest.mark.parametrize('damage', DAMAGES)
def test_whatever_file_is_damaged_the_state_is_the_one_saved_or_refused(whole, tmp_path, damage):
    """Some files are not needed. No damage may change the values that are read."""
    expected, _ = Checkpoints(whole).parameters('9')
    shutil.copytree(whole / 'checkpoints' / '9', tmp_path / 'checkpoints' / '9')
    found_out = 0
    for path in files_of(tmp_path / 'checkpoints' / '9'):
        former = path.read_bytes()
        if not former and damage != 'missing':
            continue
        DAMAGES[damage](path)
        try:
            params, _ = Checkpoints(tmp_path).parameters('9')
            jax.tree.map(np.testing.assert_array_equal, params, expected)
        except UserError as error:
            found_out += 1
            assert f'{tmp_path}/checkpoints/9 is damaged' in str(error)
        path.write_bytes(former)
    assert found_out >= 3


def test_the_newest_readable_checkpoint_is_used_and_the_end_is_the_same(whole, copy, cache, monkeypatch, log):
    damage_values(copy / 'checkpoints' / '9')
    shutil.copytree(copy / 'checkpoints' / '9', copy / 'damaged')
    with monkeypatch.context() as patch:  # killed before it saves anything
        patch.setattr(loop, 'train_steps', lambda *_: None)
        start(copy, tiny_config(cache))
    assert re.search(r'checkpoints/9 is damaged: .+\. The damaged .+ and an older checkpoint is used', log.text)
    assert 'resuming from step 8' in log.text and steps(copy) == [8, 9]
    start(copy, tiny_config(cache))
    assert outcome(copy) == outcome(whole)
    for path in files_of(copy / 'damaged'):  # moved unchanged when its place was needed
        aside = copy / 'checkpoints' / '9.damaged' / path.relative_to(copy / 'damaged')
        assert aside.read_bytes() == path.read_bytes()


def test_no_readable_checkpoint_is_an_error_and_no_fresh_start(copy, cache):
    for step in steps(copy):
        (copy / 'checkpoints' / str(step) / 'progress' / 'metadata').write_text('{"progress": {}')
    before = (copy / 'metrics.jsonl').read_text()
    with pytest.raises(UserError, match='every checkpoint in .* is damaged .steps 8, 9.'):
        start(copy, tiny_config(cache))
    assert (copy / 'metrics.jsonl').read_text() == before


def test_decoding_falls_back_from_the_latest_but_not_from_a_choice(copy, log):
    damage_values(copy / 'checkpoints' / '9')
    assert inference.load(copy, 'latest').checkpoint == [8]
    assert 'checkpoints/9 is damaged' in log.text
    for choice in ('9', 'average:2'):
        with pytest.raises(UserError, match=r'checkpoints/9 is damaged.*Choose another checkpoint: .*8'):
            inference.load(copy, choice)


def wider(options, **sizes):
    options = options.copy_and_resolve_references()
    options.d_model = 32
    return build_model(options, **sizes)


CHANGES = {
    'clip added': ('make_optimizer', lambda config, *rest: make_optimizer(dict(config) | {'clip': 1.0}, *rest)),
    'moments of another type': ('make_optimizer', lambda _, schedule, *rest: optax.adam(schedule, mu_dtype='bfloat16')),
    'a wider model': ('build_model', wider),
}


@pytest.mark.parametrize('change', CHANGES)
def test_code_that_makes_another_state_cannot_resume_and_changes_no_file(copy, cache, monkeypatch, log, change):
    """The config is unchanged, as with another version of the code or of optax."""
    name, changed = CHANGES[change]
    before = {path: path.read_bytes() for path in files_of(copy / 'checkpoints')}
    metrics = (copy / 'metrics.jsonl').read_text()
    monkeypatch.setattr(loop, name, changed)
    with pytest.raises(UserError, match=r'checkpoints/9 has other arrays.*not damaged'):
        start(copy, tiny_config(cache))
    assert {path: path.read_bytes() for path in files_of(copy / 'checkpoints')} == before
    assert (copy / 'metrics.jsonl').read_text() == metrics and 'older checkpoint is used' not in log.text


# Signals

@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('number, step', [(signal.SIGTERM, 7), (signal.SIGINT, 9)])
def test_a_signal_saves_and_the_end_is_the_same(whole, tmp_path, cache, monkeypatch, log, number, step):
    """At a step that is saved only because of the signal, or at a step that is always saved."""
    make_step = loop.make_step

    def signalled(compiled, state, *rest):
        if int(state.step) == step - 1:
            signal.raise_signal(number)
        return make_step(compiled, state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop, 'make_step', signalled)
        with pytest.raises(SystemExit) as stopped:
            start(tmp_path / 'run', tiny_config(cache))
    assert stopped.value.code == 75 and steps(tmp_path / 'run')[-1] == step
    assert f'stopped by {number.name}: at step {step}, which is saved. Run the same command again' in log.text
    assert signal.getsignal(number) not in (None, signal.SIG_IGN)
    written = json.loads((tmp_path / 'run' / 'checkpoints' / str(step) / 'progress' / 'metadata').read_text())
    assert (step in written['last_scheduled']) == due_at(step, tiny_config(cache)).save
    start(tmp_path / 'run', tiny_config(cache))
    assert outcome(tmp_path / 'run') == outcome(whole)


@pytest.mark.slow
def test_an_evaluation_that_is_interrupted_is_done_again(whole, tmp_path, cache, monkeypatch, log):
    evaluate = loop.evaluate

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, 'evaluate', interrupted)
        with pytest.raises(SystemExit) as stopped:
            start(tmp_path / 'run', tiny_config(cache))
    assert stopped.value.code == 75 and 'during the evaluation of step 4, which is saved' in log.text
    assert steps(tmp_path / 'run') == [3, 4]
    start(tmp_path / 'run', tiny_config(cache))
    assert outcome(tmp_path / 'run') == outcome(whole)


def test_a_signal_before_the_loop_ends_at_once(tmp_path, cache, monkeypatch, log):
    monkeypatch.setattr(loop, 'open_data', lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as stopped:
        start(tmp_path / 'run', tiny_config(cache))
    assert stopped.value.code == 75 and 'stopped by SIGTERM: nothing is lost' in log.text
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once_even_where_python_waits(number):
    # The main thread is busy in C, as in a compilation, so no Python handler runs.
    code = ('import hashlib; from runtime.preemption import StopSignals\n'
            'with StopSignals() as stop, stop.at_a_step():\n'
            '    print("ready", flush=True); hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10 ** 8)')
    with subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(number)
        while b'Send the signal again' not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(SAME_REQUEST)
        process.send_signal(number)
        assert process.wait(300) == 128 + number


def test_a_second_signal_ends_at_once_even_if_stderr_cannot_be_written(monkeypatch):
    def broken(*_):
        raise BrokenPipeError

    ended = queue.Queue()
    monkeypatch.setattr(preemption, 'SAME_REQUEST', 0)
    monkeypatch.setattr(preemption.os, 'write', broken)
    monkeypatch.setattr(preemption.os, '_exit', ended.put)
    with preemption.StopSignals() as stop, stop.at_a_step():
        for number in signal.SIGTERM, signal.SIGINT:
            os.kill(os.getpid(), number)
        assert ended.get(timeout=120) == 128 + signal.SIGINT


@pytest.mark.parametrize('exits', [True, False], ids=['command', 'notebook'])
def test_one_request_to_stop_may_arrive_as_two_signals(exits):
    code = ('import os, signal, time; from runtime import preemption\n'
            'preemption.SAME_REQUEST = 600\n'
            f'with preemption.StopSignals(exits={exits}) as stop, stop.at_a_step():\n'
            '    for number in (signal.SIGINT, signal.SIGTERM):\n'
            '        os.kill(os.getpid(), number); time.sleep(0.1)\n'
            'stop.leave("saved")')
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, timeout=600).returncode == 75


# A full disk

def on_a_small_disk(tmp_path, arguments, size):
    """Runs train.py in a mount namespace in which the folder of RUN is a tmpfs of `size` bytes. Copies RUN back."""
    script = (f'mkdir -p {tmp_path}/small && mount -t tmpfs -o size={size} none {tmp_path}/small && '
              f'{{ cp -r {tmp_path}/before {tmp_path}/small/run 2>/dev/null; {shlex.join(arguments)}; status=$?; '
              f'cp -r {tmp_path}/small/run {tmp_path}/after; exit $status; }}')
    return subprocess.run(['unshare', '-rm', 'sh', '-c', script], cwd=ROOT, capture_output=True, text=True, timeout=300)


def mounting_is_allowed():
    with contextlib.suppress(OSError):
        return not subprocess.run(['unshare', '-rm', 'mount', '-t', 'tmpfs', 'none', '/mnt'],
                                  capture_output=True).returncode
    return False


@pytest.mark.slow
@pytest.mark.skipif(not mounting_is_allowed(), reason='needs a user namespace in which a tmpfs can be mounted')
def test_a_full_disk_is_reported_and_the_previous_checkpoint_is_valid(tmp_path, cache):
    arguments = script_arguments(tmp_path / 'small' / 'run', tiny_config(
        cache, checkpoint__every=1, checkpoint__keep_last=99, eval__every=1000, train__steps=1000, train__log_every=1))
    done = on_a_small_disk(tmp_path, arguments, 1_000_000)
    assert done.returncode == 2, done.stderr
    error = done.stderr[done.stderr.index('error: '):]
    assert 'cannot be written: No space left on device' in error and 'run the same command again' in error
    assert 'Traceback' not in error
    if 'The checkpoint of step' in error:
        assert f'The checkpoint of step {steps(tmp_path / "after")[-1]} is still valid' in error
    assert inference.load(tmp_path / 'after', 'latest').checkpoint == steps(tmp_path / 'after')[-1:]


@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_metrics_on_a_full_disk(tmp_path, monkeypatch, number):
    writer = MetricsWriter(tmp_path, 0)

    def full(*_):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(writer._events, 'flush', full)
    with pytest.raises(UserError, match=f'metrics.jsonl .* cannot be written: {os.strerror(number)}. The checkpoints'):
        writer.write(1, {'loss': 1.0})


def test_a_background_save_that_has_failed_is_reported_at_the_next_log_line(copy, cache, monkeypatch):
    def fail():
        raise UserError('the disk is full')

    def failing(self, *arguments, save=Checkpoints.save, **options):
        save(self, *arguments, **options)
        self.wait()
        self.wait = fail

    monkeypatch.setattr(Checkpoints, 'save', failing)
    with pytest.raises(UserError, match='the disk is full'):  # saves step 10, and otherwise only step 12
        start(copy, tiny_config(cache, checkpoint__every=10, eval__every=1000, train__log_every=1))
    assert read_metrics(copy)[-1]['step'] == 11


def test_the_words_of_a_library_around_the_system_s_error_are_understood():
    try:
        try:
            raise ValueError('RESOURCE_EXHAUSTED: Error writing "/a/b": [OS error 28: ENOSPC No space left on device]')
        except ValueError as inner:
            raise RuntimeError('Failed to save') from inner
    except RuntimeError as error:
        assert full_disk(error) == 'No space left on device'
    assert full_disk(ValueError('something else')) is None


def test_a_full_disk_is_explained_once_where_it_was_met():
    with (pytest.raises(UserError, match='^the log is full$'), full_disk_explained(lambda *_: 'something is full'),
          full_disk_explained(lambda *_: 'the log is full')):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Losses that are not finite

def poisoned(batch):
    batch['weights'][0] = np.nan
    return batch


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_shows_how_to_see_the_batch(whole, tmp_path, cache, monkeypatch):
    at_batch(monkeypatch, 7, poisoned)
    with pytest.raises(UserError, match='step 8: the loss or the gradient is not finite') as error:
        start(tmp_path / 'a run', tiny_config(cache))
    assert steps(tmp_path / 'a run')[-1] == 6
    command = next(line for line in str(error.value).splitlines() if 'tools.show_batch' in line)
    assert command.endswith(' --step=7') and f"--workdir='{tmp_path}/a run'" in command
    shown = subprocess.run(command.replace('python', shlex.quote(sys.executable), 1), shell=True, cwd=ROOT,
                           capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert len(shown.stdout.splitlines()) == 64

    # The same error again, unless train.skip_nonfinite allows a skip. A resume may set it, and counts earlier skips.
    with pytest.raises(UserError, match='step 8'):
        start(tmp_path / 'a run', tiny_config(cache))
    start(tmp_path / 'a run', tiny_config(cache, train__skip_nonfinite=1))
    start(tmp_path / 'other', tiny_config(cache, train__skip_nonfinite=1))
    assert outcome(tmp_path / 'a run') == outcome(tmp_path / 'other')
    _, lines = outcome(tmp_path / 'other')
    assert [line['skipped_steps'] for line in lines if 'skipped_steps' in line] == [0, 1, 1]
    assert all(np.isfinite(value) for line in lines for value in line.values())
    assert lines != outcome(whole)[1]
    at_batch(monkeypatch, 10, poisoned)
    shutil.rmtree(tmp_path / 'other' / 'checkpoints' / '12')
    with pytest.raises(UserError, match='step 11: .* after 1 skipped step'):
        start(tmp_path / 'other', tiny_config(cache, train__skip_nonfinite=1))


@pytest.mark.slow
def test_the_learning_rate_that_is_logged_is_the_one_that_was_used(tmp_path, cache, monkeypatch):
    """Computed from the updates of Adam. Two steps are skipped, and the cosine still ends at its last value."""
    at_batch(monkeypatch, 2, poisoned)
    at_batch(monkeypatch, 6, poisoned)
    states, step = [], loop.Compiled.train

    def watched(self, state, batch):
        states.append(jax.device_get(state))
        return step(self, state, batch)

    monkeypatch.setattr(loop.Compiled, 'train', watched)
    monkeypatch.setattr(loop.Checkpoints, 'save', lambda self, number, state, *_, **__: (
        number == 12 and states.append(jax.device_get(state))))
    config = tiny_config(cache, train__skip_nonfinite=2, train__log_every=1, eval__every=99, checkpoint__every=99,
                         optimizer__schedule='cosine', optimizer__peak=0.01, optimizer__final=0.0,
                         optimizer__weight_decay=0.0, optimizer__clip=0.0)
    start(tmp_path / 'run', config)
    lines = map(json.loads, (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines())
    logged = [line['learning_rate'] for line in lines if 'learning_rate' in line]
    assert len(logged) == 12 and len(states) == 13
    beta1, beta2, eps = (config.optimizer[name] for name in ('beta1', 'beta2', 'eps'))
    for number, (before, after) in enumerate(itertools.pairwise(states)):
        adam = optax.tree_utils.tree_get(after.opt_state, 'ScaleByAdamState')
        moved, mean, square = (tree['head']['kernel'].astype(np.float64) for tree in (
            jax.tree.map(np.subtract, before.params, after.params), adam.mu, adam.nu))
        if number in (2, 6):
            assert not moved.any()
            continue
        count = int(adam.count)
        direction = mean / (1 - beta1 ** count) / (np.sqrt(square / (1 - beta2 ** count)) + eps)
        np.testing.assert_allclose(np.median(moved / direction), logged[number], rtol=1e-3, atol=1e-9)
    assert int(optax.tree_utils.tree_get(states[-1].opt_state, 'ScaleByAdamState').count) == 10
    assert logged[-1] == pytest.approx(0.01 * (1 + np.cos(np.pi * 7 / 8)) / 2, rel=1e-4)  # 4 steps of warm-up, 8 down


# SIGKILL

@pytest.mark.slow
def test_a_run_killed_at_six_random_moments_ends_as_an_uninterrupted_run(whole, tmp_path, cache):
    """Saves at every step, so that many kills interrupt a save. The moments are random and printed.

    If the run ends before the sixth kill, three kills suffice.
    """
    changes = {'checkpoint__every': 1, 'train__steps': 180, 'eval__every': 10, 'train__log_every': 7}
    for name in ('alone', 'killed'):
        arguments = script_arguments(tmp_path / name, tiny_config(cache, **changes))
        kills = 6 if name == 'killed' else 0
        while kills:
            before = newest(tmp_path / name)
            process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.DEVNULL)
            # Wait for the next checkpoint and then a random time, at most that of a few steps.
            while newest(tmp_path / name) == before and process.poll() is None:
                time.sleep(0.005)
            moment = random.uniform(0, 0.5)
            time.sleep(moment)
            process.send_signal(signal.SIGKILL)
            if process.wait() == 0:
                break
            kills -= 1
            print(f'killed {moment:.3f} s after step {before} was passed; left {sorted(os.listdir(tmp_path / name))}')
        assert kills <= 3, 'the run came to its end before it was killed three times'
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert outcome(tmp_path / 'killed') == outcome(tmp_path / 'alone')
    assert not list((tmp_path / 'killed' / 'checkpoints').glob('*.damaged*'))


def newest(workdir):
    return steps(workdir)[-1:] if (workdir / 'checkpoints').is_dir() else []
