"""sweep.py with quick scripts in place of train.py and decode.py, and once with the real ones."""

import contextlib
import csv
import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from concurrent import futures

import pytest

import sweep as sweep_script
from analysis import sweeping
from analysis.compare import RunRecord
from analysis.sweeping import SweepProgress, logged_regularly, planned_runs, read_sweep
from configs import demo, pendulum
from configs.options import flatten
from configs.sweeps import over, product, seeds
from input_pipeline import problems
from runtime.errors import UserError
from runtime.executors import FULL, Job, Local
from runtime.stopping import STOPPED
from tests.sweep_bench import (  # noqa: F401 (a fixture)
    ENVIRONMENT,
    ROOT,
    SWEEP,
    command,
    start,
    sweep,
    sweep_bench,
    times_begun,
    wait_for,
    write_scores,
)


def test_what_is_run_and_reported(bench):
    typed = sweep(bench, '--dry_run').stdout.splitlines()
    assert typed[-1] == '# 4 runs' and not (bench / 'out').exists()
    assert shlex.split(typed[1]) == [
        'python', 'train.py', f'--config={ROOT}/configs/demo.py', f'--workdir={bench}/out/num_heads=1,seed=0',
        '--config.train.steps=400', '--config.model.num_heads=1', '--config.seed=0']
    assert typed[2] == f'python decode.py --workdir={bench}/out/num_heads=1,seed=0 --split=validation'

    done = sweep(bench, '--jobs=2')
    assert done.returncode == 0, done.stderr
    assert '4 runs: 0 finished, 0 failed before, 4 remaining, at most 2 at a time\n' in done.stderr
    assert re.search(r'\d of 4: num_heads=1,seed=0 finished, bleu 10, ', done.stderr)
    assert re.search(r'\d of 4: num_heads=4,seed=1 finished, bleu 41, the best so far', done.stderr)
    rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in done.stdout.splitlines()]
    assert rows[0] == ['num_heads', 'bleu', 'perplexity', 'seeds', 'parameters', 'tokens/s']
    assert rows[2:] == [['1', '10.50 ± 0.71', '2.000 ± 0.000', '2', '1,234', '40,000'],
                        ['4', '**40.50 ± 0.71**', '2.000 ± 0.000', '2', '1,234', '40,000']]
    out = bench / 'out'
    assert done.stdout in (out / 'report.md').read_text()
    [one, four] = csv.DictReader((out / 'report.csv').open())
    assert (four['num_heads'], four['bleu'], float(four['bleu_sd'])) == ('4', '40.5', pytest.approx(0.5 ** 0.5))
    assert all((out / name).read_bytes().startswith(b'\x89PNG') for name in ('curves.png', 'varied.png'))
    assert json.loads((out / 'sweep.json').read_text())['config']['train.steps'] == 400

    results = out / 'num_heads=4,seed=1/results/validation.json'  # as if the run was scored at step 200 of 400
    results.write_text(json.dumps({'bleu': 30.0, 'checkpoint': 'best', 'checkpoint_steps': [200]}))
    grown = sweep(bench, seeds=3)  # the same directory may take more runs
    assert grown.returncode == 0 and '6 runs: 3 finished' in grown.stderr
    assert json.loads(results.read_text())['bleu'] == 41
    assert times_begun(bench) == {f'num_heads={heads},seed={seed}': 1 + ((heads, seed) == (4, 1))
                                  for heads in (1, 4) for seed in range(3)}

    other = sweep(bench, '--config.optimizer.warmup=9', heads=[1])
    assert other.returncode == 2
    assert 'optimizer.warmup: 300 in the directory, 9 in this sweep' in other.stderr
    assert 'run num_heads=4,seed=0: not in this sweep' in other.stderr


