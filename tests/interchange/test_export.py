"""Models of our own as transformers opens them: the same logits, and the same tokens of a text."""

import jax.numpy as jnp
import numpy as np
import pytest

for library in 'tokenizers', 'torch', 'transformers', 'ctranslate2':
    pytest.importorskip(library, reason="it is in the extra 'test-interchange', and is not installed here")

import torch
import transformers

from input_pipeline.tokenizer import train_tokenizer
from interchange.huggingface import write_huggingface
from runtime.errors import UserError
from tests.interchange.lines import mixed_lines
from tests.interchange.test_ctranslate2 import random_model

pytestmark = pytest.mark.interchange

FORMS = {
    'GPT-2': {'norm': 'pre', 'position': 'learned'},
    'GPT-2 of sinusoids': {'norm': 'pre', 'activation': 'silu', 'tie_embeddings': False},
    'Llama': {'norm': 'pre', 'norm_function': 'rms_norm', 'feed_forward': 'gated', 'activation': 'silu',
              'position': 'rotary', 'num_key_value_heads': 2, 'feed_forward_bias': False}}


@pytest.mark.parametrize('options', FORMS.values(), ids=FORMS)
def test_a_language_model_of_ours_has_the_same_logits_there(options, tmp_path):
    trained = random_model('language_model', options, tmp_path)
    write_huggingface(trained, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = np.random.default_rng(0).integers(4, trained.sizes['vocab_size'], (3, 20))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(tokens)).logits.numpy()
    found = trained.module.apply({'params': trained.params}, jnp.asarray(tokens))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    text = 'the man is here'
    there = transformers.AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False).input_ids
    assert there == trained.tokenizers['text'].encode(text)


@pytest.mark.parametrize('options', [FORMS['GPT-2'], FORMS['Llama'], FORMS['Llama'] | {'attention_bias': 'qkv'}],
                         ids=['GPT-2', 'Llama', 'biases of queries, keys and values'])
@pytest.mark.parametrize('kind, normalization', [('bpe', 'identity'), ('unigram', 'identity'), ('bpe', 'nfkc_cf'),
                                                 ('unigram', 'nmt_nfkc')])
def test_a_text_has_the_same_subwords_there(options, kind, normalization, tmp_path):
    code = ['    return self.x', ' return', 'def f(a, b):', 'x = 1  # The ﬁne House']
    tokenizer = train_tokenizer(iter(code * 20 + mixed_lines(300, words=1.0)), kind=kind, vocab_size=400,
                                split_digits=True, normalization=normalization, indentation=True)
    trained = random_model('language_model', options, tmp_path, tokenizer)
    write_huggingface(trained, tmp_path)
    there = transformers.AutoTokenizer.from_pretrained(tmp_path)
    # Normalised text of other scripts may differ, and with unigram the names of special tokens: see
    # interchange/tokenizer_json.py.
    lines = [*code, '  two  spaces ', *(mixed_lines(200, seed=5) if normalization == 'identity' else []),
             *(['a <s>old</s> b <unk><pad>'] if kind == 'bpe' else [])]
    for line in lines:
        if '\u2581' not in line:
            tokens = there(line, add_special_tokens=False).input_ids
            assert tokens == tokenizer.encode(line), line
            assert there.decode(tokens) == tokenizer.decode(tokens)
    logits = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()(torch.tensor([tokens])).logits
    found = trained.module.apply({'params': trained.params}, jnp.asarray([tokens]))
    np.testing.assert_allclose(found, logits.detach().numpy(), atol=1e-4)


@pytest.mark.parametrize('sharing', ['all', 'target', 'none'])
def test_a_translator_of_ours_has_the_same_logits_there(sharing, tmp_path):
    trained = random_model('transformer', {'norm_epsilon': 1e-5, 'share_embeddings': sharing}, tmp_path)
    tokenizer = train_tokenizer(mixed_lines(300, words=1.0), kind='bpe', vocab_size=400, split_digits=False,
                                normalization='identity')
    rng = np.random.default_rng(0)

    def table(part):
        shape = (len(tokenizer), 32) if 'embedding' in part else (32, len(tokenizer))
        return {key: jnp.asarray(rng.normal(scale=0.2, size=shape), jnp.float32) for key in part}

    params = {name: part if name in ('encoder', 'decoder') else table(part) for name, part in trained.params.items()}
    trained.config.data.tokenizer.joint = sharing == 'all'
    trained = trained._replace(params=params, tokenizers={'source': tokenizer, 'target': tokenizer})
    module = trained.module.clone(source_vocab_size=len(tokenizer), target_vocab_size=len(tokenizer))
    write_huggingface(trained, tmp_path)
    theirs = transformers.MarianMTModel.from_pretrained(tmp_path).eval()
    assert theirs.generation_config.max_length == theirs.config.max_position_embeddings >= 1024
    source, target = rng.integers(4, len(tokenizer), (2, 3, 20))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(target)).logits.numpy()
    found = module.apply({'params': params}, jnp.asarray(source), jnp.asarray(target))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    lines = [*mixed_lines(200, seed=5), 'a </s> b']
    there = transformers.MarianTokenizer.from_pretrained(tmp_path)
    for line, tokens in zip(lines, there(lines).input_ids, strict=True):
        if '\u2581' not in line:  # a space, to SentencePiece
            assert tokens[:-1] == tokenizer.encode(line), line


@pytest.mark.parametrize('kind, options', [
    ('transformer', {'position': 'rotary'}), ('transformer', {'norm': 'pre'}), ('language_model', {'norm': 'post'}),
    ('language_model', {'norm': 'pre', 'position': 'alibi'})])
def test_a_model_that_has_no_form_there_is_refused_by_the_name_of_the_option(kind, options, tmp_path):
    with pytest.raises(UserError, match=f'config.model.{[*options][-1]}=') as refused:
        write_huggingface(random_model(kind, options, tmp_path), tmp_path)
    assert 'has no model with these options' in str(refused.value) and not list(tmp_path.iterdir())


def test_a_translator_of_characters_has_no_form_there(tmp_path):
    trained = random_model('transformer', {'norm_epsilon': 1e-5}, tmp_path)
    trained.config.data.tokenizer.kind = 'char'
    with pytest.raises(UserError, match='kind=char: Marian supports only subword tokenizers'):
        write_huggingface(trained, tmp_path)
    assert not list(tmp_path.iterdir())
