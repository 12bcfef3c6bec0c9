"""Reads and writes folders in the format of `save_pretrained`, a function of Hugging Face's library transformers.

A folder contains config.json, weights in safetensors and a tokenizer. Neither transformers nor PyTorch is needed.
"""

import json
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from configs import base
from configs.checks import check_config
from input_pipeline.foreign_tokenizers import TokenizersTokenizer
from input_pipeline.tokens import BOS, EOS, PAD, SPECIAL
from interchange import gpt2, llama, marian
from interchange.equal_models import with_biases, with_plain_embeddings, with_table
from interchange.foreign_config import ForeignConfig, read_config, require
from interchange.huggingface_tokenizers import (
    GENERATION_CONFIG,
    original_order,
    read_text_tokenizer,
    read_translation_tokenizers,
    write_text_tokenizer,
    write_translation_tokenizers,
)
from interchange.layout import Shape, check_arrays, to_ours, to_theirs
from interchange.safetensors_files import open_arrays, save_arrays
from interchange.safetensors_folder import WEIGHTS
from model.build import build_model
from run_directory.records import CONFIG
from run_directory.trained import TrainedModel, parameter_shapes
from runtime.errors import UserError
from runtime.files import read_bytes, write_text
from runtime.schema import decoded, read_as

# {model_type: the module of its architecture}. Each module defines these names, like gpt2.py:
#   CONFIGS: {model_type: class of config.json};
#   EMBEDDINGS: the names that the array of tied embeddings may have, and COPIES: the names of its possible copies;
#   options(config), refusals(model), fields(model, orders, longest), links(model, orders) and is_ignored(name);
#   full_name(name), only if names in files differ from the names of `links`.
FAMILIES: dict[str, Any] = {name: family for family in (marian, gpt2, llama) for name in family.CONFIGS}
INDEX = 'model.safetensors.index.json'
ADVICE = 'Use a folder that save_pretrained has written'
LONGEST = 1024  # the smallest value of max_position_embeddings in an exported translation model

log = logging.getLogger('allyouneed.export')


class _Kind(msgspec.Struct):
    model_type: str


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def is_huggingface(folder: Path) -> bool:
    """Returns whether a folder has Hugging Face's format, that is, whether config.json has the field model_type.

    If config.json is damaged, this function searches for the field in the text of the file. `read_huggingface` then
    reports the damage.
    """
    try:
        content = read_bytes(folder / CONFIG)
    except OSError:
        return False
    try:
        return 'model_type' in decoded(content, dict[str, Any])
    except ValueError:
        return b'"model_type"' in content


def read_huggingface(folder: Path, dtype: str | None = None, recipe: ConfigDict | None = None,
                     allow_nonfinite: bool = False) -> TrainedModel:
    """Reads a model of Hugging Face's library as a trained model of this project.

    The model is Marian, GPT-2, Llama, Mistral or Qwen2.

    Args:
      folder: a folder that `save_pretrained` wrote.
      dtype: the dtype of the computation.
      recipe: a config for further training. In the result, the options of the model and of the tokenizers come from
        the folder. All other options come from the recipe. If data.packing of the recipe and the folder's tokenizer
        disagree on whether prompts begin with the start token, a warning is logged.
      allow_nonfinite: whether the weights may contain NaN and infinity.

    Raises:
      UserError: if the model is not supported, or if a file is missing, is damaged or belongs to another model. The
        message names the field, the file or the array.
    """
    kind = read_as(folder / CONFIG, _Kind, ADVICE).model_type
    if kind not in FAMILIES:
        raise UserError(f'{folder / CONFIG}: model_type={kind!r:.80} is not supported. Supported: '
                        f'{", ".join(FAMILIES)}')
    family = FAMILIES[kind]
    theirs: ForeignConfig = read_config(folder / CONFIG, family.CONFIGS[kind], ADVICE)
    try:
        require(theirs, quantization_config=(None,), per_layer_config=(None, {}))
        options = family.options(theirs)
    except UserError as error:
        raise UserError(f'{folder / CONFIG}: {error}') from None
    files = _shapes(folder, family)
    shapes = {name: shape for arrays in files.values() for name, shape in arrays.items()}
    for name in 'vocab_size', 'decoder_vocab_size':  # checked before arrays of this size are allocated
        if (size := getattr(theirs, name, None)) and size not in {shape[0] for shape in shapes.values() if shape}:
            raise UserError(f'{folder / CONFIG}: {name}={size}, but no array of the weights has {size} rows. Use '
                            'config.json and weights of the same model')
    if family is marian:
        tokenizers, tokenizer_kind = read_translation_tokenizers(folder, theirs), 'sentencepiece'
        sizes: dict[str, Any] = {f'{side}_vocab_size': len(each) for side, each in tokenizers.items()}
        written = tokenizers['target']
    else:
        written, begins = read_text_tokenizer(folder, theirs)
        tokenizers, sizes = {'text': written}, {'vocab_size': len(written)}
        tokenizer_kind = json.loads(written.model)['kind']
        options['data.packing'] = 'packed' if begins else 'contiguous'
    if written.absent:
        sizes['absent'] = list(written.absent)
    try:
        config = _config(options | {'data.tokenizer.kind': tokenizer_kind}, recipe)
    except UserError as error:
        raise error if recipe else UserError(f'{folder / CONFIG}: {"; ".join(str(error).splitlines())}') from None
    packing = options.get('data.packing', config.data.packing)
    if config.data.packing != packing:
        preposition, article = ('without', 'a') if packing == 'packed' else ('with', 'no')
        log.warning('config.data.packing=%s: prompts begin %s the start token, but the tokenizer of %s adds %s start '
                    'token to a text. To begin prompts as in the original model, set config.data.packing=%s',
                    config.data.packing, preposition, folder, article, packing)
    config.model.dtype = dtype or config.model.dtype
    module = build_model(config.model, **sizes, pad=PAD)
    orders = {side: original_order(each) for side, each in tokenizers.items()}
    params = _read_parameters(folder, family, family.links(config.model, orders), files,
                              parameter_shapes(module, config.task, sizes), allow_nonfinite)
    return TrainedModel([folder], config, module, params, [], tokenizers, sizes)


