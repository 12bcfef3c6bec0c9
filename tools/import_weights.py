"""Makes a run directory of a model of Hugging Face's: --from=DIR --workdir=RUN [--config=RECIPE]. For example:

    python -m tools.import_weights --from=opus-mt-en-de --workdir=runs/opus
    python decode.py --workdir=runs/opus --input=-

The folder is one that save_pretrained of model and tokenizer wrote: MarianMT, GPT-2, Llama, Mistral or Qwen2. To train
the model further, give a recipe at the import: its data, batches and optimizer become the run's. Then

    python train.py --config=runs/opus/recipe.py --workdir=runs/opus
"""
# ruff: noqa: E402 (flags come before the imports that take seconds)

import logging

from absl import flags
from ml_collections import config_flags

from command_line import flag_files_explained, read_command_line, run_script

with flag_files_explained():
    CONFIG_FLAG = config_flags.DEFINE_config_file(
        'config', None, 'The recipe of a further training: all but its model and its tokenizer.', lock_config=True)
FROM = flags.DEFINE_string('from', None, 'The folder.')
WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory, a new or an empty one.')

if __name__ == '__main__':
    read_command_line()  # before the imports that take seconds

from configs.checks import config_from
from runtime.errors import UserError
from training.imported import import_weights
from training.summary import parameter_table

log = logging.getLogger('allyouneed.import')


def main() -> None:
    """Imports what the flags name."""
    if not FROM.value or not WORKDIR.value:
        raise UserError(f'--{"workdir" if FROM.value else "from"} is missing; --help tells more')
    recipe = config_from(CONFIG_FLAG) if CONFIG_FLAG.present else None
    model = import_weights(FROM.value, WORKDIR.value, recipe)
    log.info('%s: %s', model.config.model.kind, parameter_table(model.params))
    print(WORKDIR.value)


if __name__ == '__main__':
    run_script(main)
