"""Measures memory and time of attention: python -m benchmarks.attention [--lengths=1024,4096,16384]

Measures the forward and the backward pass of causal self-attention over one sequence, with 4 heads of width 32. Prints
a JSON line per kernel and length. 'memory_gb' is the memory that the compiled program allocates in addition to its
inputs and outputs. 'peak_memory_gb' is the peak of the process so far, so it includes the previous lines. Programs that
need more than --most_gb are compiled but not run.
"""

from absl import flags

from command_line import run_script
from runtime.errors import UserError

LENGTHS = flags.DEFINE_list('lengths', ['1024', '4096', '16384'], 'Numbers of positions.')
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'The type of queries, keys and values.')
RUNS = flags.DEFINE_integer('runs', 3, 'Timed runs.', lower_bound=1)
MOST_GB = flags.DEFINE_float('most_gb', 8.0, 'Programs that need more memory, in GiB, are not run.')
HEADS, WIDTH = 4, 32


def main() -> None:
    try:
        lengths = [int(length) for length in LENGTHS.value]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise UserError(f'--lengths={",".join(LENGTHS.value)}: must be whole numbers of at least 1, separated by '
                        'commas. Use for example --lengths=1024,4096')

    import jax  # these imports take seconds, and --help does not need them
    import jax.numpy as jnp

    from benchmarks.measure import report, times
    from kernels.attention import fused_attention
    from model.attention import attention, chunked_attention
    from model.relation import Relation

    kernels = {
        'plain': lambda query, key, value, relation: attention(query, key, value, relation)[0],
        'chunked': chunked_attention,
        'fused': lambda query, key, value, relation: fused_attention(query, key, value, relation.whole_mask())}
    for length in lengths:
        inputs = [jax.random.normal(jax.random.key(seed), (1, length, HEADS, WIDTH), DTYPE.value) for seed in range(3)]
        relation = Relation.within(jnp.arange(length)[None], causal=True)
        for name, kernel in kernels.items():

            def total(*inputs, kernel=kernel, relation=relation):
                return jnp.sum(jnp.sin(kernel(*inputs, relation).astype(jnp.float32)))

            compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*inputs).compile()
            memory = compiled.memory_analysis()
            assert memory is not None, 'XLA reports the memory on all devices that this benchmark supports'
            gigabytes = memory.temp_size_in_bytes / 2 ** 30
            fits = gigabytes <= MOST_GB.value
            seconds = times(lambda compiled=compiled, inputs=inputs: compiled(*inputs), RUNS.value) if fits else []
            report(seconds, length, {'benchmark': 'attention', 'kernel': name, 'length': length, 'dtype': DTYPE.value,
                                     'memory_gb': round(gigabytes, 3)})


if __name__ == '__main__':
    run_script(main, computes=True)
