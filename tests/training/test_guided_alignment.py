"""Guided alignment: the loss compared with NumPy, the links in batches, and configs that are refused."""

import functools
import json
import re
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from configs.checks import config_problems
from inference.run import Run
from input_pipeline import builtin
from input_pipeline.data import open_data
from input_pipeline.problems import data_problems
from input_pipeline.sources import open_corpus
from input_pipeline.token_links import SPACES, word_numbers, words_of_tokens
from input_pipeline.tokenizer import EOS, train_tokenizer
from model.evaluation import forward, supervised
from model.losses import cross_entropy
from model.places import place
from run_directory.fingerprints import changed_data
from tests.model.small_transformer import SOURCE, TARGET, transformer
from tests.training.test_objective import SMOOTHED
from training.objective import guided, guided_head, make_objective, r_drop

PLAIN = functools.partial(cross_entropy, label_smoothing=0.0)
PAIRS = [('one  two', 'deux un'), ('', 'vide'), ('three four five', 'trois')]
LINES = ['0-1 1-0', '', '0-0 1-0']


def config_of(folder, tmp_path, **changes):
    config = base.get_config()
    config.update_from_flattened_dict({
        'cache_dir': str(tmp_path / 'cache'), 'data.source': 'files', 'data.dir': str(folder), 'data.max_length': 24,
        'data.validation_share': 0.0, 'data.tokenizer.kind': 'byte', 'batch.tokens': 512,
        'train.guided_alignment': 0.1, **{key.replace('__', '.'): value for key, value in changes.items()}})
    return config


@pytest.fixture
def folder(tmp_path):
    """Three pairs with their alignment."""
    path = tmp_path / 'data'
    path.mkdir()
    for split in 'train', 'validation':
        for suffix, lines in zip(('en', 'fr', 'align'), (*zip(*PAIRS, strict=True), LINES), strict=True):
            (path / f'{split}.{suffix}').write_text(''.join(f'{line}\n' for line in lines))
    return path


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('head', [None, 1])
def test_the_loss_is_its_definition_and_its_gradient_reaches_the_head(head):
    module, variables = transformer()
    links = np.zeros((2, 6, 5), bool)
    links[0, 0, [1, 3]] = links[0, 2, 0] = links[1, 4, 2] = True
    batch = {'inputs': {'source': SOURCE, 'target': TARGET}, 'targets': TARGET, 'weights': jnp.ones(TARGET.shape),
             'links': jnp.asarray(links)}
    objective = guided(PLAIN, supervised, (0, head), 0.5)

    @jax.jit
    def losses(params):
        sums = objective(forward(module), params, batch, jax.random.key(0))
        return sums, supervised(PLAIN)(forward(module), params, batch, None)

    sums, plain = losses(variables['params'])
    _, attention = module.apply(variables, SOURCE, TARGET, mutable='attention')
    weights = np.asarray(attention['attention']['decoder']['layers_0']['cross_attention']['weights'][0], np.float64)
    weights = weights.mean(axis=1) if head is None else weights[:, head]
    expected = -(np.log(weights[0, 0, [1, 3]]).mean() + np.log(weights[0, 2, 0]) + np.log(weights[1, 4, 2]))
    assert float(sums.others['alignment_loss']) == pytest.approx(expected, rel=1e-5)
    assert float(sums.loss) == pytest.approx(float(plain.loss) + 0.5 * expected, rel=1e-5)
    assert {name: float(value) for name, value in plain.others.items()} == pytest.approx(
        {name: float(value) for name, value in sums.others.items() if name != 'alignment_loss'})


def test_the_weight_and_the_head_of_a_config_are_those_of_its_objective():
    module, variables = transformer(layers=1)
    batch = {'inputs': {'source': SOURCE, 'target': TARGET}, 'targets': TARGET, 'weights': jnp.ones(TARGET.shape),
             'links': jnp.ones((2, 6, 5), bool)}
    config = base.get_config()
    config.train.update(guided_alignment=0.25, guided_head='cross:1:2', r_drop=2.0, label_smoothing=0.0)
    expected = guided(PLAIN, functools.partial(r_drop, alpha=2.0), (0, 1), 0.25)
    found, wanted = (jax.jit(functools.partial(each, forward(module)))(variables['params'], batch, jax.random.key(0))
                     for each in (make_objective(config, None), expected))
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-6)


