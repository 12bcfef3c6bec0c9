"""The batch plan: every sentence once per epoch, at most batch.tokens tokens, and the same batches for any process."""

import itertools
import types

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import wmt14_base
from input_pipeline import data
from input_pipeline.batches import LENGTHS, ROWS, BatchPlan, Part, bucket_lengths, prefetch
from input_pipeline.token_store import TokenStore
from input_pipeline.tokenizer import BOS, EOS, PAD
from runtime.errors import UserError
from tests.input_pipeline.helpers import assert_filled_up


class Store(TokenStore):
    """Sentences of the given lengths. Each token identifies its sentence and its side."""

    def __init__(self, lengths):
        self._lengths = dict(zip(('source', 'target'), np.array(lengths).reshape(-1, 2).T, strict=True))

    def __len__(self):
        return len(self._lengths['source'])

    def lengths(self, side):
        return self._lengths[side]

    def tokens(self, side, row):
        return np.full(self._lengths[side][row], 10 + 2 * row + (side == 'target'), np.uint32)


def random_store(pairs=200, longest=30, seed=0):
    return Store(np.random.default_rng(seed).integers(1, longest, (pairs, 2)))


def plan_of(store, tokens=512, num_buckets=3, seed=0):
    return BatchPlan(store, tokens=tokens, num_buckets=num_buckets, seed=seed)


def epoch_of(plan, epoch):
    return [plan(step) for step in range(epoch * len(plan), (epoch + 1) * len(plan))]


def sentences_of(batches):
    return np.concatenate([sentences for _, sentences in batches]).tolist()


def equal(first, second):
    return (np.array_equal(first['targets'], second['targets']) and np.array_equal(first['weights'], second['weights'])
            and all(np.array_equal(first['inputs'][name], second['inputs'][name]) for name in ('source', 'target')))


stores = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60).map(Store)
plans = st.builds(lambda store, **options: (store, plan_of(store, **options)), stores, num_buckets=st.integers(1, 5),
                  tokens=st.integers(ROWS * 44, 2000), seed=st.none() | st.integers(0, 2 ** 40))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 40), min_size=1), st.integers(1, 6))
def test_buckets_waste_the_least_padding(lengths, num_buckets):
    def padded(buckets):
        return sum(min(bucket for bucket in buckets if bucket >= length) for length in lengths)

    found = bucket_lengths(np.array(lengths), num_buckets).tolist()
    *smaller, longest = range(LENGTHS, max(lengths) + LENGTHS, LENGTHS)
    possible = itertools.combinations(smaller, min(num_buckets - 1, len(smaller)))
    assert found == sorted(set(found)) and found[-1] == longest and len(found) <= num_buckets
    assert all(bucket % LENGTHS == 0 for bucket in found)
    assert padded(found) == min(padded((*some, longest)) for some in possible)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans)
def test_each_sentence_once_an_epoch(store_and_plan):
    store, plan = store_and_plan
    for epoch in (0, 1):
        assert sorted(sentences_of(epoch_of(plan, epoch))) == list(range(len(store)))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stores, st.integers(ROWS * 44, 2000), st.integers(1, 5))
def test_batches_have_few_static_shapes_within_the_budget(store, tokens, num_buckets):
    plan = plan_of(store, tokens, num_buckets)
    shapes = set(zip(plan.rows.tolist(), plan.bucket_lengths.tolist(), strict=True))
    for step in range(len(plan)):
        batch = plan.batch(step)
        for array in (*batch['inputs'].values(), batch['targets'], batch['weights']):
            assert array.shape in shapes
            assert array.dtype == (np.float32 if array is batch['weights'] else np.int32)
    assert len(shapes) <= num_buckets
    for rows, length in shapes:
        assert rows * length <= tokens and rows % ROWS == 0 and length % LENGTHS == 0


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans)
def test_weights_are_one_on_tokens_and_zero_on_padding(store_and_plan):
    store, plan = store_and_plan
    batches = [plan.batch(step) for step in range(len(plan))]
    tokens = sum(batch['weights'].sum() for batch in batches)
    assert tokens == store.lengths('target').sum() + len(store)  # the end tokens count
    assert plan.padding_share == pytest.approx(1 - tokens / sum(batch['weights'].size for batch in batches))
    for step, batch in enumerate(batches):
        assert np.array_equal(batch['weights'], batch['targets'] != PAD)
        missing = len(plan(step)[1])
        for array in (batch['weights'], batch['targets'], *batch['inputs'].values()):
            assert not array[missing:].any()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans)
