"""Batches that drop finished sentences, compared with a separate search for each sentence, in plain Python."""

import dataclasses
import functools
import itertools
import json
import math
import re
import threading
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from inference import batches
from inference.generate import Generator
from inference.options import SearchOptions
from inference.search import IMPOSSIBLE, Beam, Sample, Vocabulary, filter_logits
from inference.text import VOCABULARY
from inference.translate import Translator
from input_pipeline.tokenizer import BOS, EOS, PAD, UNK, CharTokenizer
from model.blocks import BlockConfig
from model.language_model import LanguageModel
from model.recurrent import RNNSearch
from model.transformer import Transformer

TOKENIZER = CharTokenizer(json.dumps({'kind': 'char', 'characters': 'abcdef'}).encode())
SIZE, COUNT, EXTRA, WIDTH = len(TOKENIZER), 14, 7, 32
FORBIDDEN = PAD, BOS, UNK


def blocks(**options):
    return BlockConfig(d_model=16, d_ff=32, num_heads=2, **options)


MODULES = {
    'transformer': lambda: Transformer(blocks(), 1, SIZE, SIZE),
    'rotary': lambda: Transformer(blocks(position='rotary', norm='pre'), 1, SIZE, SIZE),
    'relative': lambda: Transformer(blocks(position='relative', score='additive'), 1, SIZE, SIZE),
    'learned': lambda: Transformer(blocks(position='learned'), 1, SIZE, SIZE, max_length=12),
    'rnnsearch': lambda: RNNSearch(SIZE, SIZE, d_model=16, d_hidden=16),
    'language model': lambda: LanguageModel(blocks(position='rotary'), 1, SIZE),
    'language model, alibi': lambda: LanguageModel(blocks(position='alibi'), 1, SIZE),
}
SEARCHES = {
    'greedy': SearchOptions(method='greedy'),
    'beam': SearchOptions(beam=3, n_best=2),
    'beam, patience': SearchOptions(beam=3, n_best=2, patience=1.0),
    'beam, little patience': SearchOptions(beam=4, n_best=4, patience=0.5),
    'beam, short ones first': SearchOptions(beam=4, n_best=4, alpha=-0.5),
    'samples': SearchOptions(method='sample', n_best=3, temperature=0.8, top_k=6, top_p=0.9),
}


# Each kind of model is tested in tests/inference/test_log_probs.py too.
SLOW = MODULES.keys() - {'transformer'}


@pytest.fixture(scope='module', params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
                                        for name in MODULES])
def model(request):
    module, ones = MODULES[request.param](), np.ones((1, 4), np.int32)
    inputs = (ones,) if isinstance(module, LanguageModel) else (ones, ones)
    params = jax.tree.map(lambda leaf: 2.0 * leaf, jax.jit(module.init)(jax.random.key(2), *inputs)['params'])
    if isinstance(module, LanguageModel):
        return Generator(module, params, TOKENIZER, context=WIDTH, whole_documents=False)
    return Translator(module, params, dict.fromkeys(('source', 'target'), TOKENIZER), max_length=64)


@functools.cache
def compiled(model):
    return jax.jit(lambda **inputs: model.module.apply({'params': model.params}, **inputs))


