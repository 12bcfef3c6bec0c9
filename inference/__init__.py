"""Opens a run directory, and uses its model to translate, continue, classify and score."""

from typing import Any

from inference.run import load
from inference.tables import to_pandas

__all__ = ['load', 'to_pandas']


def __getattr__(name: str) -> Any:
    """Raises AttributeError, because the package has no such name. For `train`, the message names the new package."""
    if name == 'train':
        raise AttributeError('inference.train has moved: use training.train, or allyouneed.train in a notebook')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
