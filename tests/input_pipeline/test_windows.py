"""Windows of documents: each token is a target once per epoch, and all processes get the same batches."""

import itertools
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import shakespeare_char
from configs.options import choices
from input_pipeline.batches import Part, prefetch
from input_pipeline.data import DocumentData
from input_pipeline.token_store import TokenStore
from input_pipeline.tokenizer import BOS, EOS, PAD
from input_pipeline.windows import WindowPlan, pack
from tests.input_pipeline.helpers import assert_filled_up

NAMES = ('tokens', 'segments', 'positions')
PACKINGS = choices('data.packing')
slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Store(TokenStore):
    """Documents of the given lengths; no token is there twice."""

    def __init__(self, lengths):
        self.documents = np.split(np.arange(10, 10 + sum(lengths), dtype=np.uint32), np.cumsum(lengths)[:-1])
        self.stats = {'characters': 5 * sum(lengths), 'bytes': 6 * sum(lengths)}
        self._lengths = np.array(lengths)

    def lengths(self, side):
        assert side == 'text'
        return self._lengths

    def at(self, side, places):
        return (10 + places).astype(np.uint32)


def plan_of(lengths, rows=3, context=8, packing='contiguous', seed=0):
    return WindowPlan(Store(lengths), rows=rows, context=context, packing=packing, seed=seed)


def epoch_of(plan, epoch=0):
    return [plan.batch(step) for step in range(epoch * len(plan), (epoch + 1) * len(plan))]


def rows_of(batches):
    """Each row of the batches, as lists by name."""
    for batch in batches:
        arrays = batch['inputs'] | {'targets': batch['targets'], 'weights': batch['weights']}
        for row in range(len(batch['targets'])):
            yield {name: array[row].tolist() for name, array in arrays.items()}


def pairs_of(batches):
    """(input, target) of each position that counts."""
    return [(token, target) for row in rows_of(batches)
            for token, target, weight in zip(row['tokens'], row['targets'], row['weights'], strict=True) if weight]


def all_pairs(documents):
    """The same, of the documents themselves."""
    return [pair for document in documents for pair in itertools.pairwise([BOS, *document.tolist(), EOS])]


def equal(first, second):
    return (all(np.array_equal(first['inputs'][name], second['inputs'][name]) for name in NAMES)
            and np.array_equal(first['targets'], second['targets'])
            and np.array_equal(first['weights'], second['weights']))


some_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=20)
options = st.fixed_dictionaries({
    'rows': st.integers(1, 5), 'context': st.integers(1, 20), 'packing': st.sampled_from(PACKINGS),
    'seed': st.none() | st.integers(0, 2 ** 40)})


@slow
@given(some_lengths, options, st.integers(0, 3))
def test_each_token_is_a_target_once_an_epoch_behind_its_predecessor(lengths, options, epoch):
    plan = plan_of(lengths, **options)
    assert Counter(pairs_of(epoch_of(plan, epoch))) == Counter(all_pairs(Store(lengths).documents))


@slow
@given(some_lengths, options)
def test_batches_have_one_shape_and_padding_weighs_nothing(lengths, options):
    plan = plan_of(lengths, **options)
    assert plan.rows == (options['rows'],)
    batches, positions, targets = epoch_of(plan), 0, 0
    for batch in batches:
        for array in (*batch['inputs'].values(), batch['targets'], batch['weights']):
            assert array.shape == (options['rows'], options['context'])
            assert array.dtype == (np.float32 if array is batch['weights'] else np.int32)
        assert np.array_equal(batch['weights'], batch['targets'] != PAD)
        padding = batch['inputs']['segments'] == 0
        assert np.array_equal(padding, batch['inputs']['tokens'] == PAD)
        assert not batch['inputs']['positions'][padding].any() and not batch['weights'][padding].any()
        positions, targets = positions + padding.size, targets + int(batch['weights'].sum())
    assert plan.padding_share == pytest.approx(1 - targets / positions)
    shape = f'{options["rows"]} windows x {options["context"]} tokens'
    assert plan.describe().startswith(f'{len(plan)} batches per epoch, of {shape}; ')


