"""Scores by length and frequency: buckets of about one size, scores of their own sentences, intervals around them."""

import functools

import numpy as np
import pytest

from analysis.buckets import as_table, bucket_scores, buckets, buckets_figure, keys_of
from analysis.request import BY
from configs import base
from inference.scores import corpus_scores, table_line
from runtime.errors import UserError

REFERENCES = [' '.join(['word'] * length) for length in range(1, 21)]
OUTPUTS = [text if len(text) < 50 else text.replace('word', 'other', 3) for text in REFERENCES]
PAIRS = [(text, text) for text in REFERENCES]


def test_buckets_have_the_scores_of_their_sentences():
    found = bucket_scores(keys_of(PAIRS, 'length', list), OUTPUTS, REFERENCES, 'en', log_probs=range(20))
    assert [(bucket.low, bucket.high, bucket.n) for bucket in found] == [
        (1, 4, 4), (5, 8, 4), (9, 12, 4), (13, 16, 4), (17, 20, 4)]
    for bucket in found:
        rows = slice(bucket.low - 1, bucket.high)
        expected = corpus_scores(OUTPUTS[rows], REFERENCES[rows])
        assert bucket.scores['bleu'][0] == pytest.approx(expected['bleu'])
        assert bucket.scores['exact_match'][0] == expected['exact_match']
        assert bucket.scores['log_prob'][0] == np.mean(range(20)[rows])
        for score, low, high in bucket.scores.values():
            assert low - 1e-3 <= score <= high + 1e-3


def test_equal_keys_share_a_bucket():
    assert [bucket.n for bucket in bucket_scores([2, 2, 2, 2, 2, 7], OUTPUTS[:6], REFERENCES[:6], 'en')] == [5, 1]


def test_the_key_frequency_counts_the_rarest_source_word():
    train = [('a a b', ''), ('a c', 'z')]
    assert keys_of([('a b', ''), ('a', ''), ('z c', ''), ('', '')], 'frequency', lambda: train) == [1, 3, 0, 0]
    with pytest.raises(UserError, match="by='size' must be one of length, target_length, frequency"):
        keys_of([], 'size', list)


def test_runs_side_by_side_as_a_table_and_a_picture(tmp_path):
    for name, outputs in {'a': REFERENCES, 'b': OUTPUTS}.items():
        (tmp_path / name / 'results').mkdir(parents=True)
        rows = zip(REFERENCES, REFERENCES, outputs, strict=True)
        (tmp_path / name / 'results' / 'test.tsv').write_text(''.join(map(table_line, rows)))
        (tmp_path / name / 'config.json').write_text(base.get_config().to_json())
    runs = [tmp_path / 'a', tmp_path / 'b']
    scores = buckets(runs, by='target_length', count=2)
    table = as_table(scores).splitlines()
    assert len(table) == 3 and '100.00 [100.00, 100.00]' in table[1] and table[2].startswith('11-20')
    figures = {by: buckets_figure(scores, by=by).axes for by in BY}
    assert {by: axes.get_xlabel() for by, (axes,) in figures.items()} == {
        'length': 'words of the source', 'target_length': 'words of the reference',
        'frequency': 'occurrences of the rarest source word in the training data'}
    axes, = figures['target_length']
    for line, row in zip(axes.containers, scores.values(), strict=True):
        points, _, (bars,) = line
        intervals = [bucket.scores['bleu'] for bucket in row]
        np.testing.assert_allclose(points.get_ydata(), [score for score, _, _ in intervals])
        ends = [(min(score, low), max(score, high)) for score, low, high in intervals]
        np.testing.assert_allclose([bar[:, 1] for bar in bars.get_segments()], ends)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(map(str, runs))
    assert buckets(str(runs[0])) == buckets([str(runs[0])]), 'a single run needs no list'
    for show in as_table, functools.partial(buckets_figure, by='target_length'):
        with pytest.raises(UserError, match="there is no score 'belu'. Did you mean bleu"):
            show(scores, 'belu')
    with pytest.raises(UserError, match="by='size' must be one of length, target_length, frequency"):
        buckets_figure(scores, by='size')
    with pytest.raises(UserError, match='count=0 must be at least 1'):
        buckets(runs, count=0)
    (tmp_path / 'b' / 'results' / 'test.tsv').write_text(table_line(['x', 'y', 'z']))
    with pytest.raises(UserError, match='has sentences that differ from the sentences of'):
        buckets(runs)
    with pytest.raises(UserError, match=r'Score the run first: python decode.py --workdir=.*c --split=test'):
        buckets([tmp_path / 'c'])


def test_a_run_with_several_test_sets_is_read_by_the_name_of_a_set(tmp_path):
    (tmp_path / 'results').mkdir()
    for name in 'a', 'b', 'a.edited', 'a.ensemble':
        (tmp_path / 'results' / f'{name}.tsv').write_text(table_line(['x', 'y', 'z']))
    with pytest.raises(UserError, match="test.tsv: .* Use split='a' or split='b', or score another split first$"):
        buckets([tmp_path])


def test_buckets_of_a_run_have_the_bleu_of_its_language(tmp_path):
    (tmp_path / 'results').mkdir()
    (tmp_path / 'results' / 'test.tsv').write_text(table_line(['to Beijing', '我们今天去北京。', '我们今天去北京。']))
    config = base.get_config()
    config.data.target_lang = 'zh'
    (tmp_path / 'config.json').write_text(config.to_json())
    assert buckets(tmp_path)[str(tmp_path)][0].scores['bleu'] == pytest.approx([100, 100, 100])
