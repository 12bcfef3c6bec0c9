"""Weights & Biases offline, MLflow with a SQLite file, and trackers that are missing or fail."""

import json
import shutil
import sys
import types

import matplotlib.figure
import pytest

from run_directory.progress import Due
from run_directory.records import read_metrics
from runtime.errors import UserError
from tests.tiny_run import log, start, tiny_config  # noqa: F401 (fixture)
from training import loop
from training.metrics import open_metrics
from training.trackers import grouped, open_trackers

MISSING = "the trackers are extras: pip install -e '.[test-interchange]'"


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """The package, with a database of its own."""
    package = pytest.importorskip('mlflow', reason=MISSING)
    pytest.importorskip('sqlalchemy', reason=MISSING)
    monkeypatch.setenv('MLFLOW_TRACKING_URI', f'sqlite:///{tmp_path}/mlflow.db')
    package.set_tracking_uri(None)
    return package


def fake_mlflow(monkeypatch, client):
    """The package, with this client."""
    package, entities = types.ModuleType('mlflow'), types.ModuleType('mlflow.entities')
    package.MlflowClient, package.get_tracking_uri = client, lambda: 'here'
    entities.Metric, entities.Param = (lambda *values: values), (lambda *values: values)
    monkeypatch.setitem(sys.modules, 'mlflow', package)
    monkeypatch.setitem(sys.modules, 'mlflow.entities', entities)


def fake_wandb(monkeypatch, step=0):
    """The run of the package, and a list of the steps and names that it gets."""
    run, sent, package = types.SimpleNamespace(step=step, summary={}, offline=False), [], types.ModuleType('wandb')
    run.log, run.finish = (lambda metrics, step: sent.append((step, *metrics))), (lambda exit_code: None)
    package.init, package.Settings, package.Html = (lambda **_: run), (lambda **_: None), str
    monkeypatch.setitem(sys.modules, 'wandb', package)
    return run, sent


class Client:
    """A client that fails as soon as it receives metrics, and must not be called again."""

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return '1'

    def create_run(self, experiment, run_name):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id='7'))

    def log_batch(self, run, metrics=(), params=()):
        if metrics:
            raise ConnectionError('the server has gone\nTraceback')

    def log_figure(self, *_):
        raise AssertionError('used after it failed')

    log_text = set_terminated = log_figure


@pytest.mark.slow
def test_a_tracker_that_fails_does_not_end_the_training(tmp_path, cache, monkeypatch, log):
    fake_mlflow(monkeypatch, Client)
    start(tmp_path / 'run', tiny_config(cache, track__mlflow='digits'))
    assert read_metrics(tmp_path / 'run')[-1]['step'] == 12
    assert log.text.count('MLflow has failed (the server has gone). This process sends no more metrics') == 1


def test_a_tracker_that_cannot_be_reached_at_the_start_is_an_error(tmp_path, cache, monkeypatch):
    def refused():
        raise ConnectionError('no server at http://localhost:9')

    fake_mlflow(monkeypatch, refused)
    with pytest.raises(UserError, match="config.track.mlflow='digits': .*no server at.*MLFLOW_TRACKING_URI"):
        start(tmp_path / 'run', tiny_config(cache, track__mlflow='digits'))


def test_the_next_start_continues_the_run_of_a_tracker_although_another_tracker_failed(tmp_path, cache, monkeypatch):
    run, _ = fake_wandb(monkeypatch)
    run.id = 'abc'
    monkeypatch.setitem(sys.modules, 'mlflow', types.ModuleType('mlflow'))
    with pytest.raises(UserError, match='MLflow cannot be used'):
        open_trackers(tiny_config(cache, track__wandb='digits', track__mlflow='digits'), tmp_path)
    assert list(json.loads((tmp_path / 'trackers.json').read_text())) == ['wandb']


