"""Folders of other formats: round trips, complete or absent, and models that give NaN. Needs no other library."""

import errno
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('safetensors', reason="it is in the extra 'interchange', and is not installed here")

import safetensors.numpy

import configs
import inference
from inference.options import SearchOptions
from input_pipeline.foreign_tokenizers import sentencepiece_tokenizer
from input_pipeline.tokens import BOS, EOS, PAD
from interchange import export as export_module
from interchange.export import export
from interchange.folders import read_models
from interchange.huggingface import read_huggingface, write_huggingface
from interchange.safetensors_folder import write_safetensors
from interchange.tokenizer_files import with_dummy_prefix
from runtime.errors import UserError
from tests.bad_inputs.imports import with_arrays
from tests.interchange.small_models import LINES, small_model, write_small
from training.imported import import_weights

GREEDY = SearchOptions(method='greedy', extra_length=3)


@pytest.mark.parametrize('name', ['marian', 'marian of two vocabularies'])
def test_a_marian_export_of_a_run_opens_again_and_is_the_same(name, tmp_path):
    trained = write_small(name, tmp_path / 'model')
    run = inference.load(tmp_path / 'model')
    assert run.model.tokenizers['target'].absent == ()
    for side, tokenizer in trained.tokenizers.items():
        assert run.model.tokenizers[side].encode(LINES[0]) == tokenizer.encode(LINES[0])
    expected = jax.tree_util.tree_leaves_with_path(trained.params)
    again = dict(jax.tree_util.tree_leaves_with_path(run.model.params))
    for path, leaf in expected:
        np.testing.assert_array_equal(again[path], leaf)


@pytest.mark.parametrize('other', [0.0, 1.0])
def test_a_copy_of_tied_embeddings_is_accepted_only_if_it_is_equal(other, tmp_path):
    trained = write_small('marian', tmp_path / 'model')
    path = tmp_path / 'model' / 'model.safetensors'
    table = safetensors.numpy.load_file(path)['model.shared.weight']
    path.write_bytes(with_arrays(**{'lm_head.weight': lambda _: table + np.float32(other)})(path.read_bytes()))
    if other:
        with pytest.raises(UserError, match='lm_head.weight and model.shared.weight differ'):
            read_models([tmp_path / 'model'], 'best')
    else:
        read, = jax.tree.leaves(read_models([tmp_path / 'model'], 'best').params['target_embedding'])
        np.testing.assert_array_equal(read, *jax.tree.leaves(trained.params['target_embedding']))


def test_an_export_inside_a_run_is_refused(tmp_path):
    write_small('own', tmp_path / 'run')
    with pytest.raises(UserError, match='is inside .*run'):
        export(tmp_path / 'run', tmp_path / 'run' / 'data' / 'x', 'safetensors')
    assert not (tmp_path / 'run' / 'data' / 'x').exists()


def test_an_export_below_another_config_json_has_files_that_others_can_read(tmp_path):
    write_small('own', tmp_path / 'run')
    (tmp_path / 'config.json').write_text('{"editor": "vim"}')
    for format in 'safetensors', 'huggingface':
        export(tmp_path / 'run', tmp_path / format, format)
        modes = {path.name: path.stat().st_mode for path in (tmp_path / format).iterdir() if path.is_file()}
        assert set(modes.values()) == {(tmp_path / 'config.json').stat().st_mode}, modes


def test_the_export_of_an_imported_tokenizer_keeps_its_special_tokens(tmp_path):
    write_small('qwen2', tmp_path / 'model')
    written = json.loads((tmp_path / 'model' / 'tokenizer_config.json').read_text())
    assert {kind: written.get(f'{kind}_token') for kind in ('pad', 'bos', 'eos', 'unk')} == {
        'pad': '<pad>', 'bos': '<s>', 'eos': '</s>', 'unk': '<unk>'}


