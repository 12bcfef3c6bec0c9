"""Random keys: different seeds and different purposes never share a key, not even the adjacent seeds of sweeps."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests.tiny_run import start, tiny_config
from training import loop
from training.step import key_for


def test_all_keys_of_many_seeds_differ():
    keys = [np.asarray(jax.random.key_data(key_for(use, seed))).tobytes()
            for use in ('params', 'dropout') for seed in [*range(300), 2 ** 31 - 1]]
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
def test_a_training_s_dropout_key_is_not_the_one_that_the_next_seed_s_parameters_are_made_from(tmp_path, monkeypatch):
    keys, examples, states = {}, {}, {}

    class Watched(loop.Compiled):
        def __init__(self, module, optimizer, example, **options):
            keys[len(keys)], examples[len(examples)] = options['dropout_key'], (module, example['inputs'])
            super().__init__(module, optimizer, example, **options)

    monkeypatch.setattr(loop, 'Compiled', Watched)
    monkeypatch.setattr(loop, 'train_steps', lambda parts, state, *_: states.setdefault(len(states), state))
    for seed in range(3):
        start(tmp_path / str(seed), tiny_config(tmp_path / 'cache', seed=seed))
    module, inputs = examples[0]
    init = jax.jit(lambda key, inputs: nn.unbox(module.init(key, **inputs))['params']['embedding']['kernel'])
    of_parameters = [np.asarray(state.params['embedding']['kernel']) for state in states.values()]
    of_dropout = [np.asarray(init(key, inputs)) for key in keys.values()]
    assert len({table.tobytes() for table in [*of_parameters, *of_dropout]}) == 6
