"""From a run directory to answers: load, search, translate, score. And from a config to a run directory: train."""

from typing import TYPE_CHECKING, Any

from inference.run import load
from inference.tables import to_pandas

if TYPE_CHECKING:
    from training.loop import train

__all__ = ['load', 'to_pandas', 'train']


def __getattr__(name: str) -> Any:
    """Imports `train` where it is used: what only training needs takes a second, which decode.py has no use for."""
    if name == 'train':
        from training.loop import train
        return train
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
