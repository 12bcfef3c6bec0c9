"""Reads the records of a run directory: the config, the metrics and the saved steps. The module does not import JAX."""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from configs.versions import read_config_file
from run_directory.progress import judge_all
from runtime.errors import UserError
from runtime.files import RESTORE, read_bytes, read_json

CONFIG = 'config.json'
EXPORTED = 'model.safetensors'  # the parameters in a folder that interchange/ has exported
METRICS_FILE = 'metrics.jsonl'
ENSEMBLE, EDITED = '.ensemble', '.edited'  # at the end of the names of result files
MEASURED = ('train.matmul_precision', 'auto')  # a new run replaces 'auto' by the chosen precision, and keeps it
CHOSEN = ('bfloat16', 'default')  # the precisions that 'auto' can choose
LOWERED = 'data/lowered.json'  # {option: requested value}, for options that were lowered at the start (too little data)
RECIPE = 'recipe.py'  # in runs that were imported: the recipe to train the model further
EVALUATED = 'validation_'  # prefix of the names of an evaluation's metrics
STEP = re.compile('0|[1-9][0-9]{0,17}')  # the name of a checkpoint's folder, without leading zeros


def read_config(workdir: Path) -> ConfigDict:
    """Returns the config of a run, with all current options. The run may be from an earlier version of this program.

    Raises:
      UserError: if the config is missing or damaged.
    """
    return read_saved_config(workdir)[0]


def read_saved_config(workdir: Path) -> tuple[ConfigDict, set[str]]:
    """Returns the config of a run, as `read_config` does, and the names of the options that config.json lacks."""
    try:
        return read_config_file(workdir / CONFIG)
    except (FileNotFoundError, NotADirectoryError):
        raise no_run(workdir) from None


def lowered_options(workdir: Path) -> dict[str, Any]:
    """Returns {option: requested value} for options that were lowered because there was too little data."""
    path = workdir / LOWERED
    return read_json(path, RESTORE) if path.exists() else {}


def is_imported(workdir: Path) -> bool:
    """Returns whether a run was imported. Its recipe reads the config of its own directory."""
    recipe = workdir / RECIPE
    return recipe.is_file() and 'read_config(' in recipe.read_text('utf-8', errors='replace')


def no_run(workdir: Path) -> UserError:
    """Returns the error for a path that is not a run directory."""
    reason = f'has no {CONFIG}' if workdir.exists() else 'does not exist'
    return UserError(f'{workdir} is not a run directory: it {reason}. Use the --workdir of a training')


def saved_steps(workdir: Path) -> list[int]:
    """Returns the steps of the complete checkpoints of a run, oldest first."""
    folder = workdir / 'checkpoints'
    return sorted(int(path.name) for path in folder.iterdir() if STEP.fullmatch(path.name)) if folder.is_dir() else []


def finished_at(workdir: Path, config: ConfigDict) -> int | None:
    """Returns the step at which a run has finished, or None if the run is not finished.

    A run is finished if its newest checkpoint has been evaluated, and one of two conditions is true: the checkpoint is
    at step config.train.steps, or the metric has not improved for config.eval.patience evaluations. This function does
    not read the checkpoints.
    """
    steps, values = saved_steps(workdir), evaluations(workdir, config.eval.metric)
    if not steps or steps[-1] not in values:
        return None
    progress = judge_all((values[step] for step in sorted(values) if step <= steps[-1]), metric=config.eval.metric,
                         patience=config.eval.patience)
    return steps[-1] if steps[-1] >= config.train.steps or progress.stopped else None


def finished_message(step: int, config: ConfigDict) -> str:
    """Returns the message that a run is finished at `step`.

    If config.train.steps is higher, the message also gives the reason: eval.patience has ended the training.
    """
    reason = '' if step >= config.train.steps else (
        f', because {EVALUATED}{config.eval.metric} has not improved for {config.eval.patience} evaluations. To '
        'continue, raise config.eval.patience')
    return f'this run is finished, at step {step}{reason}'


def evaluations(workdir: Path, metric: str) -> dict[int, float]:
    """Returns the values of a metric in the evaluations of a run, as {step: value}."""
    name = EVALUATED + metric
    return {int(line['step']): line[name] for line in read_metrics(workdir) if name in line}


def read_metrics(workdir: Path) -> list[dict[str, int | float]]:
    """Returns the lines of metrics.jsonl as dictionaries such as {'step': 100, 'train_loss': 5.07, ...}.

    Skips damaged lines, and values that are text or lists instead of numbers.
    """
    return _metrics(workdir)[0]


def damaged_metrics(workdir: Path) -> list[int]:
    """Returns the line numbers of the damaged lines of metrics.jsonl, from 1.

    An incomplete last line does not count as damaged, because a killed run may leave such a line.
    """
    return _metrics(workdir)[1]


def _metrics(workdir: Path) -> tuple[list[dict[str, int | float]], list[int]]:
    path, lines, damaged = Path(workdir) / METRICS_FILE, [], []
    content = read_bytes(path) if path.exists() else b''
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        try:
            metrics = json.loads(line)
            step = metrics.get('step') if isinstance(metrics, dict) else None
            if type(step) is not int or not 0 <= step < 2 ** 63:
                raise ValueError('the line has no step')
        except (ValueError, RecursionError):
            if line.endswith(b'\n'):
                damaged.append(number)
            continue
        lines.append({name: value for name, value in metrics.items() if is_number(value)})
    return lines, damaged


def is_number(value: Any) -> bool:
    """Returns whether a value of a JSON file is a number. Integers of more than 64 bits are not accepted."""
    return isinstance(value, float) or isinstance(value, int) and abs(value) < 2 ** 63


def tensorboard(folder: Path, *plugins: str) -> str:
    """Returns text for a message: the command that shows a folder of event files in TensorBoard.

    The text also names the packages that must be installed first, because TensorBoard is not installed with this
    project. `plugins` are TensorBoard plugins that the events need.
    """
    missing = [name for name in ('tensorboard', *plugins) if importlib.util.find_spec(name) is None]
    install = f' (after pip install {" ".join(missing)})' if missing else ''
    return f'tensorboard --logdir={shlex.quote(str(folder))}{install}'
