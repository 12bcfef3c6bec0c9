"""Log-probabilities of given translations and texts, compared with float64 sums for each text separately."""

import dataclasses
import json
import re
import sys
import tarfile
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import inference
from inference import forced as forced_module
from inference.columns import score_all, translate_all
from inference.generate import Generator
from inference.options import SearchOptions
from inference.outputs import Hypothesis, Output
from inference.predictions import Predictions
from inference.tables import to_pandas
from inference.translate import Translator
from input_pipeline.input_format import InputFormat
from input_pipeline.preprocessing import Preprocessing
from input_pipeline.tokenizer import BOS, EOS, CharTokenizer, train_tokenizer
from model.blocks import BlockConfig
from model.language_model import LanguageModel
from model.transformer import Transformer
from runtime.errors import UserError
from tests.scripts import script

TOKENIZER = CharTokenizer(json.dumps({'kind': 'char', 'characters': 'abc'}).encode())
SIZE = len(TOKENIZER)
BLOCKS = BlockConfig(d_model=16, d_ff=32, num_heads=2)
TABLES = types.SimpleNamespace(DataFrame=lambda rows, columns: [  # used in place of pandas
    dict(zip(columns, row, strict=True)) for row in rows] or columns)


def parameters(module, *ones):
    return jax.tree.map(lambda leaf: 1.5 * leaf, jax.jit(module.init)(jax.random.key(0), *ones)['params'])


@pytest.fixture(scope='module')
def translating():
    module, ones = Transformer(BLOCKS, 1, SIZE, SIZE), np.ones((1, 4), np.int32)
    return Translator(module, parameters(module, ones, ones), dict.fromkeys(('source', 'target'), TOKENIZER), 12)


@pytest.fixture(scope='module')
def generating():
    module = LanguageModel(dataclasses.replace(BLOCKS, position='rotary'), 1, SIZE)
    return Generator(module, parameters(module, np.ones((1, 4), np.int32)), TOKENIZER, 8, True)


def summed(model, targets, **inputs):
    """log p of each of the last targets, in float64."""
    width = 48
    padded = {name: np.array([[*row, *[0] * (width - len(row))]]) for name, row in inputs.items()}
    logits = np.asarray(jax.jit(model.module.apply)({'params': model.params}, **padded), np.float64)[0]
    begin = len(inputs.get('target', inputs.get('tokens', ()))) - len(targets)
    rows = logits[begin:begin + len(targets)]
    return (rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True)))[np.arange(len(targets)), targets].sum()


def texts(count, most):
    rng = np.random.default_rng(count)
    return [''.join(rng.choice(list('abc'), rng.integers(0, most))) for _ in range(count)]


@pytest.mark.slow
def test_pairs_in_batches_have_the_log_probabilities_of_single_pairs(translating, monkeypatch):
    monkeypatch.setattr(forced_module, 'TOKENS', 64)  # long ones are fewer at a time
    pairs = list(zip(texts(21, 9), texts(20, 30) + [''], strict=True))
    outputs = translating.forced_all(pairs, SearchOptions(alpha=0.6, batch_size=8))
    for output, (source, target) in zip(outputs, pairs, strict=True):
        written = [*TOKENIZER.encode(target), EOS]
        expected = summed(translating, written, source=[*TOKENIZER.encode(source), EOS], target=[BOS, *written[:-1]])
        [hypothesis] = output.hypotheses
        assert (output.source, hypothesis.text) == (source, target)
        assert hypothesis.log_prob == pytest.approx(expected, abs=1e-4)
        assert hypothesis.score == pytest.approx(expected / ((5 + len(written)) / 6) ** 0.6, abs=1e-4)
    for found in translating.translate([source for source, _ in pairs if source], SearchOptions(beam=2)):
        assert translating.forced(found.source, found.text).hypotheses[0].log_prob == pytest.approx(
            found.hypotheses[0].log_prob, abs=1e-3)


