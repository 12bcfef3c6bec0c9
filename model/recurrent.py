"""RNNsearch: the recurrent encoder-decoder that learns to align (Bahdanau, Cho and Bengio 2015, arXiv:1409.0473).

Sections and appendices are that paper's; j counts source positions and i target positions, as there. A matrix
on an input comes with a bias, which the paper leaves out of its equations.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.linear import default_kernel_init
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key
from typing_extensions import override

from model.attention import additive_scores, attention_pooling, masked_softmax
from model.cache import Cache, Memory
from model.dropout import Dropout, WordDropout
from model.embedding import OutputProjection, Projection, check_sharing, embedding, tied
from model.places import at_positions, leave_loop, loop_positions, looped, place
from model.relation import Mask, Relation, padding_mask

READOUTS = ('maxout', 'linear')
State = Float[Array, 'batch beam d_hidden']
Weights = Float[Array, 'batch 1 target source']


def orthogonal_blocks(key: Key[Array, ''], shape: tuple[int, int], dtype: DTypeLike = jnp.float32) -> Array:
    """Square orthogonal matrices side by side: what a step does to a state begins by keeping its length (B.1)."""
    keys = jax.random.split(key, shape[1] // shape[0])
    return jnp.concatenate([nn.initializers.orthogonal()(each, (shape[0],) * 2, dtype) for each in keys], axis=1)


def dense(size: int, reads: str, writes: str, dtype: DTypeLike, use_bias: bool = True,
          init: Callable[..., Array] = default_kernel_init) -> nn.Dense:
    """A linear layer whose matrix has axes of these names; nn.Dense's own initial values unless others are given."""
    return nn.Dense(size, use_bias=use_bias, dtype=dtype,
                    kernel_init=nn.with_logical_partitioning(init, (reads, writes)))


class GRUCell(nn.Module):
    """The gated recurrent unit, in the paper's form (appendix A.1.1).

        z, r = sigmoid(W_z x + U_z s), sigmoid(W_r x + U_r s)
        s'   = (1 - z) * s + z * tanh(W x + U (r * s))

    The inputs come projected by `input`, [W_z x; W_r x; W x]: of all steps at once, before the loop over them.
    (Hence not Flax's cell, which projects inside the loop, and also applies r after U.)
    """
    d_hidden: int
    dtype: DTypeLike = jnp.float32

    @override
    def setup(self):
        # Dense's own initial values, of variance 1 / (width of x), make gates that stand side by side what they
        # would be apart; the paper's standard deviation of 0.01 was for its widths of 620 and 1000.
        self.input = dense(3 * self.d_hidden, 'embed', 'gates', self.dtype)
        self.gates = dense(2 * self.d_hidden, 'state', 'gates', self.dtype, use_bias=False, init=orthogonal_blocks)
        self.candidate = dense(self.d_hidden, 'state', 'gates', self.dtype, use_bias=False, init=orthogonal_blocks)

    def __call__(self, state: Float[Array, '*batch d_hidden'],
                 inputs: Float[Array, '*batch d_gates']) -> Float[Array, '*batch d_hidden']:
        """The state s and the projected inputs -> s'."""
        of_gates, of_candidate = jnp.split(inputs, [2 * self.d_hidden], axis=-1)
        update, reset = jnp.split(nn.sigmoid(of_gates + self.gates(state)), 2, axis=-1)
        candidate = jnp.tanh(of_candidate + self.candidate(reset * state))
        return place(self, '', (1 - update) * state + update * candidate)


class RecurrentEncoder(nn.Module):
    """Word j -> h_j = [forward state; backward state], a summary of the sentence around it (section 3.2)."""
    d_hidden: int
    dtype: DTypeLike = jnp.float32

    @override
    def setup(self):
        self.forward = GRUCell(self.d_hidden, self.dtype)
        self.backward = GRUCell(self.d_hidden, self.dtype)

    def __call__(self, x: Float[Array, 'batch source d_model'],
                 visible: Bool[Array, 'batch source']) -> Float[Array, 'batch source d_states']:
        """Padding is stepped over: the state stays. So [:, -1] has seen all words forwards, [:, 0] backwards."""
        def step(cell, state, inputs, visible):
            state = jnp.where(visible[:, None], cell(state, inputs), state)
            return state, state

        def run(cell, reverse):
            scan = nn.scan(looped(step), variable_broadcast='params', split_rngs={'params': False}, in_axes=1,
                           out_axes=1, reverse=reverse)
            state = jnp.zeros((x.shape[0], self.d_hidden), self.dtype)
            _, (states, captured) = scan(cell, state, loop_positions(x.shape[1]), cell.input(x), visible)
            leave_loop(captured)
            return states

        return place(self, '', jnp.concatenate([run(self.forward, False), run(self.backward, True)], axis=-1))


