"""RNNsearch: the recurrent encoder-decoder that learns to align (Bahdanau, Cho and Bengio 2015, arXiv:1409.0473).

The docstrings use the sections, appendices and indices of that paper: j is a source position, and i is a target
position. Layers that multiply inputs by a matrix also add a bias, which the equations of the paper omit.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import Initializer
from flax.linen.linear import default_kernel_init
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key
from typing_extensions import override

from kernels.dense import Dense
from model.attention import additive_scores, attention_pooling, masked_softmax
from model.cache import Cache, Memory
from model.dropout import Dropout, WordDropout
from model.embedding import Embedding, OutputProjection, Projection, check_sharing
from model.places import at_positions, leave_loop, loop_positions, looped, place
from model.relation import Mask, Relation, padding_mask

READOUTS = ('maxout', 'linear')
State = Float[Array, 'batch beam d_hidden']
Weights = Float[Array, 'batch 1 target source']


def orthogonal_blocks(key: Key[Array, ''], shape: tuple[int, int], dtype: DTypeLike = jnp.float32) -> Array:
    """Returns a matrix of square orthogonal blocks, which keep the norm of the state (appendix B.1)."""
    keys = jax.random.split(key, shape[1] // shape[0])
    return jnp.concatenate([nn.initializers.orthogonal()(key, (shape[0],) * 2, dtype) for key in keys], axis=1)


def dense(size: int, reads: str, writes: str, dtype: DTypeLike, use_bias: bool = True,
          init: Initializer = default_kernel_init) -> Dense:
    """Returns a linear layer. `reads` and `writes` are the names of the axes of its matrix (training/mesh.py)."""
    # The gradients of kernels.product.dot_general have not been measured within the loop over the steps.
    return Dense(size, (reads, writes), use_bias, dtype, kernel_init=init, dot_general=jax.lax.dot_general)


class GRUCell(nn.Module):
    """The gated recurrent unit in the form of the paper (appendix A.1.1).

        z, r = sigmoid(W_z x + U_z s), sigmoid(W_r x + U_r s)
        s'   = (1 - z) * s + z * tanh(W x + U (r * s))

    `input` projects the inputs of all steps to [W_z x; W_r x; W x] before the loop over the steps. Flax's cell projects
    the inputs inside the loop, and computes r * (U s) instead of U (r * s).
    """
    d_hidden: int
    dtype: DTypeLike = jnp.float32

    @override
    def setup(self):
        # The default initial values of Dense have variance 1 / (width of x), so the joint matrix of the gates has the
        # same distribution as separate matrices. The paper's standard deviation of 0.01 suits only its widths, 620 and
        # 1000.
        self.input = dense(3 * self.d_hidden, 'embed', 'gates', self.dtype)
        self.gates = dense(2 * self.d_hidden, 'state', 'gates', self.dtype, use_bias=False, init=orthogonal_blocks)
        self.candidate = dense(self.d_hidden, 'state', 'gates', self.dtype, use_bias=False, init=orthogonal_blocks)

    def __call__(self, state: Float[Array, '*batch d_hidden'],
                 inputs: Float[Array, '*batch d_gates']) -> Float[Array, '*batch d_hidden']:
        """Returns the new state s' from the state s and the projected inputs."""
        gate_inputs, candidate_inputs = jnp.split(inputs, [2 * self.d_hidden], axis=-1)
        update, reset = jnp.split(nn.sigmoid(gate_inputs + self.gates(state)), 2, axis=-1)
        candidate = jnp.tanh(candidate_inputs + self.candidate(reset * state))
        return place(self, '', (1 - update) * state + update * candidate)


