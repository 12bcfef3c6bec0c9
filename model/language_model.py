"""The decoder-only language model of the GPT family: encoder blocks with a causal mask.

Source: Radford et al. 2018, "Improving language understanding by generative pre-training", section 3.1.
"""

from typing import Any

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from typing_extensions import override

from model.attention import DOT_PRODUCTS
from model.blocks import BlockConfig, SelfAttentionStack
from model.cache import Cache, ancestor_mask, no_ancestors, with_own
from model.dropout import Dropout, WordDropout
from model.embedding import Embedding, OutputProjection, Projection, logits_bias, with_absent
from model.places import at_positions, place
from model.positional import PositionalEncoding
from model.relation import Relation


class Prompt(flax.struct.PyTreeNode):
    """The keys and values of a prompt, in all layers.

    Attributes:
      pasts: the `Past` of each layer.
      visible: bool [batch, prompt], False at padding.
    """
    pasts: Any
    visible: Any


class LanguageModel(nn.Module):
    """The model p(x_1 ... x_n) = prod_i p(x_i | x_<i). Maps previous tokens to logits of the next tokens.

    configs/options.py explains the attributes that are options of config.model. The remaining attributes are:
      config: the options of the blocks.
      vocab_size: number of tokens in the vocabulary.
      absent: tokens that an imported vocabulary lacks; their probability is 0.
      pad: the padding token, which the masks hide.
    """
    config: BlockConfig
    num_layers: int
    vocab_size: int
    tie_embeddings: bool = True
    scale_embeddings: bool = True
    output_bias: bool = False
    absent: tuple[int, ...] = ()
    max_length: int = 256
    word_dropout: float = 0.0
    pad: int = 0

    @override
    def setup(self):
        config = self.config
        self.embedding = Embedding(self.vocab_size, config.d_model, config.dtype)
        if not self.tie_embeddings:
            self.output = OutputProjection(self.vocab_size)
        self.logits_bias = logits_bias(self, self.vocab_size) if self.output_bias else None
        self.position = PositionalEncoding(config.position, config.d_model, self.max_length)
        self.drop_words, self.embedding_dropout = WordDropout(self.word_dropout), Dropout(config.dropout)
        self.encoder = SelfAttentionStack(config, self.num_layers)

    @property
    def length_limit(self) -> int | None:
        """The maximum number of tokens in a prompt and its continuation together, or None if there is no limit."""
        return self.max_length if self.config.position == 'learned' else None

    def __call__(self, tokens: Int[Array, 'batch length'], segments: Int[Array, 'batch length'] | None = None,
                 positions: Int[Array, 'batch length'] | None = None,
                 deterministic: bool = True) -> Float[Array, 'batch length vocab']:
        """Returns float32 logits (teacher forcing). Position t of the result has the logits of the token at t + 1.

        A packed row contains several documents. For each token, `segments` has the index of its document, and
        `positions` has its position in this document. Tokens see only tokens of the same document.
        """
        return self.projection(tokens, segments, positions, deterministic).logits()

    def projection(self, tokens: Int[Array, 'batch length'], segments: Int[Array, 'batch length'] | None = None,
                   positions: Int[Array, 'batch length'] | None = None, deterministic: bool = True) -> Projection:
        """Returns the logits as a Projection, so that a loss does not need all logits in memory."""
        length = tokens.shape[1]
        columns = np.arange(length)[None]
        # Within a document, columns and positions have the same differences, and the sines of columns are constants. So
        # columns are used, unless the scores of rotated vectors depend on the positions themselves.
        absolute = self.config.rotary() is not None and self.config.score not in DOT_PRODUCTS
        relation = Relation.within(positions if absolute and positions is not None else columns,
                                   visible=tokens != self.pad, segments=segments, causal=True)
        with at_positions(positions, keys=positions):
            x = self._embed(tokens, columns if positions is None else positions, length, deterministic)
            return self._project(self.encoder(x, relation, deterministic))

    def encode(self, prompt: Int[Array, 'batch prompt']) -> Prompt:
        """Returns the keys and values of a prompt, computed in one pass. Padding must be at the end of the prompt."""
        length, visible = prompt.shape[1], prompt != self.pad
        relation = Relation.within(np.arange(length)[None], visible=visible, causal=True)
        x = self._embed(prompt, np.arange(length)[None], length, deterministic=True)
        return Prompt(self.encoder.prefill(x, relation)[1], visible)

    def init_cache(self, memory: Prompt, beam: int, max_length: int) -> Cache:
        """Returns a cache with one copy of the prompt, for `beam` continuations of up to `max_length` tokens each."""
        return Cache(memory={'visible': memory.visible},
                     state={'ancestors': no_ancestors(memory.visible.shape[0], beam, max_length)},
                     position=jnp.zeros((), jnp.int32), past=memory.pasts).resized(max_length * beam)

    def decode_step(self, token: Int[Array, 'batch beam'],
                    cache: Cache) -> tuple[Float[Array, 'batch beam vocab'], Cache]:
        """Maps the newest token of each continuation to the logits of the next token."""
        visible = cache.memory['visible']
        (batch, prompt), beam = visible.shape, token.shape[1]
        keys = cache.past[0].length() - prompt
        ancestors = with_own(cache.state['ancestors'], cache.position)
        # The cache contains the keys of the padded prompt, then the keys of the continuation. The positions of the
        # continuation follow the last token of the prompt that is not padding.
        begin = visible.sum(axis=1, keepdims=True)
        source = jnp.concatenate([jnp.broadcast_to(jnp.arange(prompt), (batch, prompt)),
                                  begin + jnp.arange(keys) // beam], axis=1)
        prompt_mask = jnp.broadcast_to(visible[:, None, None], (batch, 1, beam, prompt))
        positions = jnp.broadcast_to(begin + cache.position, (batch, beam))
        relation = Relation(target=positions, source=source, bidirectional=False,
                            mask=jnp.concatenate([prompt_mask, ancestor_mask(ancestors, keys)], axis=3))
        with at_positions(begin + cache.position):
            x = self._embed(token, positions, 0, deterministic=True)
            x, pasts = self.encoder.decode_step(x, cache.past, prompt + cache.position * beam, relation)
        cache = cache.replace(state={'ancestors': ancestors}, position=cache.position + 1, past=pasts)
        return self._project(x).logits(), cache

    def _embed(self, tokens, positions, length, deterministic):
        x = self.drop_words(place(self, 'embedding', self.embedding(tokens)), deterministic)
        if self.scale_embeddings:
            x = x * self.config.d_model ** 0.5
        x = x + self.position(positions, length).astype(self.config.dtype)
        return self.embedding_dropout(x, deterministic)

    def _project(self, x):
        projection = Projection(x, self.embedding.embedding) if self.tie_embeddings else self.output(x)
        return projection.replace(bias=with_absent(self.logits_bias, self.absent, self.vocab_size))
