"""Folders of other formats that are damaged or mixed. Each case changes one file of a folder with a small model.

A row is (folder, file, change, words of the message), or (folder, {file: change}, words of the message).
tests/interchange/small_models.py writes the folders.
"""

import gzip
import json
import math

import numpy as np
import safetensors.numpy

from tests.bad_inputs.cases import FIFO, FOLDER, GONE, LOOP, NULL, cut, with_values, without

CONFIG, WEIGHTS, INDEX = 'config.json', 'model.safetensors', 'model.safetensors.index.json'
EMBEDDINGS = {'marian': 'model.shared.weight', 'gpt2': 'transformer.wte.weight', 'llama': 'model.embed_tokens.weight',
              'own': 'embedding/embedding'}
DEEP = b'[' * 100_000
LFS = b'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n'
HTML = b'<!DOCTYPE html>\n<html><head><title>404</title></head><body>Entry not found</body></html>\n'
WRONG = {'text': 'x', 'list': [1], 'object': {'a': 1}, 'null': None, 'fraction': 1.5, 'negative': -3, 'huge': 10 ** 40,
         'boolean': True}


def with_arrays(metadata=None, **changes):
    """Returns a function that changes arrays of a safetensors file, {name: function of the array}. None removes one."""
    def changed(content):
        found = safetensors.numpy.load(content)
        for name, change in changes.items():
            name = next((each for each in found if each.endswith(name.replace('__', '.'))), name)
            array = change(found.pop(name, np.zeros((2, 2), np.float32))) if change else found.pop(name)
            if change:
                found[name] = np.ascontiguousarray(array)
        return safetensors.numpy.save(found, metadata or {'format': 'pt'})
    return changed


def with_header(**changes):
    """Returns a function that changes the header of the first array of a safetensors file."""
    def changed(content):
        size = int.from_bytes(content[:8], 'little')
        header = json.loads(content[8:8 + size])
        header[next(name for name in header if name != '__metadata__')].update(changes)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, 'little') + text + content[8 + size:]
    return changed


