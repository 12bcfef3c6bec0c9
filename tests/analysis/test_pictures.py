"""The contents of pictures."""

import errno
import functools
import itertools
import logging
import pathlib
import warnings

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from analysis import pictures
from analysis.pictures import (
    answer_figure,
    attention_figure,
    attention_rollout,
    chosen,
    confusion_figure,
    example_figure,
    heads_figure,
    matrix_figure,
    save_figure,
)
from inference.predict import Predictor
from inference.predictions import Prediction
from input_pipeline.input_format import InputFormat
from input_pipeline.preprocessing import Preprocessing
from model.blocks import BlockConfig
from model.patches import PatchTransformer
from runtime.errors import UserError
from runtime.once import warn_once


@pytest.mark.parametrize('panels', [1, 5])
def test_the_axes_and_colours_of_attention_have_labels(panels):
    weights = np.random.default_rng(0).dirichlet(np.ones(4), (panels, 3)).astype(np.float32)
    *matrices, bar = attention_figure(weights, ['un', 'deux', '</s>'], ['one', 'two', 'three', '</s>'],
                                      [f'head {1 + head}' for head in range(panels)]).axes
    assert len(matrices) == panels
    for axes, matrix in zip(matrices, weights, strict=True):
        assert (axes.get_ylabel(), axes.get_xlabel()) == ('queries', 'keys')
        # Row 0 is drawn at the top: what looks at what cannot be read the other way round.
        assert axes.get_yticklabels()[0].get_text() == 'un' and axes.get_ylim()[0] > axes.get_ylim()[1]
        np.testing.assert_array_equal(axes.images[0].get_array(), matrix)
        assert axes.images[0].get_clim() == (0, 1)
    assert bar.get_ylim() == (0, 1) and bar.get_ylabel() == 'weight'


@pytest.mark.parametrize('shape, grid', [((4, 6, 1), (2, 3)), ((12, 2), (6,))])
def test_a_picture_over_an_example_has_a_scale_of_its_colours(shape, grid):
    """Where all looks are alike, all patches have one colour: that of the top of the scale."""
    weights = np.full((2, 6, 6), 1 / 6, np.float32)
    weights[1] = np.linspace(0, 1 / 3, 6)
    example, mean, head = example_figure(weights, np.random.default_rng(0).normal(size=shape).astype(np.float32), grid,
                                         ['mean', 'head 1'], '3 0.93').axes
    for axes, largest in (mean, 1 / 6), (head, 1 / 3):
        shade, [bar] = axes.images[-1], axes.child_axes
        assert shade.get_clim() == bar.get_ylim() == pytest.approx((0, largest))
        assert bar.get_ylabel() == 'weight'
    assert np.ptp(mean.images[-1].get_array()) == 0
    np.testing.assert_allclose(head.images[-1].get_array(), np.atleast_2d(np.linspace(0, 1 / 3, 6).reshape(grid)))
    assert not example.child_axes
    if len(shape) == 3:  # row 0 of the patches is at the top of the image
        assert tuple(head.images[-1].get_extent()) == (-0.5, 5.5, 3.5, -0.5) and head.images[-1].origin == 'upper'
    else:  # the shade covers the series from edge to edge, and hides no line
        darkest = np.array(head.images[0].cmap(1.0)[:3])
        assert all(np.linalg.norm(darkest - to_rgb(line.get_color())) > 0.5 for line in head.lines)
        assert tuple(head.images[0].get_extent()) == (*head.get_xlim(), *head.get_ylim()) and head.get_xlim() == (0, 12)
        assert head.get_xlabel() and head.get_ylabel()


@pytest.mark.parametrize('look', ['encoder:2:1', 'encoder:rollout'])
@pytest.mark.parametrize('tokens', [3, 4], ids=['mean', 'class token'])
def test_hidden_patches_of_a_series_are_no_queries(look, tokens):
    module = PatchTransformer(BlockConfig(d_model=8, d_ff=8, num_heads=2), num_layers=2, patch=2, outputs=2)
    form = InputFormat((6, 1), Preprocessing([0.0], [1.0], None, None), ('a', 'b'), padded=True, missing=True)
    series = np.array([[1.0], [2.0], [np.nan], [np.nan], [3.0], [np.nan]])  # the middle patch is hidden
    weights = np.random.default_rng(0).dirichlet(np.ones(tokens), (2, 2, tokens))  # [layer, head, t, s]
    panel = weights[1, 0] if look == 'encoder:2:1' else attention_rollout(weights)
    expected = panel[[0, 2]].mean(axis=0) if tokens == 3 else panel[0, 1:]
    figure = answer_figure(Predictor(module, {}, form), Prediction(series, np.log([0.4, 0.6]), form), look,
                           {'encoder': weights})
    np.testing.assert_allclose(figure.axes[1].images[0].get_array(), expected[None])
    assert np.flatnonzero(figure.axes[1].lines[0].get_markevery()) == [4]  # the only value without a neighbouring value


