"""Ensembles: the mean of the probabilities of several models, in every search and through the command line."""

import functools
import json
import shutil
import tarfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inference
from configs import recipe
from inference.generate import Generator
from inference.options import SearchOptions
from inference.translate import Translator
from input_pipeline.tokenizer import EOS, ByteTokenizer, CharTokenizer
from model.blocks import BlockConfig
from model.ensemble import Ensemble, log_mean_probability
from model.language_model import LanguageModel
from model.recurrent import RNNSearch
from model.transformer import Transformer
from run_directory.trained import TrainedModel, join_models, run_paths
from runtime.errors import UserError
from tests.scripts import script

ROOT = Path(__file__).parents[2]
TOKENIZER = CharTokenizer(json.dumps({'kind': 'char', 'characters': 'abcdef'}).encode())
SIZE, WIDTH = len(TOKENIZER), 32
SEARCHES = {
    'greedy': SearchOptions(method='greedy', extra_length=6),
    'beam': SearchOptions(beam=3, n_best=3, extra_length=6),
    'samples': SearchOptions(method='sample', n_best=3, temperature=0.8, top_k=6, top_p=0.9, extra_length=6)}


def blocks(**options):
    return BlockConfig(d_model=16, d_ff=32, num_heads=2, **options)


def doubled(init, *args):
    """Parameters of models that are sure of something."""
    return jax.tree.map(lambda leaf: 2.0 * leaf, jax.jit(init)(*args)['params'])


@functools.cache
def translators():
    """One of each kind, with other widths and positions."""
    modules = (Transformer(blocks(), 1, SIZE, SIZE), RNNSearch(SIZE, SIZE, d_model=12, d_hidden=8),
               Transformer(blocks(position='learned', norm='pre'), 2, SIZE, SIZE, max_length=14))
    ones = np.ones((1, 4), np.int32)
    return modules, [doubled(module.init, jax.random.key(seed), ones, ones) for seed, module in enumerate(modules)]


@functools.cache
def language_models():
    modules = (LanguageModel(blocks(position='rotary'), 1, SIZE),
               LanguageModel(blocks(), 2, SIZE, tie_embeddings=False))
    ones = np.ones((1, 4), np.int32)
    return modules, [doubled(module.init, jax.random.key(seed), ones) for seed, module in enumerate(modules)]


def answerer(modules, params):
    """The answerer of one module, or of the ensemble of several."""
    module, params = (modules[0], params[0]) if len(modules) == 1 else (
        Ensemble(modules), {f'members_{index}': each for index, each in enumerate(params)})
    if isinstance(modules[0], LanguageModel):
        return Generator(module, params, TOKENIZER, context=WIDTH, whole_documents=False)
    return Translator(module, params, {'source': TOKENIZER, 'target': TOKENIZER}, max_length=12)


