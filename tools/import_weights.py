"""Makes a run directory from a model of Hugging Face: --from=DIR --workdir=RUN [--config=RECIPE]. For example:

    python -m tools.import_weights --from=opus-mt-en-de --workdir=runs/opus
    python decode.py --workdir=runs/opus --input=-

DIR is a folder that save_pretrained of the model and of the tokenizer wrote: MarianMT, GPT-2, Llama, Mistral or Qwen2.
As a check, the run answers one line before the command ends. To train the model further, give a recipe at the import:
the run takes its data, batches and optimizer. Then

    python train.py --config=runs/opus/recipe.py --workdir=runs/opus
"""

import logging

from absl import flags
from ml_collections import config_flags

from command_line import flag_files_explained, run_script
from configs.checks import config_from
from runtime.errors import UserError

with flag_files_explained():
    CONFIG_FLAG = config_flags.DEFINE_config_file(
        'config', None, 'The recipe for further training; its model and tokenizer are not used.', lock_config=True)
FROM = flags.DEFINE_string('from', None, 'The folder of the model.')
WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory, a new or an empty one.')
ALLOW_NONFINITE = flags.DEFINE_bool('allow_nonfinite', False, 'Accept weights that contain NaN or infinity.')

log = logging.getLogger('allyouneed.import')


def main() -> None:
    """Imports the model that the flags name."""
    from training.imported import import_weights  # seconds of imports, which --help does not wait for
    from training.summary import parameter_table

    if not FROM.value or not WORKDIR.value:
        raise UserError(f'--{"workdir" if FROM.value else "from"} is missing. See --help')
    recipe = config_from(CONFIG_FLAG) if CONFIG_FLAG.present else None
    model = import_weights(FROM.value, WORKDIR.value, recipe, ALLOW_NONFINITE.value)
    log.info('%s: %s', model.config.model.kind, parameter_table(model.params))
    print(WORKDIR.value)


if __name__ == '__main__':
    run_script(main)
