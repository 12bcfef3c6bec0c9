"""Minimum Bayes risk decoding, against chrF in plain Python."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from inference.minimum_risk import by_expected_chrf
from inference.options import SearchOptions
from inference.outputs import Hypothesis
from inference.translate import Translator
from model.recurrent import RNNSearch
from runtime.errors import UserError
from tests.inference.test_batches import SIZE, TOKENIZER


def chrf(text, reference):
    """chrF of Popović 2015: the F-score, with beta 2, of the mean precision and recall of 1 to 6 characters."""
    precisions, recalls = [], []
    for n in range(1, 7):
        grams, expected = (collections.Counter(letters[begin:begin + n] for begin in range(len(letters) - n + 1))
                           for letters in (text.replace(' ', ''), reference.replace(' ', '')))
        if grams and expected:
            matches = sum((grams & expected).values())
            precisions.append(matches / grams.total())
            recalls.append(matches / expected.total())
    precision, recall = (np.mean(values or [0.0]) for values in (precisions, recalls))
    return 100 * 5 * precision * recall / (4 * precision + recall) if precision + recall else 0.0


def ordered(hypotheses):
    probabilities = np.exp([hypothesis.log_prob for hypothesis in hypotheses])
    expected = [np.average([100.0 if text.text == other.text else chrf(text.text, other.text) for other in hypotheses],
                           weights=probabilities) for text in hypotheses]
    return [hypotheses[index] for index in np.argsort(-np.round(expected, 9), kind='stable')]


def hypotheses_of(rng, count):
    letters = list('ab c')
    texts = [''.join(rng.choice(letters, rng.integers(0, 12))).strip() for _ in range(count)]
    return [Hypothesis(text, [], float(log_prob), 0.0) for text, log_prob in zip(
        texts, -rng.exponential(3.0, count), strict=True)]


def test_hypotheses_are_sorted_by_expected_chrf():
    rng = np.random.default_rng(0)
    changed = 0
    for count in [1, 2, 3, 5, 8] * 10:
        hypotheses = hypotheses_of(rng, count)
        found = by_expected_chrf(hypotheses)
        assert found == ordered(hypotheses)
        changed += found[0] != max(hypotheses, key=lambda hypothesis: hypothesis.log_prob)
    assert changed > 5  # the most probable text often does not have the best expected chrF


def test_the_best_text_is_near_the_others_and_not_the_most_probable_one():
    texts = {'abcdef': 0.4, 'uvwxyz': 0.3, 'uvwxya': 0.2, 'uvwxyb': 0.1}
    hypotheses = [Hypothesis(text, [], float(np.log(weight)), 0.0) for text, weight in texts.items()]
    assert by_expected_chrf(hypotheses)[0].text == 'uvwxyz'


@pytest.fixture(scope='module')
def translator():
    module, ones = RNNSearch(SIZE, SIZE, d_model=16, d_hidden=16), np.ones((1, 4), np.int32)
    params = jax.jit(module.init)(jax.random.key(0), ones, ones)['params']
    return Translator(module, params, dict.fromkeys(('source', 'target'), TOKENIZER), max_length=16)


def test_the_candidates_are_all_hypotheses_of_the_beam(translator):
    options, texts = SearchOptions(beam=6, n_best=6, alpha=2.0, extra_length=4), ['abc', 'fed', '', 'a', 'ddee', 'fb']
    beams = translator.translate(texts, options)
    found = translator.translate(texts, dataclasses.replace(options, method='mbr', n_best=2))
    assert [output.hypotheses for output in found] == [ordered(beam.hypotheses)[:2] for beam in beams]
    assert any(output.text != beam.text for output, beam in zip(found, beams, strict=True))


def test_more_hypotheses_than_the_beam_are_refused():
    with pytest.raises(UserError, match='n_best=5 must be at most beam=4'):
        SearchOptions(method='mbr', n_best=5)
