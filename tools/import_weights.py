"""Makes a run directory from a model in Hugging Face's format: --from=DIR --workdir=RUN [--config=RECIPE]. For example:

    python -m tools.import_weights --from=opus-mt-en-de --workdir=runs/opus
    python decode.py --workdir=runs/opus --input=-

DIR contains a model and its tokenizer, both written by save_pretrained. The model is MarianMT, GPT-2, Llama, Mistral or
Qwen2. As a check, the imported model processes one line of text before the command ends. To train the model further,
set --config to a recipe. The run then uses the data, the batches and the optimizer of the recipe:

    python train.py --config=runs/opus/recipe.py --workdir=runs/opus

To train only a part of the parameters (train.frozen, train.lora_rank), import the model first, and then fine-tune it:

    python train.py --config=configs/fine_tune.py:runs/opus --config.train.lora_rank=8 --workdir=runs/tuned
"""

import logging

from absl import flags
from ml_collections import config_flags

from command_line import flag_files_explained, run_script, slow_imports
from configs.checks import config_from
from runtime.errors import UserError

with flag_files_explained():
    CONFIG_FLAG = config_flags.DEFINE_config_file(
        'config', None, 'The recipe for further training. The options of its model and tokenizer are ignored.',
        lock_config=True)
FROM = flags.DEFINE_string('from', None, 'The folder with the model.')
WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory. It must be new or empty.')
ALLOW_NONFINITE = flags.DEFINE_bool('allow_nonfinite', False, 'Accept weights that contain NaN or infinity.')

log = logging.getLogger('allyouneed.import')


def main() -> None:
    """Makes the run directory --workdir from the model in the folder --from."""
    with slow_imports():
        from training.imported import import_weights
        from training.summary import parameter_table

    if not FROM.value or not WORKDIR.value:
        raise UserError(f'--{"workdir" if FROM.value else "from"} is missing. Use --from=DIR --workdir=RUN')
    recipe = config_from(CONFIG_FLAG) if CONFIG_FLAG.present else None
    model = import_weights(FROM.value, WORKDIR.value, recipe, ALLOW_NONFINITE.value)
    log.info('%s: %s', model.config.model.kind, parameter_table(model.params))
    print(WORKDIR.value)


if __name__ == '__main__':
    run_script(main, ends_at_once=True)
