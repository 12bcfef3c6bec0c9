"""The report of a sweep, from directories that were written by hand."""

import json

import pytest

from analysis import pictures
from analysis.compare import load_runs
from analysis.sweep_report import split_of_report, write_report
from runtime.errors import UserError
from tests.sweep_bench import write_scores


@pytest.fixture
def report(tmp_path, monkeypatch):
    """A function that writes the report of a sweep of the run 'one', and returns the pictures instead of saving them.

    Without `split`, the report is that of --report without --split.
    """
    (tmp_path / 'sweep.json').write_text(json.dumps({'config': {}, 'runs': {'one': {}}}))

    def report(metric='', split=None):
        runs, drawn = load_runs(tmp_path), {}
        monkeypatch.setattr(pictures, 'save_figure', lambda figure, path: drawn.update({path.name: figure}))
        assert write_report(tmp_path, runs, split or split_of_report(runs, 'validation', given=False), metric)
        return drawn

    return report


def test_a_report_mentions_runs_with_other_options_than_the_sweep(report, tmp_path, caplog):
    (tmp_path / 'one/data').mkdir(parents=True)
    (tmp_path / 'one/config.json').write_text(json.dumps({
        'cache_dir': 'elsewhere', 'model': {'d_ff': 64, 'dropout': 0.1}, 'data': {'tokenizer': {'vocab_size': 999}}}))
    (tmp_path / 'one/data/lowered.json').write_text('{"data.tokenizer.vocab_size": 8000}')
    report()
    sentence = ('1 of 1 runs have other options than sweep.json, for example because the recipe was edited during the '
                'sweep (one has model.d_ff=64 instead of 2048). The report shows the values of sweep.json.')
    assert [sentence in text for text in (caplog.text, (tmp_path / 'report.md').read_text())] == [True, True]
    caplog.clear()
    (tmp_path / 'one/config.json').write_text('{')
    report()
    assert 'one/config.json' in caplog.text and 'other options' not in caplog.text


def test_the_report_at_the_end_of_a_sweep_needs_no_scores_of_the_split(report, tmp_path):
    report(split='news')
    assert 'on the whole news split' in (tmp_path / 'report.md').read_text()


@pytest.mark.parametrize('metric, curve, score, lacking', [
    ('', 'BLEU', 'BLEU 38.50', None), ('validation_bleu', 'BLEU', 'BLEU 38.50', None),
    ('chrf', 'BLEU', 'chrF 60.50', 'curves.png'), ('validation_loss', 'loss', 'BLEU 38.50', 'varied.png'),
    ('train_loss', 'train loss', 'BLEU 38.50', 'varied.png')])
def test_a_picture_without_values_of_the_metric_shows_the_default_metric(report, tmp_path, caplog, metric, curve, score,
                                                                         lacking):
    caplog.set_level('INFO', logger='allyouneed.sweep')
    write_scores(tmp_path / 'one', validation={'bleu': 38.5, 'chrf': 60.5})
    (tmp_path / 'one/metrics.jsonl').write_text('{"step": 10, "train_loss": 2.0}\n'
                                                '{"step": 10, "validation_bleu": 30.0, "validation_loss": 1.0}\n')
    drawn = report(metric)
    assert drawn['curves.png'].axes[0].get_ylabel() == curve
    assert drawn['varied.png'].axes[0].get_title() == f'no option varies: {score}'
    assert [message for message in caplog.messages if 'default metric' in message] == ([] if lacking is None else [
        f'--metric={metric}: there are no values of this metric for {lacking}, which shows the default metric'])


def test_a_report_without_split_is_on_the_only_split_with_results(report, tmp_path, capsys):
    edits = [{'edit': 'zero', 'place': 'decoder'}]  # also in the scores of a run that was trained with train.edits
    write_scores(tmp_path / 'one', test={'bleu': 38.5, 'edits': edits},
                 **{'test.edited': {'bleu': 20.5, 'edits': edits}})
    report()
    assert '38.50' in capsys.readouterr().out and 'on the whole test split' in (tmp_path / 'report.md').read_text()
    write_scores(tmp_path / 'one', news={'bleu': 30.5})
    (tmp_path / 'report.csv').write_text('precious')
    with pytest.raises(UserError, match='--split is missing: the runs have results on news and test, and not on '
                                        'validation. Add for example --split=news'):
        report()
    assert (tmp_path / 'report.csv').read_text() == 'precious'