class AdditiveAttention(nn.Module):
    """The contexts of each step, by an alignment network (equations 5, 6, A.1.2).

        c_i = sum_j alpha_ij h_j,  alpha_ij = softmax_j v' tanh(W_s s_{i-1} + W_h h_j)

    `key` is W_h, which does not depend on i: its output is computed once for a sentence. alpha, with an axis for
    its one head, is sown as `model.attention.MultiHeadAttention` does.
    """
    d_align: int
    dtype: DTypeLike = jnp.float32

    @override
    def setup(self):
        # v = 0 is the paper's (B.1): at first every word counts the same. But its W, of standard deviation 0.001, would
        # give v hardly a gradient to start from; these make a tanh that differs from word to word.
        init = nn.initializers.xavier_uniform()
        self.query = dense(self.d_align, 'state', 'mlp', self.dtype, use_bias=False, init=init)
        self.key = dense(self.d_align, 'state', 'mlp', self.dtype, init=init)
        no_preference = nn.with_logical_partitioning(nn.initializers.zeros, (None, 'mlp'))
        self.weight = self.param('weight', no_preference, (1, self.d_align), unbox=True)

    def __call__(self, state: State, keys: Float[Array, 'batch source d_align'],
                 values: Float[Array, 'batch source d_states'],
                 mask: Mask) -> tuple[Float[Array, 'batch beam d_states'], Float[Array, 'batch 1 beam source']]:
        """The contexts c_i and the alignments; the hypotheses of a sentence are so many queries."""
        relation = Relation(mask=mask)
        query = place(self, 'queries', self.query(state)[:, :, None])
        scores = place(self, 'scores', additive_scores(query, keys[:, :, None], self.weight), relation)
        weights = place(self, 'weights', masked_softmax(scores, mask), relation)
        heads = place(self, 'heads', attention_pooling(weights, values[:, :, None]))
        return place(self, '', heads[:, :, 0]), weights

    def record(self, weights: Weights) -> None:
        """Sows the alignments of all steps, after the loop over them."""
        if not self.is_initializing():  # or `init` would return them among the variables
            self.sow('attention', 'weights', weights)


class DecoderLayer(nn.Module):
    """One step: c_i from s_{i-1}, then s_i = GRU(s_{i-1}, [y_{i-1}; c_i]) (appendix A.2.2)."""
    d_hidden: int
    d_align: int
    attention: bool
    dtype: DTypeLike = jnp.float32

    @override
    def setup(self):
        self.cell = GRUCell(self.d_hidden, self.dtype)
        # The cell's input, c's part.
        self.context = dense(3 * self.d_hidden, 'state', 'gates', self.dtype, use_bias=False)
        if self.attention:
            self.cross_attention = AdditiveAttention(self.d_align, self.dtype)

    def prepare(self, memory: Memory) -> dict[str, Any]:
        """What is the same for all steps and hypotheses of a sentence; leaves [batch, ...]."""
        if self.attention:
            return {'keys': self.cross_attention.key(memory.states), 'values': memory.states,
                    'mask': padding_mask(memory.visible)}
        forward, backward = jnp.split(memory.states, 2, axis=-1)
        context = jnp.concatenate([forward[:, -1:], backward[:, :1]], axis=-1)
        return {'context': context, 'inputs': self.context(context)}

    def __call__(self, state: State, inputs: Float[Array, 'batch beam d_gates'], prepared: dict[str, Any]) -> tuple[
            State, tuple[State, Float[Array, 'batch beam d_states'], Weights | None]]:
        """From s_{i-1} and the projected y_{i-1} to s_i and, for what follows the loop, (s_i, c_i, alpha_i or None)."""
        if self.attention:
            context, weights = self.cross_attention(state, **prepared)
            state = self.cell(state, inputs + self.context(context))
            return state, (state, context, weights)
        state = self.cell(state, inputs + prepared['inputs'])
        context = jnp.broadcast_to(prepared['context'], (*state.shape[:2], prepared['context'].shape[-1]))
        return state, (state, context, None)


