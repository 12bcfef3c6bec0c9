"""A language model of 1.1 billion parameters with the block of the Llama family.

Plan the training first: tools.plan computes whether the model fits into the memory of the devices.

    python -m tools.plan --config=configs/lm_1b.py --topology=v5e:8x8 --config.parallel.data=1 --config.parallel.fsdp=-1
    python train.py --config=configs/lm_1b.py --config.parallel.data=1 --config.parallel.fsdp=-1 --workdir=runs/lm_1b

With these flags, the devices share the parameters. Without the flags, a step needs 24.5 GiB on each chip of v5e:8x8
(by formula), but a chip has 16 GiB.

We have not trained this recipe. A step has 0.5 million tokens, so 50,000 steps have 26 billion tokens. This is about 24
tokens per parameter (Hoffmann et al. 2022, arXiv:2203.15556, table 3). Learning rate, warm-up, beta2, weight decay and
clipping are the values of the 7B model in Touvron et al. 2023, arXiv:2302.13971. The number of layers, d_model and d_ff
are those of TinyLlama (Zhang et al. 2024, arXiv:2401.02385), which has 32 heads, and 4 heads of keys and values. This
recipe has 16 heads, and 8 heads of keys and values. docs/planning.md has plans for 4 to 256 chips.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.task = 'language_model'
    config.model.update(kind='language_model', num_layers=22, d_model=2048, d_ff=5632, num_heads=16,
                        num_key_value_heads=8, norm='pre', norm_function='rms_norm', feed_forward='gated',
                        feed_forward_bias=False, activation='silu', position='rotary', dropout=0.0, dtype='bfloat16',
                        remat=True, remat_keep='products')
    config.data.update(source='tfds', name='c4/en', context=2048, packing='packed')
    config.data.tokenizer.update(kind='bpe', vocab_size=32_000)
    config.batch.rows = 256
    config.optimizer.update(schedule='cosine', peak=3e-4, final=0.1, warmup=2000, beta2=0.95, eps=1e-8,
                            weight_decay=0.1, clip=1.0)
    config.train.update(steps=50_000, label_smoothing=0.0)
    config.eval.update(every=2500, metric='loss')
    config.checkpoint.update(every=1000, keep_last=2)
    return config
