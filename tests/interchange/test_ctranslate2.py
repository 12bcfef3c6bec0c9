"""Exports to CTranslate2: the log-probabilities of random models of every option."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

ctranslate2 = pytest.importorskip('ctranslate2', reason="it is in the extra 'interchange', and is not installed here")

import sentencepiece
import tokenizers

from configs import base
from input_pipeline.foreign_tokenizers import sentencepiece_tokenizer, tokenizers_tokenizer
from input_pipeline.tokenizer import BOS, EOS, PAD, SPECIAL, CharTokenizer
from interchange.huggingface import write_huggingface
from interchange.safetensors_folder import write_safetensors
from interchange.to_ctranslate2 import SUPPORTED, refusals, write_ctranslate2
from interchange.tokenizer_files import unique_pieces
from model.build import build_model
from run_directory.trained import TrainedModel
from runtime.errors import UserError
from tests.interchange import originals
from tests.random_run import random_run

pytestmark = pytest.mark.interchange

TOKENIZER = CharTokenizer(json.dumps({'kind': 'char', 'characters': ' abcdefghijklmnopqrstuvwxyz\u2581'}).encode())
SIZE = len(TOKENIZER)
POSSIBLE = [
    {}, {'norm': 'pre'}, {'position': 'learned'}, {'position': 'rotary', 'rotary_base': 500.0},
    {'position': 'rotary', 'rotary_scaling': 'linear', 'rotary_factor': 4.0}, {'position': 'relative'},
    {'position': 'none', 'activation': 'gelu'}, {'activation': 'gelu_exact'}, {'score': 'dot'},
    {'score': 'general', 'attention_bias': 'all'}, {'d_k': 6, 'd_v': 6}, {'norm_function': 'rms_norm'},
    {'norm_epsilon': 1e-2, 'output_bias': True}, {'feed_forward': 'gated', 'activation': 'silu'},
    {'num_key_value_heads': 2, 'position': 'relative'},
    {'num_key_value_heads': 1, 'norm': 'pre', 'norm_function': 'rms_norm', 'feed_forward': 'gated',
     'activation': 'silu', 'position': 'rotary', 'scale_embeddings': False, 'feed_forward_bias': False,
     'attention_bias': 'qkv'}]
CASES = [*[('transformer', each) for each in [
    *POSSIBLE, {'share_embeddings': 'none'}, {'share_embeddings': 'target', 'num_decoder_layers': 1}]],
         *[('language_model', each) for each in [*POSSIBLE, {'tie_embeddings': False}, {'position': 'alibi'},
                                                 {'position': 'alibi', 'num_heads': 3, 'd_k': 8, 'd_v': 8},
                                                 {'window': 256}]]]  # data.context is 256
IMPOSSIBLE = [
    ('transformer', {'score': 'additive'}), ('transformer', {'position': 'alibi'}), ('transformer', {'window': 256}),
    ('language_model', {'d_k': 6}), ('language_model', {'window': 255}),
    ('language_model', {'position': 'rotary', 'score': 'general'}),
    ('language_model', {'position': 'rotary', 'rotary_scaling': 'llama3', 'rotary_factor': 8.0})]


def random_model(kind, options, workdir, tokenizer=TOKENIZER):
    config = base.get_config()
    translates = kind == 'transformer'
    config.update_from_flattened_dict({
        'task': 'translation' if translates else 'language_model', 'model.kind': kind, 'model.num_layers': 2,
        'model.d_model': 32, 'model.d_ff': 48, 'model.num_heads': 4,
        **{f'model.{name}': value for name, value in options.items()}})
    sizes = dict.fromkeys(('source_vocab_size', 'target_vocab_size') if translates else ('vocab_size',), len(tokenizer))
    counts = len(sizes)
    if tokenizer.absent:
        sizes |= {'absent': list(tokenizer.absent)}
    module, ones = build_model(config.model, **sizes, pad=PAD), jnp.ones((1, 3), jnp.int32)
    params = meta.unbox(module.init(jax.random.key(0), *[ones] * counts))['params']
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: leaf + rng.normal(scale=0.1, size=leaf.shape).astype(np.float32), params)
    tokenizers = dict.fromkeys(('source', 'target') if translates else ('text',), tokenizer)
    return TrainedModel([workdir], config, module, params, [0], tokenizers, sizes)


def padded(rows):
    array = np.full((len(rows), max(map(len, rows))), PAD, np.int32)
    for row, tokens in zip(array, rows, strict=True):
        row[:len(tokens)] = tokens
    return array


@pytest.mark.parametrize('kind, options', CASES, ids=str)
def test_log_probabilities_are_ours(kind, options, tmp_path):
    trained, rng = random_model(kind, options, tmp_path), np.random.default_rng(1)
    write_ctranslate2(trained, tmp_path)
    pieces = unique_pieces(TOKENIZER)
    read, written = ([rng.integers(4, SIZE, length).tolist() for length in lengths]
                     for lengths in ((3, 9, 17, 40, 1), (30, 2, 25, 8, 12)))

    def named(rows):
        return [[pieces[token] for token in row] for row in rows]

    if kind == 'transformer':
        found = ctranslate2.Translator(str(tmp_path), compute_type='float32').score_batch(named(read), named(written))
        inputs = padded([[*row, EOS] for row in read]), padded([[BOS, *row] for row in written])
        written = [[*row, EOS] for row in written]
    else:
        found = ctranslate2.Generator(str(tmp_path), compute_type='float32').score_batch(
            named([[BOS, *row] for row in written]))
        inputs = padded([[BOS, *row[:-1]] for row in written]),
    log_probs = np.asarray(jax.nn.log_softmax(trained.module.apply(
        {'params': trained.params}, *map(jnp.asarray, inputs))))
    for row, tokens in enumerate(written):
        ours = log_probs[row, np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(found[row].log_probs[:len(tokens)], ours, atol=1e-4)


def imported_gpt2():
    original = originals.gpt2()
    end = original.token_to_id('<|endoftext|>')
    return tokenizers_tokenizer(original.to_str(), [None, end, end, None], original.get_vocab_size())


def imported_llama():
    model = originals.llama_model()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return sentencepiece_tokenizer(model, [None, 1, 2, 0], processor.get_piece_size())


def imported_marian():
    model = originals.sentencepiece_model()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = processor.get_piece_size() - 50  # the remaining pieces are unknown tokens
    pieces = ['</s>', '<unk>', *(processor.id_to_piece(number) for number in range(3, size)), '<pad>']
    return sentencepiece_tokenizer(model, [None, len(pieces) - 1, 0, 1], len(pieces),
                                   {piece: number for number, piece in enumerate(pieces)})


@pytest.mark.parametrize('kind, make', [('language_model', imported_gpt2), ('language_model', imported_llama),
                                        ('transformer', imported_marian)])
def test_an_imported_model_reads_the_tokens_of_the_exported_tokenizer(kind, make, tmp_path):
    trained = random_model(kind, {}, tmp_path, make())
    write_ctranslate2(trained, tmp_path)
    lines = ['the man is in the house', 'you are 3.14 with him', 'où est Straße 你好?']

    def encoded(side):
        if (tmp_path / 'tokenizer.json').exists():
            original = tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
            return [original.encode(line, add_special_tokens=False).tokens for line in lines]
        return sentencepiece.SentencePieceProcessor(str(tmp_path / f'{side}.spm')).encode(lines, out_type=str)

    ours = [make().encode(line) for line in lines]
    if kind == 'transformer':
        found = ctranslate2.Translator(str(tmp_path), compute_type='float32').score_batch(
            encoded('source'), encoded('target'))
        inputs = padded([[*row, EOS] for row in ours]), padded([[BOS, *row] for row in ours])
    else:
        found = ctranslate2.Generator(str(tmp_path), compute_type='float32').score_batch(
            [[SPECIAL[BOS], *row] for row in encoded('text')])
        inputs = padded([[BOS, *row[:-1]] for row in ours]),
    log_probs = np.asarray(jax.nn.log_softmax(trained.module.apply(
        {'params': trained.params}, *map(jnp.asarray, inputs))))
    for row, tokens in enumerate(ours):
        np.testing.assert_allclose(found[row].log_probs[:len(tokens)], log_probs[row, np.arange(len(tokens)), tokens],
                                   atol=1e-4)


@pytest.mark.parametrize('kind, options', IMPOSSIBLE, ids=str)
def test_what_it_cannot_compute_is_refused_by_the_name_of_the_option(kind, options, tmp_path):
    with pytest.raises(UserError, match='does not support these options of the model: config.model.') as refused:
        write_ctranslate2(random_model(kind, options, tmp_path), tmp_path)
    assert any(name in str(refused.value) for name in options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('option', SUPPORTED)
def test_a_value_that_is_added_to_an_option_is_refused(option):
    config = base.get_config()
    config.model[option] = 'added'
    assert refusals(config) == [f'model.{option}=added']


def test_a_kind_of_model_that_only_safetensors_can_express_is_refused(tmp_path):
    trained = random_run('patches')._trained
    for write in write_ctranslate2, write_huggingface:
        with pytest.raises(UserError, match='kind=patches: only transformer and language_model .* format safetensors$'):
            write(trained, tmp_path)
    write_safetensors(trained, tmp_path)