@pytest.mark.parametrize('name', ['gpt2', 'llama'])
def test_an_export_keeps_the_padding_token(name, tmp_path):
    write_small(name, tmp_path / 'model')
    assert read_models([tmp_path / 'model'], 'best').tokenizers['text'].order[PAD] == PAD


@pytest.mark.parametrize('changes, window, context', [
    ({'max_position_embeddings': 1_024_000}, 8, 1_000_000), ({'max_position_embeddings': 8}, 8, 8),
    ({'sliding_window': 1_024_000}, 1_000_000, 24)])
def test_limits_of_the_context_of_an_imported_model(changes, window, context, tmp_path):
    write_small('mistral', tmp_path / 'model')
    path = tmp_path / 'model' / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    config = read_models([tmp_path / 'model'], 'best').config
    assert (config.model.window, config.data.context) == (window, context)
    recipe = configs.base.get_config()
    for longer_or_shorter in 64, 6:
        recipe.update(task='language_model', eval={'metric': 'loss'},
                      data={'context': longer_or_shorter, 'packing': config.data.packing})
        assert read_huggingface(tmp_path / 'model', recipe=recipe).config.model.window == window


def with_fields(path, removed=(), **fields):
    """Changes and removes fields of a JSON file."""
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in removed}))


@pytest.mark.parametrize('name, aliases', [
    ('gpt2', {'num_attention_heads': 'n_head', 'num_hidden_layers': 'n_layer', 'hidden_size': 'n_embd',
              'max_position_embeddings': 'n_positions'}),
    ('marian', {'num_attention_heads': 'encoder_attention_heads', 'num_hidden_layers': 'encoder_layers',
                'hidden_size': 'd_model'})])
def test_fields_of_config_json_may_have_their_other_names(name, aliases, tmp_path):
    write_small(name, tmp_path / 'model')
    expected, path = read_models([tmp_path / 'model'], 'best'), tmp_path / 'model' / 'config.json'
    written = json.loads(path.read_text())
    for removed in (), aliases.values():
        with_fields(path, removed, **{alias: written[field] for alias, field in aliases.items()})
        assert read_models([tmp_path / 'model'], 'best').config.to_dict() == expected.config.to_dict()


@pytest.mark.parametrize('fields, window', [
    ({'use_sliding_window': True, 'max_window_layers': 0}, 8), ({'use_sliding_window': True}, 0),
    ({'use_sliding_window': True, 'max_window_layers': 1}, 0), ({'max_window_layers': 0}, 0),
    ({'use_sliding_window': True, 'layer_types': ['full_attention']}, 0),
    ({'use_sliding_window': True, 'layer_types': ['sliding_attention']}, 8)])
def test_the_layers_of_qwen2_that_have_a_window(fields, window, tmp_path):
    write_small('qwen2', tmp_path / 'model')
    with_fields(tmp_path / 'model' / 'config.json', sliding_window=8, use_sliding_window=False)
    with_fields(tmp_path / 'model' / 'config.json', **fields)
    assert read_models([tmp_path / 'model'], 'best').config.model.window == window


def test_an_empty_config_of_layers_has_no_effect(tmp_path):
    write_small('gpt2', tmp_path / 'model')
    expected = read_models([tmp_path / 'model'], 'best').config.to_dict()
    with_fields(tmp_path / 'model' / 'config.json', per_layer_config={})
    assert read_models([tmp_path / 'model'], 'best').config.to_dict() == expected


def test_a_marian_without_tied_embeddings_does_not_use_the_shared_table(tmp_path):
    (tmp_path / 'model').mkdir()
    write_huggingface(small_model('marian of two vocabularies', tmp_path, share_embeddings='none'), tmp_path / 'model')
    expected = read_models([tmp_path / 'model'], 'best').params
    with_fields(tmp_path / 'model' / 'config.json', share_encoder_decoder_embeddings=True)
    path = tmp_path / 'model' / 'model.safetensors'
    path.write_bytes(with_arrays(**{'model.shared.weight': lambda array: array})(path.read_bytes()))
    read = read_models([tmp_path / 'model'], 'best').params
    assert jax.tree.all(jax.tree.map(np.array_equal, read, expected))


