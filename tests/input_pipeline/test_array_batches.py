"""Batches of arrays: epochs, augmentation, and parts for several devices."""

import numpy as np
import pytest

from configs import digits_vit
from input_pipeline.array_batches import ArrayPlan
from input_pipeline.arrays import ArrayData
from input_pipeline.data import open_data
from input_pipeline.examples import Examples
from runtime.errors import UserError
from tests.input_pipeline.helpers import CLASSES, INPUTS, assert_filled_up, float64_standardised, image_data, in_memory

# The plan

def epoch_of(plan, epoch):
    return [plan.batch(step) for step in range(epoch * len(plan), (epoch + 1) * len(plan))]


def equal(first, second):
    return all(np.array_equal(one, other) for one, other in zip(
        (first['inputs']['inputs'], first['targets'], first['weights']),
        (second['inputs']['inputs'], second['targets'], second['weights']), strict=True))


@pytest.mark.parametrize('seed', [None, 3])
@pytest.mark.parametrize('count', [1, 8, 21])
def test_every_example_is_in_an_epoch_once(count, seed):
    data = image_data(count)
    plan = ArrayPlan(data, 'train', rows=8, seed=seed)
    assert plan.rows == [8] and len(plan) == -(-count // 8)
    orders = []
    for epoch in range(2):
        batches = epoch_of(plan, epoch)
        assert {batch['inputs']['inputs'].shape for batch in batches} == {(8, 6, 6, 1)}
        inputs, targets, weights = (np.concatenate([part(batch) for batch in batches]) for part in (
            lambda batch: batch['inputs']['inputs'], lambda batch: batch['targets'], lambda batch: batch['weights']))
        assert inputs.dtype == weights.dtype == np.float32 and targets.dtype == np.int32
        assert np.array_equal(weights, np.arange(len(weights)) < count)
        assert not inputs[count:].any() and not targets[count:].any()
        numbers = np.round(inputs[:count, 0, 0, 0] * 127.5 + 127.5).astype(int) - 1
        assert sorted(numbers) == list(range(count))
        np.testing.assert_array_equal(targets[:count], numbers % 3)
        orders.append(numbers.tolist())
    assert (orders[0] == list(range(count))) == (seed is None or count == 1)
    assert (orders[0] == orders[1]) == (seed is None or count == 1)


@pytest.mark.parametrize('augmentation', [{}, {'crop': 1}, {'flip': True}, {'crop': 2, 'flip': True},
                                          {'crop': 1, 'mixup': 0.2}])
def test_a_batch_is_a_function_of_seed_and_step(augmentation):
    def plan(seed):
        return ArrayPlan(image_data(), 'train', rows=8, seed=seed, **augmentation)

    forwards = [plan(1).batch(step) for step in range(8)]
    one = plan(1)
    backwards = [one.batch(step) for step in reversed(range(8))][::-1]
    assert all(map(equal, forwards, backwards))
    assert not equal(plan(2).batch(0), forwards[0])


def test_the_order_is_that_of_earlier_versions():
    """A resumed run of an earlier version must get the same batches. Their order depends on the generator of NumPy."""
    assert ArrayPlan(image_data(), 'train', rows=8, seed=3)(4).tolist() == [14, 10, 4, 13, 0, 3, 17, 16]


def test_crop_moves_an_image_by_up_to_its_pixels():
    whole = np.random.default_rng(0).integers(1, 256, (16, 6, 5, 2), np.uint8)
    plan = ArrayPlan(in_memory(whole, CLASSES[:1].repeat(16)), 'train', rows=16, seed=0, crop=2)
    padded = np.pad(whole, ((0, 0), (2, 2), (2, 2), (0, 0))) / 127.5 - 1
    places = set()
    for step in range(20):
        members = plan(step)
        for image, member in zip(plan.batch(step)['inputs']['inputs'], members, strict=True):
            found = [(top, left) for top in range(5) for left in range(5)
                     if np.allclose(padded[member, top:top + 6, left:left + 5], image, atol=1e-5)]
            assert len(found) == 1
            places.update(found)
    assert len(places) == 25


@pytest.mark.parametrize('height, width', [(6, 5), (5, 6), (5, 5)])
def test_a_crop_that_could_remove_the_whole_image_is_refused(height, width):
    data = in_memory(np.full((16, height, width, 1), 255, np.uint8), CLASSES[:1].repeat(16))
    plan = ArrayPlan(data, 'train', rows=16, seed=0, crop=4)
    assert all((plan.batch(step)['inputs']['inputs'] > -1).any(axis=(1, 2, 3)).all() for step in range(20))
    message = rf'data\.crop=5: must be below the height and the width of the images, {height} x {width} pixels'
    with pytest.raises(UserError, match=message):
        ArrayPlan(data, 'train', rows=16, seed=0, crop=5)


def test_flip_mirrors_half_of_the_images():
    data = image_data(16)
    plan = ArrayPlan(data, 'train', rows=16, seed=0, flip=True)
    mirrored = 0
    for step in range(20):
        images = plan.batch(step)['inputs']['inputs']
        left, right = images[:, 0, 0, 0] > -1, images[:, 0, -1, 0] > -1
        assert np.array_equal(left, ~right) and (images[:, 1:] == -1).all()
        mirrored += right.sum()
    assert 120 < mirrored < 200


def test_mixup_is_the_weighted_mean_of_two_examples_of_the_batch():
    whole = np.random.default_rng(0).normal(size=(12, 3, 3, 1))
    plan = ArrayPlan(in_memory(whole, np.arange(12)), 'train', rows=8, seed=0, mixup=1.0)  # the class is the example
    scaled, shares = float64_standardised(whole), []
    for step in range(40):
        batch, members = plan.batch(step), plan(step)
        assert not batch['weights'][len(members):].any()
        for row, member in enumerate(members):
            (first, second), (share, rest) = batch['targets'][row], batch['weights'][row]
            assert first == member and second in members and share + rest == pytest.approx(1)
            mixed = np.float64(share) * scaled[first] + np.float64(rest) * scaled[second]
            np.testing.assert_allclose(batch['inputs']['inputs'][row], mixed, atol=1e-5)
            shares.append(share)
    assert 0.45 < np.mean(shares) < 0.55 and 0.07 < np.var(shares) < 0.1  # Beta(1, 1): 1/2 and 1/12


def test_mixup_of_two_series_is_as_long_as_the_longer_series():
    lengths = np.array([2, 2, 6, 6])
    series = np.where(np.arange(6) < lengths[:, None], 1.0, np.nan)[..., None]
    data = ArrayData(lambda split: Examples(series, np.arange(4), 'file', padded=True), labelled=True)
    plan = ArrayPlan(data, 'train', rows=4, seed=0, mixup=1.0)  # the class is the example
    for step in range(8):
        batch = plan.batch(step)
        np.testing.assert_array_equal(batch['inputs']['visible'].sum(axis=1), lengths[batch['targets']].max(axis=1))


@pytest.mark.parametrize('rows', [1, 12, 30])
@pytest.mark.parametrize('shares, accumulate, processes', [(1, 1, 1), (3, 1, 3), (5, 3, 5), (8, 1, 2), (16, 2, 4)])
def test_any_number_of_devices_shares_a_batch(rows, shares, accumulate, processes):
    plan = ArrayPlan(image_data(21), 'train', rows=rows, seed=1, crop=2, flip=True, mixup=0.2)
    for step in range(len(plan) + 1):
        assert_filled_up(plan, step, shares, accumulate, processes)


@pytest.mark.parametrize('augmentation', [{'crop': 1}, {'flip': True}])
def test_series_are_not_cropped(augmentation):
    with pytest.raises(UserError, match=r'data\.crop=\d and flip=\w+ are for images, but the inputs are series'):
        ArrayPlan(in_memory(INPUTS, CLASSES), 'train', rows=8, seed=0, **augmentation)


def test_only_the_training_split_is_shuffled_and_augmented():
    config = digits_vit.get_config()
    config.update_from_flattened_dict({'seed': 3, 'batch.rows': 32, 'data.flip': True, 'data.mixup': 0.2})
    data = open_data(config)
    expected = ArrayPlan(data.arrays, 'train', rows=32, seed=3, crop=1, flip=True, mixup=0.2)
    assert all(equal(data.plan('train').batch(step), expected.batch(step)) for step in (0, 50))
    for split in 'validation', 'test':
        assert equal(data.plan(split).batch(0), ArrayPlan(data.arrays, split, rows=32, seed=None).batch(0))


def test_description():
    assert ArrayPlan(image_data(), 'train', rows=8, seed=0).describe() == (
        'train: 21 examples of 6 x 6 x 1; 3 batches of 8 per epoch; 12.5 % of the rows are padding')
