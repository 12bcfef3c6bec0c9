import collections
import subprocess

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU

from analysis.pictures import attention_figure, chosen, save_figure
from configs.tasks import METRICS, SEARCHED
from inference.moses import MosesTokens
from inference.scores import (
    classification_scores,
    compare_translations,
    confidence_intervals,
    corpus_scores,
    read_table,
    read_translations,
    regression_scores,
    short_references_warning,
    table_line,
)
from runtime.errors import UserError

REFERENCES = ['the cat sat on the mat .', 'there is a dog in the garden']


def test_perfect_output_scores_a_hundred():
    scores = corpus_scores(REFERENCES, REFERENCES, 'en', complete=True)
    assert [scores[name] for name in ('bleu', 'bleu_lowercased_tokenised', 'bleu_lowercased_moses', 'chrf', 'chrf++')
            ] == pytest.approx([100] * 5)
    assert scores['ter'] == 0 and scores['exact_match'] == 1 and scores['n'] == 2


def test_case_counts_for_bleu_and_not_for_the_lowercased_figure():
    scores = corpus_scores([line.upper() for line in REFERENCES], REFERENCES, 'en', complete=True)
    assert scores['bleu'] < 20 and scores['chrf'] < 20 and scores['chrf++'] < 20
    assert scores['bleu_lowercased_tokenised'] == pytest.approx(100) == scores['bleu_lowercased_moses']
    assert scores['ter'] == 0
    assert scores['exact_match'] == 0


