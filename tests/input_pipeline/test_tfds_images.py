"""Images of TensorFlow Datasets."""

import subprocess
import sys

import numpy as np
import pytest

from runtime.errors import UserError
from tests.input_pipeline.helpers import SPLITS, open_arrays, options

# TFDS. The dataset is built by a process of its own, as in test_sources.py; PNG bytes, which need no TensorFlow.

BUILD = """
import io, sys
import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

class TinyImages(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
            'image': tfds.features.Image(shape=(4, 4, 3)), 'label': tfds.features.ClassLabel(names=['cat', 'dog'])}))

    def _split_generators(self, dl_manager):
        return {'train': self._generate_examples(10), 'test': self._generate_examples(4)}

    def _generate_examples(self, count):
        for number in range(count):
            file = io.BytesIO()
            Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(file, 'png')
            file.seek(0)
            yield number, {'image': file, 'label': number % 2}

class NoLabels(TinyImages):
    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
            'image': tfds.features.Image(shape=(None, None, 3)), 'label': tfds.features.Scalar(np.int64)}))

class NoImages(TinyImages):
    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
            'text': tfds.features.Text(), 'label': tfds.features.ClassLabel(names=['cat', 'dog'])}))

    def _generate_examples(self, count):
        yield 0, {'text': 'meow', 'label': 0}

for builder in TinyImages, NoLabels, NoImages:
    builder(data_dir=sys.argv[1], file_format='array_record').download_and_prepare()
"""


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tfds')
    subprocess.run([sys.executable, '-c', BUILD, folder], check=True, capture_output=True)
    return folder


def open_tiny(folder, name='tiny_images', **splits):
    names = {'train': 'train[:80%]', 'validation': 'train[80%:]', 'test': 'test'} | splits
    return open_arrays(options(source='tfds', name=name, dir=str(folder), splits=names), labelled=True)


def test_tfds_images(prepared):
    data = open_tiny(prepared)
    assert data.classes == ['cat', 'dog'] and data.sizes == {'outputs': 2, 'shape': [4, 4, 3]}
    assert [len(data.inputs(split)) for split in SPLITS] == [8, 2, 4]
    numbers = np.concatenate([data.inputs(split)[:, 0, 0, 0] for split in ('train', 'validation')])
    assert data.inputs('train').dtype == np.uint8 and sorted(numbers) == list(range(10))
    np.testing.assert_array_equal(data.targets('train'), data.inputs('train')[:, 1, 2, 2] % 2)


@pytest.mark.parametrize('changes, message', [
    ({'name': 'no_such'}, r"data\.name='no_such' cannot be opened in .*: Dataset no_such not found"),
    ({'name': 'no_labels'}, r'name=no_labels: the dataset has images of shape \(None, None, 3\) and the label .*'),
    ({'name': 'no_images'}, r'name=no_images: the dataset has the features label, text, but it must have image and'),
    ({'train': 'training'}, r"splits\.train='training' cannot be read from .*Unknown split"),
    ({'name': 'mnist'}, r'mnist is not in .* TensorFlow .*tfds build mnist --file_format=array_record'),
])
def test_tfds_mistakes_are_explained(prepared, monkeypatch, changes, message):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)  # no TensorFlow
    with pytest.raises(UserError, match=message):
        open_tiny(prepared, **changes).inputs('train')