def next_logits(model, tokens):
    """Returns a function: prefixes of one length -> logits after each prefix, [prefixes, vocab], without a cache."""
    teacher_forced = compiled(model)
    reach = min(model.module.length_limit or WIDTH, WIDTH)

    def padded(rows, width):
        return np.array([[*row, *[PAD] * (width - len(row))] for row in rows])

    def after(beginnings):
        if isinstance(model, Generator):
            read = [[*tokens, *each] for each in beginnings]
            return teacher_forced(tokens=padded(read, WIDTH))[:, len(read[0]) - 1]
        read = [[BOS, *each] for each in beginnings]
        sources = padded([[*tokens, EOS]] * len(read), 16 if reach > 12 else reach)
        return teacher_forced(source=sources, target=padded(read, reach))[:, len(read[0]) - 1]

    return after


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def beam_alone(after, limit, options, cut):
    """[(score, log-probability, tokens)], the best first."""
    alive, ended, count = [(0.0, ())], [], 0
    for step in range(limit):
        best = max((log_prob for log_prob, _ in alive), default=-np.inf)
        reachable = best / penalty(limit if options.alpha >= 0 else step + 1, options.alpha)
        if not alive or len(ended) >= options.n_best and ended[options.n_best - 1][0] >= reachable:
            break
        if options.patience and count >= max(1, math.floor(options.beam * options.patience + 0.5)):
            break
        log_probs = np.asarray(jax.nn.log_softmax(after([tokens for _, tokens in alive])), np.float64)
        allowed = [EOS] if step == limit - 1 and not cut else [each for each in range(SIZE) if each not in FORBIDDEN]
        found = sorted(((log_prob + row[token], (*tokens, token)) for (log_prob, tokens), row
                        in zip(alive, log_probs, strict=True) for token in allowed), reverse=True)[:options.beam]
        over = [each for each in found if each[1][-1] == EOS or step == limit - 1]
        alive = [each for each in found if each not in over]
        ended += [(log_prob / penalty(step + 1, options.alpha), log_prob, tokens) for log_prob, tokens in over]
        ended, count = sorted(ended, reverse=True)[:options.beam], count + len(over)
    return ended[:options.n_best]


