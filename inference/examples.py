"""A trained run to look at, for notebooks that are opened before anything was trained."""

import subprocess
import sys
from pathlib import Path

from errors import UserError
from inference.run import CONFIG

ROOT = Path(__file__).parents[1]
STEPS = 500  # of a recipe's, in a minute or two: enough that attention has found its way


def example_run(recipe: str, steps: int = STEPS) -> Path:
    """The run directory of a recipe: runs/RECIPE if there is one, otherwise a short training, made now.

    The short one is runs/RECIPE-STEPS, by the README's command with --config.train.steps; what it says goes to
    stderr. Interrupted, it goes on the next time.

    Raises:
      UserError: if the training fails; what it said is above.
    """
    whole = ROOT / 'runs' / recipe
    if (whole / CONFIG).exists():
        return whole
    short = whole.with_name(f'{recipe}-{steps}')
    command = ['train.py', f'--config=configs/{recipe}.py', f'--workdir={short}', f'--config.train.steps={steps}']
    print(f'There is no {whole.relative_to(ROOT)}, so this is trained first:\n  python {" ".join(command)}'
          .replace(f'{ROOT}/', ''), file=sys.stderr)
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:  # by way of Python: a notebook shows no file descriptor
            print(line, end='', file=sys.stderr)
    except BaseException:
        process.terminate()
        raise
    if process.wait():
        raise UserError(f'the training of {short.relative_to(ROOT)} failed')
    return short
