"""Word alignments: from the weights of a chosen head, in both readings, against gold links."""

import datetime
import functools
import json
import logging
import types

import numpy as np
import pytest
from babel import Locale

from analysis.alignments import Head, align, as_pharaoh, best_head, chosen_head, error_rate, error_rates
from analysis.answering import answer_file
from analysis.request import Request
from inference.options import SearchOptions
from inference.outputs import Hypothesis, Output
from input_pipeline.builtin import make_corpus, write_date
from input_pipeline.links import fields, links_of
from input_pipeline.tokenizer import CharTokenizer
from runtime.errors import UserError
from tests.random_run import random_run

SIZES = {'test': 50}
OUTPUT = Output('a bc d', [4, 5, 6, 7], [Hypothesis('x yz', [4, 5, 6], 0.0, 0.0)])


def characters(text, kind=CharTokenizer):
    return kind(json.dumps({'characters': sorted({*text})}).encode())


class Pieces(CharTokenizer):
    """Pieces with a space before them, except c and z."""

    def bytes_of(self, token):
        character = super().bytes_of(token)
        return character if character in b'cz' else b' ' + character


class Fixed:
    """A model that looks from target token t at source token SOURCE[t], one step later in its second head."""
    SOURCE = [3, 1, 2, 4, 4]  # the last two are at the end token
    tokenizers = {'source': characters('abcd', Pieces), 'target': characters('xyz', Pieces)}

    def attention(self, output):
        weights = np.zeros((1, 2, 4, 5))
        weights[0, 0, range(4), self.SOURCE[:4]] = 1
        weights[0, 1, range(1, 4), self.SOURCE[:3]] = 1
        return {'cross': weights}


def test_words_are_linked_if_tokens_are_in_both_readings():
    links = [(1, 1), (2, 0)]
    assert align(Fixed(), OUTPUT, Head(0, 0)) == links
    assert align(Fixed(), OUTPUT, Head(0, 1, 'input')) == links
    assert align(Fixed(), OUTPUT, Head(0, 1, 'output')) != links
    assert as_pharaoh(links) == '1-1 2-0'
    rates = error_rates(Fixed(), [OUTPUT], [links])
    assert len(rates) == 6 and rates[Head(0, 0)] == rates[Head(0, 1, 'input')] == 0 < rates[Head(0, 0, 'input')]
    with pytest.raises(UserError, match='at least one translation'):
        error_rates(Fixed(), [], [])


@pytest.mark.parametrize('source, target, words', [
    ('日本 語', 'a b', (2, 2)), ('a☃b c', '☃ ☃', (2, 2)), ('one', ' a  b ', (1, 2)), ('\u3000a\u00a0b', 'x', (2, 1))])
def test_words_are_separated_by_white_space_as_in_gold_links(source, target, words):
    """Also in scripts without spaces, and with characters that are not in the vocabulary."""
    tokenizer = characters('日本語 abcxone\u3000\u00a0')
    tokens, written = tokenizer.encode(source), tokenizer.encode(target)
    last = len(tokens) - 1

    def link(token):
        """The links if each target token attends to one source token."""
        weights = np.eye(last + 2)[None, None, [token] * (len(written) + 1)]
        model = types.SimpleNamespace(attention=lambda output: {'cross': weights},
                                      tokenizers=dict.fromkeys(('source', 'target'), tokenizer))
        return align(model, Output(source, tokens, [Hypothesis(target, written, 0.0, 0.0)]), Head(0, 0))

    assert link(0) == [(0, word) for word in range(words[1])]
    assert link(last) == [(words[0] - 1, word) for word in range(words[1])]


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


@pytest.mark.slow
def test_fields_of_the_built_in_corpus_are_linked():
    writers = {}
    pairs = make_corpus('en', 'fr', sizes=SIZES, writers=writers)['test']
    links = dict(zip(pairs, links_of(pairs, writers, 'en', 'fr'), strict=True))
    named = {pair: {(pair[0].split()[source], pair[1].split()[target]) for source, target in found}
             for pair, found in links.items()}
    for (source, target), words in named.items():
        years = {(word, other) for word, other in words if word.isdecimal() and len(word) == 4}
        assert all(word == other for word, other in years), (source, target)
        assert {word for word, _ in words}, (source, target)


