"""Trained runs for notebooks: the run of an environment variable, the run of a recipe, or else a short run."""

import os
import subprocess
import sys
from pathlib import Path

from analysis.compare import SWEEP
from run_directory.records import CONFIG
from runtime.errors import UserError
from runtime.files import expanded

ROOT = Path(__file__).parents[1]
SMALL = {'model.num_layers': 1, 'model.d_model': 64, 'model.d_ff': 256, 'eval.bleu_sentences': 100}  # a short sweep


def example_run(recipe: str, variable: str = 'RUN', steps: int = 500) -> Path:
    """Returns the directory of a run of a recipe: the first of these directories.

      1. the run directory in the environment variable `variable`, if it is set and not empty; a relative path is
         relative to the root of the project;
      2. runs/RECIPE, if this run exists;
      3. runs/RECIPE-STEPS, which is trained now if necessary, with --config.train.steps.

    The training takes one or two minutes. After this time, the attention aligns words. If the training is interrupted,
    the next call resumes it.

    Raises:
      UserError: if the directory in the variable does not exist, or the training fails. The output of the training
        has already been printed.
    """
    whole, short = ROOT / 'runs' / recipe, ROOT / 'runs' / f'{recipe}-{steps}'
    if named := _named(variable):
        return named
    if (whole / CONFIG).exists():
        return whole
    _make('train.py', f'--config=configs/{recipe}.py', f'--workdir={short.relative_to(ROOT)}',
          f'--config.train.steps={steps}')
    return short


def example_sweep(name: str, variable: str = 'SWEEP', steps: int = 200) -> Path:
    """Returns the directory of a sweep: the first of these directories.

      1. the directory in the environment variable `variable`, as in `example_run`;
      2. sweeps/NAME, if this sweep exists;
      3. sweeps/NAME-STEPS, a short sweep of small models that is run now if necessary, in a few minutes.

    Raises:
      UserError: if the directory in the variable does not exist, or the sweep fails. The output of the sweep has
        already been printed.
    """
    whole, short = ROOT / 'sweeps' / name, ROOT / 'sweeps' / f'{name}-{steps}'
    if named := _named(variable):
        return named
    if (whole / SWEEP).exists():
        return whole
    _make('sweep.py', '--config=configs/demo.py', f'--sweep=configs/sweeps/{name}.py',
          f'--workdir={short.relative_to(ROOT)}', '--jobs=2', f'--config.train.steps={steps}',
          f'--config.optimizer.warmup={steps // 4}', f'--config.eval.every={steps // 4}',
          *(f'--config.{option}={value}' for option, value in SMALL.items()))
    return short


def _named(variable: str) -> Path | None:
    """Returns the directory in an environment variable, or None if the variable is not set or is empty."""
    value = os.environ.get(variable)
    if not value:
        return None
    if not (path := ROOT / expanded(value)).is_dir():
        raise UserError(f'{variable}={value}: there is no directory {path}. Set {variable} to an existing directory, '
                        'or unset it')
    return path


def _make(*command: str) -> None:
    """Runs a script in the root of the project, and prints its output on stderr."""
    print(f'The notebook needs the result of this command, which runs only once:\n  python {" ".join(command)}',
          file=sys.stderr)
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True)
    try:
        assert process.stderr is not None, 'stderr is a pipe'
        for line in process.stderr:  # a notebook shows what Python prints, but not the output of a process
            print(line, end='', file=sys.stderr)
    except BaseException:
        process.terminate()
        process.communicate()  # until the process ends, the same call would fail: the run is in use
        raise
    if process.wait():
        raise UserError(f'the command python {" ".join(command)} failed. Its output is above')
