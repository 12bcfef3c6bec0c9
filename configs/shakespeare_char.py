"""A character language model of tiny Shakespeare on a CPU: nanoGPT's small setting.

    python train.py --config=configs/shakespeare_char.py --config.data.file=input.txt --workdir=runs/shakespeare_char

input.txt is the text of 1,115,394 characters in data/tinyshakespeare of the public repository karpathy/char-rnn. The
last 10 % of the text are used for validation. Our run (seed 0, two minutes on 2 cores) ends with a validation loss of
1.804 nats per character. nanoGPT reports 1.88 after the same number of steps, 2000 (README of nanoGPT, "I only have a
macbook"). nanoGPT estimates the loss from random windows. This project computes the loss of all characters of the
validation split.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.task = 'language_model'
    config.model.update(kind='language_model', num_layers=4, d_model=128, d_ff=512, num_heads=4, norm='pre',
                        activation='gelu', position='learned', max_length=64, dropout=0.0)
    config.data.update(source='files', context=64, packing='contiguous')
    config.data.tokenizer.kind = 'char'
    config.batch.rows = 12
    # These are nanoGPT's values, except for the peak, which is twice as high because the parameters are initialised in
    # another way. With nanoGPT's peak of 1e-3, the final loss is 1.90.
    config.optimizer.update(schedule='cosine', peak=2e-3, final=0.1, warmup=100, beta2=0.99, eps=1e-8,
                            weight_decay=0.1, clip=1.0)
    config.train.update(steps=2000, label_smoothing=0.0)
    config.eval.update(every=250, metric='loss')
    config.checkpoint.update(every=250, keep_last=2)
    config.decode.update(method='sample', temperature=0.8, extra_length=300)
    return config
