"""Something trained to look at, for notebooks that are opened before anything was."""

import os
import subprocess
import sys
from pathlib import Path

from analysis.compare import SWEEP
from errors import UserError
from training.records import CONFIG

ROOT = Path(__file__).parents[1]
SMALL = {'model.num_layers': 1, 'model.d_model': 64, 'model.d_ff': 256, 'eval.bleu_sentences': 100}  # of a sweep


def example_run(recipe: str, variable: str = 'RUN', steps: int = 500) -> Path:
    """The run directory that the environment variable names, from the project's root; without one runs/RECIPE; where
    that is not, a short training, made now.

    The short one is runs/RECIPE-STEPS, by the README's command with --config.train.steps, in a minute or two: enough
    that attention has found its way. Interrupted, it goes on the next time.

    Raises:
      UserError: if the training fails; what it said is above.
    """
    whole, short = ROOT / 'runs' / recipe, ROOT / 'runs' / f'{recipe}-{steps}'
    if os.environ.get(variable):
        return ROOT / os.environ[variable]
    if (whole / CONFIG).exists():
        return whole
    _make('train.py', f'--config=configs/{recipe}.py', f'--workdir={short.relative_to(ROOT)}',
          f'--config.train.steps={steps}')
    return short


def example_sweep(name: str, variable: str = 'SWEEP', steps: int = 200) -> Path:
    """The directory of a sweep, or of runs, that the environment variable names, from the project's root; without one
    sweeps/NAME; where that is not, a short sweep of small models, made now as sweeps/NAME-STEPS, in a few minutes.

    Raises:
      UserError: if it fails; what it said is above.
    """
    whole, short = ROOT / 'sweeps' / name, ROOT / 'sweeps' / f'{name}-{steps}'
    if os.environ.get(variable):
        return ROOT / os.environ[variable]
    if (whole / SWEEP).exists():
        return whole
    _make('sweep.py', '--config=configs/demo.py', f'--sweep=configs/sweeps/{name}.py',
          f'--workdir={short.relative_to(ROOT)}', '--jobs=2', f'--config.train.steps={steps}',
          f'--config.optimizer.warmup={steps // 4}', f'--config.eval.every={steps // 4}',
          *(f'--config.{option}={value}' for option, value in SMALL.items()))
    return short


def _make(*command: str) -> None:
    """Runs a script in the project's root; what it says goes to stderr."""
    print(f'made first, once:\n  python {" ".join(command)}', file=sys.stderr)
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True)
    try:
        for line in process.stderr:  # by way of Python: a notebook shows no file descriptor
            print(line, end='', file=sys.stderr)
    except BaseException:
        process.terminate()
        raise
    if process.wait():
        raise UserError(f'{command[0]} failed, with the arguments {" ".join(command[1:])}')
