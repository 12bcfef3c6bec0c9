"""Answers to lines of any content: one answer for each line, in the order of the lines, with bounded memory."""

import dataclasses
import io
import itertools
import logging
import random
import re
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from configs import base
from configs.checks import check_config
from configs.tasks import TOKENIZERS
from inference import text as text_module
from inference.generate import Generator
from inference.options import SearchOptions
from inference.outputs import Hypothesis, Output
from inference.text import TextModel
from inference.translate import Translator
from input_pipeline.data import DocumentData, PairData
from input_pipeline.text_files import decode_lines, read_lines
from input_pipeline.tokenizer import BOS, ByteTokenizer, train_tokenizer
from model.losses import Sums
from runtime.errors import UserError
from runtime.once import warn_once
from tests.real_text import pieces, training_lines

ROOT = Path(__file__).parents[2]
NASTY = ['', ' ', 'plain', '\x00', 'a\rb', '\r', '\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029', '\x1b[31m\x07\x7f', '\t',
         '\u202eright to left', '\u05e2\u05d1\u05e8\u05d9\u05ea \u0627\u0644', '\u6f22\u5b57 mixed \u041a\u0438',
         'e\u0301', '\U0001f469\u200d\U0001f469', '\u2581', '\ufeff', '\uffff', '\ue000', 'long ' * 40]
legal = st.text(st.characters(exclude_characters='\n', exclude_categories=['Cs'])) | st.sampled_from(NASTY)
OPTIONS = SearchOptions(method='greedy', batch_size=2, extra_length=6)


def echo(self, sources, numbers, options, draw=0, limits=None, begins=None):
    """In place of a search: the source itself, as far as it goes."""
    tokens = [list(source) for source in sources] if limits is None else [
        list(itertools.islice(itertools.cycle(source), limit)) for source, limit in zip(sources, limits, strict=True)]
    return [[Hypothesis(self.tokenizers['target'].decode(each), each, float(number), 0.0, ended=not self.cut)]
            for each, number in zip(tokens, numbers, strict=True)]


class Echo(Translator):
    find_all = echo

    def __init__(self, max_length=10 ** 6):
        super().__init__(nn.Dense(1), {}, dict.fromkeys(('source', 'target'), ByteTokenizer()), max_length)


class Parrot(Generator):
    find_all = echo

    def __init__(self, context=64, whole_documents=False, tokenizer=None):
        super().__init__(nn.Dense(1), {}, tokenizer or ByteTokenizer(), context, whole_documents)


class Shout(TextModel):
    """Answers without a search. A test in which anything else is asked of it fails."""

    def examples(self, data, split, count, options):
        raise NotImplementedError

    def attention(self, output):
        raise NotImplementedError

    axes = text_names = read_and_written = attention

    def respond(self, lines, options, *, first=0):
        return [Output(line, [], [Hypothesis(line.upper(), [], 0.0, 0.0)]) for line in lines]


def answers(model, lines, options=OPTIONS):
    return list(itertools.chain.from_iterable(model.respond_all(lines, options)))


def test_a_model_of_text_needs_no_search():
    shout = Shout(nn.Dense(1), {}, dict.fromkeys(('source', 'target'), ByteTokenizer()))
    assert [answer.text for answer in answers(shout, ['a', '', 'bc', 'd'])] == ['A', '', 'BC', 'D']


@pytest.fixture
def warned(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    return caplog


@settings(deadline=None)
@given(st.lists(legal, max_size=12), st.sampled_from([1, 30, 2 ** 23]), st.sampled_from([b'\n', b'\r\n']),
       st.booleans())
def test_a_translation_of_every_line_in_order(lines, characters, end, ended):
    lines = [line.rstrip('\r') for line in lines]  # in front of \n it is part of the line's end
    content = end.join(line.encode() for line in lines) + (end if ended and lines else b'')
    expected = [line.decode() for line in content.split(end)]
    if not expected[-1]:
        expected.pop()  # what is behind the last line end is no line
    if end == b'\r\n':
        expected = [line for part in expected for line in part.split('\n')]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, 'CHUNK', 2)
        patch.setattr(text_module, 'CHUNK_CHARACTERS', characters)
        found = answers(Echo(), decode_lines(io.BytesIO(content), 'x'))
    expected[:1] = [line.removeprefix('\ufeff') for line in expected[:1]]
    assert [answer.source for answer in found] == expected
    assert [answer.text for answer in found] == [line if line.strip() else '' for line in expected]
    # The number that draws depend on is that of the line in its file.
    assert [answer.hypotheses[0].log_prob for answer in found if answer.text] == [
        number for number, line in enumerate(expected) if line.strip()]
    assert all(len(answer.line.splitlines()) <= 1 for answer in found)