def draws_alone(after, limit, options, cut, number):
    """The same, of greedy search and of draws."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(options.seed), 0), number)
    count = options.n_best
    outputs, log_probs, over = [()] * count, np.zeros(count), [False] * count
    for step in range(limit):
        logits = after(outputs)
        allowed = logits.at[:, np.array(FORBIDDEN)].set(IMPOSSIBLE)
        if step == limit - 1 and not cut:
            allowed = jnp.where(jnp.arange(SIZE) == EOS, logits, IMPOSSIBLE)
        chosen = allowed.argmax(axis=-1) if options.method == 'greedy' else jax.random.categorical(
            jax.random.fold_in(key, step), filter_logits(allowed, options.temperature, options.top_k, options.top_p))
        new = np.asarray(jax.nn.log_softmax(logits), np.float64)
        for row, token in enumerate(np.asarray(chosen).tolist()):
            log_probs[row] += 0.0 if over[row] else new[row, token]
            outputs[row] = (*outputs[row], PAD if over[row] else token)
            over[row] |= token == EOS
    outputs = [tuple(token for token in each if token != PAD) for each in outputs]
    return sorted(((log_prob / penalty(len(tokens), options.alpha), log_prob, tokens)
                   for log_prob, tokens in zip(log_probs, outputs, strict=True)), reverse=True)


# Every model has beam search, and the Transformer has all searches. The first of these cases is fast.
CASES = sorted([(name, search) for name in MODULES for search in SEARCHES
                if name == 'transformer' or search == 'beam'], key=('transformer', 'beam').__ne__)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('model, search', CASES, indirect=['model'])
def test_a_batch_gives_the_same_results_as_single_sentences(model, search, monkeypatch):
    monkeypatch.setattr(batches, 'FEWEST', 2)
    monkeypatch.setattr(batches, 'ROOM', 2)
    options, rng = SEARCHES[search], np.random.default_rng(0)
    options = SearchOptions(**vars(options) | {'extra_length': EXTRA, 'batch_size': 9})
    sources = [rng.integers(4, SIZE, rng.integers(1, 8)).tolist() for _ in range(COUNT)]
    numbers = list(range(5, 5 + COUNT))
    found = model.find_all(sources, numbers, options)
    lengths = set()
    for source, number, hypotheses in zip(sources, numbers, found, strict=True):
        after, limit = next_logits(model, source), model._search_input(source, options).limit
        expected = (beam_alone(after, limit, options, model.cut) if options.method == 'beam' else
                    draws_alone(after, limit, options, model.cut, number))
        assert [(*each.tokens, *[EOS] * each.ended) for each in hypotheses] == [tokens for *_, tokens in expected]
        np.testing.assert_allclose([(each.score, each.log_prob) for each in hypotheses],
                                   [each[:2] for each in expected], atol=2e-4, rtol=2e-4)
        lengths.add(len(hypotheses[0].tokens))
    assert len(lengths) > 2 or model.cut  # a continuation may well take all the tokens that it is given


@pytest.mark.slow
def test_a_batch_shrinks_as_its_sentences_end_and_its_past_grows(monkeypatch):
    module = Transformer(blocks(), 1, SIZE, SIZE)
    ones = np.ones((1, 4), np.int32)
    model = Translator(module, jax.jit(module.init)(jax.random.key(2), ones, ones)['params'],
                       dict.fromkeys(('source', 'target'), TOKENIZER), max_length=64)
    monkeypatch.setattr(batches, 'FEWEST', 2)
    monkeypatch.setattr(batches, 'ROOM', 4)
    monkeypatch.setattr(batches, 'ROOM_OF_FEW', 16)
    shapes, go_on = [], model._batches._advance
    monkeypatch.setattr(model._batches, '_advance', lambda params, state, *args, **options: (
        shapes.append(state.cache.past[0].key.shape), go_on(params, state, *args, **options))[1])
    sources = [[4, 5], [6] * 20, *[[5, 6, 7]] * 10, *[[4] * 9] * 4]
    limits = [2, 30, *[3] * 10, *[11] * 4]
    found = model.find_all(sources, range(16), SearchOptions(beam=3, extra_length=40, batch_size=16), limits=limits)
    assert all(len(hypotheses[0].tokens) < limit for hypotheses, limit in zip(found, limits, strict=True))
    rows, keys = [shape[0] for shape in shapes], [shape[3] // 3 for shape in shapes]
    assert rows == sorted(rows, reverse=True) and keys == sorted(keys)
    assert rows[0] == 16 and keys[0] == 4 and {4, 8} <= {*keys} and max(keys) <= 64
    assert all(room >= 16 for count, room in zip(rows, keys, strict=True) if count <= 2)
    if max(len(hypotheses[0].tokens) for hypotheses in found) > 8:
        assert 2 in rows


def test_samples_depend_on_the_seed_the_draw_and_the_number_of_the_sentence():
    module, ones = RNNSearch(SIZE, SIZE, d_model=8, d_hidden=8), np.ones((1, 4), np.int32)
    model = Translator(module, jax.jit(module.init)(jax.random.key(2), ones, ones)['params'],
                       dict.fromkeys(('source', 'target'), TOKENIZER), max_length=64)
    options = SearchOptions(method='sample', extra_length=9, batch_size=4)

    def samples(seed=0, draw=0, numbers=(0, 1, 2, 3)):
        found = model.find_all([[4, 5, 6]] * 4, numbers, dataclasses.replace(options, seed=seed), draw)
        return [hypotheses[0].tokens for hypotheses in found]

    first = samples()
    assert samples() == first and samples(numbers=(3, 2, 1, 0)) == first[::-1]
    assert first != samples(seed=1) != samples(draw=1) != first


def test_the_options_of_a_search_reach_it():
    model = Translator(RNNSearch(SIZE, SIZE, d_model=8, d_hidden=8), {},
                       dict.fromkeys(('source', 'target'), TOKENIZER), max_length=64)
    sampling = SearchOptions(method='sample', n_best=3, alpha=0.2, temperature=0.8, top_k=6, top_p=0.9)
    assert model._settings(8, sampling) == Sample(VOCABULARY, 8, 3, 0.2, False, 0.8, 6, 0.9)
    assert model._settings(8, SearchOptions(method='greedy')).temperature == 0
    beam = SearchOptions(beam=5, n_best=2, alpha=0.2, patience=1.5)
    assert model._settings(8, beam) == Beam(VOCABULARY, 8, 5, 0.2, 2, 1.5, False)


def test_few_sentences_begin_with_a_larger_cache():
    assert [batches._first_room(rows) for rows in (1, 16, 17, 32, 33, 128)] == [64, 64, 32, 32, 16, 16]


def test_the_sentences_of_a_batch_have_the_same_padded_length_if_there_are_several_batches():
    module = RNNSearch(SIZE, SIZE, d_model=8, d_hidden=8)
    model = Translator(module, {}, dict.fromkeys(('source', 'target'), TOKENIZER), max_length=64)
    lengths = [5, 31, 32, 7, 40, *[10] * 20]  # with the end token, 31 fits into 32 tokens, and 32 does not
    sources = [[4] * length for length in lengths]
    found = model._batched(sources, SearchOptions(batch_size=8))
    assert found[0] == [4, 2] and [len(rows) for rows in found] == [2, 8, 8, 7]
    assert sorted(row for rows in found for row in rows) == list(range(25))
    assert [len(rows) for rows in model._batched(sources[:8], SearchOptions(batch_size=8))] == [8]
    prompts = [[4] * (1 + 7 * number) for number in range(129)]  # of 29 padded lengths
    assert [len(rows) for rows in model._batched(prompts, SearchOptions(batch_size=128))] == [128, 1]


def test_without_sentences_there_is_no_search(monkeypatch):
    module = RNNSearch(SIZE, SIZE, d_model=8, d_hidden=8)
    model = Translator(module, {}, dict.fromkeys(('source', 'target'), TOKENIZER), max_length=64)
    monkeypatch.setattr(model, 'find', None)
    assert model._batched([], SearchOptions(batch_size=8)) == []
    assert [output.text for output in model.translate(['', ' '])] == ['', '']


@pytest.mark.slow
def test_a_batch_of_any_size_ends(monkeypatch):
    module = RNNSearch(SIZE, SIZE, d_model=8, d_hidden=8)
    ones = np.ones((1, 4), np.int32)
    model = Translator(module, jax.jit(module.init)(jax.random.key(2), ones, ones)['params'],
                       dict.fromkeys(('source', 'target'), TOKENIZER), max_length=64)
    sources = [[4 + row % 6] * (1 + row % 5) for row in range(7)]
    alone = [model.find_all([source], [0], SearchOptions(extra_length=5))[0][0].tokens for source in sources]
    for fewest, room, size in itertools.product((1, 3), (1, 5), (1, 3, 7)):
        monkeypatch.setattr(batches, 'FEWEST', fewest)
        monkeypatch.setattr(batches, 'ROOM', room)
        found = model.find_all(sources, range(7), SearchOptions(extra_length=5, batch_size=size))
        assert [hypotheses[0].tokens for hypotheses in found] == alone


def test_a_search_on_several_devices_keeps_the_keys_of_each_sentence_on_its_device():
    source, limits = np.full((16, 4), 5, np.int32), np.full(16, EXTRA, np.int32)
    module = MODULES['transformer']()
    params = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), source, source))['params']
    by_rows = NamedSharding(Mesh(np.array(jax.devices()), ('data',)), PartitionSpec('data'))
    batch = jax.device_put(batches.SearchBatch(source, limits, limits, np.arange(16, dtype=np.uint32)), by_rows)
    program = batches.BatchSearch(module)._whole.lower(
        params, batch, np.uint32(0), np.uint32(0), search=Beam(Vocabulary(PAD, BOS, EOS), EXTRA, 2)).compile().as_text()
    assert 'all-gather(' in program  # such as of logits
    assert not re.search(r'f32\[\d+,\d+,\d+,\d+\]\S* all-gather\(', program)  # keys and values have four axes


def use_cores(monkeypatch, cores, devices=1):
    """Tests run on several devices, which keep a batch together."""
    monkeypatch.setattr(batches, '_cores', lambda: cores)
    monkeypatch.setattr(jax, 'device_count', lambda: devices)


def test_each_core_searches_a_batch(monkeypatch):
    """The batches are searched at the same time, and the results are in the order of the batches."""
    together = threading.Barrier(3, timeout=300)

    def find(rows):
        together.wait()  # fails unless three threads are here
        return [row * 10 for row in rows]

    shares = [range(34 * share, 34 * share + 34) for share in range(6)]
    assert list(batches.find_in_threads(find, shares, 3)) == [[row * 10 for row in rows] for rows in shares]


@pytest.mark.parametrize('threads, count', [(1, 5), (3, 1)])
def test_one_batch_at_a_time_is_searched_by_the_caller(threads, count):
    threads_of: Any = batches.find_in_threads(lambda rows: threading.get_ident(), [[0]] * count, threads)
    assert list(threads_of) == [threading.get_ident()] * count


@pytest.mark.parametrize('batch_size, cores, devices, threads', [
    (100, 1, 1, 1), (100, 3, 2, 1), (31, 3, 1, 1), (63, 3, 1, 1), (64, 3, 1, 2), (100, 3, 1, 3), (400, 3, 1, 3)])
def test_threads_have_enough_to_do(batch_size, cores, devices, threads, monkeypatch):
    use_cores(monkeypatch, cores, devices)
    assert batches.threads_for(batch_size) == threads


@pytest.mark.parametrize('batch_size, threads, count, rows', [
    (128, 2, 1000, 64), (128, 2, 65, 64), (128, 2, 64, 32), (128, 2, 3, 32), (128, 1, 3, 128), (100, 2, 9, 50)])
def test_few_sentences_are_divided_among_the_threads(batch_size, threads, count, rows):
    assert batches.rows_per_thread(batch_size, threads, count) == rows


@pytest.mark.slow
@pytest.mark.parametrize('batch_size, count, sizes', [
    (60, 80, [32, 60]), (100, 180, [32, 50, 50, 50]), (200, 210, [16, 100, 100]), (200, 190, [100, 100])])
def test_shares_are_padded_to_their_own_size(batch_size, count, sizes, monkeypatch):
    """No row of a full share is padding, whatever the batch size; the last share has the next power of two."""
    use_cores(monkeypatch, 2)
    module, ones = Transformer(blocks(), 1, SIZE, SIZE), np.ones((1, 4), np.int32)
    model = Translator(module, jax.jit(module.init)(jax.random.key(2), ones, ones)['params'],
                       dict.fromkeys(('source', 'target'), TOKENIZER), max_length=64)
    rows, find = [], model._batches.find
    monkeypatch.setattr(model._batches, 'find', lambda params, search, batch, *args: (
        rows.append(len(batch.source)), find(params, search, batch, *args))[1])
    options = SearchOptions(method='greedy', extra_length=2, batch_size=batch_size)
    model.find_all([[4, 5]] * count, range(count), options)
    assert sorted(rows) == sizes


def test_an_error_in_a_thread_is_the_callers(monkeypatch):
    use_cores(monkeypatch, 2)

    def find(rows):
        raise ValueError(f'row {rows[0]}')

    with pytest.raises(ValueError, match='row 0'):
        list(batches.find_in_threads(find, [[0], [1], [2]], 2))


def test_an_interrupt_does_not_wait_for_running_searches_and_starts_no_more():
    interrupted, began = threading.Event(), []

    def find(rows):
        began.append(rows)
        if rows == [0]:
            raise KeyboardInterrupt
        assert interrupted.wait(10)
        return rows

    with pytest.raises(KeyboardInterrupt):
        list(batches.find_in_threads(find, [[0], [1], [2], [3], [4]], 2))
    running = threading.active_count()
    interrupted.set()
    assert running > 1 and [4] not in began


@pytest.mark.slow
@pytest.mark.parametrize('search', SEARCHES)
def test_threads_find_what_one_finds_and_compile_no_more(search, monkeypatch):
    module, ones = Transformer(blocks(), 1, SIZE, SIZE), np.ones((1, 4), np.int32)
    params = jax.jit(module.init)(jax.random.key(2), ones, ones)['params']
    rng = np.random.default_rng(1)
    sources = [rng.integers(4, SIZE, rng.integers(1, 30)).tolist() for _ in range(60)]
    options = SearchOptions(**vars(SEARCHES[search]) | {'extra_length': EXTRA})
    monkeypatch.setattr(batches, 'SHARE', 8)
    answers, programs = [], []
    for cores, size in (1, 8), (4, 32):
        use_cores(monkeypatch, cores)
        model = Translator(module, params, dict.fromkeys(('source', 'target'), TOKENIZER), max_length=64)
        found = model.find_all(sources, range(60), dataclasses.replace(options, batch_size=size))
        answers.append([[(each.tokens, each.log_prob) for each in hypotheses] for hypotheses in found])
        programs.append([each._cache_size() for each in (model._batches._begin, model._batches._advance)])
    assert answers[0] == answers[1]
    assert programs[0] == programs[1]
