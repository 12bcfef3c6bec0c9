"""The product's own train step and search at the size of a workload, compiled and ready to be called."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from benchmarks.measure import peak_memory
from benchmarks.turns import Ready
from benchmarks.workloads import (
    BETA2,
    BOS,
    EOS,
    EPSILON,
    LABEL_SMOOTHING,
    LEARNING_RATE,
    PAD,
    UNK,
    Search,
    Workload,
)
from errors import UserError
from inference.search import IMPOSSIBLE, Vocabulary, beam_search, sample
from input_pipeline.batches import Batch
from model.blocks import BlockConfig
from model.transformer import Transformer
from training.loss import cross_entropy
from training.objective import forward, supervised
from training.step import init_state, train_step

VOCABULARY = Vocabulary(pad=PAD, bos=BOS, eos=EOS, others=(UNK,))


@dataclasses.dataclass
class Program:
    """Something that XLA has compiled.

    Attributes:
      compiled: what XLA made.
      call: runs it once, on what it was made for; what comes back can be waited for.
      compile_s: seconds that compiling took.
    """
    compiled: jax.stages.Compiled
    call: Callable[[], Any]
    compile_s: float

    @property
    def memory_gb(self) -> float:
        """What the program holds at its peak by XLA's own account: arguments, results and temporaries."""
        memory = self.compiled.memory_analysis()
        assert memory is not None, 'XLA tells it on every device that this runs on'
        return (memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
                - memory.alias_size_in_bytes) / 2 ** 30


def make_model(workload: Workload, dtype: str) -> Transformer:
    """The Transformer of the paper, embeddings tied."""
    config = BlockConfig(d_model=workload.d_model, d_ff=workload.d_ff, num_heads=workload.num_heads,
                         dropout=workload.dropout, dtype=dtype)
    return Transformer(config, workload.num_layers, workload.vocab_size, workload.vocab_size)


def train_program(workload: Workload, dtype: str) -> Program:
    """The train step with Adam and label smoothing; each call goes on from the state that the last one left."""
    module = make_model(workload, dtype)
    tokens = jax.random.randint(jax.random.key(0), (workload.batch, workload.length), 4, workload.vocab_size)
    batch: Batch = {'inputs': {'source': tokens, 'target': tokens}, 'targets': tokens,
                    'weights': jnp.ones(tokens.shape)}
    optimizer = optax.adam(LEARNING_RATE, b2=BETA2, eps=EPSILON)
    state = init_state(module, optimizer, batch, seed=0)
    objective = supervised(functools.partial(cross_entropy, label_smoothing=LABEL_SMOOTHING))
    step = jax.jit(functools.partial(train_step, objective=objective, apply=forward(module), optimizer=optimizer,
                                     dropout_key=jax.random.key(1)), donate_argnums=0)
    began = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    compile_s = time.perf_counter() - began

    def call():
        nonlocal state
        state, sums = compiled(state, batch)
        return sums

    return Program(compiled, call, compile_s)


def decode_program(workload: Workload, dtype: str, search: Search, model: str | None = None) -> Program:
    """A search over all its sentences. With `model`, weights and sources are written there (.npz), for the peers."""
    module, target = make_model(workload, dtype), search.target
    sources = jax.random.randint(jax.random.key(0), (search.sentences // search.batch, search.batch, search.source), 4,
                                 workload.vocab_size)
    variables = jax.jit(module.init)(jax.random.key(1), sources[0], sources[0])
    if model:
        params: Any = flatten_dict(jax.device_get(nn.unbox(variables['params'])), sep='/')
        np.savez(model, sources=sources, **params)

    @jax.jit
    def decode(variables, source):
        def apply(*args, method) -> Any:
            return module.apply(variables, *args, method=method)

        def step(tokens, cache):
            logits, cache = apply(tokens, cache, method='decode_step')
            # No early end: the limit alone ends an output, so that every one has `target` tokens.
            early = cache.position < target
            return logits.at[..., EOS].set(jnp.where(early, IMPOSSIBLE, 0.0)), cache

        memory = apply(source, method='encode')
        cache = apply(memory, search.beam, target, method='init_cache')
        start, limits = jnp.full(search.batch, BOS), jnp.full(search.batch, target)
        if search.method == 'greedy':
            return sample(step, cache, start, limits, vocabulary=VOCABULARY, max_length=target)
        return beam_search(step, cache, start, limits, vocabulary=VOCABULARY, max_length=target, beam=search.beam)

    began = time.perf_counter()
    compiled = decode.lower(variables, sources[0]).compile()
    compile_s = time.perf_counter() - began
    return Program(compiled, lambda: [compiled(variables, source) for source in sources], compile_s)


def ready_train_step(workload: Workload, dtype: str, beside_peers: bool) -> Ready:
    """For benchmarks.turns."""
    return ready(train_program(workload, dtype), beside_peers)


def ready_decode(workload: Workload, dtype: str, search: Search, model: str, beside_peers: bool) -> Ready:
    """For benchmarks.turns; the answer is the best output of each sentence. Writes the `model` for the peers."""
    program = decode_program(workload, dtype, search, model if beside_peers else None)
    answer = np.concatenate([found.tokens[:, 0] for found in program.call()])
    lengths = (answer != PAD).sum(axis=1)
    assert (lengths == search.target).all(), lengths
    return ready(program, beside_peers, answer.tolist())


def ready(program: Program, beside_peers: bool, answer: list[list[int]] | None = None) -> Ready:
    """A program, and where it runs.

    Raises:
      UserError: if that is not the CPU, and peers run there.
    """
    device = jax.devices()[0]
    if beside_peers and device.platform != 'cpu':
        raise UserError(f'--peers run on the CPU, and JAX on {device.device_kind}: set JAX_PLATFORMS=cpu')
    return Ready(lambda: jax.block_until_ready(program.call()), {
        'compile_s': round(program.compile_s, 2), 'program_gb': round(program.memory_gb, 3),
        'device': device.device_kind, 'jax': jax.__version__, 'flax': flax.__version__}, answer, peak_memory)
