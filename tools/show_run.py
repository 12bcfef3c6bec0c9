"""Prints a summary of a run: python -m tools.show_run RUN

The summary contains the config, the model, the progress, the scores and the files of the run. The script does not read
the parameters.
"""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.compare import RunRecord, load_runs
from command_line import run_script
from configs import recipes
from configs.options import flatten, is_used
from configs.tasks import METRICS, TASKS, goodness
from run_directory.records import CONFIG, EVALUATED, METRICS_FILE, damaged_metrics, no_run, tensorboard
from runtime.errors import UserError, first_line
from runtime.files import expanded, files_in
from runtime.process_setup import slow_imports


def main(folder: str) -> None:
    """Prints the summary of the run in `folder`."""
    workdir = expanded(folder)
    if not (workdir / CONFIG).exists():
        raise no_run(workdir)
    [run] = load_runs([workdir])
    sections = list(describe(run))
    width = max(len(name) for name, _ in sections) + 2
    for name, lines in sections:
        for index, line in enumerate(lines):
            print(f'{name if index == 0 else "":<{width}}{line}')


def describe(run: RunRecord) -> Iterator[tuple[str, list[str]]]:
    """Yields the sections of a run's summary as (heading, lines), from top to bottom. Empty sections are omitted."""
    config, workdir = run.config, run.workdir
    steps, parameters = read_checkpoints(workdir)
    yield 'run', [f'{workdir}: {run.state}']
    recipe, changes = nearest_recipe(run.config)
    yield 'config', [recipe, *(f'  {option}={value}' for option, value in changes.items())]
    yield 'task', [f'{config["task"]}, {described_data(config)}']
    yield 'model', [described_model(config), *parameters]
    yield 'progress', list(progress_lines(run))
    if damaged := damaged_metrics(workdir):
        lines = ', '.join(map(str, damaged[:10])) + (', ...' if len(damaged) > 10 else '')
        yield 'damaged', [f'{METRICS_FILE}: {len(damaged)} damaged lines are ignored: {lines}']
    for split, results in run.results.items():
        scores = ', '.join(f'{name} {results[name]:.4g}' for name in METRICS if name in results)
        source = [f'checkpoint {results["checkpoint"]}'] if 'checkpoint' in results else []
        if steps_of_scores := results.get('checkpoint_steps'):
            source.append(f'step {", ".join(map(str, steps_of_scores))}')
        yield f'{split} scores', [scores + (f' ({", ".join(source)})' if source else '')]
    if steps:
        yield 'checkpoints', [', '.join(f'{step:,} ({size(workdir / "checkpoints" / str(step))})' for step in steps)]
    yield 'on disk', [size(workdir)]
    pictures = {}
    for path in sorted(path for path in files_in(workdir) if path.suffix == '.png'):
        pictures.setdefault(path.parent, []).append(path)
    if pictures:
        yield 'pictures', [f'{folder}: {len(paths)}' for folder, paths in pictures.items()]
    if (workdir / 'tensorboard').exists():
        yield 'curves', [f'{workdir / "metrics.jsonl"}, or {tensorboard(workdir / "tensorboard")}']


def nearest_recipe(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the recipe that differs least from a config, and the differences as {option: value in the config}."""
    def changes(name):
        recipe = flatten(importlib.import_module(f'configs.{name}').get_config())
        return {option: value for option, value in config.items() if recipe.get(option) != value}

    changed = {path.stem: changes(path.stem) for path in recipes()}
    name = min(changed, key=lambda name: len(changed[name]))
    return f'configs/{name}.py', changed[name]


def described_data(config: dict[str, Any]) -> str:
    """Returns a short text with the source of the data and the languages."""
    source = {'builtin': 'the built-in data', 'tfds': config['data.name']}.get(
        config['data.source'], config['data.file'] or config['data.dir'])
    languages = f'{config["data.source_lang"]} -> {config["data.target_lang"]}, '
    return (languages if is_used('data.source_lang', config) else '') + source


def described_model(config: dict[str, Any]) -> str:
    """Returns a short text with the kind and the sizes of the model."""
    if config['model.kind'] == 'rnnsearch':
        return f'rnnsearch, states of {config["model.recurrent.d_hidden"]}, d_model {config["model.d_model"]}'
    decoder = f'+{config["model.num_decoder_layers"]}' if config['model.num_decoder_layers'] else ''
    groups = config['model.num_key_value_heads']
    heads = f'{config["model.num_heads"]} heads' + (f' (of keys and values: {groups})' if groups else '')
    rms = ' (RMSNorm)' if config['model.norm_function'] == 'rms_norm' else ''
    gated = 'gated ' if config['model.feed_forward'] == 'gated' else ''
    return (f'{config["model.kind"]}, {config["model.num_layers"]}{decoder} layers, d_model {config["model.d_model"]}, '
            f'{gated}d_ff {config["model.d_ff"]}, {heads}, {config["model.norm"]}-norm{rms}, '
            f'{config["model.position"]} positions')


def read_checkpoints(workdir: Path) -> tuple[list[int], list[str]]:
    """Returns the steps of a run's checkpoints, and lines with the numbers of parameters, in total and per model part.

    The numbers are read from the list of arrays in the newest checkpoint.

    Raises:
      UserError: if the checkpoint is damaged.
    """
    with slow_imports():  # of Orbax, which --help does not need
        from model import parameter_count
        from run_directory.checkpoints import Checkpoints, described
        from run_directory.damage import refuse_pipes

    steps = Checkpoints(workdir).steps()
    if not steps:
        return steps, []
    folder = workdir / 'checkpoints' / str(steps[-1])
    try:
        refuse_pipes(folder)
        parts = {name: parameter_count(part) for name, part in described(folder / 'state')['params'].items()}
    except Exception as error:  # Orbax does not document which exceptions it raises
        if Checkpoints(workdir).steps()[-1:] != steps[-1:]:  # a training has replaced the newest checkpoint
            return read_checkpoints(workdir)
        raise UserError(f'{folder} is damaged: {first_line(error)}. Move this folder to another place to show the run '
                        'without this checkpoint') from error
    return steps, [f'{sum(parts.values()):,} parameters: '
                   + ', '.join(f'{name} {number:,}' for name, number in parts.items())]


def progress_lines(run: RunRecord) -> Iterator[str]:
    """Yields three lines: the step and the speed, the last evaluation, and the best evaluation."""
    speed = f', {run.speed:,.0f} {TASKS[run.config["task"]].unit} per second' if run.speed else ''
    epochs = run.curves.get('epoch')
    yield (f'step {run.step:,} of {run.config["train.steps"]:,}' + (f', epoch {epochs[-1][1]:.1f}' if epochs else '')
           + speed)
    measured = {name.removeprefix(EVALUATED): points for name, points in run.curves.items()
                if name.startswith(EVALUATED)}
    if not measured:
        return
    last = max(points[-1][0] for points in measured.values())
    values = ', '.join(f'{name} {points[-1][1]:.4g}' for name, points in measured.items())
    yield f'validation at step {last:,}: {values}'
    metric = run.config['eval.metric']
    if metric in measured:
        step, value = max(measured[metric], key=lambda point: goodness(metric, point[1]))
        yield f'best {metric}: {value:.4g} at step {step:,}'


def size(path: Path) -> str:
    """Returns the total size of the files in a folder as text, in MB."""
    total = 0
    for file in files_in(path):
        with contextlib.suppress(OSError):  # a training may have deleted the file
            total += file.stat().st_size
    return f'{total / 1e6:,.1f} MB'


if __name__ == '__main__':
    run_script(main, takes='RUN')
