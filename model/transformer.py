"""The encoder-decoder Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762)."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from typing_extensions import override

from model.blocks import BlockConfig, DecoderBlock, SelfAttentionStack, Sequence, layer_norm, rematerialised
from model.cache import Cache, Memory, Past, ancestor_mask, no_ancestors, with_own
from model.dropout import Dropout, WordDropout
from model.embedding import Embedding, OutputProjection, Projection, check_sharing, logits_bias, with_absent
from model.places import at_positions, place
from model.positional import PositionalEncoding, RelativeBias
from model.relation import UNRESTRICTED, Relation


class Decoder(nn.Module):
    """The stack of N decoder blocks. The stack reads embedded target tokens (section 3.1)."""
    config: BlockConfig
    num_layers: int

    @override
    def setup(self):
        self.layers = [rematerialised(DecoderBlock, self, f'layers_{layer}', deterministic=5)(self.config)
                       for layer in range(self.num_layers)]
        self.relative = RelativeBias(self.config.position, self.config.num_heads)
        if self.config.norm == 'pre':
            self.final_norm = layer_norm(self.config)

    def __call__(self, x: Sequence, memory: Float[Array, 'batch source d_model'], relation: Relation,
                 memory_relation: Relation = UNRESTRICTED, deterministic: bool = True) -> Sequence:
        """Returns the outputs at all positions.

        `relation` relates the targets to themselves (self-attention). `memory_relation` relates the targets to `memory`
        (cross-attention).
        """
        relation = relation.replace(bias=self.relative(), window=self.config.window)
        x = place(self, 'input', x)
        for layer in self.layers:
            x = layer(x, memory, relation, memory_relation, deterministic)
        return self._end(x)

    def init_cache(self, memory: Memory, beam: int, max_length: int) -> Cache:
        """Returns a cache with the keys and values of cross-attention, and room for `max_length` steps."""
        config, batch = self.config, memory.states.shape[0]
        shape = batch, config.num_key_value_heads or config.num_heads, config.head_widths(), max_length * beam
        return Cache(
            memory={'layers': [layer.memory_keys_values(memory.states) for layer in self.layers],
                    'visible': memory.visible},
            state={'ancestors': no_ancestors(batch, beam, max_length)},
            position=jnp.zeros((), jnp.int32),
            past=[Past.empty(*shape, config.dtype) for _ in self.layers])

    def decode_step(self, x: Float[Array, 'batch beam d_model'],
                    cache: Cache) -> tuple[Float[Array, 'batch beam d_model'], Cache]:
        """Computes one step of every hypothesis. Returns the outputs and the new cache."""
        beam, keys = x.shape[1], cache.past[0].length()
        ancestors = with_own(cache.state['ancestors'], cache.position)
        relation = Relation(target=jnp.broadcast_to(cache.position, (1, beam)), source=jnp.arange(keys)[None] // beam,
                            mask=ancestor_mask(ancestors, keys), bidirectional=False, bias=self.relative(),
                            window=self.config.window).with_whole_mask()
        memory_relation = Relation(visible=cache.memory['visible'])
        x, pasts = place(self, 'input', x), []
        for layer, keys_values, past in zip(self.layers, cache.memory['layers'], cache.past, strict=True):
            x, past = layer.decode_step(x, keys_values, memory_relation, past, cache.position * beam, relation)
            pasts.append(past)
        return self._end(x), cache.replace(state={'ancestors': ancestors}, position=cache.position + 1, past=pasts)

    def _end(self, x):
        return place(self, '', self.final_norm(x) if self.config.norm == 'pre' else x)


class Transformer(nn.Module):
    """The encoder-decoder: maps source tokens and previous target tokens to logits of the next target tokens.

    Embeddings are multiplied by sqrt(d_model). The transposed table of the embeddings is also the output projection
    (section 3.4). A decoder may have fewer layers than the encoder (Kasai et al. 2021, arXiv:2006.10369).

    configs/options.py explains the attributes that are options of config.model. The remaining attributes are:
      config: the options of the blocks.
      source_vocab_size, target_vocab_size: numbers of tokens in the vocabularies.
      absent: tokens that an imported vocabulary lacks; their probability is 0.
      pad: the padding token, which the masks hide.
    """
    config: BlockConfig
    num_layers: int
    source_vocab_size: int
    target_vocab_size: int
    num_decoder_layers: int = 0
    share_embeddings: str = 'all'
    scale_embeddings: bool = True
    output_bias: bool = False
    absent: tuple[int, ...] = ()
    max_length: int = 256
    word_dropout: float = 0.0
    pad: int = 0

    @override
    def setup(self):
        config = self.config
        check_sharing(self.share_embeddings, self.source_vocab_size, self.target_vocab_size)
        self.target_embedding = Embedding(self.target_vocab_size, config.d_model, config.dtype)
        if self.share_embeddings != 'all':
            self.source_embedding = Embedding(self.source_vocab_size, config.d_model, config.dtype)
        if self.share_embeddings == 'none':
            self.output = OutputProjection(self.target_vocab_size)
        self.logits_bias = logits_bias(self, self.target_vocab_size) if self.output_bias else None
        self.source_position = PositionalEncoding(config.position, config.d_model, self.max_length)
        self.target_position = PositionalEncoding(config.position, config.d_model, self.max_length)
        self.drop_words, self.embedding_dropout = WordDropout(self.word_dropout), Dropout(config.dropout)
        self.encoder = SelfAttentionStack(config, self.num_layers)
        self.decoder = Decoder(config, self.num_decoder_layers or self.num_layers)

    @property
    def length_limit(self) -> int | None:
        """The length of the longest sequence that the position scheme supports, or None if there is no limit."""
        return self.max_length if self.config.position == 'learned' else None

    def __call__(self, source: Int[Array, 'batch source'], target: Int[Array, 'batch target'],
                 deterministic: bool = True) -> Float[Array, 'batch target vocab']:
        """Returns the float32 logits (teacher forcing). `target` is shifted right: it begins with the start token."""
        return self.projection(source, target, deterministic).logits()

    def projection(self, source: Int[Array, 'batch source'], target: Int[Array, 'batch target'],
                   deterministic: bool = True) -> Projection:
        """Returns the logits as a Projection, so that a loss does not need all logits in memory."""
        memory = self.encode(source, deterministic)
        length = target.shape[1]
        relation = Relation.within(np.arange(length)[None], visible=target != self.pad, causal=True)
        x = self._embed_target(target, np.arange(length), length, deterministic)
        return self._project(self.decoder(x, memory.states, relation, Relation(visible=memory.visible), deterministic))

    def encode(self, source: Int[Array, 'batch source'], deterministic: bool = True) -> Memory:
        """Returns the encoder's output for source tokens."""
        embedding = self.target_embedding if self.share_embeddings == 'all' else self.source_embedding
        length, visible = source.shape[1], source != self.pad
        positions = self.source_position(np.arange(length), length)
        x = self._add_positions(place(self, 'source_embedding', embedding(source)), positions, deterministic)
        relation = Relation.within(np.arange(length)[None], visible=visible)
        return Memory(self.encoder(x, relation, deterministic), visible)

    def init_cache(self, memory: Memory, beam: int, max_length: int) -> Cache:
        """Returns an empty cache for `beam` hypotheses of up to `max_length` tokens each."""
        return self.decoder.init_cache(memory, beam, min(max_length, self.length_limit or max_length))

    def decode_step(self, token: Int[Array, 'batch beam'],
                    cache: Cache) -> tuple[Float[Array, 'batch beam vocab'], Cache]:
        """Maps the newest token of each hypothesis to the logits of the next token."""
        with at_positions(cache.position):
            x = self._embed_target(token, cache.position, 0, deterministic=True)
            x, cache = self.decoder.decode_step(x, cache)
        return self._project(x).logits(), cache

    def _embed_target(self, tokens, positions, length, deterministic):
        encoding = self.target_position(positions, length)
        embedded = place(self, 'target_embedding', self.target_embedding(tokens))
        return self._add_positions(embedded, encoding, deterministic)

    def _add_positions(self, embedded, positions, deterministic):
        x = self.drop_words(embedded, deterministic)
        if self.scale_embeddings:
            x = x * self.config.d_model ** 0.5
        return self.embedding_dropout(x + positions.astype(self.config.dtype), deterministic)

    def _project(self, x):
        separate = self.share_embeddings == 'none'
        projection = self.output(x) if separate else Projection(x, self.target_embedding.embedding)
        return projection.replace(bias=with_absent(self.logits_bias, self.absent, self.target_vocab_size))