@settings(deadline=None)
@given(st.lists(legal, max_size=12), st.integers(2, 40), st.booleans(), st.sampled_from([OPTIONS, SearchOptions(
    method='beam', batch_size=3, extra_length=1)]))
def test_a_continuation_of_every_prompt_in_order(lines, context, whole_documents, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, 'CHUNK', 2)
        found = answers(Parrot(context, whole_documents), iter(lines), options)
    assert [answer.source for answer in found] == lines
    for answer in found:
        assert len(answer.hypotheses[0].tokens) == options.extra_length
        assert len(answer.source_tokens) <= context
        tokens = [BOS] * whole_documents + [4 + byte for byte in answer.source.encode()] or [BOS]
        if len(tokens) <= context + 1 - (options.extra_length if options.method == 'beam' else 1):
            assert answer.source_tokens == tokens
        else:
            assert answer.source_tokens == tokens[-len(answer.source_tokens):]
        assert len(answer.line.splitlines()) <= 1


@pytest.mark.parametrize('model, options, which, message', [
    (Echo(max_length=8), OPTIONS, slice(7),
     'line 2 has 10 tokens: only the first 7 tokens are read (config.data.max_length)'),
    (Parrot(context=8), OPTIONS, slice(-4, None),
     'text 2 has 10 tokens: only the last 4 tokens are read (config.data.context)'),
    (Parrot(context=8, whole_documents=True), OPTIONS, slice(-4, None),
     'text 2 has 10 tokens: only the last 4 tokens are read (config.data.context)'),
    (Parrot(context=8), SearchOptions(extra_length=3), slice(-6, None),
     'text 2 has 10 tokens: only the last 6 tokens are read (config.data.context plus 1 minus --extra_length)'),
    (Parrot(context=12, whole_documents=True), SearchOptions(extra_length=3), slice(None),
     'text 2 has 10 tokens: the start token before them is not read (config.data.context plus 1 minus --extra_length)'),
    (Parrot(context=9), SearchOptions(extra_length=0), slice(-9, None),
     'text 2 has 10 tokens: only the last 9 tokens are read (config.data.context)'),
    (Parrot(context=3), OPTIONS, slice(-1, None),
     'text 2 has 10 tokens: only the last token is read (config.data.context)'),
])
def test_a_line_over_the_limit_is_truncated_with_a_warning(model, options, which, message, warned):
    outputs = answers(model, ['abc', '0123456789', 'abc'], options)
    assert [output.source for output in outputs] == ['abc', '0123456789', 'abc']
    [warning] = warned.records
    assert warning.getMessage() == message
    assert model.tokenizers['source'].decode(outputs[1].source_tokens) == '0123456789'[which]


def test_the_warning_about_a_single_token_is_singular(warned):
    output, = Parrot(context=1, whole_documents=True).generate(['a'], OPTIONS)
    assert output.source_tokens == [4 + ord('a')]
    assert [record.getMessage() for record in warned.records] == [
        'text 1 has 1 token: the start token before it is not read (config.data.context)']


@pytest.mark.parametrize('kind', [
    pytest.param(kind, marks=pytest.mark.slow) if kind == 'bpe' else kind for kind in TOKENIZERS])  # trains for seconds
