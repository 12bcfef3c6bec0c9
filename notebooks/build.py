"""Builds the notebooks: executes NAME.py (jupytext's percent format), and writes NAME.ipynb with the outputs.

    make notebooks [RUN=runs/demo] [RNN_RUN=runs/rnnsearch_demo] [SWEEP=sweeps/scores]
    python -m notebooks.build [NAME ...]

The notebooks open the runs that these environment variables name, by default the runs above. If a variable is not set
and its default run is missing, a notebook trains a short run (analysis/examples.py).
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
NAMES = ('attention_by_hand', 'open_a_run', 'inside_a_model', 'few_shot', 'fine_tune', 'compare_runs',
         'additive_vs_dot_product')
TIMEOUT = 1200  # seconds per cell; a cell may train a model


def read(name: str) -> nbformat.NotebookNode:
    """Returns the notebook without outputs. Its content and metadata depend only on NAME.py."""
    notebook = jupytext.read(FOLDER / f'{name}.py', fmt='py:percent')
    notebook.metadata = nbformat.from_dict({
        'kernelspec': {'display_name': 'Python 3', 'language': 'python', 'name': 'python3'},
        'language_info': {'name': 'python'}})
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f'{name}-{number}', nbformat.from_dict({})
    return notebook


def execute(name: str, environment: Mapping[str, str] = {}) -> nbformat.NotebookNode:
    """Executes the notebook in a new kernel, in the project's root, and returns it with outputs.

    Raises:
      CellExecutionError: if a cell fails.
    """
    notebook = read(name)
    metadata = notebook.metadata.copy()
    client = NotebookClient(notebook, timeout=TIMEOUT, kernel_name='python3', record_timing=False,
                            coalesce_streams=True, resources={'metadata': {'path': str(FOLDER.parent)}})
    client.execute(env=os.environ | environment)
    notebook.metadata = metadata  # the kernel adds the version of Python
    for cell in notebook.cells:  # warnings and progress on stderr concern only this execution
        if cell.cell_type == 'code':
            cell.outputs = [output for output in cell.outputs if output.get('name') != 'stderr']
    return notebook


def main(names: Sequence[str]) -> None:
    for name in names or NAMES:
        print(name, file=sys.stderr)
        nbformat.write(execute(name), FOLDER / f'{name}.ipynb')


if __name__ == '__main__':
    main(sys.argv[1:])
