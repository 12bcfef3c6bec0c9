"""Writes tokenizers as files that other libraries can read."""

from collections.abc import Mapping
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2

from input_pipeline.tokenizer import SubwordTokenizer, Tokenizer


def unique_pieces(tokenizer: Tokenizer) -> list[str]:
    """Returns a unique, readable text for each token. Other libraries identify tokens by this text."""
    pieces = tokenizer.pieces(range(len(tokenizer)))
    first = {}
    for token, piece in enumerate(pieces):
        first.setdefault(piece, token)
    return [piece if first[piece] == token else f'{piece}<{token}>' for token, piece in enumerate(pieces)]


def write_tokenizers(tokenizers: Mapping[str, Tokenizer], folder: Path) -> None:
    """Writes the tokenizers of a run into a folder.

    A subword tokenizer is written as a SentencePiece model, SIDE.spm. Other tokenizers are written as SIDE.json.
    """
    for side, tokenizer in tokenizers.items():
        if isinstance(tokenizer, SubwordTokenizer):
            (folder / f'{side}.spm').write_bytes(with_dummy_prefix(tokenizer.model))
        else:
            tokenizer.save(folder / f'{side}.json')


def with_dummy_prefix(model: bytes) -> bytes:
    """Returns a copy of a SentencePiece model that adds a space before each text.

    In this project, the class SubwordTokenizer adds this space, not the SentencePiece model. Other libraries expect
    that the SentencePiece model adds the space.
    """
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # pyright: ignore[reportAttributeAccessIssue]
    proto.normalizer_spec.add_dummy_prefix = True
    return proto.SerializeToString()
