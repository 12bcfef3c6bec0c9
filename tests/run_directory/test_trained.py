"""Trained models whose files come from different runs."""

import json

import jax.numpy as jnp
import pytest

from configs import recipe
from input_pipeline.kept_data import KEPT, SIZES
from model.build import build_model
from run_directory.trained import make_model
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
