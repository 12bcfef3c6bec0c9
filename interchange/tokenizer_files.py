"""Writes tokenizers as files that other libraries can read."""

from collections.abc import Mapping
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2

from input_pipeline.foreign_tokenizers import ForeignTokenizer, SentencePieceTokenizer, TokenizersTokenizer
from input_pipeline.tokenizer import SubwordTokenizer, Tokenizer
from runtime.files import write_text


def unique_pieces(tokenizer: Tokenizer) -> list[str]:
    """Returns a unique text for each token. Other libraries identify tokens by this text.

    The tokens of an imported tokenizer have the texts of the original library.
    """
    pieces = (tokenizer.vocabulary if isinstance(tokenizer, ForeignTokenizer) else
              tokenizer.pieces(range(len(tokenizer))))
    first = {}
    for token, piece in enumerate(pieces):
        first.setdefault(piece, token)
    return [piece if first[piece] == token else f'{piece}<{token}>' for token, piece in enumerate(pieces)]


def write_tokenizers(tokenizers: Mapping[str, Tokenizer], folder: Path) -> None:
    """Writes the tokenizers of a run into a folder.

    A subword tokenizer or an imported SentencePiece model is written as SIDE.spm. A tokenizer of the library
    `tokenizers` is written as tokenizer.json. Other tokenizers are written in this project's format, as SIDE.json.
    """
    for side, tokenizer in tokenizers.items():
        if isinstance(tokenizer, SubwordTokenizer):
            (folder / f'{side}.spm').write_bytes(with_dummy_prefix(tokenizer.model))
        elif isinstance(tokenizer, SentencePieceTokenizer):
            (folder / f'{side}.spm').write_bytes(tokenizer.parts[0])
        elif isinstance(tokenizer, TokenizersTokenizer):  # only language models, so there is one tokenizer
            write_text(folder / 'tokenizer.json', tokenizer.json)
        else:
            tokenizer.save(folder / f'{side}.json')


def with_dummy_prefix(model: bytes, prefix: bool = True) -> bytes:
    """Returns a copy of a SentencePiece model that adds a space before each text if `prefix` is true.

    In this project, the class SubwordTokenizer adds this space, not the SentencePiece model. Other libraries expect
    that the SentencePiece model adds the space.
    """
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # pyright: ignore[reportAttributeAccessIssue]
    proto.normalizer_spec.add_dummy_prefix = prefix
    return proto.SerializeToString()