def test_source_target_and_targets_are_aligned(store_and_plan):
    store, plan = store_and_plan
    batch, (_, sentences) = plan.batch(len(plan) - 1), plan(len(plan) - 1)
    for row, sentence in enumerate(sentences):
        source, target = store.tokens('source', sentence).tolist(), store.tokens('target', sentence).tolist()
        for array, expected in ((batch['inputs']['source'], [*source, EOS]), (batch['targets'], [*target, EOS]),
                                (batch['inputs']['target'], [BOS, *target])):
            assert array[row, :len(expected)].tolist() == expected
            assert not array[row, len(expected):].any()


def test_batch_is_a_pure_function_of_the_step():
    store = random_store()
    used, fresh = plan_of(store), plan_of(store)
    for step in (0, 7, 5000, 3):
        used.batch(step)
    assert equal(used.batch(1234), fresh.batch(1234))
    assert equal(used.batch(0), fresh.batch(0))


def test_batches_are_those_of_earlier_versions():
    """A resumed run of an earlier version must get the same batches. Their order depends on the generator of NumPy."""
    plan = plan_of(Store([(number % 9 + 1, 3) for number in range(40)]), 128, 2, 3)
    assert plan(len(plan) + 1)[1].tolist() == [5, 12, 18, 10, 13, 27, 11, 2, 24, 29, 9, 31, 14, 6, 23, 28]


def test_order_changes_with_epoch_and_seed():
    store = random_store()
    plan, other = plan_of(store, seed=0), plan_of(store, seed=1)
    orders = [sentences_of(epoch_of(plan, 0)), sentences_of(epoch_of(plan, 1)), sentences_of(epoch_of(other, 0))]
    assert len(set(map(tuple, orders))) == 3
    # Not only the order of the batches changes: each batch also has other sentences.
    met = [{frozenset(sentences.tolist()) for _, sentences in epoch_of(plan, epoch)} for epoch in (0, 1)]
    assert not met[0] & met[1]
    # And short batches do not all come first.
    assert [bucket for bucket, _ in epoch_of(plan, 0)] != sorted(bucket for bucket, _ in epoch_of(plan, 0))


def test_evaluation_keeps_one_order_from_short_to_long():
    plan = plan_of(random_store(), seed=None)
    first, second = epoch_of(plan, 0), epoch_of(plan, 1)
    assert sorted(sentences_of(first)) == list(range(200))
    assert sentences_of(first) == sentences_of(second)
    assert [bucket for bucket, _ in first] == sorted(bucket for bucket, _ in first)


@pytest.mark.parametrize('first, last', [(0, 5), (3, 4), (17, 60), (7, 7)])
def test_prefetch_yields_exactly_the_steps_asked_for(first, last):
    plan = plan_of(random_store())
    assert first + len(plan) < 60  # the long case crosses an epoch
    fetched = list(prefetch(plan, first, last))
    assert len(fetched) == last - first
    assert all(equal(batch, plan.batch(step)) for step, batch in enumerate(fetched, first))


def test_too_small_a_budget_names_one_that_works():
    store = Store([[5, 29], [3, 3]])
    with pytest.raises(UserError, match=r'batch\.tokens=255: too small, .* 8 sentences of up to 32 tokens\. .* 256'):
        plan_of(store, tokens=255)
    assert plan_of(store, tokens=256).rows.min() == ROWS


@pytest.mark.parametrize('parts', [[Part(0, 1, 2), Part(1, 2, 2)], [Part(n, n + 1, 8) for n in range(8)],
                                   [Part(0, 3, 4), Part(3, 4, 4)]])
