"""Shows one training batch as text: python -m tools.show_batch --config=configs/NAME.py --step=1234

The batch of a step depends only on the config, so all runs of a config train on the same batch in this step. With
--workdir=RUN instead of --config, the script uses the config and the tokenizers of the run.

The script prints one line for each row of the batch. For text, a line contains the texts of the tokens: a sentence pair
(source TAB target) or a window. For images and series, a line contains the target, and the mean and the standard
deviation of the inputs. The shapes are logged to stderr.
"""

import logging

from absl import flags
from ml_collections import config_flags

from command_line import flag_files_explained, run_script
from configs.allowed import Between
from configs.checks import config_from
from configs.options import MOST_STEPS
from runtime.errors import UserError
from runtime.files import expanded
from runtime.process_setup import slow_imports

with flag_files_explained():
    CONFIG_FLAG = config_flags.DEFINE_config_file('config', None, 'The recipe, a file of configs/.', lock_config=True)
WORKDIR = flags.DEFINE_string('workdir', None, 'A run directory, instead of --config.')
STEP = flags.DEFINE_integer('step', 0, 'The number of the step. The first step is 0.')

log = logging.getLogger('allyouneed.show')


def main() -> None:
    """Prints the training batch of the step --step."""
    with slow_imports():  # --help does not need them
        from input_pipeline.data import open_data
        from run_directory.records import read_config
        from run_directory.trained import vocabulary_from

    if CONFIG_FLAG.present and WORKDIR.value:
        raise UserError('--config and --workdir cannot be used together. Remove one of the two flags')
    run = expanded(WORKDIR.value) if WORKDIR.value else None
    config = read_config(run) if run else config_from(CONFIG_FLAG)
    if problem := Between(0, MOST_STEPS).problem(STEP.value):
        raise UserError(f'--step={STEP.value} {problem}')
    asked = () if run else config_flags.get_override_values(flags.FLAGS['config'])
    data = open_data(config, run or vocabulary_from(config, asked), asked=asked)
    plan = data.plan('train')
    batch = plan.batch(STEP.value)
    epoch, index = divmod(STEP.value, len(plan))
    log.info('step %d (epoch %d, batch %d of %d): %s positions, %d targets', STEP.value, epoch, index, len(plan),
             ' x '.join(map(str, batch['targets'].shape)), batch['weights'].sum())
    for line in data.show(batch):
        print(line)


if __name__ == '__main__':
    run_script(main)