class RecurrentEncoder(nn.Module):
    """The encoder. Maps word j to h_j = [forward state; backward state], a summary of its context (section 3.2)."""
    d_hidden: int
    dtype: DTypeLike = jnp.float32

    @override
    def setup(self):
        self.forward = GRUCell(self.d_hidden, self.dtype)
        self.backward = GRUCell(self.d_hidden, self.dtype)

    def __call__(self, x: Float[Array, 'batch source d_model'],
                 visible: Bool[Array, 'batch source']) -> Float[Array, 'batch source d_states']:
        """Returns the states h_j. Padding changes no state, so the last state of each direction has read all words."""
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
    """The alignment network, which computes the context of each step (equations 5, 6, A.1.2).

        c_i = sum_j alpha_ij h_j,  alpha_ij = softmax_j v' tanh(W_s s_{i-1} + W_h h_j)

    The layer `key` is W_h. W_h h_j does not depend on i, so it is computed once for a sentence. The weights alpha have
    an axis for their single head, and are sown as in `model.attention.MultiHeadAttention`.
    """
    d_align: int
    dtype: DTypeLike = jnp.float32

    @override
    def setup(self):
        # v is 0 as in the paper (appendix B.1), so initially all words have the same weight. The paper initialises W
        # with a standard deviation of 0.001, but then the gradient of v would be almost 0. Here, W is larger, so that
        # the tanh differs from word to word.
        init = nn.initializers.xavier_uniform()
        self.query = dense(self.d_align, 'state', 'mlp', self.dtype, use_bias=False, init=init)
        self.key = dense(self.d_align, 'state', 'mlp', self.dtype, init=init)
        no_preference = nn.with_logical_partitioning(nn.initializers.zeros, (None, 'mlp'))
        self.weight = self.param('weight', no_preference, (1, self.d_align), jnp.float32, unbox=True)

    def __call__(self, state: State, keys: Float[Array, 'batch source d_align'],
                 values: Float[Array, 'batch source d_states'],
                 mask: Mask) -> tuple[Float[Array, 'batch beam d_states'], Float[Array, 'batch 1 beam source']]:
        """Returns the contexts c_i and the alignments. Each hypothesis of a sentence is a query."""
        relation = Relation(mask=mask)
        query = place(self, 'queries', self.query(state)[:, :, None])
        scores = place(self, 'scores', additive_scores(query, keys[:, :, None], self.weight), relation)
        weights = place(self, 'weights', masked_softmax(scores, mask), relation)
        heads = place(self, 'heads', attention_pooling(weights, values[:, :, None]))
        return place(self, '', heads[:, :, 0]), weights

    def record(self, weights: Weights) -> None:
        """Sows the alignments of all steps. Call this after the loop over the steps."""
        if not self.is_initializing():  # otherwise `init` would return the alignments together with the parameters
            self.sow('attention', 'weights', weights)


class DecoderLayer(nn.Module):
    """One step of the decoder: computes c_i from s_{i-1}, then s_i = GRU(s_{i-1}, [y_{i-1}; c_i]) (appendix A.2.2)."""
    d_hidden: int
    d_align: int
    attention: bool
    dtype: DTypeLike = jnp.float32

    @override
    def setup(self):
        self.cell = GRUCell(self.d_hidden, self.dtype)
        # This layer projects c, which is a part of the cell's input.
        self.context = dense(3 * self.d_hidden, 'state', 'gates', self.dtype, use_bias=False)
        if self.attention:
            self.cross_attention = AdditiveAttention(self.d_align, self.dtype)

    def prepare(self, memory: Memory) -> dict[str, Any]:
        """Returns the values that all steps and hypotheses of a sentence share. Leaves are [batch, ...]."""
        if self.attention:
            return {'keys': self.cross_attention.key(memory.states), 'values': memory.states,
                    'mask': padding_mask(memory.visible)}
        forward, backward = jnp.split(memory.states, 2, axis=-1)
        # Not the state of the padding after the last word, although it is equal: an edit changes only states of words.
        last = jnp.max(jnp.where(memory.visible, jnp.arange(forward.shape[1]), 0), axis=1)
        context = jnp.concatenate([forward[jnp.arange(len(last)), last][:, None], backward[:, :1]], axis=-1)
        return {'context': context, 'inputs': self.context(context)}

    def __call__(self, state: State, inputs: Float[Array, 'batch beam d_gates'], prepared: dict[str, Any]) -> tuple[
            State, tuple[State, Float[Array, 'batch beam d_states'], Weights | None]]:
        """Maps s_{i-1} and projected y_{i-1} to s_i and (s_i, c_i, alpha_i). Without attention, alpha_i is None."""
        if self.attention:
            context, weights = self.cross_attention(state, **prepared)
            state = self.cell(state, inputs + self.context(context))
            return state, (state, context, weights)
        state = self.cell(state, inputs + prepared['inputs'])
        context = jnp.broadcast_to(prepared['context'], (*state.shape[:2], prepared['context'].shape[-1]))
        return state, (state, context, None)