def test_an_experiment_that_another_training_creates_at_the_same_time_is_used(tmp_path, cache, monkeypatch):
    found, used = [None, types.SimpleNamespace(experiment_id='9')], []

    class Late(Client):
        def get_experiment_by_name(self, name):
            return found.pop(0)

        def create_experiment(self, name):
            raise RuntimeError('cannot create it')

        def create_run(self, experiment, run_name):
            used.append(experiment)
            return super().create_run(experiment, run_name)

    fake_mlflow(monkeypatch, Late)
    open_trackers(tiny_config(cache, track__mlflow='digits'), tmp_path)
    assert used == ['9']
    found += [None, None]
    with pytest.raises(UserError, match='MLflow cannot be used: cannot create it'):
        open_trackers(tiny_config(cache, track__mlflow='digits'), tmp_path)


@pytest.mark.parametrize('package', ['wandb', 'mlflow'])
def test_a_package_that_is_not_installed_is_named_before_anything_is_written(package, tmp_path, cache, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(loop, 'open_data', None)
    with pytest.raises(UserError, match=rf"config.track.{package}='digits': the package {package} .*\[{package}\]"):
        start(tmp_path / 'run', tiny_config(cache, **{f'track__{package}': 'digits'}))
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('saved, names', [
    ({}, ['train/loss', 'validation/bleu', 'train/epoch', 'resources/resident_gb']),
    ({'mlflow': {'experiment': 'digits', 'server': 'here', 'run': '7'}},
     ['train_loss', 'validation_bleu', 'epoch', 'resident_gb'])], ids=['a new run', 'a run of an earlier version'])
def test_names_are_grouped_unless_the_run_began_with_flat_ones(saved, names, tmp_path, cache, monkeypatch):
    sent = []

    class Recording(Client):
        def get_run(self, run):
            return types.SimpleNamespace(data=types.SimpleNamespace(metrics={}))

        def update_run(self, run, status):
            pass

        def log_batch(self, run, metrics=(), params=()):
            sent.extend(name for name, *_ in metrics)

    fake_mlflow(monkeypatch, Recording)
    (tmp_path / 'trackers.json').write_text(json.dumps(saved))
    for _ in range(2):  # a resumed run keeps its names
        [tracker] = open_trackers(tiny_config(cache, track__mlflow='digits'), tmp_path)
        tracker.write(1, {'train_loss': 1.0, 'validation_bleu': 2.0, 'epoch': 3.0, 'resident_gb': 4.0})
    assert sent == 2 * names


def test_a_delayed_evaluation_reaches_weights_and_biases_once(tmp_path, cache, monkeypatch):
    run, sent = fake_wandb(monkeypatch)
    for run.step in 0, 1001, 1002:  # killed before the evaluation, and later resumed from the same checkpoint again
        [tracker] = open_trackers(tiny_config(cache, track__wandb='digits'), tmp_path)
        tracker.write(1000, {'train_loss': 2.0})
        if run.step:
            tracker.write(1000, {'validation_loss': 3.0})
            tracker.show(1000, 'a sample', None)
    assert sent == [(1000, 'train/loss'), (1001, 'validation/loss'), (1001, 'samples')]


def test_weights_and_biases_offline_gets_repeated_steps_and_evaluations_once(tmp_path, cache, monkeypatch):
    """Such a run has step 0 and an empty summary whenever it begins. Three trainings are interrupted."""
    run, sent = fake_wandb(monkeypatch)
    run.offline = True
    for checkpoint, last in (0, 1000), (1000, 1500), (1000, 1200), (1000, 1600):
        run.summary = {}
        with open_metrics(tiny_config(cache, track__wandb='digits'), tmp_path, checkpoint) as metrics:
            if checkpoint:
                metrics.write(checkpoint, {'validation_loss': 2.0})
            for step in range(checkpoint + 100, last + 1, 100):
                metrics.write(step, {'train_loss': 1.0})
    steps = [(step, 'train/loss') for step in range(100, 1601, 100)]
    assert sent == [*steps[:10], (1001, 'validation/loss'), *steps[10:]]


def test_evaluations_of_an_earlier_version_are_not_sent_to_weights_and_biases_again(tmp_path, cache, monkeypatch):
    run, sent = fake_wandb(monkeypatch, step=1351)  # an earlier version wrote no entry into the summary
    [tracker] = open_trackers(tiny_config(cache, track__wandb='digits'), tmp_path)
    tracker.write(1200, {'validation_loss': 1.0})
    tracker.show(1200, 'a sample', None)
    assert sent == []
    tracker.write(1400, {'validation_loss': 1.0})
    assert sent == [(1400, 'validation/loss')] and run.summary['last_evaluation'] == 1400


@pytest.mark.slow
@pytest.mark.interchange
def test_mlflow_has_every_line_once_also_after_a_resume(mlflow, tmp_path, cache):
    start(tmp_path / 'run', tiny_config(cache, track__mlflow='digits'))
    shutil.rmtree(tmp_path / 'run' / 'checkpoints' / '12')  # so steps 10 and 12 are made, and sent, again
    start(tmp_path / 'run', tiny_config(cache, track__mlflow='digits'))
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name('digits').experiment_id])
    lines = read_metrics(tmp_path / 'run')
    for name in 'train_loss', 'validation_accuracy', 'learning_rate':
        assert ([(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, grouped(name))]
                == [(line['step'], line[name]) for line in lines if name in line])
    assert run.info.status == 'FINISHED' and run.info.run_name == 'run'
    assert run.data.params['model.d_model'] == '16' and run.data.params['seed'] == '0'