def test_bleu_is_the_geometric_mean_of_its_precisions_with_the_brevity_penalty():
    # 'the cat sat on mat': unigrams 5/5, bigrams 3/4, trigrams 2/3, fourgrams 1/2; 5 words for 6.
    scores = corpus_scores(['the cat sat on mat'], ['the cat sat on the mat'])
    expected = 100 * (1 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25 * 2.718281828 ** (1 - 6 / 5)
    assert scores['bleu'] == pytest.approx(expected, rel=1e-6)


def test_every_figure_has_its_signature():
    scores = corpus_scores(REFERENCES, REFERENCES, 'de', complete=True)
    assert 'case:mixed' in scores['bleu_signature'] and 'tok:13a' in scores['bleu_signature']
    assert 'case:lc' in scores['bleu_lowercased_tokenised_signature']
    assert 'case:lc|eff:no|tok:moses.de|norm:moses|sacremoses:' in scores['bleu_lowercased_moses_signature']
    assert 'nw:0' in scores['chrf_signature'] and 'nw:2' in scores['chrf++_signature']
    assert all('version' in scores[f'{name}_signature'] for name in ('chrf', 'chrf++', 'ter'))


def test_the_scores_of_search_outputs_are_the_metrics_of_search_outputs():
    scores = corpus_scores(REFERENCES, REFERENCES, 'de', complete=True)
    assert {name for name in scores if name in METRICS} == set(SEARCHED)


def test_only_the_scores_that_are_fast_are_computed_by_default():
    assert set(corpus_scores(REFERENCES, REFERENCES)) == {
        'n', 'exact_match', 'bleu', 'bleu_signature', 'bleu_lowercased_tokenised',
        'bleu_lowercased_tokenised_signature', 'chrf', 'chrf_signature'}


CHINESE = ['我们今天去北京，明天去上海。', '他喜欢吃苹果。', '这本书很有意思。', '天气很好。']


@pytest.mark.parametrize('language, tokenizer, references, changed', [
    ('zh', 'zh', CHINESE, ('吃苹果', '吃香蕉')), ('zh-CN', 'zh', CHINESE, ('吃苹果', '吃香蕉')),
    ('ZHO_Hant', 'zh', CHINESE, ('吃苹果', '吃香蕉')), ('ja_JP', 'char', ['これは私の本です。'] * 2, ('本', '犬')),
    ('tha', 'char', ['วันนี้อากาศดี'] * 2, ('ดี', 'ไม่'))])
def test_bleu_has_tokens_in_languages_without_spaces(language, tokenizer, references, changed):
    scores = corpus_scores(references, references, language, complete=True)
    assert scores['bleu'] == pytest.approx(100) == scores['bleu_lowercased_tokenised']
    for name in 'bleu', 'bleu_lowercased_tokenised':
        assert f'|tok:{tokenizer}|' in scores[f'{name}_signature']
    assert 'bleu_lowercased_moses' not in scores and scores['ter'] == 0
    outputs = [line.replace(*changed) for line in references]
    assert 20 < corpus_scores(outputs, references, language)['bleu'] < 95
    assert short_references_warning(references, language) == ''


@pytest.mark.parametrize('language', ['de', 'fr_CA', 'ko', 'ar', 'xx', '', 'z'])
def test_bleu_of_all_other_languages_has_13a_tokens(language):
    outputs = noisy(LINES, 0.3, seed=0)
    scores = corpus_scores(outputs, LINES, language)
    for name, metric in (('bleu', BLEU()), ('bleu_lowercased_tokenised', BLEU(lowercase=True))):
        assert scores[name] == metric.corpus_score(outputs, [LINES]).score
        assert scores[f'{name}_signature'] == str(metric.get_signature())


def test_references_that_are_too_short_for_bleu_are_a_warning():
    warning = short_references_warning(CHINESE, 'cn')  # not a language code
    assert warning.startswith('4 of 4 references have fewer than 4 tokens (tokenizer 13a of sacreBLEU), so BLEU')
    assert '--config.eval.metric=chrf' in warning
    assert not short_references_warning([*REFERENCES, 'short', 'two words', 'this is short'], 'en')


# The raw lines of Multi30k's test 2016, and what its authors made of them with Moses' own scripts.
MOSES = {
    'Eine Frau auf einem Boot namens "El Corazon" lässt schwarze Gewichte ins Wasser fallen.':
        'eine frau auf einem boot namens &quot; el corazon &quot; lässt schwarze gewichte ins wasser fallen .',
    'Zwei Spielerinnen der US-Nationalmannschaft klatschen im Sprung ab, umgeben von zwei weiteren Spielerinnen.':
        'zwei spielerinnen der us-nationalmannschaft klatschen im sprung ab , umgeben von zwei weiteren spielerinnen .',
    '2 blonde Mädchen sitzen auf einem Absatz auf einem belebten Platz.':
        '2 blonde mädchen sitzen auf einem absatz auf einem belebten platz .',
    'Zwei Männer in Schwarz in einer Stadt': 'zwei männer in schwarz in einer stadt'}


@pytest.mark.parametrize('raw', MOSES)
def test_moses_tokens_are_those_of_the_authors_of_multi30k(raw):
    assert MosesTokens('de')(raw.lower()) == MOSES[raw]


def bleu_of_tokens(outputs, references):
    """By the definition (Papineni et al. 2002), of lines of tokens: clipped n-grams of the corpus, brevity penalty."""
    def grams(line, n):
        tokens = line.split()
        return collections.Counter(tuple(tokens[begin:begin + n]) for begin in range(len(tokens) - n + 1))

    pairs = list(zip(outputs, references, strict=True))
    precisions = [sum((grams(output, n) & grams(reference, n)).total() for output, reference in pairs)
                  / sum(grams(output, n).total() for output in outputs) for n in range(1, 5)]
    lengths = [sum(len(line.split()) for line in lines) for lines in (outputs, references)]
    return 100 * np.exp(min(0, 1 - lengths[1] / lengths[0])) * np.prod(precisions) ** 0.25


def test_moses_bleu_is_bleu_of_its_tokens():
    outputs = ['Eine Frau auf dem Boot "El Corazon" lässt schwarze gewichte ins Wasser.',
               'Zwei Spielerinnen der US-Nationalmannschaft klatschen, umgeben von zwei weiteren Spielern.', *MOSES][:4]
    scores = corpus_scores(outputs, list(MOSES), 'de', complete=True)
    tokens = [MosesTokens('de')(line.lower()) for line in outputs]
    assert scores['bleu_lowercased_moses'] == pytest.approx(bleu_of_tokens(tokens, list(MOSES.values())), abs=1e-6)


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize('language, rules', [('de', 'de'), ('pt_BR', 'pt'), ('fr-FR', 'fr'),
                                             ('xx', 'en'), ('', 'en'), ('tlh', 'en'), ('ko', 'ko')])
def test_a_language_without_rules_gets_those_of_english_and_a_warning(language, rules, caplog):
    caplog.set_level('WARNING', logger='allyouneed')
    scores = corpus_scores(['a b'], ['a b'], language, complete=True)
    assert f'tok:moses.{rules}|' in scores['bleu_lowercased_moses_signature']
    assert ('no rules for the language' in caplog.text) == (rules == 'en')


def noisy(lines, share, seed):
    """The lines with some of their words replaced."""
    rng, words = np.random.default_rng(seed), ' '.join(lines).split()
    return [' '.join(rng.choice(words) if rng.random() < share else word for word in line.split()) for line in lines]


LINES = [f'{noun} number {number} sits near the {other} , and the {other} sees it .' for number, (noun, other) in
         enumerate([('cat', 'dog'), ('House', 'tree'), ('man', 'river')] * 20)]


@pytest.mark.slow
def test_a_confidence_interval_is_that_of_resampled_sentences():
    outputs = noisy(LINES, 0.3, seed=0)
    found, scores = confidence_intervals(outputs, LINES, 'en'), corpus_scores(outputs, LINES, 'en', complete=True)
    assert found == confidence_intervals(outputs, LINES, 'en') and found['signature'] == 'bs:1000|seed:12345'
    for name in ('bleu', 'bleu_lowercased_tokenised', 'bleu_lowercased_moses', 'chrf', 'chrf++', 'ter'):
        assert found[name][0] < scores[name] < found[name][1]
    rng = np.random.default_rng(7)  # another one, and BLEU by its definition: the same interval, but for the resampling
    resampled = [bleu_of_tokens(*zip(*[(outputs[row], LINES[row]) for row in rng.integers(0, 60, 60)], strict=True))
                 for _ in range(100)]
    assert found['bleu'] == pytest.approx(np.percentile(resampled, [2.5, 97.5]), abs=2)
    more = confidence_intervals(noisy(LINES * 9, 0.3, seed=0), LINES * 9, 'en')
    assert more['bleu'][1] - more['bleu'][0] < 0.5 * (found['bleu'][1] - found['bleu'][0])


def test_a_confidence_interval_is_of_percentiles_and_within_what_a_score_can_be():
    references = LINES[:10]
    outputs = [*references[:7], *noisy(references[7:], 0.3, seed=0)]
    found = confidence_intervals(outputs, references, 'en')
    rows = np.random.default_rng(12345).choice(10, size=(1000, 10))  # sacreBLEU's seed, which the signature gives
    resampled = [bleu_of_tokens([outputs[row] for row in each], [references[row] for row in each]) for each in rows]
    assert found['bleu'] == pytest.approx(np.percentile(resampled, [2.5, 97.5]), abs=0.01)
    assert max(found['bleu'][1], found['chrf'][1]) <= 100 and found['ter'][0] >= 0
    score = BLEU().corpus_score(outputs, [references], n_bootstrap=1000)
    assert (found['bleu'][1] - found['bleu'][0]) / 2 == pytest.approx(score._ci, abs=0.5)  # the same resamples


def test_the_interval_of_what_is_all_wrong_is_0():
    found = confidence_intervals(['x'] * 5, ['one two three four five'] * 5, 'en')
    assert found['bleu'] == [0, 0] and found['ter'] == [100, 100]


def test_two_systems_are_compared_on_the_same_sentences():
    good, also_good, bad = noisy(LINES, 0.2, seed=1), noisy(LINES, 0.2, seed=2), noisy(LINES, 0.5, seed=3)
    against_bad, against_good = (compare_translations(good, other, LINES, 'en') for other in (bad, also_good))
    scores = {name: [corpus_scores(each, LINES, 'en', complete=True)[name] for each in (good, bad)]
              for name in ('bleu', 'ter')}
    for name, (this, other) in scores.items():
        assert against_bad[name]['other'] == pytest.approx(other)
        assert against_bad[name]['difference'] == pytest.approx(this - other)
        assert against_bad[name]['p_value'] < 0.01 < against_good[name]['p_value']
    assert against_bad['bleu']['difference'] > 0 > against_bad['ter']['difference']
    assert against_bad == compare_translations(good, bad, LINES, 'en')
    assert compare_translations(good, good, LINES, 'en')['bleu'] == {
        'other': pytest.approx(scores['bleu'][0]), 'difference': 0, 'p_value': 1}


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
    (WEIGHTS, 'decoder', "no attention of kind 'decoder'. Use encoder, cross"), (WEIGHTS, 'cross:3', "no layer '3'"),
    (WEIGHTS, 'cross:1:4', "no head '4'. Use a number from 1 to 3"), (WEIGHTS, 'cross:x', "no layer 'x'"),
    (WEIGHTS, 'cross:1:1:1', r'must be KIND\[:LAYER\[:HEAD\]\]'), ({}, '', 'no attention weights')])
