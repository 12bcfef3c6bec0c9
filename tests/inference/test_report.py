"""The report on a whole input: characters outside the vocabulary, and bits per byte of texts."""

import dataclasses
import io
import json
import logging
import math

import jax
import numpy as np
import pytest

from analysis import answering
from analysis.request import Request
from configs import base, shakespeare_char
from inference import constraints, generate
from inference.columns import input_texts
from inference.generate import Generator
from inference.options import SearchOptions
from inference.outputs import Hypothesis, Output
from inference.report import Report, note_unknown
from input_pipeline.data import DocumentData
from input_pipeline.tokenizer import BOS, EOS, UNK, ByteTokenizer, CharTokenizer, train_tokenizer
from model.blocks import BlockConfig
from model.language_model import LanguageModel
from runtime.errors import UserError
from tests.inference.test_text import Echo, Parrot

LETTERS = CharTokenizer(json.dumps({'kind': 'char', 'characters': '\n abc'}).encode())
GREEDY = SearchOptions(method='greedy', extra_length=2)


@pytest.fixture(autouse=True)
def _propagated(monkeypatch):
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)


def generator(tokenizer, context=8):
    module = LanguageModel(BlockConfig(d_model=8, d_ff=8, num_heads=1, position='rotary'), 1, len(tokenizer))
    params = jax.jit(module.init)(jax.random.key(0), np.ones((1, 4), np.int32))['params']
    return Generator(module, params, tokenizer, context, True)


@pytest.fixture(scope='module')
def letters():
    return generator(LETTERS)


def test_characters_outside_the_vocabulary_are_reported_once_with_their_number_and_the_first_place(letters, caplog):
    note_unknown(letters, letters.forced_all(['ab', 'a\u20acb\u20ac', '\u00e9' * 3, 'c']))
    warning, = caplog.messages
    assert warning == ("5 characters of the input are not in the vocabulary, and the model reads them as <unk>: "
                       "'\u00e9' (3), '\u20ac' (2). The first is character 2 of text 2. Replace the "
                       'characters, or train with text that contains them')
    caplog.clear()
    note_unknown(letters, letters.generate(['ab', 'b\tb'], GREEDY))
    assert caplog.messages[0].startswith('1 character of the input is not in the vocabulary, and the model reads it as '
                                         "<unk>: '\\t' (1). The first is character 2 of text 2")
    caplog.clear()
    note_unknown(letters, letters.forced_all(['ab', '']))
    assert not caplog.messages


def test_both_sides_of_a_translation_are_searched_for_unknown_characters(caplog):
    echo = Echo()
    echo.tokenizers = dict.fromkeys(('source', 'target'), LETTERS)
    given = Output('a\u20ac', [5, UNK], [Hypothesis('ab\u00e9', [5, 6, UNK], -1.0, -1.0)])
    note_unknown(echo, [Output('a', [5], [Hypothesis('a', [5], -1.0, -1.0)]), given])
    assert '2 characters of the input are not' in caplog.text and 'character 2 of line 2' in caplog.text


def test_characters_that_the_model_has_not_read_are_not_reported(letters, caplog):
    note_unknown(letters, letters.generate(['\u20ac\u20ac\u20acabcabcabcabc\u00a5'], GREEDY))
    assert 'only the last 4 tokens are read' in caplog.messages[0]
    assert caplog.messages[1].startswith('1 character of the input is not in the vocabulary, and the model reads it as '
                                         "<unk>: '\u00a5' (1). The first is character 16 of text 1")
    caplog.clear()
    echo = Echo(max_length=5)
    echo.tokenizers = dict.fromkeys(('source', 'target'), LETTERS)
    text = 'a\u20acbcabc\u00a5'
    note_unknown(echo, [Output(text, echo._tokens(text, 0), [Hypothesis('', [], 0.0, 0.0)])])
    assert "as <unk>: '\u20ac' (1). The first is character 2 of line 1" in caplog.text


def test_a_character_may_be_unknown_on_one_side_only(caplog):
    echo = Echo()
    echo.tokenizers = {'source': LETTERS, 'target': CharTokenizer(json.dumps({'characters': 'ab\u00e9'}).encode())}
    note_unknown(echo, [Output('c\u00e9', [7, UNK], [Hypothesis('c\u00e9', [UNK, 6], -1.0, -1.0)])])
    assert "as <unk>: '\u00e9' (1), 'c' (1). The first is character 2 of line 1" in caplog.text