class RecurrentDecoder(nn.Module):
    """The decoder. Maps embedded target tokens to s_i and c_i for every step i."""
    d_hidden: int
    d_align: int
    attention: bool
    dtype: DTypeLike = jnp.float32

    @override
    def setup(self):
        self.initial = dense(self.d_hidden, 'state', 'gates', self.dtype)
        # A list with one layer, so that sown weights have the same path as in the Transformer.
        self.layers = [DecoderLayer(self.d_hidden, self.d_align, self.attention, self.dtype)]

    def __call__(self, x: Float[Array, 'batch target d_model'], memory: Memory) -> tuple[
            Float[Array, 'batch target d_hidden'], Float[Array, 'batch target d_states']]:
        """Returns s_i and c_i of all steps (teacher forcing). y and h_j are projected before the loop over steps."""
        layer, = self.layers
        scan = nn.scan(looped(lambda layer, *args: layer(*args)), variable_broadcast='params',
                       split_rngs={'params': False},
                       # Pyright infers from the default values that the axes must be integers.
                       in_axes=(1, 1, nn.broadcast), out_axes=((1, 1, 2), 1))  # pyright: ignore[reportArgumentType]
        inputs = layer.cell.input(x)[:, :, None]  # one hypothesis per sentence
        _, ((states, contexts, weights), captured) = scan(
            layer, self._initial(memory, 1), loop_positions(x.shape[1]), inputs, layer.prepare(memory))
        leave_loop(captured)
        if self.attention:
            layer.cross_attention.record(weights[:, :, :, 0])
        return states[:, :, 0], contexts[:, :, 0]

    def init_cache(self, memory: Memory, beam: int) -> Cache:
        """Returns a cache in which the state of every hypothesis is s_0."""
        return Cache(memory=self.layers[0].prepare(memory), state=self._initial(memory, beam),
                     position=jnp.zeros((), jnp.int32))

    def decode_step(self, x: Float[Array, 'batch beam d_model'],
                    cache: Cache) -> tuple[State, Float[Array, 'batch beam d_states'], Cache]:
        """Computes one step of every hypothesis: s_i, c_i and the new cache."""
        layer, = self.layers
        state, (_, context, _) = layer(cache.state, layer.cell.input(x), cache.memory)
        return state, context, cache.replace(state=state, position=cache.position + 1)

    def _initial(self, memory, beam):
        """Returns s_0 = tanh(W_0 h_1) with the backward state h_1, which has read the whole sentence.

        This is appendix A.2.2, where the matrix is called W_s, like a matrix of the alignment network.
        """
        state = place(self, 'initial', jnp.tanh(self.initial(memory.states[:, 0, self.d_hidden:])))
        return jnp.broadcast_to(state[:, None], (state.shape[0], beam, self.d_hidden))


