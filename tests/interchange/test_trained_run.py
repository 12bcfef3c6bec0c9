"""A trained run in the libraries that it is exported to: translations, sizes of files, a mean of checkpoints."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

for library in 'ctranslate2', 'torch', 'transformers':
    pytest.importorskip(library, reason="it is in the extra 'test-interchange', and is not installed here")

import ctranslate2
import sentencepiece
import torch
import transformers

import inference
from inference.options import SearchOptions
from input_pipeline.tokenizer import BOS, EOS, PAD, UNK
from interchange.export import export
from interchange.tokenizer_files import unique_pieces
from tests.scripts import ROOT

pytestmark = pytest.mark.interchange


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """Trains the demo for a short time, with the paper's positions, which all libraries support.

    It trains in its own process, because XLA hardly optimises the programs of the tests (tests/conftest.py).
    """
    folder = tmp_path_factory.mktemp('run')
    options = {
        'cache_dir': folder / 'cache', 'model.num_layers': 1, 'model.d_model': 64, 'model.d_ff': 128,
        'model.position': 'sinusoidal', 'batch.buckets': 1, 'optimizer.warmup': 100, 'train.steps': 1600,
        'eval.every': 1600, 'eval.bleu_sentences': 8, 'checkpoint.every': 800}
    subprocess.run([sys.executable, 'train.py', '--config=configs/demo.py', f'--workdir={folder / "run"}',
                    *(f'--config.{name}={value}' for name, value in options.items())],
                   cwd=ROOT, env=os.environ | {'XLA_FLAGS': ''}, check=True)
    return inference.load(folder / 'run')


@pytest.mark.parametrize('method', ['greedy', 'beam'])
def test_searches_of_ctranslate2_find_what_ours_do(run, method, tmp_path):
    export(run.workdir, tmp_path / 'served', 'ctranslate2')
    sources = [source for source, _ in run.data().pairs('test')[:500]]
    ours = run.translate(sources, SearchOptions(method=method, alpha=0.0))
    source, target = (sentencepiece.SentencePieceProcessor(str(tmp_path / 'served' / f'{side}.spm'))
                      for side in ('source', 'target'))
    theirs = ctranslate2.Translator(str(tmp_path / 'served'), compute_type='float32').translate_batch(
        [source.encode(each, out_type=str) for each in sources], beam_size=4 if method == 'beam' else 1,
        length_penalty=0, return_scores=True, max_decoding_length=120, min_decoding_length=0)
    same = 0
    for found, output in zip(theirs, ours, strict=True):
        best = output.hypotheses[0]
        if target.decode(found.hypotheses[0]) == best.text:
            same += 1
            assert abs(found.scores[0] - best.log_prob) < 1e-3 * max(1, len(best.tokens) / 20), output.source
    assert len(sources) == 500 and same >= 495


@pytest.mark.parametrize('quantization, share', [('float16', 0.6), ('int8', 0.5)])
def test_quantized_files_are_smaller_and_translate(run, quantization, share, tmp_path):
    for name in 'float32', quantization:
        export(run.workdir, tmp_path / name, 'ctranslate2', quantization=name)
    sizes = [(tmp_path / name / 'model.bin').stat().st_size for name in (quantization, 'float32')]
    assert sizes[0] < share * sizes[1]
    pieces = unique_pieces(run.model.tokenizers['source'])
    tokens = [pieces[token] for token in run.model.tokenizers['source'].encode('Monday, 3 July 2023')]
    assert ctranslate2.Translator(str(tmp_path / quantization)).translate_batch([tokens])[0].hypotheses[0]


def test_an_average_of_checkpoints_is_exported_too(run, tmp_path):
    export(run.workdir, tmp_path / 'mean', 'safetensors', checkpoint='average:2')
    mean, ours = inference.load(tmp_path / 'mean'), inference.load(run.workdir, 'average:2')
    for found, expected in zip(jax.tree.leaves(mean.model.params), jax.tree.leaves(ours.model.params), strict=True):
        assert np.array_equal(found, expected)
    assert mean.checkpoint == ours.checkpoint == [800, 1600]
    assert mean.translate(['one'])[0].text == ours.translate(['one'])[0].text


@pytest.mark.parametrize('method', ['greedy', 'beam'])
def test_searches_of_transformers_find_what_ours_do(run, method, tmp_path):
    """500 sentences by MarianMTModel.generate, from their own tokens; beams without a length penalty."""
    export(run.workdir, tmp_path / 'marian', 'huggingface')
    theirs = transformers.MarianMTModel.from_pretrained(tmp_path / 'marian').eval()
    sources, limit = [source for source, _ in run.data().pairs('test')[:500]], 60
    ours = run.translate(sources, SearchOptions(method=method, alpha=0.0))
    same = 0
    for first in range(0, 500, 50):
        read = [torch.tensor([*output.source_tokens, EOS]) for output in ours[first:first + 50]]
        tokens, there = (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
                         for rows, value in ((read, PAD), ([torch.ones_like(row) for row in read], 0)))
        with torch.no_grad():
            found = theirs.generate(
                tokens, attention_mask=there, do_sample=False, num_beams=4 if method == 'beam' else 1,
                length_penalty=0.0, early_stopping=False, max_new_tokens=limit, eos_token_id=EOS,
                suppress_tokens=[PAD, BOS, UNK], forced_eos_token_id=None)[:, 1:].tolist()
        for output, row in zip(ours[first:], found, strict=False):
            best = output.hypotheses[0].tokens
            same += (row[:row.index(EOS)] if EOS in row else row) == list(best)
    assert same >= 495
