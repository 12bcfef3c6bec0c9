"""Reads and writes the tokenizers in a model folder of Hugging Face's library transformers."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from input_pipeline.foreign_tokenizers import (
    ForeignTokenizer,
    SentencePieceTokenizer,
    TokenizersTokenizer,
    sentencepiece_tokenizer,
    tokenizers_library,
    tokenizers_tokenizer,
)
from input_pipeline.tokenizer import SubwordTokenizer
from input_pipeline.tokens import BOS, EOS, PAD, SPECIAL, UNK, Tokenizer
from interchange.foreign_config import ForeignConfig, Token
from interchange.tokenizer_files import with_dummy_prefix
from interchange.tokenizer_json import added_start, as_tokenizer_json, is_like_llama, with_start, with_subwords
from run_directory.records import CONFIG
from runtime.errors import UserError
from runtime.files import read_bytes, write_text
from runtime.schema import Count, read_as

ADVICE = 'Use a folder into which save_pretrained has written the model and the tokenizer'
MARIAN = ('source.spm', 'target.spm', 'vocab.json')
TOKENIZER_CONFIG = 'tokenizer_config.json'
GENERATION_CONFIG = 'generation_config.json'
CHAT_TEMPLATE = 'chat_template.jinja'
GPT2_CLASSES = (None, 'GPT2Tokenizer', 'GPT2TokenizerFast')  # tokenizer_class of GPT-2's tokenizer in transformers

Content = TypeVar('Content')

log = logging.getLogger('allyouneed.import')
KINDS = {'bos': BOS, 'eos': EOS, 'unk': UNK, 'pad': PAD}  # {prefix of a field such as bos_token: the token}


class _AddedToken(msgspec.Struct):
    content: str


class _TokenizerConfig(msgspec.Struct):
    """The fields of tokenizer_config.json that affect how a text is tokenized, and the chat template."""
    tokenizer_class: str | None = None
    separate_vocabs: bool = False
    add_bos_token: bool | None = None
    add_prefix_space: bool | None = None
    unk_token: str | _AddedToken | None = None
    split_special_tokens: bool = False
    added_tokens_decoder: dict[str, _AddedToken] = {}
    chat_template: Any = None


class _GenerationConfig(msgspec.Struct):
    """The field of generation_config.json that is read."""
    eos_token_id: Token | list[Token] | None = None


def read_translation_tokenizers(folder: Path, config: Any) -> dict[str, Tokenizer]:
    """Reads Marian's tokenizers of source and target. `config` is a `Config` of interchange/marian.py.

    Raises:
      UserError: if a file is missing or damaged, or does not belong to the model of config.json.
    """
    _require(folder, MARIAN)
    own = _tokenizer_config(folder)
    names = {'source': 'vocab.json', 'target': 'target_vocab.json' if own.separate_vocabs else 'vocab.json'}
    sizes = {'source': config.vocab_size, 'target': config.decoder_vocab_size or config.vocab_size}
    unknown = own.unk_token.content if isinstance(own.unk_token, _AddedToken) else own.unk_token or SPECIAL[UNK]
    tokenizers: dict[str, SentencePieceTokenizer] = {}
    for side, name in names.items():
        vocabulary = _vocabulary(folder / name, sizes[side])
        if unknown not in vocabulary:
            raise UserError(f'{folder / name} does not contain the piece {unknown}. {ADVICE}')
        pad, start = config.pad_token_id, config.decoder_start_token_id
        start = pad if start is None else start
        _check_ids(folder, sizes[side], eos_token_id=config.eos_token_id, pad_token_id=pad)
        # The published models start with the padding token. The exports of this project have a separate start token.
        if start not in (pad, vocabulary.get(SPECIAL[BOS])):
            raise UserError(f'{folder / CONFIG}: decoder_start_token_id={start} is neither pad_token_id={pad} '
                            f'nor the id of {SPECIAL[BOS]} in {name}. {ADVICE}')
        special = [None if start == pad else pad, start, config.eos_token_id, vocabulary[unknown]]
        path = folder / f'{side}.spm'
        tokenizers[side] = _read(path, lambda path=path, special=special, size=sizes[side], vocabulary=vocabulary: (
            sentencepiece_tokenizer(read_bytes(path), special, size, vocabulary)))
    _warn_of_further_ends(folder, config, tokenizers['target'])
    _warn_of_added_tokens(folder, own, tokenizers.values(), 'Among the added tokens of Marian, only language codes at '
                          'the beginning of a source are supported. To import a code such as >>fra<<, add it to '
                          'vocab.json with its id')
    return {**tokenizers}


def read_text_tokenizer(folder: Path, config: ForeignConfig) -> tuple[Tokenizer, bool]:
    """Returns the tokenizer of a language model, and whether every text begins with the tokenizer's start token.

    Reads the first of these files that exists: tokenizer.json, tokenizer.model (SentencePiece), or vocab.json with
    merges.txt (only GPT-2).

    Raises:
      UserError: if none of the files exists, or if a file is damaged or does not belong to the model of config.json.
    """
    own = _tokenizer_config(folder)
    if os.path.lexists(path := folder / 'tokenizer.json'):  # a pipe or a broken link is an error, not a missing file
        content = _read(path, lambda: read_bytes(path).decode())
        original = _read(path, lambda: tokenizers_library().Tokenizer.from_str(content))
        # In transformers, GPT-2's tokenizer uses add_prefix_space of tokenizer_config.json (default: false) instead of
        # the value in tokenizer.json.
        if (config.model_type == 'gpt2' and own.tokenizer_class in GPT2_CLASSES
                and isinstance(original.pre_tokenizer, tokenizers_library().pre_tokenizers.ByteLevel)):
            original.pre_tokenizer.add_prefix_space = bool(own.add_prefix_space)
        tokenizer, begins = _of_library(path, config, own, original)
    elif os.path.lexists(path := folder / 'tokenizer.model'):
        tokenizer, begins = _sentencepiece(path, config, own)
    elif (path := folder / 'vocab.json').is_file():
        if config.model_type != 'gpt2':  # other families split texts by other rules, which vocab.json does not contain
            raise UserError(f'{folder} has no tokenizer.json, and model_type={config.model_type} needs it. Load the '
                            'tokenizer with AutoTokenizer, and save it again with save_pretrained')
        _require(folder, ('merges.txt',))
        _vocabulary(path, config.vocab_size)
        original = _read(path, lambda: byte_level_bpe(path, folder / 'merges.txt', bool(own.add_prefix_space)))
        tokenizer, begins = _of_library(path, config, own, original)
    else:
        raise UserError(f'{folder} has no tokenizer.json, no tokenizer.model and no vocab.json. {ADVICE}')
    _warn_of_further_ends(folder, config, tokenizer)
    _warn_of_added_tokens(folder, own, [tokenizer], 'To import them, load the tokenizer with AutoTokenizer, and save '
                          'it again with save_pretrained. This writes a tokenizer.json that contains them')
    if own.chat_template or os.path.lexists(folder / CHAT_TEMPLATE):
        log.warning('%s: the chat template is not imported. Prompts are used unchanged, and an export has no template. '
                    'docs/deploying.md explains how to format a prompt as a chat', folder)
    return tokenizer, begins


def byte_level_bpe(vocabulary: Path, merges: Path, add_prefix_space: bool) -> Any:
    """Returns GPT-2's tokenizer as an object of the library `tokenizers`, made from vocab.json and merges.txt.

    If `add_prefix_space` is true, the tokenizer adds a space to each text that does not begin with a space.
    """
    library = tokenizers_library()
    tokenizer = library.Tokenizer(library.models.BPE.from_file(str(vocabulary), str(merges)))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = library.decoders.ByteLevel()
    end = '<|endoftext|>'
    if tokenizer.token_to_id(end) is not None:
        tokenizer.add_special_tokens([end])
    return tokenizer


def write_translation_tokenizers(tokenizers: Mapping[str, Tokenizer], folder: Path, joint: bool) -> None:
    """Writes the tokenizers of a translation model as Marian's tokenizer files.

    Args:
      tokenizers: the subword tokenizers of 'source' and 'target', trained by this project or imported.
      folder: an existing folder.
      joint: whether source and target have the same vocabulary.
    """
    vocabularies: dict[str, Any] = {}
    fields: dict[str, Any] = {'pad_token': SPECIAL[PAD], 'eos_token': SPECIAL[EOS], 'unk_token': SPECIAL[UNK],
                              'split_special_tokens': True}  # here, '</s>' in a text is ordinary text
    for side, tokenizer in tokenizers.items():
        if isinstance(tokenizer, SentencePieceTokenizer):
            model, vocabularies[side] = tokenizer.parts
            pad = BOS if tokenizer.order[PAD] < 0 else PAD  # Marian starts decoding with its padding token
            fields |= {f'{kind}_token': tokenizer.name_of(int(tokenizer.order[token]))
                       for kind, token in (('eos', EOS), ('unk', UNK), ('pad', pad)) if tokenizer.order[token] >= 0}
        else:
            assert isinstance(tokenizer, SubwordTokenizer), 'write_huggingface refuses other tokenizers'
            model = with_dummy_prefix(tokenizer.model)
            vocabularies[side] = {piece: number for number, piece in enumerate(tokenizer.pieces(range(len(tokenizer))))}
        (folder / f'{side}.spm').write_bytes(model)
    _write_json(folder / 'vocab.json', vocabularies['source'])
    if not joint:
        _write_json(folder / 'target_vocab.json', vocabularies['target'])
    _write_json(folder / TOKENIZER_CONFIG, {
        'tokenizer_class': 'MarianTokenizer', 'separate_vocabs': not joint, **fields})


def write_text_tokenizer(tokenizer: Tokenizer, folder: Path, begins: bool) -> None:
    """Writes the tokenizer of a language model. If `begins` is true, every text begins with the start token."""
    config: dict[str, Any] = {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False, 'add_bos_token': begins,
        'model_input_names': ['input_ids', 'attention_mask'],  # the default of transformers 4 also has token_type_ids
        'split_special_tokens': True}  # here, '</s>' in a text is ordinary text
    if isinstance(tokenizer, SentencePieceTokenizer):
        model, _ = tokenizer.parts
        proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # pyright: ignore[reportAttributeAccessIssue]
        (folder / 'tokenizer.model').write_bytes(model)
        config |= {'add_prefix_space': proto.normalizer_spec.add_dummy_prefix} | {
            f'{kind}_token': tokenizer.name_of(int(tokenizer.order[token]))
            for kind, token in KINDS.items() if tokenizer.order[token] >= 0}
        # From tokenizer.model, most versions of transformers 5 (5.0 to 5.18) make other tokens than SentencePiece.
        if is_like_llama(proto):
            start = int(tokenizer.order[BOS])
            write_text(folder / 'tokenizer.json', with_start(
                with_subwords(model).to_str(), begins, tokenizer.name_of(start), start))
        else:
            del config['tokenizer_class']  # transformers 5.24 then follows the settings in tokenizer.model
    elif isinstance(tokenizer, TokenizersTokenizer):
        start = int(tokenizer.order[BOS])
        config |= {'split_special_tokens': tokenizer.split_special_tokens} | {
            f'{kind}_token': tokenizer.name_of(int(tokenizer.order[token]))
            for kind, token in KINDS.items() if tokenizer.order[token] >= 0}
        splits = json.loads(tokenizer.json)['pre_tokenizer'] or {}
        if 'add_prefix_space' in splits:  # GPT2Tokenizer of transformers ignores the value in tokenizer.json
            config['add_prefix_space'] = splits['add_prefix_space']
        write_text(folder / 'tokenizer.json', with_start(tokenizer.json, begins, tokenizer.name_of(start), start))
    else:
        write_text(folder / 'tokenizer.json', with_start(as_tokenizer_json(tokenizer), begins, SPECIAL[BOS], BOS))
        config |= {'bos_token': SPECIAL[BOS], 'eos_token': SPECIAL[EOS], 'unk_token': SPECIAL[UNK],
                   'pad_token': SPECIAL[PAD]}
    _write_json(folder / TOKENIZER_CONFIG, config)


def original_order(tokenizer: Tokenizer) -> np.ndarray:
    """Returns the id of each token in the other library, int [tokens].

    If this project has trained the tokenizer, tokens have the same ids in both libraries.
    """
    return getattr(tokenizer, 'order', np.arange(len(tokenizer)))


def _warn_of_further_ends(folder: Path, config: ForeignConfig, tokenizer: ForeignTokenizer) -> None:
    """Logs a warning if config.json or generation_config.json has further end tokens.

    In this project, a vocabulary has one end token. In transformers, `generate` uses the end tokens in
    generation_config.json.
    """
    end, lists = int(tokenizer.order[EOS]), {CONFIG: config.eos_token_id}
    if os.path.lexists(path := folder / GENERATION_CONFIG):
        lists[GENERATION_CONFIG] = read_as(path, _GenerationConfig, ADVICE).eos_token_id
    further = {name: [number for number in (ends if isinstance(ends, list) else [ends])
                      if number not in (end, None, -1)] for name, ends in lists.items()}
    if numbers := dict.fromkeys(number for ends in further.values() for number in ends):
        first, *others = (f'{tokenizer.name_of(number)} ({number})' for number in (end, *numbers))
        log.warning('%s: eos_token_id has further end tokens. Only %s ends a text, not %s. To use a different one '
                    'of these tokens as the end token, set eos_token_id of config.json to the id of this token before '
                    'the import',
                    ' and '.join(str(folder / name) for name, ends in further.items() if ends), first,
                    ' or '.join(others))


def _warn_of_added_tokens(folder: Path, own: _TokenizerConfig, tokenizers: Iterable[ForeignTokenizer],
                          advice: str) -> None:
    """Logs a warning if the folder lists added tokens that the vocabularies of the tokenizers lack."""
    added = [token.content for token in own.added_tokens_decoder.values()]
    if os.path.lexists(path := folder / 'added_tokens.json'):
        added += read_as(path, dict[str, Count], ADVICE)
    names = {tokenizer.name_of(int(number)) for tokenizer in tokenizers for number in tokenizer.order}
    if missing := [token for token in dict.fromkeys(added) if token not in names]:
        log.warning('%s: the vocabulary lacks added tokens: %s (%d in total). They are split like other text. %s',
                    folder, ', '.join(missing[:3]), len(missing), advice)


def _of_library(path: Path, config: ForeignConfig, own: _TokenizerConfig,
                original: Any) -> tuple[ForeignTokenizer, bool]:
    """Returns the tokenizer of `original`, an object of the library, and whether texts begin with the start token."""
    _check_size(path, max(original.get_vocab().values(), default=-1) + 1, config.vocab_size)
    content, added = original.to_str(), original.get_added_tokens_decoder()
    start = _read(path, lambda: added_start(original))
    begins = start is not None if own.add_bos_token is None else own.add_bos_token
    model = json.loads(content)['model']
    name, unknown = model.get('unk_token'), model.get('unk_id')  # only unigram models have unk_id
    special = _special(
        path.parent, config, unknown if name is None else original.token_to_id(name), start if begins else None,
        lambda number: original.id_to_token(number) is not None and not (number in added and added[number].special))
    return _read(path, lambda: tokenizers_tokenizer(
        content, special, config.vocab_size, own.split_special_tokens)), begins


def _sentencepiece(path: Path, config: ForeignConfig, own: _TokenizerConfig) -> tuple[ForeignTokenizer, bool]:
    """Returns the tokenizer of a SentencePiece model, and whether texts begin with the start token."""
    model, begins = read_bytes(path), own.add_bos_token is not False
    processor = _read(path, lambda: sentencepiece.SentencePieceProcessor(model_proto=model))
    if (prefix := own.add_prefix_space) is not None:
        model = _read(path, lambda: with_dummy_prefix(model, prefix))
    _check_size(path, size := processor.get_piece_size(), config.vocab_size)
    special = _special(
        path.parent, config, processor.unk_id(), processor.bos_id() if begins and processor.bos_id() >= 0 else None,
        lambda number: number < size and not (
            processor.is_control(number) or processor.is_unknown(number) or processor.is_unused(number)))
    return _read(path, lambda: sentencepiece_tokenizer(model, special, config.vocab_size)), begins


def _special(folder: Path, config: ForeignConfig, unknown: int | None, start: int | None,
             is_text: Callable[[int], bool]) -> list[int | None]:
    """Returns the original ids of the tokens for padding, start, end and unknown text. A missing token has the id None.

    If the model has no start token, the end token is also the start token.

    Args:
      folder: the folder of config.json, for messages.
      config: the content of config.json.
      unknown: the id of the unknown token of the tokenizer, or None.
      start: the id of the start token that the tokenizer adds to texts, or None. It overrides bos_token_id, as in
        transformers. In the first Llama models, the two ids differ.
      is_text: returns whether the token with an id is ordinary text. Such a token is not used as padding. For example,
        pad_token_id=0, an old default of Llama, is the token `!` in byte-level BPE.
    """
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    end, begin, pad = ends[0] if ends else None, config.bos_token_id, config.pad_token_id
    if end is None or end < 0:
        raise UserError(f'{folder / CONFIG}: eos_token_id={config.eos_token_id}: the model needs an end token. '
                        'Set eos_token_id to the id of the token that ends a text')
    begin = None if begin == -1 else begin
    if None not in (begin, start) and begin != start:
        log.warning('%s: bos_token_id=%d, but the tokenizer adds the start token %d to each text. The import uses %d',
                    folder / CONFIG, begin, start, start)
    begin = next(number for number in (start, begin, end) if number is not None)
    unknown = None if unknown in (begin, end) else unknown
    pad = None if pad is None or pad in (-1, begin, end, unknown) or is_text(pad) else pad
    _check_ids(folder, config.vocab_size, eos_token_id=end, bos_token_id=begin, pad_token_id=pad)
    return [pad, begin, end, unknown]


def _read(path: Path, read: Callable[[], Content]) -> Content:
    """Calls `read`, which reads the tokenizer file at `path`, and returns its result.

    Raises:
      UserError: if `read` raises an exception. The message names the file.
    """
    try:
        return read()
    except (KeyboardInterrupt, SystemExit, UserError):
        raise
    # Errors of the library `tokenizers` have the class Exception, and a panic of its Rust code is a BaseException.
    except BaseException as error:
        raise UserError(f'{path} cannot be read as a tokenizer: {error}. {ADVICE}') from None


def _vocabulary(path: Path, size: int) -> dict[str, int]:
    """Reads a vocabulary, {piece: id}. Checks that the ids are unique and less than `size`."""
    vocabulary = read_as(path, dict[str, Count], ADVICE)
    _check_size(path, max(vocabulary.values(), default=-1) + 1, size)
    if len({*vocabulary.values()}) < len(vocabulary):
        numbers = sorted(vocabulary.values())
        twice = next(one for one, other in zip(numbers, numbers[1:], strict=False) if one == other)
        raise UserError(f'{path}: two pieces have the same id, {twice}. {ADVICE}')
    return vocabulary


def _check_size(path: Path, tokens: int, rows: int) -> None:
    if tokens > rows:
        raise UserError(f'{path} has ids of tokens up to {tokens - 1}, but config.json has vocab_size={rows}. Use '
                        'files of the same model')


def _check_ids(folder: Path, rows: int, **numbers: int | None) -> None:
    """Checks that config.json's ids of special tokens are ids of a vocabulary of `rows` tokens.

    `numbers` is {name of a field: id}.
    """
    for name, number in numbers.items():
        if number is not None and not 0 <= number < rows:
            raise UserError(f'{folder / CONFIG}: {name}={number} is not the id of a token, because the vocabulary has '
                            f'{rows} tokens. Set this field to the id of the token')


def _require(folder: Path, names: tuple[str, ...]) -> None:
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(f'{folder} has no {" and no ".join(missing)}, which the tokenizer needs. {ADVICE}')


def _tokenizer_config(folder: Path) -> _TokenizerConfig:
    path = folder / TOKENIZER_CONFIG
    return read_as(path, _TokenizerConfig, ADVICE) if os.path.lexists(path) else _TokenizerConfig()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + '\n')
