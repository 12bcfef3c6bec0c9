"""The training loop. `train.py` calls `run`, and notebooks call `train`:

    import allyouneed
    from configs import demo

    config = demo.get_config()
    config.model.num_layers = 3
    run = allyouneed.train(config, 'runs/demo')

`run` builds the parts of the training, and calls `train_steps`, which is the loop.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from configs.checks import config_problems, new_run_problems
from configs.options import plain
from configs.tasks import TASKS
from inference.inspection import Answerer, list_places
from inference.run import Run, check_places, load, make_answerer, tracked_places, trained_under_edits
from inference.scores import Evaluation
from inference.text import SearchModel
from input_pipeline.batches import Batch, Plan, prefetch
from input_pipeline.data import open_data
from input_pipeline.problems import data_problems
from input_pipeline.tokenizer import PAD
from model.build import build_model, check_fits
from model.evaluation import Objective, evaluate
from model.losses import Sums
from run_directory.checkpoints import Checkpoints, checkpoint_options, open_checkpoints, parameters_to_use
from run_directory.initial import read_initial
from run_directory.progress import Progress, due_at
from run_directory.records import CONFIG, EVALUATED, finished_at, finished_message
from run_directory.trained import vocabulary_from
from run_directory.workdir import RunDirectory, check_same_inputs
from runtime.agreement import Greatest, from_leader
from runtime.cache import cache_folder, use_compilation_cache
from runtime.errors import AgreedError, UserError
from runtime.files import expanded
from runtime.memory import peak_resident
from runtime.once import log_once, warn_once
from runtime.preemption import StopSignals
from runtime.processes import ending_together, leader_first
from runtime.resources import compile_time, memory
from runtime.stopping import STOPPED
from training.compiled import Compiled
from training.curve import LiveCurve, in_notebook, log_shown
from training.mesh import check_kernel
from training.metrics import Metrics, open_metrics
from training.objective import make_objective
from training.optimizer import make_optimizer, make_schedule
from training.place_statistics import separated
from training.precision import resolve_precision
from training.profiling import ProfilerWindow
from training.remaining import ProgressBar, RemainingTime, show_bar
from training.step import TrainState, key_for
from training.summary import parameter_table
from training.trackers import check_trackers
from training.tuning import make_tuning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger('allyouneed.train')


@log_shown()
def train(config: ConfigDict, workdir: str | Path, *, draw: 'Callable[..., Figure] | None' = None) -> Run:
    """Trains a model as train.py does, or resumes the training in `workdir`. Returns the trained run, ready for use.

    In a notebook, this function draws the losses and the metric during training. It also prints the log, unless the
    notebook has set up logging at the level INFO. Interrupting the kernel saves a checkpoint and raises
    KeyboardInterrupt. The same call then resumes the training. config.parallel describes how the JAX devices of this
    process are used.

    Args:
      config: the result of a recipe's `get_config()`, possibly with changes. This function does not modify the config.
      workdir: the run directory. It may be new. If it contains a run with this config, the run is resumed.
      draw: a function that draws one example of each evaluation for TensorBoard, such as
        `analysis.pictures.answer_figure`. By default, nothing is drawn.

    Raises:
      UserError: if a value is not allowed, data is missing, or the directory is in use. train.py reports the same
        errors with the same messages.
      KeyboardInterrupt: if a signal stopped the training. No completed step is lost.
    """
    if not isinstance(config, ConfigDict):
        raise UserError(f'config={config!r} must be a ConfigDict. Use the config of a recipe, such as '
                        'configs.demo.get_config()')
    log_once.cache_clear()  # an earlier training in this process may have logged the same messages about the data
    warn_once.cache_clear()
    config = plain(config)
    problems = config_problems(config)
    if not problems and not (expanded(workdir) / CONFIG).exists():
        problems = new_run_problems(config, ())
    if problems or finished_at(expanded(workdir), config) is None:
        problems += data_problems(config, problems)
    if problems:
        raise UserError('\n'.join(problems))
    check_places(config)
    try:
        with StopSignals(exits=False) as stop, RunDirectory(os.fspath(workdir), config) as directory:
            run(config, directory, stop, ProfilerWindow(None, directory.path, config.train.steps), draw,
                [LiveCurve(directory.path, config.eval.metric)] if in_notebook() else [])
            path = directory.path
    except SystemExit as stopped:
        if stopped.code != STOPPED:
            raise
        path = None
    if path is None:  # raised here, because a notebook keeps this exception, and the SystemExit keeps the train state
        raise KeyboardInterrupt('stopped and saved. The same call resumes the training')
    return load(path)


class TrainingParts(NamedTuple):
    """The parts of a training that do not change from step to step.

    Attributes:
      config: the resolved config.
      directory: the run directory.
      data: the data that the config describes. The class of this object depends on the task.
      plan: the training batches.
      validation: the validation batches.
      model: the model with the search that produces its outputs. This object has parameters only during an evaluation.
      schedule: the learning rate as a function of the number of steps made.
      objective: the function that training minimises.
      compiled: the mesh of devices, and the programs that are compiled for this mesh.
      draw: a function that draws a picture from the model, an answer and the attention weights of the answer. None if
        no pictures are drawn.
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
        draw: 'Callable[..., Figure] | None' = None, writers: Sequence[Metrics] = ()) -> None:
    """Builds the parts of a training, restores the newest checkpoint or makes a fresh state, and trains the model.

    `draw` is described in `TrainingParts`. `writers` receive the metrics, which are also written to the files of the
    run.
    """
    if directory.finished_at is not None:
        return directory.report_finished(config)
    from_leader('the trackers', lambda: check_trackers(config))
    use_compilation_cache(cache_folder(config.cache_dir))
    parts = build(config, directory, draw)
    describe(parts)
    with open_checkpoints(directory.path, **checkpoint_options(config)) as checkpoints, ending_together():
        restored = checkpoints.restore(parts.compiled.shapes)
        state, progress = restored or (first_state(parts), {})
        checkpoints.compare(state)
        directory.claim(config, parts.data, parts.objective)
        if directory.resumed and not restored:
            log.warning('the run in %s has no checkpoint. It starts again at step 0', directory.path)
        if state.step:
            log.info('resuming from step %d', state.step)
            profiler.check_resumed(int(state.step))
        with (stop.at_a_step(), contextlib.closing(profiler),
              open_metrics(config, directory.path, int(state.step), writers) as metrics):
            train_steps(parts, state, Progress(**progress), checkpoints, stop, profiler, metrics)