@pytest.mark.parametrize('whole_documents', [pytest.param(False, marks=pytest.mark.slow), True])
def test_prompt_and_continuation_are_the_text_of_their_tokens(kind, whole_documents, monkeypatch):
    tokenizer = train_tokenizer(training_lines(), kind=kind, vocab_size=1500, split_digits=False,
                                normalization='identity', indentation=True)
    prompts = pieces(60)
    rng = random.Random(0)
    draws = {}

    def drawn(self, sources, numbers, options, draw=0, limits=None, begins=None):
        """In place of a search: tokens drawn from real text, several hypotheses for each source."""
        found = []
        for limit in limits:
            tokens = [rng.choices(draws['tokens'], k=limit) for _ in range(options.n_best)]
            found.append([Hypothesis(tokenizer.decode(each), each, -1.0, -1.0, False) for each in tokens])
        return found

    monkeypatch.setattr(Parrot, 'find_all', drawn)
    draws['tokens'] = tokenizer.encode(''.join(pieces(300, seed=1)))
    one_window = SearchOptions(method='sample', n_best=3, extra_length=9, batch_size=8)
    for context, options in (400, one_window), (400, OPTIONS), (16, dataclasses.replace(OPTIONS, extra_length=50)):
        for output in Parrot(context, whole_documents, tokenizer).generate(prompts, options):
            read, cut = tokenizer.decode(output.source_tokens), len(output.source_tokens) == context // 2
            for each in output.hypotheses:
                whole = tokenizer.decode([*output.source_tokens, *each.tokens])
                assert read + each.text == whole or cut and read.startswith('\ufffd')
                assert output.source + each.text == whole or cut or kind == 'char' and '\ufffd' in whole
    read, = Parrot(400, whole_documents, tokenizer).generate([''], OPTIONS)
    assert read.source_tokens == [BOS] and read.text == tokenizer.decode(read.hypotheses[0].tokens)


def test_each_window_of_a_continuation_has_a_draw_of_its_own(monkeypatch):
    draws = []

    def recorded(self, sources, numbers, options, draw=0, limits=None, begins=None):
        draws.append((draw, list(numbers)))
        return echo(self, sources, numbers, options, draw, limits)

    monkeypatch.setattr(Parrot, 'find_all', recorded)
    Parrot(context=8).generate(['ab'], SearchOptions(method='sample', extra_length=20), first=3)
    assert draws == [(number, [3]) for number in range(4)]  # windows with 7, 5, 5 and 3 new tokens


def test_a_continuation_that_fits_no_window_is_refused_for_a_beam():
    with pytest.raises(UserError, match='extra_length=9: must be at most 8, because'):
        answers(Parrot(context=8), ['a'], SearchOptions(extra_length=9))
    with pytest.raises(UserError, match='extra_length=9: must be at most 8, because'):  # before the split is read
        Parrot(context=8).score(object.__new__(DocumentData), 'test', ConfigDict(), SearchOptions(extra_length=9))
    output, = answers(Parrot(context=8), ['ab'], SearchOptions(extra_length=8))
    assert (len(output.source_tokens), len(output.hypotheses[0].tokens)) == (1, 8)


def test_lines_are_read_when_needed_and_fewer_long_lines_at_a_time(monkeypatch):
    monkeypatch.setattr(text_module, 'CHUNK', 4)
    monkeypatch.setattr(text_module, 'CHUNK_CHARACTERS', 100)
    read = []

    def lines():
        for number in itertools.count():
            read.append(number)
            yield 'x' * (60 if number >= 8 else 1)

    parts = Echo().respond_all(lines(), OPTIONS)
    assert len(next(parts)) == len(read) == 8
    assert len(next(parts)) == 2 and len(read) == 10


def test_a_million_characters_are_read_in_linear_time_and_little_memory(warned):
    sizes = []

    class Counting(ByteTokenizer):
        def encode_parts(self, text):
            for part in super().encode_parts(text):
                sizes.append(len(part))
                yield part

    model = Echo(max_length=32)
    model.tokenizers['source'] = Counting()
    found = answers(model, ['a' * 3_000_000])
    assert found[0].text == 'a' * 31 and len(found[0].source_tokens) == 31
    assert sum(sizes) == 3_000_000 and max(sizes) <= 2 ** 20
    assert 'line 1 has 3000000 tokens' in warned.text


@pytest.mark.parametrize('texts, message', [
    ('one two', r"a list of texts is required. Use \['one two'\]"), (['one', '\ud800'], 'text 2 is')])
def test_arguments_that_are_not_lists_of_texts_are_refused(texts, message):
    for ask in Echo().translate, Parrot().generate:
        with pytest.raises(UserError, match=message):
            ask(texts, OPTIONS)