class RecurrentDecoder(nn.Module):
    """From embedded target tokens to the s_i and c_i of every step."""
    d_hidden: int
    d_align: int
    attention: bool
    dtype: DTypeLike = jnp.float32

    @override
    def setup(self):
        self.initial = dense(self.d_hidden, 'state', 'gates', self.dtype)
        # A list of one: what is sown has the path that it has in the Transformer.
        self.layers = [DecoderLayer(self.d_hidden, self.d_align, self.attention, self.dtype)]

    def __call__(self, x: Float[Array, 'batch target d_model'], memory: Memory) -> tuple[
            Float[Array, 'batch target d_hidden'], Float[Array, 'batch target d_states']]:
        """Teacher forcing. Only what depends on s is in the loop: y is projected before it, W_h h_j too."""
        layer, = self.layers
        scan = nn.scan(looped(lambda layer, *args: layer(*args)), variable_broadcast='params',
                       split_rngs={'params': False},
                       # Their defaults make pyright think that they are numbers.
                       in_axes=(1, 1, nn.broadcast), out_axes=((1, 1, 2), 1))  # pyright: ignore[reportArgumentType]
        inputs = layer.cell.input(x)[:, :, None]  # the one hypothesis of each sentence
        _, ((states, contexts, weights), captured) = scan(
            layer, self._initial(memory, 1), loop_positions(x.shape[1]), inputs, layer.prepare(memory))
        leave_loop(captured)
        if self.attention:
            layer.cross_attention.record(weights[:, :, :, 0])
        return states[:, :, 0], contexts[:, :, 0]

    def init_cache(self, memory: Memory, beam: int) -> Cache:
        """The state of every hypothesis is s_0."""
        return Cache(memory=self.layers[0].prepare(memory), state=self._initial(memory, beam),
                     position=jnp.zeros((), jnp.int32))

    def decode_step(self, x: Float[Array, 'batch beam d_model'],
                    cache: Cache) -> tuple[State, Float[Array, 'batch beam d_states'], Cache]:
        """One step of every hypothesis: s_i, c_i and the cache with s_i in it."""
        layer, = self.layers
        state, (_, context, _) = layer(cache.state, layer.cell.input(x), cache.memory)
        return state, context, cache.replace(state=state, position=cache.position + 1)

    def _initial(self, memory, beam):
        """The state s_0 = tanh(W_s h_1), h_1 of the backward direction, which has read the whole sentence (A.2.2)."""
        state = place(self, 'initial', jnp.tanh(self.initial(memory.states[:, 0, self.d_hidden:])))
        return jnp.broadcast_to(state[:, None], (state.shape[0], beam, self.d_hidden))


