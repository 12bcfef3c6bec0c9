"""The old import path of `read_config`, for run directories of earlier versions.

When earlier versions imported a model, they wrote `from training.records import read_config` to the file `recipe.py` of
the run directory. Without this module, such a run could not be trained further.
"""

from run_directory.records import read_config

__all__ = ['read_config']
