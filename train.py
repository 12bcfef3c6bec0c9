"""Trains a model: python train.py --config=configs/NAME.py --workdir=RUN [--config.model.num_layers=2 ...]

Run the same command again after an interruption: it goes on where it stopped, and ends with the same
parameters, bit for bit, as a run that was left alone (on the same machine).
"""

from errors import UserError, run_script, use_huge_pages

if __name__ == '__main__':
    use_huge_pages()

import logging
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from configs.checks import config_from, flatten
from inference.run import CONFIG, answering, read_config
from inference.scores import Evaluation
from input_pipeline.batches import Plan, prefetch
from input_pipeline.data import KEPT, Data, open_data
from input_pipeline.token_store import cache_folder
from model.build import build_model
from training.checkpoints import LOWER_IS_BETTER, Checkpoints, open_checkpoints
from training.loss import make_loss
from training.metrics import MetricsWriter, NoMetrics
from training.optimizer import make_optimizer, make_schedule
from training.parallel import Compiled, connect, is_leader, leader_first
from training.step import TrainState, evaluate, parameter_count, use_compilation_cache

CONFIG_FLAG = config_flags.DEFINE_config_file('config', None, 'The recipe, a file of configs/.', lock_config=True)
WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory: created, or resumed if it holds this config.')
COORDINATOR = flags.DEFINE_string('coordinator_address', None, 'Many processes: HOST:PORT of process 0. Slurm, TPU '
                                  'pods and GKE tell it without these three flags.')
PROCESSES = flags.DEFINE_integer('num_processes', None, 'Many processes: how many.')
PROCESS = flags.DEFINE_integer('process_id', None, 'Many processes: which one this is, from 0.')

log = logging.getLogger('allyouneed.train')