def test_runs_keep_their_names_when_a_sweep_varies_another_option(bench):
    (bench / 'out').mkdir()
    (bench / 'out/sweep.json').write_text(json.dumps({'config': {}, 'runs': {
        'seed=0': {'model.num_heads': 1, 'seed': 0}, 'seed=1': {'model.num_heads': 1, 'seed': 1}}}))
    typed = sweep(bench, '--dry_run', seeds=3).stdout.splitlines()
    assert typed[::3] == ['# seed=0', '# seed=1', '# num_heads=1,seed=2',
                          *(f'# num_heads=4,seed={seed}' for seed in range(3)), '# 6 runs']


def test_runs_that_exist_keep_values_that_new_runs_must_not_have(bench):
    (bench / 'out').mkdir()
    (bench / 'out/sweep.json').write_text(json.dumps({'config': {}, 'runs': {
        f'seed={seed}': {'model.num_heads': 1, 'seed': seed} for seed in range(2)}}))
    resumed = sweep(bench, '--dry_run', '--config.train.frozen=,', heads=[1])
    assert resumed.stdout.splitlines()[::3] == ['# seed=0', '# seed=1', '# 2 runs']


NOW = time.time()


@pytest.fixture
def progress(tmp_path, monkeypatch):
    """A sweep of three runs with 400 steps, described at the time NOW. The first run has ended with a BLEU of 39.1."""
    monkeypatch.setattr(sweeping, 'time', types.SimpleNamespace(time=lambda: NOW, monotonic=time.monotonic))
    config = flatten(demo.get_config()) | {'train.steps': 400}
    runs = [RunRecord(name, tmp_path / name, {}, config, {}, {}) for name in ('one', 'two', 'three')]
    (tmp_path / 'logs').mkdir()
    for name, bleu in ('one', 39.1), ('two', 38.25):
        (tmp_path / name / 'results').mkdir(parents=True)
        (tmp_path / name / 'results' / 'validation.json').write_text(json.dumps({'bleu': bleu}))
    return SweepProgress(runs, {'one'}, 'validation')


def log_steps(folder, steps, seconds):
    """Writes the metrics of a run up to a step, as if it were logged so many seconds after NOW."""
    path = folder / 'two' / 'metrics.jsonl'
    lines = [json.dumps({'step': step, 'train_loss': 1.0}) + '\n' for step in range(100, steps + 1, 100)]
    path.write_text(''.join(lines))
    os.utime(path, (NOW + seconds,) * 2)


def test_the_progress_of_the_active_runs_is_described(progress, tmp_path):
    assert str(progress) == '1 of 3 runs ended; no run is active'
    (tmp_path / 'logs' / 'two.log').touch()
    assert str(progress) == '1 of 3 runs ended; two: starting'
    log_steps(tmp_path, 100, seconds=1)
    assert str(progress) == '1 of 3 runs ended; two: step 100 of 400'
    log_steps(tmp_path, 200, seconds=61)  # 100 steps in 60 s; 200 steps remain, from 61 s on
    assert str(progress) == '1 of 3 runs ended; two: step 200 of 400, 03:01 left'
    log_steps(tmp_path, 400, seconds=181)
    assert str(progress) == '1 of 3 runs ended; two: scoring on validation'
    progress.end('two')
    assert progress.scores('two') == 'bleu 38.25, best so far: 39.1 (one)'
    assert progress.scores('one') == 'bleu 39.1, the best so far'
    progress.end('three')  # it failed, and has no score
    assert progress.scores('three') == '' and str(progress) == '3 of 3 runs ended; no run is active'


@pytest.mark.parametrize('metric, scores', [
    (None, 'r_squared 0.8, best so far: 0.9 (two)'), ('validation_loss', 'r_squared 0.8, best so far: 0.9 (two)'),
    ('learning_rate', 'r_squared 0.8, best so far: 0.9 (two)'),
    ('validation_mean_absolute_error', 'mean_absolute_error 1, the best so far')])