def test_dollars_in_the_names_of_classes_are_no_formula(tmp_path):
    weights, image = np.full((1, 4, 4), 0.25), np.arange(16.0).reshape(4, 4, 1)
    figure = example_figure(weights, image, (2, 2), ['layer 1'], '$100_$200^ 0.93')  # as a formula, this is an error
    assert figure.axes[0].get_title() == r'\$100_\$200^ 0.93'
    save_figure(figure, tmp_path / 'picture.png')


def test_characters_that_no_font_has_are_boxes_and_one_line_of_the_log(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    monkeypatch.setattr(pictures, '_installed_families', dict)  # no fonts except the default, DejaVu Sans
    monkeypatch.setattr(pictures, '_family', functools.cache(pictures._family.__wrapped__))
    warn_once.cache_clear()
    figure = attention_figure(np.eye(2)[None], ['\u4f60\u597da', '\u05e9'], ['\u0928\u092e', '$'], ['\u4f60'])
    axes, _ = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ['\u25a1\u25a1a', '\u05e9']
    assert [label.get_text() for label in axes.get_xticklabels()] == ['\u25a1\u25a1', r'\$']
    assert axes.get_title() == '\u25a1'
    with warnings.catch_warnings(action='error'):
        save_figure(figure, tmp_path / 'picture.png')
    assert ['box' in record.getMessage() for record in caplog.records] == [True]


def test_characters_are_drawn_in_any_installed_font_that_has_them(tmp_path):
    character = '\u23dc'  # not in DejaVu Sans, the default, but in STIX, which is part of matplotlib
    figure = attention_figure(np.eye(2)[None], ['a', character], ['b', 'c'], [''])
    label = figure.axes[0].get_yticklabels()[1]
    assert label.get_text() == character and len(label.get_fontfamily()) == 2
    with warnings.catch_warnings(action='error'):
        save_figure(figure, tmp_path / 'picture.svg')


def test_a_picture_is_saved_in_the_format_of_its_ending(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    figure = heads_figure({'encoder': np.array([[0.5]])}, 'exact match')
    save_figure(figure, '~/new/picture.SVG')
    assert '<svg' in (tmp_path / 'new/picture.SVG').read_text()
    with pytest.raises(UserError, match='none/picture.number cannot be written: there is no format .number. Use .png'):
        save_figure(figure, str(tmp_path / 'none/picture.number'))
    assert not (tmp_path / 'none').exists()


def test_an_old_picture_remains_if_the_new_picture_cannot_be_written(tmp_path, monkeypatch):
    def savefig(path, **_):
        pathlib.Path(path).write_bytes(b'half')
        raise OSError(errno.ENOSPC, 'No space left on device')

    figure, path = heads_figure({'encoder': np.array([[0.5]])}, 'exact match'), tmp_path / 'picture.png'
    save_figure(figure, tmp_path / 'picture')
    picture = path.read_bytes()
    monkeypatch.setattr(figure, 'savefig', savefig)
    with pytest.raises(UserError, match='picture.png cannot be written: No space left on device'):
        save_figure(figure, path)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == picture


def test_the_labels_of_the_axes_mention_that_tokens_are_left_out():
    tokens = [*map(str, range(1000))]
    matrix, _ = attention_figure(np.full((1, 3, 1000), 0.001, np.float32), tokens[:3], tokens, ['']).axes
    assert (matrix.get_xlabel(), matrix.get_ylabel()) == ('keys (first 128 of 1,000)', 'queries')
    matrix, _ = matrix_figure(np.ones((1000, 3)), tokens, tokens[:3], 'value').axes
    assert (matrix.get_xlabel(), matrix.get_ylabel()) == ('', '(first 128 of 1,000)')


def test_every_head_has_its_number_and_dark_is_much():
    scores = {'encoder': np.array([[0.5, 0.25, 1.0]]), 'cross': np.array([[0.75, 0.125, 0.5], [0.0, 0.5, 0.5]])}
    figure = heads_figure(scores, 'exact match')
    encoder, cross = figure.axes
    assert [text.get_text() for text in encoder.texts] == ['0.5', '0.25', '1']
    assert [text.get_text() for text in cross.texts] == ['0.75', '0.125', '0.5', '0', '0.5', '0.5']
    assert [label.get_text() for label in cross.get_yticklabels()] == ['layer 1', 'layer 2']
    assert {axes.images[0].get_clim() for axes in (encoder, cross)} == {(0.0, 1.0)}
    assert figure.get_suptitle() == 'exact match'


def test_a_picture_of_no_heads_is_refused():
    with pytest.raises(UserError, match='scores={} is empty. Use the scores of at least one kind of attention'):
        heads_figure({}, 'exact match')


@pytest.mark.parametrize('layers, heads, largest', [(2, 2, 1e-4), (6, 9, 99.0)])
def test_the_numbers_of_many_heads_do_not_overlap(layers, heads, largest):
    scores = np.random.default_rng(0).uniform(0, largest, (layers, heads))
    figure = heads_figure({'encoder': scores, 'cross': scores[:1]}, 'how far heads moved, percent of their size')
    assert_complete(figure)
    for axes in figure.axes:
        width, height = axes.get_window_extent().size / axes.images[0].get_array().shape[::-1]
        numbers, columns, rows = ([text.get_window_extent() for text in texts] for texts in (
            axes.texts, axes.get_xticklabels(), axes.get_yticklabels()))
        assert max(box.width for box in [*numbers, *columns]) < width
        assert max(box.height for box in [*numbers, *rows]) < height


def test_negative_numbers_of_a_matrix_are_red_and_positive_numbers_are_blue():
    values = np.array([[-2, 0.5, 0], [1, 0, 0.25]])
    for shown, lowest in (values, -2), (abs(values), 0):
        image, = matrix_figure(shown, ['a', 'b'], ['c', 'd', 'e'], 'value').axes[0].images
        np.testing.assert_array_equal(image.get_array(), shown)
        assert image.get_clim() == (lowest, 2)
        for value in {lowest, 2} - {0}:
            red, _, blue, _ = image.to_rgba(value)
            assert (red - blue if value < 0 else blue - red) > 0.2


@pytest.mark.parametrize('columns, label, axis_labels', [
    (['\u2581Dog', '</s>', '<s>', '\u2581Ein', '\u2581Hund'], 'contribution (instead of \u2581vendredi)',
     ('tokens of the source, then earlier tokens of the target', 'predicted token')),
    (['\u2581Ein', '\u2581Donaudampfschifffahrt'], 'probability of the target token', ('target token', 'place'))])
def test_a_small_matrix_has_room_for_its_names_and_labels(columns, label, axis_labels):
    values = np.random.default_rng(0).uniform(size=(3, len(columns)))
    figure = matrix_figure(values, ['\u2581Ein', '\u2581Hund', '</s>'], columns, label, axis_labels)
    assert_complete(figure)
    assert (figure.axes[0].get_window_extent().size / figure.dpi > 1).all(), 'the names leave room for the matrix'


def assert_complete(figure):
    """Asserts that no text of a figure lies outside of the figure."""
    figure.draw_without_rendering()
    (left, bottom, right, top), (width, height) = figure.get_tightbbox().extents, figure.get_size_inches()
    assert min(left, bottom) >= 0 and right <= width and top <= height


def test_a_confusion_matrix_of_many_classes_shows_the_classes_with_the_most_errors():
    classes = [f'c{number}' for number in range(1000)]
    confusion = {name: {name: 9} for name in classes} | {'c7': {'c7': 5, 'c500': 4}, 'c999': {'c7': 1}}
    figure = confusion_figure(confusion, classes)
    axes, = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert len(names) == 40 and {'c7', 'c500', 'c999'} < set(names)
    assert axes.get_title() == 'the 40 of 1000 classes with the most errors'
    shares = axes.images[0].get_array()
    assert shares[names.index('c7'), names.index('c500')] == pytest.approx(4 / 9)
    assert shares[names.index('c999'), names.index('c7')] == 1


def test_the_rollout_is_the_sum_over_all_paths_through_the_layers():
    """A path has a token per layer. In each layer, half of a token stays, and half comes from the mean of the heads."""
    weights = np.random.default_rng(0).dirichlet(np.ones(3), (2, 4, 3)).astype(np.float32)  # [layer, head, t, t]
    expected = np.zeros((3, 3))
    for first, middle, last in itertools.product(range(3), repeat=3):
        lower, upper = (0.5 * np.mean([float(head[query, key]) for head in weights[layer]]) + 0.5 * (query == key)
                        for layer, query, key in ((0, middle, first), (1, last, middle)))
        expected[last, first] += lower * upper
    np.testing.assert_allclose(attention_rollout(weights), expected, rtol=1e-6)
    kind, panels, titles = chosen({'encoder': weights}, 'encoder:rollout')
    assert (kind, titles, panels.shape) == ('encoder', ['attention rollout'], (1, 3, 3))
    np.testing.assert_allclose(panels.sum(axis=-1), 1, rtol=1e-6)
    for look in 'cross:rollout', 'encoder:rollout:1':
        with pytest.raises(UserError, match='combines all heads of the encoder'):
            chosen({'encoder': weights, 'cross': weights}, look)
