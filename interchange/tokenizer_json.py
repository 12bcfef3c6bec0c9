"""The format tokenizer.json of Hugging Face's library `tokenizers`."""

from typing import Any

from sentencepiece import sentencepiece_model_pb2

from input_pipeline.foreign_tokenizers import letters_of_bytes, tokenizers_library
from input_pipeline.tokenizer import SPACE, ByteTokenizer, CharTokenizer, SubwordTokenizer
from input_pipeline.tokens import SPECIAL, UNK, Tokenizer
from interchange.tokenizer_files import with_dummy_prefix


def as_tokenizer_json(tokenizer: Tokenizer) -> str:
    """Returns the content of tokenizer.json for a tokenizer of characters, bytes or subwords."""
    library = tokenizers_library()
    if isinstance(tokenizer, CharTokenizer):
        vocabulary = {**dict(zip(SPECIAL, range(4), strict=True)),
                      **{letter: token for token, letter in enumerate(tokenizer.characters, len(SPECIAL))}}
        original = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token=SPECIAL[UNK]))
        original.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(r'[\s\S]'), 'isolated')
        original.decoder = library.decoders.Fuse()
    elif isinstance(tokenizer, SubwordTokenizer):
        original = with_subwords(with_dummy_prefix(tokenizer.model))
    else:
        assert isinstance(tokenizer, ByteTokenizer)
        vocabulary = dict(zip(SPECIAL, range(4), strict=True)) | {
            letter: byte + len(SPECIAL) for letter, byte in letters_of_bytes().items()}
        original = library.Tokenizer(library.models.BPE(vocabulary, []))
        original.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        original.decoder = library.decoders.ByteLevel()
    original.add_special_tokens(list(SPECIAL))
    return original.to_str()


def is_like_llama(proto: Any) -> bool:
    """Returns whether a SentencePiece model is BPE with bytes and without a normalization, like Llama's model.

    For such a model, `with_subwords` gives the same subwords as SentencePiece. The scores must be unique: among pairs
    with equal scores, SentencePiece joins the first pair in the text, but the library always joins the same pair.
    """
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    scores = [piece.score for piece in proto.pieces if piece.type == piece.NORMAL]
    return (trainer.model_type == trainer.BPE and trainer.byte_fallback and len({*scores}) == len(scores)
            and not trainer.treat_whitespace_as_suffix
            and normalizer.escape_whitespaces and not normalizer.remove_extra_whitespaces
            and not normalizer.precompiled_charsmap
            and not any(piece.type in (piece.USER_DEFINED, piece.UNUSED) for piece in proto.pieces))


def with_subwords(spm: bytes) -> Any:
    """Returns an object of the library `tokenizers` with the subwords of a SentencePiece model.

    The model is from this project or like Llama's model (`is_like_llama`).

    Many versions of transformers ignore the normalization in a SentencePiece file, and read each such file as BPE. For
    a model of this project, rare differences remain: the library treats the character U+2581 as a space, and it
    normalizes some sequences differently: a letter with a combining mark or an invisible joiner, half-width katakana
    with a voiced mark, and half-width Hangul. With unigram, the library finds all pieces in a text, also the special
    tokens and the bytes (`</s>`, `<0x41>`). If two segmentations of a text have the same score, as in a run of one
    character, the library and SentencePiece can choose differently.
    """
    library = tokenizers_library()
    proto = sentencepiece_model_pb2.ModelProto.FromString(spm)  # pyright: ignore[reportAttributeAccessIssue]
    unknown = next(token for token, piece in enumerate(proto.pieces) if piece.type == piece.UNKNOWN)
    if proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM:
        model = library.models.Unigram(
            [(piece.piece, piece.score) for piece in proto.pieces], unknown, byte_fallback=True)
    else:
        vocabulary = {piece.piece: token for token, piece in enumerate(proto.pieces)}
        scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == piece.NORMAL}
        # The library uses the first possible merge in the list, and SentencePiece the merge whose result has the best
        # score. The merges are sorted by the scores of their results, so both choose the same merge.
        merges = [(piece[:end], piece[end:]) for piece in sorted(scores, key=scores.__getitem__, reverse=True)
                  for end in range(1, len(piece)) if piece[:end] in scores and piece[end:] in scores]
        model = library.models.BPE(
            vocabulary, merges, unk_token=proto.pieces[unknown].piece, fuse_unk=True, byte_fallback=True)
    original, normalizers, decoders = library.Tokenizer(model), library.normalizers, library.decoders
    rules, prefix = proto.normalizer_spec.precompiled_charsmap, proto.normalizer_spec.add_dummy_prefix
    original.normalizer = normalizers.Sequence([
        *([normalizers.Precompiled(rules)] if rules else []), *([normalizers.Prepend(SPACE)] if prefix else []),
        normalizers.Replace(' ', SPACE)])
    original.decoder = decoders.Sequence([decoders.Replace(SPACE, ' '), decoders.ByteFallback(), decoders.Fuse(),
                                          *([decoders.Strip(' ', 1, 0)] if prefix else [])])
    original.add_special_tokens([piece.piece for piece in proto.pieces if piece.type in (piece.UNKNOWN, piece.CONTROL)])
    return original


def added_start(tokenizer: Any) -> int | None:
    """Returns the id of the token that `tokenizer`, an object of the library, adds at the start of a text, or None.

    Removes padding and truncation.
    """
    tokenizer.no_padding()
    tokenizer.no_truncation()
    encoding = tokenizer.encode('a')
    return encoding.ids[0] if encoding.special_tokens_mask[:1] == [1] else None


def with_start(content: str, begins: bool, name: str, start: int) -> str:
    """Returns a tokenizer.json that adds the start token to each text if and only if `begins` is true.

    Args:
      content: the content of a tokenizer.json.
      begins: whether each text begins with the start token.
      name: the text of the start token in the library.
      start: the id of the start token in the library.
    """
    library = tokenizers_library()
    if added_start(library.Tokenizer.from_str(content)) == (start if begins else None):
        return content
    tokenizer = library.Tokenizer.from_str(content)
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=[name, '$A'], pair=[name, '$A', name, '$B:1'], special_tokens=[(name, start)]) if begins else None
    return tokenizer.to_str()