@pytest.mark.slow
@pytest.mark.interchange
def test_mlflow_marks_a_run_that_a_signal_stopped(mlflow, tmp_path, cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loop, 'due_at', lambda step, config, **_: Due(True, True, step == 5, False))
        with pytest.raises(SystemExit):
            start(tmp_path / 'run', tiny_config(cache, track__mlflow='digits'))
    client, run = mlflow.MlflowClient(), json.loads((tmp_path / 'run' / 'trackers.json').read_text())['mlflow']['run']
    assert client.get_run(run).info.status == 'KILLED'
    try:
        raise OSError('an error that the caller handles by a training is not the training\'s')
    except OSError:
        start(tmp_path / 'run', tiny_config(cache, track__mlflow='digits'))
    assert client.get_run(run).info.status == 'FINISHED'


@pytest.mark.slow
@pytest.mark.interchange
def test_mlflow_shows_samples_and_figures(mlflow, tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'run').mkdir()
    [tracker] = open_trackers(tiny_config(cache, track__mlflow='digits'), tmp_path / 'run')
    tracker.show(4, 'a sample', matplotlib.figure.Figure())
    tracker.close(failed=False)
    run = json.loads((tmp_path / 'run' / 'trackers.json').read_text())['mlflow']['run']
    client = mlflow.MlflowClient()
    assert [file.path for folder in ('samples', 'attention') for file in client.list_artifacts(run, folder)] == [
        'samples/4.txt', 'attention/4.png']


@pytest.mark.slow
@pytest.mark.interchange
def test_weights_and_biases_offline(tmp_path, cache, monkeypatch):
    pytest.importorskip('wandb', reason=MISSING)
    monkeypatch.setenv('WANDB_MODE', 'offline')
    start(tmp_path / 'run', tiny_config(cache, track__wandb='digits', train__steps=8))
    start(tmp_path / 'run', tiny_config(cache, track__wandb='digits'))
    folders = sorted((tmp_path / 'run' / 'wandb').glob('offline-run-*'))
    assert len(folders) == 2 and len({folder.name.rsplit('-', 1)[1] for folder in folders}) == 1, 'one run in two parts'
    for folder, last in zip(folders, (8, 12), strict=True):
        [file] = folder.glob('*.wandb')
        content = file.read_bytes()
        for wanted in 'digits', 'train/loss', 'validation/accuracy', 'model.d_model', f'{last}':
            assert wanted.encode() in content
        value = [line['train_loss'] for line in read_metrics(tmp_path / 'run') if line['step'] == last
                 and 'train_loss' in line]
        assert repr(value[0]).encode() in content
