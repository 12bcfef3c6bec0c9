"""Trains a model: --config=configs/NAME.py --workdir=RUN [--config.OPTION=VALUE ...]. For example:

    python train.py --config=configs/demo.py --workdir=runs/demo --config.model.num_layers=3

Run the same command again after an interruption: it goes on where it stopped, and ends with the same
parameters, bit for bit, as a run that was left alone (on the same machine).

Exit status: 0, trained to the end; 2, something to mend, which the last lines on stderr explain; 75 (EX_TEMPFAIL),
stopped by SIGTERM or SIGINT after saving: start it again; 130 or 143, stopped at once by a second such signal.
"""

from command_line import run_script, use_huge_pages
from errors import UserError

if __name__ == '__main__':
    use_huge_pages()

import contextlib
import dataclasses
import functools
import logging
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from absl import flags
from matplotlib.figure import Figure
from ml_collections import ConfigDict, config_flags
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from analysis.pictures import answer_figure
from configs.checks import config_from
from configs.options import DEFAULTS, flatten
from inference.run import make_answerer
from inference.scores import Evaluation
from input_pipeline.batches import Plan, prefetch
from input_pipeline.data import open_data
from input_pipeline.problems import data_problems
from input_pipeline.token_store import cache_folder
from model.build import build_model, check_fits
from training.checkpoints import Checkpoints, goodness, open_checkpoints
from training.compiled import Compiled
from training.loss import Sums
from training.metrics import EVALUATED, MetricsWriter, NoMetrics, compile_time, memory, peak_resident
from training.objective import make_objective
from training.optimizer import make_optimizer, make_schedule
from training.preemption import StopSignals
from training.processes import anywhere, connect, is_leader, leader_first
from training.profiling import ProfilerWindow
from training.step import TrainState, evaluate, key_for, use_compilation_cache
from training.summary import duration, parameter_table, seconds_a_step
from training.workdir import RunDirectory

CONFIG_FLAG = config_flags.DEFINE_config_file('config', None, 'The recipe, a file of configs/.', lock_config=True)
WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory: created, or resumed if it holds this config.')
COORDINATOR = flags.DEFINE_string('coordinator_address', None, 'Many processes: HOST:PORT of process 0. Slurm, TPU '
                                  'pods and GKE tell it without these three flags.')
PROCESSES = flags.DEFINE_integer('num_processes', None, 'Many processes: how many.')
PROCESS = flags.DEFINE_integer('process_id', None, 'Many processes: which one this is, from 0.')
PRINT_CONFIG = flags.DEFINE_bool('print_config', False, 'Print the resolved config as flags, and train nothing.')
PROFILE = flags.DEFINE_string('profile_steps', None, 'FIRST:LAST: trace these steps with the profiler.')

# What the loop knows beside the state, before the first step. It is saved with every checkpoint, as it is before that
# step's evaluation.
FRESH = {
    'best': None,          # the best metric of an evaluation
    'without_better': 0,   # evaluations since then
    'stopped': False,      # whether patience has ended
    'skipped': 0,          # steps left out since their loss or gradient was not finite
    'sums': None,          # of the steps since the last line of the log
    'seconds': 0.0,        # that these took
}

log = logging.getLogger('allyouneed.train')


def main() -> None:
    if PRINT_CONFIG.value:
        return print_config(config_from(CONFIG_FLAG))
    config = config_from(CONFIG_FLAG, data_problems)
    connect(COORDINATOR.value, PROCESSES.value, PROCESS.value)
    asked = flags.FLAGS['config'].override_values
    with StopSignals() as stop, RunDirectory(WORKDIR.value, config, writes=is_leader(), asked=asked) as directory:
        run(config, directory, stop, ProfilerWindow(PROFILE.value, directory.path, config.train.steps))


