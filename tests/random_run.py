"""Runs with random parameters, for every kind of model. They are not trained, and have no directory."""

from pathlib import Path

import jax.numpy as jnp

from configs import recipe
from inference.run import Run
from input_pipeline.tokenizer import ByteTokenizer
from model.build import build_model
from run_directory.trained import TrainedModel
from tests.model.helpers import random_params

SMALL = {'num_layers': 2, 'd_model': 8, 'd_ff': 12, 'num_heads': 2, 'dropout': 0.0}
TOKENS = jnp.ones((1, 4), jnp.int32)
RECIPES = {'transformer': 'demo', 'rnnsearch': 'rnnsearch_demo', 'language_model': 'shakespeare_char',
           'patches': 'digits_vit'}
SIZES = {'shape': (8, 8, 1), 'outputs': 3, 'classes': ['a', 'b', 'c'],
         'preprocessing': {'input_mean': [0.0], 'input_std': [1.0], 'target_mean': None, 'target_std': None}}


def random_run(kind, scale=2.0, **options):
    """Returns a run of bytes, or of images of 8 x 8. `options` are options of config.model. Its parameters are large.
    """
    config, tokenizer = recipe(RECIPES[kind]), ByteTokenizer()
    sizes = dict.fromkeys(('source_vocab_size', 'target_vocab_size', 'vocab_size'), len(tokenizer)) | SIZES
    with config.unlocked():
        small = {name: value for name, value in SMALL.items() if name in config.model}
        config.model.update(small | options)
        if kind == 'rnnsearch':
            config.model.recurrent.d_hidden = 6
    module = build_model(config.model, **sizes)
    inputs = {'source': TOKENS, 'target': TOKENS} if kind in ('transformer', 'rnnsearch') else (
        {'tokens': TOKENS} if kind == 'language_model' else {'inputs': jnp.zeros((1, *SIZES['shape']))})
    params = random_params(module, **inputs)
    params = {name: part if 'embedding' not in name else {'embedding': scale * part['embedding']}
              for name, part in params.items()} if kind != 'patches' else params
    tokenizers = dict.fromkeys(('source', 'target', 'text'), tokenizer)
    return Run(TrainedModel([Path('random')], config, module, params, [1], tokenizers, sizes))