def test_many_unknown_characters_are_listed_in_part_and_words_without_them_by_their_tokens(letters, caplog):
    note_unknown(letters, letters.forced_all([''.join(map(chr, range(0x4e00, 0x4e20)))]))
    assert caplog.messages[0].count('(1)') == 10 and 'and 22 more' in caplog.messages[0]

    class Words(CharTokenizer):  # the whole word is unknown, its letters are not
        def encode_parts(self, text):
            yield np.array([UNK] if len(text) > 1 else [5], np.uint32)

    caplog.clear()
    report = Report(Parrot(tokenizer=Words(LETTERS.model)), scored=False)
    report.add([Output(text, tokens, [Hypothesis('', [], 0.0, 0.0)]) for text, tokens in (('a', [5]), ('abc', [UNK]))])
    report.write()
    assert caplog.messages[0].startswith('1 token of the input is <unk>, the first in text 2')


def test_at_the_prompt_a_report_has_the_number_of_the_typed_line(monkeypatch, caplog):
    model = Parrot(tokenizer=LETTERS)
    answers = model.generate(['a', 'a\u20ac'], GREEDY)
    monkeypatch.setattr(answering, 'answers_to', lambda *arguments: ([answer] for answer in answers))
    answering.answer_file(Request(typed=True), model, GREEDY, None)
    assert 'The first is character 2 of text 2. ' in caplog.text


def test_texts_whose_attention_ends_with_the_window_are_counted_in_one_warning(monkeypatch, caplog):
    model, request = Parrot(context=8, tokenizer=LETTERS), Request(input='-', format='jsonl', attention=True)
    monkeypatch.setattr(model, 'attention', lambda output: {'encoder': np.zeros((1, 1, 2, 2))})
    report = Report(model, scored=False)
    for number, answer in enumerate(model.generate(['ab', 'abcabca'], GREEDY), 1):
        answering.output_line(request, report, answer, number, 1, None)
    report.write()
    assert caplog.messages == ['1 of 2 texts have more than 8 tokens (config.data.context). Attention, pictures and '
                               'explanations include only the first 8 tokens of a text']


def test_bits_per_byte_are_those_of_float64_sums_and_count_bytes_of_any_tokenizer(caplog):
    text = 'a\u00e9\u20ac b\n' * 4
    caplog.set_level('INFO', logger='allyouneed')
    bpe = train_tokenizer([text] * 9, kind='bpe', vocab_size=268, split_digits=False, normalization='identity')
    for tokenizer in ByteTokenizer(), bpe:
        model = generator(tokenizer)
        whole = [BOS, *tokenizer.encode(text), EOS]
        apply, total = jax.jit(model.module.apply), 0.0
        for target in range(1, len(whole)):  # a window has 8 inputs, and each window begins with the last 4
            begin = max(0, (target - 5) // 4 * 4)
            read = np.pad(whole[begin:target], (0, 8 - target + begin))[None]
            logits = np.asarray(apply({'params': model.params}, read), np.float64)[0, target - begin - 1]
            total += logits[whole[target]] - np.log(np.exp(logits).sum())
        report = Report(model, scored=True)
        output, = outputs = model.forced_all([text])
        report.add(outputs)
        scores = report.scores(output)
        assert scores['bytes'] == len(text.encode()) == 36 and scores['characters'] == 24
        assert scores['bits_per_byte'] == pytest.approx(-total / math.log(2) / 36, rel=1e-5)
        assert scores['bits_per_character'] == pytest.approx(-total / math.log(2) / 24, rel=1e-5)
        assert scores['perplexity'] == pytest.approx(math.exp(-total / (len(whole) - 1)), rel=1e-5)
        assert (scores['window'], scores['stride']) == (8, 4)
        caplog.clear()
        report.write()
        assert caplog.messages == [
            f'1 text with 36 bytes, 24 characters and {len(whole) - 1} tokens (including end tokens): '
            f'{scores["bits_per_byte"]:.4f} bits per byte, {scores["bits_per_character"]:.4f} bits per character, '
            f'perplexity {scores["perplexity"]:.4f} per token. Windows have 8 tokens, and the stride is 4 tokens']


def test_a_perplexity_that_is_larger_than_any_number_is_null_in_json_and_a_limit_in_the_log(letters, caplog):
    caplog.set_level('INFO', logger='allyouneed')
    output = Output('', [BOS], [Hypothesis('a', [5], -2000.0, -2000.0)])
    report = Report(letters, scored=True)
    report.add([output])
    report.write()
    assert report.scores(output)['perplexity'] is None
    assert 'perplexity above 1.8e308 per token' in caplog.text


def test_a_score_over_texts_that_the_tokenizer_changes_is_reported_as_incomparable(letters, caplog):
    caplog.set_level('INFO', logger='allyouneed')
    report = Report(letters, scored=True)
    report.add(letters.forced_all(['a\u20ac', 'a', '']))
    report.write()
    warning = 'in 1 of 3 texts, the decoded tokens differ from the text. Do not compare bits per byte'
    assert any(message.startswith(warning) for message in caplog.messages)
    empty = Report(letters, scored=True)
    empty.add(letters.forced_all(['']))
    assert empty.scores(letters.forced_all([''])[0])['bits_per_byte'] is None


def test_documents_of_several_lines(tmp_path, monkeypatch):
    path = tmp_path / 'in.txt'
    path.write_bytes(b'\xef\xbb\xbfone\r\n\n\n  two\nthree\n')

    def read(kind, name=None):
        return list(input_texts(name or str(path), kind))

    assert read('line') == ['one', '', '', '  two', 'three']
    assert read('file') == ['one\r\n\n\n  two\nthree\n']
    assert read('blank_line') == ['one', '  two\nthree']
    path.write_text('"a\\nb"\n{"text": "c\\td", "id": 7}\n""\n')
    assert read('jsonl') == ['a\nb', 'c\td', '']
    for kind, expected in ('jsonl', ['a\nb', 'c\td', '']), ('file', [path.read_text()]):
        monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BytesIO(path.read_bytes())))
        assert read(kind, '-') == expected