def build(config: ConfigDict, directory: RunDirectory, draw: 'Callable[..., Figure] | None' = None) -> TrainingParts:
    """Builds the parts of a training from the config: data, model, objective and compiled steps.

    A resumed run reads the tokenizers in its directory. A new run learns tokenizers or uses the tokenizers of another
    run (`vocabulary_from`).

    Raises:
      UserError: if the data, the teacher or the edits of the config cannot be used, if they differ from the data or the
        teacher of the resumed run, or if the options do not fit the data or the devices.
    """
    with leader_first('data'):
        vocabulary = directory.path if directory.resumed else vocabulary_from(config, directory.asked)
        data = open_data(config, vocabulary, asked=directory.asked)
        directory.check_data(data)
    check_same_inputs(config, data)
    plan, validation = data.plan('train'), data.plan('validation')  # all processes tokenise a large text together
    resolve_precision(config, max(array.size for array in jax.tree.leaves(plan.batch(0)['inputs'])))
    try:
        check_fits(config.model, data.sizes)
    except ValueError as error:
        raise UserError(f'config.{error}') from None
    module = trained_under_edits(config, build_model(config.model, **data.sizes, pad=PAD), data.tokenizers, data.sizes)
    schedule = make_schedule(config.optimizer, d_model=config.model.d_model, steps=config.train.steps)
    objective = make_objective(config, data)
    directory.check_objective(objective)
    tuning = make_tuning(config.train)
    model = make_answerer(config, module, {}, data.tokenizers, data.sizes)
    compiled = Compiled(module, make_optimizer(config.optimizer, schedule, tuning), plan.batch(0),
                        parallel=config.parallel, objective=objective, dropout_key=key_for('dropout', config.seed),
                        accumulate=config.train.accumulate, precision=config.train.matmul_precision, tuning=tuning,
                        places=tracked_places(config, list_places(model)) if config.track.places else ())
    check_kernel(config.model, compiled.mesh)
    return TrainingParts(config, directory, data, plan, validation, model, schedule, objective, compiled, draw)


