"""From a run directory to answers: load, search, translate, score, look."""

from inference.run import load

__all__ = ['load']