def test_a_score_is_logged_if_the_results_do_not_have_the_metric(tmp_path, metric, scores):
    """config.eval.metric of the pendulum is the loss, which decode.py does not measure."""
    config = flatten(pendulum.get_config())
    runs = [RunRecord(name, tmp_path / name, {}, config, {}, {}) for name in ('one', 'two')]
    for name, r_squared, error in ('one', 0.8, 1.0), ('two', 0.9, 2.0):
        write_scores(tmp_path / name, validation={'mean_absolute_error': error, 'r_squared': r_squared})
    progress = SweepProgress(runs, {'one', 'two'}, 'validation', metric)
    assert progress.scores('one') == scores


def test_the_progress_is_logged_between_the_ends_of_runs(progress, caplog):
    caplog.set_level('INFO', logger='allyouneed.sweep')
    with logged_regularly(progress, pause=0.05):
        deadline = time.monotonic() + 300
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert caplog.messages[:2] == ['1 of 3 runs ended; no run is active'] * 2


@pytest.mark.slow
def test_a_run_is_finished_only_on_the_split_on_which_it_was_scored(bench):
    done = sweep(bench, '--split=test', heads=[1], seeds=1)
    assert done.returncode == 0 and [path.name for path in bench.glob('out/*/results/*')] == ['test.json']
    assert '| 10.00 |' in done.stdout
    again, on_validation = (sweep(bench, *split, heads=[1], seeds=1) for split in (['--split=test'], []))
    assert '1 runs: 1 finished' in again.stderr and '1 runs: 0 finished' in on_validation.stderr


BOTH = 'touch $0; for _ in $(seq 1000); do [ -e $1 ] && exec printenv CUDA_VISIBLE_DEVICES; sleep 0.01; done; exit 1'


@pytest.mark.parametrize('devices, shares', [
    ('0,1,2', ['0,2', '1']), ('0,1', ['0', '1']), ('0', ['0', '0']), ('', ['', ''])])
def test_the_devices_are_divided_between_the_jobs_that_run_at_the_same_time(tmp_path, monkeypatch, devices, shares):
    """Each job waits until the other job has begun, and then writes its devices."""
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', devices)
    begun = [str(tmp_path / name) for name in 'ab']
    jobs = [Job(path[-1], [['sh', '-c', BOTH, *paths]], tmp_path / f'{path[-1]}.log')
            for path, paths in zip(begun, (begun, begun[::-1]), strict=True)]
    for flag, value in ('JOBS', 2), ('EXECUTOR', 'local'):
        monkeypatch.setattr(sweep_script, flag, types.SimpleNamespace(value=value))
    assert [status for _, status in sweep_script.make_executor(tmp_path).run(jobs)] == [0, 0]
    assert sorted(job.log.read_text().splitlines()[-1] for job in jobs) == shares


@pytest.mark.slow
def test_a_failed_run_does_not_stop_other_runs_and_can_be_repeated(bench):
    done = sweep(bench, heads=[2, 1])
    assert done.returncode == 1
    assert 'num_heads=2,seed=0 failed, exit status 1' in done.stderr and 'two heads are bad luck' in done.stderr
    assert 'two heads are bad luck' in (bench / 'out/logs/num_heads=2,seed=0.log').read_text()
    assert '| failed: exit status 1 |' in done.stdout and '10.50 ± 0.71' in done.stdout
    (bench / 'repaired').touch()
    again = sweep(bench, heads=[2, 1])
    assert again.returncode == 1 and '2 finished, 2 failed before, 0 remaining' in again.stderr
    run = f'--workdir={bench}/out/num_heads=2,seed=0'
    for by_hand in (['train.py', run, '--config.model.num_heads=2', '--config.train.steps=400'],
                    ['decode.py', run, '--split=validation']):
        subprocess.run([sys.executable, *by_hand], cwd=bench, check=True, timeout=600)
    half = sweep(bench, heads=[2, 1])
    assert half.returncode == 1 and '3 finished, 1 failed before, 0 remaining' in half.stderr
    assert half.stderr.index('1 runs failed: num_heads=2,seed=1. To run') < half.stderr.index('report.md')
    retried = sweep(bench, '--retry_failed', heads=[2, 1])
    assert retried.returncode == 0 and '**20.50' in retried.stdout and 'failed:' not in retried.stdout
    assert set(times_begun(bench).values()) == {1, 2}


