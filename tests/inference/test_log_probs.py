"""The log-probabilities that searches report, compared with teacher forcing, in one pass without a cache."""

import dataclasses
import json
import logging

import jax
import numpy as np
import pytest

from configs import base
from inference.generate import Generator
from inference.options import SearchOptions
from inference.translate import Translator
from input_pipeline.data import PairData
from input_pipeline.tokenizer import BOS, EOS, PAD, CharTokenizer
from model.blocks import BlockConfig
from model.language_model import LanguageModel
from model.recurrent import RNNSearch
from model.transformer import Transformer
from runtime.errors import UserError

TOKENIZER = CharTokenizer(json.dumps({'kind': 'char', 'characters': 'abc'}).encode())  # so the end is not rare
SIZE, COUNT, EXTRA = len(TOKENIZER), 500, 3
BLOCKS = BlockConfig(d_model=16, d_ff=32, num_heads=2)
SEARCHES = {'greedy': SearchOptions(method='greedy', extra_length=EXTRA),
            'beam': SearchOptions(beam=4, n_best=4, extra_length=EXTRA),
            'sample': SearchOptions(method='sample', n_best=2, extra_length=EXTRA),
            'cool sample': SearchOptions(method='sample', temperature=0.7, top_k=5, top_p=0.9, extra_length=EXTRA)}


def texts(lengths):
    rng = np.random.default_rng(0)
    return [''.join(rng.choice(list('abc'), rng.integers(*lengths))) for _ in range(COUNT)]


def padded(rows):
    return np.array([[*row, *[PAD] * (max(map(len, rows)) - len(row))] for row in rows])