def test_what_processes_read_is_side_by_side_the_batch(parts):
    plan = plan_of(random_store())
    for step in range(len(plan)):
        read = [plan.batch(step, part) for part in parts]
        assert equal(plan.batch(step), jax.tree.map(lambda *rows: np.concatenate(rows), *read))
        assert [len(batch['targets']) for batch in read] == [
            plan.rows[plan(step)[0]] * (part.last - part.first) // part.of for part in parts]


@pytest.mark.parametrize('shares, accumulate, processes', [(1, 1, 1), (1, 3, 1), (3, 1, 1), (3, 1, 3), (5, 3, 5),
                                                           (6, 2, 3), (16, 1, 4), (16, 2, 16), (100, 1, 100)])
def test_any_number_of_devices_shares_a_batch(shares, accumulate, processes):
    plan = plan_of(random_store())
    for step in range(len(plan)):
        assert_filled_up(plan, step, shares, accumulate, processes)


@pytest.mark.parametrize('shares, accumulate', [(8, 2), (16, 1), (24, 1), (256, 1)])
def test_the_paper_s_batches_on_many_devices(shares, accumulate):
    """8 buckets of 25,000 tokens; as many rows each as 16 devices, or 8 twice, do not divide."""
    config = wmt14_base.get_config()
    lengths = np.random.default_rng(0).lognormal(3.2, 0.6, (3000, 2)).clip(1, config.data.max_length - 1).astype(int)
    plan = plan_of(Store(lengths), tokens=config.batch.tokens, num_buckets=config.batch.buckets)
    assert len(plan.rows) == 8 and (plan.rows % (shares * accumulate) > 0).any()
    for step in range(len(plan)):
        assert_filled_up(plan, step, shares, accumulate, shares)


def test_no_batch_is_padded_beyond_learned_positions():
    """The limit, 27, is not a multiple of LENGTHS."""
    store = Store([(26, 3), (5, 26), (1, 1), (26, 26)])
    batches = BatchPlan(store, tokens=1024, num_buckets=2, seed=0, longest=27)
    shapes = {batches.batch(step)['targets'].shape[1] for step in range(len(batches))}
    assert max(shapes) == 27 and plan_of(store).bucket_lengths.max() == 28
    tokens = sum(int(batches.batch(step)['weights'].sum()) for step in range(len(batches)))
    assert tokens == store.lengths('target').sum() + len(store)


@pytest.mark.parametrize('options', [{'train.teacher': 'runs/teacher'},
                                     {'model.position': 'learned', 'model.max_length': 27}])
def test_no_batch_is_padded_beyond_the_positions_of_the_model_or_the_sentences_of_a_teacher(options, monkeypatch):
    """The teacher may have learned positions, even if the student has none."""
    config = wmt14_base.get_config()
    config.update_from_flattened_dict({'data.max_length': 27} | options)
    pairs = pair_data(config, Store([(26, 3), (5, 26), (1, 1)]), monkeypatch)
    assert max(data.PairData.plan(pairs, 'train').bucket_lengths) == 27


def test_training_batches_have_the_seed_and_the_buckets_of_the_config_and_other_splits_keep_their_order(monkeypatch):
    config, store = wmt14_base.get_config(), random_store()
    config.update_from_flattened_dict({'seed': 3, 'batch.tokens': 512, 'batch.buckets': 2})
    pairs = pair_data(config, store, monkeypatch)
    for split, seed in ('train', 3), ('validation', None), ('test', None):
        plan, expected = data.PairData.plan(pairs, split), plan_of(store, 512, 2, seed)
        assert len(plan) == len(expected)
        assert all(equal(plan.batch(step), expected.batch(step)) for step in range(len(plan)))


def pair_data(config, store, monkeypatch):
    """Returns the attributes of PairData that `plan` uses. Every split has the token store `store`."""
    monkeypatch.setattr(data, 'open_store', lambda *_: store)
    return types.SimpleNamespace(_config=config, _source=None, _cache=None, tokenizers={})