@pytest.mark.slow
def test_an_empty_text_of_subwords_has_only_the_end_token():
    tokenizer = train_tokenizer(['the cat and the dog'] * 9, kind='bpe', vocab_size=275, split_digits=False,
                                normalization='identity')
    size, ones = len(tokenizer), np.ones((1, 4), np.int32)
    module = Transformer(BLOCKS, 1, size, size)
    translator = Translator(module, parameters(module, ones, ones), dict.fromkeys(('source', 'target'), tokenizer), 12)
    pairs = [('the dog', ''), ('', ''), ('', 'the')]
    outputs = translator.forced_all(pairs)
    for output, (source, target) in zip(outputs, pairs, strict=True):
        read, written = ([*(tokenizer.encode(text) if text else []), EOS] for text in (source, target))
        expected = summed(translator, written, source=read, target=[BOS, *written[:-1]])
        assert output.hypotheses[0].log_prob == pytest.approx(expected, abs=1e-4)
    assert translator.perplexity(translator.encoded(pairs[:1]), 8) == pytest.approx(
        np.exp(-outputs[0].hypotheses[0].log_prob), rel=1e-4)
    module = LanguageModel(BLOCKS, 1, size)
    generator = Generator(module, parameters(module, ones), tokenizer, 8, True)
    empty, = generator.forced_all([''])
    assert empty.hypotheses[0].log_prob == pytest.approx(summed(generator, [EOS], tokens=[BOS]), abs=1e-4)


@pytest.mark.slow
def test_a_text_is_scored_window_by_window(generating):
    """A window has 8 inputs; then each of 4 more targets is predicted from at least 5 tokens."""
    lines = ['', 'a', 'abcabc', 'abcabca', 'abcabcab', *texts(9, 30)]
    for output, line in zip(generating.forced_all(lines, SearchOptions(batch_size=4)), lines, strict=True):
        whole = [BOS, *TOKENIZER.encode(line), EOS]
        expected = summed(generating, whole[1:9], tokens=whole[:9][:-1])
        for begin in range(9, len(whole), 4):
            expected += summed(generating, whole[begin:begin + 4], tokens=whole[begin - 5:begin + 4][:-1])
        assert output.hypotheses[0].log_prob == pytest.approx(expected, abs=1e-4)
        assert (output.hypotheses[0].text, output.hypotheses[0].ended) == (line, True)


@pytest.mark.slow
def test_lines_of_two_columns(translating, generating):
    options = SearchOptions(method='greedy', batch_size=1, extra_length=3)
    found = [output for part in score_all(translating, iter(['a\tb', '\tc', 'c\t']), options, '-') for output in part]
    assert [(output.source, output.text) for output in found] == [('a', 'b'), ('', 'c'), ('c', '')]
    found = [output for part in translate_all(translating, iter(['a\tbb', 'b\t', '\t']), options, '-')
             for output in part]
    assert found[0].text.startswith('bb') and found[1].text == translating.translate(['b'], options)[0].text
    assert found[2].text == ''
    for lines in (['a\tb', 'ab'], ['a\tb', 'a\tb\tc']):
        with pytest.raises(UserError, match='in.tsv:2: a line must be SOURCE<tab>TARGET, .* this line has [02] tabs'):
            list(score_all(translating, iter(lines), options, 'in.tsv'))
    parts = score_all(generating, iter(['a', '']), options, '-')
    assert [output.text for part in parts for output in part] == ['a', '']


def test_a_target_longer_than_a_translation_is_named(translating):
    assert translating.forced_all([('a', 'b' * 15)], SearchOptions(extra_length=4))
    with pytest.raises(UserError, match='line 7: this translation has 16 tokens, but at most 16 can be scored'):
        translating.forced_all([('a', 'b'), ('a', 'b' * 16)], SearchOptions(extra_length=4), first=5)


