"""A small language model of Python source code with the block of the Llama family. No download.

    python train.py --config=configs/llama_tiny.py --workdir=runs/llama_tiny

The block of *Attention Is All You Need* has post-norm, layer norm, relu, sinusoids, and as many heads of keys as heads
of queries. The block of this recipe has pre-norm and RMSNorm, SwiGLU with two thirds of the width (so the number of
parameters is the same), rotary positions, grouped queries, and no biases. Training takes a few minutes on 2 cores. The
sweep configs/sweeps/llama_block.py trains the block of the paper, the block with each single change, and the block with
all changes, with the same size and budget:

    python sweep.py --config=configs/llama_tiny.py --sweep=configs/sweeps/llama_block.py --workdir=sweeps/llama_block

Llama itself neither scales its embeddings nor ties them to the output: scale_embeddings=False, tie_embeddings=False.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.task = 'language_model'
    config.model.update(kind='language_model', num_layers=4, d_model=128, d_ff=344, num_heads=4, num_key_value_heads=2,
                        norm='pre', norm_function='rms_norm', feed_forward='gated', feed_forward_bias=False,
                        activation='silu', position='rotary', dropout=0.0)
    config.data.update(source='builtin', context=128, packing='packed')
    config.data.tokenizer.update(kind='bpe', vocab_size=2000)
    config.batch.rows = 16
    config.optimizer.update(schedule='cosine', peak=2e-3, final=0.1, warmup=100, beta2=0.99, eps=1e-8,
                            weight_decay=0.1, clip=1.0)
    config.train.update(steps=1500, label_smoothing=0.0)
    config.eval.update(every=250, metric='loss')
    config.checkpoint.update(every=250, keep_last=2)
    config.decode.update(method='sample', temperature=0.8, extra_length=300)
    return config
