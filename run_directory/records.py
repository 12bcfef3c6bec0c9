"""Reads the records of a run directory: config, metrics, steps. Needs no JAX."""

import contextlib
import importlib.util
import json
import re
import shlex
from pathlib import Path

from ml_collections import ConfigDict

from configs.versions import read_saved
from run_directory.progress import judge_all
from runtime.errors import UserError
from runtime.files import read_bytes

CONFIG = 'config.json'
METRICS_FILE = 'metrics.jsonl'
EVALUATED = 'validation_'  # prefix of the names of an evaluation's metrics
STEP = re.compile('0|[1-9][0-9]{0,17}')  # the name of a checkpoint's folder; 060 is not one


def read_config(workdir: Path) -> ConfigDict:
    """Returns the resolved config of a run of this or an earlier version, with all current options.

    Raises:
      UserError: if the config is missing or damaged.
    """
    return read_saved_config(workdir)[0]


def read_saved_config(workdir: Path) -> tuple[ConfigDict, set[str]]:
    """Returns the config of a run as `read_config` does, and the options that its file does not set."""
    path = workdir / CONFIG
    try:
        content = json.loads(read_bytes(path).decode())
        if not isinstance(content, dict):
            raise ValueError('it is not an object')
        return read_saved(content)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f'{workdir} is not a run directory, because it has no {CONFIG}. Use the --workdir of a training'
                        ) from None
    except UserError as error:
        raise UserError(f'{path}: {error}') from None
    except (OSError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f'{path} is damaged: {error}. Take it from a copy of the run') from None


def saved_steps(workdir: Path) -> list[int]:
    """Returns the steps of the complete checkpoints of a run, oldest first."""
    folder = workdir / 'checkpoints'
    return sorted(int(path.name) for path in folder.iterdir() if STEP.fullmatch(path.name)) if folder.is_dir() else []


def finished_at(workdir: Path, config: ConfigDict) -> int | None:
    """Returns the step at which a run has finished, or None if it has more to train.

    A run is finished if its newest checkpoint is evaluated, and has made config.train.steps steps or patience has run
    out. Nothing but records is read.
    """
    steps, values = saved_steps(workdir), evaluations(workdir, config.eval.metric)
    if not steps or steps[-1] not in values:
        return None
    progress = judge_all((values[step] for step in sorted(values) if step <= steps[-1]), metric=config.eval.metric,
                         patience=config.eval.patience)
    return steps[-1] if steps[-1] >= config.train.steps or progress.stopped else None


def evaluations(workdir: Path, metric: str) -> dict[int, float]:
    """Returns {step: value of `metric`} of a run's evaluations."""
    name = EVALUATED + metric
    return {int(line['step']): line[name] for line in read_metrics(workdir) if name in line}


def read_metrics(workdir: Path) -> list[dict[str, int | float]]:
    """Returns the lines of metrics.jsonl: {'step': 100, 'train_loss': 5.07, ...}.

    Incomplete lines, which a killed run may leave, and values that are not numbers are skipped.
    """
    path, lines = Path(workdir) / METRICS_FILE, []
    for text in read_bytes(path).splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get('step'), int):
                lines.append({name: value for name, value in line.items()
                              if isinstance(value, float) or isinstance(value, int) and abs(value) < 2 ** 63})
    return lines


def tensorboard(folder: Path, *plugins: str) -> str:
    """Returns the command that shows the events in a folder. It names the packages that are not installed yet.

    TensorBoard is not installed with this project. `plugins` are further packages that the events need.
    """
    missing = [name for name in ('tensorboard', *plugins) if importlib.util.find_spec(name) is None]
    install = f' (after pip install {" ".join(missing)})' if missing else ''
    return f'tensorboard --logdir={shlex.quote(str(folder))}{install}'
