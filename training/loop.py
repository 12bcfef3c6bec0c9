"""The training loop: `train.py` calls `run` with what it read from the command line, a notebook calls `train`.

    import inference
    from configs import demo

    config = demo.get_config()
    config.model.num_layers = 3
    run = inference.train(config, 'runs/demo')

`run` makes the parts, `train_steps` is the loop.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import optax
from ml_collections import ConfigDict
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from configs.checks import config_problems
from inference.run import Answerer, Run, load, make_answerer, trained_under_edits
from inference.scores import Evaluation
from inference.text import SearchModel
from input_pipeline.batches import Batch, Plan, prefetch
from input_pipeline.data import open_data
from input_pipeline.problems import data_problems
from input_pipeline.tokenizer import PAD
from model.build import build_model, check_fits
from model.evaluation import Objective, evaluate
from model.losses import Sums
from run_directory.checkpoints import Checkpoints, open_checkpoints, parameters_to_use
from run_directory.initial import begin_from
from run_directory.progress import Progress, due_at
from run_directory.records import EVALUATED
from run_directory.trained import vocabulary_from
from run_directory.workdir import RunDirectory, check_same_inputs
from runtime.agreement import Greatest, from_leader, is_leader
from runtime.cache import cache_folder, use_compilation_cache
from runtime.errors import UserError
from runtime.preemption import STOPPED, StopSignals
from runtime.processes import ending_together, leader_first
from runtime.resources import compile_time, memory, peak_resident
from training.compiled import Compiled
from training.curve import LiveCurve, in_notebook, log_shown
from training.metrics import Metrics, open_metrics
from training.objective import make_objective
from training.optimizer import make_optimizer, make_schedule
from training.profiling import ProfilerWindow
from training.step import TrainState, key_for
from training.summary import duration, parameter_table, seconds_a_step
from training.tuning import make_tuning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger('allyouneed.train')


def train(config: ConfigDict, workdir: str | Path, *, draw: 'Callable[..., Figure] | None' = None) -> Run:
    """Trains as train.py does, or goes on where the run in `workdir` stopped, and returns the run, opened.

    In a notebook a curve of the losses and of the metric is drawn while the training lasts, and the log is printed if
    the notebook has not set up logging. Interrupting the kernel saves a checkpoint and raises KeyboardInterrupt: the
    same call goes on from there. All JAX devices of this process take part, as config.parallel says.

    Args:
      config: of a recipe's `get_config()`, with the changes that are wanted. It is not changed.
      workdir: the run directory: created, or resumed if it holds this config.
      draw: the picture of an evaluation's example, for TensorBoard: `analysis.pictures.answer_figure`.

    Raises:
      UserError: as train.py, whose message would be the same: values that are impossible, data that is missing, a
        directory that is in use.
      KeyboardInterrupt: if a signal stopped the training; all that was trained is saved.
    """
    if not isinstance(config, ConfigDict):
        raise UserError(f'config={config!r} must be a ConfigDict, such as configs.demo.get_config() returns')
    config = config.copy_and_resolve_references()
    problems = config_problems(config)
    problems += data_problems(config, problems)
    if problems:
        raise UserError('\n'.join(problems))
    notebook = in_notebook()
    with (log_shown() if notebook else contextlib.nullcontext(),
          StopSignals(exits=False) as stop, RunDirectory(os.fspath(workdir), config) as directory):
        try:
            run(config, directory, stop, ProfilerWindow(None, directory.path, config.train.steps), draw,
                [LiveCurve(directory.path, config.eval.metric)] if notebook else [])
        except SystemExit as stopped:
            if stopped.code != STOPPED:
                raise
            raise KeyboardInterrupt('stopped, and saved; the same call goes on') from None
    return load(workdir)


class Setup(NamedTuple):
    """The constant parts of a training.

    Attributes:
      config: the resolved config.
      directory: the run directory.
      data: the data of the config, of the class that the task's answerer needs.
      plan: the training batches.
      validation: the validation batches.
      model: the answerer; it has parameters only during an evaluation.
      schedule: the learning rate as a function of the number of steps made.
      objective: what training minimises.
      compiled: the mesh, and the steps compiled for it.
      draw: the picture of an example, of the model, its answer and its attention weights; None: no pictures.
    """
    config: ConfigDict
    directory: RunDirectory
    data: Any
    plan: Plan
    validation: Plan
    model: Answerer
    schedule: optax.Schedule
    objective: Objective
    compiled: Compiled
    draw: 'Callable[..., Figure] | None'


def run(config: ConfigDict, directory: RunDirectory, stop: StopSignals, profiler: ProfilerWindow,
        draw: 'Callable[..., Figure] | None' = None, watching: Sequence[Metrics] = ()) -> None:
    """Builds the parts of the training, restores the newest checkpoint or makes a fresh state, and trains.

    `draw` makes the pictures of evaluations (`Setup`); `watching` are told the metrics besides the files of the run.
    """
    use_compilation_cache(cache_folder(config.cache_dir))
    setup = build(config, directory, draw)
    describe(setup)
    with open_checkpoints(directory.path, metric=config.eval.metric, keep_last=config.checkpoint.keep_last,
                          keep_best=config.checkpoint.keep_best) as checkpoints, ending_together():
        restored = checkpoints.restore(setup.compiled.shapes)
        state, known = restored or (first_state(setup), {})
        checkpoints.compare(state)
        directory.claim(config, setup.data, setup.objective)
        if directory.resumed and not restored:
            log.warning('%s holds a run that has saved no checkpoint: it begins again, at step 0', directory.path)
        if state.step:
            log.info('resuming from step %d', state.step)
        with (stop.at_a_step(), contextlib.closing(profiler),
              open_metrics(config, directory.path, int(state.step), watching) as metrics):
            train_steps(setup, state, Progress(**known), checkpoints, stop, profiler, metrics)


def first_state(setup: Setup) -> TrainState:
    """Returns the state of step 0. With config.train.init_from its parameters are those of another run."""
    config, compiled = setup.config, setup.compiled
    return compiled.init(config.seed,
                         begin_from(config, setup.data, compiled.boxed) if config.train.init_from else {})


def build(config: ConfigDict, directory: RunDirectory, draw: 'Callable[..., Figure] | None' = None) -> Setup:
    """Builds data, model and compiled steps from the config.

    A resumed run has its tokenizers in the directory; a new one takes over those of its teacher, or of the run that it
    begins from.
    """
    with leader_first('data'):
        vocabulary = directory.path if directory.resumed else vocabulary_from(config)
        data = open_data(config, vocabulary, asked=directory.asked)
        directory.check_data(data)
    check_same_inputs(config, data)
    plan, validation = data.plan('train'), data.plan('validation')  # all processes tokenise a large text together
    try:
        check_fits(config.model, data.sizes)
    except ValueError as error:
        raise UserError(f'config.{error}') from None
    module = trained_under_edits(config, build_model(config.model, **data.sizes, pad=PAD), data.tokenizers, data.sizes)
    schedule = make_schedule(config.optimizer, d_model=config.model.d_model, steps=config.train.steps)
    objective = make_objective(config, data)
    directory.check_objective(objective)
    tuning = make_tuning(config.train)
    compiled = Compiled(module, make_optimizer(config.optimizer, schedule, tuning), plan.batch(0),
                        parallel=config.parallel, objective=objective, dropout_key=key_for('dropout', config.seed),
                        accumulate=config.train.accumulate, precision=config.train.matmul_precision, tuning=tuning)
    model = make_answerer(config, module, {}, data.tokenizers, data.sizes)
    return Setup(config, directory, data, plan, validation, model, schedule, objective, compiled, draw)


def describe(setup: Setup) -> None:
    """Logs the model, the batches, the devices, and an estimate of the time."""
    config, plan, compiled = setup.config, setup.plan, setup.compiled
    log.info('model: %s\n%s', config.model.kind, parameter_table(compiled.shapes.params))
    if tuned := make_tuning(config.train).describe(compiled.shapes.params):
        log.info('%s', tuned)
    log.info('batches: %s', plan.describe())
    log.info('devices: %s', compiled.describe())
    flops = compiled.flops(plan.batch(0))
    factors = 'bfloat16' if config.train.matmul_precision == 'bfloat16' else config.model.dtype  # of the products
    log.info('training: %s steps, %.3g epochs; %.3g GFLOP of matrix products a step, so perhaps %s',
             f'{config.train.steps:,}', config.train.steps / len(plan), flops / 1e9,
             duration(config.train.steps * seconds_a_step(flops, factors)))


def train_steps(setup: Setup, state: TrainState, progress: Progress, checkpoints: Checkpoints, stop: StopSignals,
                profiler: ProfilerWindow, metrics: Metrics) -> None:
    """The training loop: step, log, save, evaluate, until the last step or until patience runs out."""
    config, first, last = setup.config, int(state.step), setup.config.train.steps
    # An earlier start may have saved this step and stopped before or after its evaluation.
    if first in checkpoints.values:
        progress = judge(progress, checkpoints.values[first], config)
    elif first and due_at(first, config).evaluate:
        progress = judge(progress, evaluate_saved(setup, first, state, checkpoints, metrics, stop), config)
    if first >= last or progress.stopped:
        log.info('this run is finished, at step %d', first)
        return

    pending, shapes, greatest = [], set(), Greatest()
    began, saved = time.perf_counter(), time.monotonic()
    with show_bar(first, last) as bar:
        for step, batch in enumerate(prefetch(setup.plan, first, last, setup.compiled.part), first + 1):
            profiler.before(step)
            state, sums = make_step(setup.compiled, state, batch, shapes)
            pending.append(sums)
            if len(pending) > 1:  # wait for the previous step: stay one step ahead of the device, not a thousand
                progress = count_skipped(progress, step - 1, pending[-2], setup)
            profiler.after(step, sums)
            bar.update()
            minutes, requested = greatest((time.monotonic() - saved) / 60, float(stop.requested))
            due = due_at(step, config, minutes=minutes, stop_requested=bool(requested))
            if due.log or due.save:
                setup.directory.check_lease()
                progress = count_skipped(progress, step, sums, setup)
                progress = add_up(progress, pending, time.perf_counter() - began)
                pending, began = [], time.perf_counter()
            if due.log:
                log_step(setup, step, progress, metrics, bar)
                progress = progress.clear_sums()
                checkpoints.check()
            if due.save:
                checkpoints.save(step, state, progress.to_dict())
                saved = time.monotonic()
                greatest.forget()  # the time since the previous checkpoint
            if due.stop:
                checkpoints.wait()
                stop.leave(f'at step {step}, which is saved')
            if due.evaluate:
                progress = judge(progress, evaluate_saved(setup, step, state, checkpoints, metrics, stop), config)
            if due.save:
                began = time.perf_counter()  # saving and evaluating are not timed
            if progress.stopped:
                log.info('stopped at step %d: validation_%s has not been better for %d evaluations',
                         step, config.eval.metric, config.eval.patience)
                break
    log.info('compilations of the train step: %d; %.1f s of compiling in all; peak memory %.2f GB', len(shapes),
             compile_time.seconds, peak_resident() / 2 ** 30)


@contextlib.contextmanager
def show_bar(first: int, last: int) -> Iterator[tqdm]:
    """Shows a progress bar on stderr, with the log above it."""
    bar = tqdm(total=last, initial=first, unit='step', file=sys.stderr, dynamic_ncols=True, disable=not is_leader(),
               mininterval=0.2 if sys.stderr.isatty() or in_notebook() else 30)
    with bar, logging_redirect_tqdm([logging.getLogger('allyouneed')]):
        yield bar


def make_step(compiled: Compiled, state: TrainState, batch: Batch,
              shapes: set[tuple[int, ...]]) -> tuple[TrainState, Sums]:
    """Makes one train step. Adds the batch's shape to `shapes`; if it is new, logs the compile time."""
    compiled_before = compile_time.seconds
    state, sums = compiled.train(state, batch)
    if (shape := batch['targets'].shape) not in shapes:
        shapes.add(shape)
        log.info('compilation %d: batches of %s, %.1f s', len(shapes), ' x '.join(map(str, shape)),
                 compile_time.seconds - compiled_before)
    return state, sums


