"""The tokenizer: lossless for every string, the same on every machine, and clear about vocabularies that cannot be."""

import hashlib
import json
import pathlib
import pickle
import random
import re
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from errors import UserError
from input_pipeline.tokenizer import BOS, EOS, KINDS, PAD, UNK, Tokenizer, train_tokenizer

ROOT = pathlib.Path(__file__).parents[2]
RANDOM = random.Random(0)
SYLLABLES = [consonant + vowel for consonant in 'bdfgklmnprst' for vowel in 'aeiouéü']
WORDS = [''.join(RANDOM.choices(SYLLABLES, k=RANDOM.randint(1, 4))) for _ in range(300)]
TEXT = [f'{" ".join(RANDOM.choices(WORDS, k=5))},  {RANDOM.randrange(3000)} \u2581 1999 euros' for _ in range(300)]
NASTY = [
    '', ' ', '  ', ' leading', 'trailing ', 'a  b', '\n', 'a\nb\r\n', '\t', '\x00', 'a\x00b', '\u2581',
    '\u2581\u2581a', ' \u2581 ', '\u2581 a', '\u00a0', '26\u00a0%', '88\u202f926,93', '\u2028', '\ufeff', '\ufffd',
    '\ue000', '\U0010ffff', '😀', '👩‍👩‍👧', 'e\u0301é', 'ﬁ', '½', '漢字', 'עברית', '<s>', '</s>', '<pad>', '<unk>',
    '<0x41>', '\u2047', '\u2585']


def learn(lines=TEXT, **options):
    return train_tokenizer(lines, **{'kind': 'bpe', 'vocab_size': 350, 'split_digits': False,
                                     'normalization': 'identity', **options})


@pytest.fixture(scope='module', params=KINDS)
def tokenizer(request):
    return learn(kind=request.param)


@pytest.mark.parametrize('text', NASTY)
def test_lossless_on_nasty_strings(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.text() | st.text(' \u2581\x00a<s>0x41\n') | st.lists(st.sampled_from(NASTY + TEXT)).map(''.join))
def test_lossless_on_every_string(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize('kind', KINDS)
def test_lossless_after_learning_from_nasty_strings(kind):
    tokenizer = learn(NASTY * 10 + TEXT, kind=kind, vocab_size=400)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in NASTY] == NASTY


def test_decode_leaves_the_special_tokens_out(tokenizer):
    assert (PAD, BOS, EOS, UNK) == (0, 1, 2, 3)
    tokens = tokenizer.encode('bada euros')
    assert min(tokens) > UNK
    assert tokenizer.decode([BOS, *tokens, EOS, PAD, PAD]) == 'bada euros'
    assert tokenizer.pieces(range(4)) == ['<pad>', '<s>', '</s>', '<unk>']
    assert tokenizer.pieces(tokens)[0].startswith('\u2581')  # the first word is written as it is elsewhere


def test_vocabulary_has_the_size_asked_for(tokenizer):
    assert len(tokenizer) == 350
    assert all(0 <= token < 350 for text in NASTY + TEXT for token in tokenizer.encode(text))


def test_frequent_words_are_short(tokenizer):
    assert len(tokenizer.encode('1999 euros')) < len('1999 euros') / 2


@pytest.mark.parametrize('kind', KINDS)
def test_split_digits(kind):
    def longest_number(**options):
        pieces = learn(kind=kind, **options)
        pieces = pieces.pieces(range(len(pieces)))
        return max(len(digits) for piece in pieces for digits in re.findall(r'\d+', piece) if '<0x' not in piece)

    assert longest_number(split_digits=True) == 1
    assert longest_number(split_digits=False) > 1


def test_nfkc_folds():
    folding = learn(normalization='nfkc')
    assert [folding.decode(folding.encode(text)) for text in ('ﬁ', '１２', 'a\u00a0b', ' a  b ')] == [
        'fi', '12', 'a b', ' a  b ']


def test_reproducible_across_processes():
    script = ('import hashlib, json, sys; from input_pipeline.tokenizer import train_tokenizer; '
              'model = train_tokenizer(json.load(sys.stdin), kind="unigram", vocab_size=350, split_digits=False, '
              'normalization="identity").model; print(hashlib.sha256(model).hexdigest())')
    done = subprocess.run([sys.executable, '-c', script], input=json.dumps(TEXT), cwd=ROOT, check=True,
                          capture_output=True, text=True)
    assert done.stdout.strip() == hashlib.sha256(learn(kind='unigram').model).hexdigest()


def test_pickled_and_saved(tokenizer, tmp_path):
    tokenizer.save(tmp_path / 'tokenizer.model')
    for copy in (pickle.loads(pickle.dumps(tokenizer)), Tokenizer.load(tmp_path / 'tokenizer.model')):
        assert copy.model == tokenizer.model
        assert copy.encode(TEXT[0]) == tokenizer.encode(TEXT[0])


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('vocab_size, bound', [(100_000, 'at most'), (261, 'at least')])
def test_unsuitable_vocab_size_names_one_that_works(kind, vocab_size, bound):
    with pytest.raises(UserError, match=rf'vocab_size={vocab_size} does not suit .* it must be {bound} \d+') as raised:
        learn(kind=kind, vocab_size=vocab_size)
    suitable = int(str(raised.value).split()[-1])
    assert len(learn(kind=kind, vocab_size=suitable)) == suitable


@pytest.mark.parametrize('error', [UserError('train.en:7: not UTF-8'), KeyboardInterrupt()])
def test_error_of_the_text_is_raised_as_it_is(error):
    def lines():
        yield from TEXT
        raise error

    with pytest.raises(type(error)) as raised:
        learn(lines())
    assert raised.value is error
