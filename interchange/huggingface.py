"""Folders as `save_pretrained` of Hugging Face's library writes them: config.json, weights in safetensors, a tokenizer.

Neither that library nor PyTorch is needed for reading or writing them.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from configs import base
from configs.checks import check_config
from input_pipeline.tokenizer import PAD
from interchange import gpt2, llama, marian
from interchange.equal_models import with_biases, with_plain_embeddings, with_table
from interchange.fields import Fields
from interchange.huggingface_tokenizers import (
    original_order,
    read_text_tokenizer,
    read_translation_tokenizers,
    write_text_tokenizer,
    write_translation_tokenizers,
)
from interchange.layout import to_ours, to_theirs
from interchange.safetensors_folder import WEIGHTS, opened, save_arrays
from model.build import build_model
from run_directory.records import CONFIG
from run_directory.trained import TrainedModel
from runtime.errors import UserError
from runtime.files import read_json, write_text

FAMILIES: dict[str, Any] = {'marian': marian, 'gpt2': gpt2, 'llama': llama, 'mistral': llama, 'qwen2': llama}
INDEX = 'model.safetensors.index.json'
ADVICE = 'Give a folder that save_pretrained has written'
LONGEST = 1024  # positions that an exported model without a limit of its own says it has, at least


def is_theirs(folder: Path) -> bool:
    """Whether a folder is one of Hugging Face's: its config.json names a model_type."""
    try:
        return (folder / CONFIG).is_file() and 'model_type' in json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def read_huggingface(folder: Path, dtype: str | None = None, recipe: ConfigDict | None = None) -> TrainedModel:
    """Reads a model as a trained one of ours: Marian, GPT-2, Llama, Mistral or Qwen2.

    Args:
      folder: as `save_pretrained` writes it.
      dtype: of the computation.
      recipe: a config whose data, batches, optimizer and so on the model's config gets; its model and its tokenizers
        are the folder's.

    Raises:
      UserError: naming the field or the file, if the model is not supported, or parts are missing or not of one model.
    """
    fields = Fields(folder / CONFIG, read_json(folder / CONFIG, ADVICE))
    family = FAMILIES.get(str(fields.all.get('model_type')))
    if family is None:
        raise UserError(f'{folder / CONFIG}: model_type={fields.all.get("model_type")!r} is not supported, only '
                        f'{", ".join(FAMILIES)}')
    options = family.options(fields)
    if family is marian:
        tokenizers, kind = read_translation_tokenizers(folder, fields), 'sentencepiece'
        sizes: dict[str, Any] = {f'{side}_vocab_size': len(each) for side, each in tokenizers.items()}
        written, length = tokenizers['target'], {'data.max_length': fields.size('max_position_embeddings', 1024)}
    else:
        written, begins = read_text_tokenizer(folder, fields)
        tokenizers, sizes = {'text': written}, {'vocab_size': len(written)}
        kind = json.loads(written.model)['kind']
        length = {'data.context': options.get('model.max_length') or options['data.context'],
                  'data.packing': 'packed' if begins else 'contiguous'}
    if written.absent:
        sizes['absent'] = list(written.absent)
    config = _config(options | {'data.tokenizer.kind': kind}, length, recipe)
    config.model.dtype = dtype or config.model.dtype
    orders = {side: original_order(each) for side, each in tokenizers.items()}
    found = to_ours(family.links(config.model, orders), _weights(folder, family), family.is_no_parameter)
    params = unflatten_dict({name: jnp.asarray(array) for name, array in found.items()}, sep='/')
    module = build_model(config.model, **sizes, pad=PAD)
    return TrainedModel([folder], config, module, params, [], tokenizers, sizes)


def write_huggingface(trained: TrainedModel, folder: Path) -> None:
    """Writes a trained model into an existing folder: as Marian, GPT-2, Llama, Mistral or Qwen2.

    What the form has and the model has not is added where it changes nothing: biases of 0, a table of sinusoids in the
    place of learned positions.

    Raises:
      UserError: naming the options, if the model has none of these forms.
    """
    model, arrays = ConfigDict(trained.config.model.to_dict()), {
        name: np.asarray(leaf) for name, leaf in flatten_dict(trained.params, sep='/').items()}
    family = _family(model)
    if family is marian:
        model, arrays = with_biases(model, arrays, output=len(trained.tokenizers['target']))
    else:
        model, arrays = with_plain_embeddings(model, arrays)
        if family is gpt2:
            model, arrays = with_table(*with_biases(model, arrays), trained.config.data.context)
    if refused := family.refusals(model):
        raise UserError('Hugging Face has no such model: ' + '; '.join(f'config.{each}' for each in refused))
    if family is not marian and np.any(arrays.get('logits_bias', 0)):
        raise UserError('config.model.output_bias=True: GPT-2 and Llama have no bias on the logits, but this model '
                        'has learned one')
    data = trained.config.data
    orders = {side: original_order(each) for side, each in trained.tokenizers.items()}
    longest = max(data.max_length, LONGEST) if family is marian else data.context
    content = family.fields(model, orders, longest)
    if family is marian:
        write_translation_tokenizers(trained.tokenizers, folder, model.share_embeddings == 'all')
        write_text(folder / 'generation_config.json', _json(
            {name: value for name, value in content.items() if name.endswith('token_id')} | marian.generation(orders)))
    else:
        write_text_tokenizer(trained.tokenizers['text'], folder, data.packing == 'packed')
    save_arrays(folder / WEIGHTS, to_theirs(family.links(model, orders), arrays), {'format': 'pt'})
    write_text(folder / CONFIG, _json(content))


def _family(model: ConfigDict) -> Any:
    if model.kind == 'transformer':
        return marian
    if model.kind == 'language_model':
        return llama if model.norm_function == 'rms_norm' else gpt2
    raise UserError(f'config.model.kind={model.kind}: Hugging Face has no such model that could be written, only '
                    'transformer and language_model')


def _config(options: dict[str, Any], length: dict[str, Any], recipe: ConfigDict | None) -> ConfigDict:
    """The config of the imported model. Without a recipe, all that is no matter of the model has its default."""
    config = base.get_config()
    if recipe is None:
        options = {'eval.metric': 'bleu' if options['task'] == 'translation' else 'loss'} | options | length
    else:
        own = base.get_config()
        config.update(recipe)
        config.model, config.data.tokenizer = own.model, own.data.tokenizer
        options = {name: value for name, value in options.items() if name != 'data.context'}
    config.update_from_flattened_dict(options)
    check_config(config)
    return config


def _weights(folder: Path, family: Any) -> dict[str, np.ndarray]:
    """All arrays of the folder's safetensors files."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            raise UserError(f'{folder} has no {WEIGHTS}. {ADVICE}; older folders hold pickled weights, which '
                            'from_pretrained and save_pretrained turn into safetensors')
        named = read_json(folder / INDEX, ADVICE).get('weight_map')
        names = sorted({str(name) for name in named.values()}) if isinstance(named, dict) else []
    found = {}
    for name in names:
        with opened(folder / name) as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    full = getattr(family, 'named_in_full', str)
    return {full(name): array for name, array in found.items()}


def _json(content: Any) -> str:
    return json.dumps(content, indent=2) + '\n'
