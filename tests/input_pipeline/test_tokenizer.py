"""The tokenizer: lossless for every string, the same on every machine, and clear messages about impossible sizes."""

import hashlib
import io
import json
import pathlib
import pickle
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from configs.tasks import SUBWORDS, TOKENIZERS
from input_pipeline import tokenizer as tokenizer_module
from input_pipeline.tokenizer import BOS, EOS, PAD, UNK, ByteTokenizer, load_tokenizer, train_tokenizer
from runtime.errors import UserError

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


@pytest.fixture(scope='module', params=SUBWORDS)
def tokenizer(request):
    return learn(kind=request.param)


@pytest.mark.parametrize('text', NASTY)
def test_lossless_on_nasty_strings(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.text() | st.text(' \u2581\x00a<s>0x41\n') | st.lists(st.sampled_from(NASTY + TEXT)).map(''.join))
def test_lossless_on_every_string(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize('kind', SUBWORDS)
def test_lossless_after_learning_from_nasty_strings(kind):
    tokenizer = learn(NASTY * 10 + TEXT, kind=kind, vocab_size=400)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in NASTY] == NASTY


@pytest.mark.parametrize('kind', SUBWORDS)
def test_lossless_after_learning_from_a_text_with_few_spaces(kind):
    tokenizer = learn(['ACGT' * 5000], kind=kind, vocab_size=266)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in NASTY] == NASTY
    # The vocabularies of earlier runs do not have this option, and runs compare vocabularies byte for byte.
    assert not ModelProto.FromString(tokenizer.model).trainer_spec.required_chars


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


@pytest.mark.parametrize('kind', SUBWORDS)
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


@pytest.mark.parametrize('kind', SUBWORDS)
def test_case_is_folded(kind):
    folding = learn([*TEXT, *(line.upper() for line in TEXT), 'Straße'], kind=kind, normalization='nfkc_cf')
    assert [folding.decode(folding.encode(text)) for text in ('DADA Euros', ' Straße É', 'ﬁ １', 'a\u00a0B')] == [
        'dada euros', ' straße é', 'fi 1', 'a b']
    assert folding.encode(TEXT[0].upper()) == folding.encode(TEXT[0])
    assert not any(piece != piece.lower() for piece in folding.pieces(range(260, len(folding))))


def test_reproducible_across_processes():
    script = ('import hashlib, json, sys; from input_pipeline.tokenizer import train_tokenizer; '
              'model = train_tokenizer(json.load(sys.stdin), kind="unigram", vocab_size=350, split_digits=False, '
              'normalization="identity").model; print(hashlib.sha256(model).hexdigest())')
    done = subprocess.run([sys.executable, '-c', script], input=json.dumps(TEXT), cwd=ROOT, check=True,
                          capture_output=True, text=True)
    assert done.stdout.strip() == hashlib.sha256(learn(kind='unigram').model).hexdigest()


@pytest.mark.parametrize('kind', TOKENIZERS)
def test_pickled_and_saved(kind, tmp_path):
    tokenizer = learn(kind=kind)
    tokenizer.save(tmp_path / 'tokenizer.model')
    for copy in (pickle.loads(pickle.dumps(tokenizer)), load_tokenizer(tmp_path / 'tokenizer.model')):
        assert type(copy) is type(tokenizer)
        assert copy.model == tokenizer.model
        assert len(copy) == len(tokenizer)
        assert copy.encode(TEXT[0]) == tokenizer.encode(TEXT[0])
        assert copy.decode(copy.encode(TEXT[0])) == TEXT[0]


@pytest.mark.parametrize('kind', SUBWORDS)
@pytest.mark.parametrize('vocab_size, bound', [(100_000, 'at most'), (261, 'at least')])
def test_unsuitable_vocab_size_names_one_that_works(kind, vocab_size, bound):
    with pytest.raises(UserError, match=rf'vocab_size={vocab_size}: too .* Use {bound} \d+') as raised:
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


