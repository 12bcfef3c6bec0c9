"""Trains tokenizers in the same way as other projects, from a few lines and in seconds."""

import io
import json

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tests.interchange.lines import mixed_lines

TEXT = mixed_lines(3000, seed=7, words=0.99) + ['the man is in the house and you are with him on the street'] * 20
# The pattern in the tokenizer.json of Llama 3.
LLAMA_3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r'|\s+(?!\S)|\s+')


def sentencepiece_model(vocab_size=1200, **options):
    """Returns the bytes of a model that SentencePiece has trained."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, vocab_size=vocab_size, hard_vocab_limit=False,
        character_coverage=0.98, num_threads=1, minloglevel=2, **options)
    return model.getvalue()


def marian_files(folder):
    """Writes source.spm, target.spm and vocab.json, which numbers the pieces of both sides like Marian's vocabulary."""
    source = sentencepiece_model(model_type='unigram')  # SentencePiece's defaults: NFKC, spaces collapsed
    target = sentencepiece_model(1000, model_type='bpe')
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'source.spm').write_bytes(source)
    (folder / 'target.spm').write_bytes(target)
    pieces = {'</s>': 0, '<unk>': 1}
    for model in source, target:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        for number in range(processor.get_piece_size()):
            piece = processor.id_to_piece(number)
            if piece != '<s>' and number % 17:  # missing pieces become the unknown token
                pieces.setdefault(piece, len(pieces))
    for special in '>>fra<<', '>>deu<<', '<pad>':
        pieces[special] = len(pieces)
    (folder / 'vocab.json').write_text(json.dumps(pieces, ensure_ascii=False))
    (folder / 'tokenizer_config.json').write_text(json.dumps({
        'tokenizer_class': 'MarianTokenizer', 'source_lang': 'en', 'target_lang': 'fr'}))
    return len(pieces)


def llama_model():
    """Returns the bytes of a tokenizer.model like that of Llama 2: BPE, no normalisation, bytes for rare characters."""
    return sentencepiece_model(1500, model_type='bpe', byte_fallback=True, normalization_rule_name='identity',
                               remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True)


def gpt2(vocab_size=900):
    """Returns a byte-level BPE like that of GPT-2, in which the only special token is the last token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens(['<|endoftext|>'])
    return tokenizer


def llama_3(vocab_size=1000):
    """Returns a tokenizer like that of Llama 3: a pattern, byte-level BPE, and special tokens after all other tokens.

    A text begins with one of the special tokens.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(LLAMA_3), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens(['<|begin_of_text|>', '<|end_of_text|>', '<|eot_id|>'])
    begin = '<|begin_of_text|>'
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f'{begin} $A', special_tokens=[(begin, tokenizer.token_to_id(begin))])
    return tokenizer
