"""The old place of `read_config`, which recipe.py in the directories of earlier imported runs still imports."""

from run_directory.records import read_config

__all__ = ['read_config']