def main() -> None:
    connect(COORDINATOR.value, PROCESSES.value, PROCESS.value)
    config = config_from(CONFIG_FLAG)
    workdir = check_workdir(config)
    use_compilation_cache(cache_folder(config.cache_dir))

    with leader_first('data'):
        data = open_data(config)
        plan, validation = data.plan('train'), data.plan('validation')
    module = build_model(config.model, **data.sizes)
    schedule = make_schedule(config.optimizer, d_model=config.model.d_model, steps=config.train.steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    params_seed, dropout_seed = config.seed, config.seed + 1
    compiled = Compiled(module, optimizer, plan.batch(0), parallel=config.parallel,
                        loss=make_loss(config.task, config.train.label_smoothing),
                        dropout_key=jax.random.key(dropout_seed), accumulate=config.train.accumulate,
                        rows=[*plan.rows, *validation.rows])
    state = compiled.init(params_seed)
    model = answering(config, module, state.params, data.tokenizers, data.sizes)
    model.spread = compiled.spread  # its searches use all devices too
    log.info('%s parameters; %s; %s', f'{parameter_count(state.params):,}', plan.describe(), compiled.describe())

    if is_leader():
        claim_workdir(workdir, config, data)
    with open_checkpoints(workdir, metric=config.eval.metric, keep_last=config.checkpoint.keep_last) as checkpoints:
        state, progress = restore(checkpoints, state)

        def measure(state: TrainState) -> Evaluation:
            model.params = compiled.gather(state.params)
            batches = prefetch(validation, 0, len(validation), compiled.part)
            sums = evaluate(compiled.eval, model.params, batches)
            found = model.validate(data, sums, config)
            return found._replace(metrics={
                f'validation_{name}': value for name, value in (sums.means() | found.metrics).items()})

        metrics = MetricsWriter(workdir, int(state.step)) if is_leader() else NoMetrics()
        train(config, state, progress, compiled, plan, schedule, measure, checkpoints, metrics)


def train(config: ConfigDict, state: TrainState, progress: dict, compiled: Compiled, plan: Plan,
          schedule: Callable[[int], float], measure: Callable[[TrainState], Evaluation],
          checkpoints: Checkpoints, metrics: MetricsWriter | NoMetrics) -> None:
    """The loop: step, log, evaluate, save, until the last step or until patience ends."""
    first, last = int(state.step), config.train.steps
    if first >= last or progress['stopped']:
        log.info('this run is finished, at step %d', first)
        return
    shapes, pending, began, seconds = set(), [], time.perf_counter(), 0.0
    bar = tqdm(total=last, initial=first, unit='step', file=sys.stderr, dynamic_ncols=True, disable=not is_leader(),
               mininterval=0.2 if sys.stderr.isatty() else 30)
    with bar, logging_redirect_tqdm([logging.getLogger('allyouneed')]):
        for step, batch in enumerate(prefetch(plan, first, last, compiled.part), first + 1):
            if (shape := batch['targets'].shape) not in shapes:
                shapes.add(shape)
                log.info('compilation %d: batches of %d x %d', len(shapes), *shape)
            state, sums = compiled.train(state, batch)
            pending.append(sums)
            jax.block_until_ready(pending[-2:][0])  # stay one step ahead of the device, not a thousand
            bar.update()

            if step % config.train.log_every == 0 or step == last:
                total = jax.tree.map(lambda *parts: sum(parts), *jax.device_get(pending))
                seconds += time.perf_counter() - began
                speed = float(total.tokens) / seconds
                metrics.write(step, total.means('train_') | {
                    'learning_rate': float(schedule(step - 1)), 'tokens_per_second': speed, 'epoch': step / len(plan)})
                bar.set_postfix(loss=f'{float(total.loss / total.tokens):.3f}', tokens_per_s=f'{speed:,.0f}')
                pending, began, seconds = [], time.perf_counter(), 0.0

            evaluating = step % config.eval.every == 0 or step == last
            if evaluating or step % config.checkpoint.every == 0:
                seconds += time.perf_counter() - began
                measured = None
                if evaluating:
                    evaluation = measure(state)
                    measured = evaluation.metrics
                    metrics.write(step, measured)
                    metrics.show(step, evaluation.samples, evaluation.picture)
                    log.info('step %d: %s%s', step,
                             ', '.join(f'{name} {value:.4g}' for name, value in measured.items()),
                             evaluation.samples and '\n' + evaluation.samples)
                    progress = judged(progress, measured[f'validation_{config.eval.metric}'], config.eval)
                checkpoints.save(step, state, progress, measured)
                began = time.perf_counter()
                if progress['stopped']:
                    log.info('stopped at step %d: validation_%s has not been better for %d evaluations',
                             step, config.eval.metric, config.eval.patience)
                    break
    metrics.close()
    log.info('%d compilations of the train step; peak memory %.2f GB', len(shapes),
             resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20)


def judged(progress: dict, value: float, evaluation: ConfigDict) -> dict:
    """The loop's progress after an evaluation that gave `value`: the best so far, and whether patience has ended."""
    lower_is_better = evaluation.metric in LOWER_IS_BETTER
    best = progress['best']
    better = best is None or (value < best if lower_is_better else value > best)
    without_better = 0 if better else progress['without_better'] + 1
    return {'best': value if better else best, 'without_better': without_better,
            'stopped': 0 < evaluation.patience <= without_better}


def restore(checkpoints: Checkpoints, state: TrainState) -> tuple[TrainState, dict]:
    """The newest checkpoint, or the fresh state where there is none, and the loop's own progress."""
    steps = checkpoints.steps()
    if not steps:
        return state, {'best': None, 'without_better': 0, 'stopped': False}
    log.info('resuming from step %d', steps[-1])
    return checkpoints.restore(steps[-1], state)


def check_workdir(config: ConfigDict) -> Path:
    """The run directory, if it is free or holds a run of this very config.

    Raises:
      UserError: naming the keys that differ.
    """
    if not WORKDIR.value:
        raise UserError('--workdir is missing: give the directory that the run is to be kept in')
    workdir = Path(WORKDIR.value).expanduser()
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f'--workdir={workdir} is a file: give a directory')
    if (workdir / CONFIG).exists():
        there, here = flatten(read_config(workdir)), flatten(config)
        changed = [f'  {key}: {there.get(key)!r} there, {here.get(key)!r} asked for'
                   for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
        if changed:
            raise UserError(f'{workdir} holds a run of another config. These keys differ:\n' + '\n'.join(changed)
                            + '\nGive another --workdir, or the config of that run to resume it')
    elif workdir.exists() and any(workdir.iterdir()):
        raise UserError(f'--workdir={workdir} holds files but no run ({CONFIG}): give a new or an empty directory')
    return workdir


def claim_workdir(workdir: Path, config: ConfigDict, data: Data) -> None:
    """Makes the run directory self-contained: decode.py needs nothing else."""
    if (workdir / CONFIG).exists():
        return
    workdir.mkdir(parents=True, exist_ok=True)
    temporary = workdir / f'{CONFIG}.tmp'
    temporary.write_text(config.to_json(indent=2) + '\n')
    data.keep(workdir / KEPT)
    os.replace(temporary, workdir / CONFIG)


if __name__ == '__main__':
    run_script(main)
