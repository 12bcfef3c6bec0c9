"""Places of imported models, and exported models in the libraries that look inside PyTorch models."""

import numpy as np
import pytest

for library in 'tokenizers', 'torch', 'transformers':
    pytest.importorskip(library, reason="it is in the extra 'test-interchange', and is not installed here")

import torch
import transformers

import inference
from analysis.logit_lens import logit_lens
from analysis.patching import patching_map
from interchange.huggingface import write_huggingface
from tests.interchange.small_models import small_model
from tests.interchange.test_import import opened

pytestmark = pytest.mark.interchange

TEXTS = ['the man is in the house', 'a dog']
WEIGHTS = 'encoder/layers_1/self_attention/weights'


def hidden_states(model, tokens):
    """The hidden states and the attention weights of a model of transformers, for one text."""
    model.set_attn_implementation('eager')
    with torch.no_grad():
        outputs = model(input_ids=torch.tensor([tokens]), output_hidden_states=True, output_attentions=True)
    return [state[0].numpy() for state in outputs.hidden_states], [weights[0].numpy() for weights in outputs.attentions]


@pytest.mark.parametrize('name', ['gpt2', 'llama 3'])
def test_an_imported_model_is_read_edited_and_explained(name):
    theirs, run, _ = opened(name)
    tokenizer = run.model.tokenizers['target']
    for text, output, values in zip(TEXTS, run.forced(TEXTS), run.inspect(TEXTS, '*'), strict=True):
        tokens = [*output.source_tokens, *output.hypotheses[0].tokens]
        states, weights = hidden_states(theirs, tokenizer.order[tokens].tolist())
        for place, state in zip(['encoder/input', 'encoder/layers_0', 'encoder'], states, strict=True):
            np.testing.assert_allclose(values[place].values, state, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(values[WEIGHTS].values, weights[1], atol=1e-5)
        assert values[WEIGHTS].labels['key'] == tokenizer.pieces(tokens), text
    edits = [{'edit': 'zero', 'place': 'encoder/layers_0/self_attention/heads', 'heads': [1]}]
    plain, edited = (each.forced(TEXTS[:1])[0].hypotheses[0].log_prob for each in (run, run.edited(edits)))
    assert abs(plain - edited) > 1e-4
    found = patching_map(run, 'the 1', 'the 2', ' man', 'encoder/layers_*[0-9]')
    assert np.abs(found.effects).max() > 1e-4 and len(found.effects) == 2
    output, = run.forced(TEXTS[:1])
    given = torch.tensor(tokenizer.order[[*output.source_tokens, *output.hypotheses[0].tokens]])
    with torch.no_grad():
        log_probs = theirs(input_ids=given[None]).logits[0, :-1].log_softmax(dim=-1)
    np.testing.assert_allclose(logit_lens(run, TEXTS[0]).log_probs[-1],
                               log_probs[range(len(given) - 1), given[1:]].numpy(), atol=1e-4)


@pytest.fixture(scope='module', params=['gpt2', 'llama'])
def handed_over(request, tmp_path_factory):
    """A model of ours, exported by tools.export, and the values at its places for some tokens."""
    folder = tmp_path_factory.mktemp('export')

    write_huggingface(small_model(request.param, folder), folder)
    run = inference.load(folder)
    values, = run.inspect(TEXTS[:1], '*')
    output, = run.forced(TEXTS[:1])
    tokens = [*output.source_tokens, *output.hypotheses[0].tokens]
    given = run.model.tokenizers['target'].order[tokens].tolist()
    return folder, torch.tensor([given]), values


def test_transformers_has_the_values_of_our_places(handed_over):
    folder, tokens, values = handed_over
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    states, weights = hidden_states(model, tokens[0].tolist())
    for place, state in zip(['encoder/input', 'encoder'], states, strict=True):
        np.testing.assert_allclose(values[place].values, state, atol=1e-5)
    np.testing.assert_allclose(values['encoder/layers_0/self_attention/weights'].values, weights[0], atol=1e-5)


@pytest.mark.filterwarnings('ignore')
def test_transformer_lens_opens_an_exported_model(handed_over):
    bridge = pytest.importorskip('transformer_lens.model_bridge', reason="it is in the extra 'test-interchange'")
    folder, tokens, values = handed_over
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    opened = bridge.TransformerBridge.boot_transformers(
        str(folder), hf_model=model, tokenizer=transformers.AutoTokenizer.from_pretrained(folder), device='cpu')
    with torch.no_grad():
        _, cache = opened.run_with_cache(tokens)
    for theirs, ours in {'hook_resid_post': 'encoder/layers_0', 'attn.hook_pattern':
                         'encoder/layers_0/self_attention/weights'}.items():
        np.testing.assert_allclose(cache[f'blocks.0.{theirs}'][0].numpy(), values[ours].values, atol=1e-5)


@pytest.mark.filterwarnings('ignore')
def test_nnsight_opens_an_exported_model(handed_over):
    nnsight = pytest.importorskip('nnsight', reason="it is in the extra 'test-interchange'")
    folder, tokens, values = handed_over
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    opened = nnsight.LanguageModel(model, tokenizer=transformers.AutoTokenizer.from_pretrained(folder))
    layers = opened.transformer.h if hasattr(model, 'transformer') else opened.model.layers
    with opened.trace(tokens):
        state = layers[0].output.save()
    state = state[0] if isinstance(state, tuple) else state
    np.testing.assert_allclose(state.detach().numpy()[0], values['encoder/layers_0'].values, atol=1e-5)
