"""Attention and blocks against PyTorch, with copied weights; needs torch."""

import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import MultiHeadAttention
from model.blocks import BlockConfig, DecoderBlock, EncoderBlock
from model.relation import Relation
from tests.model.helpers import close, normal, random_params

torch = pytest.importorskip('torch', reason='needs the benchmark extra (torch)')
pytestmark = pytest.mark.interchange
D, HEADS, FF = 16, 4, 24
VISIBLE = np.array([[True] * 5, [True, True, True, False, False]])


def tensor(array):
    return torch.tensor(np.asarray(array))


def copy_attention(params, peer):
    """Copies our kernels [d, heads, width] and [heads, width, d] into torch's stacked matrices [out, in]; no biases."""
    stacked = np.concatenate([np.asarray(params[name]['kernel']).reshape(D, D).T for name in ('query', 'key', 'value')])
    with torch.no_grad():
        peer.in_proj_weight.copy_(tensor(stacked))
        peer.out_proj.weight.copy_(tensor(np.asarray(params['output']['kernel']).reshape(D, D).T))
        for bias in (peer.in_proj_bias, peer.out_proj.bias):
            if bias is not None:
                bias.zero_()


def copy_rest(params, peer, residuals):
    """Copies the feed-forward sublayer and the layer norms."""
    with torch.no_grad():
        for ours, theirs in (('inner', peer.linear1), ('outer', peer.linear2)):
            theirs.weight.copy_(tensor(params['feed_forward'][ours]['kernel']).T)
            theirs.bias.copy_(tensor(params['feed_forward'][ours]['bias']))
        for number, name in enumerate(residuals, 1):
            norm = getattr(peer, f'norm{number}')
            norm.weight.copy_(tensor(params[f'{name}_residual']['norm']['scale']))
            norm.bias.copy_(tensor(params[f'{name}_residual']['norm']['bias']))


def options(norm):
    return {'d_model': D, 'nhead': HEADS, 'dim_feedforward': FF, 'dropout': 0.0, 'batch_first': True,
            'norm_first': norm == 'pre', 'layer_norm_eps': 1e-6}


def test_multi_head_attention():
    x, memory = normal(0, 2, 4, D), normal(1, 2, 5, D)
    module = MultiHeadAttention(HEADS, D, D // HEADS, D // HEADS)
    params = random_params(module, x, memory)
    peer = torch.nn.MultiheadAttention(D, HEADS, bias=False, batch_first=True)
    copy_attention(params, peer)
    expected, weights = peer(tensor(x), tensor(memory), tensor(memory), key_padding_mask=~tensor(VISIBLE),
                             average_attn_weights=False)
    found, collections = module.apply({'params': params}, x, memory, Relation(visible=jnp.asarray(VISIBLE)),
                                      mutable=['attention'])
    close(found, expected.detach())
    close(collections['attention']['weights'][0], weights.detach())


@pytest.mark.parametrize('norm', ['post', 'pre'])
def test_encoder_block(norm):
    x = normal(0, 2, 5, D)
    module = EncoderBlock(BlockConfig(D, FF, HEADS, norm=norm, dropout=0.0))
    params = random_params(module, x)
    peer = torch.nn.TransformerEncoderLayer(**options(norm)).train()  # eval() has another implementation
    copy_attention(params['self_attention'], peer.self_attn)
    copy_rest(params, peer, ['self_attention', 'feed_forward'])
    expected = peer(tensor(x), src_key_padding_mask=~tensor(VISIBLE)).detach()
    close(module.apply({'params': params}, x, Relation(visible=jnp.asarray(VISIBLE))), expected)


@pytest.mark.parametrize('norm', ['post', 'pre'])
def test_decoder_block(norm):
    x, memory = normal(0, 2, 4, D), normal(1, 2, 5, D)
    module = DecoderBlock(BlockConfig(D, FF, HEADS, norm=norm, dropout=0.0))
    params = random_params(module, x, memory)
    peer = torch.nn.TransformerDecoderLayer(**options(norm)).train()
    copy_attention(params['self_attention'], peer.self_attn)
    copy_attention(params['cross_attention'], peer.multihead_attn)
    copy_rest(params, peer, ['self_attention', 'cross_attention', 'feed_forward'])
    mask = torch.nn.Transformer.generate_square_subsequent_mask(4)
    expected = peer(tensor(x), tensor(memory), tgt_mask=mask, memory_key_padding_mask=~tensor(VISIBLE)).detach()
    found = module.apply({'params': params}, x, memory, Relation.within(jnp.arange(4)[None], causal=True),
                         Relation(visible=jnp.asarray(VISIBLE)))
    close(found, expected)