@pytest.mark.slow
def test_two_passes_have_the_mean_of_their_losses_and_an_evaluation_has_none():
    head = types.SimpleNamespace(path=('decoder', 'layers_0', 'cross_attention'))

    def apply(params, inputs, key):
        key = jax.random.key(0) if key is None else key
        place(head, 'weights', jax.nn.softmax(jax.random.normal(key, (2, 1, 6, 5))))
        return jax.random.normal(key, (2, 6, 12)), {}

    batch = {'inputs': {}, 'targets': TARGET, 'weights': jnp.ones(TARGET.shape), 'links': jnp.ones((2, 6, 5), bool)}
    key, double = jax.random.key(2), functools.partial(r_drop, alpha=1.0)
    one, two = (guided(SMOOTHED, variant, (0, 0), 0.5) for variant in (supervised, double))
    expected = np.mean([float(one(apply, {}, batch, part).others['alignment_loss']) for part in jax.random.split(key)])
    assert float(two(apply, {}, batch, key).others['alignment_loss']) == pytest.approx(expected, rel=1e-5)
    assert 'alignment_loss' not in two(apply, {}, batch, None).others


def test_batches_link_the_tokens_of_linked_words(folder, tmp_path):
    data = open_data(config_of(folder, tmp_path))
    plan = data.plan('train')
    batches = [plan.batch(step) for step in range(len(plan))]
    assert sum(batch['links'].any(axis=(1, 2)).sum() for batch in batches) == 2
    for source, targets, links in (row for batch in batches for row in zip(
            batch['inputs']['source'], batch['targets'], batch['links'], strict=True)):
        row = [bytes(int(token) - 4 for token in tokens if token > EOS) for tokens in (source, targets)]
        text = tuple(part.decode() for part in row)
        expected = np.zeros(links.shape, bool)
        if text == PAIRS[0]:
            expected[5:7, :3] = expected[4:5, :3] = True  # 'un' and the space before it, to 'one'
            expected[:4, 3:8] = True  # 'deux' to '  two'
        elif text == PAIRS[2]:
            expected[:5, :10] = True  # 'trois' to 'three four'
        np.testing.assert_array_equal(links, expected)
    assert 'links' not in data.plan('validation').batch(0)
    plain = open_data(config_of(folder, tmp_path, train__guided_alignment=0.0))
    assert 'links' not in plain.plan('train').batch(0)
    assert data.fingerprint('train') != plain.fingerprint('train')


def test_a_run_is_scored_without_the_links_of_its_training(folder, tmp_path):
    data = open_data(config_of(folder, tmp_path))
    data.keep(tmp_path / 'run/data')
    (tmp_path / 'run/data/fingerprints.json').write_text(json.dumps({'train': data.fingerprint('train')}))
    run: Any = types.SimpleNamespace(config=config_of(folder, tmp_path), workdir=tmp_path / 'run')
    (folder / 'train.align').unlink()
    assert changed_data(run.workdir, Run.data(run), ['train']) == []
    (folder / 'train.en').write_text('one\n' * len(PAIRS))
    assert changed_data(run.workdir, Run.data(run), ['train']) == ['train: train.en']


def test_the_built_in_corpus_has_links(monkeypatch):
    sizes = {'train': 20, 'validation': 20, 'test': 5}
    monkeypatch.setattr(builtin, 'make_corpus', functools.partial(builtin.make_corpus, sizes=sizes))
    corpus = open_corpus(base.get_config().data)
    links, pairs = corpus.links('validation'), list(corpus.pairs('validation'))
    assert len(links) == len(pairs) and any(links) and all(
        source < len(pair[0].split()) and target < len(pair[1].split())
        for pair, row in zip(pairs, links, strict=True) for source, target in row)


def test_white_space_belongs_to_the_next_word():
    numbers = word_numbers([b' a', b'b', b' ', b'\xc2', b'\xa0', b'c d', b' '], [b' ab', b'c', b'd'])
    assert numbers.tolist() == [0, 0, 1, 1, 1, 1, 3]
    assert word_numbers([], []).tolist() == []


