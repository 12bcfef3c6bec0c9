"""Random models of each family with tokenizers, made and saved by the library transformers itself."""

import json

import torch
import transformers

from tests.interchange import originals


def marian(folder, **fields):
    """An opus-mt."""
    size = originals.marian_files(folder)
    return _saved(folder, transformers.MarianMTModel, transformers.MarianConfig(**{
        'vocab_size': size, 'd_model': 32, 'encoder_layers': 2, 'decoder_layers': 2, 'encoder_ffn_dim': 48,
        'decoder_ffn_dim': 48, 'encoder_attention_heads': 4, 'decoder_attention_heads': 4, 'pad_token_id': size - 1,
        'decoder_start_token_id': size - 1, 'activation_function': 'swish', 'scale_embedding': True,
        'max_position_embeddings': 128, **fields}))


def gpt2(folder, **fields):
    tokenizer = originals.gpt2()
    end = tokenizer.get_vocab()['<|endoftext|>']
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.model.save(str(folder))  # vocab.json and merges.txt, as older folders have
    return _saved(folder, transformers.GPT2LMHeadModel, transformers.GPT2Config(**{
        'vocab_size': end + 4, 'n_positions': 96, 'n_embd': 32, 'n_layer': 2, 'n_head': 4, 'bos_token_id': end,
        'eos_token_id': end, **fields}))


def llama_2(folder, **fields):
    """Saves a model like Llama 2: SentencePiece, and one group of keys and values for each head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'tokenizer.model').write_bytes(model := originals.llama_model())
    size = originals.sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    return _saved(folder, transformers.LlamaForCausalLM, transformers.LlamaConfig(**_llama_fields(size), **fields))


def llama_3(folder, kind='Llama', **fields):
    """Saves a model like Llama 3: a tokenizer.json, and grouped queries."""
    tokenizer = originals.llama_3()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / 'tokenizer.json'))
    begin, end, turn = map(tokenizer.token_to_id, ('<|begin_of_text|>', '<|end_of_text|>', '<|eot_id|>'))
    config = getattr(transformers, f'{kind}Config')(**{
        **_llama_fields(tokenizer.get_vocab_size()), 'num_key_value_heads': 2, 'bos_token_id': begin,
        'eos_token_id': [end, turn], **fields})
    return _saved(folder, getattr(transformers, f'{kind}ForCausalLM'), config)


FAMILIES = {
    'marian': marian,
    'marian, two vocabularies': lambda folder: marian(folder, share_encoder_decoder_embeddings=False,
                                                       scale_embedding=False, decoder_layers=1),
    'gpt2': gpt2,
    'gpt2, another activation': lambda folder: gpt2(folder, activation_function='gelu', n_inner=40,
                                                    layer_norm_epsilon=1e-3),
    'llama 2': llama_2,
    'llama 3': llama_3,
    'llama 3.1': lambda folder: llama_3(folder, rope_parameters={
        'rope_type': 'llama3', 'rope_theta': 500.0, 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
        'original_max_position_embeddings': 32}),
    'llama with biases': lambda folder: llama_3(folder, attention_bias=True, mlp_bias=True, head_dim=6,
                                                tie_word_embeddings=True),
    'mistral': lambda folder: llama_3(folder, 'Mistral', sliding_window=7, rope_parameters={
        'rope_type': 'linear', 'rope_theta': 300.0, 'factor': 2.0}),
    'qwen2': lambda folder: llama_3(folder, 'Qwen2', tie_word_embeddings=True, bos_token_id=None),
    'qwen2 with a window': lambda folder: llama_3(folder, 'Qwen2', use_sliding_window=True, sliding_window=7,
                                                  max_window_layers=0, bos_token_id=None),
    'qwen2 with narrow heads': lambda folder: llama_3(folder, 'Qwen2', hidden_size=30, head_dim=6),
}


def gpt2_with_other_names(folder):
    """Saves a GPT-2 whose config.json has the other names of the fields, the attribute_map of GPT2Config."""
    gpt2(folder)
    path = folder / 'config.json'
    fields = json.loads(path.read_text())
    for alias, name in transformers.GPT2Config.attribute_map.items():
        fields[alias] = fields.pop(name)
    path.write_text(json.dumps(fields))
    return transformers.GPT2LMHeadModel.from_pretrained(folder).eval()


def qwen2_without_layer_types(folder, windowless):
    """Saves a Qwen2 whose first `windowless` layers have no window. config.json lacks layer_types."""
    llama_3(folder, 'Qwen2', use_sliding_window=True, sliding_window=7, max_window_layers=windowless)
    path = folder / 'config.json'
    fields = json.loads(path.read_text())
    del fields['layer_types']
    path.write_text(json.dumps(fields))
    return transformers.Qwen2ForCausalLM.from_pretrained(folder).eval()


def gpt2_in_two_files(folder):
    """Saves a GPT-2 without its output layer in two files in bfloat16."""
    gpt2(folder).transformer.bfloat16().save_pretrained(folder, max_shard_size='60KB')
    (folder / 'model.safetensors').unlink(missing_ok=True)
    assert len([*folder.glob('*.safetensors')]) == 2
    return transformers.GPT2LMHeadModel.from_pretrained(folder).float().eval()


# An export of these models has other files or fields.
VARIANTS = {
    'marian without tied embeddings': lambda folder: marian(folder, tie_word_embeddings=False),
    'qwen2 with layers before the window': lambda folder: qwen2_without_layer_types(folder, 2),
    'qwen2 without layers before the window': lambda folder: qwen2_without_layer_types(folder, 0),
    'gpt2 with other names': gpt2_with_other_names,
    'gpt2 in two files': gpt2_in_two_files,
}


def _llama_fields(size):
    return {'vocab_size': size, 'hidden_size': 32, 'intermediate_size': 40, 'num_hidden_layers': 2,
            'num_attention_heads': 4, 'max_position_embeddings': 96, 'bos_token_id': 1, 'eos_token_id': 2}


def _saved(folder, kind, config):
    """Saves a model in which every parameter is random, including biases and norms."""
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if parameter.ndim and not name.endswith(('embed_positions.weight', 'inv_freq')):
                # Large embeddings would make a tied model repeat its last token for ever.
                scale = 0.1 if any(part in name for part in ('shared', 'embed', 'wte')) else 0.3
                parameter.add_(torch.randn_like(parameter) * scale)
    model.save_pretrained(folder)
    return kind.from_pretrained(folder).eval()
