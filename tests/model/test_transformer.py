"""The encoder-decoder: against the reference, visibility, precision, errors."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.blocks import NORMS, BlockConfig, SelfAttentionStack
from model.embedding import SHARING
from model.language_model import LanguageModel
from model.patches import PatchTransformer
from model.places import observing
from model.positional import ADDED, SCHEMES
from model.recurrent import RNNSearch
from model.relation import Relation
from model.transformer import Decoder, Transformer
from tests.model import reference
from tests.model.helpers import close, float64, normal, random_params
from tests.model.reference import PAD
from tests.model.small_transformer import SOURCE, TARGET, VOCAB, tiny, transformer

# The forward pass

@pytest.mark.fast_cases(3)
@pytest.mark.parametrize('norm, position, share_embeddings', [
    (norm, position, sharing)
    for norm in NORMS for position in (*ADDED, 'none') for sharing in SHARING])
def test_forward_pass_is_the_reference(norm, position, share_embeddings):
    sizes = (VOCAB, VOCAB) if share_embeddings == 'all' else (VOCAB, VOCAB + 3)
    options = {'norm': norm, 'position': position, 'share_embeddings': share_embeddings}
    model, variables = transformer(sizes, **options)
    target = TARGET.at[1, 4:].set(PAD)
    logits = model.apply(variables, SOURCE, target)
    assert logits.dtype == jnp.float32 and logits.shape == (2, 6, sizes[1])
    params = float64(variables['params'])
    close(logits, reference.transformer(params, np.asarray(SOURCE), np.asarray(target), **options))


@pytest.mark.parametrize('d_model, d_ff, num_heads, expected, paper', [
    (512, 2048, 8, 63_045_632, 65e6), (1024, 4096, 16, 214_171_648, 213e6)])
def test_the_papers_parameter_counts(d_model, d_ff, num_heads, expected, paper):
    vocab, layers = 37_000, 6
    attention, norm = 4 * d_model ** 2, 2 * d_model
    feed_forward = d_model * d_ff + d_ff + d_ff * d_model + d_model
    encoder_block = attention + feed_forward + 2 * norm
    decoder_block = 2 * attention + feed_forward + 3 * norm
    assert expected == vocab * d_model + layers * (encoder_block + decoder_block)
    model = Transformer(BlockConfig(d_model, d_ff, num_heads), layers, vocab, vocab)
    variables = nn.unbox(jax.eval_shape(lambda: model.init(jax.random.key(0), SOURCE, TARGET)))
    assert sum(np.prod(leaf.shape, dtype=int) for leaf in jax.tree.leaves(variables)) == expected
    # "65" and "213" (Table 3) are rounded to a million, and the vocabulary is one of "about 37000" pieces.
    assert abs(expected - paper) < 0.03 * paper + 0.5e6


def test_initial_variables():
    model = Transformer(tiny(), 1, VOCAB, VOCAB)
    shapes = jax.eval_shape(model.init, jax.random.key(0), SOURCE, TARGET)
    assert set(shapes) == {'params'}
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize('module, inputs', [
    (Transformer(tiny(position='relative', score='general'), 1, VOCAB, VOCAB, share_embeddings='none',
                 output_bias=True), (SOURCE, TARGET)),
    (LanguageModel(tiny(position='learned', score='additive'), 1, VOCAB), (TARGET,)),
    (RNNSearch(VOCAB, VOCAB, 8, 6), (SOURCE, TARGET)),
    (PatchTransformer(tiny(position='learned'), 1, 2, 3), (jnp.ones((2, 4, 4, 1)),))],
    ids=lambda value: type(value).__name__)
def test_parameters_are_float32_with_jax_enable_x64(module, inputs):
    with jax.enable_x64(True):
        shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {np.dtype(np.float32)}


def test_initial_tables_have_variance_1_over_d_model():
    model = Transformer(tiny(d_model=64, position='learned'), 0, 500, 500, max_length=100)
    params = nn.unbox(model.init(jax.random.key(0), SOURCE, TARGET))['params']
    for table in params['target_embedding']['embedding'], params['source_position']['table']:
        np.testing.assert_allclose(table.var() * 64, 1, rtol=0.1)


def test_sentences_of_a_batch_are_independent():
    model, variables = transformer()
    with_another = model.apply(variables, SOURCE.at[0].set(2), TARGET.at[0].set(2))
    close(model.apply(variables, SOURCE, TARGET)[1], with_another[1])


# Visibility, by gradients, which also find dependencies that are too small to change a value.

@functools.partial(jax.jit, static_argnums=(0, 4))
def influence(model, variables, source, target, table):
    """Returns the size of d logits[0, position] / d row of a piece in the embedding `table`, [position, piece].

    Embeddings are not shared with the output, and no token occurs twice in a row. So the row of a piece is the
    embedding at one position.
    """
    mix = normal(7, model.target_vocab_size)

    def mixed_logits(embedding):
        params = variables['params'] | {table: {'embedding': embedding}}
        return model.apply({'params': params}, source, target)[0] @ mix

    return jnp.linalg.norm(jax.jacrev(mixed_logits)(variables['params'][table]['embedding']), axis=-1)


@pytest.mark.parametrize('norm', NORMS)
def test_logits_depend_on_their_own_and_earlier_positions_only(norm):
    model, variables = transformer(layers=1, norm=norm)
    sizes = influence(model, variables, SOURCE[:1], TARGET[:1], 'target_embedding')[:, TARGET[0]]
    assert (sizes[~np.tri(6, dtype=bool)] == 0).all()
    assert (sizes[np.tri(6, dtype=bool)] > 1e-6).all()


def test_logits_depend_on_all_source_tokens_but_padding():
    model, variables = transformer(layers=1)
    source = jnp.array([[5, PAD, 9, 4, PAD]])
    sizes = influence(model, variables, source, TARGET[:1], 'source_embedding')
    assert (sizes[:, PAD] == 0).all()
    assert (sizes[:, jnp.array([5, 9, 4])] > 1e-6).all()


@pytest.mark.parametrize('target', [
    [1, 4, 6, 9, PAD, PAD], [PAD, PAD, 1, 4, 6, 9], [1, PAD, 4, PAD, 6, 9]])
def test_logits_of_real_tokens_do_not_depend_on_target_padding(target):
    model, variables = transformer(layers=1)
    target = np.array(target)
    sizes = influence(model, variables, SOURCE[:1], jnp.asarray(target)[None], 'target_embedding')
    real = np.flatnonzero(target != PAD)
    assert (sizes[real, PAD] == 0).all()
    assert (sizes[real[-1], target[real]] > 1e-6).all()


def test_what_stands_at_padding_changes_nothing():
    model, variables = transformer()
    source, target = SOURCE.at[:, 1].set(PAD), TARGET.at[:, :2].set(PAD)
    changed = jax.tree.map(jnp.copy, variables)
    for table in 'source_embedding', 'target_embedding':
        embedding = changed['params'][table]['embedding']
        changed['params'][table]['embedding'] = embedding.at[PAD].set(50 * normal(3, 8))
    before, after = (model.apply(these, source, target) for these in (variables, changed))
    np.testing.assert_array_equal(before[:, 2:], after[:, 2:])
    assert (before[:, :2] != after[:, :2]).any()


@pytest.mark.slow
def test_more_padding_changes_nothing():
    model, variables = transformer(layers=1)
    padded = [jnp.pad(tokens, ((0, 0), (0, 3))) for tokens in (SOURCE, TARGET)]
    close(jax.jit(model.apply)(variables, *padded)[:, :6], model.apply(variables, SOURCE, TARGET))


def test_empty_sentences_have_finite_logits_and_gradients():
    model, variables = transformer(layers=1)
    source, target = SOURCE.at[1].set(PAD), TARGET.at[1].set(PAD)

    @jax.jit
    @jax.value_and_grad
    def loss(variables):
        return (model.apply(variables, source, target) ** 2).sum()

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(loss(variables)))


def test_packed_sentences_do_not_see_each_other():
    segments, memory_segments = jnp.array([[1, 1, 1, 2, 2, 2]]), jnp.array([[1, 1, 2, 2]])
    x, memory = normal(0, 1, 6, 8), normal(1, 1, 4, 8)
    encoder, decoder = SelfAttentionStack(tiny(), 2), Decoder(tiny(), 2)
    encoder_params, decoder_params = random_params(encoder, x), random_params(decoder, x, memory, Relation())

    @jax.jit
    def encode(x, segments=None):
        relation = Relation.within(jnp.arange(x.shape[1])[None], segments=segments)
        return encoder.apply({'params': encoder_params}, x, relation)

    @jax.jit
    def decode(x, memory, segments=None, memory_segments=None):
        relation = Relation.within(jnp.arange(x.shape[1])[None], segments=segments, causal=True)
        memory_relation = Relation(target_segments=segments, source_segments=memory_segments)
        return decoder.apply({'params': decoder_params}, x, memory, relation, memory_relation)

    close(encode(x, segments), jnp.concatenate([encode(x[:, :3]), encode(x[:, 3:])], axis=1))
    close(decode(x, memory, segments, memory_segments),
          jnp.concatenate([decode(x[:, :3], memory[:, :2]), decode(x[:, 3:], memory[:, 2:])], axis=1))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize('norm', [NORMS[0], pytest.param(NORMS[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize('position', SCHEMES)
def test_encoder_is_equivariant_to_permutations_only_without_positions(norm, position):
    model, variables = transformer(norm=norm, position=position)
    order = jnp.array([3, 0, 4, 1, 2])  # also moves padding
    states = model.apply(variables, SOURCE, method='encode').states[:, order]
    permuted = model.apply(variables, SOURCE[:, order], method='encode').states
    if position == 'none':
        close(permuted, states)
    else:
        # With ALiBi the differences are small; rounding is below 1e-5.
        assert (jnp.abs(permuted - states).max(axis=(1, 2)) > 1e-3).all()


# Attention weights

@pytest.mark.slow
def test_attention_weights_of_every_layer_and_head():
    model, variables = transformer()
    logits, collections = model.apply(variables, SOURCE, TARGET, mutable=['attention'])
    assert set(collections) == {'attention'}
    layers = ['layers_0', 'layers_1']
    shapes = {
        'encoder': {layer: {'self_attention': {'weights': ((2, 2, 5, 5),)}} for layer in layers},
        'decoder': {layer: {'self_attention': {'weights': ((2, 2, 6, 6),)},
                            'cross_attention': {'weights': ((2, 2, 6, 5),)}} for layer in layers}}
    assert jax.tree.map(jnp.shape, collections['attention']) == shapes
    for leaf in jax.tree.leaves(collections):
        close(leaf.sum(axis=-1), np.ones(leaf.shape[:-1]))
    decoder = collections['attention']['decoder']['layers_1']
    assert (decoder['cross_attention']['weights'][0][1, :, :, 3:] == 0).all()
    assert (decoder['self_attention']['weights'][0][:, :, ~np.tri(6, dtype=bool)] == 0).all()
    close(model.apply(variables, SOURCE, TARGET), logits)

    remat, _ = transformer(remat=True)
    _, collections = jax.eval_shape(lambda: remat.apply(variables, SOURCE, TARGET, mutable=['attention']))
    assert jax.tree.map(jnp.shape, collections['attention']) == shapes


def test_attention_weights_are_the_reference():
    model, variables = transformer(layers=1, position='none')
    _, collections = model.apply(variables, SOURCE, TARGET, mutable=['attention'])
    params = float64(variables['params'])
    x = params['source_embedding']['embedding'][np.asarray(SOURCE[0])] * np.sqrt(8)
    heads = reference.heads(params['encoder']['layers_0']['self_attention'], x, x)
    expected = [reference.attention_weights(query, key) for query, key, _ in heads]
    close(collections['attention']['encoder']['layers_0']['self_attention']['weights'][0][0], expected)


def test_weights_that_are_not_requested_cost_nothing(monkeypatch):
    model, variables = transformer()

    def program():
        return str(jax.make_jaxpr(model.apply)(variables, SOURCE, TARGET))

    with_sow = program()
    monkeypatch.setattr(nn.Module, 'sow', lambda *args, **kwargs: False)
    assert with_sow == program()


# Precision and memory

@pytest.mark.slow
@pytest.mark.parametrize('norm, share_embeddings', [('post', 'all'), ('pre', 'none')])
def test_bfloat16_is_close_to_float32(norm, share_embeddings):
    options = {'layers': 1, 'norm': norm, 'share_embeddings': share_embeddings}
    model, variables = transformer(**options)
    half, half_variables = transformer(**options, dtype=jnp.bfloat16)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(half_variables))
    assert jax.eval_shape(lambda: half.apply(variables, SOURCE, method='encode')).states.dtype == jnp.bfloat16
    logits, expected = (jax.jit(module.apply)(variables, SOURCE, TARGET) for module in (half, model))
    assert logits.dtype == jnp.float32
    close(logits, expected, atol=0.05)
    assert not np.allclose(logits, expected, atol=1e-5)


@pytest.mark.slow
def test_rematerialisation_changes_neither_outputs_nor_gradients():
    results = []
    for options in {}, {'remat': True}, {'remat': True, 'remat_keep': 'products'}:
        model, variables = transformer(layers=1, dropout=0.2, **options)

        @jax.jit
        @jax.value_and_grad
        def loss(variables, model=model):
            key = jax.random.key(0, impl='unsafe_rbg')  # compiles faster
            logits = model.apply(variables, SOURCE, TARGET, deterministic=False, rngs={'dropout': key})
            return (logits ** 2).sum()

        assert ('remat' in str(jax.make_jaxpr(loss)(variables))) == bool(options)
        results.append(loss(variables))
    for result in results[1:]:
        jax.tree.map(close, results[0], result)


@pytest.mark.slow
def test_what_is_recomputed():
    """Counts products: those with weights are recomputed only if nothing is kept, those of attention always."""
    def products(**options):
        model, variables = transformer(layers=1, **options)

        def loss(variables):
            return (model.apply(variables, SOURCE, TARGET) ** 2).sum()

        batched = re.findall(r'dot_general\[\s*dimension_numbers=\(\(.*?\), \(\[(.*?)\]',
                             str(jax.make_jaxpr(jax.grad(loss))(variables)))
        return batched.count(''), len(batched) - batched.count('')

    (weights, scores), nothing, kept = products(), products(remat=True), products(remat=True, remat_keep='products')
    assert nothing[0] > weights == kept[0]
    assert nothing[1] == kept[1] > scores


@pytest.mark.slow
def test_only_a_layer_whose_values_are_read_is_not_rematerialised(monkeypatch):
    model, variables = transformer(remat=True)
    place, made, remat = 'decoder/layers_1/cross_attention/weights', [], nn.remat
    monkeypatch.setattr(nn, 'remat', lambda block, **options: made.append(block.__name__) or remat(block, **options))

    def loss(variables):
        logits, values = observing(model.apply, read=(place,))(variables, SOURCE, TARGET)
        return (logits ** 2).sum() + (values[place] ** 2).sum()

    jax.eval_shape(jax.grad(loss), variables)
    assert 0 < 2 * made.count('DecoderBlock') == made.count('EncoderBlock')  # one and two of the layers


# Errors and dropout

def test_unshared_vocabularies_of_different_sizes_are_fine_and_shared_ones_are_an_error():
    transformer((VOCAB, VOCAB + 1), share_embeddings='target')
    with pytest.raises(ValueError, match='share_embeddings=all needs one vocabulary.* 12 pieces .* 13'):
        transformer((VOCAB, VOCAB + 1), share_embeddings='all')


def test_embeddings_are_dropped_out():
    model, variables = transformer(layers=0, dropout=0.5)

    def logits(**options):
        return model.apply(variables, SOURCE, TARGET, rngs={'dropout': jax.random.key(0)}, **options)

    assert not np.allclose(logits(deterministic=False), logits())
    np.testing.assert_array_equal(logits(), transformer(layers=0)[0].apply(variables, SOURCE, TARGET))
