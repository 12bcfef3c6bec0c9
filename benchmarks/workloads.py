"""The sizes of the models, batches and searches of the benchmarks. All tokens and weights are random."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    """The sizes of a model with tied embeddings, and of a batch of `batch` pairs with `length` tokens on each side."""
    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    vocab_size: int
    batch: int
    length: int
    dropout: float = 0.1


WORKLOADS = {
    'tiny': Workload(num_layers=4, d_model=128, d_ff=256, num_heads=4, vocab_size=8000, batch=128, length=32),
    'base': Workload(num_layers=6, d_model=512, d_ff=2048, num_heads=8, vocab_size=32_000, batch=16, length=64),
}


@dataclasses.dataclass(frozen=True)
class Search:
    """The sizes of a search: `sentences` sources of `source` tokens. Each output has exactly `target` tokens."""
    beam: int
    sentences: int = 64
    batch: int = 64
    source: int = 24
    target: int = 32

    @property
    def method(self) -> str:
        """The search method: 'greedy' for a beam of 1, otherwise 'beam'."""
        return 'greedy' if self.beam == 1 else 'beam'


LABEL_SMOOTHING, LEARNING_RATE, BETA2, EPSILON = 0.1, 1e-3, 0.98, 1e-9  # options of the loss and of Adam
PAD, BOS, EOS, UNK = range(4)
