"""Patching of values and paths: each entry is the score after one patch, or its estimate."""

import functools
import logging
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from analysis import passes, patching
from analysis.passes import Node, as_output, text_of
from analysis.patching import attribution_map, estimate_error, patching_map
from analysis.paths import HELD, heads_at, path_patching
from inference.edits import Edit
from inference.generate import Generator
from inference.translate import Translator
from input_pipeline.tokenizer import ByteTokenizer
from model.embedding import Projection
from model.places import EDITS
from runtime.errors import UserError
from runtime.resources import compile_time
from tests.random_run import random_run


def test_an_entry_is_the_log_probability_after_one_patch_and_all_patches_restore_the_clean_sentence():
    run = random_run('transformer')
    found = patching_map(run, 'ab', 'xy', 'target')
    assert [node.place for node in found.nodes] == ['encoder/layers_0', 'encoder/layers_1']
    assert found.pieces[-1] == '</s>'
    assert found.log_probs.shape == found.effects.shape == (2, 3)

    def log_prob(*edits):
        return run.edited(edits).forced([('xy', 'target')])[0].hypotheses[0].log_prob

    np.testing.assert_allclose(found.log_probs[1, 1], log_prob(Edit('replace', 'encoder/layers_1', 'ab', None, [1])),
                               rtol=1e-5)
    np.testing.assert_allclose(log_prob(Edit('replace', 'encoder/layers_1', 'ab')), found.clean, rtol=1e-5)
    with pytest.raises(UserError, match='the sentences have 3 and 4 tokens'):
        patching_map(run, 'ab', 'xyz', 'target')


def test_the_rows_of_a_long_sentence_are_computed_in_parts_by_one_program(monkeypatch):
    run, place = random_run('transformer', num_layers=1), 'encoder/layers_0/self_attention'
    whole = patching_map(run, 'abcd', 'wxyz', 'abc', place)
    shapes, called = [], passes.teacher_forced

    def recorded(module, params, inputs, *arguments):
        shapes.append(inputs['source'].shape)
        return called(module, params, inputs, *arguments)

    monkeypatch.setattr(passes, 'TOKENS', 2 * 32)  # the 5 tokens of a row are padded to 32
    monkeypatch.setattr(patching, 'teacher_forced', recorded)
    parts = patching_map(run, 'abcd', 'wxyz', 'abc', place)
    assert shapes == [(2, 32)]  # 5 rows of 5 tokens: a program of 2 rows is traced once, and is called 3 times
    np.testing.assert_allclose(parts.log_probs, whole.log_probs, rtol=1e-5)


@pytest.mark.parametrize('rows', [3, 4])
def test_logits_are_computed_for_a_limited_number_of_positions(rows, monkeypatch):
    monkeypatch.setattr(passes, 'TOKENS', 11)
    states, table, targets = (jnp.asarray(np.random.default_rng(0).normal(size=shape)) for shape in (
        (rows, 5, 4), (7, 4), (rows, 5)))
    targets, outputs = jnp.abs(targets).astype(int), Projection(states, table)
    computed = jax.make_jaxpr(functools.partial(passes.from_logits, passes.at_targets))(outputs, targets)
    assert f'f32[{rows},5,7]' not in str(computed) and 'f32[2,5,7]' in str(computed)
    np.testing.assert_allclose(passes.from_logits(passes.at_targets, outputs, targets),
                               passes.at_targets(outputs.logits(), targets), rtol=1e-5)


@pytest.mark.slow
def test_a_sentence_patched_with_itself_has_no_defined_effects(run):
    found = patching_map(run, 'ab', 'ab', 'target')
    np.testing.assert_allclose(found.log_probs, found.clean, rtol=1e-5)
    with pytest.raises(UserError, match='^the target has the same log-probability for both sentences, -.* Use two'):
        assert found.effects


class Words(ByteTokenizer):
    """A tokenizer with one token for each word, which includes the space before the word."""

    def encode(self, text):
        return [4 + sum(word.encode()) % 250 for word in re.findall(' ?[^ ]+', text)]


def test_a_target_that_begins_inside_a_token_of_the_prompt_is_refused():
    run = random_run('language_model')
    run.model.tokenizers['target'] = Words()
    with pytest.raises(UserError, match="'The dog': the target has different tokens for the two sentences"):
        patching_map(run, 'The cat', 'The dog', 's are')


def test_prompts_with_different_numbers_of_tokens_are_refused_if_both_texts_are_truncated_to_a_window():
    run = random_run('language_model')
    run.model.context = 6
    with pytest.raises(UserError, match="^'ab' and 'abc': the sentences have 3 and 4 tokens"):
        patching_map(run, 'ab', 'abc', 'defgh')


def test_only_the_first_window_of_a_continuation_is_used_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    run = random_run('language_model')
    run.model.context = 6
    text = text_of(run, as_output(run, ('ab', 'cdefgh')))
    assert (text.prefix, text.target) == (['<s>', 'a', 'b', 'c', 'd'], ['c', 'd', 'e'])
    assert caplog.messages == ['1 of 1 texts have more than 6 tokens (config.data.context), up to 9. Only the first 6 '
                               'tokens of a text are used']
    with pytest.raises(UserError, match="^'' after 'abcdef': there is no token to predict"):
        text_of(run, ('abcdef', ''))


