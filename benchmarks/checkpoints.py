"""Measures the cost of checkpoints: python -m benchmarks.checkpoints --config=configs/NAME.py [--every=200] [--pairs=5]

Trains in blocks of --every steps. All blocks have the same batches. Blocks with a checkpoint at the beginning alternate
with blocks without a checkpoint. Prints one JSON line. `ratio` is the median time of a block with a checkpoint divided
by the median time of a block without a checkpoint. The time of a block includes the wait until the checkpoint is
complete. `held_s` is the median time of a call of `save`. The training loop waits during the call, and the call waits
until the current step is finished.
"""

import statistics
import tempfile
import time
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from command_line import run_script
from configs.checks import config_from
from runtime.files import expanded

CONFIG_FLAG = config_flags.DEFINE_config_file('config', None, 'The recipe, a file of configs/.', lock_config=True)
EVERY = flags.DEFINE_integer('every', 200, 'Steps per block.', lower_bound=1)
PAIRS = flags.DEFINE_integer('pairs', 5, 'The number of pairs of blocks, with and without a checkpoint.', lower_bound=1)
FOLDER = flags.DEFINE_string('folder', None, 'A folder for temporary checkpoints; by default the system\'s.')


def main() -> None:
    parent = expanded(FOLDER.value) if FOLDER.value else None
    import jax  # these imports take seconds, and --help does not need them

    from benchmarks.measure import report
    from input_pipeline.batches import prefetch
    from input_pipeline.data import open_data
    from model import parameter_count
    from model.build import build_model
    from run_directory.checkpoints import open_checkpoints
    from runtime.cache import cache_folder, use_compilation_cache
    from training.compiled import Compiled
    from training.objective import make_objective
    from training.optimizer import make_optimizer, make_schedule
    from training.precision import resolve_precision
    from training.tuning import make_tuning

    config = config_from(CONFIG_FLAG)
    use_compilation_cache(cache_folder(config.cache_dir))
    data = open_data(config)
    plan = data.plan('train')
    example = plan.batch(0)
    resolve_precision(config, max(array.size for array in jax.tree.leaves(example['inputs'])))
    module, tuning = build_model(config.model, **data.sizes), make_tuning(config.train)
    optimizer = make_optimizer(config.optimizer, make_schedule(
        config.optimizer, d_model=config.model.d_model, steps=config.train.steps), tuning)
    compiled = Compiled(module, optimizer, example, parallel=config.parallel,
                        objective=make_objective(config, data), dropout_key=jax.random.key(1),
                        accumulate=config.train.accumulate, precision=config.train.matmul_precision, tuning=tuning)
    state = compiled.init(seed=0)
    size, steps, tokens, held = parameter_count(state.params), 0, 0, []

    def block(checkpoints=None) -> float:
        """Trains one block of steps, and returns its duration in seconds.

        If `checkpoints` is given, saves a checkpoint at the beginning of the block.
        """
        nonlocal state, steps, tokens
        began, before, tokens = time.perf_counter(), None, 0
        for batch in prefetch(plan, 0, EVERY.value, compiled.part):
            state, sums = compiled.train(state, batch)
            jax.block_until_ready(before)  # as in train.py, the loop is one step ahead of the device
            before, steps, tokens = sums, steps + 1, tokens + int(batch['weights'].sum())
            if checkpoints and steps % EVERY.value == 1 % EVERY.value:
                saving_began = time.perf_counter()
                checkpoints.save(steps, state, {})
                held.append(time.perf_counter() - saving_began)
        jax.block_until_ready(sums)
        if checkpoints:
            checkpoints.wait()
        return time.perf_counter() - began

    block()  # compiles the train step for all shapes
    with tempfile.TemporaryDirectory(dir=parent) as folder, open_checkpoints(Path(folder)) as checkpoints:
        block(checkpoints)  # compiles the programs that a save needs
        pairs = [(block(checkpoints), block()) for _ in range(PAIRS.value)]
    saving, never = ([pair[index] for pair in pairs] for index in range(2))
    report(saving, tokens, {
        'benchmark': 'checkpoints', 'config': config_flags.get_config_filename(flags.FLAGS['config']),
        'parameters': size, 'matmul_precision': config.train.matmul_precision, 'every': EVERY.value,
        'ratio': round(statistics.median(saving) / statistics.median(never), 4),
        'ratios': [round(one / other, 3) for one, other in pairs], 'median_s_never': round(statistics.median(never), 4),
        'held_s': round(statistics.median(held[1:]), 4)})


if __name__ == '__main__':
    run_script(main, computes=True)