def count_skipped(progress: Progress, step: int, sums: Sums, setup: Setup) -> Progress:
    """Returns the progress after `step`, whose update was skipped if its loss or gradient was not finite.

    Raises:
      UserError: if there are more such steps than config.train.skip_nonfinite.
    """
    if not int(sums.skipped):
        return progress
    skipped, allowed = progress.skipped + 1, setup.config.train.skip_nonfinite
    look = f'python -m tools.show_batch --workdir={shlex.quote(str(setup.directory.path))} --step={step - 1}'
    if skipped > allowed:
        raise UserError(f'step {step}: the loss or the gradient is not finite'
                        + (f', after {allowed} that were left out' if allowed else '')
                        + f'. To see its batch:\n  {look}\nThe checkpoints are from before. Where the data is sound, '
                        'try a lower learning rate or optimizer.clip, in another --workdir; to leave out up to K such '
                        f'steps here, give --config.train.skip_nonfinite=K (now {allowed})')
    log.warning('step %d is left out (%d of at most %d): the loss or the gradient is not finite. Its batch: %s',
                step, skipped, allowed, look)
    return dataclasses.replace(progress, skipped=skipped)


def add_up(progress: Progress, pending: Sequence[Sums], seconds: float) -> Progress:
    """Adds the sums of the `pending` steps, and their duration in seconds, to the progress.

    The sums are added one by one in float32, so the order is the same whether or not the run was interrupted.
    """
    parts = [sums.replace(skipped=None) for sums in jax.device_get(pending)]
    if progress.sums:
        parts.insert(0, Sums(**jax.tree.map(np.float32, progress.sums)))
    total = functools.reduce(lambda one, other: jax.tree.map(np.add, one, other), parts)
    return dataclasses.replace(progress, sums=dataclasses.asdict(jax.tree.map(float, total)),
                               seconds=progress.seconds + seconds)