@pytest.mark.slow
def test_a_stopped_sweep_stops_its_runs_and_can_be_resumed(bench):
    script, line = bench / 'sweep.py', 'from runtime.stopping import SAME_REQUEST, STOPPED\n'
    assert line in script.read_text()
    script.write_text(script.read_text().replace(line, f'{line}SAME_REQUEST = 600\n'))
    process = start(bench)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)  # one request to stop may arrive as two signals
    stderr = process.communicate(timeout=600)[1]
    assert process.returncode == 130 and 'the sweep was interrupted. Run the same command again' in stderr
    assert not list(bench.glob('out/logs/*.failed'))
    report = sweep(bench, '--report', config=False)
    assert report.returncode == 0 and '| not started |' in report.stdout
    (bench / 'slow').unlink()
    again = sweep(bench)
    assert again.returncode == 0 and '4 runs: 2 finished' in again.stderr
    assert times_begun(bench)['num_heads=4,seed=0'] == 2 and times_begun(bench)['num_heads=1,seed=0'] == 1


@pytest.mark.slow
def test_a_sweep_under_nohup_outlives_its_terminal(bench):
    (bench / 'slow').touch()
    process = subprocess.Popen(['nohup', *command(bench)], cwd=bench, stderr=subprocess.PIPE, text=True,
                               stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=ENVIRONMENT)
    wait_for(bench / 'out/num_heads=4,seed=0/began')
    process.send_signal(signal.SIGHUP)
    (bench / 'slow').unlink()
    assert 'num_heads=4,seed=1 finished' in process.communicate(timeout=600)[1] and process.returncode == 0


@pytest.mark.slow
def test_a_sweep_waits_for_the_runs_that_outlived_another(bench):
    process = start(bench)
    process.kill()
    process.communicate()
    second = subprocess.Popen(command(bench), cwd=bench, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                              env=ENVIRONMENT)
    while 'Waiting' not in second.stderr.readline():
        assert second.poll() is None
    assert times_begun(bench)['num_heads=4,seed=0'] == 1
    (bench / 'slow').unlink()
    second.communicate(timeout=600)
    assert second.returncode == 0 and len(list(bench.glob('out/*/results/validation.json'))) == 4


@pytest.mark.parametrize('grid, expected', [
    ("[{'model.num_head': 2}]", 'no option model.num_head: did you mean model.num_heads?'),
    ("[{'model.num_heads': 3}]", "run {'model.num_heads': 3}: config.model.num_heads=3: must divide"),
])
def test_mistakes_are_explained(bench, grid, expected):
    arguments = command(bench)
    (bench / 'grid.py').write_text(f'def get_sweep(config):\n    return {grid}\n')
    done = subprocess.run(arguments, cwd=bench, capture_output=True, text=True, timeout=600, env=ENVIRONMENT)
    assert done.returncode == 2 and expected in done.stderr and not (bench / 'out').exists()


@pytest.mark.parametrize('file, message', [
    ('configs/sweeps', 'is a folder. Use the file of a sweep, for example configs/sweeps/seeds.py'),
    ('positions', 'does not exist: did you mean configs/sweeps/positions.py?'),
    ('configs/sweeps/table3', 'does not exist: did you mean configs/sweeps/table3.py?'),
    ('configs/sweeps/postions.py', 'does not exist: did you mean configs/sweeps/positions.py?'),
    ('nothing_like_it', 'does not exist. Use the file of a sweep, for example configs/sweeps/seeds.py')])
def test_a_flag_that_is_no_sweep_file_is_explained(monkeypatch, file, message):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=f'^{re.escape(f"--sweep={file} {message}")}$'):
        read_sweep(file, demo.get_config())


