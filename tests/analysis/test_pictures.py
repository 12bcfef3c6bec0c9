"""What pictures show."""

import numpy as np
import pytest

from analysis.pictures import attention_figure, example_figure, heads_figure


@pytest.mark.parametrize('panels', [1, 5])
def test_attention_says_what_its_axes_and_its_colours_mean(panels):
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
def test_a_picture_over_an_example_says_how_much_its_colours_are(shape, grid):
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
    assert not example.child_axes
    if len(shape) == 2:  # the shade covers the series from edge to edge
        assert tuple(head.images[0].get_extent()) == (*head.get_xlim(), *head.get_ylim()) and head.get_xlim() == (0, 12)
        assert head.get_xlabel() and head.get_ylabel()


def test_every_head_has_its_number_and_dark_is_much():
    scores = {'encoder': np.array([[0.5, 0.25, 1.0]]), 'cross': np.array([[0.75, 0.125, 0.5], [0.0, 0.5, 0.5]])}
    figure = heads_figure(scores, 'exact match')
    encoder, cross = figure.axes
    assert [text.get_text() for text in encoder.texts] == ['0.5', '0.25', '1']
    assert [text.get_text() for text in cross.texts] == ['0.75', '0.125', '0.5', '0', '0.5', '0.5']
    assert [label.get_text() for label in cross.get_yticklabels()] == ['layer 1', 'layer 2']
    assert {axes.images[0].get_clim() for axes in (encoder, cross)} == {(0.0, 1.0)}
    assert figure.get_suptitle() == 'exact match'
