"""The tokenizers that lie beside a model in a folder of Hugging Face's library, in and out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from input_pipeline.foreign_tokenizers import (
    SentencePieceTokenizer,
    TokenizersTokenizer,
    sentencepiece_tokenizer,
    tokenizers_library,
    tokenizers_tokenizer,
)
from input_pipeline.tokenizer import ByteTokenizer, CharTokenizer, SubwordTokenizer
from input_pipeline.tokens import BOS, EOS, PAD, SPECIAL, UNK, Tokenizer
from interchange.fields import Fields
from interchange.tokenizer_files import with_dummy_prefix
from runtime.errors import UserError
from runtime.files import read_bytes, read_json, write_text

ADVICE = 'Give a folder that save_pretrained of model and tokenizer have written'
MARIAN = ('source.spm', 'target.spm', 'vocab.json')
TOKENIZER_CONFIG = 'tokenizer_config.json'


def read_translation_tokenizers(folder: Path, fields: Fields) -> dict[str, Tokenizer]:
    """Marian's tokenizers of source and target.

    Raises:
      UserError: if a file is missing, or is of another model than config.json.
    """
    _require(folder, MARIAN)
    config = _tokenizer_config(folder)
    separate = bool(config.get('separate_vocabs', False))
    vocabularies = {'source': 'vocab.json', 'target': 'target_vocab.json' if separate else 'vocab.json'}
    sizes = {'source': fields.size('vocab_size', 58101), 'target': fields.size(
        'decoder_vocab_size', fields.size('vocab_size', 58101))}
    found = {}
    for side, name in vocabularies.items():
        vocabulary = read_json(folder / name, ADVICE)
        unknown = vocabulary.get(str(config.get('unk_token', '<unk>')))
        special = [None, fields.get('pad_token_id', 58100, int), fields.get('eos_token_id', 0, int), unknown]
        if unknown is None:
            raise UserError(f'{folder / name} has no piece <unk>. {ADVICE}')
        _check_size(folder / name, max(vocabulary.values()) + 1, sizes[side])
        found[side] = _made(folder / f'{side}.spm', lambda side=side, special=special, vocabulary=vocabulary: (
            sentencepiece_tokenizer(read_bytes(folder / f'{side}.spm'), special, sizes[side], vocabulary)))
    return found


def read_text_tokenizer(folder: Path, fields: Fields) -> tuple[Tokenizer, bool]:
    """The tokenizer of a language model, and whether a text begins with its start token.

    The files that are looked for, in this order: tokenizer.json; tokenizer.model, SentencePiece's; vocab.json and
    merges.txt, GPT-2's.

    Raises:
      UserError: if there is none of them, or it is of another model than config.json.
    """
    size = fields.size('vocab_size')
    if (path := folder / 'tokenizer.json').is_file():
        original = _made(path, lambda: tokenizers_library().Tokenizer.from_str(read_bytes(path).decode()))
    elif (path := folder / 'tokenizer.model').is_file():
        return _sentencepiece(path, fields, size), bool(_tokenizer_config(folder).get('add_bos_token', True))
    elif (path := folder / 'vocab.json').is_file():
        _require(folder, ('merges.txt',))
        original = _made(path, lambda: byte_level_bpe(folder / 'vocab.json', folder / 'merges.txt'))
    else:
        raise UserError(f'{folder} has no tokenizer: neither tokenizer.json nor tokenizer.model nor vocab.json. '
                        f'{ADVICE}')
    _check_size(path, original.get_vocab_size(), size)
    unknown = json.loads(original.to_str())['model'].get('unk_token')
    special = _special(fields, None if unknown is None else original.token_to_id(unknown))
    tokenizer = _made(path, lambda: tokenizers_tokenizer(original.to_str(), special, size))
    first = original.encode('a').ids[:1]
    begins = bool(_tokenizer_config(folder).get('add_bos_token', False)) or first == [special[BOS]]
    return tokenizer, begins


def byte_level_bpe(vocabulary: Path, merges: Path) -> Any:
    """GPT-2's tokenizer of its two files, one of the library tokenizers."""
    library = tokenizers_library()
    tokenizer = library.Tokenizer(library.models.BPE.from_file(str(vocabulary), str(merges)))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    end = '<|endoftext|>'
    if tokenizer.token_to_id(end) is not None:
        tokenizer.add_special_tokens([end])
    return tokenizer


def write_translation_tokenizers(tokenizers: Mapping[str, Tokenizer], folder: Path, joint: bool) -> None:
    """Marian's files; the tokenizers are ones of subwords, learned or imported."""
    vocabularies = {}
    for side, tokenizer in tokenizers.items():
        if isinstance(tokenizer, SentencePieceTokenizer):
            model, vocabularies[side] = tokenizer.parts
        else:
            assert isinstance(tokenizer, SubwordTokenizer), 'write_huggingface refuses other tokenizers'
            model = with_dummy_prefix(tokenizer.model)
            vocabularies[side] = {piece: number for number, piece in enumerate(tokenizer.pieces(range(len(tokenizer))))}
        (folder / f'{side}.spm').write_bytes(model)
    _write_json(folder / 'vocab.json', vocabularies['source'])
    if not joint:
        _write_json(folder / 'target_vocab.json', vocabularies['target'])
    _write_json(folder / TOKENIZER_CONFIG, {
        'tokenizer_class': 'MarianTokenizer', 'separate_vocabs': not joint, 'pad_token': SPECIAL[PAD],
        'eos_token': SPECIAL[EOS], 'unk_token': SPECIAL[UNK]})