def test_a_flag_of_an_option_that_the_sweep_sets_in_every_run_is_warned_of(bench):
    done = sweep(bench, '--dry_run', '--config.seed=7')
    assert 'the sweep sets config.seed in every run, so --config.seed=7 has an effect only if' in done.stderr
    assert 'train.steps' not in done.stderr


def test_a_report_mentions_that_the_runs_have_chosen_different_precisions(bench):
    (bench / 'out').mkdir()
    (bench / 'out/sweep.json').write_text(json.dumps({
        'config': {'train.matmul_precision': 'auto'},
        'runs': {name: {'seed': seed} for seed, name in enumerate('abcd')}}))
    for name, precision in ('a', 'bfloat16'), ('b', 'default'), ('c', 'bfloat16'):  # the run d has not started
        (bench / 'out' / name).mkdir()
        (bench / 'out' / name / 'config.json').write_text(json.dumps({'train': {'matmul_precision': precision}}))
    done = sweep(bench, '--report', config=False)
    sentence = ('auto has chosen different precisions (bfloat16 in 2 of 3 runs, default in 1 of 3 runs), so '
                'differences between the runs may come from the precision. To avoid this, start a new sweep with '
                '--config.train.matmul_precision=default')
    assert done.returncode == 0 and sentence in done.stderr and 'other options' not in done.stderr
    assert f'{sentence}.\n\n| ' in (bench / 'out/report.md').read_text()


def test_data_is_checked_once_for_configs_that_read_the_same_data(tmp_path, monkeypatch):
    config, checked = demo.get_config(), []
    config.update_from_flattened_dict({'data.source': 'files', 'data.dir': str(tmp_path)})
    monkeypatch.setattr(problems, 'data_problems', lambda config, **_: checked.append(config.data.max_length) or [])
    sweeping.check_data('grid.py', config, product(seeds(3), over('data.max_length', [32, 64])), [], 'validation')
    assert checked == [32, 64]
    sweeping.check_data('grid.py', config, over('train.guided_alignment', [0.0, 0.05, 0.1]), [], 'validation')
    assert len(checked) == 4  # without links and with links
    sweeping.check_data('grid.py', config, over('model.patches.patch', [16, 5]), [], 'validation')
    assert len(checked) == 6  # the size of an image must be a multiple of the size of a patch
    sweeping.check_data('grid.py', demo.get_config(), seeds(3), [], 'validation')  # the built-in data
    assert len(checked) == 6


def test_a_sweep_in_the_home_folder_may_have_numbers_of_numpy(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'grid.py').write_text('''
import numpy as np
from configs.sweeps import over
def get_sweep(config):
    return over('optimizer.peak', np.geomspace(1e-4, 1e-2, 3)) + over('model.num_heads', np.array([1, 2]))
''')
    config = demo.get_config()
    runs = planned_runs('grid.py', config, read_sweep('~/grid.py', config), [])
    assert [type(value) for overrides in runs.values() for value in overrides.values()] == [float] * 3 + [int] * 2
    assert list(runs) == ['peak=0.0001', 'peak=0.001', 'peak=0.01', 'num_heads=1', 'num_heads=2']


def test_a_directory_of_other_files_is_not_used(bench):
    (bench / 'out').mkdir()
    (bench / 'out/thesis.tex').write_text('precious')
    assert 'is not empty and has no sweep.json' in sweep(bench).stderr
    assert [path.name for path in (bench / 'out').iterdir()] == ['thesis.tex']


def test_a_directory_that_another_sweep_claims_at_the_same_time_is_not_used(bench, monkeypatch):
    (bench / 'sitecustomize.py').write_text("""
import fcntl, json, pathlib
def claimed_before(*_):
    path = pathlib.Path('out/sweep.json')
    path.write_text(json.dumps(json.loads(path.read_text()) | {'runs': {'other': {'seed': 7}}}))
fcntl.flock = claimed_before
""")
    monkeypatch.setitem(ENVIRONMENT, 'PYTHONPATH', f'{bench}:{ROOT}')
    done = sweep(bench)
    assert done.returncode == 2 and 'run other: not in this sweep' in done.stderr