def log_step(setup: Setup, step: int, progress: Progress, metrics: Metrics, bar: tqdm) -> None:
    """Writes the means over the steps since the last line of the log, learning rate, speed, epoch and skipped steps."""
    assert progress.sums is not None, 'sums are added up before they are told'
    total = Sums(**progress.sums)
    means = total.means('train_') if total.tokens else {}  # empty if every step was skipped
    speed = total.tokens / progress.seconds
    rate = float(np.asarray(setup.schedule(step - 1)))
    metrics.write(step, means | {'learning_rate': rate, 'tokens_per_second': speed, 'epoch': step / len(setup.plan),
                                 'skipped_steps': progress.skipped})
    bar.set_postfix(loss=f'{means.get("train_loss", np.nan):.3f}', tokens_per_s=f'{speed:,.0f}')


def evaluate_saved(setup: Setup, step: int, state: TrainState, checkpoints: Checkpoints,
                   metrics: Metrics, stop: StopSignals) -> float:
    """Evaluates `step`, which has a checkpoint, reports the result, and returns config.eval.metric.

    A signal ends the evaluation: the checkpoint exists, and the next start evaluates the step again.
    """
    try:
        with stop.nothing_to_lose(f'in the evaluation of step {step}, which is saved') as before_batch:
            found = measure(setup, state, before_batch)
            figure = setup.draw(setup.model, found.answer, weights=found.weights) if (
                setup.draw and found.weights) else None
    except SystemExit:
        checkpoints.wait()
        raise
    checkpoints.wait()  # a reported evaluation implies that its step is saved
    metrics.write(step, found.metrics | memory() | {'compile_seconds': compile_time.seconds})
    metrics.show(step, found.samples, figure)
    if found.samples:
        log.info('%s', found.samples)
    log.info('step %d: %s; memory %s; compiled for %.1f s in all', step,
             ', '.join(f'{name} {value:.4g}' for name, value in found.metrics.items()),
             ', '.join(f'{name} {value:.2f}' for name, value in memory().items()), compile_time.seconds)
    checkpoints.values[step] = from_leader(
        'the evaluation', lambda: found.metrics[EVALUATED + setup.config.eval.metric])
    return checkpoints.values[step]


def measure(setup: Setup, state: TrainState, before_batch: Callable[[], None]) -> Evaluation:
    """Evaluates the model on the validation split. The names of the metrics begin with 'validation_'.

    `before_batch` is called before each batch, also before those of a search.
    """
    compiled, model, validation = setup.compiled, setup.model, setup.validation

    def eval_batch(params, batch):
        before_batch()
        return compiled.eval(params, batch)

    def distribute(arrays):
        before_batch()
        return compiled.distribute(arrays)

    if isinstance(model, SearchModel):
        model.distribute = distribute  # its searches use all devices too
    try:
        model.params = compiled.gather(parameters_to_use(state.params, state.opt_state))
        sums = evaluate(eval_batch, model.params, prefetch(validation, 0, len(validation), compiled.part))
        found = model.validate(setup.data, sums, setup.config)
    finally:
        model.params = {}  # on many devices, each has a whole copy
    measured = sums.means() | found.metrics
    return found._replace(metrics={EVALUATED + name: value for name, value in measured.items()})


def judge(progress: Progress, value: float, config: ConfigDict) -> Progress:
    """Returns the progress after an evaluation with the metric `value`."""
    return progress.judge(value, metric=config.eval.metric, patience=config.eval.patience)
