"""Every option, the tasks, and recipes: a file each, with a function get_config()."""

from pathlib import Path

NO_RECIPES = ('__init__', 'base', 'checks', 'options', 'tasks', 'versions')


def recipes() -> list[Path]:
    """The recipes of this folder."""
    return sorted(path for path in Path(__file__).parent.glob('*.py') if path.stem not in NO_RECIPES)
