"""The two fixed workloads that the benchmarks share: random tokens, random weights."""

import dataclasses

from model.blocks import BlockConfig
from model.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes of a model and of a training batch of `batch` sentence pairs of `length` tokens on each side."""
    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    vocab_size: int
    batch: int
    length: int
    dropout: float = 0.1

    def module(self, dtype: str) -> Transformer:
        """The model, embeddings tied."""
        config = BlockConfig(d_model=self.d_model, d_ff=self.d_ff, num_heads=self.num_heads, dropout=self.dropout,
                             dtype=dtype)
        return Transformer(config, self.num_layers, self.vocab_size, self.vocab_size)


WORKLOADS = {
    'tiny': Workload(num_layers=4, d_model=128, d_ff=256, num_heads=4, vocab_size=8000, batch=128, length=32),
    'base': Workload(num_layers=6, d_model=512, d_ff=2048, num_heads=8, vocab_size=32_000, batch=16, length=64),
}

# What is decoded: SENTENCES sources of SOURCE tokens, BATCH at a time, each to exactly TARGET tokens.
SENTENCES, SOURCE, TARGET, BATCH = 256, 24, 32, 64