@pytest.mark.parametrize('model, example, message', [
    (Translator, ['one', 'two'],
     r"^example=\['one', 'two'\]: must be a source, a tuple \(source, target\) or an output of the model$"),
    (Generator, ('a', 'b', 'c'), r'must be a text, a tuple \(prompt, continuation\) or an output of the model$')])
def test_an_example_that_is_not_a_text_a_pair_or_an_output_is_refused(model, example, message):
    with pytest.raises(UserError, match=message):
        as_output(types.SimpleNamespace(model=object.__new__(model)), example)


TARGET = 'target'
CROSS = 'decoder/layers_1/cross_attention'


@pytest.fixture(scope='module')
def run():
    return random_run('transformer', activation='gelu')


def log_prob(run, *edits):
    return run.edited(edits).forced([('xy', TARGET)])[0].hypotheses[0].log_prob


@pytest.mark.slow
def test_the_estimate_by_the_gradient_is_the_effect_of_a_small_patch(run):
    name = 'encoder/layers_0/self_attention/heads'
    estimated = attribution_map(run, 'ab', 'xy', TARGET, name)
    clean, corrupt = (values[name].values for values in run.inspect([('ab', TARGET), ('xy', TARGET)], name))
    edited = run.edited([Edit('replace', name, corrupt)])
    for position in range(3):
        small = corrupt.copy()
        small[position] += 1e-2 * (clean[position] - corrupt[position])
        edited.model.params = {**edited.model.params, EDITS: [{name: small}]}
        change = edited.forced([('xy', TARGET)])[0].hypotheses[0].log_prob - estimated.corrupt
        np.testing.assert_allclose(estimated.log_probs[0, position] - estimated.corrupt, change / 1e-2, atol=0.02)
    measured = patching_map(run, 'ab', 'xy', TARGET, name)
    error = estimate_error(estimated, measured)
    np.testing.assert_allclose(error.most, np.abs(estimated.effects - measured.effects).max())
    assert 0 < error.mean < error.most and error.correlation < 1
    assert estimate_error(measured, measured)[:2] == (0, 0)


@pytest.mark.slow
def test_all_paths_together_are_activation_patching(run):
    sender = 'encoder/layers_0/self_attention/queries'
    found = path_patching(run, 'ab', 'xy', TARGET, sender, 'decoder', held=[])
    np.testing.assert_allclose(found.log_probs, [log_prob(run, Edit('replace', sender, ('ab', TARGET)))], rtol=1e-5)
    np.testing.assert_allclose([found.clean, found.corrupt], [
        output.hypotheses[0].log_prob for output in run.forced([('ab', TARGET), ('xy', TARGET)])], rtol=1e-5)


@pytest.mark.slow
def test_the_edits_of_an_edited_run_are_kept(run):
    edited = run.edited([Edit('scale', 'decoder', 0.5)])
    found = path_patching(edited, 'ab', 'xy', TARGET, 'encoder', 'decoder', held=[])
    expected = edited.forced([('ab', TARGET)])[0].hypotheses[0].log_prob
    np.testing.assert_allclose([found.log_probs[0], found.clean], expected, rtol=1e-5)


@pytest.mark.slow
def test_one_path_is_the_pass_with_all_other_values_frozen(run):
    sender, receiver = 'encoder/layers_0/self_attention/heads', 'encoder/layers_1/self_attention/queries'
    found = path_patching(run, 'ab', 'xy', TARGET, [Node(sender, [1], [0, 2])], Node(receiver, [0]))
    names = [name for name in run.places() if name.endswith(('/heads', '/hidden')) and name != sender]
    old, = run.inspect([('xy', TARGET)], names)
    frozen = [Edit('replace', name, old[name].values) for name in names]
    held = run.edited([*frozen, Edit('replace', sender, ('ab', TARGET), [1], [0, 2])])
    value, = held.inspect([('xy', TARGET)], receiver)
    assert abs(found.effects[0]) > 1e-3
    np.testing.assert_allclose(found.log_probs, [log_prob(run, Edit('replace', receiver, value[receiver].values, [0]))],
                               rtol=1e-5)


@pytest.mark.slow
def test_other_sentences_of_the_same_shape_compile_nothing(run):
    places = 'encoder/layers_0/self_attention/heads'
    calls = [lambda *texts: patching_map(run, *texts, places), lambda *texts: attribution_map(run, *texts, places),
             lambda *texts: path_patching(run, *texts, 'encoder/layers_0/self_attention/queries', 'decoder', held=[])]
    for call in calls:
        call('ab', 'xy', TARGET)
    before = compile_time.seconds
    for call in calls:
        call('bc', 'yz', 'tarted')
    assert compile_time.seconds == before