@pytest.mark.parametrize('name', ['sweep.json.tmp', f'sweep.json.{"0" * 32}.tmp'], ids=['earlier version', 'unique'])
def test_a_sweep_that_was_killed_while_it_wrote_sweep_json_can_start_again(name, tmp_path):
    (tmp_path / name).write_text('{"half')
    sweeping.claim_directory(tmp_path, 'demo.py', 'grid.py', {}, {'one': {}})
    assert json.loads((tmp_path / 'sweep.json').read_text())['runs'] == {'one': {}}


@pytest.mark.slow
def test_a_real_sweep_killed_half_way(tmp_path):
    """Two seeds, on the built-in corpus; killed in the second run."""
    grid = tmp_path / 'grid.py'
    grid.write_text(SWEEP.format(heads=[1], seeds=2))
    small = {'model.d_model': 16, 'model.d_ff': 16, 'model.num_layers': 1, 'optimizer.warmup': 8, 'train.steps': 24,
             'train.log_every': 4, 'eval.every': 24, 'eval.bleu_sentences': 20, 'checkpoint.every': 12,
             'batch.buckets': 1,
             'decode.extra_length': 2, 'decode.method': 'greedy', 'cache_dir': tmp_path / 'cache'}
    arguments = [sys.executable, 'sweep.py', '--config=configs/demo.py', f'--sweep={grid}', f'--workdir={tmp_path}/out',
                 *(f'--config.{option}={value}' for option, value in small.items())]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(tmp_path / 'out/seed=1/checkpoints/12')
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(600) == 130
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    assert '2 runs: 1 finished, 0 failed before, 1 remaining' in done.stderr and 'other options' not in done.stderr
    assert 'resuming from step' in (tmp_path / 'out/logs/seed=1.log').read_text()
    rows = list(csv.DictReader((tmp_path / 'out/report.csv').open()))
    assert [row['seeds'] for row in rows] == ['2']
    assert all(float(row['bleu']) >= 0 and int(row['parameters']) > 1000 and int(row['tokens/s']) > 0 for row in rows)


@pytest.mark.slow
def test_a_sweep_runs_where_files_cannot_be_locked_and_logs_a_warning(bench, monkeypatch):
    (bench / 'sitecustomize.py').write_text("""
import errno, fcntl
def no_locks(*_):
    raise OSError(errno.ENOLCK, 'No locks available')
fcntl.flock = no_locks
""")
    monkeypatch.setitem(ENVIRONMENT, 'PYTHONPATH', f'{bench}:{ROOT}')
    done = sweep(bench, heads=[1], seeds=1)
    assert done.returncode == 0 and 'num_heads=1,seed=0 finished' in done.stderr, done.stderr
    assert f'{bench}/out cannot be locked (No locks available)' in done.stderr


@pytest.mark.slow
def test_a_sweep_lists_interrupted_runs_and_ends_with_their_status(bench):
    """With 75, or with 1 if a run has also failed."""
    script = bench / 'train.py'
    script.write_text(script.read_text().replace("'Traceback: two heads are bad luck'", '1 if seed else 75'))
    done = sweep(bench, heads=[2, 1], seeds=1)
    line = '1 runs were interrupted: num_heads=2,seed=0. Run the same command again to resume them'
    assert done.returncode == STOPPED and line in done.stderr
    more = sweep(bench, heads=[2, 1], seeds=2)
    assert more.returncode == 1 and line in more.stderr and '1 runs failed: num_heads=2,seed=1.' in more.stderr


def test_a_log_on_a_full_disk_is_no_failure(tmp_path):
    (tmp_path / 'one.log').symlink_to('/dev/full')
    job = Job('one', [[sys.executable, '-c', '']], tmp_path / 'one.log')
    assert list(Local(1).run([job])) == [(job, FULL)] and not job.failure.exists()


