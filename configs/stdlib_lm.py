"""A language model of Python source code, trained on the standard library of the installed Python. No download.

    python train.py --config=configs/stdlib_lm.py --workdir=runs/stdlib_lm

Results of our run (seed 0, Python 3.11, 49 minutes on 2 cores): 1.67 bits per byte on the validation split, 1.35 on the
test split. With Python 3.11, the training split has 8.6 MB in 486 modules. The validation split and the test split each
have 5 % of the modules. The text depends on the version of Python, so compare bits per character only between runs with
the same version of Python.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.task = 'language_model'
    config.model.update(kind='language_model', num_layers=4, d_model=192, d_ff=768, num_heads=6, norm='pre',
                        activation='gelu', position='learned', max_length=256, dropout=0.1)
    config.data.update(source='builtin', context=256, packing='packed')
    config.data.tokenizer.update(kind='bpe', vocab_size=4000)
    config.batch.rows = 16
    config.optimizer.update(schedule='cosine', peak=1e-3, final=0.1, warmup=200, beta2=0.99, eps=1e-8,
                            weight_decay=0.1, clip=1.0)
    config.train.update(steps=3000, label_smoothing=0.0)
    config.eval.update(every=500, metric='loss')
    config.checkpoint.update(every=500, keep_last=2)
    config.decode.update(method='sample', temperature=0.8, extra_length=300)
    return config
