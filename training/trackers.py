"""Experiment trackers, which receive a copy of the metrics: Weights & Biases and MLflow.

Both packages are optional dependencies and off by default. A tracker finds its server and account in its usual
settings, such as WANDB_MODE=offline, WANDB_API_KEY and MLFLOW_TRACKING_URI. RUN/trackers.json contains the id of the
run in each tracker, so that a resumed training continues the same run in the tracker. A resumed training repeats some
steps with the same results. Metrics that the tracker already has are not sent again. W&B does not
return the last step of an offline run, so the last step is taken from RUN/metrics.jsonl and RUN/trackers.json.
"""

import html
import importlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from configs.options import flatten
from run_directory.records import EVALUATED, read_metrics
from runtime.errors import UserError, first_line
from runtime.files import read_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IDS = 'trackers.json'  # {tracker: the id of the run in the tracker, and for W&B the steps that it already had}
RESOURCES = {'resident_gb', 'device_gb', 'device_peak_gb', 'compile_seconds'}
LAST_EVALUATION = 'last_evaluation'  # entry of W&B's summary of the run: the last step whose evaluation was sent

log = logging.getLogger('allyouneed.train')


def grouped(name: str) -> str:
    """Returns the name of a metric for TensorBoard and trackers. They group metrics by the text before a slash.

    'train_loss' becomes 'train/loss', and 'validation_bleu' becomes 'validation/bleu'. Memory and compile time are in
    the group 'resources'. Other metrics, such as 'learning_rate', are in the group 'train'. The names of statistics of
    places already have a group, such as 'entropy/'.
    """
    if '/' in name:
        return name
    group, _, rest = name.partition('_')
    if group in ('train', 'validation'):
        return f'{group}/{rest}'
    return f'resources/{name}' if name in RESOURCES else f'train/{name}'


class WeightsAndBiases:
    """A tracker that sends metrics to a project of Weights & Biases.

    In offline mode, the metrics are written to RUN/wandb. `wandb sync` can send them later.

    W&B accepts the steps only in ascending order. If an interruption delays the evaluation of a step, W&B may already
    have this step. The evaluation is then sent with the first step that W&B does not have.
    """

    def __init__(self, wandb: ModuleType, project: str, config: ConfigDict, workdir: Path, saved: Mapping[str, Any]):
        self._wandb, resumed = wandb, saved.get('project') == project
        run = saved.get('run') if resumed else secrets.token_hex(4)
        self._run = wandb.init(project=project, id=run, resume='allow', name=workdir.name, dir=workdir,
                               config=flatten(config), settings=wandb.Settings(console='off', silent=True))
        self._first = self._run.step  # the first step that the server does not have
        # The last evaluation that the server has. Earlier versions did not send this number. It is also sent before the
        # first evaluation, so that a run without it is a run of an earlier version, which sent evaluations at once.
        self._evaluated = self._run.summary.get(LAST_EVALUATION, self._first - 1)
        if resumed and self._run.offline:  # such a run begins with step 0 and an empty summary
            lines = read_metrics(workdir)  # `MetricsWriter` has not dropped the lines after the checkpoint yet
            self._first = max([saved.get('first', 0), *(line['step'] + 1 for line in lines)])
            self._evaluated = max([saved.get('evaluated', -1), *(
                line['step'] for line in lines if any(name.startswith(EVALUATED) for name in line))])
        self._run.summary[LAST_EVALUATION] = self._evaluated
        # This training may be interrupted before it has repeated all steps. Then metrics.jsonl lacks the last steps.
        self.id = {'project': project, 'run': run, 'first': self._first, 'evaluated': self._evaluated}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of one training step to the tracker."""
        evaluation = any(name.startswith('validation') for name in metrics)
        if step > self._evaluated if evaluation else step >= self._first:
            self._run.log(dict(metrics), step=max(step, self._first))
            if evaluation:
                self._run.summary[LAST_EVALUATION] = step

    def show(self, step: int, samples: str, figure: 'Figure | None') -> None:
        """Sends the samples of an evaluation as preformatted text, and the figure of the evaluation."""
        media = {'samples': self._wandb.Html(f'<pre>{html.escape(samples)}</pre>')} if samples else {}
        if figure:
            media['attention'] = self._wandb.Image(figure)
        if media and step > self._evaluated:
            self._run.log(media, step=max(step, self._first))

    def close(self, failed: bool) -> None:
        """Waits until all metrics are sent. If the training failed, marks the run in the tracker as failed."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A tracker that sends metrics, samples, figures and the config (as parameters) to an experiment of MLflow."""

    def __init__(self, mlflow: ModuleType, experiment: str, config: ConfigDict, workdir: Path,
                 saved: Mapping[str, Any]):
        os.environ.setdefault('MLFLOW_HTTP_REQUEST_MAX_RETRIES', '3')  # the default, 7, takes minutes
        self._entities = importlib.import_module('mlflow.entities')
        self._client = mlflow.MlflowClient()
        experiment_id = self._experiment_id(experiment)
        self._sent: dict[str, int] = {}  # metric -> the last step that the server has
        server = mlflow.get_tracking_uri()
        if saved.get('experiment') == experiment and saved.get('server') == server:
            run = saved.get('run')
            for name in self._client.get_run(run).data.metrics:
                self._sent[name] = max(metric.step for metric in self._client.get_metric_history(run, name))
            self._client.update_run(run, status='RUNNING')
        else:
            run = self._client.create_run(experiment_id, run_name=workdir.name).info.run_id
            parameters = [self._entities.Param(name, str(value)[:6000]) for name, value in flatten(config).items()]
            for first in range(0, len(parameters), 100):  # at most 100 in a request
                self._client.log_batch(run, params=parameters[first:first + 100])
        self.id = {'experiment': experiment, 'server': server, 'run': run}

    def _experiment_id(self, name: str) -> str:
        """Returns the id of an experiment. Creates the experiment if it does not exist."""
        if existing := self._client.get_experiment_by_name(name):
            return existing.experiment_id
        try:
            return self._client.create_experiment(name)
        except Exception:  # MLflow raises several classes
            if existing := self._client.get_experiment_by_name(name):  # another training has just created it
                return existing.experiment_id
            raise

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of one training step to the tracker."""
        now = round(1000 * time.time())
        self._client.log_batch(self.id['run'], metrics=[
            self._entities.Metric(name, float(value), now, step) for name, value in metrics.items()
            if step > self._sent.get(name, -1)])

    def show(self, step: int, samples: str, figure: 'Figure | None') -> None:
        """Sends the samples and the figure of an evaluation as files whose names contain the step."""
        if samples:
            self._client.log_text(self.id['run'], samples, f'samples/{step}.txt')
        if figure:
            self._client.log_figure(self.id['run'], figure, f'attention/{step}.png')

    def close(self, failed: bool) -> None:
        """Marks the run in MLflow as finished or, if the training failed, as killed."""
        self._client.set_terminated(self.id['run'], 'KILLED' if failed else 'FINISHED')


class Tolerant:
    """A wrapper of a tracker. After a failure, the wrapper no longer uses the tracker, and training continues.

    metrics.jsonl still receives all metrics. The tracker receives the `grouped` names of the metrics. If `flat` is
    True, the tracker receives the names in metrics.jsonl, because an earlier version of this program started the run.
    """

    def __init__(self, tracker: WeightsAndBiases | MLflow, name: str, flat: bool = False):
        self._tracker, self._name, self._flat = tracker, name, flat

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of one training step to the tracker."""
        named = metrics if self._flat else {grouped(name): value for name, value in metrics.items()}
        self._send(lambda tracker: tracker.write(step, named))

    def show(self, step: int, samples: str, figure: 'Figure | None') -> None:
        """Sends the samples and the figure of an evaluation to the tracker."""
        self._send(lambda tracker: tracker.show(step, samples, figure))

    def close(self, failed: bool) -> None:
        """Ends the run in the tracker."""
        self._send(lambda tracker: tracker.close(failed))

    def _send(self, call: Callable[[Any], None]) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:  # noqa: BLE001 (trackers raise many classes, and none may end the training)
            self._tracker = None
            log.warning('%s has failed (%s). This process sends no more metrics to it. metrics.jsonl has all metrics',
                        self._name, first_line(error))