class RNNSearch(nn.Module):
    """Encoder-decoder: source tokens and the target's tokens so far -> logits of the next ones.

        p(y_i | y_1 ... y_{i-1}, x) = softmax(W_o t_i),  t_i = maxout(U_o s_i + V_o y_{i-1} + C_o c_i)

    Section 3.1 reads s_i, as here; appendix A.2.2 writes s_{i-1} there. Embeddings are multiplied by sqrt(d_model),
    so that a table of variance 1/d_model can be the output projection too, as in `model.transformer`.

    Attributes:
      source_vocab_size: pieces of the source vocabulary.
      target_vocab_size: pieces of the target vocabulary.
      d_model: width of the embeddings and of t.
      d_hidden: width of the states: of the encoder's, in each direction, and of the decoder's.
      d_align: width of the hidden layer that scores an alignment; 0: d_hidden.
      readout: 'maxout' (of pairs, the paper's) or 'linear'.
      attention: False: c is [the last forward state; the first backward state] at every step, a vector of one size
        for all sentences. The paper's point is what that costs on long ones.
      share_embeddings: 'all' (source, target and output use one table; needs one vocabulary), 'target' (target
        and output) or 'none' (the paper's).
      dropout: on the embeddings and on t.
      word_dropout: rate at which whole tokens of source and target are dropped.
      dtype: of the computation; parameters, alignments and logits are float32.
      pad: the token that fills up a batch; the encoder steps over it, and no alignment goes to it.
    """
    source_vocab_size: int
    target_vocab_size: int
    d_model: int
    d_hidden: int
    d_align: int = 0
    readout: str = 'maxout'
    attention: bool = True
    share_embeddings: str = 'all'
    dropout: float = 0.0
    word_dropout: float = 0.0
    dtype: DTypeLike = jnp.float32
    pad: int = 0

    @override
    def setup(self):
        if self.readout not in READOUTS:
            raise ValueError(f'readout={self.readout!r} is not one of {", ".join(READOUTS)}')
        check_sharing(self.share_embeddings, self.source_vocab_size, self.target_vocab_size)
        self.target_embedding = embedding(self.target_vocab_size, self.d_model, self.dtype)
        if self.share_embeddings != 'all':
            self.source_embedding = embedding(self.source_vocab_size, self.d_model, self.dtype)
        if self.share_embeddings == 'none':
            self.output = OutputProjection(self.target_vocab_size)
        self.drop_words, self.drop = WordDropout(self.word_dropout), Dropout(self.dropout)
        self.encoder = RecurrentEncoder(self.d_hidden, self.dtype)
        self.decoder = RecurrentDecoder(self.d_hidden, self.d_align or self.d_hidden, self.attention, self.dtype)
        self.hidden = dense((2 if self.readout == 'maxout' else 1) * self.d_model, 'state', 'mlp', self.dtype)

    @property
    def length_limit(self) -> None:
        """A recurrent network reads sequences of any length."""
        return None

    def __call__(self, source: Int[Array, 'batch source'], target: Int[Array, 'batch target'],
                 deterministic: bool = True) -> Float[Array, 'batch target vocab']:
        """Teacher forcing: `target` is shifted right (it begins with the start token); logits in float32."""
        return self.projection(source, target, deterministic).logits()

    def projection(self, source: Int[Array, 'batch source'], target: Int[Array, 'batch target'],
                   deterministic: bool = True) -> Projection:
        """What the logits are made from, for a loss that does without them."""
        memory = self.encode(source, deterministic)
        x = self._embed(self.target_embedding, 'target_embedding', target, deterministic)
        return self._project(x, *self.decoder(x, memory), deterministic)

    def encode(self, source: Int[Array, 'batch source'], deterministic: bool = True) -> Memory:
        """Source tokens -> what the decoder looks at: h_j, float [batch, source, 2 d_hidden]."""
        embedding = self.target_embedding if self.share_embeddings == 'all' else self.source_embedding
        visible = source != self.pad
        x = self._embed(embedding, 'source_embedding', source, deterministic)
        return Memory(self.encoder(x, visible), visible)

    def init_cache(self, memory: Memory, beam: int, max_length: int) -> Cache:
        """A cache for `beam` hypotheses; a state has one size, whatever `max_length` is."""
        return self.decoder.init_cache(memory, beam)

    def decode_step(self, token: Int[Array, 'batch beam'],
                    cache: Cache) -> tuple[Float[Array, 'batch beam vocab'], Cache]:
        """The newest token of each hypothesis -> logits of the one after it."""
        with at_positions(cache.position):
            x = self._embed(self.target_embedding, 'target_embedding', token, deterministic=True)
            states, contexts, cache = self.decoder.decode_step(x, cache)
            return self._project(x, states, contexts, deterministic=True).logits(), cache

    def _embed(self, embedding, name, tokens, deterministic):
        embedded = self.drop_words(place(self, name, embedding(tokens)), deterministic)
        return self.drop(embedded * self.d_model ** 0.5, deterministic)

    def _project(self, x, states, contexts, deterministic):
        """What makes the logits g(y_{i-1}, s_i, c_i) of all steps at once (appendix A.2.2)."""
        t = self.hidden(jnp.concatenate([states, x, contexts], axis=-1))
        if self.readout == 'maxout':  # unit j is paired with unit j + d_model, which is a matter of numbering
            t = jnp.maximum(*jnp.split(t, 2, axis=-1))
        t = self.drop(place(self, 'readout', t), deterministic)
        return self.output(t) if self.share_embeddings == 'none' else tied(t, self.target_embedding)