@pytest.mark.slow
def test_the_words_of_a_date_are_linked_across_orders():
    writers = {}
    make_corpus('en', 'fr', sizes={'test': 300}, writers=writers)
    pair = 'Wednesday, June 28, 2028', 'mercredi 28 juin 2028'
    assert links_of([pair], writers, 'en', 'fr') == [[(0, 0), (1, 2), (2, 1), (3, 3)]]


def test_a_time_of_day_that_looks_like_a_part_of_the_date_has_its_own_fields():
    moment, danish = datetime.datetime(2025, 12, 5, 5, 12), Locale('da')
    assert write_date('short', 'short', moment, danish) == '05.12.2025 05.12'
    assert fields(functools.partial(write_date, 'short', 'short', moment), danish) == [
        ('day', 0, 2), ('month', 3, 5), ('year', 6, 10), ('hour', 11, 13), ('minute', 14, 16)]


@pytest.mark.slow
def test_decode_writes_a_line_of_links_for_each_line(tmp_path):
    run = random_run('transformer')
    (tmp_path / 'input').write_text('one two\n\nthree\n')
    request = Request(input=str(tmp_path / 'input'), output=str(tmp_path / 'output'),
                      alignments=str(tmp_path / 'links'))
    answer_file(request, run.model, SearchOptions(method='greedy', extra_length=3), None, Head(1, 0))
    lines = (tmp_path / 'links').read_text().split('\n')
    assert len(lines) == 4 and lines[1] == lines[3] == ''


def trained(folder):
    """A run that was trained on the data of its config."""
    run = random_run('transformer')
    run.workdir = folder
    (folder / 'data').mkdir()
    (folder / 'data' / 'fingerprints.json').write_text('{"train": {}, "validation": {}}')
    return run


@pytest.mark.slow
def test_long_validation_pairs_are_skipped_with_their_links(tmp_path):
    run = trained(tmp_path)
    run.model.max_length = 8
    run.options = SearchOptions(extra_length=4)
    pairs = [('a b', 'x' * 100), ('a b', 'c d'), ('a' * 20, 'x'), ('a', 'y' * 11)]
    links = [[(0, 0)], [(0, 0), (1, 1)], [(0, 0)], [(0, 0)]]
    run.data = lambda: types.SimpleNamespace(pairs=lambda split: pairs, has_links=lambda split: True,
                                             links=lambda split: links)
    rates = error_rates(run.model, run.model.forced_all([pairs[1], pairs[3]], run.options), [links[1], links[3]])
    assert rates[best_head(run)] == min(rates.values())
    del pairs[3], pairs[1], links[3], links[1]
    assert best_head(run) == Head(0)  # no pair fits


@pytest.mark.slow
def test_without_the_data_of_the_training_the_layer_before_the_last_is_read(tmp_path, caplog, monkeypatch):
    def missing():
        raise UserError('/data is not a folder')

    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    run = trained(tmp_path)
    run.data = missing
    assert best_head(run) == Head(0)
    assert '/data is not a folder' in caplog.text and '--look=cross:LAYER:HEAD' in caplog.text
    (tmp_path / 'data' / 'fingerprints.json').write_text('{}')  # as an import writes it
    run.data = lambda: pytest.fail('the default data of an imported model is read')
    assert best_head(run) == Head(0)


@pytest.mark.slow
def test_of_data_without_gold_links_the_layer_before_the_last_is_read(tmp_path):
    run = trained(tmp_path)
    run.data = lambda: types.SimpleNamespace(pairs=lambda split: [('a', 'b')], has_links=lambda split: False)
    assert best_head(run) == Head(0)
    without = random_run('rnnsearch', recurrent={'d_hidden': 6, 'd_align': 4, 'readout': 'linear', 'attention': False})
    with pytest.raises(UserError, match='but this model has none'):
        align(without.model, OUTPUT, Head(0))