def run(config: ConfigDict, directory: RunDirectory, stop: StopSignals, profiler: ProfilerWindow) -> None:
    """Data, model, state: the newest checkpoint's or a fresh one; then the loop."""
    workdir = directory.path
    use_compilation_cache(cache_folder(config.cache_dir))

    with leader_first('data'):
        data = open_data(config, workdir if directory.resumed else None)
        directory.check_data(data)
        plan, validation = data.plan('train'), data.plan('validation')
    try:
        check_fits(config.model, data.sizes)
    except ValueError as error:
        raise UserError(f'config.{error}') from None
    module = build_model(config.model, **data.sizes)
    schedule = make_schedule(config.optimizer, d_model=config.model.d_model, steps=config.train.steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    compiled = Compiled(module, optimizer, plan.batch(0), parallel=config.parallel,
                        objective=make_objective(config),
                        dropout_key=key_for('dropout', config.seed), accumulate=config.train.accumulate)
    model = make_answerer(config, module, None, data.tokenizers, data.sizes)  # it has parameters while it is measured
    model.distribute = compiled.spread  # its searches use all devices too
    log.info('model: %s\n%s', config.model.kind, parameter_table(compiled.shapes.params))
    log.info('batches: %s', plan.describe())
    log.info('devices: %s', compiled.describe())
    flops = compiled.flops(plan.batch(0))
    log.info('training: %s steps, %.3g epochs; %.3g GFLOP of matrix products a step, so perhaps %s',
             f'{config.train.steps:,}', config.train.steps / len(plan), flops / 1e9,
             duration(config.train.steps * seconds_a_step(flops, config.model.dtype)))

    directory.claim(config, data)
    with open_checkpoints(workdir, metric=config.eval.metric, keep_last=config.checkpoint.keep_last,
                          keep_best=config.checkpoint.keep_best) as checkpoints:
        state, progress = checkpoints.restore(compiled.shapes) or (compiled.init(config.seed), FRESH)
        if directory.resumed and not state.step:
            log.warning('%s holds a run that has saved no checkpoint: it begins again, at step 0', workdir)
        if state.step:
            log.info('resuming from step %d', state.step)

        def measure(state: TrainState) -> tuple[Evaluation, Figure | None]:
            batches = prefetch(validation, 0, len(validation), compiled.part)
            try:
                model.params = compiled.gather(state.params)
                sums = evaluate(compiled.eval, model.params, batches)
                found = model.validate(data, sums, config)
            finally:
                model.params = None  # on many devices, a whole copy on each
            measured = sums.means() | found.metrics
            figure = answer_figure(model, found.answer, weights=found.weights) if found.weights else None
            return found._replace(metrics={EVALUATED + name: value for name, value in measured.items()}), figure

        train(config, workdir, state, progress, compiled, plan, schedule, measure, checkpoints, stop, profiler)


def train(config: ConfigDict, workdir: Path, state: TrainState, progress: dict, compiled: Compiled, plan: Plan,
          schedule: Callable[[int], float], measure: Callable[[TrainState], tuple[Evaluation, Figure | None]],
          checkpoints: Checkpoints, stop: StopSignals, profiler: ProfilerWindow) -> None:
    """The loop: step, log, save, evaluate, until the last step or until patience ends."""
    first, last = int(state.step), config.train.steps
    metrics = MetricsWriter(workdir, first) if is_leader() else NoMetrics()

    def is_evaluated(step: int) -> bool:
        return step % config.eval.every == 0 or step == last

    def evaluated(step: int, progress: dict) -> dict:
        """The progress after an evaluation. The step is saved by then, so this may be left and done again."""
        try:
            with stop.nothing_to_lose(f'in the evaluation of step {step}, which is saved'):
                evaluation, figure = measure(state)
        except SystemExit:
            checkpoints.wait()
            raise
        measured = evaluation.metrics
        checkpoints.wait()  # what is told of an evaluation says that its step is saved
        metrics.write(step, measured | memory() | {'compile_seconds': compile_time.seconds})
        metrics.show(step, evaluation.samples, figure)
        if evaluation.samples:
            log.info('%s', evaluation.samples)
        log.info('step %d: %s; memory %s; compiled for %.1f s in all', step,
                 ', '.join(f'{name} {value:.4g}' for name, value in measured.items()),
                 ', '.join(f'{name} {value:.2f}' for name, value in memory().items()), compile_time.seconds)
        checkpoints.values[step] = measured[EVALUATED + config.eval.metric]
        return judged(progress, checkpoints.values[step], config.eval)

    with stop.at_a_step(), contextlib.closing(metrics), contextlib.closing(profiler):
        if first in checkpoints.values:
            progress = judged(progress, checkpoints.values[first], config.eval)
        elif first and is_evaluated(first):
            progress = evaluated(first, progress)
        if first >= last or progress['stopped']:
            log.info('this run is finished, at step %d', first)
            return

        shapes, pending = set(), []
        total = Sums(**jax.tree.map(np.float32, progress['sums'])) if progress['sums'] else None
        seconds, began = progress['seconds'], time.perf_counter()
        saved = time.monotonic()
        bar = tqdm(total=last, initial=first, unit='step', file=sys.stderr, dynamic_ncols=True,
                   disable=not is_leader(), mininterval=0.2 if sys.stderr.isatty() else 30)
        with bar, logging_redirect_tqdm([logging.getLogger('allyouneed')]):
            for step, batch in enumerate(prefetch(plan, first, last, compiled.part), first + 1):
                profiler.before(step)
                compiled_before = compile_time.seconds
                state, sums = compiled.train(state, batch)
                if (shape := batch['targets'].shape) not in shapes:
                    shapes.add(shape)
                    log.info('compilation %d: batches of %s, %.1f s', len(shapes), ' x '.join(map(str, shape)),
                             compile_time.seconds - compiled_before)
                pending.append(sums)
                if len(pending) > 1:  # waits for that step: stay one ahead of the device, not a thousand
                    progress = counted(progress, step - 1, pending[-2], config, workdir)
                profiler.after(step, sums)
                bar.update()

                logging_now, evaluating = step % config.train.log_every == 0 or step == last, is_evaluated(step)
                minutes = (time.monotonic() - saved) / 60
                due = anywhere(0 < config.checkpoint.every_minutes <= minutes, step)
                stopping = anywhere(stop.requested, step)
                saving = evaluating or stopping or due or step % config.checkpoint.every == 0
                if logging_now or saving:
                    progress = counted(progress, step, sums, config, workdir)
                    total, pending = added(total, pending), []
                    seconds, began = seconds + time.perf_counter() - began, time.perf_counter()
                if logging_now:
                    means = total.means('train_') if total.tokens else {}  # nothing: every step was left out
                    metrics.write(step, means | {
                        'learning_rate': float(schedule(step - 1)), 'tokens_per_second': float(total.tokens) / seconds,
                        'epoch': step / len(plan), 'skipped_steps': progress['skipped']})
                    bar.set_postfix(loss=f'{means.get("train_loss", np.nan):.3f}',
                                    tokens_per_s=f'{float(total.tokens) / seconds:,.0f}')
                    total, seconds = None, 0.0
                    checkpoints.check()
                if saving:
                    sums_so_far = dataclasses.asdict(jax.tree.map(float, total)) if total else None
                    checkpoints.save(step, state, progress | {'sums': sums_so_far, 'seconds': seconds})
                    saved = time.monotonic()
                    if stopping:
                        checkpoints.wait()
                        stop.leave(f'at step {step}, which is saved')
                    if evaluating:
                        progress = evaluated(step, progress)
                    began = time.perf_counter()
                if progress['stopped']:
                    log.info('stopped at step %d: validation_%s has not been better for %d evaluations',
                             step, config.eval.metric, config.eval.patience)
                    break
    log.info('%d compilations of the train step; %.1f s of compiling in all; peak memory %.2f GB', len(shapes),
             compile_time.seconds, peak_resident() / 2 ** 30)


def judged(progress: dict, value: float, evaluation: ConfigDict) -> dict:
    """The loop's progress after an evaluation that gave `value`: the best so far, and whether patience has ended."""
    best = progress['best']
    better = best is None or goodness(evaluation.metric, value) > goodness(evaluation.metric, best)
    without_better = 0 if better else progress['without_better'] + 1
    return progress | {'best': value if better else best, 'without_better': without_better,
                       'stopped': 0 < evaluation.patience <= without_better}


def print_config(config: ConfigDict) -> None:
    """stdout: every option as the flag that sets it, to be copied; stderr: which are not the defaults."""
    options = flatten(config)
    changed = [f'{option}={value}' for option, value in options.items() if value != DEFAULTS[option]]
    print('\n'.join(shlex.quote(f'--config.{option}={options[option]}') for option in options))
    log.info('\n%d of %d options are not the defaults of configs/options.py: %s',
             len(changed), len(options), ', '.join(changed))


def counted(progress: dict, step: int, sums: Sums, config: ConfigDict, workdir: Path) -> dict:
    """The progress after `step`, whose update was left out if its loss or gradient was not finite.

    Raises:
      UserError: if there are more such steps than config.train.skip_nonfinite.
    """
    if not int(sums.skipped):
        return progress
    skipped, allowed = progress['skipped'] + 1, config.train.skip_nonfinite
    look = f'python -m tools.show_batch --workdir={shlex.quote(str(workdir))} --step={step - 1}'
    if skipped > allowed:
        raise UserError(f'step {step}: the loss or the gradient is not finite'
                        + (f', after {allowed} that were left out' if allowed else '')
                        + f'. To see its batch:\n  {look}\nThe checkpoints are from before. Where the data is sound, '
                        'try a lower learning rate or optimizer.clip, in another --workdir; to leave out up to K such '
                        f'steps here, give --config.train.skip_nonfinite=K (now {allowed})')
    log.warning('step %d is left out (%d of at most %d): the loss or the gradient is not finite. Its batch: %s',
                step, skipped, allowed, look)
    return progress | {'skipped': skipped}


def added(total: Sums | None, new: list[Sums]) -> Sums:
    """The sums so far and those of further steps, one after the other: in the same order after a resume, too."""
    parts = [sums.replace(skipped=None) for sums in jax.device_get(new)]
    return functools.reduce(lambda one, other: jax.tree.map(np.add, one, other), [total, *parts] if total else parts)


if __name__ == '__main__':
    run_script(main)
