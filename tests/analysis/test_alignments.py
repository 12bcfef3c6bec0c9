"""Word alignments: from the weights of a chosen head, in both readings, against gold links."""

import types

import numpy as np
import pytest

from analysis.alignments import Head, align, as_pharaoh, best_head, chosen_head, error_rate, error_rates
from analysis.answering import answer_file
from analysis.request import Request
from inference.options import SearchOptions
from inference.text import Hypothesis, Output
from input_pipeline.builtin import make_corpus
from input_pipeline.links import gold_links
from runtime.errors import UserError
from tests.random_run import random_run

SIZES = {'test': 50}
OUTPUT = Output('a bc d', [1, 2, 3, 4], [Hypothesis('x y', [5, 6, 7], 0.0, 0.0)])


class Fixed:
    """A model that looks from target token t at source token SOURCE[t], one step later in its second head."""
    SOURCE = [3, 1, 2, 4, 4]  # the last two are at the end token

    def attention(self, output):
        weights = np.zeros((1, 2, 4, 5))
        weights[0, 0, range(4), self.SOURCE[:4]] = 1
        weights[0, 1, range(1, 4), self.SOURCE[:3]] = 1
        return {'cross': weights}

    def axes(self, output):
        return {'cross': (['▁x', '▁y', 'z', '</s>'], ['▁a', '▁b', 'c', '▁d', '</s>'])}


def test_words_are_linked_if_tokens_are_in_both_readings():
    links = [(1, 1), (2, 0)]
    assert align(Fixed(), OUTPUT, Head(0, 0)) == links
    assert align(Fixed(), OUTPUT, Head(0, 1, 'input')) == links
    assert align(Fixed(), OUTPUT, Head(0, 1, 'output')) != links
    assert as_pharaoh(links) == '1-1 2-0'
    rates = error_rates(Fixed(), [OUTPUT], [links])
    assert len(rates) == 6 and rates[Head(0, 0)] == rates[Head(0, 1, 'input')] == 0 < rates[Head(0, 0, 'input')]


def test_the_error_rate_is_that_of_och_and_ney():
    assert error_rate([[(0, 0), (1, 1)], [(2, 2)]], [[(0, 0), (1, 2)], [(2, 2), (3, 3)]]) == pytest.approx(1 - 4 / 7)
    assert error_rate([[(0, 0)]], [[(0, 0)]]) == 0


@pytest.mark.parametrize('look', ['cross', 'cross:9:1', 'cross:1:3', 'encoder:1:1', 'cross:1:1:1', 'cross:a:1'])
def test_a_head_that_does_not_exist_is_refused(look):
    fake = types.SimpleNamespace(attention=Fixed().attention, forced_all=lambda pairs: [OUTPUT])
    with pytest.raises(UserError, match='cross:LAYER:HEAD or mean. LAYER is from 1 to 1, and HEAD is from 1'):
        chosen_head(look, fake)
    assert chosen_head('cross:1:2', fake) == Head(0, 1)
    assert chosen_head('cross:1', fake) == chosen_head('cross:1:mean', fake) == Head(0)


def test_fields_of_the_built_in_corpus_are_linked():
    pairs = make_corpus('en', 'fr', sizes=SIZES)['test']
    links = dict(zip(pairs, gold_links(pairs, 'en', 'fr', sizes=SIZES), strict=True))
    named = {pair: {(pair[0].split()[source], pair[1].split()[target]) for source, target in found}
             for pair, found in links.items()}
    for (source, target), words in named.items():
        years = {(word, other) for word, other in words if word.isdecimal() and len(word) == 4}
        assert all(word == other for word, other in years), (source, target)
        assert {word for word, _ in words}, (source, target)
    with pytest.raises(ValueError, match="'hello' is not a sentence of the built-in corpus en-fr with seed=0"):
        gold_links([('hello', 'bonjour')], 'en', 'fr', sizes=SIZES)


def test_the_words_of_a_date_are_linked_across_orders():
    pairs = make_corpus('en', 'fr', sizes={'test': 300})['test']
    pair = 'Wednesday, June 28, 2028', 'mercredi 28 juin 2028'
    assert gold_links([pairs[pairs.index(pair)]], 'en', 'fr', sizes={'test': 300}) == [[(0, 0), (1, 2), (2, 1), (3, 3)]]


def test_decode_writes_a_line_of_links_for_each_line(tmp_path):
    run = random_run('transformer')
    (tmp_path / 'input').write_text('one two\n\nthree\n')
    request = Request(input=str(tmp_path / 'input'), output=str(tmp_path / 'output'),
                      alignments=str(tmp_path / 'links'))
    answer_file(request, run.model, SearchOptions(method='greedy', extra_length=3), None, Head(1, 0))
    lines = (tmp_path / 'links').read_text().split('\n')
    assert len(lines) == 4 and lines[1] == lines[3] == ''


def test_of_data_without_gold_links_the_layer_before_the_last_is_read():
    run = random_run('transformer')
    run.data = lambda: types.SimpleNamespace(pairs=lambda split: [('a', 'b')], has_links=lambda split: False)
    assert best_head(run) == Head(0)
    without = random_run('rnnsearch', recurrent={'d_hidden': 6, 'd_align': 4, 'readout': 'linear', 'attention': False})
    with pytest.raises(UserError, match='which this model lacks'):
        align(without.model, OUTPUT, Head(0))
