"""Functions that several tests of data sets use."""

import gzip

import jax
import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from input_pipeline import arrays
from input_pipeline.arrays import ArrayData
from input_pipeline.batches import Part
from input_pipeline.examples import Examples
from input_pipeline.input_format import InputFormat
from input_pipeline.preprocessing import Preprocessing

SPLITS = ('train', 'validation', 'test')
INPUTS = np.random.default_rng(0).normal(3, 2, (10, 7, 2))
CLASSES = np.arange(10) % 4
SERIES = InputFormat((7, 2), Preprocessing([0.0, 0.0], [1.0, 1.0], None, None), ('0', '1'))
SETTINGS = {'kind': 'bpe', 'vocab_size': 300, 'split_digits': False, 'normalization': 'identity', 'joint': True}


def options(**changes):
    """Returns the options of config.data for arrays."""
    return ConfigDict(dict(source='files', name='', dir='', seed=0, validation_share=0.25, image_size=0,
                           missing='error', splits={split: split for split in SPLITS}) | changes)


def open_arrays(data, labelled, multiple=1):
    """Opens arrays, by default for patches of one step."""
    return arrays.open_arrays(data, labelled, multiple)


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


def read(folder, split='train', labelled=True, **changes):
    data = open_arrays(options(dir=str(folder), **changes), labelled)
    return data.inputs(split), data.targets(split)


def write_npz(folder, **arrays):
    for split in SPLITS:
        np.savez(folder / f'{split}.npz', **arrays)


def write_csv(folder, *lines, split=None, suffix=''):
    for name in [split] if split else SPLITS:
        content = ''.join(f'{line}\n' for line in lines).encode()
        (folder / f'{name}.csv{suffix}').write_bytes(gzip.compress(content) if suffix else content)


def save_image(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)


def in_memory(inputs, targets, labelled=True, **others):
    """A data set whose splits are the same unless `others` has them."""
    return ArrayData(lambda split: Examples(*others.get(split, (inputs, targets)), where=f'file of {split}'), labelled)


def images(count=21, side=6, channels=1):
    """Returns images. Only a corner of each image is not 0: it contains the number of the image."""
    array = np.zeros((count, side, side, channels), np.uint8)
    array[:, 0, 0, 0] = np.arange(count) + 1
    return array


def image_data(count=21, **sizes):
    return in_memory(images(count, **sizes), np.arange(count) % 3)


def float64_standardised(raw):
    wide = raw.astype(np.float64)
    axes = tuple(range(raw.ndim - 1))
    return (wide - wide.mean(axis=axes)) / wide.std(axis=axes)
