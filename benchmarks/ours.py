"""The product's own train step and search at the size of a workload, compiled and ready to be called."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.workloads import BATCH, SENTENCES, SOURCE, TARGET, Workload
from inference.search import IMPOSSIBLE, Vocabulary, beam_search, sample
from input_pipeline.batches import Batch
from training.loss import cross_entropy
from training.objective import forward, supervised
from training.step import init_state, train_step

VOCABULARY = Vocabulary(pad=0, bos=1, eos=2, others=(3,))


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


def train_program(workload: Workload, dtype: str) -> Program:
    """The train step with Adam and label smoothing; each call goes on from the state that the last one left."""
    module = workload.module(dtype)
    tokens = jax.random.randint(jax.random.key(0), (workload.batch, workload.length), 4, workload.vocab_size)
    batch: Batch = {'inputs': {'source': tokens, 'target': tokens}, 'targets': tokens,
                    'weights': jnp.ones(tokens.shape)}
    optimizer = optax.adam(1e-3, b2=0.98, eps=1e-9)
    state = init_state(module, optimizer, batch, seed=0)
    objective = supervised(functools.partial(cross_entropy, label_smoothing=0.1))
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


def decode_program(workload: Workload, dtype: str, beam: int, sentences: int = SENTENCES) -> Program:
    """A search for exactly TARGET tokens for each of `sentences` sources, BATCH at a time; a beam of 1 is greedy."""
    module = workload.module(dtype)
    sources = jax.random.randint(jax.random.key(0), (sentences // BATCH, BATCH, SOURCE), 4, workload.vocab_size)
    variables = jax.jit(module.init)(jax.random.key(1), sources[0], sources[0])

    @jax.jit
    def decode(variables, source):
        def apply(*args, method) -> Any:
            return module.apply(variables, *args, method=method)

        def step(tokens, cache):
            logits, cache = apply(tokens, cache, method='decode_step')
            # No early end: the limit alone ends an output, so that every one has TARGET tokens.
            early = cache.position < TARGET
            return logits.at[..., VOCABULARY.eos].set(jnp.where(early, IMPOSSIBLE, 0.0)), cache

        memory = apply(source, method='encode')
        cache = apply(memory, beam, TARGET, method='init_cache')
        start, limits = jnp.full(BATCH, VOCABULARY.bos), jnp.full(BATCH, TARGET)
        if beam == 1:
            return sample(step, cache, start, limits, vocabulary=VOCABULARY, max_length=TARGET)
        return beam_search(step, cache, start, limits, vocabulary=VOCABULARY, max_length=TARGET, beam=beam)

    began = time.perf_counter()
    compiled = decode.lower(variables, sources[0]).compile()
    compile_s = time.perf_counter() - began
    return Program(compiled, lambda: [compiled(variables, source) for source in sources], compile_s)
