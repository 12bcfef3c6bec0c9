r"""Fine-tuning: continues the training of a model on other data.

    python train.py --config=configs/fine_tune.py:RUN --config.data.source=files --config.data.dir=DIR \
                    --workdir=runs/tuned

This command starts with the parameters and the vocabulary of the run directory RUN. The recipe uses the config of RUN,
with a learning rate that suits a trained model. So the languages and the names of the splits are those of RUN, unless
you set them. If RUN has read a file (data.file), also set --config.data.file= (nothing after =). If RUN has read a
folder (data.dir) and you set data.file, also set --config.data.dir= (nothing after =). The cache_dir of RUN is not
used: set --config.cache_dir if you do not want the default. By default, the parameters are read from the best
checkpoint of RUN. Further options:

- --config.data.file=FILE, instead of --config.data.dir, trains a language model on one text.
- --config.train.init_from=RUN:average:5 starts with the mean of the last 5 checkpoints instead.
- --config.train.frozen='encoder,*embedding' does not train the encoder and the embeddings.
- --config.train.lora_rank=8 trains only low-rank adapters.
- --config.train.init_vocabulary=False learns a new vocabulary from the new data.
"""

from ml_collections import ConfigDict

from configs.options import DEFAULTS
from configs.versions import read_config_file
from runtime.errors import UserError
from runtime.files import expanded

# These options of config.train are reset to their defaults, because they describe the training of RUN: its teacher,
# its initial vocabulary and its trained parts.
NOT_TAKEN_OVER = ('teacher', 'teacher_checkpoint', 'teacher_weight', 'init_vocabulary', 'frozen', 'lora_rank',
                  'lora_alpha', 'lora_parts')


def get_config(run: str = '') -> ConfigDict:
    """Returns the config that fine-tunes the model of the run directory `run`."""
    path = expanded(run) / 'config.json'
    if not run or not path.is_file():
        raise UserError('--config=configs/fine_tune.py:RUN needs a run directory'
                        + (f', but {path} does not exist' if run else ''))
    config, _ = read_config_file(path)
    config.cache_dir = DEFAULTS['cache_dir']  # it contains machine code, and RUN may come from an untrusted source
    config.train.update({name: DEFAULTS[f'train.{name}'] for name in NOT_TAKEN_OVER})
    config.train.update(init_from=run, steps=2000)
    config.optimizer.update(schedule='cosine', peak=3e-4, final=0.0, warmup=100, factor=1.0)
    config.eval.every, config.checkpoint.every = 500, 500
    return config
