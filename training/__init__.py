"""From a config to a run directory: objective, step, optimizer, mesh, the training loop, metrics."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.loop import train

__all__ = ['train']


def __getattr__(name: str) -> Any:
    """Imports `train` when it is used: the modules of this package that tools import need no training loop."""
    if name == 'train':
        from training.loop import train
        return train
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
