"""The table of options, the tasks, and the recipes. A recipe is one file with a function get_config()."""

import importlib
from pathlib import Path

from ml_collections import ConfigDict

from runtime.errors import UserError, did_you_mean

# Files of this folder that are not complete recipes. fine_tune.py needs a run directory to make a recipe.
NO_RECIPES = ('__init__', 'allowed', 'base', 'checks', 'fine_tune', 'options', 'rules', 'tasks', 'versions')


def recipes() -> list[Path]:
    """Returns the files of the recipes that need no argument."""
    return sorted(path for path in Path(__file__).parent.glob('*.py') if path.stem not in NO_RECIPES)


def recipe(name: str) -> ConfigDict:
    """Returns the config of a recipe: the config that the flag --config=configs/NAME.py selects.

    `name` is the NAME of a recipe, such as 'demo'. It may also be 'fine_tune:RUN' for a run directory RUN.

    Raises:
      UserError: if there is no recipe of this name, or `name` has an argument that the recipe does not take.
    """
    module, _, argument = name.partition(':')
    names = [path.stem for path in recipes()]
    if module not in [*names, 'fine_tune']:
        raise UserError(f'there is no recipe {module!r}{did_you_mean(module, names) or ". Use " + ", ".join(names)}')
    if argument and module in names:
        raise UserError(f'recipe {name!r}: only fine_tune takes an argument. Use {module!r}')
    return importlib.import_module(f'configs.{module}').get_config(*[argument] if argument else [])