@pytest.mark.parametrize('content', [
    b'', b'\x00', b'no model', pickle.dumps([1]), b'{', b'{}', b'[]', b'{"kind": "word"}', b'{"kind": "char"}',
    b'{"kind": "char", "characters": ""}', b'{"kind": "char", "characters": "ba"}',
    b'{"kind": "char", "characters": [1]}', b'{"kind": []}', b'{"\xff'])
def test_a_file_that_is_no_tokenizer_is_named(content, tmp_path):
    (tmp_path / 'x.model').write_bytes(content)
    with pytest.raises(UserError, match=r'the tokenizer .*x\.model cannot be read: .+'):
        load_tokenizer(tmp_path / 'x.model')


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match=r'x\.model cannot be read: .*No such file'):
        load_tokenizer(tmp_path / 'x.model')


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_model_is_refused_or_works(data, tmp_path, tokenizer):
    model = bytearray(tokenizer.model)
    for place in data.draw(st.lists(st.integers(0, len(model) - 1), max_size=20)):
        model[place] = data.draw(st.integers(0, 255))
    (tmp_path / 'x.model').write_bytes(model[:data.draw(st.integers(0, len(model)))])
    try:
        damaged = load_tokenizer(tmp_path / 'x.model')
    except UserError:
        return
    tokens = damaged.encode('bada euros')
    assert isinstance(damaged.decode(tokens), str) and len(damaged.pieces(tokens)) == len(tokens)


def test_subwords_of_another_making_are_refused(tmp_path):
    with io.BytesIO() as model:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_writer=model, vocab_size=300,
                                                 minloglevel=2)
        (tmp_path / 'x.model').write_bytes(model.getvalue())
    with pytest.raises(UserError, match='the first pieces of the vocabulary must be <pad> <s> </s> <unk>'):
        load_tokenizer(tmp_path / 'x.model')


@given(st.lists(st.integers()), st.integers(1, 10))
def test_a_sample_is_all_of_few_lines_and_the_same_part_of_many(lines, size):
    sample = list(tokenizer_module._sample(map(str, lines), size))
    if len(lines) <= size:
        assert sample == list(map(str, lines))
    assert len(sample) == min(size, len(lines)) and not Counter(sample) - Counter(map(str, lines))
    assert sample == list(tokenizer_module._sample(map(str, lines), size))


