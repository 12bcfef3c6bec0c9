"""The former home of the function `read_config`, for run directories that import it from this module.

The file `recipe.py` in a run directory that an earlier version imported from another library contains
`from training.records import read_config`. Without this module, such a run could not be trained further.
"""

from run_directory.records import read_config

__all__ = ['read_config']