@pytest.mark.slow
def test_the_command_line_scores_and_the_repr_of_a_run_describes_it(tmp_path):
    with tarfile.open(Path(__file__).parents[1] / 'runs/first.tar.gz') as archive:
        archive.extractall(tmp_path, filter='data')
    (tmp_path / 'in.tsv').write_text('one two\ttwo one\none\t\nsix\tone six five\n')
    done = script('decode.py', f'--workdir={tmp_path}/run', f'--input={tmp_path}/in.tsv', '--score')
    assert done.returncode == 0, done.stderr.decode()
    run = inference.load(tmp_path / 'run')
    text = repr(run)
    assert '\n' not in text and all(part in text for part in ('translation', 'transformer', 'parameters', '6', 'run'))
    pairs = [line.split('\t') for line in (tmp_path / 'in.tsv').read_text().splitlines()]
    outputs = run.forced([(source, target) for source, target in pairs])
    assert [float(line) for line in done.stdout.split()] == pytest.approx(
        [output.hypotheses[0].log_prob for output in outputs], abs=1e-4)
    assert all(re.fullmatch(rb'-\d+\.\d{6}', line) for line in done.stdout.split())
    command = 'decode.py', f'--workdir={tmp_path}/run', f'--input={tmp_path}/in.tsv', '--score', '--format=jsonl'
    lines = [json.loads(line) for line in script(*command).stdout.splitlines()]
    assert [(line.pop('source'), line.pop('text')) for line in lines] == [(source, target) for source, target in pairs]
    assert all(line.keys() == {'log_prob', 'score'} for line in lines)
    for line in map(json.loads, script(*command, '--attention').stdout.splitlines()):
        assert 'attention' not in line or np.shape(line['attention'])[2:] == (
            len(line['tokens']) + 1, len(line['source_tokens']) + 1)


def test_a_table_of_outputs(monkeypatch):
    outputs = [Output('a', [4], [Hypothesis('b', [5], -1.0, -0.5), Hypothesis('', [], -2.0, -1.5, False)])]
    monkeypatch.setitem(sys.modules, 'pandas', None)
    with pytest.raises(UserError, match='pip install pandas'):
        to_pandas(outputs)
    monkeypatch.setitem(sys.modules, 'pandas', TABLES)
    assert to_pandas(outputs) == [
        {'line': 1, 'rank': 1, 'source': 'a', 'text': 'b', 'tokens': 1, 'log_prob': -1.0, 'score': -0.5, 'ended': True},
        {'line': 1, 'rank': 2, 'source': 'a', 'text': '', 'tokens': 0, 'log_prob': -2.0, 'score': -1.5, 'ended': False}]


@pytest.mark.parametrize('names, outputs, rows', [
    ({'classes': ('a', 'name')}, np.log([[0.25, 0.75], [0.5, 0.5]]), [
        {'name': 'first', 'label': 'name', 'probability_a': 0.25, 'probability_name': 0.75},
        {'name': '', 'label': 'a', 'probability_a': 0.5, 'probability_name': 0.5}]),
    ({'targets': ('x+1', 'x+2')}, np.array([[1.0, 2.0], [3.0, 4.0]]), [
        {'name': 'first', 'value_x+1': 1.0, 'value_x+2': 2.0}, {'name': '', 'value_x+1': 3.0, 'value_x+2': 4.0}]),
])
def test_a_table_of_predictions_has_the_probability_of_each_class_or_the_values(monkeypatch, names, outputs, rows):
    monkeypatch.setitem(sys.modules, 'pandas', TABLES)
    form = InputFormat((1, 1), Preprocessing([0.0], [1.0], None, None), **names)
    predictions = Predictions(np.zeros((2, 1, 1)), outputs, form, ['first', ''])
    assert to_pandas(predictions) == to_pandas(list(predictions)) == list(map(pytest.approx, rows))
    assert to_pandas(predictions[:0]) == list(rows[0])