@pytest.mark.slow
def test_a_path_that_does_not_exist_has_no_effect(run):
    later, earlier = 'encoder/layers_1', 'encoder/layers_0/feed_forward'
    found = path_patching(run, 'ab', 'xy', TARGET, [later, f'{CROSS}/heads'], earlier, held=[])
    np.testing.assert_allclose(found.effects, 0, atol=1e-6)
    cross = heads_at(run, '*/cross_attention/heads')
    blocked = path_patching(run, 'ab', 'xy', TARGET, 'encoder', 'decoder')  # only heads read the encoder
    np.testing.assert_allclose(blocked.effects, 0, atol=1e-6)
    direct = path_patching(run, 'ab', 'xy', TARGET, cross, 'decoder')
    assert direct.nodes[3] == Node(f'{CROSS}/heads', [1]) and np.abs(direct.effects).min() > 1e-4


@pytest.mark.slow
def test_outputs_of_modules_in_the_block_of_the_sender_are_held(run):
    sender = 'encoder/layers_0/self_attention'
    parts, default = (path_patching(run, 'ab', 'xy', TARGET, sender, 'encoder', held=held).effects
                      for held in (['*/self_attention', '*/cross_attention', '*/feed_forward'], HELD))
    every = path_patching(run, 'ab', 'xy', TARGET, sender, 'encoder', held=[]).effects
    np.testing.assert_allclose(parts, default, rtol=1e-4)
    assert abs(every[0] - default[0]) > 1e-3
    behind = path_patching(run, 'ab', 'xy', TARGET, 'encoder/layers_0', 'encoder', held='encoder/layers_1')
    np.testing.assert_allclose(behind.effects, 0, atol=1e-6)


@pytest.mark.slow  # it compiles two more models
def test_language_models_and_recurrent_models_have_paths_too():
    for kind, sender in (('language_model', 'encoder/layers_0'), ('rnnsearch', 'encoder')):
        run, places = random_run(kind), [sender]
        receiver = 'readout' if kind == 'rnnsearch' else 'encoder'
        found = path_patching(run, 'ab', 'xy', 'target', Node(sender, None, [1]), receiver, held=[])
        measured = patching_map(run, 'ab', 'xy', 'target', places)
        np.testing.assert_allclose(found.log_probs[0], measured.log_probs[0, 1], rtol=1e-5)
        assert attribution_map(run, 'ab', 'xy', 'target', places).log_probs.shape == measured.log_probs.shape


@pytest.mark.parametrize('arguments, message', [
    (('encoder/layers_7', 'decoder'), "place 'encoder/layers_7': the model has no such place. Did you mean"),
    ((Node(f'{CROSS}/heads', [4]), 'decoder'), 'senders: .*/heads: there is no head 4. Use numbers from 0 to 1'),
    (('encoder', Node('decoder', [1])), 'receivers: decoder: the values at this place are not split into heads'),
    (('encoder', []), 'receivers: the list is empty'),
    (('encoder', [('decoder', None, [0], [1])]), r"receivers: \('decoder', None, \[0\], \[1\]\) has 4 entries. Use"),
    (([()], 'decoder'), r'senders: \(\) has 0 entries. Use Node\(place, heads, positions\)'),
    # The source has 3 tokens, and the target has more.
    ((Node(f'{CROSS}/heads', 0), 'decoder'), 'senders: .*/heads: heads=0 must be a list of whole numbers'),
    ((Node(f'{CROSS}/heads', [0.7]), 'decoder'), r'senders: .*/heads: heads=\[0.7\] must be a list of whole numbers'),
    ((Node(f'{CROSS}/heads', '01'), 'decoder'), 'senders: .*/heads: heads=01 must be a list of whole numbers'),
    (('encoder', Node('decoder', None, 3)), 'receivers: decoder: positions=3 must be a list of whole numbers'),
    (('encoder', Node('decoder', None, [True])), r'receivers: decoder: positions=\[True\] must be a list of whole'),
    ((Node('encoder', None, np.array([1, 5])), 'decoder'), r'encoder: positions=\[1, 5\]: this place has only 3 pos'),
    (('encoder', 'decoder', ['nothing/*']), "place 'nothing/.': the model has no such place")])
def test_impossible_paths_are_refused(arguments, message, run):
    with pytest.raises(UserError, match=message):
        path_patching(run, 'ab', 'xy', TARGET, *arguments)


def test_patterns_that_match_only_places_without_positions_or_heads_are_refused(run):
    with pytest.raises(UserError, match=r"^place '\*/weights': a patching map needs places with the axis .position."):
        patching_map(run, 'ab', 'xy', TARGET, ['encoder', '*/weights'])
    with pytest.raises(UserError, match=r'^places=\[\]: the list is empty'):
        patching_map(run, 'ab', 'xy', TARGET, [])
    with pytest.raises(UserError, match=r"^place '\*/feed_forward': the values at this place are not split into heads"):
        heads_at(run, '*/feed_forward')
    assert {node.place for node in heads_at(run, f'{CROSS}*')} >= {f'{CROSS}/heads', f'{CROSS}/weights'}