class RNNSearch(nn.Module):
    """The encoder-decoder: maps source tokens and previous target tokens to logits of the next target tokens.

        p(y_i | y_1 ... y_{i-1}, x) = softmax(W_o t_i),  t_i = maxout(U_o s_i + V_o y_{i-1} + C_o c_i)

    The equation uses s_i, as section 3.1 does, whereas appendix A.2.2 uses s_{i-1}. Embeddings are multiplied by
    sqrt(d_model), so that a table of variance 1/d_model can also be the output projection, as in `model.transformer`.
    Without attention, c is [the last forward state; the first backward state] at every step. The paper shows that such
    a vector of fixed size is worse for long sentences.

    configs/options.py explains the attributes that are options of config.model or config.model.recurrent. The remaining
    attributes are:
      source_vocab_size, target_vocab_size: numbers of tokens in the vocabularies.
      d_model: width of the embeddings and of t.
      dropout: dropout rate on the embeddings and on t.
      dtype: dtype of the computation; parameters, alignments and logits are float32.
      pad: the padding token. The encoder skips padding, and the alignment weight of padding is 0.

    Raises:
      ValueError: if `readout` or `share_embeddings` is unknown, or if share_embeddings='all' and the vocabularies have
        different sizes.
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
            raise ValueError(f'readout={self.readout!r} must be one of {", ".join(READOUTS)}')
        check_sharing(self.share_embeddings, self.source_vocab_size, self.target_vocab_size)
        self.target_embedding = Embedding(self.target_vocab_size, self.d_model, self.dtype)
        if self.share_embeddings != 'all':
            self.source_embedding = Embedding(self.source_vocab_size, self.d_model, self.dtype)
        if self.share_embeddings == 'none':
            self.output = OutputProjection(self.target_vocab_size)
        self.drop_words, self.drop = WordDropout(self.word_dropout), Dropout(self.dropout)
        self.encoder = RecurrentEncoder(self.d_hidden, self.dtype)
        self.decoder = RecurrentDecoder(self.d_hidden, self.d_align or self.d_hidden, self.attention, self.dtype)
        self.hidden = dense((2 if self.readout == 'maxout' else 1) * self.d_model, 'state', 'mlp', self.dtype)

    @property
    def length_limit(self) -> None:
        """Always None (no limit), because a recurrent network reads sequences of any length."""
        return None

    def __call__(self, source: Int[Array, 'batch source'], target: Int[Array, 'batch target'],
                 deterministic: bool = True) -> Float[Array, 'batch target vocab']:
        """Returns the float32 logits (teacher forcing). `target` is shifted right: it begins with the start token."""
        return self.projection(source, target, deterministic).logits()

    def projection(self, source: Int[Array, 'batch source'], target: Int[Array, 'batch target'],
                   deterministic: bool = True) -> Projection:
        """Returns the logits as a Projection, so that a loss does not need all logits in memory."""
        memory = self.encode(source, deterministic)
        x = self._embed(self.target_embedding, 'target_embedding', target, deterministic)
        return self._project(x, *self.decoder(x, memory), deterministic)

    def encode(self, source: Int[Array, 'batch source'], deterministic: bool = True) -> Memory:
        """Returns the states h_j of source tokens, float [batch, source, 2 d_hidden], and the mask of the tokens."""
        embedding = self.target_embedding if self.share_embeddings == 'all' else self.source_embedding
        visible = source != self.pad
        x = self._embed(embedding, 'source_embedding', source, deterministic)
        return Memory(self.encoder(x, visible), visible)

    def init_cache(self, memory: Memory, beam: int, max_length: int) -> Cache:
        """Returns a cache for `beam` hypotheses. `max_length` has no effect, because the state has a fixed size."""
        return self.decoder.init_cache(memory, beam)

    def decode_step(self, token: Int[Array, 'batch beam'],
                    cache: Cache) -> tuple[Float[Array, 'batch beam vocab'], Cache]:
        """Maps the newest token of each hypothesis to the logits of the next token."""
        with at_positions(cache.position):
            x = self._embed(self.target_embedding, 'target_embedding', token, deterministic=True)
            states, contexts, cache = self.decoder.decode_step(x, cache)
            return self._project(x, states, contexts, deterministic=True).logits(), cache

    def _embed(self, embedding, name, tokens, deterministic):
        embedded = self.drop_words(place(self, name, embedding(tokens)), deterministic)
        return self.drop(embedded * self.d_model ** 0.5, deterministic)

    def _project(self, x, states, contexts, deterministic):
        """Returns the logits g(y_{i-1}, s_i, c_i) of all steps as a Projection (appendix A.2.2)."""
        t = self.hidden(jnp.concatenate([states, x, contexts], axis=-1))
        if self.readout == 'maxout':  # unit j and unit j + d_model form a pair
            t = jnp.maximum(*jnp.split(t, 2, axis=-1))
        t = self.drop(place(self, 'readout', t), deterministic)
        return self.output(t) if self.share_embeddings == 'none' else Projection(t, self.target_embedding.embedding)
