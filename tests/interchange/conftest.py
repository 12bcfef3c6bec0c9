"""A fixture with a trained run, for comparing the searches of all libraries."""

import pytest

import inference
from configs import demo
from tests.tiny_run import start


@pytest.fixture(scope='session')
def run(tmp_path_factory):
    """Trains the demo for a short time, with the paper's positions, which all libraries support."""
    root, config = tmp_path_factory.mktemp('run'), demo.get_config()
    config.update_from_flattened_dict({
        'cache_dir': str(root / 'cache'), 'model.num_layers': 1, 'model.d_model': 64, 'model.d_ff': 128,
        'model.position': 'sinusoidal', 'batch.buckets': 1, 'optimizer.warmup': 100, 'train.steps': 1600,
        'eval.every': 1600, 'eval.bleu_sentences': 8, 'checkpoint.every': 800})
    start(root / 'run', config)
    return inference.load(root / 'run')
