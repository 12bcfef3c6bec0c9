"""Speed of decoding: python -m benchmarks.decode [--workload=tiny|base] [--dtype=bfloat16]

256 sources of 24 tokens, each decoded to exactly 32 tokens, 64 at a time, greedy and with a beam of 4. Two JSON lines.
"""

from command_line import run_script, use_huge_pages

if __name__ == '__main__':
    use_huge_pages()

import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from benchmarks.measure import report, times
from benchmarks.workloads import WORKLOADS
from inference.search import IMPOSSIBLE, Vocabulary, beam_search, sample

WORKLOAD = flags.DEFINE_enum('workload', 'tiny', list(WORKLOADS), 'Which sizes.')
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Of the computation.')
RUNS = flags.DEFINE_integer('runs', 5, 'Timed passes over all sentences.', lower_bound=1)
SENTENCES, SOURCE, TARGET, BATCH = 256, 24, 32, 64
VOCABULARY = Vocabulary(pad=0, bos=1, eos=2, others=(3,))


def main() -> None:
    module = WORKLOADS[WORKLOAD.value].module(DTYPE.value)
    sources = jax.random.randint(jax.random.key(0), (SENTENCES // BATCH, BATCH, SOURCE), 4, module.source_vocab_size)
    variables = jax.jit(module.init)(jax.random.key(1), sources[0], sources[0])
    for method, beam in (('greedy', 1), ('beam', 4)):

        @jax.jit
        def decode(variables, source, method=method, beam=beam):
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
            if method == 'greedy':
                return sample(step, cache, start, limits, vocabulary=VOCABULARY, max_length=TARGET)
            return beam_search(step, cache, start, limits, vocabulary=VOCABULARY, max_length=TARGET, beam=beam)

        began = time.perf_counter()
        compiled = decode.lower(variables, sources[0]).compile()
        compile_s = time.perf_counter() - began

        def run(compiled=compiled):
            return [compiled(variables, source) for source in sources]

        found = run()[0]
        lengths = (found.tokens[:, 0] != VOCABULARY.pad).sum(axis=1)
        assert (lengths == TARGET).all(), lengths
        report(times(run, RUNS.value), SENTENCES * TARGET,
               {'benchmark': 'decode', 'workload': WORKLOAD.value, 'dtype': DTYPE.value, 'method': method, 'beam': beam,
                'system': 'allyouneed', 'compile_s': round(compile_s, 2)})


if __name__ == '__main__':
    run_script(main)