@pytest.mark.parametrize('dtype', [np.float16, jnp.bfloat16])
def test_weights_of_16_bits_in_two_files_without_the_prefix_of_their_names(dtype, tmp_path):
    write_small('gpt2', tmp_path / 'model')
    expected = read_models([tmp_path / 'model'], 'best').params
    path, prefix = tmp_path / 'model' / 'model.safetensors', 'transformer.'
    arrays = [(name.removeprefix(prefix), array.astype(dtype))
              for name, array in safetensors.numpy.load_file(path).items()]
    path.unlink()
    parts = {'model-00001-of-00002.safetensors': dict(arrays[:3]), 'model-00002-of-00002.safetensors': dict(arrays[3:])}
    for name, part in parts.items():
        safetensors.numpy.save_file(part, tmp_path / 'model' / name)
    (tmp_path / 'model' / 'model.safetensors.index.json').write_text(json.dumps(
        {'metadata': {}, 'weight_map': {array: name for name, part in parts.items() for array in part}}))
    read = read_models([tmp_path / 'model'], 'best').params
    for before, after in zip(*map(jax.tree.leaves, (expected, read)), strict=True):
        np.testing.assert_array_equal(after, np.asarray(before, dtype).astype(np.float32))


@pytest.mark.parametrize('format', ['ctranslate2', 'huggingface'])
def test_a_run_with_edits_is_exported_only_in_our_own_format(format, tmp_path):
    (tmp_path / 'run').mkdir()
    trained = small_model('gpt2', tmp_path / 'run')
    trained.config.train.edits = '[{"edit": "zero", "place": "encoder/layers_0"}]'
    write_safetensors(trained, tmp_path / 'run')
    with pytest.raises(UserError, match=f'run was trained with config.train.edits, which {format} cannot apply. Use '
                                        'the format safetensors'):
        export(tmp_path / 'run', tmp_path / 'export', format)
    assert [path.name for path in tmp_path.iterdir()] == ['run']
    export(tmp_path / 'run', tmp_path / 'export', 'safetensors')
    assert inference.load(tmp_path / 'export').config.train.edits == trained.config.train.edits


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gpt2', 'marian', 'llama'])
def test_a_model_whose_heads_do_not_divide_its_width_is_refused(name, tmp_path):
    with pytest.raises(UserError, match='config.model.d_model=66: .* needs a multiple of num_heads=4'):
        write_huggingface(small_model(name, tmp_path, d_model=66, d_k=16, d_v=16), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_llama_accepts_equal_widths_of_keys_and_values(tmp_path):
    trained = small_model('llama', tmp_path, d_model=64, d_k=16, scale_embeddings=False)
    write_huggingface(trained, tmp_path)
    assert jax.tree.all(jax.tree.map(np.array_equal, read_models([tmp_path], 'best').params, trained.params))
    with pytest.raises(UserError, match=r'config.model.d_v=16: Llama needs d_v=d_k \(d_k=8\)'):
        write_huggingface(small_model('llama', tmp_path, d_model=64, d_k=8), tmp_path)


def test_a_model_with_a_window_and_biases_is_exported_only_with_an_imported_tokenizer_json(tmp_path):
    with pytest.raises(UserError, match='only models with an imported tokenizer.json are exported as Qwen2'):
        write_huggingface(small_model('mistral', tmp_path, attention_bias='qkv'), tmp_path)


@pytest.mark.parametrize('scaling', [{}, {'rope_type': 'linear', 'factor': 2.0}, {
    'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
    'original_max_position_embeddings': 64}])
def test_an_export_has_the_rotary_positions_in_the_fields_of_old_and_new_versions_of_transformers(scaling, tmp_path):
    options = {'rotary_scaling': scaling['rope_type'], 'rotary_factor': scaling['factor'],
               'rotary_original_length': 64} if scaling else {}
    trained, path = small_model('llama', tmp_path, rotary_base=500.0, **options), tmp_path / 'config.json'
    write_huggingface(trained, tmp_path)
    written = json.loads(path.read_text())
    assert written['rope_theta'] == 500 and written.get('rope_scaling', {}) == scaling
    for unknown in {'rope_parameters'}, {'rope_theta', 'rope_scaling'}:
        path.write_text(json.dumps({name: value for name, value in written.items() if name not in unknown}))
        read = read_models([tmp_path], 'best').config.model
        for name in 'rotary_base', 'rotary_scaling', *(['rotary_factor'] if scaling else []):
            assert read[name] == trained.config.model[name], (unknown, name)


@pytest.mark.parametrize('kind', ['linear', 'llama3'])
def test_a_scaling_of_rotary_positions_by_1_is_imported_as_no_scaling(kind, tmp_path):
    write_small('llama', tmp_path / 'model')
    path = tmp_path / 'model' / 'config.json'
    config = json.loads(path.read_text())
    config['rope_parameters'] |= {'rope_type': kind, 'factor': 1.0, 'original_max_position_embeddings': 64}
    path.write_text(json.dumps(config))
    assert read_models([tmp_path / 'model'], 'best').config.model.rotary_scaling == 'none'


def test_an_export_names_the_start_token_that_its_format_merges_with_the_end_token(tmp_path, caplog):
    trained = small_model('gpt2', tmp_path, scale_embeddings=False)
    size = len(trained.tokenizers['text'])
    text = sentencepiece_tokenizer(with_dummy_prefix(trained.tokenizers['text'].model), [None, 2, 2, 3], size)
    table = np.resize(np.float32([0, 1, 2]), (len(text), 8))
    for equal in True, False:
        table[BOS] = table[EOS] + (not equal)
        params = trained.params | {'embedding': {'embedding': table}}
        write_huggingface(trained._replace(params=params, tokenizers={'text': text}), tmp_path)
        assert ('<s> and </s> are one token' in caplog.text) is not equal
    read = read_models([tmp_path], 'best').params['embedding']['embedding']
    np.testing.assert_array_equal(read[EOS], table[EOS])


@pytest.mark.parametrize('to, quantization, message', [
    ('onnx', None, '^to=onnx: there is no such format. Use ctranslate2, huggingface, safetensors'),
    ('safetensors', 'int8', '^quantization=int8 does not apply to the format safetensors. Remove this argument'),
    ('ctranslate2', 'int3', '^quantization=int3: there is no such type. Use float32, int8, float16')])
def test_the_format_of_an_export_is_checked_before_the_run_is_read(to, quantization, message, tmp_path):
    with pytest.raises(UserError, match=message):
        export(tmp_path / 'none', tmp_path / 'new', to, quantization=quantization)


def test_a_full_disk_leaves_nothing_of_an_export(tmp_path, monkeypatch):
    def full(trained, folder):
        (folder / 'model.bin').write_bytes(b'truncated')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_small('own', tmp_path / 'run')
    monkeypatch.setitem(export_module.FORMATS, 'safetensors', full)
    with pytest.raises(UserError, match=r'a/b cannot be written: No space left on device \(model.bin\)'):
        export(tmp_path / 'run', tmp_path / 'a' / 'b', 'safetensors')
    assert [path.name for path in tmp_path.iterdir()] == ['run']


@pytest.mark.slow
def test_weights_of_nan_are_imported_only_when_asked_for_and_a_search_names_the_run(tmp_path):
    write_small('gpt2', tmp_path / 'model')
    path = tmp_path / 'model' / 'model.safetensors'
    path.write_bytes(with_arrays(wte__weight=lambda array: array * np.float32('nan'))(path.read_bytes()))
    with pytest.raises(UserError, match='wte.weight contains NaN or infinity.*--allow_nonfinite'):
        import_weights(tmp_path / 'model', tmp_path / 'run')
    assert [path.name for path in tmp_path.iterdir()] == ['model']
    import_weights(tmp_path / 'model', tmp_path / 'run', allow_nonfinite=True)
    run = inference.load(tmp_path / 'run')
    for options in GREEDY, SearchOptions(beam=2, extra_length=3):
        with pytest.raises(UserError, match='/run: the search finds no output, .* parameters and outputs'):
            run.generate(['the'], options)


def test_parameters_of_nan_are_not_exported_to_our_own_format_and_not_opened(tmp_path):
    trained, path = write_small('own', tmp_path / 'model'), tmp_path / 'model' / 'model.safetensors'
    table = np.full(trained.params['embedding']['embedding'].shape, np.nan, np.float32)
    with pytest.raises(UserError, match='model: the parameter embedding/embedding contains NaN or infinity: .* '
                                        'Export another checkpoint, or use the format huggingface$'):
        write_safetensors(trained._replace(params=trained.params | {'embedding': {'embedding': table}}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['model']
    path.write_bytes(with_arrays(**{'embedding/embedding': lambda _: table})(path.read_bytes()))
    with pytest.raises(UserError, match='array embedding/embedding contains NaN .* Export another checkpoint'):
        read_models([tmp_path / 'model'], 'best')


def test_an_import_warns_if_prompts_begin_differently_with_the_recipe(tmp_path, caplog):
    write_small('llama', tmp_path / 'model')
    recipe = configs.recipe('stdlib_lm')
    read_huggingface(tmp_path / 'model', recipe=recipe)
    assert (f'config.data.packing=packed: prompts begin with the start token, but the tokenizer of {tmp_path}/model '
            'adds no start token to a text. To begin prompts as in the original model, set '
            'config.data.packing=contiguous') in caplog.text
    caplog.clear()
    recipe.data.packing = 'contiguous'
    read_huggingface(tmp_path / 'model', recipe=recipe)
    assert 'config.data.packing' not in caplog.text


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('name, array', [('gpt2', 'ln_f__weight'), ('marian', 'model__shared__weight')])
def test_finite_weights_whose_logits_overflow_are_not_imported(name, array, tmp_path):
    write_small(name, tmp_path / 'model')
    path = tmp_path / 'model' / 'model.safetensors'
    path.write_bytes(with_arrays(**{array: lambda array: np.full_like(array, 3e38)})(path.read_bytes()))
    with pytest.raises(UserError, match='the imported model returns NaN or infinity for a line of text'):
        import_weights(tmp_path / 'model', tmp_path / 'run')
    assert [path.name for path in tmp_path.iterdir()] == ['model']


@pytest.mark.parametrize('option, value, reason', [
    ('frozen', '*embedding', '. Import the model first, and then train it with --config=configs/fine_tune.py:{}/run '
                             "--config.train.frozen='*embedding'"),
    ('lora_rank', 8, '. Import the model first, and then train it with --config=configs/fine_tune.py:{}/run '
                     '--config.train.lora_rank=8'),
    ('init_from', 'runs/a', ', because the weights come from --from. Use another --config, or add '
                            '--config.train.init_from= (nothing after =)')])
def test_a_model_is_not_imported_with_adapters_frozen_parts_or_other_parameters(option, value, reason, tmp_path):
    write_small('llama', tmp_path / 'model')
    recipe = configs.recipe('stdlib_lm')
    recipe.train[option] = value
    with pytest.raises(UserError) as refused:
        import_weights(tmp_path / 'model', tmp_path / 'run', recipe)
    assert str(refused.value) == (
        f'config.train.{option}={value!r}: cannot be set in an import{reason.format(tmp_path)}')
    assert [path.name for path in tmp_path.iterdir()] == ['model']
