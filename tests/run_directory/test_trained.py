"""Trained models whose files come from different runs."""

import json

import jax.numpy as jnp
import pytest

from configs import recipe
from input_pipeline.kept_data import KEPT, SIZES
from model.build import build_model
from run_directory.records import LOWERED
from run_directory.trained import make_model, vocabulary_from
from runtime.errors import UserError
from tests import random_run
from tests.model.helpers import random_params


def test_parameters_are_checked_again_if_the_inputs_have_another_shape(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    config, sizes = recipe('digits_vit'), random_run.SIZES
    params = random_params(build_model(config.model, **sizes), jnp.zeros((1, *sizes['shape'])))
    (tmp_path / KEPT).mkdir()
    path = tmp_path / KEPT / SIZES
    path.write_text(json.dumps(sizes))
    make_model(tmp_path, config, params, [1])
    path.write_text(json.dumps(sizes | {'shape': [16, 8, 1]}))
    with pytest.raises(UserError, match='config.json and data/sizes.json do not fit the checkpoint'):
        make_model(tmp_path, config, params, [1])


@pytest.mark.parametrize('option', ['teacher', 'init_from'])
def test_a_lowered_size_of_the_vocabulary_is_also_the_size_of_a_student_with_the_same_recipe(tmp_path, caplog, option):
    theirs, size = recipe('demo'), 'data.tokenizer.vocab_size'
    requested, theirs.data.tokenizer.vocab_size = theirs.data.tokenizer.vocab_size, 900
    (tmp_path / KEPT).mkdir()
    (tmp_path / 'config.json').write_text(theirs.to_json())
    (tmp_path / LOWERED).write_text(json.dumps({size: requested}))
    caplog.set_level('INFO', logger='allyouneed')
    config = recipe('demo')
    config.train[option] = str(tmp_path)
    with pytest.raises(UserError, match=f'{size}={requested}: must be 900, as in the run config.train.{option}='):
        vocabulary_from(config, asked=[size])
    assert vocabulary_from(config, asked=[]) == tmp_path and config.data.tokenizer.vocab_size == 900
    config.data.tokenizer.vocab_size = requested
    vocabulary_from(config, asked=[])  # a plan reads the vocabulary several times
    line = f'config.{size}=900 is used instead of {requested}, as in the run config.train.{option}='
    assert caplog.text.count(line) == 1
    config.data.tokenizer.vocab_size = requested + 1
    with pytest.raises(UserError, match=f'{size}={requested + 1}: must be 900'):
        vocabulary_from(config, asked=[])