@pytest.mark.parametrize('line', ['', 'text', '{"txt": "a"}', '[1]', '{"text": 1}', '"\\ud800"', '[' * 100_000])
def test_a_line_that_is_not_json_text_is_named(tmp_path, line):
    (tmp_path / 'in.jsonl').write_text(f'"a"\n{line}\n')
    with pytest.raises(UserError, match=r'in.jsonl:2: must be a JSON string or an object with a string "text", but is'):
        list(input_texts(str(tmp_path / 'in.jsonl'), 'jsonl'))


class Validation(DocumentData):
    """A split with given tokens and documents, whose text has six characters of one byte."""

    def __init__(self, batches, documents=()):
        self.batches, self.characters, self.bytes, self._texts = batches, 6, 6, documents

    def documents(self, split):
        return iter(self._texts)

    def plan(self, split, rows=None):
        return self

    def __len__(self):
        return len(self.batches)

    def batch(self, step):
        tokens = np.array(self.batches[step])
        return {'inputs': {'tokens': tokens[:, :-1]}, 'targets': tokens[:, 1:],
                'weights': np.ones(tokens[:, 1:].shape, np.float32)}


def test_unknown_characters_of_a_split_are_counted_in_its_results(letters, caplog):
    results, _ = letters.score(Validation([[[BOS, 5, UNK, 6]], [[UNK, UNK, 5, 5]]]), 'test', base.get_config(), GREEDY)
    assert results['unknown_tokens'] == 2 and 'test: 2 of 6 tokens are <unk>' in caplog.text
    results, _ = letters.score(Validation([[[BOS, 5, 6, 6]]]), 'test', base.get_config(), GREEDY)
    assert 'unknown_tokens' not in results


@pytest.mark.parametrize('method, count', [('greedy', 1), ('beam', 1), ('mbr', 1), ('sample', 3)])
def test_samples_of_a_split_are_several_only_if_they_can_differ(letters, method, count):
    options = dataclasses.replace(GREEDY, method=method, extra_length=2)
    results, table = letters.score(Validation([[[BOS, 5, 6, 6]]]), 'test', base.get_config(), options)
    assert len(results['samples']) == len(table) == count


def test_the_batch_size_bounds_the_windows_of_a_batch_and_does_not_change_the_scores(letters, tmp_path, monkeypatch):
    config, shapes, evaluate = shakespeare_char.get_config(), [], generate.evaluate
    config.update_from_flattened_dict({'cache_dir': str(tmp_path / 'cache'), 'data.file': str(tmp_path / 'text.txt'),
                                       'data.context': 8, 'batch.rows': 16})
    (tmp_path / 'text.txt').write_text('abc cab\n' * 100)
    data = DocumentData(config, None, ())  # the last 80 characters are for validation: 11 windows

    def recorded(step, params, batches):
        return evaluate(step, params, (shapes.append(batch['targets'].shape) or batch for batch in batches))

    monkeypatch.setattr(generate, 'evaluate', recorded)
    monkeypatch.setattr(letters, 'generate', lambda prompts, options: [])
    whole, small = (letters.score(data, 'validation', config, dataclasses.replace(GREEDY, batch_size=size))[0]
                    for size in (128, 2))
    assert shapes == [(16, 8), *[(2, 8)] * 6]
    for name in 'n', 'loss', 'perplexity', 'accuracy', 'bits_per_byte':
        assert small[name] == pytest.approx(whole[name], rel=1e-5)