def test_values_of_other_types_are_refused_where_nothing_checks_annotations():
    code = """
import numpy as np
from runtime.errors import UserError
from inference.edits import Edit
from inference.inputs import checked_texts
from inference.options import SearchOptions
from inference.translate import Translator
calls = [lambda each=each: SearchOptions(**each) for each in (
    {'beam': 2.5}, {'beam': True}, {'seed': 1.5}, {'extra_length': '2'}, {'alpha': None}, {'top_p': float('nan')})]
pairs = [lambda pairs=pairs: Translator.forced_all(None, pairs) for pairs in (
    ('ab', 'cd'), ['ab', 'cd'], 'ab', [('a', 'b'), ('a', 'b', 'c')], [('a', 'b'), ('a', 3)])]
for call in [*calls, lambda: checked_texts(['one', 3]), lambda: checked_texts([None]), *pairs,
             lambda: Edit('zero', 'encoder', heads=np.array(2))]:
    try:
        call()
    except UserError as error:
        print(error)
print(repr(SearchOptions(beam=np.int64(3), alpha=1).beam))
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == [
        'beam=2.5 must be a whole number', 'beam=True must be a whole number', 'seed=1.5 must be a whole number',
        "extra_length='2' must be a whole number", 'alpha=None must be a number', 'top_p=nan must be a number',
        'text 2 is 3: must be a string that UTF-8 can encode',
        'text 1 is None: must be a string that UTF-8 can encode',
        *(f'pair {pair}: must be (source, target). Use a list of pairs, [(source, target), ...]'
          for pair in ("1 is 'ab'", "1 is 'ab'", "1 is 'a'", "2 is ('a', 'b', 'c')")),
        'text 2 is 3: must be a string that UTF-8 can encode',
        "edit 'zero' at encoder: heads=2 must be a list of whole numbers from 0 to 2147483647", '3'], done.stderr


def resident():
    """Anonymous memory of this process in MB."""
    with open('/proc/self/status') as status:
        return int(re.search(r'RssAnon:\s+(\d+) kB', status.read())[1]) / 1024


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc')
def test_memory_does_not_grow_with_the_number_of_lines(tmp_path):
    class Quick(Echo):
        def respond(self, lines, options, *, first=0):
            return [Output(line, list(range(1000, 1200)), [Hypothesis(line, [], 0.0, 0.0)]) for line in lines]

    path = tmp_path / 'lines.txt'
    path.write_text(('word ' * 40 + '\n') * 15_000)
    memory, count = [], 0
    for part in Quick().respond_all(read_lines(path), SearchOptions(batch_size=16)):
        memory.append(resident())
        count += len(part)
    assert count == 15_000
    assert max(memory) - memory[0] < 30  # all answers at once would be above 100


@pytest.mark.parametrize('method, sentences', [('greedy', 0), ('beam', 2)])
def test_an_evaluation_has_the_method_and_the_number_of_sentences_of_the_config(method, sentences, monkeypatch):
    class Recording(Echo):
        def translate(self, sources, options):
            calls.append((list(sources), options.method, options.beam))
            return super().translate(sources, options)

    calls, lines, config, data = [], list('abcde'), base.get_config(), object.__new__(PairData)
    config.update_from_flattened_dict({'eval.method': method, 'eval.bleu_sentences': sentences, 'decode.beam': 3})
    monkeypatch.setattr(Recording, 'attention', lambda *_: {})
    data.pairs = lambda split: [(line, split) for line in lines]
    Recording().validate(data, Sums(0.0, 1.0, {}), config)
    assert calls == [(lines[:sentences or 5], method, 3)]


@pytest.mark.parametrize('language, metric, bleu, warned', [
    ('zh', 'bleu', 100, False), ('zh', 'chrf', 100, False), ('cn', 'bleu', 0, True), ('cn', 'chrf', 0, False)])
def test_a_perfect_translator_into_a_language_without_spaces(language, metric, bleu, warned, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    for name, stub in {'attention': {}, 'perplexity': 1.0, 'encoded': []}.items():
        monkeypatch.setattr(Echo, name, lambda *_, stub=stub: stub)
    config, data = base.get_config(), object.__new__(PairData)
    config.update_from_flattened_dict({'data.target_lang': language, 'eval.metric': metric})
    check_config(config)
    data.pairs = lambda split: [(line, line) for line in ['我们今天去北京。', '他喜欢吃苹果。', '天气很好。']]
    warn_once.cache_clear()
    metrics = Echo().validate(data, Sums(0.0, 1.0, {}), config).metrics
    assert metrics[metric] == pytest.approx(bleu if metric == 'bleu' else 100)
    assert ('3 of 3 references have fewer than 4 tokens' in caplog.text) == warned
    results, _ = Echo().score(data, 'test', config, OPTIONS)
    assert results['bleu'] == pytest.approx(bleu) == metrics['bleu']
    assert ('3 of 3 references have fewer than 4 tokens' in caplog.text) == (language == 'cn')