def softmax(logits):
    logits = np.asarray(logits, np.float64)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def test_the_mean_is_of_probabilities():
    logits = [jnp.float32(np.random.default_rng(seed).normal(scale=5, size=(4, 7))) for seed in range(3)]
    expected = np.log(np.mean([softmax(each) for each in logits], axis=0))
    np.testing.assert_allclose(log_mean_probability(logits), expected, rtol=1e-5)
    far = log_mean_probability([jnp.float32([[0, 200]]), jnp.float32([[0, -200]])])
    np.testing.assert_allclose(far, np.log([[0.5, 0.5]]), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('method', ['beam', 'greedy', 'samples'])
def test_log_probabilities_of_a_search_are_means_of_the_members_by_teacher_forcing(method):
    modules, params = translators()
    members = [answerer([module], [each]) for module, each in zip(modules, params, strict=True)]
    found = answerer(modules, params).translate(['abc', 'f', 'deadbeef', '', 'cafebabe'], SEARCHES[method])
    assert found[3].text == ''
    pairs = [(output.source_tokens, each.tokens) for output in found for each in output.hypotheses if each.tokens]
    of_members = [member.token_log_probs(pairs) for member in members]
    expected = [np.log(np.mean(np.exp(each), axis=0)).sum() for each in zip(*of_members, strict=True)]
    log_probs = [each.log_prob for output in found for each in output.hypotheses if each.tokens]
    np.testing.assert_allclose(log_probs, expected, atol=1e-4)
    assert max(len(tokens) for _, tokens in pairs) < 14  # the least that the members' positions reach


@pytest.mark.slow
@pytest.mark.parametrize('method', SEARCHES)
def test_it_continues_a_text_as_the_mean_does(method):
    modules, params = language_models()
    forced = [jax.jit(module.apply) for module in modules]
    for output in answerer(modules, params).generate(['abc', 'f', 'deadbeef'], SEARCHES[method]):
        for hypothesis in output.hypotheses:
            written = [*hypothesis.tokens, EOS] if hypothesis.ended else hypothesis.tokens
            begin, tokens = len(output.source_tokens) - 1, [*output.source_tokens, *written[:-1]]
            read = jnp.array([tokens + [0] * (WIDTH - len(tokens))])
            probabilities = np.mean([softmax(apply({'params': each}, read))[0, begin:len(tokens)]
                                     for apply, each in zip(forced, params, strict=True)], axis=0)
            expected = np.log(probabilities[np.arange(len(written)), written]).sum()
            assert hypothesis.log_prob == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('make, method', [(translators, 'beam'), (language_models, 'samples')])
def test_a_model_with_itself_is_that_model(make, method):
    modules, params = make()
    alone, twice = (answerer(modules[:1] * count, params[:1] * count) for count in (1, 2))
    lines = ['abc', 'f', 'deadbeef', 'cafe']
    for one, other in zip(alone.respond(lines, SEARCHES[method]), twice.respond(lines, SEARCHES[method]), strict=True):
        assert [each.tokens for each in one.hypotheses] == [each.tokens for each in other.hypotheses]
        np.testing.assert_allclose([each.log_prob for each in one.hypotheses],
                                   [each.log_prob for each in other.hypotheses], atol=1e-4)


@pytest.mark.slow
def test_its_attention_is_refused_and_its_probabilities_are_had():
    model = answerer(*translators())
    output, = model.translate(['abc'])
    with pytest.raises(UserError, match='so the ensemble has none'):
        model.attention(output)
    total = sum(np.log(each.probability) for each in model.token_probabilities(output))
    assert total == pytest.approx(output.hypotheses[0].log_prob, abs=1e-4)


def member(name, **changes):
    """Returns the model of a run of a language model, with changed options of config.data."""
    config = recipe('shakespeare_char')
    config.data.update(changes)
    return TrainedModel([Path(name)], config, nn.Dense(1), {}, [1], {'text': ByteTokenizer()}, {})


def test_an_ensemble_has_the_smallest_context_of_its_members():
    short, long = member('short', context=32), member('long', context=64)
    for members in [short, long], [long, short]:
        assert join_models(members).config.data.context == 32
    assert long.config.data.context == 64


def test_members_with_different_packings_are_refused():
    message = 'packed has config.data.packing=packed, and contiguous has contiguous'
    with pytest.raises(UserError, match=message):
        join_models([member(packing, packing=packing) for packing in ('contiguous', 'packed')])


# Run directories

@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """The same run twice, one of them under a name as a sweep gives."""
    folder = tmp_path_factory.mktemp('runs')
    with tarfile.open(ROOT / 'tests/runs/first.tar.gz') as archive:
        archive.extractall(folder, filter='data')
    shutil.copytree(folder / 'run', folder / 'norm=pre,seed=1')
    return folder


@pytest.mark.slow
def test_a_name_may_have_commas(runs):
    one, other = runs / 'run', runs / 'norm=pre,seed=1'
    assert run_paths(str(other)) == [other]
    assert run_paths(f'{one},{other},{other},{one}') == [one, other, other, one]
    assert run_paths(f'{one},{runs}/norm=pre,seed=2') == [one, Path(f'{runs}/norm=pre,seed=2')]
    assert run_paths('nowhere,seed=1') == [Path('nowhere,seed=1')]
    for text in '', f'{one},', f'{one},,{other}', f',{one}':
        with pytest.raises(UserError, match='empty'):
            run_paths(text)


@pytest.mark.slow
def test_runs_are_opened_together(runs):
    alone, both = inference.load(runs / 'run'), inference.load([runs / 'run', runs / 'norm=pre,seed=1'])
    assert (alone.checkpoint, both.checkpoint) == ([6], [[6], [6]])
    assert both.workdirs == [runs / 'run', runs / 'norm=pre,seed=1'] and both.workdir == runs / 'run'
    lines = ['a b', 'some words more']
    for one, other in zip(alone.translate(lines), both.translate(lines), strict=True):
        assert one.hypotheses[0].tokens == other.hypotheses[0].tokens
        assert one.hypotheses[0].log_prob == pytest.approx(other.hypotheses[0].log_prob, abs=1e-4)
    with pytest.raises(UserError, match='at least one'):
        inference.load([])


def test_another_vocabulary_is_refused(runs, tmp_path):
    shutil.copytree(runs / 'run', tmp_path / 'other')
    path = tmp_path / 'other' / 'data' / 'source.model'
    path.write_bytes(path.read_bytes() + b'\x98\x06\x01')  # a field that SentencePiece does not know
    with pytest.raises(UserError, match=r'other has another vocabulary \(data/source.model\) than '):
        inference.load([runs / 'run', tmp_path / 'other'])
    with pytest.raises(UserError, match='nowhere is not a run directory: it does not exist'):
        inference.load([runs / 'run', tmp_path / 'nowhere'])


def test_runs_that_were_trained_under_edits_are_no_members(runs, tmp_path):
    shutil.copytree(runs / 'run', tmp_path / 'edited')
    path = tmp_path / 'edited' / 'config.json'
    config = json.loads(path.read_text())
    config['train']['edits'] = '[{"edit": "zero", "place": "encoder/layers_0"}]'
    path.write_text(json.dumps(config))
    for workdirs in [tmp_path / 'edited', runs / 'run'], [runs / 'run', tmp_path / 'edited']:
        with pytest.raises(UserError, match=r'edited was trained with config.train.edits. An ensemble cannot apply'):
            inference.load(workdirs)


@pytest.mark.slow
def test_the_command_line_makes_an_ensemble(runs):
    both = f'--workdir={runs}/run,{runs}/norm=pre,seed=1'
    alone, done = (script('decode.py', each, '--input=-', stdin=b'a b\n\nsome words more\n')
                   for each in (f'--workdir={runs}/run', both))
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == alone.stdout
    done = script('decode.py', both, '--input=-', '--format=jsonl', '--attention', stdin=b'a b\n')
    assert done.returncode == 2 and b'--attention cannot be used with an ensemble' in done.stderr
    done = script('decode.py', f'--workdir={runs}/run,{runs}/nowhere', '--input=-', stdin=b'a b\n')
    assert done.returncode == 2 and b'nowhere is not a run directory' in done.stderr
