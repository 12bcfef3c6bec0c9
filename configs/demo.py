"""English to French on the built-in corpus: dates, amounts, quantities, lists. No download.

    make demo
    python train.py --config=configs/demo.py --workdir=runs/demo

Training takes two to four minutes on 2 cores. Our runs (seeds 0 to 2 on one processor, seed 0 on another) translate
98.4 to 99.4 % of the held-out sentences exactly. The recipe uses rotary positions, because the model learns this corpus
faster with rotary positions. With the sinusoidal positions of the paper, 97.8 % of the translations are exact after
1,650 steps (measured with data.plain_spaces=0).
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(num_layers=2, d_model=128, d_ff=512, num_heads=4, position='rotary', dropout=0.1)
    config.data.max_length = 64
    config.data.tokenizer.update(vocab_size=1200, split_digits=True)  # single digits are easy to copy
    config.batch.update(tokens=1024, buckets=4)
    config.optimizer.update(schedule='cosine', peak=3e-3, warmup=300)
    config.train.steps = 1200  # 4 epochs
    config.eval.update(every=600, bleu_sentences=200)
    config.checkpoint.keep_last = 2
    return config
