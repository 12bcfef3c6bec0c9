"""The plan of sentences with a new segmentation in every epoch: every sentence once, in shapes that never change."""

import collections
import functools

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import demo
from input_pipeline import builtin, resegmented
from input_pipeline.batches import LENGTHS, ROWS, BatchPlan, Part, prefetch
from input_pipeline.bpe_dropout import BpeDropout
from input_pipeline.data import open_data
from input_pipeline.resegmented import Resegmented, ResegmentedPlan
from input_pipeline.token_store import SIDES, open_store, tokenizers_for
from input_pipeline.tokenizer import BOS, EOS, PAD
from runtime.errors import UserError
from tests.input_pipeline.helpers import SETTINGS, assert_filled_up
from tests.input_pipeline.test_batches import equal
from tests.input_pipeline.test_token_store import Listed

MAX_LENGTH = 48


@functools.cache
def all_pairs():
    return builtin.make_corpus('en', 'fr', seed=0, sizes={'train': 2500})['train']


@pytest.fixture(scope='module', params=[
    pytest.param(True, id='joint'), pytest.param(False, id='separate', marks=pytest.mark.slow)])
def text(request, tmp_path_factory):
    """Tokenizers, and a store of at most MAX_LENGTH tokens."""
    cache, corpus = tmp_path_factory.mktemp('cache'), Listed(all_pairs())
    tokenizers = tokenizers_for(corpus, ConfigDict(SETTINGS | {'vocab_size': 600, 'joint': request.param}), cache)
    return tokenizers, open_store(corpus, 'train', tokenizers, MAX_LENGTH, cache)


def plan_of(text, rate=0.2, tokens=1024, num_buckets=4, seed=0):
    tokenizers, store = text
    return ResegmentedPlan(store, {side: BpeDropout(tokenizers[side], rate) for side in SIDES}, tokens=tokens,
                           num_buckets=num_buckets, seed=seed, longest=MAX_LENGTH)


def epoch_of(plan, epoch):
    return [plan.batch(step) for step in range(epoch * len(plan), (epoch + 1) * len(plan))]


def pairs_of(batches, tokenizers):
    """The text of each row."""
    return [(tokenizers['source'].decode(source), tokenizers['target'].decode(target))
            for batch in batches for source, target in zip(batch['inputs']['source'], batch['targets'], strict=True)
            if target.any()]


def pairs_in(store, tokenizers):
    """The text of each row of a store."""
    return [tuple(tokenizers[side].decode(store.tokens(side, row)) for side in SIDES) for row in range(len(store))]


def rows_of(batches, side):
    arrays = [batch['targets'] if side == 'target' else batch['inputs']['source'] for batch in batches]
    return [row[row != PAD].tolist() for rows in arrays for row in rows if row.any()]


@pytest.mark.slow
@pytest.mark.parametrize('rate', [0.0, 0.1, 0.6, 1.0])
def test_every_epoch_has_every_pair_once_in_the_same_shapes(text, rate):
    tokenizers, store = text
    plan = plan_of(text, rate)
    expected = collections.Counter(pairs_in(store, tokenizers))
    shapes = set(zip(plan.rows.tolist(), plan.bucket_lengths.tolist(), strict=True))
    assert len(shapes) <= 4 and all(rows * length <= 1024 and rows % ROWS == 0 and length % LENGTHS == 0
                                    and length <= MAX_LENGTH for rows, length in shapes)
    for epoch in (0, 1, 7):
        batches = epoch_of(plan, epoch)
        assert collections.Counter(pairs_of(batches, tokenizers)) == expected
        for batch in batches:
            source, target, targets = *batch['inputs'].values(), batch['targets']
            assert source.shape == target.shape == targets.shape in shapes and source.dtype == np.int32
            assert targets.any() and np.array_equal(batch['weights'], targets != PAD)
            assert np.array_equal(target[:, 1:][targets[:, 1:] != PAD], targets[:, :-1][targets[:, 1:] != PAD])
            assert (target[:, 0][targets[:, 0] != PAD] == BOS).all() and not target[targets == PAD].any()
            assert ((source == EOS).sum(axis=1) == targets.any(axis=1)).all()


def test_without_dropout_rows_are_those_of_the_store(text):
    store = text[1]
    batches = epoch_of(plan_of(text, 0.0), 2)
    for side in SIDES:
        assert sorted(rows_of(batches, side)) == sorted(
            [*store.tokens(side, row).tolist(), EOS] for row in range(len(store)))


def test_a_batch_is_a_pure_function_of_the_step(text):
    used, fresh = plan_of(text), plan_of(text)
    for step in (0, 7, 5000, 3):
        used.batch(step)
    for step in (1234, len(used) - 1, len(used), 0):
        assert equal(used.batch(step), fresh.batch(step))
    first, last = len(used) - 3, len(used) + 3
    fetched = list(prefetch(plan_of(text), first, last))
    assert all(equal(batch, used.batch(step)) for step, batch in enumerate(fetched, first))