def test_attention_that_does_not_exist_cannot_be_chosen(weights, look, message):
    with pytest.raises(UserError, match=message):
        chosen(weights, look)


NASTY = ['7:37\u202fAM', 'C:\\new\\table', 'a\tb', 'one\r\ntwo\n', '\\', '', ' \u00a0 ', '\ufeffmark',
         '\\\t\\t\\\\t\x00', '\udcff', '\\udcff', '\\\udc80\ud83d']
ENDS = [f'a{end}b' for end in '\x0b\x0c\x1c\x85\u2028\u2029']  # of a line, for some readers


@pytest.mark.parametrize('row, line', [
    (['7:37\u202fAM', '07:37'], '7:37\u202fAM\t07:37\n'),
    (['C:\\new', 'tab\t', 'end\r\n'], r'C:\\new' '\t' r'tab\t' '\t' r'end\r\n' '\n'),
    ([' two  spaces '], ' two  spaces \n'), (['', ''], '\t\n'), (['a\u2028b\x85'], 'a\u2028b\x85\n'),
    (['\udcff.png', '\\udcff'], r'\udcff.png' '\t' r'\\udcff' '\n')])
def test_a_table_escapes_only_what_ends_a_cell_or_a_line(row, line):
    assert table_line(row) == line


def test_a_table_gives_every_cell_back_to_the_byte(tmp_path):
    rows = [[first, second] for first in NASTY + ENDS for second in NASTY + ENDS]
    (tmp_path / 'test.tsv').write_bytes(''.join(map(table_line, rows)).encode())
    assert read_table(tmp_path / 'test.tsv') == rows
    cut = subprocess.run(['cut', '-f1', tmp_path / 'test.tsv'], capture_output=True, check=True).stdout
    lines = cut.decode().split('\n')[:-1]
    assert len(lines) == len(rows)
    plain = [first for first, _ in rows if not set(first) & set('\\\t\r\n\udcff')]
    assert [line for line in lines if '\\' not in line] == plain


