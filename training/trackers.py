"""Trackers of experiments that are told the metrics besides a run's own files: Weights & Biases, MLflow.

Each is an extra of its own, off by default, and finds its server and account as it always does: WANDB_MODE=offline,
WANDB_API_KEY, MLFLOW_TRACKING_URI, ... A run keeps its name there in RUN/trackers.json, so a resumed training goes on
in the same one. A resume repeats steps with the same numbers, so what a tracker has already is not sent again.
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
from runtime.errors import UserError
from runtime.files import read_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEPT_NAMES = 'trackers.json'  # tracker -> where the run is there

log = logging.getLogger('allyouneed.train')


class WeightsAndBiases:
    """Tells a project of Weights & Biases. Offline, it writes to RUN/wandb, for `wandb sync`."""

    def __init__(self, wandb: ModuleType, project: str, config: ConfigDict, workdir: Path, known: Mapping[str, Any]):
        self._wandb = wandb
        self.where = {'project': project, 'run': known.get('run') if known.get('project') == project
                      else secrets.token_hex(4)}
        self._run = wandb.init(project=project, id=self.where['run'], resume='allow', name=workdir.name, dir=workdir,
                               config=flatten(config), settings=wandb.Settings(console='off', silent=True))
        self._from = self._run.step  # the next that it takes, where the server tells

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step."""
        if step >= self._from:
            self._run.log(dict(metrics), step=step)

    def show(self, step: int, samples: str, figure: 'Figure | None') -> None:
        """Sends an evaluation's samples, as preformatted text, and its figure."""
        media = {'samples': self._wandb.Html(f'<pre>{html.escape(samples)}</pre>')} if samples else {}
        if figure:
            media['attention'] = self._wandb.Image(figure)
        if media and step >= self._from:
            self._run.log(media, step=step)

    def close(self, failed: bool) -> None:
        """Waits until all is sent. A training that failed is marked as such."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """Tells an experiment of MLflow: metrics, the config as parameters, samples and figures as artifacts."""

    def __init__(self, mlflow: ModuleType, experiment: str, config: ConfigDict, workdir: Path,
                 known: Mapping[str, Any]):
        os.environ.setdefault('MLFLOW_HTTP_REQUEST_MAX_RETRIES', '3')  # its 7 take minutes
        self._entities = importlib.import_module('mlflow.entities')
        self._client = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(experiment)
        there = found.experiment_id if found else self._client.create_experiment(experiment)
        self._sent: dict[str, int] = {}  # metric -> the last step that the server has
        server = mlflow.get_tracking_uri()
        if known.get('experiment') == experiment and known.get('server') == server:
            run = known.get('run')
            for name in self._client.get_run(run).data.metrics:
                self._sent[name] = max(metric.step for metric in self._client.get_metric_history(run, name))
            self._client.update_run(run, status='RUNNING')
        else:
            run = self._client.create_run(there, run_name=workdir.name).info.run_id
            parameters = [self._entities.Param(name, str(value)[:6000]) for name, value in flatten(config).items()]
            for first in range(0, len(parameters), 100):  # the most that one request takes
                self._client.log_batch(run, params=parameters[first:first + 100])
        self.where = {'experiment': experiment, 'server': server, 'run': run}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step."""
        now = round(1000 * time.time())
        self._client.log_batch(self.where['run'], metrics=[
            self._entities.Metric(name, float(value), now, step) for name, value in metrics.items()
            if step > self._sent.get(name, -1)])

    def show(self, step: int, samples: str, figure: 'Figure | None') -> None:
        """Sends an evaluation's samples and figure, as files that are named by the step."""
        if samples:
            self._client.log_text(self.where['run'], samples, f'samples/{step}.txt')
        if figure:
            self._client.log_figure(self.where['run'], figure, f'attention/{step}.png')

    def close(self, failed: bool) -> None:
        """Marks the run as finished, or as killed."""
        self._client.set_terminated(self.where['run'], 'KILLED' if failed else 'FINISHED')


class Forgiving:
    """A tracker, until it fails: then training goes on without it, for the run's own files have all metrics."""

    def __init__(self, tracker: WeightsAndBiases | MLflow, name: str):
        self._tracker, self._name = tracker, name

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tells it the metrics of a step."""
        self._tell(lambda tracker: tracker.write(step, metrics))

    def show(self, step: int, samples: str, figure: 'Figure | None') -> None:
        """Tells it an evaluation's samples and figure."""
        self._tell(lambda tracker: tracker.show(step, samples, figure))

    def close(self, failed: bool) -> None:
        """Tells it that this is the end."""
        self._tell(lambda tracker: tracker.close(failed))

    def _tell(self, what: Callable[[Any], None]) -> None:
        if self._tracker is None:
            return
        try:
            what(self._tracker)
        except Exception as error:  # noqa: BLE001 (the tracker's own, of any class; the training is worth more)
            self._tracker = None
            log.warning('%s fails (%s): it is told no more in this start; metrics.jsonl has everything', self._name,
                        _first_line(error))


# An option of config.track, which is the package too -> its name, its class, and how it is set up.
TRACKERS: Mapping[str, tuple[str, type, str]] = {
    'wandb': ('Weights & Biases', WeightsAndBiases, 'wandb login, or WANDB_MODE=offline'),
    'mlflow': ('MLflow', MLflow, 'MLFLOW_TRACKING_URI=http://... or sqlite:///FILE'),
}


def open_trackers(config: ConfigDict, workdir: Path) -> list[Forgiving]:
    """Opens the trackers that config.track names.

    Raises:
      UserError: if one is not installed, or cannot be set up.
    """
    path, trackers = workdir / KEPT_NAMES, []
    kept = read_json(path, 'Delete it, and the run begins anew there') if path.exists() else {}
    for package, (name, make, setup) in TRACKERS.items():
        if not (place := config.track[package]):
            continue
        known = kept.get(package, {})
        try:
            tracker = make(importlib.import_module(package), place, config, workdir,
                           known if isinstance(known, dict) else {})
        except ImportError as error:
            raise UserError(f'config.track.{package}={place!r} needs a package that is not here '
                            f"({_first_line(error)}): pip install -e '.[{package}]'") from None
        except Exception as error:  # noqa: BLE001 (the tracker's own, of any class)
            raise UserError(f'config.track.{package}={place!r}: {name} cannot be used: {_first_line(error)}\nSet it up '
                            f'({setup}), or leave the option out: metrics.jsonl and TensorBoard have everything. '
                            f'If the run has been deleted there, delete {path}, too: it begins anew') from None
        kept[package] = tracker.where
        trackers.append(Forgiving(tracker, name))
    if trackers:
        write_text(path, json.dumps(kept, indent=2) + '\n')
    return trackers


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