def filled(value):
    def changed(array):
        array = array.copy()
        array.flat[array.size // 2] = value
        return array
    return changed


def typed(dtype):
    return lambda array: np.zeros(array.shape, dtype)


def flipped_at(share):
    def changed(content):
        place = int(len(content) * share)
        return content[:place] + bytes([content[place] ^ 16]) + content[place + 1:]
    return changed


SIZES = {'marian': ('vocab_size', 'd_model', 'encoder_layers', 'decoder_layers', 'encoder_ffn_dim', 'decoder_ffn_dim',
                    'encoder_attention_heads', 'max_position_embeddings'),
         'gpt2': ('vocab_size', 'n_embd', 'n_layer', 'n_head', 'n_inner', 'n_positions'),
         'llama': ('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads', 'num_key_value_heads',
                   'intermediate_size', 'max_position_embeddings', 'head_dim')}
ROWS = [
    *((kind, CONFIG, with_values(**{name: WRONG[wrong]}), (CONFIG, name))
      for kind, names in SIZES.items() for name in names for wrong in ('text', 'fraction', 'negative', 'huge')),
    *((kind, CONFIG, with_values(**{name: 10 ** 9}), (CONFIG, '1000000000'))
      for kind, names in SIZES.items() for name in names
      if (kind, name) != ('llama', 'max_position_embeddings')),  # rotary positions have no array of this length
    *((kind, CONFIG, content, CONFIG) for kind in SIZES for content in (
        b'', b'{"model_type": ', b'[1]', DEEP, b'{"model_type": "\xff"}', b'{"unused": "\xff"}')),
    *((kind, CONFIG, with_values(model_type=value), 'model_type') for kind in SIZES for value in ('bert', '', 3, None)),
    *((kind, CONFIG, with_values(quantization_config={'bits': 4}), 'quantization_config') for kind in SIZES),
    *((kind, CONFIG, with_values(eos_token_id=value), 'eos_token_id') for kind in SIZES
      for value in ('2', 1.5, True, None, {'a': 1})),
    *((kind, CONFIG, with_values(eos_token_id=10 ** 6), ('1000000')) for kind in SIZES),
    *((kind, CONFIG, with_values(tie_word_embeddings=value), 'tie_word_embeddings') for kind in SIZES
      for value in (1, 'yes', None)),
    ('llama', CONFIG, with_values(eos_token_id=[]), 'eos_token_id'),
    ('llama', CONFIG, with_values(eos_token_id=['2']), 'eos_token_id'),
    ('llama', CONFIG, with_values(rope_parameters=3), 'rope_parameters'),
    ('llama', CONFIG, with_values(rope_parameters=[1]), 'rope_parameters'),
    ('llama', CONFIG, with_values(rope_parameters={'rope_theta': 'far'}), 'rope_parameters.rope_theta'),
    ('llama', CONFIG, with_values(rope_parameters={'rope_theta': 0}), 'rope_parameters.rope_theta'),
    ('llama', CONFIG, with_values(rope_parameters={'rope_type': 'yarn', 'factor': 2.0}), 'yarn'),
    ('llama', CONFIG, with_values(rope_parameters={'rope_type': 'linear'}), 'factor is missing'),
    ('llama', CONFIG, with_values(rope_parameters={'rope_type': 'linear', 'factor': None}), 'factor is missing'),
    ('llama', CONFIG, with_values(rope_parameters={'rope_type': 'linear', 'factor': 'two'}), 'rope_parameters.factor'),
    ('llama', CONFIG, with_values(rope_parameters={'rope_type': 'llama3', 'factor': 8.0}), 'original_max_position'),
    ('llama', CONFIG, with_values(rope_parameters={'rope_type': 7}), 'rope_parameters.rope_type'),
    ('llama', CONFIG, with_values(rope_parameters={'attention_factor': 2}), 'attention_factor'),
    ('llama', CONFIG, with_values(rope_parameters={'partial_rotary_factor': 0.5}),
     'rope_parameters.partial_rotary_factor=0.5'),
    *(('llama', CONFIG, with_values(rope_parameters={
        'rope_type': 'llama3', 'factor': 8.0, 'original_max_position_embeddings': 64, name: 3.0}),
       f'rope_parameters.{name}=3.0 is not supported') for name in ('low_freq_factor', 'high_freq_factor')),
    ('llama', CONFIG, with_values(rope_scaling={
        'rope_type': 'llama3', 'factor': 8.0, 'original_max_position_embeddings': 64, 'low_freq_factor': 3.0}),
     'rope_scaling.low_freq_factor=3.0'),
    ('llama', CONFIG, with_values(rope_parameters=None, rope_scaling='linear'), 'rope_scaling'),
    ('llama', CONFIG, with_values(rope_theta='x'), 'rope_theta'),
    ('llama', CONFIG, with_values(rms_norm_eps=-1), 'rms_norm_eps'),
    ('llama', CONFIG, with_values(hidden_act='tanh'), 'hidden_act'),
    ('llama', CONFIG, with_values(hidden_act=3), 'hidden_act'),
    ('llama', CONFIG, with_values(attention_bias='no'), 'attention_bias'),
    ('llama', CONFIG, with_values(attention_dropout=7), 'attention_dropout'),
    ('mistral', CONFIG, with_values(sliding_window='all'), 'sliding_window'),
    ('mistral', CONFIG, with_values(sliding_window=-1), 'sliding_window'),
    ('mistral', CONFIG, with_values(sliding_window=[4]), 'sliding_window'),
    ('qwen2', CONFIG, with_values(use_sliding_window='x'), 'use_sliding_window'),
    ('qwen2', CONFIG, with_values(use_sliding_window=True, layer_types=['full_attention', 'sliding_attention']),
     'layer_types: some layers have a window'),
    ('qwen2', CONFIG, with_values(use_sliding_window=True, num_hidden_layers=29),
     'max_window_layers=28: some layers have a window'),
    *(('qwen2', CONFIG, with_values(use_sliding_window=True, layer_types=kinds),
       f'layer_types={kinds} is not supported') for kinds in ([], ['linear_attention'])),
    ('qwen2', CONFIG, with_values(layer_types='full'), 'layer_types'),
    ('qwen2', CONFIG, with_values(layer_types=[3]), 'layer_types'),
    ('marian', CONFIG, with_values(decoder_start_token_id=30), 'decoder_start_token_id=30'),
    ('marian', CONFIG, with_values(pad_token_id='0'), 'pad_token_id'),
    ('marian', CONFIG, with_values(pad_token_id=5000, decoder_start_token_id=5000), 'config.json: pad_token_id=5000'),
    ('marian', CONFIG, with_values(eos_token_id=5000), 'config.json: eos_token_id=5000'),
    ('marian', 'generation_config.json', b'{"eos_token_id": "2"}', 'generation_config.json'),
    ('marian', CONFIG, with_values(decoder_vocab_size=10 ** 9), 'decoder_vocab_size'),
    *(('marian', CONFIG, with_values(**{name: True}), name)
      for name in ('normalize_before', 'normalize_embedding', 'add_final_layer_norm')),
    ('marian', CONFIG, with_values(num_attention_heads=2),
     'num_attention_heads=2 and encoder_attention_heads=4 are two names of one field'),
    ('marian', CONFIG, with_values(decoder_attention_heads=2), 'decoder_attention_heads'),
    ('gpt2', CONFIG, with_values(add_cross_attention=True), 'add_cross_attention'),
    ('gpt2', CONFIG, with_values(embd_pdrop=0.9), 'embd_pdrop'),
    ('gpt2', CONFIG, with_values(scale_attn_weights=False), 'scale_attn_weights'),
    ('gpt2', CONFIG, with_values(num_attention_heads=2),
     'num_attention_heads=2 and n_head=4 are two names of one field, but their values differ'),
    ('gpt2', CONFIG, lambda content: with_values(num_attention_heads='4')(without('n_head')(content)),
     'num_attention_heads (n_head): expected'),
    ('gpt2', CONFIG, with_values(per_layer_config={'0': {'n_head': 2}}), 'per_layer_config'),
    ('gpt2', CONFIG, without('n_positions'), 'transformer.wpe.weight'),  # 1024, the default
    ('gpt2', CONFIG, without('vocab_size'), 'vocab_size=50257'),
    ('gpt2', CONFIG, with_values(n_inner=None), 'mlp.c_fc'),  # 4 x n_embd, the default
    ('llama', CONFIG, without('vocab_size'), 'vocab_size=32000'),

    *((kind, WEIGHTS, change, WEIGHTS) for kind in EMBEDDINGS for change in (
        GONE if kind != 'own' else cut, b'', b'\0' * 100, cut, FOLDER if kind != 'own' else b'{}', b'{"a": 1}',
        with_header(dtype='F8_E4M3'), with_header(dtype='XYZ'), with_header(shape=[1, 1]),
        with_header(shape=[-1, 3]), with_header(shape='x'), with_header(data_offsets=[0, 10 ** 12]),
        with_header(data_offsets=[8, 4]), flipped_at(0.97))),
    *((kind, WEIGHTS, with_arrays(**{name: filled(value)}), (WEIGHTS, name, 'NaN or infinity'))
      for kind, name in EMBEDDINGS.items() for value in (math.nan, math.inf, -math.inf)),
    *((kind, WEIGHTS, with_arrays(**{name: typed(dtype)}), (WEIGHTS, name, 'dtype'))
      for kind, name in EMBEDDINGS.items() for dtype in (np.int32, np.complex64, np.uint8, np.bool_)),
    *((kind, WEIGHTS, with_arrays(**{name: lambda array: array.T}), '300') for kind, name in EMBEDDINGS.items()),
    *((kind, WEIGHTS, with_arrays(**{name: lambda array: array[:-1]}), '300')
      for kind, name in EMBEDDINGS.items()),
    *((kind, WEIGHTS, with_arrays(another__weight=lambda array: array), 'another') for kind in EMBEDDINGS),
    ('gpt2', WEIGHTS, with_arrays(h__0__attn__c_attn__weight=np.ravel), 'c_attn.weight'),
    ('gpt2', WEIGHTS, with_arrays(h__0__attn__c_attn__weight=lambda array: array.reshape(-1, 1)), 'c_attn.weight'),
    ('gpt2', WEIGHTS, with_arrays(h__0__attn__c_attn__weight=np.transpose), 'c_attn.weight'),
    ('gpt2', WEIGHTS, with_arrays(h__0__attn__c_attn__bias=lambda array: array[None]), 'c_attn.bias'),
    ('gpt2', WEIGHTS, with_arrays(h__0__ln_1__weight=lambda array: array[:, None]), 'ln_1.weight'),
    ('gpt2', WEIGHTS, with_arrays(h__0__mlp__c_fc__weight=np.transpose), 'c_fc.weight'),
    ('gpt2', WEIGHTS, with_arrays(h__0__ln_1__weight=None), 'ln_1.weight'),
    ('gpt2', CONFIG, with_values(tie_word_embeddings=True), (WEIGHTS, 'lm_head.weight', 'wte.weight', 'differ')),
    ('marian', WEIGHTS, with_arrays(**{'lm_head.weight': lambda array: array}), (WEIGHTS, 'lm_head.weight', 'differ')),
    ('marian', WEIGHTS, with_arrays(**{'model.encoder.embed_tokens.weight': lambda array: array}), (
        WEIGHTS, 'encoder.embed_tokens.weight', 'differ')),
    ('gpt2', WEIGHTS, with_arrays(wte__weight=lambda array: (array.astype(np.float64) + 1) * 1e300), 'infinity'),
    ('llama', WEIGHTS, with_arrays(k_proj__weight=np.transpose), 'k_proj.weight'),
    ('llama', WEIGHTS, with_arrays(q_proj__weight=np.ravel), 'q_proj.weight'),
    ('llama', WEIGHTS, with_arrays(down_proj__weight=np.transpose), 'down_proj.weight'),
    ('marian', WEIGHTS, with_arrays(final_logits_bias=np.ravel), 'final_logits_bias'),
    ('marian', WEIGHTS, with_arrays(fc1__weight=np.transpose), 'fc1.weight'),

    *(('marian', f'{side}.spm', content, f'{side}.spm') for side in ('source', 'target')
      for content in (b'', b'\0', b'x' * 50, GONE, cut)),
    *(('marian', 'vocab.json', content, 'vocab.json') for content in (
        b'', b'[]', b'{"a": "b"}', b'{"a": -1}', b'{"a": 1.5}', b'{"a": null}', b'{"a": 1000000}', b'{}', DEEP, GONE,
        with_values(**{'<unk>': 4}), without('<unk>'), b'{"<unk>": 3, "a": 3}')),
    *(('marian', 'tokenizer_config.json', content, 'tokenizer_config.json') for content in (
        b'', b'[]', b'{"separate_vocabs": "x"}', b'{"unk_token": 7}', DEEP)),
    ('marian of two vocabularies', 'target_vocab.json', GONE, 'target_vocab.json'),
    ('marian of two vocabularies', 'target_vocab.json', b'{"a": 1}', 'target_vocab.json'),
    *((kind, 'tokenizer.json', content, 'tokenizer') for kind in ('gpt2', 'llama')
      for content in (b'', b'\0', b'x' * 50, GONE, cut)),
    *(('llama', 'tokenizer_config.json', content, 'tokenizer_config.json') for content in (
        b'', b'[]', b'{"add_bos_token": "x"}', b'{"added_tokens_decoder": {"0": {}}}', DEEP)),

    *(('own', name, change, name) for name in (CONFIG, 'data/sizes.json', 'data/text.model') for change in (
        GONE, b'', cut, b'{}', flipped_at(0.5))),
    *(('own', WEIGHTS, lambda content, name=name, value=value: with_metadata(content, name, value),
       f'metadata {name}') for name in ('steps', 'crc32')
      for value in ('', '{', '{"a": -1}', '[-1]', '"x"', '[1.5]', DEEP.decode())),
    ('own', WEIGHTS, lambda content: with_metadata(content, 'config', '{}'), CONFIG),
    ('own', WEIGHTS, lambda content: with_metadata(content, 'sizes', '{}'), 'sizes.json'),
    ('own', 'data/sizes.json', LOOP, 'sizes.json'), ('own', 'data/text.model', FIFO, 'text.model'),
    ('own', CONFIG, FIFO, CONFIG),

    # Files as they are found on disks: pointers of Git LFS, pages with errors, compressed files, other encodings.
    *((kind, WEIGHTS, LFS, (WEIGHTS, 'git lfs pull')) for kind in EMBEDDINGS),
    *((kind, WEIGHTS, change, WEIGHTS) for kind in ('gpt2', 'own') for change in (
        HTML, gzip.compress, LOOP, FIFO, NULL)),
    *((kind, CONFIG, change, CONFIG) for kind in ('gpt2', 'own') for change in (
        LFS, HTML, gzip.compress, LOOP, FOLDER, NULL)),
    *((kind, CONFIG, lambda content: b'\xef\xbb\xbf' + content, CONFIG) for kind in EMBEDDINGS),
    *((kind, CONFIG, lambda content: content.decode().encode('utf-16'), CONFIG) for kind in EMBEDDINGS),
    *((kind, CONFIG, with_values(**{name: value}), (CONFIG, 'save_pretrained'))
      for kind, name in (('gpt2', 'layer_norm_epsilon'), ('llama', 'rms_norm_eps'), ('marian', 'dropout'))
      for value in (math.nan, math.inf)),
    *((kind, 'tokenizer_config.json', change, 'tokenizer_config.json') for kind in ('gpt2', 'llama', 'marian')
      for change in (FIFO, LOOP, FOLDER, NULL, LFS)),
    *((kind, 'tokenizer.json', change, 'tokenizer.json') for kind in ('gpt2', 'llama')
      for change in (FIFO, LOOP, FOLDER, HTML)),
    *(('marian', name, change, name) for name in ('source.spm', 'vocab.json') for change in (FIFO, LOOP, LFS, HTML)),
    *(('own', 'data/text.model', change, 'text.model') for change in (LFS, HTML, gzip.compress, FOLDER)),
    ('marian', 'vocab.json', lambda content: content.replace(b'}', b', "\\ud800": 7}'), 'vocab.json'),
    ('marian', CONFIG, with_values(model_type='gpt2'), 'merges.txt'),
    ('llama', CONFIG, with_values(model_type='qwen2'), 'k_proj.bias'),
    ('qwen2', CONFIG, with_values(model_type='llama'), 'k_proj.bias'),
    *(('gpt2', {WEIGHTS: GONE, INDEX: json.dumps({'weight_map': names}).encode()}, INDEX)
      for names in ({}, {'a': ''}, {'a': '..'}, {'a': '/etc/passwd'}, [], None)),
    *(('gpt2', {WEIGHTS: GONE, INDEX: b'{"weight_map": {"a": "part"}}', 'part': part}, 'part')
      for part in (GONE, FIFO, FOLDER, LFS, LOOP)),
    ('gpt2', {WEIGHTS: GONE, INDEX: json.dumps({'weight_map': {'a': 'x' * 300}}).encode()}, 'name too long'),
    *(('gpt2', {WEIGHTS: GONE, INDEX: index}, (WEIGHTS if index in (FIFO, LOOP) else INDEX)) for index in (
        FIFO, LOOP, HTML, b'\xef\xbb\xbf{}')),
    ('gpt2', {WEIGHTS: GONE, 'Model.safetensors': b'x'}, WEIGHTS),
]


def with_metadata(content, name, value):
    """Returns a safetensors file in which an entry of the metadata has another value."""
    size = int.from_bytes(content[:8], 'little')
    header = json.loads(content[8:8 + size])
    header['__metadata__'][name] = value
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, 'little') + text + content[8 + size:]
