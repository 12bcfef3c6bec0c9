"""From a run directory to answers: load, search, translate, score."""

from inference.run import load
from inference.tables import to_pandas

__all__ = ['load', 'to_pandas']