@pytest.mark.parametrize('unit', [1e-25, 1.0, 1e25])
def test_errors_of_a_regression_in_any_unit(unit):
    targets = np.float32([[-2], [0], [2]]) * np.float32(unit)
    scores = regression_scores(targets + np.float32(unit), targets, ['0'])  # each is wrong by 1; the variance is 8 / 3
    assert scores['root_mean_squared_error'] == pytest.approx(unit) == scores['mean_absolute_error']
    assert scores['r_squared'] == pytest.approx(1 - 3 / 8)


@pytest.mark.parametrize('target', [3.0, 0.1])  # the computed mean of 3 times 0.1 is not 0.1
def test_targets_that_do_not_vary_have_no_r_squared(target):
    scores = regression_scores(np.array([[1.0], [2.0], [6.0]]) + target, np.full((3, 1), target), ['0'])
    assert 'r_squared' not in scores and scores['mean_absolute_error'] == pytest.approx(3)


def test_several_targets_are_measured_one_by_one_and_on_average():
    import sklearn.metrics  # here, because this import takes a second of each worker
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(50, 3)) * [1, 1e6, 0]
    values = targets + rng.normal(size=(50, 3)) * [2, 1e5, 1]
    scores = regression_scores(values, targets, ['small', 'large', 'constant'])
    for index, name in enumerate(['small', 'large', 'constant']):
        pair = targets[:, index], values[:, index]
        expected = {'root_mean_squared_error': sklearn.metrics.root_mean_squared_error(*pair),
                    'mean_absolute_error': sklearn.metrics.mean_absolute_error(*pair),
                    'r_squared': sklearn.metrics.r2_score(*pair)}
        assert scores['targets'][name] == pytest.approx({
            metric: value for metric, value in expected.items() if metric != 'r_squared' or name != 'constant'})
    assert scores['r_squared'] == pytest.approx(sklearn.metrics.r2_score(targets[:, :2], values[:, :2]))
    assert scores['root_mean_squared_error'] == pytest.approx(sklearn.metrics.root_mean_squared_error(targets, values))
    assert 'targets' not in regression_scores(values[:, :1], targets[:, :1], ['small'])


