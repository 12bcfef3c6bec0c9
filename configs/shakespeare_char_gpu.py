"""A character language model of tiny Shakespeare: nanoGPT's setting for one GPU.

    python train.py --config=configs/shakespeare_char_gpu.py --config.data.file=input.txt --workdir=runs/shakespeare

The data is the same as in configs/shakespeare_char.py. nanoGPT reports 1.4697 nats per character as the best validation
loss. We have not trained this recipe.
"""

from ml_collections import ConfigDict

from configs import shakespeare_char


def get_config() -> ConfigDict:
    config = shakespeare_char.get_config()
    config.model.update(num_layers=6, d_model=384, d_ff=1536, num_heads=6, max_length=256, dropout=0.2,
                        attention_dropout=0.2)
    config.data.context = 256
    config.batch.rows = 64
    config.optimizer.peak = 1e-3
    config.train.steps = 5000
    return config