def test_epochs_and_seeds_have_draws_of_their_own(text):
    tokenizers, store = text
    plan, other = plan_of(text), plan_of(text, seed=1)
    drawn = [{side: sorted(rows_of(batches, side)) for side in SIDES}
             for batches in (epoch_of(plan, 0), epoch_of(plan, 1), epoch_of(other, 0))]
    for side in SIDES:
        assert drawn[0][side] != drawn[1][side] != drawn[2][side] != drawn[0][side]
    dropouts = {side: BpeDropout(tokenizers[side], 0.2) for side in SIDES}
    epochs = [Resegmented(store, dropouts, 0, epoch, MAX_LENGTH) for epoch in range(3)]
    lengths = np.array([epoch.lengths('target') for epoch in epochs])
    plain = store.lengths('target')
    extra = lengths - plain
    assert extra.mean() > 0.5 and abs(np.corrcoef(extra[0] / plain, extra[1] / plain)[0, 1]) < 0.5


def test_sides_and_blocks_of_rows_have_draws_of_their_own(text, tmp_path, monkeypatch):
    """Segments the same sentences four times: on both sides, and in two blocks of rows."""
    tokenizers, sentences = dict.fromkeys(SIDES, text[0]['source']), [source for source, _ in all_pairs()[:200]]
    store = open_store(Listed(2 * [(sentence, sentence) for sentence in sentences]), 'train', tokenizers, MAX_LENGTH,
                       tmp_path)
    monkeypatch.setattr(resegmented, 'TOGETHER', len(store) // 2)
    drawn = Resegmented(store, {side: BpeDropout(tokenizers[side], 0.2) for side in SIDES}, 0, 0, 10 * MAX_LENGTH)
    lengths = [drawn.lengths(side).reshape(2, -1) for side in SIDES]
    assert lengths[0].size > 300 and (lengths[0] != lengths[1]).mean() > 0.1
    assert all((first != second).mean() > 0.1 for first, second in lengths)


def test_segmentation_is_not_a_matter_of_parts(text):
    plan, parts = plan_of(text), [Part(0, 1, 2), Part(1, 2, 2)]
    for step in (0, 5, len(plan) + 1):
        read = [plan.batch(step, part) for part in parts]
        assert equal(plan.batch(step), jax.tree.map(lambda *rows: np.concatenate(rows), *read))
        assert_filled_up(plan, step, 3, 1, 3)


def test_what_gets_too_long_keeps_its_segmentation(text):
    tokenizers, store = text
    dropouts = {side: BpeDropout(tokenizers[side], 1.0) for side in SIDES}
    drawn = Resegmented(store, dropouts, 0, 0, 20)
    for side in SIDES:
        for row in range(0, len(store), 97):
            plain, found = store.tokens(side, row), drawn.tokens(side, row)
            characters = tokenizers[side].decode(plain)
            assert tokenizers[side].decode(found) == characters and len(found) == drawn.lengths(side)[row]
            assert len(found) <= 20 or found.tolist() == plain.tolist()
            assert found.tolist() == plain.tolist() or len(found) >= len(characters)


def test_batches_are_full(text):
    """All but as many as the numbers of epochs may differ by, and the last of the shortest."""
    plan = plan_of(text, tokens=512)
    for epoch in range(4):
        missing = [1 - batch['targets'].any(axis=1).mean() for batch in epoch_of(plan, epoch)]
        assert sum(missing) < 2 + 1 + len(plan) ** 0.5 / 10 + 1


def test_an_epoch_that_has_no_room_keeps_some_of_the_segmentation(text):
    tokenizers, store = text
    plan = plan_of(text, 0.5)
    expected = len(plan._cut(np.arange(len(store)), np.maximum(*(store.lengths(side) for side in SIDES)) + 1))
    plan._length = expected + 1
    pairs = pairs_of(epoch_of(plan, 3), tokenizers)
    assert collections.Counter(pairs) == collections.Counter(pairs_in(store, tokenizers))


@pytest.mark.parametrize('count', [1, 2, 9])
def test_few_sentences(count, tmp_path):
    corpus = Listed(all_pairs()[:count])
    tokenizers = tokenizers_for(Listed(all_pairs()), ConfigDict(SETTINGS | {'vocab_size': 600}), tmp_path)
    text = tokenizers, open_store(corpus, 'train', tokenizers, MAX_LENGTH, tmp_path)
    plan = plan_of(text, 0.5)
    assert 1 <= len(plan) <= count
    for epoch in range(5):
        batches = epoch_of(plan, epoch)
        assert all(batch['weights'].any() for batch in batches)
        assert sorted(pairs_of(batches, tokenizers)) == sorted(all_pairs()[:count])


def test_too_small_a_budget_names_one_that_works(text):
    with pytest.raises(UserError, match=r'batch\.tokens=255: too small, .* 8 sentences of up to \d+ tokens'):
        plan_of(text, tokens=255)


@pytest.mark.slow
def test_the_option_is_only_for_training(tmp_path):
    config = demo.get_config()
    config.cache_dir = str(tmp_path)
    plain = open_data(config)
    assert type(plain.plan('train')) is BatchPlan
    config.data.tokenizer.dropout = 0.1
    data = open_data(config)
    plan = data.plan('train')
    assert isinstance(plan, ResegmentedPlan) and plan.bucket_lengths[-1] <= config.data.max_length
    assert len(data.tokenizers['source']) == len(plain.tokenizers['source'])
    for split in ('validation', 'test'):
        assert type(data.plan(split)) is BatchPlan and equal(data.plan(split).batch(0), plain.plan(split).batch(0))
    assert 'with a new segmentation' in plan.describe()
