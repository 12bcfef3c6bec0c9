"""Functions that several tests of data sets use."""

import jax
import numpy as np
from ml_collections import ConfigDict

from input_pipeline.batches import Part

SPLITS = ('train', 'validation', 'test')
INPUTS = np.random.default_rng(0).normal(3, 2, (10, 7, 2))
CLASSES = np.arange(10) % 4
SETTINGS = {'kind': 'bpe', 'vocab_size': 300, 'split_digits': False, 'normalization': 'identity', 'joint': True}


def options(**changes):
    """Returns the options of config.data for arrays."""
    return ConfigDict(dict(source='files', name='', dir='', seed=0, validation_share=0.25, image_size=0,
                           missing='error', splits={split: split for split in SPLITS}) | changes)


def assert_filled_up(plan, step, shares, accumulate, processes):
    """Checks the rows that `processes` read together: the batch, and the padding rows that shares x accumulate need."""
    whole = plan.batch(step)
    each = shares // processes
    read = [plan.batch(step, Part(first, first + each, shares, shares * accumulate))
            for first in range(0, shares, each)]
    assert len({len(batch['targets']) for batch in read}) == 1
    together = jax.tree.map(lambda *rows: np.concatenate(rows), *read)
    rows, filled = len(whole['targets']), len(together['targets'])
    assert filled % (shares * accumulate) == 0 and filled - rows < shares * accumulate
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one, other[:rows]), whole, together)
    for array in jax.tree.leaves(together):
        assert not array[rows:].any()


def stores(cache):
    """Returns the entries of the cache, complete or not."""
    return sorted(cache.glob('tokens/*'))