def test_an_empty_reason_for_a_failure_on_a_full_disk_is_removed(tmp_path, monkeypatch):
    def over_quota(path, _):
        path.touch()
        raise OSError(errno.EDQUOT, 'Disk quota exceeded')

    monkeypatch.setattr('pathlib.Path.write_text', over_quota)
    job = Job('one', [['false']], tmp_path / 'one.log')
    assert job() == FULL and not job.failure.exists()


@pytest.mark.parametrize('requests, status', [(['stop'], -signal.SIGTERM), (['stop', 'kill'], STOPPED)])
def test_a_process_that_starts_while_its_job_is_stopped_is_ended(requests, status, tmp_path, monkeypatch):
    """The process gets the signal of the last request. In the case with 'kill', it ignores SIGTERM."""
    start = subprocess.Popen

    def starts_slowly(*arguments, **options):
        process = start(*arguments, **options)
        wait_for(tmp_path / 'begun')
        for request in requests:
            getattr(job, request)()  # before the job knows the process
        return process

    monkeypatch.setattr('runtime.executors.subprocess.Popen', starts_slowly)
    script = f'{"trap : TERM; " * ("kill" in requests)}touch "$0"; for _ in $(seq 600); do sleep 0.1; done'
    job = Job('one', [['sh', '-c', script, str(tmp_path / 'begun')]], tmp_path / 'one.log')
    assert job() == status and not job.failure.exists()


def test_a_run_that_is_killed_because_it_stops_slowly_has_not_failed(tmp_path):
    script = 'trap "" TERM; touch "$0"; for _ in $(seq 600); do sleep 0.1; done'
    job = Job('one', [['sh', '-c', script, str(tmp_path / 'begun')]], tmp_path / 'one.log')
    with futures.ThreadPoolExecutor() as pool:
        status = pool.submit(job)
        wait_for(tmp_path / 'begun')
        job.stop()
        job.kill()
        assert status.result() == STOPPED and not job.failure.exists()


def test_an_error_of_the_sweep_stops_its_runs_before_the_log_of_the_progress_ends(progress, monkeypatch):
    ended = []
    monkeypatch.setattr(sweep_script, 'logged_regularly', lambda _: contextlib.closing(
        types.SimpleNamespace(close=lambda: ended.append('log'))))

    def run(jobs):
        raise PermissionError(13, 'Permission denied')
        yield

    with pytest.raises(PermissionError):
        sweep_script.run_jobs(types.SimpleNamespace(run=run, stop=lambda: ended.append('runs')), [], progress, 0)
    assert ended == ['runs', 'log']


def test_each_request_to_stop_may_arrive_as_two_signals(progress, monkeypatch):
    times, accepted = iter([10, 10.1, 20, 20.1]), []  # the signals arrive at these seconds
    monkeypatch.setattr(sweep_script, 'time', types.SimpleNamespace(monotonic=lambda: next(times)))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def stop():
        for number in 1, 2, 3:
            try:
                signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt:
                accepted.append(number)

    executor = types.SimpleNamespace(run=lambda _: signal.raise_signal(signal.SIGINT), stop=stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            sweep_script.run_jobs(executor, [], progress, 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert accepted == [2]


@pytest.mark.slow
def test_a_run_that_finds_the_disk_full_is_resumed_by_the_same_command(bench):
    script = bench / 'train.py'
    message = 'x cannot be written: No space left on device'
    script.write_text(script.read_text().replace('two heads are bad luck', message))
    done = sweep(bench, heads=[2, 1])
    assert done.returncode == 1 and 'Free some space, then run the same command again' in done.stderr
    assert 'num_heads=2,seed=0 stopped because the disk is full' in done.stderr
    assert not list(bench.glob('out/logs/*.failed')) and '| not started |' in done.stdout
    (bench / 'repaired').touch()
    again = sweep(bench, heads=[2, 1])
    assert again.returncode == 0 and '4 runs: 2 finished, 0 failed before, 2 remaining' in again.stderr