def test_a_text_of_one_window_has_the_perplexity_that_its_split_has(tmp_path, monkeypatch):
    config = shakespeare_char.get_config()
    config.update_from_flattened_dict({
        'cache_dir': str(tmp_path / 'cache'), 'data.file': str(tmp_path / 'text.txt'), 'data.context': 8,
        'data.validation_share': 0.1})
    (tmp_path / 'text.txt').write_text('abc cab' * 10)  # the start token and the last 7 characters are 8 inputs
    data = DocumentData(config, None, ())
    model = generator(data.tokenizers['text'])
    monkeypatch.setattr(model, 'generate', lambda prompts, options: [])
    results, _ = model.score(data, 'validation', config, GREEDY)
    text, = data.documents('validation')
    scores = Report(model, scored=True).scores(model.forced_all([text])[0])
    assert (text, results['n']) == ('abc cab', 8)
    assert scores['perplexity'] == pytest.approx(results['perplexity'], rel=1e-5)


def test_a_list_of_words_to_avoid_that_is_too_long_is_refused_before_a_split_is_read(letters, monkeypatch):
    monkeypatch.setattr(constraints, 'MAX_ENTRIES', 10)
    data = Validation([])
    data.plan = lambda *arguments: pytest.fail('the split is read')
    with pytest.raises(UserError, match='the table for 1 phrases is too large'):
        letters.score(data, 'test', base.get_config(), dataclasses.replace(GREEDY, avoid=('ab',)))


@pytest.mark.slow
def test_a_split_whose_documents_the_tokenizer_changes_is_reported_as_incomparable(caplog, monkeypatch):
    folded = train_tokenizer(['Abc abc.'] * 9, kind='bpe', vocab_size=266, split_digits=False, normalization='nfkc_cf')
    split = Validation([[[BOS, 5, 6, 6]]], ['abc', 'Abc', 'abc'])
    generator(folded).score(split, 'test', base.get_config(), GREEDY)
    assert caplog.messages == ['test: in 1 of 3 documents, the decoded tokens differ from the text. Do not compare '
                               'bits per byte or per character with other models']
    monkeypatch.setattr('inference.generate.COMPARED', 5)
    assert Parrot(tokenizer=folded)._changes(['abc', 'a Bc', 'Abc']) == '', 'only the first 5 characters are compared'


@pytest.mark.parametrize('characters, whole, documents, opening', [
    ('\n abc', False, 'file', '\n'), ('\n abc', False, 'blank_line', '\n'), ('\n abc', False, 'line', ''),
    (' abc', False, 'file', ''), ('\n abc', True, 'file', '')])
def test_a_sample_begins_with_a_line_feed_only_if_the_model_has_been_trained_on_line_feeds(
        characters, whole, documents, opening):
    tokenizer = CharTokenizer(json.dumps({'kind': 'char', 'characters': characters}).encode())
    data = base.get_config().data
    data.documents = documents
    assert Parrot(whole_documents=whole, tokenizer=tokenizer).opening(data) == opening


@pytest.mark.parametrize('packing', ['contiguous', 'packed'])
def test_the_examples_of_a_split_are_its_first_documents_in_parts_that_fit_into_a_window(tmp_path, packing):
    config = shakespeare_char.get_config()
    config.update_from_flattened_dict({
        'cache_dir': str(tmp_path / 'cache'), 'data.file': str(tmp_path / 'text.txt'), 'data.context': 4,
        'data.documents': 'line', 'data.packing': packing, 'data.validation_share': 0.1})
    (tmp_path / 'text.txt').write_text('a\n\nabcabc c\nbca\nbcab\n' + 'c\n' * 20)
    data = DocumentData(config, None, ())
    model = Parrot(context=4, tokenizer=data.tokenizers['text'])
    found = [output for output, _ in model.examples(data, 'train', 6, GREEDY)]
    assert [output.source for output in found] == ['a', 'abc', 'abc ', 'bca', 'bca', 'c']  # without two single tokens
    assert [output.source_tokens for output in found] == [
        [BOS] * begins + model.tokenizers['source'].encode(output.source)
        for output, begins in zip(found, [1, 1, 0, 1, 1, 1], strict=True)]
    assert [output.source for output, _ in model.examples(data, 'train', 2, GREEDY)] == ['a', 'abc']