def teacher_forced(apply, inputs, targets):
    """The sum of log p over the targets that are no padding, in float64: [rows]."""
    logits = np.asarray(jax.jit(apply)(**inputs), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return np.where(targets != PAD, np.take_along_axis(log_probs, targets[..., None], -1)[..., 0], 0).sum(axis=-1)


def translator(module, scale=1.5):
    """Of random parameters, larger than usual so that tokens differ in probability."""
    ones = np.ones((1, 4), np.int32)
    params = jax.tree.map(lambda leaf: scale * leaf, jax.jit(module.init)(jax.random.key(0), ones, ones)['params'])
    return Translator(module, params, {'source': TOKENIZER, 'target': TOKENIZER}, max_length=64)


TRANSLATORS = {
    'transformer': Transformer(BLOCKS, 1, SIZE, SIZE),
    'rnnsearch': RNNSearch(SIZE, SIZE, d_model=16, d_hidden=16),
}


@pytest.fixture(scope='module', params=['transformer', pytest.param('rnnsearch', marks=pytest.mark.slow)])
def translating(request):
    return translator(TRANSLATORS[request.param])


@pytest.mark.slow
@pytest.mark.parametrize('search', SEARCHES)
def test_of_a_translation_at_its_limit_or_not(translating, search):
    model, options = translating, SEARCHES[search]
    found = [(output, each) for output in model.translate(texts((1, 8)), options) for each in output.hypotheses]
    inputs = {'source': padded([[*output.source_tokens, EOS] for output, _ in found]),
              'target': padded([[BOS, *each.tokens] for _, each in found])}
    expected = teacher_forced(lambda **inputs: model.module.apply({'params': model.params}, **inputs), inputs,
                              padded([[*each.tokens, EOS] for _, each in found]))
    np.testing.assert_allclose([each.log_prob for _, each in found], expected, atol=1e-4)
    lengths = np.array([len(each.tokens) + 1 for _, each in found])
    np.testing.assert_allclose([each.score for _, each in found], expected / ((5 + lengths) / 6) ** 0.6, atol=1e-4)
    at_limit = lengths == [len(output.source_tokens) + EXTRA + 1 for output, _ in found]
    assert at_limit.mean() > 0.05 and (search in ('greedy', 'cool sample') or at_limit.mean() < 0.95)


@pytest.mark.slow
@pytest.mark.parametrize('search', SEARCHES)
def test_without_extra_length_a_translation_may_be_as_long_as_its_source(translating, search):
    options = dataclasses.replace(SEARCHES[search], extra_length=0)
    longest = [max(len(each.tokens) for each in output.hypotheses) - len(output.source_tokens)
               for output in translating.translate(texts((1, 8)), options)]
    assert max(longest) == 0


@pytest.fixture(scope='module')
def generating():
    module = LanguageModel(BLOCKS, 1, SIZE)
    params = jax.tree.map(lambda leaf: 1.5 * leaf, jax.jit(module.init)(
        jax.random.key(0), np.ones((1, 4), np.int32))['params'])
    return Generator(module, params, TOKENIZER, context=32, whole_documents=False)


def continuation_log_probs(model, read, written):
    """log p of what was written after what was read."""
    whole = padded([[*one, *other] for one, other in zip(read, written, strict=True)])
    targets = whole[:, 1:].copy()
    for row, tokens in enumerate(read):
        targets[row, :len(tokens) - 1] = PAD
    return teacher_forced(lambda tokens: model.module.apply({'params': model.params}, tokens),
                          {'tokens': whole[:, :-1]}, targets)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('search', [name if name in ('beam', 'sample') else pytest.param(name, marks=pytest.mark.slow)
                                    for name in SEARCHES])
def test_of_a_continuation_that_ends_or_is_truncated(generating, search):
    found = [(output, each) for output in generating.generate(texts((1, 12)), SEARCHES[search])
             for each in output.hypotheses]
    expected = continuation_log_probs(generating, [output.source_tokens for output, _ in found],
                                      [[*each.tokens, *[EOS] * each.ended] for _, each in found])
    np.testing.assert_allclose([each.log_prob for _, each in found], expected, atol=1e-4)
    lengths = np.array([len(each.tokens) + each.ended for _, each in found])
    np.testing.assert_allclose([each.score for _, each in found], expected / ((5 + lengths) / 6) ** 0.6, atol=1e-4)
    assert all(each.ended or len(each.tokens) == EXTRA for _, each in found)
    assert 0.05 < np.mean([each.ended for _, each in found]) < 0.95


@pytest.mark.slow
@pytest.mark.parametrize('method', ['greedy', 'sample'])
def test_of_a_continuation_that_windows_are_joined_to(generating, method):
    """Prompts of 20 tokens in a window of 32: 13 tokens more, then the last 16 are read and 17 written, and again."""
    prompts = [(text * 20)[:20] for text in ('a', 'b', 'c', 'ab', 'ac', 'bc', 'ba', 'cab')]
    outputs = generating.generate(prompts, SearchOptions(method=method, extra_length=40, temperature=0.4))
    expected, lengths = np.zeros(len(prompts)), []
    for row, output in enumerate(outputs):
        [each] = output.hypotheses
        whole = [*output.source_tokens, *each.tokens, *[EOS] * each.ended]
        lengths.append(len(whole) - 20)
        for begin, end in (20, 33), (33, 50), (50, 60):
            if len(whole) > begin:
                read = whole[:20] if begin == 20 else whole[begin - 16:begin]
                expected[row] += continuation_log_probs(generating, [read], [whole[begin:end]])[0]
        assert each.ended or len(each.tokens) == 40
    np.testing.assert_allclose([output.hypotheses[0].log_prob for output in outputs], expected, atol=1e-4)
    np.testing.assert_allclose([output.hypotheses[0].score for output in outputs],
                               expected / ((5 + np.array(lengths)) / 6) ** 0.6, atol=1e-4)
    assert max(lengths) > 13  # beyond the first window


@pytest.mark.slow
@pytest.mark.parametrize('method', ['greedy', 'sample'])
def test_a_continuation_does_not_depend_on_its_neighbours(generating, method):
    """Of prompts of many lengths, some of them longer than a window: each fills its own windows."""
    options = SearchOptions(method=method, extra_length=70, batch_size=4, temperature=0.4)
    prompts = ['a' * 3, 'b', 'abc' * 20, 'ac' * 12, 'cab' * 10, 'ba']
    together = generating.generate(prompts, options)
    for number, output in enumerate(together):
        alone, = generating.generate([prompts[number]], options, first=number)
        assert alone.hypotheses[0].tokens == output.hypotheses[0].tokens
        assert alone.hypotheses[0].log_prob == pytest.approx(output.hypotheses[0].log_prob, abs=1e-3)
    lengths = [len(output.hypotheses[0].tokens) for output in together]
    assert max(lengths) > (40 if method == 'greedy' else 5)


class Pairs(PairData):
    """The same pairs in every split."""

    def __init__(self, pairs):
        self._pairs = pairs

    def pairs(self, split):
        return self._pairs


@pytest.mark.slow
def test_a_split_that_learned_positions_do_not_reach_is_truncated_with_a_warning_and_scored(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    model = translator(Transformer(dataclasses.replace(BLOCKS, position='learned'), 1, SIZE, SIZE, max_length=8))
    model.max_length = 6
    pairs = [('abc', 'cab'), ('abcabcabc', 'a'), ('b', 'abcabca'), ('c', 'abcabcab'), ('abcabcabca', 'abcabcabcabc')]
    messages = []
    monkeypatch.setattr(model, 'find_all', lambda *arguments, find=model.find_all, **options: (
        messages.extend(caplog.messages), find(*arguments, **options))[1])
    results, table = model.score(Pairs(pairs), 'test', base.get_config(), SearchOptions(beam=2))
    assert [cells[:2] for cells in table] == pairs  # what is written down is whole
    assert any(message.startswith('2 of 5 sources have more than 5 tokens') for message in messages)
    assert any(message.startswith('2 of 5 references have more than 8 tokens') for message in messages)
    encode = TOKENIZER.encode
    targets = padded([[*encode(target), EOS][:8] for _, target in pairs])
    log_probs = teacher_forced(
        lambda **inputs: model.module.apply({'params': model.params}, **inputs),
        {'source': padded([[*encode(source)[:5], EOS] for source, _ in pairs]),
         'target': padded([[BOS, *encode(target)][:8] for _, target in pairs])}, targets)
    assert results['perplexity'] == pytest.approx(np.exp(-log_probs.sum() / (targets != PAD).sum()), rel=1e-4)
    with pytest.raises(UserError, match='9 tokens, but the model supports at most 8'):
        model.forced('a', 'abcabcabc')
