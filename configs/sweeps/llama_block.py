"""Compares the block of *Attention Is All You Need* with each change that Llama makes to it, and with all changes.

    python sweep.py --config=configs/llama_tiny.py --sweep=configs/sweeps/llama_block.py --workdir=sweeps/llama_block

There are three seeds. All runs have the size and the number of steps of the recipe. The gated feed-forward sublayer has
two thirds of the width of the plain sublayer, so that both have the same number of parameters. The runs with fewer
heads of keys and values have fewer parameters. All other options have the values of the recipe.
"""

from configs.sweeps import product, seeds


def get_sweep(config):
    model = config.model
    gated = model.feed_forward == 'gated'
    paper = {'model.norm': 'post', 'model.norm_function': 'layer_norm', 'model.feed_forward': 'plain',
             'model.activation': 'relu', 'model.d_ff': model.d_ff * 3 // 2 if gated else model.d_ff,
             'model.position': 'sinusoidal', 'model.num_key_value_heads': 0, 'model.feed_forward_bias': True}
    half = model.num_heads // 2 if model.num_heads % 2 == 0 else 1
    changes = [
        {'model.norm': 'pre'},
        {'model.norm_function': 'rms_norm'},
        {'model.feed_forward': 'gated', 'model.activation': 'silu',  # SwiGLU
         'model.d_ff': model.d_ff if gated else model.d_ff * 2 // 3},
        {'model.position': 'rotary'},
        {'model.num_key_value_heads': model.num_key_value_heads or half},
        {'model.feed_forward_bias': False},
    ]
    together = {option: value for change in changes for option, value in change.items()}
    return product([paper | change for change in ({}, *changes, together)], seeds(3))
