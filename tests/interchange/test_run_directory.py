"""An imported model is a run: it gives answers and can be trained further. Messages name a wrong file or field."""

import json
import shutil

import numpy as np
import pytest

for library in 'tokenizers', 'torch', 'transformers':
    pytest.importorskip(library, reason="it is in the extra 'test-interchange', and is not installed here")

import inference
from inference.options import SearchOptions
from interchange.export import export
from runtime.errors import UserError
from tests.interchange.families import gpt2, marian
from tests.scripts import script

pytestmark = pytest.mark.interchange


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp('folders')
    marian(root / 'marian')
    gpt2(root / 'gpt2')
    return root


def test_an_imported_translator_translates_explains_and_trains_further(folders, tmp_path):
    run = tmp_path / 'run'
    done = script('-m', 'tools.import_weights', f'--from={folders / "marian"}', f'--workdir={run}',
                  '--config=configs/demo.py', '--config.train.steps=4', '--config.optimizer.warmup=2',
                  f'--config.cache_dir={tmp_path / "cache"}', '--config.eval.every=4', '--config.eval.bleu_sentences=4',
                  '--config.batch.buckets=1')
    assert done.returncode == 0, done.stderr.decode()
    done = script('decode.py', f'--workdir={run}', '--input=-', f'--explain={tmp_path / "page.html"}',
                  '--extra_length=5', stdin=b'the man is in the house\n')
    assert done.returncode == 0, done.stderr.decode()
    theirs = inference.load(folders / 'marian')
    options = SearchOptions(extra_length=5)
    assert done.stdout.decode().rstrip('\n') == theirs.translate(['the man is in the house'], options)[0].text
    assert 'data' in (tmp_path / 'page.html').read_text('utf-8')
    done = script('train.py', f'--config={run / "recipe.py"}', f'--workdir={run}')
    assert done.returncode == 0, done.stderr.decode()
    assert 'begins again' not in done.stderr.decode()
    trained = inference.load(run, 'latest')
    assert trained.checkpoint == [4]
    before, after = (np.asarray(each.model.params['target_embedding']['embedding']) for each in (theirs, trained))
    assert 0 < np.abs(before - after).max() < 0.1
    export(run, tmp_path / 'again', 'huggingface', checkpoint='latest')
    assert inference.load(tmp_path / 'again').translate(['the'])[0].text == trained.translate(['the'])[0].text


@pytest.mark.parametrize('name, fields, message', [
    ('gpt2', {'scale_attn_by_inverse_layer_idx': True}, 'scale_attn_by_inverse_layer_idx=True'),
    ('gpt2', {'model_type': 'bert'}, "model_type='bert'"), ('gpt2', {'n_embd': 'wide'}, 'n_embd: expected int'),
    ('gpt2', {'n_layer': 3}, 'lack'), ('gpt2', {'n_layer': 1}, 'does not have'),
    ('gpt2', {'activation_function': 'tanh'}, "activation_function='tanh'"),
    ('gpt2', {'vocab_size': 9}, 'vocab_size=9'), ('gpt2', {'eos_token_id': None}, 'eos_token_id'),
    ('gpt2', {'quantization_config': {'bits': 4}}, 'quantization_config'),
    ('marian', {'decoder_ffn_dim': 5}, 'decoder_ffn_dim=5'),
    ('marian', {'decoder_start_token_id': 3}, 'start_token_id=3')])
def test_what_is_not_supported_is_refused_by_its_name(folders, name, fields, message, tmp_path):
    folder = tmp_path / name
    shutil.copytree(folders / name, folder)
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | fields))
    with pytest.raises(UserError) as refused:
        inference.load(folder)
    assert message in str(refused.value)


@pytest.mark.parametrize('name, missing', [('gpt2', 'merges.txt'), ('gpt2', 'vocab.json'), ('marian', 'target.spm'),
                                           ('gpt2', 'model.safetensors')])
def test_a_file_that_is_missing_is_named(folders, name, missing, tmp_path):
    folder = tmp_path / name
    shutil.copytree(folders / name, folder)
    (folder / missing).unlink()
    with pytest.raises(UserError, match=missing):
        inference.load(folder)


@pytest.mark.parametrize('content', [b'', b'{"x": ', b'\0' * 100])
def test_damaged_weights_are_named(folders, content, tmp_path):
    folder = tmp_path / 'gpt2'
    shutil.copytree(folders / 'gpt2', folder)
    (folder / 'model.safetensors').write_bytes(content)
    with pytest.raises(UserError, match='model.safetensors cannot be read'):
        inference.load(folder)
