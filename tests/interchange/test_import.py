"""Models of Hugging Face's library as ours: logits, greedy outputs, and back again bit for bit."""

import functools
import json
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

for library in 'tokenizers', 'torch', 'transformers':
    pytest.importorskip(library, reason="it is in the extra 'test-interchange', and is not installed here")

import msgspec
import torch
import transformers
from safetensors.numpy import load_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import inference
from inference.options import SearchOptions
from input_pipeline.foreign_tokenizers import NONE
from input_pipeline.tokenizer import BOS, EOS, PAD, UNK
from interchange import llama
from interchange.export import export
from model.positional import Rotary
from tests.interchange.families import FAMILIES, VARIANTS
from tests.interchange.lines import mixed_lines

pytestmark = pytest.mark.interchange

torch.set_num_threads(1)
PROMPTS = mixed_lines(100, seed=3, words=0.99)


@functools.cache
def opened(name):
    """(their model, ours, their folder)"""
    folder = Path(tempfile.mkdtemp(prefix='families-')) / 'theirs'
    return (FAMILIES | VARIANTS)[name](folder), inference.load(folder), folder


def padded(rows, fill):
    """The rows as an array, padded, and which of it is there."""
    array = np.full((len(rows), max(map(len, rows))), fill, np.int32)
    for row, tokens in zip(array, rows, strict=True):
        row[:len(tokens)] = tokens
    return array, np.array([[place < len(tokens) for place in range(array.shape[1])] for tokens in rows])


def ordinary(rng, tokenizer, lengths):
    return [rng.integers(4, len(tokenizer), length).tolist() for length in lengths]


def is_translator(run):
    return run.config.task == 'translation'


@pytest.mark.parametrize('name', [*FAMILIES, *VARIANTS])
def test_logits_of_padded_batches_are_theirs(name):
    theirs, run, _ = opened(name)
    tokenizers, rng = run.model.tokenizers, np.random.default_rng(0)
    source, target = tokenizers['source'], tokenizers['target']
    read = ordinary(rng, target, (1, 5, 17, 40, 64))
    written = [[BOS, *tokens] for tokens in read]
    tokens, there = padded(written, PAD)
    known = target.order != NONE
    known[list(target.absent)] = False
    with torch.no_grad():
        their_tokens = torch.tensor(np.where(there, target.order[tokens], 0))
        if is_translator(run):
            sources, sources_there = padded([[*each, EOS] for each in ordinary(rng, source, (40, 3, 64, 9, 20))], PAD)
            expected = theirs(input_ids=torch.tensor(np.where(sources_there, source.order[sources], 0)),
                              attention_mask=torch.tensor(sources_there), decoder_input_ids=their_tokens).logits
            found = run.model.module.apply({'params': run.model.params}, jnp.asarray(sources), jnp.asarray(tokens))
        else:
            expected = theirs(input_ids=their_tokens, attention_mask=torch.tensor(there)).logits
            found = run.model.module.apply({'params': run.model.params}, jnp.asarray(tokens))
    expected = expected.numpy()[..., target.order[known]]
    np.testing.assert_allclose(np.asarray(found)[there][:, known], expected[there], atol=1e-4)
    assert np.abs(expected).max() > 1


def left_padded(rows, fill):
    """The rows with their padding in front, as transformers generates from them, and which of it is there."""
    array, there = padded([row[::-1] for row in rows], fill)
    return torch.tensor(array[:, ::-1].copy()), torch.tensor(there[:, ::-1].copy())


@pytest.mark.parametrize('name', FAMILIES)
def test_greedy_outputs_are_theirs(name):
    theirs, run, _ = opened(name)
    source, target = (run.model.tokenizers[side] for side in ('source', 'target'))
    answer = run.translate if is_translator(run) else run.generate
    outputs = answer(PROMPTS, SearchOptions(method='greedy', extra_length=12))
    end = int(target.order[EOS])
    read = [source.order[[*output.source_tokens, EOS] if is_translator(run) else output.source_tokens].tolist()
            for output in outputs]
    tokens, there = map(torch.tensor, padded(read, 0)) if is_translator(run) else left_padded(read, 0)
    never = sorted({int(target.order[each]) for each in (PAD, BOS, UNK)} - {NONE, end})
    with torch.no_grad():
        found = theirs.generate(tokens, attention_mask=there, do_sample=False, num_beams=1, eos_token_id=end,
                                pad_token_id=theirs.config.pad_token_id or 0, suppress_tokens=never or None,
                                forced_eos_token_id=None, max_new_tokens=12)
    found = found[:, 1 if is_translator(run) else tokens.shape[1]:].tolist()
    for prompt, output, expected in zip(PROMPTS, outputs, found, strict=True):
        expected = expected[:expected.index(end)] if end in expected else expected
        assert target.order[output.hypotheses[0].tokens[:12]].tolist() == expected, prompt


@pytest.mark.parametrize('name', FAMILIES)
def test_back_again_is_the_same_bit_for_bit(name, tmp_path):
    _, run, folder = opened(name)
    export(folder, tmp_path / 'again', 'huggingface')
    before, after = (load_file(each / 'model.safetensors') for each in (folder, tmp_path / 'again'))
    assert before.keys() == after.keys()
    for key in before:
        assert before[key].tobytes() == after[key].tobytes(), key
    there, here = (json.loads((each / 'config.json').read_text()) for each in (folder, tmp_path / 'again'))
    # Sinusoids reach as far as one likes; of several end tokens one is kept.
    free = {'transformers_version', 'n_inner', 'eos_token_id', 'bos_token_id', 'max_position_embeddings'}
    for field in there.keys() & here.keys() - free:
        assert here[field] == there[field] or {here[field], there[field]} == {'silu', 'swish'}, field
    again = inference.load(tmp_path / 'again')
    for side, tokenizer in run.model.tokenizers.items():
        assert again.model.tokenizers[side].encode(PROMPTS[0]) == tokenizer.encode(PROMPTS[0])


LINEAR = {'rope_type': 'linear', 'factor': 4.0}


@pytest.mark.parametrize('fields', [
    {'rope_parameters': {'rope_theta': 500.0}, 'rope_scaling': LINEAR},
    {'rope_parameters': {'rope_theta': 500.0}, 'rope_scaling': LINEAR, 'rope_theta': 300.0},
    {'rope_parameters': {'rope_theta': 500.0}, 'rope_scaling': LINEAR | {'rope_theta': 700.0}},
    {'rope_parameters': LINEAR, 'rope_scaling': {'type': 'default'}},
    {'rope_parameters': LINEAR, 'rope_scaling': {}}, {'rope_parameters': {}, 'rope_scaling': LINEAR}], ids=str)
def test_rotary_positions_in_two_fields_are_read_as_in_transformers(fields, tmp_path):
    config = {'model_type': 'llama', 'hidden_size': 32, 'num_attention_heads': 4} | fields
    (tmp_path / 'config.json').write_text(json.dumps(config))
    expected = LlamaRotaryEmbedding(transformers.LlamaConfig.from_pretrained(tmp_path)).inv_freq.numpy()
    options = llama.options(msgspec.convert(config, llama.Llama))
    prefix = 'model.rotary_'
    rotary = Rotary(**{name.removeprefix(prefix): options[name] for name in options if name.startswith(prefix)})
    np.testing.assert_allclose(1 / rotary.positions_per_radian(width=8), expected, rtol=1e-6)
