"""Measurements over steps: metrics.jsonl for programs, TensorBoard for eyes."""

import json
from collections.abc import Mapping
from pathlib import Path

import tensorboardX
from matplotlib.figure import Figure


class MetricsWriter:
    """Appends to RUN/metrics.jsonl and RUN/tensorboard.

    A resumed run goes on after `step`: what an interrupted one wrote beyond it is dropped, so that each step
    is there once.
    """

    def __init__(self, workdir: Path, step: int):
        path = workdir / 'metrics.jsonl'
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if _step(line) <= step]
        temporary = path.with_suffix('.tmp')
        temporary.write_text(''.join(f'{line}\n' for line in kept))
        temporary.replace(path)
        self._file = open(path, 'a')
        self._tensorboard = tensorboardX.SummaryWriter(str(workdir / 'tensorboard'), purge_step=step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of JSON, {'step': ..., name: value, ...}, and one scalar a name."""
        self._file.write(json.dumps({'step': step, **metrics}) + '\n')
        self._file.flush()
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)

    def show(self, step: int, text: str, figure: Figure | None) -> None:
        """What an evaluation has to look at, in TensorBoard's tabs TEXT and IMAGES."""
        if text:
            self._tensorboard.add_text('samples', '\n'.join(f'    {line}' for line in text.splitlines()), step)
        if figure:
            self._tensorboard.add_figure('attention', figure, step)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


def _step(line: str) -> int | float:
    try:
        return json.loads(line)['step']
    except (ValueError, KeyError):
        return float('inf')  # the last line of a run that was killed while it wrote
