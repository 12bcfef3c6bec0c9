"""Edits at places: searches and teacher forcing with edits agree, and each edit has its documented effect."""

import copy
import dataclasses
import json
import re
import types
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from inference import inspection
from inference.editor import Editor
from inference.edits import Edit, check_without, read_edits, without
from inference.options import SearchOptions
from inference.outputs import Hypothesis, Output
from inference.run import Run
from model.places import EDITS, SEQUENCE, At
from runtime.errors import UserError
from tests.random_run import random_run

SENTENCES = ['one two', 'a', 'three words here', 'and a longer sentence of words']
OPTIONS = SearchOptions(extra_length=4, batch_size=16, n_best=2, beam=3)
CROSS = 'decoder/layers_1/cross_attention'
VECTOR = np.linspace(-1, 1, 8).tolist()


def turned(value, at):
    """An edit that depends on the position of each token."""
    return value * (1 + at.positions[:, :, None] % 3)


BATTERY = {
    'transformer': [
        Edit('zero', f'{CROSS}/heads', heads=[1]), Edit('add', 'decoder/layers_0', VECTOR, positions=[1, 2]),
        Edit('freeze', 'decoder/layers_0/self_attention/weights', 'first', heads=[0]),
        Edit('freeze', 'decoder/layers_1/self_attention/weights', 'uniform'),
        Edit('freeze', 'decoder/layers_0/cross_attention/weights', [[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]),
        Edit('replace', 'decoder/layers_1/self_attention/keys', 'another sentence', heads=[0], positions=[0, 2]),
        Edit('mean', 'encoder/layers_1/feed_forward', ['a corpus', 'of three', 'texts']),
        Edit(turned, 'decoder/layers_1/feed_forward/hidden'), Edit('scale', 'decoder', 1.5)],
    'rnnsearch': [
        Edit('scale', 'encoder/backward', 0.5), Edit('add', 'decoder/layers_0/cell', [0.5] * 6, positions=[1]),
        Edit('freeze', 'decoder/layers_0/cross_attention/weights', 'uniform', positions=[0, 3]),
        Edit('replace', 'decoder/layers_0/cross_attention/heads', 'another sentence', positions=[2]),
        Edit(turned, 'readout'), Edit('zero', 'decoder/initial')],
    'language_model': [
        Edit('zero', 'encoder/layers_0/self_attention/heads', heads=[0]), Edit('add', 'encoder/input', VECTOR),
        Edit('freeze', 'encoder/layers_1/self_attention/weights', 'uniform', heads=[1]),
        Edit('replace', 'encoder/layers_0', 'another text', positions=[1, 5, 9]),
        Edit(turned, 'encoder/layers_1/feed_forward'), Edit('scale', 'encoder/layers_1/self_attention/values', 2.0)],
}


@pytest.fixture(scope='module')
def runs():
    return {kind: random_run(kind) for kind in ('transformer', 'rnnsearch', 'language_model', 'patches')}


@pytest.mark.slow
@pytest.mark.parametrize('kind, method', [
    ('transformer', 'beam'), ('language_model', 'sample'), ('rnnsearch', 'beam'), ('language_model', 'beam')])
def test_a_search_under_edits_is_teacher_forcing_under_the_same_edits(kind, method, runs):
    options = dataclasses.replace(OPTIONS, method=method)
    plain, edited = runs[kind], runs[kind].edited(BATTERY[kind])
    if kind == 'language_model':
        outputs = edited.generate(SENTENCES, options)
        pairs = [([*output.source_tokens], each) for output in outputs for each in output.hypotheses]
        log_probs = [scored(edited, before, each) for before, each in pairs]
        before = [scored(plain, before, each) for before, each in pairs]
    else:
        outputs = edited.translate(SENTENCES, options)
        pairs = [(output.source_tokens, each) for output in outputs for each in output.hypotheses]
        log_probs, before = (list(map(sum, run.model.token_log_probs(
            [(source, each.tokens) for source, each in pairs]))) for run in (edited, plain))
    found = [each.log_prob for _, each in pairs]
    np.testing.assert_allclose(found, log_probs, atol=1e-4, rtol=1e-4)
    assert np.abs(np.subtract(log_probs, before)).min() > 1e-3, 'the edits change every sentence'


@pytest.mark.slow
def test_the_identity_changes_no_bit_of_a_search():
    """The search has several cache sizes, because the cache grows."""
    sentences = ['a long sentence with many letters, so that the cache has unused keys', *SENTENCES]
    plain = random_run('transformer')
    edited = plain.edited([Edit(lambda value, at: value, '*')])
    assert plain.translate(sentences, OPTIONS) == edited.translate(sentences, OPTIONS)


def scored(run, before, hypothesis):
    """The log-probability of a continuation by teacher forcing."""
    tokens = [*before, *hypothesis.tokens, *([2] if hypothesis.ended else [])]
    logits = jax.jit(run.model.module.apply)({'params': run.model.params}, np.array([tokens[:-1]]))
    log_probs = jax.nn.log_softmax(logits)[0, np.arange(len(tokens) - 1), np.array(tokens[1:])]
    return float(log_probs[len(before) - 1:].sum())


@pytest.mark.slow
def test_documents_of_one_row_are_edited_like_separate_rows(runs):
    weights = 'encoder/layers_1/self_attention/weights'
    edited = runs['language_model'].edited([
        Edit('freeze', weights, 'first', heads=[0]), Edit('freeze', weights, [[1.0, 0.0], [0.5, 0.5]], heads=[1]),
        Edit('add', 'encoder/layers_0', VECTOR, positions=[1])])
    tokens, apply = np.array([[1, 7, 8, 9, 1, 9, 5, 6]]), jax.jit(edited.model.module.apply)
    packed = apply({'params': edited.model.params}, tokens, np.array([[1] * 4 + [2] * 4]), np.array([[0, 1, 2, 3] * 2]))
    separate = apply({'params': edited.model.params}, tokens.reshape(2, 4))
    np.testing.assert_allclose(packed.reshape(separate.shape), separate, atol=1e-5)


def test_messages_name_the_run_of_an_edited_model(runs):
    run = runs['transformer']
    assert run.edited([Edit('zero', 'encoder')]).model.name == run.model.name == str(run.workdir)


@pytest.mark.slow
def test_the_order_of_edits_changes_no_bit(runs):
    edits = [*BATTERY['transformer'], Edit('add', 'decoder', [0.1] * 8), Edit('add', 'decoder', VECTOR),
             Edit('scale', 'decoder', 0.3), Edit('zero', 'decoder', positions=[1])]
    one, other, twice = (run.forced([('a source', 'a target')])[0].hypotheses[0].log_prob for run in (
        runs['transformer'].edited(edits), runs['transformer'].edited(edits[::-1]),
        runs['transformer'].edited(edits[5:]).edited(edits[:5])))
    assert one == other == twice


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('kind', ['cross', 'encoder', 'decoder'])
def test_a_head_set_to_zero_is_a_head_without_its_rows_of_the_output_projection(kind, runs):
    edit, run = without(f'{kind}:2:1'), runs['transformer']
    path = *edit.place.split('/')[:-1], 'output', 'kernel'
    params = flatten_dict(run.model.params)
    params[path] = params[path].at[0].set(0)
    edited = run.edited([edit])
    inputs = np.array([[5, 6, 2]]), np.array([[1, 9, 8, 7]])
    logits = jax.jit(edited.model.module.apply)({'params': edited.model.params}, *inputs)
    expected = jax.jit(run.model.module.apply)({'params': unflatten_dict(params)}, *inputs)
    np.testing.assert_allclose(logits, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize('heads, message', [
    ('cross:9:1', '--without=cross:9:1: the model has 2 layers of this kind. Use a layer from 1 to 2'),
    ('cross:1:1,99', '--without=cross:1:1,99: this layer has 2 heads. Use heads from 1 to 2')])
def test_heads_that_do_not_exist_cannot_be_set_to_zero(heads, message, runs):
    with pytest.raises(UserError) as refused:
        check_without(heads, runs['transformer'].places())
    assert str(refused.value) == message


def test_heads_of_an_ensemble_are_named():
    with pytest.raises(UserError, match='--edit with a place of this model, such as members_0/encoder/layers_0/heads'):
        check_without('cross:1:1', {'members_0/encoder/layers_0/heads': {'head': 2}})


@pytest.mark.slow
def test_a_sentence_patched_with_itself_is_unchanged(runs):
    pair, run = ('one two', 'three'), runs['transformer']
    patches = [Edit('replace', place, pair) for place in ('encoder', 'decoder/layers_0', '*/weights', '*/heads')]
    one, other = (each.inspect([pair], 'decoder')[0]['decoder'] for each in (run, run.edited(patches)))
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
def test_with_the_encoder_patched_the_translation_is_that_of_the_other_sentence(runs):
    one, other = 'ab cd', 'xy zw'  # of one length
    run = runs['transformer']
    edited = run.edited([Edit('replace', 'encoder', other)])
    assert edited.translate([one], OPTIONS)[0].hypotheses == run.translate([other], OPTIONS)[0].hypotheses


@pytest.mark.slow
def test_with_the_values_of_the_output_for_another_prompt_a_search_finds_that_output(runs):
    """A prompt has no start token here, so a text in place of the output would be shifted by one position."""
    run, options = runs['language_model'], SearchOptions(method='greedy', extra_length=3)
    other, = run.generate(['ab cd'], options)
    found, = run.edited([Edit('replace', 'encoder/layers_1', other)]).generate(['xy zw'], options)
    assert found.hypotheses[0].tokens == other.hypotheses[0].tokens
    assert found.hypotheses[0].log_prob == pytest.approx(other.hypotheses[0].log_prob, abs=1e-4)


@pytest.mark.slow
def test_with_the_values_of_another_prompt_a_search_finds_the_next_token_of_that_prompt():
    run, options = random_run('language_model'), SearchOptions(method='greedy', extra_length=1)
    run.config.data.packing, run.model.whole_documents = 'packed', True  # a search reads the start token, too
    other, = run.generate(['ab cd'], options)
    found, = run.edited([Edit('replace', 'encoder', 'ab cd')]).generate(['xy zw'], options)
    assert found.hypotheses[0].tokens == other.hypotheses[0].tokens
    assert found.hypotheses[0].log_prob == pytest.approx(other.hypotheses[0].log_prob, abs=1e-4)


def test_a_sentence_patched_with_itself_is_unchanged_in_a_run_that_was_trained_with_edits(runs):
    trained, pair = runs['transformer']._trained, ('one two', 'three')
    config = trained.config.copy_and_resolve_references()
    config.train.edits = json.dumps([Edit('scale', 'encoder/layers_0', 0.5).as_json()])
    run = Run(trained._replace(config=config))
    patched = run.edited([Edit('replace', place, pair) for place in ('encoder/layers_0', 'encoder')])
    assert [each.edit for each in patched.edits] == ['scale', 'replace', 'replace']
    plain, one, other = (each.forced([pair])[0].hypotheses[0].log_prob for each in (runs['transformer'], run, patched))
    assert one == pytest.approx(other, abs=1e-4) and abs(one - plain) > 1e-3


def test_numbers_are_added_only_to_the_weights_of_visible_keys(runs):
    edited = runs['transformer'].edited([Edit('add', '*/self_attention/weights', 0.1)])
    one, other = edited.model.token_log_probs([([5, 6], [9, 8, 7]), ([5, 6], [9, 4])])
    assert one[0] == pytest.approx(other[0], abs=1e-5)


def test_a_vector_is_added_to_the_value_of_each_token(runs):
    [plain], [edited] = (run.inspect([('abc', 'x')], 'encoder/layers_0') for run in (
        runs['transformer'], runs['transformer'].edited([Edit('add', 'encoder/layers_0', VECTOR)])))
    np.testing.assert_allclose(edited['encoder/layers_0'], plain['encoder/layers_0'].values + VECTOR, atol=1e-5)


def test_a_frozen_query_attends_only_to_the_first_token_if_it_sees_this_token():
    place = 'encoder/layers_0/self_attention/weights'
    edited = random_run('language_model', num_layers=1, window=2).edited([Edit('freeze', place, 'first')])
    weights = edited.inspect(['abc'], place)[0][place].values
    expected = np.zeros((2, 4, 4))
    expected[:, :2, 0] = 1  # with a window of 2 tokens, the queries 2 and 3 do not see the first token
    np.testing.assert_array_equal(weights, expected)


def test_scores_of_keys_after_the_end_of_the_other_text_are_unchanged(runs):
    run, place = runs['transformer'], 'decoder/layers_0/cross_attention/scores'
    pair, shorter = ('abcdef', 'x'), ('gh', 'y')
    plain, new = (values[place].values for values in run.inspect([pair, shorter], place))
    patched = run.edited([Edit('replace', place, shorter)]).inspect([pair], place)[0][place].values
    np.testing.assert_allclose(patched, np.concatenate([new, plain[..., 3:]], axis=-1), atol=1e-5)


def test_a_mean_is_that_of_all_tokens_of_the_corpus(runs, monkeypatch):
    corpus = [('a', 'bc'), ('defg', 'h')]
    values = runs['transformer'].inspect(corpus, 'decoder/layers_0')
    mean = np.concatenate([each['decoder/layers_0'].values for each in values]).mean(axis=0)
    monkeypatch.setattr(inspection, '_gigabytes', lambda *arguments: inspection.MOST_GB)  # no limit for the corpus
    edited = runs['transformer'].edited([Edit('mean', 'decoder/layers_0', corpus)])
    patched, = edited.inspect([('x', 'y')], 'decoder/layers_0')
    np.testing.assert_allclose(patched['decoder/layers_0'].values, np.tile(mean, (2, 1)), atol=1e-5)


def test_the_mean_over_test_includes_all_test_sets_and_long_references(runs):
    run, place, sets = copy.copy(runs['transformer']), 'decoder/layers_0', {
        'one': [('a', 'bc')], 'two': [('defg', 'h' * 150)]}
    run.config = run.config.copy_and_resolve_references()
    run.config.data.splits.test = 'one,two'
    run.data = lambda: types.SimpleNamespace(pairs=sets.__getitem__)
    texts = run.model.references([*sets['one'], *sets['two']])
    mean, expected = (run.edited([Edit('mean', place, by)])._numbers[-1][place] for by in ('test', texts))
    np.testing.assert_allclose(mean, expected, rtol=1e-6)


def test_an_array_that_is_changed_later_does_not_change_the_edited_model(runs):
    numbers = np.ones(8, np.float32)
    edited = runs['transformer'].edited([Edit('add', 'decoder', numbers)])
    numbers += 1
    for run in edited, edited.edited([Edit('zero', 'encoder')]):
        np.testing.assert_array_equal(run.model.params[EDITS][-1]['decoder'], np.ones(8))


@pytest.mark.slow
def test_weights_are_scaled_by_a_number_for_each_head(runs):
    place, scales = f'{CROSS}/weights', [[[0.5]], [[2.0]]]
    [plain], [scaled] = (run.inspect([('a', 'bc')], place) for run in (
        runs['transformer'], runs['transformer'].edited([Edit('scale', place, scales)])))
    np.testing.assert_allclose(scaled[place].values, plain[place].values * np.array(scales), rtol=1e-6)


def test_images_and_inputs_of_another_form_are_refused(runs):
    run = runs['patches']
    with pytest.raises(UserError, match="^edit 'replace' at pooled: by='a': the model reads no text. Use numbers"):
        run.edited([Edit('replace', 'pooled', 'a')])
    with pytest.raises(UserError, match=r'^inputs have the shape \(2, 4, 4, 1\), but the model reads'):
        run.inspect(np.zeros((2, 4, 4, 1)), 'encoder')


@pytest.mark.parametrize('edit, message', [
    (('replace', 'encoder', np.zeros((17, 8))), r'have the shape \[17, 8\], but the place has \[16, 8\]'),
    (('zero', 'encoder', None, None, [1, 16]),
     r'at encoder: positions=\[1, 16\]: this place has only 16 positions. Use positions from 0 to 15'),
    (('zero', 'pooled', None, None, [0]), 'the value at this place belongs to the whole input. Remove "positions"'),
    (('freeze', '*_0/*/weights', 'first', None, [16]), r'/weights: positions=\[16\]: this place has only 16 positions'),
    (('freeze', '*_0/*/weights', np.zeros((17, 1))), r'the shape \[17, 1\], but the place has \[2, 16, 16\]'),
    (('freeze', '*_0/*/weights', np.zeros((2, 1, 17))), r'the shape \[2, 1, 17\], but the place has \[2, 16, 16\]')])
def test_positions_that_no_image_has_are_refused(edit, message, runs):
    with pytest.raises(UserError, match=message):
        runs['patches'].edited([Edit(*edit)])


@pytest.mark.slow
def test_the_last_position_of_an_image_and_a_part_of_its_positions_can_be_edited(runs):
    edits = [Edit('replace', 'encoder', np.zeros((1, 8))), Edit('zero', 'embedding', positions=[15]),
             Edit('replace', 'pooled', [0.0] * 8)]
    assert len(runs['patches'].edited(edits).edits) == 3


@pytest.mark.slow
def test_images_are_edited_too(runs):
    images = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype(np.float32)
    run = runs['patches']
    values = run.inspect(images, ['pooled', 'encoder/layers_1'])
    edited = run.edited([Edit('replace', 'pooled', values[1]['pooled'].values)])
    np.testing.assert_allclose(
        edited.predict(images).outputs, np.tile(run.predict(images[1:2]).outputs, (3, 1)), atol=1e-5)


@pytest.mark.slow
def test_other_numbers_compile_nothing(runs):
    edited = runs['transformer'].edited([Edit('scale', 'decoder', 2.0)])
    pair = [('a', 'b')]
    one = edited.forced(pair)[0].hypotheses[0].log_prob
    with jax.log_compiles(False):
        edited.model.params = {**edited.model.params, EDITS: [{'decoder': np.float32(1)}]}
        sizes = edited.model.target_log_probs._cache_size()
        assert edited.forced(pair)[0].hypotheses[0].log_prob == pytest.approx(
            runs['transformer'].forced(pair)[0].hypotheses[0].log_prob, abs=1e-5) != one
    assert edited.model.target_log_probs._cache_size() == sizes


def test_edits_in_json_are_the_edits_of_python(tmp_path):
    edits = [Edit('zero', f'{CROSS}/heads', heads=[1, 2]), Edit('add', 'decoder', VECTOR),
             Edit('replace', 'encoder', 'a')]
    (tmp_path / 'edits.json').write_text(json.dumps([each.as_json() for each in edits]))
    assert read_edits(str(tmp_path / 'edits.json')) == edits
    assert without('cross:2:2,3') == edits[0]


@pytest.mark.parametrize('by, expected', [
    (Output('a', [5], [Hypothesis('b', [6], 0.0, 0.0)]), ['a', 'b']),
    ([Output('a', [5], [Hypothesis('b', [6], 0.0, 0.0)]), 'c', ('d', 'e')], [['a', 'b'], 'c', ['d', 'e']]),
    (np.ones((1, 2), np.float32), [[1.0, 1.0]]), ([np.float32(1), np.int32(2)], [1.0, 2])])
def test_texts_outputs_and_arrays_of_an_edit_are_written_to_json(by, expected):
    assert json.loads(json.dumps(Edit('mean', 'encoder', by).as_json()))['by'] == expected


@pytest.mark.parametrize('edit, message', [
    (('zero', 'decoder/layer_1'), "place 'decoder/layer_1': the model has no such place. Did you mean decoder/"),
    (('zero', 'decoder/layers_7/*'), "place 'decoder/layers_7/.': the model has no such place. Did you mean decoder/l"),
    (('zero', f'{CROSS}/heads', None, [2]), 'there is no head 2. Use numbers from 0 to 1'),
    (('zero', 'decoder', None, [0]), 'the values at this place are not split into heads'),
    (('zero', 'decoder', None, None, [-1]), r'positions=\[-1\] must be at least 0'),
    (('zer', 'decoder'), "there is no edit 'zer'. Did you mean zero"),
    (('zero', 'decoder', 3), '"by" has no effect'),
    ((turned, 'decoder', VECTOR), '^the function at decoder: "by" has no effect. Remove "by"'),
    (('scale', 'decoder'), '"by" is missing'),
    (('add', 'decoder', [1.0, 2.0]),
     r"edit 'add' at decoder: the numbers have the shape \[2\], but the place has \[8\]. Use numbers of this shape"),
    (('replace', 'decoder', [[1.0, 2.0]]), r'the numbers have the shape \[1, 2\], but the place has \[position, 8\]'),
    (('freeze', f'{CROSS}/weights', [1.0]), r'have the shape \[1\], but the place has \[2, query, key\]'),
    (('freeze', 'decoder', 'uniform'), 'only attention weights can be frozen'),
    (('freeze', f'{CROSS}/weights', 'unifrom'), "by='unifrom' must be an array of numbers, or one of uniform, first"),
    (('mean', f'{CROSS}/weights', ['a', 'bc']), 'attention weights cannot be averaged over inputs'),
    (('zero', f'{CROSS}/heads', None, [True]), r'heads=\[True\] must be a list of whole numbers'),
    (('zero', f'{CROSS}/heads', None, []), rf'at {CROSS}/heads: heads=\[\] selects nothing'),
    (('zero', 'decoder', None, None, []), r'positions=\[\] selects nothing'),
    (('zero', 'decoder', None, None, [2 ** 40]), r'positions=\[1099511627776\] must be a list of whole numbers'),
    (('scale', 'decoder', 'abc'), 'by=abc must be a finite number, or a rectangular array of finite numbers'),
    (('scale', 'decoder', {'a': 1}), 'must be a finite number'),
    (('scale', 'decoder', True), 'by=True must be a finite number'),
    (('scale', 'decoder', 10 ** 400), 'must be a finite number'),
    (('scale', 'decoder', float('nan')), 'by=nan must be a finite number'),
    (('add', 'decoder', [[1.0, 2.0], [3.0]]), 'or a rectangular array of finite numbers'),
    (('add', 'decoder', [None] * 8), 'must be a finite number'),
    (('scale', f'{CROSS}/weights', [0.5, 1.0]), r'have the shape \[2\], but the place has \[2, 1, 1\]'),
    (('replace', 'decoder', np.zeros((0, 8))), r'have the shape \[0, 8\], but the place has \[position, 8\]'),
    (('freeze', f'{CROSS}/weights', np.zeros((2, 0))), r'have the shape \[2, 0\], but the place has \[2, query, key\]'),
    (('replace', 'decoder', ['a', 'b', 'c']), r'^text 1 is .* must be a source, a pair \(source, target\)'),
    (('mean', 'decoder', ['a', 1]), "^text 2 is '1': must be a source"),
    (('mean', 'decoder', 'vaildation'), "^edit 'mean': by=vaildation must be one of train, validation, test")])
def test_an_impossible_edit_is_refused_in_one_line(edit, message, runs):
    with pytest.raises(UserError, match=message) as error:
        runs['transformer'].edited([Edit(*edit)])
    assert '\n' not in str(error.value)


def test_two_edits_of_one_value_are_refused(runs):
    with pytest.raises(UserError, match='two edits replace the same values of decoder'):
        runs['transformer'].edited([Edit('mean', 'decoder', [0.0] * 8), Edit(turned, 'decoder')])


SHAPE = r'but the value has the shape \(1, 4, 8\) \(batch, position, width\). Return an array of this shape'
SIZES = ('The axis batch, and for texts the axes of tokens, differ in size between passes. Compute the result from the '
         r"value. For stored values, use Edit\('replace', ...\)")
TRACED = ': jax.jit traces the function, so its array has no numbers yet. Use functions of jax.numpy'


@pytest.mark.parametrize('positions', [None, [0]])
@pytest.mark.parametrize('function, message', [
    (lambda value, at: None, f' returns an object of type NoneType, {SHAPE}$'),
    (lambda value, at: 0, f' returns an object of type int, {SHAPE}$'),
    (lambda value, at: [value], f' returns an object of type list, {SHAPE}$'),
    (lambda value, at: value[..., 0], rf' returns an array of shape \(1, 4\), {SHAPE}$'),
    (lambda value, at: value[..., :2], rf' returns an array of shape \(1, 4, 2\), {SHAPE}$'),
    (lambda value, at: value[:, :1], rf' returns an array of shape \(1, 1, 8\), {SHAPE}'),
    (lambda value, at: np.zeros((1, 9, 8)), rf' returns an array of shape \(1, 9, 8\), {SHAPE}. {SIZES}'),
    (lambda value, at: np.full((1, 4, 8), None), ' returns an array of object. Return an array of numbers'),
    (lambda value, at: np.full((1, 4, 8), 'a'), ' returns an array of <U1. Return an array of numbers'),
    (lambda value, at: np.zeros((1, 4, 8), 'M8[D]'), r' returns an array of datetime64\[D\]. Return an array of'),
    (lambda value, at: np.tanh(value), TRACED), (lambda value, at: value if value.sum() > 0 else -value, TRACED),
    (lambda value, at: value * [1, 2][value[0, 0, 0].astype(int)], TRACED), (lambda value, at: value[value > 0], TRACED)
])
def test_an_impossible_function_is_refused_with_its_place(function, message, positions):
    sizes = {'batch': None, 'position': None, 'width': 8}
    edited: Any = Editor([Edit(function, 'decode[r]', positions=positions)], [{}], {'decoder': sizes})()('decoder')
    at = At('decoder', SEQUENCE, np.arange(4)[None])
    with pytest.raises(UserError) as error:
        jax.eval_shape(lambda value: edited(value, at), np.zeros((1, 4, 8)))
    assert re.match(f'the function at decoder{message}', str(error.value))


def test_stored_values_of_several_images_are_refused_as_the_result_of_a_function(runs):
    message = (r'returns an array of shape \(3, 8\), but the value has the shape \(1, 8\) \(batch, width\). Return .* '
               rf'shape. {SIZES}')
    with pytest.raises(UserError, match=f'^the function at pooled {message}'):
        runs['patches'].edited([Edit(lambda value, at: np.zeros((3, 8)), 'pooled')])


def test_a_function_is_tested_before_the_first_text(runs):
    with pytest.raises(UserError, match='^the function at decoder returns an object of type NoneType'):
        runs['transformer'].edited([Edit(lambda value, at: None, 'decoder', positions=[0])])


def test_other_edits_are_applied_to_the_result_of_a_function_of_another_dtype(runs):
    edited = runs['transformer'].edited([Edit(lambda value, at: value > 0, 'decoder'), Edit('scale', 'decoder', 0.5)])
    values = edited.inspect([('a', 'bc')], 'decoder')[0]['decoder'].values
    assert {*values.ravel().tolist()} == {0.0, 0.5}


def test_a_dict_in_python_may_have_a_function(runs):
    assert runs['transformer'].edited([{'edit': turned, 'place': 'decoder'}]).edits == (Edit(turned, 'decoder'),)
    with pytest.raises(UserError, match="has no 'place'. Add 'place' with a string"):
        Edit.of({'edit': turned})


@pytest.mark.parametrize('content, message', [
    ('[', 'is not JSON'), ('[' * 10 ** 5, 'is not JSON'), ('{}', 'must be a list of edits'),
    ('[]', 'must be a list of edits'), ('[3]', "'3' is not an edit"),
    ('[{"edit": "zero", "place": "decoder", "head": [1]}]', "an edit has no field 'head'. Did you mean heads"),
    ('[{"edit": "zero"}]', "has no 'place'"),
    ('[{"edit": "zer", "place": "decoder"}]', "edits.json: there is no edit 'zer'")])
def test_a_file_that_holds_no_edits_is_refused(content, message, tmp_path):
    (tmp_path / 'edits.json').write_text(content)
    with pytest.raises(UserError, match=message):
        read_edits(str(tmp_path / 'edits.json'))


@pytest.mark.parametrize('heads', ['cross', 'cross:1', 'cross:0:1', 'sideways:1:1', 'cross:1:a', 'cross:1:1:1', '',
                                   'cross:1:' + '9' * 5000, f'cross:{"9" * 5000}:1'])
def test_heads_of_another_form_are_refused(heads):
    with pytest.raises(UserError, match='must be KIND:LAYER:HEADS'):
        without(heads)
