"""What a run directory holds as files, read without JAX."""

import contextlib
import importlib.util
import json
import shlex
from pathlib import Path

from ml_collections import ConfigDict

from configs import base
from configs.checks import check_config
from configs.options import flatten
from configs.versions import upgraded
from errors import UserError
from files import read_bytes

CONFIG = 'config.json'
METRICS_FILE = 'metrics.jsonl'
EVALUATED = 'validation_'  # what the names of an evaluation's measures begin with


def read_config(workdir: Path) -> ConfigDict:
    """The resolved config of a run, of this or an earlier version, with all options of today.

    Raises:
      UserError: if it is not there, or damaged.
    """
    return read_said_config(workdir)[0]


def read_said_config(workdir: Path) -> tuple[ConfigDict, set[str]]:
    """The config of a run, and the options that it does not say."""
    path = workdir / CONFIG
    try:
        said = json.loads(read_bytes(path).decode())
        if not isinstance(said, dict):
            raise ValueError('it holds no object')
        version = said.pop('version', 1)
        said = flatten(ConfigDict(said))
        options, config = upgraded(said, version), base.get_config()
        config.update_from_flattened_dict(options)
        check_config(config)
        return config, options.keys() - said.keys()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f'{workdir} is not a run directory: it has no {CONFIG}. Give the --workdir of a training'
                        ) from None
    except UserError as error:
        raise UserError(f'{path}: {error}') from None
    except (OSError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f'{path} is damaged: {error}') from None


def evaluations(workdir: Path, metric: str) -> dict[int, float]:
    """What the evaluations of a run found, by step."""
    name = EVALUATED + metric
    return {int(line['step']): line[name] for line in read_metrics(workdir) if name in line}


def read_metrics(workdir: Path) -> list[dict[str, int | float]]:
    """The lines of metrics.jsonl: {'step': 100, 'train_loss': 5.07, ...}.

    Without what a run that was killed in the middle of a line left there, and without what is no number.
    """
    path, lines = Path(workdir) / METRICS_FILE, []
    for line in read_bytes(path).splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(found.get('step'), int):
                lines.append({name: value for name, value in found.items()
                              if isinstance(value, float) or isinstance(value, int) and abs(value) < 2 ** 63})
    return lines


def tensorboard(folder: Path, *plugins: str) -> str:
    """The command that shows the events of a folder, and what to install first: TensorBoard is no part of this project.

    `plugins` are the packages that what is to be seen needs besides.
    """
    missing = [name for name in ('tensorboard', *plugins) if importlib.util.find_spec(name) is None]
    first = f' (after pip install {" ".join(missing)})' if missing else ''
    return f'tensorboard --logdir={shlex.quote(str(folder))}{first}'
