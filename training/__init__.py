"""Training: objectives, the step, the optimizer, the mesh, the training loop, metrics."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.loop import train

__all__ = ['train']


def __getattr__(name: str) -> Any:
    """Imports `train` on first use, because tools import other modules of this package but not the training loop."""
    if name == 'train':
        from training.loop import train
        return train
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
