"""Writes random models of a few hundred parameters in each format, without the libraries that define the formats."""

import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from configs import base
from input_pipeline.tokenizer import PAD, train_tokenizer
from interchange.huggingface import read_huggingface, write_huggingface
from interchange.safetensors_folder import write_safetensors
from model.build import build_model
from run_directory.trained import TrainedModel

LINES = ['the man is in the house', 'a dog and 3 cats run', 'où est le café ?'] * 9
POSSIBLE = {
    'marian': {'norm_epsilon': 1e-5},
    'marian of two vocabularies': {'norm_epsilon': 1e-5, 'share_embeddings': 'target'},
    'gpt2': {'norm': 'pre', 'position': 'learned', 'max_length': 32, 'norm_epsilon': 1e-5},
    'llama': {'norm': 'pre', 'norm_function': 'rms_norm', 'feed_forward': 'gated', 'activation': 'silu',
              'position': 'rotary', 'num_key_value_heads': 2, 'feed_forward_bias': False},
    'llama3': {'norm': 'pre', 'norm_function': 'rms_norm', 'feed_forward': 'gated', 'activation': 'silu',
               'position': 'rotary', 'feed_forward_bias': False, 'rotary_scaling': 'llama3', 'rotary_factor': 8.0,
               'rotary_original_length': 64},
    'mistral': {'norm': 'pre', 'norm_function': 'rms_norm', 'feed_forward': 'gated', 'activation': 'silu',
                'position': 'rotary', 'feed_forward_bias': False, 'window': 8},
    'qwen2': {'norm': 'pre', 'norm_function': 'rms_norm', 'feed_forward': 'gated', 'activation': 'silu',
              'position': 'rotary', 'feed_forward_bias': False, 'attention_bias': 'qkv'},
}


@functools.cache
def tokenizer():
    return train_tokenizer(LINES, kind='bpe', vocab_size=300, split_digits=False, normalization='identity')


@functools.cache
def imported_tokenizer():
    """The same tokenizer as an import reads it. Only a model with such a tokenizer is exported as Qwen2."""
    with tempfile.TemporaryDirectory() as folder:
        write_huggingface(small_model('llama', Path(folder)), Path(folder))
        return read_huggingface(Path(folder)).tokenizers['text']


def small_model(name, workdir, **options):
    """Returns a random model of the form `name`. `options` are options of config.model."""
    config, translates = base.get_config(), name.startswith('marian')
    words = imported_tokenizer() if name == 'qwen2' else tokenizer()
    config.update_from_flattened_dict({
        'task': 'translation' if translates else 'language_model',
        'model.kind': 'transformer' if translates else 'language_model', 'model.num_layers': 1, 'model.d_model': 8,
        'model.d_ff': 12, 'model.num_heads': 4, 'data.tokenizer.vocab_size': len(words),
        **({'data.max_length': 24, 'data.tokenizer.joint': name == 'marian'} if translates else
           {'data.context': 24, 'eval.metric': 'loss'}),
        **{f'model.{option}': value for option, value in (POSSIBLE[name] | options).items()}})
    sides = ('source', 'target') if translates else ('text',)
    sizes = {f'{side}_vocab_size'.removeprefix('text_'): len(words) for side in sides}
    module, ones = build_model(config.model, **sizes, pad=PAD), jnp.ones((1, 3), jnp.int32)
    params = meta.unbox(module.init(jax.random.key(0), *[ones] * len(sides)))['params']
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: leaf + rng.normal(scale=0.1, size=leaf.shape).astype(np.float32), params)
    return TrainedModel([workdir], config, module, params, [0], dict.fromkeys(sides, words), sizes)


def write_small(name, folder):
    """Writes a small model. `name` is 'marian', 'gpt2', ..., or 'own' for this project's format of safetensors."""
    folder.mkdir(parents=True)
    trained = small_model('gpt2' if name == 'own' else name, folder)
    (write_safetensors if name == 'own' else write_huggingface)(trained, folder)
    return trained