@slow
@given(some_lengths, options)
def test_segments_are_runs_of_one_document_and_positions_count_them(lengths, options):
    document_of = {token: number for number, document in enumerate(Store(lengths).documents)
                   for token in document.tolist()}
    for row in rows_of(epoch_of(plan_of(lengths, **options))):
        length = sum(segment > 0 for segment in row['segments'])
        assert not any(row['segments'][length:])  # padding is behind
        runs = [list(run) for _, run in itertools.groupby(range(length), row['segments'].__getitem__)]
        assert [row['segments'][run[0]] for run in runs] == list(range(1, len(runs) + 1))
        for run in runs:
            tokens, targets = ([row[name][place] for place in run] for name in ('tokens', 'targets'))
            assert [row['positions'][place] for place in run] == list(range(len(run)))
            assert BOS not in tokens[1:] and EOS not in tokens[:-1]
            assert targets[:-1] == tokens[1:]
            assert len({document_of[token] for token in [*tokens, targets[-1]] if token in document_of}) <= 1
            assert (targets[-1] == PAD) == (tokens[-1] == EOS)  # the next one is another document's


@slow
@given(some_lengths, options)
def test_packed_documents_are_whole_where_they_can_be(lengths, options):
    plan = plan_of(lengths, **options | {'packing': 'packed'})
    begun = sum(row['tokens'].count(BOS) for row in rows_of(epoch_of(plan)))
    segments = sum(max(row['segments']) for row in rows_of(epoch_of(plan)))
    assert begun == len(lengths)
    assert segments == sum(-(-(length + 1) // options['context']) for length in lengths)


def test_contiguous_evaluation_is_the_stream_in_order():
    plan = plan_of([5, 2, 9], rows=2, context=4, seed=None)
    rows = list(rows_of(epoch_of(plan)))
    assert [row['tokens'] for row in rows] == [
        [BOS, 10, 11, 12], [13, 14, EOS, BOS], [15, 16, EOS, BOS], [17, 18, 19, 20], [21, 22, 23, 24],
        [25, PAD, PAD, PAD]]
    assert [row['targets'] for row in rows] == [
        [10, 11, 12, 13], [14, EOS, PAD, 15], [16, EOS, PAD, 17], [18, 19, 20, 21], [22, 23, 24, 25],
        [EOS, PAD, PAD, PAD]]
    assert rows[1]['segments'] == [1, 1, 1, 2] and rows[1]['positions'] == [0, 1, 2, 0]
    assert all(equal(*batches) for batches in zip(epoch_of(plan, 0), epoch_of(plan, 1), strict=True))


def test_packed_evaluation():
    plan = plan_of([2, 9, 3, 1], rows=2, context=8, packing='packed', seed=None)
    rows = [row['tokens'] for row in rows_of(epoch_of(plan))]
    # 10 inputs are cut into 8 and 2; 2, 4, 2 and 3 are left.
    assert sorted(rows) == sorted([[BOS, *range(12, 19)], [BOS, 21, 22, 23, BOS, 10, 11, PAD],
                                   [19, 20, BOS, 24, PAD, PAD, PAD, PAD], [PAD] * 8])


def test_one_document_is_one_segment():
    plan = plan_of([1000], rows=12, context=64, seed=None)
    for batch in epoch_of(plan):
        assert np.array_equal(batch['inputs']['segments'], batch['weights'])
    rows = rows_of(epoch_of(plan_of([1000], context=64)))
    assert sum(row['segments'].count(2) > 0 for row in rows) == 1  # the stream's end is joined to its beginning


@pytest.mark.parametrize('packing', PACKINGS)
def test_batch_is_a_pure_function_of_the_step(packing):
    lengths = np.random.default_rng(0).integers(1, 30, 100).tolist()
    used, fresh = plan_of(lengths, packing=packing), plan_of(lengths, packing=packing)
    for step in (0, 7, 5000, 3):
        used.batch(step)
    assert equal(used.batch(1234), fresh.batch(1234))
    assert equal(used.batch(0), fresh.batch(0))
    fetched = list(prefetch(used, len(used) - 2, len(used) + 2))
    assert all(equal(batch, fresh.batch(step)) for step, batch in enumerate(fetched, len(used) - 2))


@pytest.mark.parametrize('packing, expected', [
    ('contiguous', [[19, 20, 21, 22], [3, 4, 5, 6]]), ('packed', [[0, 1, 2, 3], [7, 8, 9, 26]])])
def test_windows_are_those_of_earlier_versions(packing, expected):
    """A resumed run of an earlier version must get the same batches. Their order depends on the generator of NumPy."""
    plan = plan_of([5, 2, 9, 4], 2, 4, packing, 3)
    assert plan.places(len(plan) + 1).tolist() == expected


@pytest.mark.parametrize('packing', PACKINGS)
def test_order_changes_with_epoch_and_seed(packing):
    lengths = np.random.default_rng(0).integers(1, 30, 100).tolist()
    epochs = [epoch_of(plan_of(lengths, context=32, packing=packing, seed=seed), epoch)
              for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    orders = [pairs_of(batches) for batches in epochs]
    assert len(set(map(tuple, orders))) == 3
    # Not only the order of the rows changes: the rows also have different contents.
    contents = [{tuple(row['tokens']) for row in rows_of(batches)} for batches in epochs]
    assert len(contents[0] & contents[1]) < len(contents[0]) / 2


@pytest.mark.parametrize('packing', PACKINGS)
def test_batches_have_the_packing_the_sizes_and_the_seed_of_the_config(packing):
    config, data = shakespeare_char.get_config(), object.__new__(DocumentData)
    lengths = np.random.default_rng(0).integers(1, 30, 100).tolist()
    data._config, data._stores = config, dict.fromkeys(('train', 'validation'), Store(lengths))
    config.update_from_flattened_dict({'seed': 3, 'batch.rows': 4, 'data.context': 32, 'data.packing': packing})
    for split, seed in ('train', 3), ('validation', None):
        plan, expected = data.plan(split), plan_of(lengths, 4, 32, packing, seed)
        assert len(plan) == len(expected)
        assert all(equal(plan.batch(step), expected.batch(step)) for step in range(len(plan)))


def test_phase_changes_with_the_epoch():
    plan = plan_of([1000], context=16)
    phases = {min(row['tokens'][0] for row in rows_of(epoch_of(plan, epoch)) if row['tokens'][0] > EOS) % 16
              for epoch in range(20)}
    assert len(phases) > 5


@slow
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_packing_keeps_the_pieces_and_opens_no_row_in_vain(lengths):
    ways = pack(np.bincount(lengths), 20)
    assert Counter(lengths) == sum((Counter({length: number * pieces.count(length) for length in pieces})
                                    for number, pieces in ways), Counter())
    used = sorted(sum(pieces) for number, pieces in ways for _ in range(number))
    assert used[-1] <= 20
    assert len(used) == 1 or used[0] + used[1] > 20


def test_many_documents():
    lengths = np.random.default_rng(0).integers(1, 60, 200_000).tolist()
    plan = plan_of(lengths, rows=16, context=256, packing='packed')
    assert plan.padding_share < 0.01
    assert plan.batch(len(plan) + 17)['weights'].mean() > 0.98


def test_characters_and_bytes_are_the_stores():
    plan = plan_of([10])
    assert (plan.characters, plan.bytes) == (50, 60)


@pytest.mark.parametrize('packing', PACKINGS)
def test_what_processes_read_is_side_by_side_the_batch(packing):
    plan = plan_of([9, 3, 30, 1, 14, 5, 22], rows=8, packing=packing)
    for step in range(2 * len(plan)):
        read = [plan.batch(step, Part(number, number + 1, 4)) for number in range(4)]
        jax.tree.map(lambda whole, *rows: np.testing.assert_array_equal(whole, np.concatenate(rows)),
                     plan.batch(step), *read)


@pytest.mark.parametrize('packing', PACKINGS)
@pytest.mark.parametrize('shares, accumulate, processes', [(1, 3, 1), (3, 1, 3), (5, 3, 5), (16, 2, 4)])
def test_any_number_of_devices_shares_a_batch(packing, shares, accumulate, processes):
    plan = plan_of([9, 3, 30, 1, 14, 5, 22], rows=7, packing=packing)
    for step in range(len(plan) + 1):
        assert_filled_up(plan, step, shares, accumulate, processes)