@pytest.mark.parametrize('kind, text, words', [
    ('bpe', ' it´s  a dog ', ['it \u0301s', 'a', 'dog']),
    ('bpe', 'a \ufdfa \u0301s dog', ['a', 'صلى الله عليه وسلم', '\u0301s', 'dog']),
    ('char', 'it\u2003s a dog', ['it', 's', 'a', 'dog'])])
def test_words_are_those_of_the_text_if_a_token_has_other_white_space(kind, text, words):
    """NFKC adds white space to some characters. The unknown token of U+2003 has no white space."""
    tokenizer = train_tokenizer(['it´s a dog \ufdfa', 'one two'], kind=kind, vocab_size=285, split_digits=False,
                                normalization='nfkc')
    tokens = tokenizer.encode(text)
    numbers, count = words_of_tokens(tokenizer, tokens, text)
    written = [b''.join(tokenizer.bytes_of(token) for token, number in zip(tokens, numbers, strict=True)
                        if number == word).decode().strip() for word in range(count)]
    assert written == words


def test_white_space_is_that_of_python():
    spaces = ''.join(character for character in map(chr, range(sys.maxunicode)) if character.isspace())
    assert SPACES.fullmatch(spaces.encode())
    assert not SPACES.search('a_\u200b\u3001'.encode())


@pytest.mark.parametrize('line, message', [
    ('0-1 1:0', "train.align:1: '1:0' is not a link. Write links as SOURCE-TARGET"),
    ('0-1 2-0', "train.align:1: 2-0 links source word 2, but the source has only 2 words"),
    ('0-2', 'train.align:1: 0-2 links target word 2, but the target has only 2 words'),
    pytest.param('0-' + '9' * 5000, "train.align:1: '0-9{38}' is not a link", id='a number of 5000 digits'),
    ('', None)])
def test_wrong_links_are_refused_with_file_and_line(line, message, folder, tmp_path):
    (folder / 'train.align').write_text(''.join(f'{text}\n' for text in [line, *LINES[1:]]))
    found = data_problems(config_of(folder, tmp_path))
    assert found == [] if message is None else len(found) == 1 and re.search(message, found[0])
    (folder / 'train.align').write_text('0-1\n\n')
    assert re.search('train.align has 2 lines but .*train.en has 3: they must', data_problems(
        config_of(folder, tmp_path))[0])
    (folder / 'train.align').unlink()
    assert 'train.align.gz does not exist' in data_problems(config_of(folder, tmp_path))[0]
    assert data_problems(config_of(folder, tmp_path, train__guided_alignment=0.0)) == []


@pytest.mark.parametrize('changes, message', [
    ({'train.guided_head': 'cross:7'}, 'must be cross:LAYER:HEAD or cross:LAYER. LAYER is from 1 to 6, and HEAD'),
    ({'train.guided_head': 'cross:1:9'}, 'must be cross:LAYER:HEAD'),
    ({'train.guided_head': 'cross:1:' + '9' * 5000}, 'must be cross:LAYER:HEAD'),
    ({'train.guided_head': 'encoder:1:1'}, 'must be cross:LAYER:HEAD'),
    ({'train.guided_head': 'cross:1', 'train.guided_alignment': 0.0}, 'has no effect without train.guided_alignment'),
    ({'model.kind': 'rnnsearch', 'model.recurrent.attention': False}, 'needs model.recurrent.attention=True')])
def test_a_head_that_does_not_exist_is_refused(changes, message):
    config = base.get_config()
    config.update_from_flattened_dict({'train.guided_alignment': 0.1} | changes)
    assert [problem for problem in config_problems(config) if message in problem]


def test_the_default_head_is_the_mean_of_the_second_to_last_layer():
    config = base.get_config()
    assert guided_head(config) == (4, None)
    config.train.guided_head, config.model.num_decoder_layers = 'cross:2:8', 2
    assert guided_head(config) == (1, 7)
    config.model.kind, config.train.guided_head = 'rnnsearch', ''
    assert guided_head(config) == (0, None)
