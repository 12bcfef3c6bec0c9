"""Opens a run directory, and uses its model to translate, continue, classify and score."""

from inference.run import load
from inference.tables import to_pandas

__all__ = ['load', 'to_pandas']
