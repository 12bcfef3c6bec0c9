"""From a run directory to answers: load, search, translate, score."""

from inference.run import load

__all__ = ['load']