def describe(parts: TrainingParts) -> None:
    """Logs the model, the batches, the devices and the number of steps."""
    config, plan, compiled = parts.config, parts.plan, parts.compiled
    log.info('model: %s\n%s', config.model.kind, parameter_table(compiled.shapes.params))
    if tuned := make_tuning(config.train).describe(compiled.shapes.params):
        log.info('%s', tuned)
    log.info('batches: %s', plan.describe())
    log.info('devices: %s', compiled.describe())
    log.info('training: %s steps, %.3g epochs', f'{config.train.steps:,}', config.train.steps / len(plan))


def first_state(parts: TrainingParts) -> TrainState:
    """Returns the train state at step 0. If config.train.init_from is set, the parameters come from another run.

    Raises:
      UserError: if the other run cannot be used, or a matrix with random values would not be trained.
    """
    config, compiled = parts.config, parts.compiled
    initial = read_initial(config, parts.data, compiled.boxed) if config.train.init_from else {}
    make_tuning(config.train).check_initial(compiled.boxed, initial)
    return compiled.init(config.seed, initial)


def train_steps(parts: TrainingParts, state: TrainState, progress: Progress, checkpoints: Checkpoints,
                stop: StopSignals, profiler: ProfilerWindow, metrics: Metrics) -> None:
    """Runs the training loop until the last step, or until config.eval.patience ends the training.

    Each iteration makes a step. After some steps, the loop logs metrics, saves a checkpoint or evaluates the model.
    """
    config, first, last = parts.config, int(state.step), parts.config.train.steps
    # The previous process may have saved this step, and stopped before or after the evaluation of the step.
    if first in checkpoints.values:
        progress = judge(progress, checkpoints.values[first], config)
    elif first and (first >= last or due_at(first, config).evaluate):
        progress = judge(progress, evaluate_saved(parts, first, state, checkpoints, metrics, stop), config)
        # This step was not logged as the last step, because config.train.steps was lowered or config.eval.patience was
        # 0.
        if progress.sums and (first >= last or progress.stopped):
            with show_bar(first, last) as bar:
                log_step(parts, first, progress, metrics, bar, with_rate=first < last)
    if first >= last or progress.stopped:
        log.info('%s', finished_message(first, config))
        return

    pending, shapes, greatest, remaining = [], set(), Greatest(), RemainingTime(config)
    began, saved, just_saved = time.perf_counter(), time.monotonic(), False
    with show_bar(first, last) as bar:
        for step, batch in enumerate(prefetch(parts.plan, first, last, parts.compiled.part), first + 1):
            profiler.before(step)
            compilations = len(shapes)
            state, sums = make_step(parts.compiled, state, batch, shapes)
            pending.append(sums)
            if len(pending) > 1:  # waits for the previous step, so that the host is only one step ahead of the devices
                progress = count_skipped(progress, step - 1, pending[-2], parts)
            if len(shapes) > compilations:
                remaining.restart()  # leaves out the compilation, and the previous step, which ran at the same time
            elif len(pending) > 1:
                remaining.step_done()
            profiler.after(step, sums)
            bar.show_step(remaining.seconds_after(step))
            minutes, requested = greatest((time.monotonic() - saved) / 60, float(stop.requested))
            # With several processes, `minutes` and `requested` are the values of the previous step. If the previous
            # step was saved, `minutes` is ignored, but a request to stop is not.
            due = due_at(step, config, minutes=0.0 if just_saved else minutes, stop_requested=bool(requested))
            just_saved = due.save and jax.process_count() > 1
            if due.log or due.save or due.stop:
                parts.directory.check_lease()
                progress = count_skipped(progress, step, sums, parts)
                remaining.step_done()
                progress = add_up(progress, pending, time.perf_counter() - began)
                pending, began = [], time.perf_counter()
                remaining.restart()
            if due.log:
                log_step(parts, step, progress, metrics, bar)
                progress = progress.clear_sums()
                checkpoints.check()
            if due.save or due.stop:
                checkpoints.save(step, state, progress.to_dict(), scheduled=due.save)
                saved = time.monotonic()
            if due.stop:
                checkpoints.wait()
                stop.leave(f'at step {step}, which is saved')
            if due.evaluate:
                with remaining.evaluation():
                    progress = judge(progress, evaluate_saved(parts, step, state, checkpoints, metrics, stop), config)
            if due.save:
                began = time.perf_counter()  # saving and evaluating are not timed
                remaining.restart()
            if progress.stopped:
                log.info('stopped at step %d: validation_%s has not improved for %d evaluations',
                         step, config.eval.metric, config.eval.patience)
                break
    log.info('compilations of the train step: %d; compile time in total %.1f s; peak memory %.2f GiB', len(shapes),
             compile_time.seconds, peak_resident() / 2 ** 30)


