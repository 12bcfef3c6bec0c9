"""Tokenizers as files that other libraries read."""

from collections.abc import Mapping
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2

from input_pipeline.tokenizer import SubwordTokenizer, Tokenizer


def unique_pieces(tokenizer: Tokenizer) -> list[str]:
    """Every token in readable form, no two the same: a vocabulary that names tokens by text needs that."""
    pieces = tokenizer.pieces(range(len(tokenizer)))
    first = {}
    for token, piece in enumerate(pieces):
        first.setdefault(piece, token)
    return [piece if first[piece] == token else f'{piece}<{token}>' for token, piece in enumerate(pieces)]


def write_tokenizers(tokenizers: Mapping[str, Tokenizer], folder: Path) -> None:
    """Writes the tokenizers of a run into a folder, each as the library that it comes from reads it."""
    for side, tokenizer in tokenizers.items():
        if isinstance(tokenizer, SubwordTokenizer):
            (folder / f'{side}.spm').write_bytes(with_dummy_prefix(tokenizer.model))
        else:
            tokenizer.save(folder / f'{side}.json')


def with_dummy_prefix(model: bytes) -> bytes:
    """A SentencePiece model that puts the space before a text by itself; here the tokenizer does it."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # pyright: ignore[reportAttributeAccessIssue]
    proto.normalizer_spec.add_dummy_prefix = True
    return proto.SerializeToString()
