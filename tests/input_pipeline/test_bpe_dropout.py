"""BPE-dropout: SentencePiece's own segmentation at p = 0, characters at p = 1, Algorithm 1 of the paper between."""

import collections
import io
import itertools
import random

import numpy as np
import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from input_pipeline.bpe_dropout import BpeDropout
from input_pipeline.tokenizer import SPACE, SubwordTokenizer
from tests.input_pipeline.test_tokenizer import NASTY, TEXT, learn

CORPUS = [*TEXT, *NASTY * 3]


@pytest.fixture(scope='module')
def tokenizer():
    return learn(CORPUS, vocab_size=500)


@pytest.fixture(scope='module')
def with_symbols():
    """A vocabulary with symbols of a user, one of which is a part of a word."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(' ' + line for line in TEXT), model_writer=model, model_type='bpe', vocab_size=420,
        user_defined_symbols=['<sep>', 'ba'], remove_extra_whitespaces=False, add_dummy_prefix=False,
        normalization_rule_name='identity', byte_fallback=True, pad_id=0, bos_id=1, eos_id=2, unk_id=3, minloglevel=2)
    return SubwordTokenizer(model.getvalue())


def segment(tokenizer, texts, rate, seed=0):
    """The tokens of each text."""
    rows = [np.array(tokenizer.encode(text), np.uint32) for text in texts]
    tokens, counts = BpeDropout(tokenizer, rate).segment(
        np.concatenate([np.zeros(0, np.uint32), *rows]), np.array([len(row) for row in rows], int),
        np.random.default_rng(seed))
    assert len(tokens) == counts.sum() and len(counts) == len(texts)
    return [row.tolist() for row in np.split(tokens, np.cumsum(counts)[:-1])] if texts else []


def merges_of(tokenizer):
    """{piece: SentencePiece's score}, of the ordinary pieces."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    return {pieces.id_to_piece(token): pieces.get_score(token) for token in range(260, len(tokenizer))}


def exact_distribution(word, scores, rate):
    """Algorithm 1, by adding up all that can happen: {segmentation: probability}."""
    found, states = collections.Counter(), {tuple(word): 1.0}
    while states:
        state, probability = states.popitem()
        merges = [place for place in range(len(state) - 1) if state[place] + state[place + 1] in scores]
        for kept in itertools.product((False, True), repeat=len(merges)):
            chance = probability * np.prod([1 - rate if each else rate for each in kept])
            remaining = [place for place, each in zip(merges, kept, strict=True) if each]
            if not remaining:
                found[state] += chance
                continue
            best = max(remaining, key=lambda place: (scores[state[place] + state[place + 1]], -place))
            after = (*state[:best], state[best] + state[best + 1], *state[best + 2:])
            states[after] = states.get(after, 0.0) + chance
    return found


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize('rate', [0.1, 0.5])
@pytest.mark.parametrize('word', [
    'dada', 'ééé', *(pytest.param(word, marks=pytest.mark.slow) for word in ('1999', 'aaaaa', 'k'))])
def test_the_distribution_is_that_of_algorithm_1(tokenizer, word, rate):
    expected = exact_distribution(SPACE + word, merges_of(tokenizer), rate)
    assert sum(expected.values()) == pytest.approx(1)
    count = 20_000
    drawn = collections.Counter(tuple(tokenizer.pieces(tokens)) for tokens in segment(tokenizer, [word] * count, rate))
    assert drawn.keys() <= {state for state, chance in expected.items() if chance}
    often = [state for state, chance in expected.items() if chance * count >= 5]
    observed = np.array([drawn[state] for state in often] + [count - sum(drawn[state] for state in often)])
    wanted = np.array([expected[state] for state in often] + [1 - sum(expected[state] for state in often)]) * count
    there = wanted > 1e-6
    assert observed[~there].sum() == 0
    statistic = ((observed - wanted)[there] ** 2 / wanted[there]).sum()
    assert there.sum() == 1 or stats.chi2.sf(statistic, there.sum() - 1) > 1e-4


def test_words_are_drawn_independently(tokenizer):
    """In one sentence as in many: the segmentations of two words have the product of their probabilities."""
    scores = merges_of(tokenizer)
    one, two = (exact_distribution(SPACE + word, scores, 0.3) for word in ('1999', 'euros'))
    plain = tuple(tokenizer.pieces(tokenizer.encode('1999'))), tuple(tokenizer.pieces(tokenizer.encode('euros')))
    rows = [tokenizer.pieces(row) for row in segment(tokenizer, ['1999 euros'] * 20_000, 0.3)]
    share = np.mean([tuple(row) == plain[0] + plain[1] for row in rows])
    assert share == pytest.approx(one[plain[0]] * two[plain[1]], abs=0.01)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text() | st.text(' \u2581ae190é\n') | st.sampled_from(CORPUS), max_size=6))
def test_without_dropout_it_is_sentencepiece(tokenizer, texts):
    assert segment(tokenizer, texts, 0.0) == [tokenizer.encode(text) for text in texts]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('rate', [0.1, 0.7, 1.0])
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text() | st.text(' \u2581ae190é\n') | st.sampled_from(CORPUS), max_size=6))
def test_every_segmentation_decodes_to_the_same_text(tokenizer, rate, texts):
    assert [tokenizer.decode(row) for row in segment(tokenizer, texts, rate)] == texts


def test_with_certainty_it_is_characters_and_bytes(tokenizer):
    [row] = segment(tokenizer, ['dada 1999  €漢'], 1.0)
    unknown = [f'<0x{byte:02X}>' for byte in '漢'.encode()]
    assert '漢' in merges_of(tokenizer) or tokenizer.pieces(row)[-3:] == unknown
    assert all(len(piece) == 1 or piece.startswith('<0x') for piece in tokenizer.pieces(row))


@pytest.mark.parametrize('rate', [0.0, 0.3, 1.0])
def test_symbols_of_a_user_stay_whole(with_symbols, rate):
    texts = ['baba', 'a<sep>dada', 'baeuros 19ba99', '<sep><sep> <sep>', '<se', 'ba ba']
    rows = segment(with_symbols, texts, rate)
    for text, row in zip(texts, rows, strict=True):
        pieces = with_symbols.pieces(row)
        assert with_symbols.decode(row) == text
        assert pieces.count('ba') == text.count('ba') and pieces.count('<sep>') == text.count('<sep>')
        assert rate or row == with_symbols.encode(text)
        assert rate < 1 or all(len(piece) == 1 or piece in ('ba', '<sep>') or '<0x' in piece for piece in pieces)


def test_a_seed_decides(tokenizer):
    texts = TEXT[:50]
    assert segment(tokenizer, texts, 0.3, seed=1) == segment(tokenizer, texts, 0.3, seed=1)
    assert segment(tokenizer, texts, 0.3, seed=1) != segment(tokenizer, texts, 0.3, seed=2)


def test_a_vocabulary_without_merges():
    characters = sorted(set('ab '))
    tokenizer = learn(['ab ba'] * 50, vocab_size=260 + len(characters))
    assert segment(tokenizer, ['abba ab'], 0.5) == [tokenizer.encode('abba ab')]


def test_long_words(tokenizer):
    word = ''.join(random.Random(0).choices('abdefgiklmnoprstu19', k=5000))
    assert segment(tokenizer, [word], 0.0) == [tokenizer.encode(word)]
    assert tokenizer.decode(segment(tokenizer, [word], 0.2)[0]) == word