def make_step(compiled: Compiled, state: TrainState, batch: Batch,
              shapes: set[tuple[int, ...]]) -> tuple[TrainState, Sums]:
    """Makes one train step. If the shape of the batch is new, adds it to `shapes` and logs the compile time."""
    compiled_before = compile_time.seconds
    state, sums = compiled.train(state, batch)
    if (shape := batch['targets'].shape) not in shapes:
        shapes.add(shape)
        log.info('compilation %d: batches of %s, %.1f s', len(shapes), ' x '.join(map(str, shape)),
                 compile_time.seconds - compiled_before)
    return state, sums


def count_skipped(progress: Progress, step: int, sums: Sums, parts: TrainingParts) -> Progress:
    """Returns the progress after `step`. If the update of this step was skipped, counts one more skipped step.

    An update is skipped if the loss or the gradient is not finite (NaN or infinite).

    Raises:
      AgreedError: if more than config.train.skip_nonfinite steps were skipped.
    """
    if not int(sums.skipped):
        return progress
    skipped, allowed = progress.skipped + 1, parts.config.train.skip_nonfinite
    show = f'python -m tools.show_batch --workdir={shlex.quote(str(parts.directory.path))} --step={step - 1}'
    if skipped > allowed:
        raise AgreedError(f'step {step}: the loss or the gradient is not finite'
                          + (f', after {allowed} skipped steps' if allowed else '')
                          + f'. To print the batch of this step, run:\n  {show}\nThe checkpoints are from earlier '
                          'steps. If the data is correct, try a lower learning rate or optimizer.clip in another '
                          '--workdir. To skip up to K such steps in this run, set --config.train.skip_nonfinite=K (now '
                          f'{allowed})')
    log.warning('step %d is skipped (%d of at most %d): the loss or the gradient is not finite. To print its batch: %s',
                step, skipped, allowed, show)
    return dataclasses.replace(progress, skipped=skipped)


def add_up(progress: Progress, pending: Sequence[Sums], seconds: float) -> Progress:
    """Adds the sums and the duration of the `pending` steps to the progress, and returns the new progress.

    `seconds` is the duration. The sums are added one step after the other in float32. So an interruption of the run
    does not change the result.
    """
    parts = [sums.replace(skipped=None) for sums in jax.device_get(pending)]
    if progress.sums:
        parts.insert(0, Sums(**jax.tree.map(np.float32, progress.sums)))
    total = functools.reduce(lambda one, other: jax.tree.map(np.add, one, other), parts)
    return dataclasses.replace(progress, sums=dataclasses.asdict(jax.tree.map(float, total)),
                               seconds=progress.seconds + seconds)