# Option of config.track, which is also the name of a package -> name, class and setup of the tracker.
TRACKERS: Mapping[str, tuple[str, type, str]] = {
    'wandb': ('Weights & Biases', WeightsAndBiases, 'wandb login, or WANDB_MODE=offline'),
    'mlflow': ('MLflow', MLflow, 'MLFLOW_TRACKING_URI=http://... or sqlite:///FILE'),
}


def check_trackers(config: ConfigDict) -> None:
    """Imports the packages of the trackers in config.track.

    Raises:
      UserError: if a package is not installed.
    """
    for package in TRACKERS:
        if project := config.track[package]:
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise UserError(f'config.track.{package}={project!r}: the package {package} cannot be imported '
                                f"({first_line(error)}). Install it: pip install -e '.[{package}]'") from None


def open_trackers(config: ConfigDict, workdir: Path) -> list[Tolerant]:
    """Opens the trackers in config.track.

    Raises:
      UserError: if a tracker is not installed or cannot be used.
    """
    check_trackers(config)
    path, trackers = workdir / IDS, []
    ids = read_json(path, 'Delete the file to start a new run in each tracker') if path.exists() else {}
    for package, (name, make, setup) in TRACKERS.items():
        if not (project := config.track[package]):
            continue
        saved = ids[package] if isinstance(ids.get(package), dict) else {}
        try:
            tracker = make(importlib.import_module(package), project, config, workdir, saved)
        except Exception as error:  # noqa: BLE001 (trackers raise many classes)
            raise UserError(f'config.track.{package}={project!r}: {name} cannot be used: {first_line(error)}. Set up '
                            f'{name} ({setup}), or remove the option. metrics.jsonl and TensorBoard have all metrics, '
                            f'too. If the run was deleted in {name}, delete {path}') from None
        # True if the run began in an earlier version of this program.
        flat = saved.get('run') == tracker.id['run'] and not saved.get('grouped')
        ids[package] = tracker.id | {'grouped': not flat}
        write_text(path, json.dumps(ids, indent=2) + '\n')  # before the next tracker is opened, which may fail
        trackers.append(Tolerant(tracker, name, flat))
    return trackers
