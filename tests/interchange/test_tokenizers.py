"""Tokenizers of imported models against the libraries that they come from, on 10,000 lines of mixed scripts."""

import functools
import os
import pickle

import numpy as np
import pytest

for library in 'tokenizers', 'transformers':
    pytest.importorskip(library, reason="it is in the extra 'test-interchange', and is not installed here")

import sentencepiece
import transformers

from input_pipeline.foreign_tokenizers import NONE, sentencepiece_tokenizer, tokenizers_tokenizer
from input_pipeline.tokenizer import BOS, EOS, PAD, SPECIAL, UNK, load_tokenizer
from runtime.errors import UserError
from tests.interchange import originals
from tests.interchange.lines import mixed_lines, sentences

LINES = mixed_lines(8000) + sentences(os.environ.get('ALLYOUNEED_DATA', 'data'), 2000)
LINES += mixed_lines(10_000 - len(LINES), seed=1)


@functools.cache
def llama():
    model = originals.llama_model()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = processor.get_piece_size()
    return sentencepiece_tokenizer(model, [None, 1, 2, 0], size), processor.encode, processor.decode


@functools.cache
def gpt2():
    original = originals.gpt2()
    end, size = original.token_to_id('<|endoftext|>'), original.get_vocab_size()
    return (tokenizers_tokenizer(original.to_str(), [None, end, end, None], size + 7),  # rows that nothing uses
            lambda text: original.encode(text, add_special_tokens=False).ids, original.decode)


@functools.cache
def llama_3():
    original = originals.llama_3()
    begin, end = map(original.token_to_id, ('<|begin_of_text|>', '<|end_of_text|>'))
    return (tokenizers_tokenizer(original.to_str(), [None, begin, end, None], original.get_vocab_size()),
            lambda text: original.encode(text, add_special_tokens=False).ids, original.decode)


TOKENIZERS = {'llama': llama, 'gpt2': gpt2, 'llama 3': llama_3}


@pytest.mark.parametrize('make', TOKENIZERS.values(), ids=TOKENIZERS)
def test_text_becomes_the_tokens_of_the_original_and_comes_back(make):
    ours, encode, decode = make()
    assert len(LINES) == 10_000
    for line in LINES:
        tokens, expected = ours.encode(line), list(encode(line))
        assert ours.order[tokens].tolist() == expected, line
        assert ours.decode(tokens) == decode(expected), line
        if make is not llama:  # SentencePiece takes the character U+2581 for a space
            assert ours.decode(tokens) == line


@pytest.fixture(scope='module')
def marian(tmp_path_factory):
    folder = tmp_path_factory.mktemp('marian')
    size = originals.marian_files(folder)
    vocabulary = transformers.MarianTokenizer.from_pretrained(folder).get_vocab()
    special = [None, vocabulary['<pad>'], vocabulary['</s>'], vocabulary['<unk>']]
    return (transformers.MarianTokenizer.from_pretrained(folder),
            *(sentencepiece_tokenizer((folder / f'{side}.spm').read_bytes(), special, size, vocabulary)
              for side in ('source', 'target')))


def test_marian_sources_become_the_tokens_of_transformers(marian):
    original, source, _ = marian
    lines = [*LINES, '>>fra<< How are you?', '>>deu<<the man', '>>xyz<< unknown', '>> no code']
    expected = original(lines).input_ids
    for line, numbers in zip(lines, expected, strict=True):
        assert [*source.order[source.encode(line)], 0] == numbers, line


def test_marian_targets_become_the_tokens_of_transformers_and_come_back(marian):
    original, _, target = marian
    expected = original(text_target=LINES).input_ids
    for line, numbers in zip(LINES, expected, strict=True):
        tokens = target.encode(line)
        assert [*target.order[tokens], 0] == numbers, line
        text = original.decode(numbers, skip_special_tokens=True, use_source_tokenizer=False)
        assert target.decode(tokens).strip() == text, line


@pytest.mark.parametrize('make', TOKENIZERS.values(), ids=TOKENIZERS)
def test_special_tokens_are_the_first_four_and_the_others_follow(make):
    ours, *_ = make()
    assert ours.pieces([PAD, BOS, EOS, UNK]) == list(SPECIAL) == ours.vocabulary[:4]
    assert len(ours) == len(ours.order) == len(ours.vocabulary)
    others = ours.order[4:]
    assert (np.diff(others) > 0).all()
    assert set(ours.order[ours.order != NONE]) == set(range(ours.order.max() + 1))
    assert ours.decode([BOS, *ours.encode('the man'), EOS, PAD]) == 'the man'


def test_tokens_that_a_vocabulary_lacks_are_absent():
    assert llama()[0].absent == (PAD,)
    assert llama_3()[0].absent == (PAD, UNK)
    assert gpt2()[0].absent == (PAD, BOS, UNK)  # one token begins and ends a text; the end has its probability


@pytest.mark.parametrize('make', TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer_is_read_from_its_file_and_pickled(make, tmp_path):
    ours, *_ = make()
    ours.save(tmp_path / 'text.model')
    for again in load_tokenizer(tmp_path / 'text.model'), pickle.loads(pickle.dumps(ours)):
        assert again.encode(LINES[0]) == ours.encode(LINES[0]) and again.model == ours.model


@pytest.mark.parametrize('make', TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_bytes_of_tokens_are_those_of_the_text(make):
    """Words to avoid are looked for in them."""
    ours, *_ = make()
    for line in LINES[::10]:
        written = b''.join(map(ours.bytes_of, ours.encode(line)))
        if make is llama:
            assert written.replace(b' ', b'') == line.replace('\u2581', '').replace(' ', '').encode(), line
        else:
            assert written == line.encode()


def test_pieces_of_bytes_are_readable():
    ours, *_ = gpt2()
    assert ours.pieces(ours.encode('the the'))[-1] == '\u2581the'
    assert ours.vocabulary[ours.encode('the the')[-1]] == '\u0120the'


@pytest.mark.parametrize('content', ['{"kind": "tokenizers"}', '{"kind": "sentencepiece", "special": [0, 1, 2, 9], '
                                     '"size": 4, "vocabulary": null, "model": ""}', '{"kind": "tokenizers", "special": '
                                     '[0, 1, 2, 3], "size": 9, "model": "{}"}'])
def test_a_damaged_file_is_refused(content, tmp_path):
    (tmp_path / 'text.model').write_text(content)
    with pytest.raises(UserError, match='cannot be read'):
        load_tokenizer(tmp_path / 'text.model')
