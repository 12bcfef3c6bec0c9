import subprocess

import numpy as np
import pytest

from analysis.pictures import attention_figure, chosen, save_figure
from errors import UserError
from inference.scores import corpus_scores, read_table, regression_scores, table_line

REFERENCES = ['the cat sat on the mat .', 'there is a dog in the garden']


def test_perfect_output_scores_a_hundred():
    scores = corpus_scores(REFERENCES, REFERENCES)
    assert scores['bleu'] == pytest.approx(100) and scores['chrf'] == pytest.approx(100)
    assert scores['exact_match'] == 1 and scores['n'] == 2


def test_case_counts_for_bleu_and_not_for_the_lowercased_figure():
    scores = corpus_scores([line.upper() for line in REFERENCES], REFERENCES)
    assert scores['bleu'] < 20
    assert scores['bleu_lowercased_tokenised'] == pytest.approx(100)
    assert scores['exact_match'] == 0


def test_bleu_is_the_geometric_mean_of_its_precisions_with_the_brevity_penalty():
    # 'the cat sat on mat': unigrams 5/5, bigrams 3/4, trigrams 2/3, fourgrams 1/2; 5 words for 6.
    scores = corpus_scores(['the cat sat on mat'], ['the cat sat on the mat'])
    expected = 100 * (1 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25 * 2.718281828 ** (1 - 6 / 5)
    assert scores['bleu'] == pytest.approx(expected, rel=1e-6)


def test_every_figure_has_its_signature():
    scores = corpus_scores(REFERENCES, REFERENCES)
    assert 'case:mixed' in scores['bleu_signature'] and 'tok:13a' in scores['bleu_signature']
    assert 'case:lc' in scores['bleu_lowercased_tokenised_signature']
    assert 'version' in scores['chrf_signature']


def test_a_picture_has_the_tokens_on_its_axes_whatever_they_are(tmp_path):
    source, target = ['$x^', '\n', '▁août'], ['_', '\\frac{']
    figure = attention_figure(np.array([[[0.1, 0.2, 0.7], [1, 0, 0]]]), target, source, ['head 1'])
    axes, _ = figure.axes  # and the colour bar
    assert [label.get_text() for label in axes.get_xticklabels()] == [r'\$x^', 'U+000A', '▁août']
    assert len(axes.get_yticklabels()) == 2
    save_figure(figure, tmp_path / 'new' / 'a.png')
    assert (tmp_path / 'new' / 'a.png').stat().st_size > 1000


WEIGHTS = {'encoder': np.full((2, 3, 4, 4), 0.25), 'cross': np.arange(2 * 3 * 5 * 4).reshape(2, 3, 5, 4) / 120}


@pytest.mark.parametrize('look, kind, panels', [
    ('', 'cross', [WEIGHTS['cross'][1].mean(axis=0), *WEIGHTS['cross'][1]]),
    ('encoder', 'encoder', np.full((4, 4, 4), 0.25)),
    ('cross:1', 'cross', [WEIGHTS['cross'][0].mean(axis=0), *WEIGHTS['cross'][0]]),
    ('cross:1:2', 'cross', [WEIGHTS['cross'][0, 1]]), ('cross:last:mean', 'cross', [WEIGHTS['cross'][1].mean(axis=0)])])
def test_a_layer_and_a_head_are_chosen(look, kind, panels):
    found_kind, found, titles = chosen(WEIGHTS, look)
    assert found_kind == kind and len(titles) == len(panels)
    np.testing.assert_allclose(found, panels)


@pytest.mark.parametrize('weights, look, message', [
    (WEIGHTS, 'decoder', "attention of kind encoder, cross, not 'decoder'"), (WEIGHTS, 'cross:3', "no layer '3'"),
    (WEIGHTS, 'cross:1:4', "no head '4', they go from 1 to 3"), (WEIGHTS, 'cross:x', "no layer 'x'"),
    (WEIGHTS, 'cross:1:1:1', r'must be KIND\[:LAYER\[:HEAD\]\]'), ({}, '', 'no attention to look at')])
def test_what_is_not_there_cannot_be_chosen(weights, look, message):
    with pytest.raises(UserError, match=message):
        chosen(weights, look)


NASTY = ['7:37\u202fAM', 'C:\\new\\table', 'a\tb', 'one\r\ntwo\n', '\\', '', ' \u00a0 ', '\ufeffmark',
         '\\\t\\t\\\\t\x00']
ENDS = [f'a{end}b' for end in '\x0b\x0c\x1c\x85\u2028\u2029']  # of a line, for some readers


@pytest.mark.parametrize('row, line', [
    (['7:37\u202fAM', '07:37'], '7:37\u202fAM\t07:37\n'),
    (['C:\\new', 'tab\t', 'end\r\n'], r'C:\\new' '\t' r'tab\t' '\t' r'end\r\n' '\n'),
    ([' two  spaces '], ' two  spaces \n'), (['', ''], '\t\n'), (['a\u2028b\x85'], 'a\u2028b\x85\n')])
def test_a_table_escapes_only_what_ends_a_cell_or_a_line(row, line):
    assert table_line(row) == line


def test_a_table_gives_every_cell_back_to_the_byte(tmp_path):
    rows = [[first, second] for first in NASTY + ENDS for second in NASTY + ENDS]
    (tmp_path / 'test.tsv').write_bytes(''.join(map(table_line, rows)).encode())
    assert read_table(tmp_path / 'test.tsv') == rows
    cut = subprocess.run(['cut', '-f1', tmp_path / 'test.tsv'], capture_output=True, check=True).stdout
    lines = cut.decode().split('\n')[:-1]
    assert len(lines) == len(rows)
    plain = [first for first, _ in rows if not set(first) & set('\\\t\r\n')]
    assert [line for line in lines if '\\' not in line] == plain


@pytest.mark.parametrize('unit', [1e-25, 1.0, 1e25])
def test_errors_of_a_regression_in_any_unit(unit):
    targets = np.float32([[-2], [0], [2]]) * np.float32(unit)
    scores = regression_scores(targets + np.float32(unit), targets)  # each is wrong by 1; the variance is 8 / 3
    assert scores['root_mean_squared_error'] == pytest.approx(unit) == scores['mean_absolute_error']
    assert scores['r_squared'] == pytest.approx(1 - 3 / 8)


def test_targets_that_do_not_vary_have_no_r_squared():
    scores = regression_scores(np.array([[1.0], [2.0]]), np.array([[3.0], [3.0]]))
    assert 'r_squared' not in scores and scores['mean_absolute_error'] == 1.5
