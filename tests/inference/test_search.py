"""The searches against brute force, on a small random language whose next token depends on the whole past."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.search import IMPOSSIBLE, Beam, Sample, Vocabulary, advance, filter_logits, largest, length_penalty
from model.cache import Cache
from model.language_model import LanguageModel
from model.transformer import Transformer
from tests.model.helpers import random_params
from tests.model.small_transformer import SOURCE, TARGET, tiny

PAD, BOS, EOS = 0, 1, 2
VOCABULARY = Vocabulary(pad=PAD, bos=BOS, eos=EOS)
SIZE, LENGTH, BATCH = 6, 4, 3
WORDS = [3, 4, 5]
START = jnp.full(BATCH, BOS)
TABLE = np.random.default_rng(0).normal(size=(BATCH, 7, 7, SIZE)) * 2


def next_logits(sentence, history):
    """Two hashes of the past choose the logits."""
    return TABLE[sentence, sum((i + 1) * t for i, t in enumerate(history)) % 7, sum(history) % 7]


def decode_step(tokens, cache):
    """The same as a model: the state carries the hashes of each hypothesis, the memory its sentence."""
    first, second = cache.state
    is_word = tokens >= WORDS[0]  # the start token is no part of the past
    first = (first + jnp.where(is_word, cache.position * tokens, 0)) % 7
    second = (second + jnp.where(is_word, tokens, 0)) % 7
    logits = jnp.asarray(TABLE, jnp.float32)[cache.memory[:, None], first, second]
    return logits, Cache(cache.memory, (first, second), cache.position + 1)


def empty_cache(beam):
    zeros = jnp.zeros((BATCH, beam), jnp.int32)
    return Cache(jnp.arange(BATCH), (zeros, zeros), jnp.zeros((), jnp.int32))


def teacher_forced(sentence, tokens):
    """Returns log p(tokens), with a softmax over all tokens at each position."""
    total = 0.0
    for i, token in enumerate(tokens):
        logits = next_logits(sentence, tokens[:i])
        total += logits[token] - np.log(np.exp(logits).sum())
    return total


def every_hypothesis(sentence, limit, alpha, cut=False):
    """All complete outputs of at most `limit` tokens, by teacher forcing, the best score first."""
    outputs = [(*words, EOS) for length in range(limit) for words in itertools.product(WORDS, repeat=length)]
    if cut:
        outputs += itertools.product(WORDS, repeat=limit)
    found = []
    for tokens in outputs:
        log_prob = teacher_forced(sentence, tokens)
        found.append((log_prob / ((5 + len(tokens)) / 6) ** alpha, tokens, log_prob))
    return sorted(found, reverse=True)


def run(kind, decode_step, *begin, **settings):
    """Runs the search `kind(**settings)` to its end. `begin` are the arguments of its method `begin`."""
    search = kind(**settings)
    return search.found(advance(search, decode_step, search.begin(*begin), search.max_length))


sample, beam_search = functools.partial(run, Sample), functools.partial(run, Beam)


def run_beam(beam, alpha=0.6, n_best=1, limits=(LENGTH,) * BATCH, cut=False, patience=0.0):
    search = functools.partial(beam_search, decode_step, vocabulary=VOCABULARY, max_length=LENGTH, beam=beam,
                               alpha=alpha, n_best=n_best, cut=cut, patience=patience)
    return jax.jit(search)(empty_cache(beam), START, jnp.array(limits))


def run_sample(num_samples=1, limits=(LENGTH,) * BATCH, seed=0, **options):
    keys = jax.random.split(jax.random.key(seed), BATCH)
    search = functools.partial(sample, decode_step, vocabulary=VOCABULARY, max_length=LENGTH,
                               num_samples=num_samples, **options)
    return jax.jit(search)(empty_cache(num_samples), START, jnp.array(limits), keys)


def tokens_of(row):
    return tuple(int(token) for token in row if token != PAD)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize('cut', [False, True], ids=['an end is forced', 'cut off'])
@pytest.mark.parametrize('alpha', [0.0, 0.6, 2.0, -1.0])
def test_a_beam_as_wide_as_the_space_is_exhaustive(alpha, cut):
    found = run_beam(beam=len(WORDS) ** LENGTH, alpha=alpha, n_best=5, cut=cut)
    for sentence in range(BATCH):
        expected = every_hypothesis(sentence, LENGTH, alpha, cut)[:5]
        assert [tokens_of(row) for row in found.tokens[sentence]] == [tokens for _, tokens, _ in expected]
        np.testing.assert_allclose(found.scores[sentence], [score for score, _, _ in expected], rtol=1e-5)
        np.testing.assert_allclose(found.log_probs[sentence], [log_prob for _, _, log_prob in expected], rtol=1e-5)


def plain_beam(sentence, beam, alpha, patience):
    """Tokens of the best hypothesis when the search stops at round(beam * patience) ended hypotheses, halves up."""
    alive, ended = [()], []
    for step in range(LENGTH):
        extended = [(*words, token) for words in alive for token in ([EOS] if step == LENGTH - 1 else [*WORDS, EOS])]
        best = sorted(extended, key=lambda tokens: -teacher_forced(sentence, tokens))[:beam]
        alive, ended = [each for each in best if each[-1] != EOS], ended + [each for each in best if each[-1] == EOS]
        if len(ended) > beam * patience - 0.5:
            break
    return max(ended, key=lambda tokens: teacher_forced(sentence, tokens) / length_penalty(len(tokens), alpha))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('beam, patience', [(2, 1.25), (3, 0.34), (3, 1.0), (2, 2.0)])
def test_patience_stops_at_the_number_of_ended_hypotheses(beam, patience):
    alpha = 6.0  # favours long outputs, so that an early stop changes the result
    found = run_beam(beam, alpha, patience=patience)
    expected = [plain_beam(sentence, beam, alpha, patience) for sentence in range(BATCH)]
    assert [tokens_of(rows[0]) for rows in found.tokens] == expected
    more = run_beam(beam, alpha, n_best=beam, patience=patience)
    assert [tokens_of(rows[0]) for rows in more.tokens] == expected, 'the best does not depend on n_best'
    if patience < 1:
        assert expected != [tokens_of(rows[0]) for rows in run_beam(beam, alpha).tokens]


def test_each_sentence_has_its_own_limit():
    limits = (1, 2, 4)
    found = run_beam(beam=30, n_best=1, limits=limits)
    for sentence, limit in enumerate(limits):
        assert tokens_of(found.tokens[sentence, 0]) == every_hypothesis(sentence, limit, 0.6)[0][1]
    # Only the end may come, which makes it no more probable.
    assert found.log_probs[0, 0] == pytest.approx(teacher_forced(0, (EOS,)), rel=1e-5) and found.log_probs[0, 0] < -0.1


@pytest.mark.parametrize('cut', [False, True], ids=['an end is forced', 'cut off'])
def test_log_probabilities_are_those_of_teacher_forcing(cut):
    at_limit = 0
    for found in (run_beam(beam=6, n_best=6, cut=cut), run_sample(num_samples=40, temperature=0.0, cut=cut),
                  run_sample(num_samples=200, temperature=1.0, cut=cut),
                  run_sample(num_samples=40, temperature=0.5, top_k=3, top_p=0.9, cut=cut)):
        for sentence, (rows, log_probs) in enumerate(zip(found.tokens, np.asarray(found.log_probs), strict=True)):
            outputs = list(map(tokens_of, rows))
            np.testing.assert_allclose(log_probs, [teacher_forced(sentence, each) for each in outputs], rtol=1e-4)
            at_limit += sum(len(each) == LENGTH for each in outputs)
            assert all(each[-1] == EOS or cut and len(each) == LENGTH for each in outputs)
    assert at_limit > 100


def test_the_best_draw_comes_first():
    found = run_sample(num_samples=20, temperature=1.0, alpha=0.6)
    assert np.all(np.diff(np.asarray(found.scores), axis=1) <= 0)
    assert len({tokens_of(row) for row in found.tokens[0]}) > 5


@pytest.mark.parametrize('model, tokens, search', [
    (Transformer(tiny(position='learned'), 1, 12, 300, share_embeddings='none'), (SOURCE, TARGET),
     functools.partial(beam_search, beam=2, n_best=2)),
    (LanguageModel(tiny(position='learned', norm='pre'), 1, 300), (SOURCE,), functools.partial(sample, num_samples=2)),
], ids=['beam', 'greedy'])
def test_a_search_of_a_model_is_the_same_with_jax_enable_x64(model, tokens, search):
    """The vocabulary is so large that `largest` finds the best tokens by columns."""
    variables = {'params': random_params(model, *tokens)}

    @jax.jit
    def found(variables, source):
        memory = model.apply(variables, source, method='encode')
        cache = model.apply(variables, memory, 2, LENGTH, method='init_cache')
        return search(functools.partial(model.apply, variables, method='decode_step'), cache, jnp.full(2, BOS),
                      jnp.full(2, LENGTH), vocabulary=VOCABULARY, max_length=LENGTH)

    expected = found(variables, SOURCE)
    with jax.enable_x64(True):
        wide = found(variables, SOURCE)
    np.testing.assert_array_equal(wide.tokens, expected.tokens)
    np.testing.assert_allclose(wide.log_probs, expected.log_probs, rtol=1e-5)
    assert jax.tree.map(lambda array: array.dtype, wide) == jax.tree.map(lambda array: array.dtype, expected)


@pytest.mark.parametrize('alpha', [0.0, 0.6, 3.0])
def test_a_beam_of_one_is_greedy(alpha):
    one, greedy = run_beam(beam=1, alpha=alpha), run_sample(temperature=0.0, alpha=alpha)
    np.testing.assert_array_equal(one.tokens, greedy.tokens)
    np.testing.assert_allclose(one.log_probs, greedy.log_probs, rtol=1e-5)
    np.testing.assert_allclose(one.scores, greedy.scores, rtol=1e-5)


def test_greedy_takes_the_most_probable_token():
    found = run_sample(temperature=0.0)
    for sentence in range(BATCH):
        tokens = []
        while len(tokens) < LENGTH and EOS not in tokens:
            tokens.append(EOS if len(tokens) == LENGTH - 1 else
                          max([EOS, *WORDS], key=lambda token: next_logits(sentence, tokens)[token]))
        assert tokens_of(found.tokens[sentence, 0]) == tuple(tokens)


@pytest.mark.slow
def test_a_wider_beam_finds_no_worse():
    scores = [np.asarray(run_beam(beam=beam).scores[:, 0]) for beam in (1, 2, 4, 8, 64)]
    best = [every_hypothesis(sentence, LENGTH, 0.6)[0][0] for sentence in range(BATCH)]
    assert np.all(scores[-1] >= np.array(scores) - 1e-6)
    np.testing.assert_allclose(scores[-1], best, rtol=1e-5)


def test_the_search_stops_when_no_hypothesis_can_win():
    calls = []

    def certain_end(tokens, cache):
        calls.append(tokens)
        return jnp.full((*tokens.shape, SIZE), -20.0).at[..., EOS].set(20.0), cache

    with jax.disable_jit():  # the loop runs in Python, so that its steps can be counted
        found = beam_search(certain_end, empty_cache(3), START, jnp.full(BATCH, 50), vocabulary=VOCABULARY,
                            max_length=50, beam=3)
    assert tokens_of(found.tokens[0, 0]) == (EOS,)
    assert len(calls) == 1


def test_a_hypothesis_that_does_not_exist_is_marked():
    found = run_beam(beam=3, n_best=3, limits=(1, 4, 4))
    assert list(found.scores[0] > IMPOSSIBLE) == [True, False, False]  # the empty output is all there is
    assert all(found.scores[1] > IMPOSSIBLE)


def test_sampling_frequencies_are_the_models_probabilities():
    draws = 4000  # without padding and start, which are left out when the model is asked, not when it is scored
    found = run_sample(num_samples=draws, temperature=1.0)
    for sentence in range(BATCH):
        counts = np.bincount(np.asarray(found.tokens[sentence, :, 0]), minlength=SIZE) / draws
        logits = next_logits(sentence, ()).copy()
        logits[[PAD, BOS]] = -np.inf
        np.testing.assert_allclose(counts, np.exp(logits) / np.exp(logits).sum(), atol=0.03)


def test_sampled_log_probabilities_are_the_models():
    found = run_sample(num_samples=20, temperature=0.7, top_k=2)
    known = {tokens: log_prob for _, tokens, log_prob in every_hypothesis(1, LENGTH, 0.0)}
    for row, log_prob in zip(found.tokens[1], found.log_probs[1], strict=True):
        assert float(log_prob) == pytest.approx(known[tokens_of(row)], rel=1e-4)


def test_the_seed_decides_and_neighbours_do_not_matter():
    one, again, other = (run_sample(num_samples=8, temperature=1.0, seed=seed).tokens for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert np.any(one != other)
    shorter = run_sample(num_samples=8, temperature=1.0, limits=(LENGTH, 1, 1)).tokens
    np.testing.assert_array_equal(one[0], shorter[0])


PROBABILITIES = np.array([0.05, 0.4, 0.25, 0.2, 0.1])


def filtered(**options):
    logits = filter_logits(jnp.log(jnp.asarray(PROBABILITIES, jnp.float32)), **({'temperature': 1.0, 'top_k': 0,
                                                                               'top_p': 1.0} | options))
    return np.asarray(jax.nn.softmax(logits))


def test_temperature_sharpens_by_its_definition():
    expected = PROBABILITIES ** (1 / 0.5)
    np.testing.assert_allclose(filtered(temperature=0.5), expected / expected.sum(), rtol=1e-4)


@pytest.mark.parametrize('k, kept', [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (99, [0, 1, 2, 3, 4])])
def test_top_k_keeps_the_k_most_probable(k, kept):
    expected = np.where(np.isin(np.arange(5), kept), PROBABILITIES, 0)
    np.testing.assert_allclose(filtered(top_k=k), expected / expected.sum(), rtol=1e-4)


@pytest.mark.parametrize('p, kept', [(0.1, [1]), (0.41, [1, 2]), (0.6, [1, 2]), (0.66, [1, 2, 3]), (1.0, range(5))])
def test_top_p_keeps_the_fewest_that_reach_p(p, kept):
    expected = np.where(np.isin(np.arange(5), list(kept)), PROBABILITIES, 0)
    np.testing.assert_allclose(filtered(top_p=p), expected / expected.sum(), rtol=1e-4)


def test_the_length_penalty_is_the_papers():
    assert float(length_penalty(7, 0.6)) == pytest.approx(2 ** 0.6)
    assert float(length_penalty(1, 0.6)) == 1


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(st.integers(1, 150), st.integers(1, 6), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2 ** 32 - 1))
def test_largest_equals_top_k_also_with_ties_and_any_count(size, count, parts, kinds, seed):
    """The values are of few kinds, so most are equal. -inf and excluded tokens also occur."""
    rng = np.random.default_rng(seed)
    values = np.concatenate([rng.normal(size=kinds), [-np.inf, IMPOSSIBLE]]).astype(np.float32)
    logits = jnp.asarray(rng.choice(values, (2, 3, size)))
    count = min(count, size)
    forbidden = rng.choice(size, min(3, size - 1), replace=False).tolist()
    for without in (), forbidden:
        expected = jax.lax.top_k(logits.at[..., jnp.array(without, int)].set(-jnp.inf), count)
        for one, other in zip(largest(logits, count, without, parts), expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_the_largest_of_a_vocabulary_are_top_ks():
    logits = jax.random.normal(jax.random.key(0), (5, 8003)).astype(jnp.bfloat16).astype(jnp.float32)  # many ties
    for count in (1, 4, 7, 300):
        for found, expected in zip(largest(logits, count), jax.lax.top_k(logits, count), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_limit_of_nothing_is_an_output_of_nothing():
    """The batch also has sentences with another limit, or only limits of 0."""
    for limits in (0, LENGTH, 0), (0, 0, 0):
        for found in run_beam(beam=3, limits=limits), run_sample(limits=limits):
            assert tokens_of(found.tokens[0, 0]) == () and found.log_probs[0, 0] == found.scores[0, 0] == 0
            assert (limits[1] == 0) == (tokens_of(found.tokens[1, 0]) == ())