def test_a_confusion_matrix_is_sparse_and_names_the_most_confused_classes():
    classes = [f'class {number}' for number in range(10_000)]
    targets, predicted = np.array([5, 5, 5, 9_999, 7, 7]), np.array([5, 8, 8, 9_999, 7, 5])
    log_probs = np.full((6, 10_000), -20.0)
    log_probs[np.arange(6), predicted] = -0.1
    scores = classification_scores(log_probs, targets, classes)
    assert scores['confusion_matrix'] == {'class 5': {'class 5': 1, 'class 8': 2}, 'class 9999': {'class 9999': 1},
                                          'class 7': {'class 7': 1, 'class 5': 1}}
    assert scores['most_confused'] == ['class 5 as class 8: 2 of 3', 'class 7 as class 5: 1 of 2']
    assert scores['accuracy'] == 0.5 and scores['loss'] == pytest.approx((3 * 0.1 + 3 * 20) / 6)


@pytest.mark.parametrize('count', [5, 6, 12])
def test_accuracies_of_a_classifier_are_those_of_sorted_classes(count):
    rng = np.random.default_rng(count)
    log_probs = np.log(rng.dirichlet(np.ones(count), 80)).round(1)  # some classes have the same probability
    log_probs[:3] = -np.log(count)
    targets = np.minimum(rng.geometric(0.3, 80), count - 1)  # class 0 has no examples
    scores = classification_scores(log_probs, targets, list(map(str, range(count))))
    order = np.argsort(-log_probs, axis=1, kind='stable')
    assert scores['balanced_accuracy'] == pytest.approx(np.mean(
        [np.sum((targets == one) & (order[:, 0] == one)) / np.sum(targets == one) for one in {*targets}]))
    assert scores.get('top_5_accuracy') == (np.mean(np.any(order[:, :5] == targets[:, None], axis=1))
                                            if count > 5 else None)


def test_translations_of_an_edited_model_or_of_an_ensemble_are_not_compared(tmp_path):
    (tmp_path / 'results').mkdir()
    for name in 'a.edited', 'a.ensemble', 'a.ensemble.edited':
        (tmp_path / 'results' / f'{name}.tsv').write_text(table_line(['one', 'un', name]))
    with pytest.raises(UserError, match='that run has no translations of the sentences of test. Score that run first'):
        read_translations(str(tmp_path), 'test', [('one', 'un')])
    (tmp_path / 'results' / 'news.edited.en.tsv').write_text(table_line(['one', 'un', 'plain']))
    assert read_translations(str(tmp_path), 'test', [('one', 'un')]) == ['plain']
