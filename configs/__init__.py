"""The table of options, the tasks, and the recipes. A recipe is one file with a function get_config()."""

from pathlib import Path

NO_RECIPES = ('__init__', 'allowed', 'base', 'checks', 'options', 'tasks', 'versions')


def recipes() -> list[Path]:
    """Returns the files of this folder that are recipes."""
    return sorted(path for path in Path(__file__).parent.glob('*.py') if path.stem not in NO_RECIPES)
