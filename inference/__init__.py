"""From a run directory to answers: load, search, translate, score, look."""

import model  # noqa: F401 (it sees to right sums, which must be before JAX computes anything)

__all__ = ['load']


def __getattr__(name: str):
    """`load`, imported when it is asked for: a script of this folder begins with command_line, as the others do."""
    if name != 'load':
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    from inference.run import load
    return load