def test_every_line_is_as_likely_in_a_sample():
    counts = Counter(int(line) // 1000 for line in tokenizer_module._sample(map(str, range(10_000)), 1000))
    assert all(70 < counts[tenth] < 130 for tenth in range(10))


# Documents: line breaks inside, of any length.

LINES = [f'{" " * (number % 9)}{line}\t{"x" * (number % 50)}' for number, line in enumerate(TEXT)]
DOCUMENT = '\n'.join([*LINES, '\r\n\n'])


def test_a_part_at_a_time_gives_the_subwords_of_the_whole(tokenizer, monkeypatch):
    whole = tokenizer.encode(DOCUMENT)  # shorter than a part
    assert len(list(tokenizer.encode_parts(DOCUMENT))) == 1
    assert tokenizer.decode(whole) == DOCUMENT
    for size in (1, 5, 64):
        monkeypatch.setattr(tokenizer_module, 'PART', re.compile(f'.{{1,{size}}} *[^ \\n]*', re.DOTALL))
        parts = list(tokenizer.encode_parts(DOCUMENT))
        assert len(parts) > len(DOCUMENT) / (size + 80)
        assert [token for part in parts for token in part.tolist()] == whole


def test_a_word_without_end_is_lossless(tokenizer):
    text = 'kalemo\n' * 3 + 'kalemo' * 30_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_indentation_is_learned_where_it_is_asked_for():
    code = [f'def {word}():\n        return {word}\n' for word in WORDS]
    plain, indented = (learn(code, vocab_size=300, indentation=indentation) for indentation in (False, True))
    text = code[0]
    assert plain.decode(plain.encode(text)) == indented.decode(indented.encode(text)) == text
    spaces = [sum(piece.count('\u2581') > 1 for piece in each.pieces(each.encode(text))) for each in (plain, indented)]
    assert spaces == [0, 1]


def test_long_lines_are_learned_from():
    assert len(learn([' '.join(TEXT)])) == 350  # SentencePiece alone would leave this line out, and have no text


@pytest.mark.parametrize('kind', SUBWORDS)
def test_lines_with_the_character_that_sentencepiece_reserves_are_learned_from(kind):
    tokenizer = learn([*TEXT, *['zzqq zzqq \u2585'] * 20], kind=kind)
    assert {'z', 'q'} <= {*''.join(tokenizer.pieces(range(260, 350)))}
    assert tokenizer.pieces(tokenizer.encode('\u2585')) == ['\u2581', '<0xE2>', '<0x96>', '<0x85>']
    with pytest.raises(UserError, match='Use at most 261'):  # only spaces remain
        learn(['\u2585', '\u2585\u2585\n'], kind=kind)


# Characters and bytes.

@settings(deadline=None)
@given(st.text() | st.lists(st.sampled_from(NASTY)).map(''.join))
def test_bytes_are_lossless(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == [4 + byte for byte in text.encode()]
    assert tokenizer.decode([BOS, *tokenizer.encode(text), EOS, PAD]) == text


@settings(deadline=None)
@given(st.text(min_size=1), st.data())
def test_characters_are_lossless_for_those_of_the_training_text(text, data):
    tokenizer = learn([text[:3], text[3:]], kind='char')
    assert len(tokenizer) == 4 + len(set(text))
    other = data.draw(st.text(st.sampled_from(text)))
    assert tokenizer.encode(other) == [4 + sorted(set(text)).index(character) for character in other]
    assert tokenizer.decode([BOS, *tokenizer.encode(other), EOS, PAD]) == other
    strange = data.draw(st.text())
    assert tokenizer.decode(tokenizer.encode(strange)) == ''.join(
        character if character in text else '\ufffd' for character in strange)


def test_size_of_characters_and_bytes():
    assert len(learn(['abba\n'], kind='char')) == 4 + 3
    assert len(learn(kind='byte')) == 260
    assert learn(['\x80z'], kind='char').encode('a') == [UNK]


@pytest.mark.parametrize('kind', ['char', 'byte'])
def test_characters_and_bytes_a_part_at_a_time(kind, monkeypatch):
    tokenizer = learn([DOCUMENT], kind=kind)
    whole = tokenizer.encode(DOCUMENT)
    monkeypatch.setattr(tokenizer_module, 'PART_CHARACTERS', 7)
    assert tokenizer.encode(DOCUMENT) == whole
    assert len(list(tokenizer.encode_parts(DOCUMENT))) > 100


def test_bytes_that_are_no_text():
    assert ByteTokenizer().decode([4 + 0xc3, 4 + 0x28]) == '\ufffd('


def test_pieces_of_characters_and_bytes_are_visible():
    special = ['<pad>', '<s>', '</s>', '<unk>']
    text = 'a \n\u00a0é\u2581'
    chars, in_bytes = (learn([text], kind=kind) for kind in ('char', 'byte'))
    assert chars.pieces(range(4)) == in_bytes.pieces(range(4)) == special
    assert chars.pieces(chars.encode(text)) == ['a', '\u2581', '<U+000A>', '<U+00A0>', 'é', '<U+2581>']
    assert in_bytes.pieces(in_bytes.encode(text)) == [
        'a', '\u2581', '<0x0A>', '<0xC2>', '<0xA0>', '<0xC3>', '<0xA9>', '<0xE2>', '<0x96>', '<0x81>']
