"""Exports `read_config` under its former name.

The file `recipe.py` in a run directory that an earlier version imported from another library contains
`from training.records import read_config`. Without this module, such a run could not be trained further.
"""

from run_directory.records import read_config

__all__ = ['read_config']
