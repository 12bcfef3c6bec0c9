"""What the tests of array data sets share."""

import numpy as np
from ml_collections import ConfigDict

SPLITS = ('train', 'validation', 'test')
INPUTS = np.random.default_rng(0).normal(3, 2, (10, 7, 2))
CLASSES = np.arange(10) % 4


def options(**changes):
    """config.data, as far as it concerns arrays."""
    return ConfigDict(dict(source='files', name='', dir='', seed=0, validation_share=0.25,
                           splits={split: split for split in SPLITS}) | changes)