def write_huggingface(trained: TrainedModel, folder: Path) -> None:
    """Writes a trained model into an existing folder, as Marian, GPT-2, Llama, Mistral or Qwen2.

    The architecture may have parameters that the trained model lacks. Biases of 0 and a table of sinusoids are then
    added. These parameters do not change the outputs. In an imported vocabulary, the start token and the end
    token can be one token. Then the export has one embedding for both, and logs a warning if their embeddings differ.

    Raises:
      UserError: if none of these architectures can express the model. The message names the options.
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
        # transformers 5 opens the tokenizer of every Qwen2 folder as Qwen2's tokenizer. So a model is exported as Qwen2
        # only if its tokenizer is of the library `tokenizers`, as in an imported Qwen2. Any other model with biases of
        # queries, keys and values gets biases of 0 in all other layers of its blocks, and is exported as a Llama.
        elif model.attention_bias == 'qkv' and not isinstance(trained.tokenizers['text'], TokenizersTokenizer):
            model, arrays = with_biases(model, arrays)
    if refused := family.refusals(model):
        raise UserError('this model cannot be exported. Hugging Face has no model with these options: '
                        + '; '.join(f'config.{option}' for option in refused))
    if family is not marian and np.any(arrays.get('logits_bias', 0)):
        raise UserError('config.model.output_bias=True: this model has a bias on the logits, but GPT-2 and Llama '
                        'have no such bias. Use the format ctranslate2')
    data = trained.config.data
    if family is marian and data.tokenizer.kind in ('char', 'byte'):
        raise UserError(f'config.data.tokenizer.kind={data.tokenizer.kind}: Marian supports only subword tokenizers. '
                        'Train with bpe or unigram, or use the format ctranslate2')
    orders = {side: original_order(each) for side, each in trained.tokenizers.items()}
    longest = max(data.max_length, LONGEST) if family is marian else data.context
    content = family.fields(model, orders, longest)
    for side, order in orders.items():
        table = arrays.get(f'{side}_embedding/embedding', arrays.get('embedding/embedding'))
        if table is not None and order[BOS] == order[EOS] and not np.array_equal(table[BOS], table[EOS]):
            log.warning('%s: in the original vocabulary, %s and %s are one token, but their embeddings differ after '
                        'training. The export contains only the embedding of %s. Use the format safetensors to keep '
                        'both', trained.workdirs[0], SPECIAL[BOS], SPECIAL[EOS], SPECIAL[EOS])
    if family is marian:
        write_translation_tokenizers(trained.tokenizers, folder, model.share_embeddings == 'all')
        write_text(folder / GENERATION_CONFIG, _json(
            {name: value for name, value in content.items() if name.endswith('token_id')}
            | marian.generation(orders, longest)))
    else:
        write_text_tokenizer(trained.tokenizers['text'], folder, data.packing == 'packed')
    save_arrays(folder / WEIGHTS, to_theirs(family.links(model, orders), arrays), {'format': 'pt'})
    write_text(folder / CONFIG, _json(content))


def _family(model: ConfigDict) -> Any:
    if model.kind == 'transformer':
        return marian
    if model.kind == 'language_model':
        return llama if model.norm_function == 'rms_norm' else gpt2
    raise UserError(f'config.model.kind={model.kind}: only transformer and language_model can be exported to this '
                    'format. Use the format safetensors')


def _config(options: dict[str, Any], recipe: ConfigDict | None) -> ConfigDict:
    """Returns the config of an imported model. `options` are the options that describe the model.

    All other options come from the recipe or, without a recipe, have their default values.
    """
    config = base.get_config()
    if recipe is None:
        options = {'eval.metric': 'bleu' if options['task'] == 'translation' else 'loss'} | options
    else:
        default = base.get_config()
        config.update(recipe)
        config.model, config.data.tokenizer = default.model, default.data.tokenizer
        options = {name: value for name, value in options.items()
                   if name not in ('data.context', 'data.max_length', 'data.packing')}
    config.update_from_flattened_dict(options)
    check_config(config)
    return config


def _shapes(folder: Path, family: Any) -> dict[Path, dict[str, Shape]]:
    """Returns the shapes of the arrays in the safetensors files of a folder, as {file: {full name: shape}}.

    Raises:
      UserError: if a file is missing or damaged, the index is damaged, or two files contain the same array.
    """
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            raise UserError(f'{folder} has no {WEIGHTS}. {ADVICE}. If the folder has pickled weights, load the model '
                            'with from_pretrained and save the model again')
        names = sorted({*read_as(folder / INDEX, _Index, ADVICE).weight_map.values()})
        if not names:
            raise UserError(f'{folder / INDEX}: weight_map is empty. {ADVICE}')
        if foreign := [name for name in names if Path(name).name != name or name in ('', '..')]:
            raise UserError(f'{folder / INDEX}: weight_map: {foreign[0]!r:.200} is not the name of a file in the '
                            f'same folder. {ADVICE}')
    full, files, seen = getattr(family, 'full_name', str), {}, set()
    for name in names:
        with open_arrays(folder / name) as file:
            files[folder / name] = {full(array): shape for array, shape in file.shapes.items()}
        if twice := sorted(seen & files[folder / name].keys()):
            raise UserError(f'{folder / name}: the array {twice[0]} is also in another file of the folder. {ADVICE}')
        seen |= files[folder / name].keys()
    return files


def _read_parameters(folder: Path, family: Any, links: Any, files: dict[Path, dict[str, Shape]],
                     ours: dict[str, Shape], allow_nonfinite: bool) -> dict[str, Any]:
    """Reads the parameters of a Hugging Face model. `ours` are the shapes of the same parameters in this project."""
    theirs = {name: shape for arrays in files.values() for name, shape in arrays.items()}
    by_name, params, full = {link.theirs: link for link in links}, {}, getattr(family, 'full_name', str)
    copies = {name for name in family.COPIES if name in theirs and name not in by_name}
    try:
        check_arrays(links, ours, theirs, lambda name: name in copies or family.is_ignored(name))
    except UserError as error:
        raise UserError(f'{folder}: {error}') from None
    tied = copies and copies | {next(name for name in family.EMBEDDINGS if name in by_name)}
    first: tuple[str, Any] | None = None  # the name and the content of the first array in `tied`
    for path in files:
        with open_arrays(path) as file:
            for name in file.shapes:
                link = by_name.get(full(name))
                if not link and full(name) not in tied:
                    continue
                array = file.array(name, 'Use other weights, or import these weights with tools.import_weights '
                                   '--allow_nonfinite', allow_nonfinite)
                if full(name) in tied:
                    first = first or (name, array)
                    if not np.array_equal(array, first[1], equal_nan=True):
                        raise UserError(f'{path}: the arrays {first[0]} and {name} differ, but they are tied '
                                        'according to config.json (tie_word_embeddings). Use config.json and weights '
                                        'of the same model')
                if link:
                    params |= {ours: jnp.asarray(array) for ours, array in to_ours(link, array).items()}
    return unflatten_dict(params, sep='/')


def _json(content: Any) -> str:
    return json.dumps(content, indent=2) + '\n'
