"""What pictures show."""

import numpy as np

from inference.pictures import heads_figure


def test_every_head_has_its_number_and_dark_is_much():
    scores = {'encoder': np.array([[0.5, 0.25, 1.0]]), 'cross': np.array([[0.75, 0.125, 0.5], [0.0, 0.5, 0.5]])}
    figure = heads_figure(scores, 'exact match')
    encoder, cross = figure.axes
    assert [text.get_text() for text in encoder.texts] == ['0.5', '0.25', '1']
    assert [text.get_text() for text in cross.texts] == ['0.75', '0.125', '0.5', '0', '0.5', '0.5']
    assert [label.get_text() for label in cross.get_yticklabels()] == ['layer 1', 'layer 2']
    assert {axes.images[0].get_clim() for axes in (encoder, cross)} == {(0.0, 1.0)}
    assert figure.get_suptitle() == 'exact match'
