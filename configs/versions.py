"""Upgrades configs of earlier versions, as found in run directories, to the current options.

`config.json` records the version of the table of options at the time of writing. A file without a version has version
1. After a change of the table, every old run must still open, decode and resume. Therefore:

- to add an option whose default differs from the earlier behaviour, raise VERSION and give the earlier value in BEFORE;
- to rename an option, raise VERSION and give the new name in RENAMED;
- to refuse an option where it has no effect, give the condition in the table of options and raise VERSION.

A new option whose default keeps the earlier behaviour needs no entry: old configs get the default.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from configs import base
from configs.checks import check_config, unused, written
from configs.options import DEFAULTS, DROPOUTS, flatten, kind_problem
from runtime.errors import UserError, option_like
from runtime.files import read_bytes

# Version 3 does not allow names of splits with the built-in data, and version 4 does not allow them with data.file.
# Version 5 does not allow model.recurrent.d_align without attention, and train.r_drop without dropout.
# Version 6 does not allow model.rotary_scaling with a factor of 1, and train.simcut without cutoff and dropout.
VERSION = 6
RENAMED: dict[int, dict[str, str]] = {}  # version -> {name before this version: name from this version on}
BEFORE: dict[int, dict[str, Any]] = {    # version -> {current name: value before this version}
    2: {'data.plain_spaces': 0.0},
}
FOREIGN = "If the folder is a model of Hugging Face's library, config.json must have the field model_type"


def upgraded(options: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Returns the `options` of a config of version `version`, upgraded to the current version.

    The result has all current options, {'model.d_model': 512, ...}, in the order of the table. In earlier versions, a
    config could set options without effect on its model, task or source. Such options get their defaults. If d_align is
    equal to d_hidden in a version before 5, it also gets its default, which has the same meaning, because the recipes
    no longer set it.

    Raises:
      UserError: if the version is unknown, or an option is unknown or of another type.
    """
    options = renamed(options, version)
    for name, value in options.items():
        if name not in DEFAULTS:
            advice = option_like(name, DEFAULTS) or '. configs/options.py lists all options'
            raise UserError(f'there is no option {name}{advice}')
        if problem := kind_problem(name, value):
            raise UserError(f'{name}={written(value)}: {problem}, such as {DEFAULTS[name]!r}')
    before = {name: value for later, values in BEFORE.items() if later > version for name, value in values.items()}
    # JSON and the command line may give an integer for a float.
    options = {**DEFAULTS, **before, **{name: type(DEFAULTS[name])(value) for name, value in options.items()}}
    if version == VERSION:
        return options
    if options['model.rotary_factor'] == 1:
        options['model.rotary_scaling'] = DEFAULTS['model.rotary_scaling']
    options |= {name: DEFAULTS[name] for name in unused(options)}
    if not any(options[name] for name in DROPOUTS):
        options['train.r_drop'] = DEFAULTS['train.r_drop']
        if not options['train.cutoff']:
            options |= {name: DEFAULTS[name] for name in ('train.simcut', 'train.cutoff')}
    # The recipes before version 5 set d_align.
    if version < 5 and options['model.recurrent.d_align'] == options['model.recurrent.d_hidden']:
        options['model.recurrent.d_align'] = DEFAULTS['model.recurrent.d_align']
    return options


def config_text(config: ConfigDict) -> str:
    """Returns the content of a config.json: the options, and the current version of the table of options."""
    return json.dumps({'version': VERSION, **config.to_dict()}, indent=2) + '\n'


def read_config_file(path: Path) -> tuple[ConfigDict, set[str]]:
    """Reads a config.json. Returns the config with all current options, and the names of options missing in the file.

    Raises:
      UserError: if the file is damaged, or its options are unknown or not allowed. The message names the file.
      FileNotFoundError, NotADirectoryError: if the file does not exist.
    """
    try:
        saved = json.loads(read_bytes(path).decode())
        if not isinstance(saved, dict):
            raise ValueError('the file does not contain a JSON object')
        if 'model_type' not in saved:
            return read_saved(saved)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except UserError as error:
        raise UserError(f'{path}: {error}{"" if is_run(path.parent) else f". {FOREIGN}"}') from None
    except (RecursionError, OSError, TypeError, ValueError, OverflowError) as error:
        reason = 'it is nested too deeply' if isinstance(error, RecursionError) else error
        advice = 'Restore the file from a copy of the ' + ('run' if is_run(path.parent) else f'folder. {FOREIGN}')
        raise UserError(f'{path} is damaged: {reason}. {advice}') from None
    raise UserError(f"{path}: this is a model of Hugging Face's library, not a run. Make a run of the model with "
                    'tools.import_weights')


def is_run(folder: Path) -> bool:
    """Returns whether a folder with a config.json is a run or an exported run, and not a model of another library."""
    return any((folder / name).is_dir() for name in ('checkpoints', 'data'))


def read_saved(saved: Mapping[str, Any]) -> tuple[ConfigDict, set[str]]:
    """Returns the config with all current options, and the names of the options that `saved` does not set.

    `saved` is the content of a run's config.json.

    Raises:
      UserError: if the version of the config is unknown, or options are unknown or not allowed.
    """
    options = flatten(ConfigDict({name: part for name, part in saved.items() if name != 'version'}))
    current, config = upgraded(options, saved.get('version', 1)), base.get_config()
    config.update_from_flattened_dict(current)
    check_config(config)
    return config, current.keys() - options.keys()


def renamed(options: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Returns `options` with their current names. `options` are from a config or overrides of version `version`.

    Raises:
      UserError: if the version is unknown.
    """
    if type(version) is not int or not 1 <= version <= VERSION:
        raise UserError(f'the config has version {version!r}, but this program supports versions 1 to {VERSION}. Use '
                        'the version of the program that wrote the config, or a newer version')
    for later in range(version + 1, VERSION + 1):
        options = {RENAMED.get(later, {}).get(name, name): value for name, value in options.items()}
    return dict(options)