def write_text_tokenizer(tokenizer: Tokenizer, folder: Path, begins: bool) -> None:
    """The file of a language model's tokenizer; `begins`: a text begins with the start token."""
    config: dict[str, Any] = {'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False}
    if isinstance(tokenizer, SentencePieceTokenizer | SubwordTokenizer):
        is_ours = isinstance(tokenizer, SubwordTokenizer)
        (folder / 'tokenizer.model').write_bytes(
            with_dummy_prefix(tokenizer.model) if is_ours else tokenizer.parts[0])
        config |= {'tokenizer_class': 'LlamaTokenizer', 'add_bos_token': begins, 'bos_token': SPECIAL[BOS],
                   'eos_token': SPECIAL[EOS], 'unk_token': SPECIAL[UNK]}
    elif isinstance(tokenizer, TokenizersTokenizer):
        write_text(folder / 'tokenizer.json', tokenizer.json)
        names = {'bos_token': tokenizer.order[BOS], 'eos_token': tokenizer.order[EOS]}
        config |= {name: tokenizer.name_of(int(number)) for name, number in names.items() if number >= 0}
    else:
        write_text(folder / 'tokenizer.json', _as_tokenizer_json(tokenizer))
        config |= {'bos_token': SPECIAL[BOS], 'eos_token': SPECIAL[EOS], 'unk_token': SPECIAL[UNK],
                   'pad_token': SPECIAL[PAD]}
    _write_json(folder / TOKENIZER_CONFIG, config)


def original_order(tokenizer: Tokenizer) -> np.ndarray:
    """The number of each token in another library: int [tokens], its own for a tokenizer that is not imported."""
    return getattr(tokenizer, 'order', np.arange(len(tokenizer)))


def _as_tokenizer_json(tokenizer: Tokenizer) -> str:
    """A tokenizer of characters or bytes as the library tokenizers describes it."""
    library = tokenizers_library()
    if isinstance(tokenizer, CharTokenizer):
        vocabulary = {**dict(zip(SPECIAL, range(4), strict=True)),
                      **{each: number for number, each in enumerate(tokenizer.characters, len(SPECIAL))}}
        found = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token=SPECIAL[UNK]))
        found.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(r'[\s\S]'), 'isolated')
        found.decoder = library.decoders.Fuse()
    else:
        assert isinstance(tokenizer, ByteTokenizer)
        vocabulary = dict(zip(SPECIAL, range(4), strict=True)) | {
            letter: byte + len(SPECIAL) for byte, letter in enumerate(letters_of_bytes())}
        found = library.Tokenizer(library.models.BPE(vocabulary, []))
        found.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        found.decoder = library.decoders.ByteLevel()
    found.add_special_tokens(list(SPECIAL))
    return found.to_str()


def letters_of_bytes() -> str:
    """The letter that byte-level BPE writes for each byte: itself, if it can be seen, else the next from U+0100 on."""
    seen = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return ''.join(chr(byte if byte in seen else 256 + others.index(byte)) for byte in range(256))


def _sentencepiece(path: Path, fields: Fields, size: int) -> Tokenizer:
    model = read_bytes(path)
    processor = _made(path, lambda: sentencepiece.SentencePieceProcessor(model_proto=model))
    _check_size(path, processor.get_piece_size(), size)
    return _made(path, lambda: sentencepiece_tokenizer(model, _special(fields, processor.unk_id()), size))


def _special(fields: Fields, unknown: int | None) -> list[int | None]:
    """The original numbers of our four special tokens; a model without a start token begins with its end token."""
    def number(name):
        value = fields.all.get(name)
        value = value[0] if isinstance(value, list) and value else value
        return value if isinstance(value, int) and value >= 0 else None

    end = number('eos_token_id')
    if end is None:
        raise UserError(f'{fields.path}: eos_token_id={fields.all.get("eos_token_id")!r}: a model without an end token '
                        'is not supported. Give the number of the token that ends a text')
    begin = number('bos_token_id')
    begin = end if begin is None else begin
    unknown = None if unknown in (begin, end) else unknown
    padding = number('pad_token_id')
    return [None if padding in (begin, end, unknown) else padding, begin, end, unknown]


def _made(path: Path, make: Any) -> Any:
    """What `make` returns; what the libraries raise for a file at `path` becomes a UserError."""
    try:
        return make()
    except UserError:
        raise
    except Exception as error:  # tokenizers raises nothing more special
        raise UserError(f'{path} cannot be read as a tokenizer: {error}. {ADVICE}') from None


def _check_size(path: Path, tokens: int, rows: int) -> None:
    if tokens > rows:
        raise UserError(f'{path} has {tokens} tokens, but config.json says vocab_size={rows}: they are not of one '
                        'model')


def _require(folder: Path, names: tuple[str, ...]) -> None:
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(f'{folder} has no {" and no ".join(missing)}, which its tokenizer consists of. {ADVICE}')


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_CONFIG
    return read_json(path, ADVICE) if path.is_file() else {}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + '\n')
