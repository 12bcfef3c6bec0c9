"""Fine-tuning: continues the training of a model on other data.

    python train.py --config=configs/fine_tune.py:RUN --config.data.dir=DIR --workdir=runs/tuned

starts with the parameters and the vocabulary of the run directory RUN. The config is that of RUN, with a learning rate
for a trained model. The parameters are those of the best checkpoint, unless --config.train.init_from=RUN:average:5
selects others. --config.train.frozen='encoder,*embedding' does not train these parts, and --config.train.lora_rank=8
trains only low-rank adapters. --config.train.init_vocabulary=False learns a vocabulary from the new data.
"""

from pathlib import Path

from ml_collections import ConfigDict

from configs.options import DEFAULTS
from configs.versions import read_config_file
from runtime.errors import UserError

# Options of config.train that describe how RUN was trained: the teacher, the start and the parts that were trained.
NOT_TAKEN_OVER = ('teacher', 'teacher_checkpoint', 'teacher_weight', 'init_vocabulary', 'frozen', 'lora_rank',
                  'lora_alpha', 'lora_parts')


def get_config(run: str = '') -> ConfigDict:
    """Returns the config that continues the training of a run directory."""
    path = Path(run).expanduser() / 'config.json'
    if not run or not path.is_file():
        raise UserError('--config=configs/fine_tune.py:RUN needs a run directory'
                        + (f', but {path} does not exist' if run else ''))
    config, _ = read_config_file(path)
    config.train.update({name: DEFAULTS[f'train.{name}'] for name in NOT_TAKEN_OVER})
    config.train.update(init_from=run, steps=2000)
    config.optimizer.update(schedule='cosine', peak=3e-4, final=0.0, warmup=100, factor=1.0)
    config.eval.every, config.checkpoint.every = 500, 500
    return config
