"""The table of options, the tasks, and the recipes. A recipe is one file with a function get_config()."""

from pathlib import Path

NO_RECIPES = ('__init__', 'base', 'checks', 'fine_tune', 'options', 'tasks', 'versions')  # fine_tune makes one of a run


def recipes() -> list[Path]:
    """Returns the files of this folder that are recipes by themselves."""
    return sorted(path for path in Path(__file__).parent.glob('*.py') if path.stem not in NO_RECIPES)