def log_step(parts: TrainingParts, step: int, progress: Progress, metrics: Metrics, bar: ProgressBar, *,
             with_rate: bool = True) -> None:
    """Writes metrics of the steps since the previous call: mean losses, learning rate, speed, epoch, skipped steps.

    `with_rate` is False if the learning rate of `step` is unknown, because the step was made with another schedule.
    """
    assert progress.sums is not None, 'sums are added up before they are logged'
    total = Sums(**progress.sums)
    means = total.means('train_') if total.tokens else {}  # empty if every step was skipped
    speed = total.tokens / progress.seconds
    rates = {'learning_rate': float(np.asarray(parts.schedule(step - 1)))} if with_rate else {}
    metrics.write(step, means | rates | {'tokens_per_second': speed, 'epoch': step / len(parts.plan),
                                         'skipped_steps': progress.skipped})
    bar.set_postfix({'loss': f'{means.get("train_loss", np.nan):.3f}',
                     f'{TASKS[parts.config.task].unit}_per_s': f'{speed:,.0f}'})


def evaluate_saved(parts: TrainingParts, step: int, state: TrainState, checkpoints: Checkpoints,
                   metrics: Metrics, stop: StopSignals) -> float:
    """Evaluates the model after `step`, logs the result, and returns the value of config.eval.metric.

    The step already has a checkpoint. So if a signal stops the evaluation, the resumed run evaluates the step again.
    """
    try:
        with stop.nothing_to_lose(f'during the evaluation of step {step}, which is saved') as before_batch:
            result = measure(parts, state, before_batch)
            figure = parts.draw(parts.model, result.answer, weights=result.weights) if (
                parts.draw and result.weights) else None
    except SystemExit:
        checkpoints.wait()
        raise
    checkpoints.wait()  # an evaluation is reported only after its step is saved
    metrics.write(step, {**result.metrics, **result.statistics, **memory(), 'compile_seconds': compile_time.seconds})
    metrics.show(step, result.samples, figure)
    if result.samples:
        log.info('%s', result.samples)
    log.info('step %d: %s; memory %s; compile time in total %.1f s', step,
             ', '.join(f'{name} {value:.4g}' for name, value in result.metrics.items()),
             ', '.join(f'{name} {value:.2f}' for name, value in memory().items()), compile_time.seconds)
    checkpoints.values[step] = from_leader(
        'the evaluation', lambda: result.metrics[EVALUATED + parts.config.eval.metric])
    return checkpoints.values[step]


def measure(parts: TrainingParts, state: TrainState, before_batch: Callable[[], None]) -> Evaluation:
    """Evaluates the model on the validation split. The names of the metrics begin with 'validation_'.

    `before_batch` is called before each batch, including the batches of a search.
    """
    compiled, model, validation = parts.compiled, parts.model, parts.validation

    def eval_batch(params, batch):
        before_batch()
        return compiled.eval(params, batch)

    def distribute(arrays):
        before_batch()
        return compiled.distribute(arrays)

    if isinstance(model, SearchModel):
        model.distribute = distribute  # so that the searches of the model also use all devices
    try:
        model.params = compiled.gather(parameters_to_use(state.params, state.opt_state))
        sums = evaluate(eval_batch, model.params, prefetch(validation, 0, len(validation), compiled.part))
        sums, statistics = separated(sums)
        result = model.validate(parts.data, sums, parts.config)
    finally:
        model.params = {}  # frees memory, because every device has a complete copy of these parameters
    measured = sums.means() | result.metrics
    return result._replace(metrics={EVALUATED + name: value for name, value in measured.items()},
                           statistics=statistics)


def judge(progress: Progress, value: float, config: ConfigDict) -> Progress:
    """Returns the progress after an evaluation with the value `value` of config.eval.metric."""
    return progress.judge(value, metric=config.eval.metric, patience=config.eval.patience)
