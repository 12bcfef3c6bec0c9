"""Makes a run directory from a model in Hugging Face's format: --from=DIR --workdir=RUN [--config=RECIPE]. For example:

    python -m tools.import_weights --from=opus-mt-en-de --workdir=runs/opus
    python decode.py --workdir=runs/opus --input=-

DIR contains a model and its tokenizer, both written by save_pretrained. The model is MarianMT, GPT-2, Llama, Mistral or
Qwen2. As a check, the imported model processes one line of text before the command ends. To train the model further,
set --config to a recipe. The run then uses the data, the batches and the optimizer of the recipe:

    python train.py --config=runs/opus/recipe.py --workdir=runs/opus

The model and its tokenizer come from DIR, so --config.model.* and --config.data.tokenizer.* are errors. To train with
another dropout or dtype (model.dropout, model.dtype), or to train only a part of the parameters (train.frozen,
train.lora_rank), import the model first, and then fine-tune it:

    python train.py --config=configs/fine_tune.py:runs/opus --config.model.dtype=bfloat16 --workdir=runs/tuned
"""

import logging

from absl import flags
from ml_collections import config_flags

from command_line import flag_files_explained, run_script
from configs.checks import config_from
from runtime.errors import UserError
from runtime.process_setup import slow_imports

with flag_files_explained():
    CONFIG_FLAG = config_flags.DEFINE_config_file(
        'config', None, 'The recipe for further training. The options of its model and tokenizer are not used.',
        lock_config=True)
FROM = flags.DEFINE_string('from', None, 'The folder with the model.')
WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory. It must be new or empty.')
ALLOW_NONFINITE = flags.DEFINE_bool('allow_nonfinite', False, 'Accept weights that contain NaN or infinity.')

log = logging.getLogger('allyouneed.import')


def main() -> None:
    """Makes the run directory --workdir from the model in the folder --from."""
    if not FROM.value or not WORKDIR.value:
        raise UserError(f'--{"workdir" if FROM.value else "from"} is missing. Use --from=DIR --workdir=RUN')
    recipe = config_from(CONFIG_FLAG) if CONFIG_FLAG.present else None
    overrides = config_flags.get_override_values(flags.FLAGS['config']) if recipe else {}
    if refused := [f'--config.{name}' for name in overrides if name.startswith(('model.', 'data.tokenizer.'))]:
        raise UserError(f'{", ".join(refused)}: the model and its tokenizer come from --from={FROM.value}. Remove '
                        'these options. To change the dropout or the dtype, fine-tune the imported model: train.py '
                        f'--config=configs/fine_tune.py:{WORKDIR.value}')

    with slow_imports():
        from training.imported import import_weights
        from training.summary import parameter_table

    model = import_weights(FROM.value, WORKDIR.value, recipe, ALLOW_NONFINITE.value)
    log.info('%s: %s', model.config.model.kind, parameter_table(model.params))
    print(WORKDIR.value)


if __name__ == '__main__':
    run_script(main, ends_at_once=True)
