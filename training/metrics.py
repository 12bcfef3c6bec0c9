"""Measurements over steps, written: metrics.jsonl for programs, TensorBoard for eyes."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue] (protobuf's)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import image, scalar, text
from tensorboardX.utils import figure_to_image

from errors import full_disk_explained
from files import write_text
from training.records import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    import matplotlib.figure


class MetricsWriter:
    """Appends to RUN/metrics.jsonl and RUN/tensorboard.

    A resumed run goes on after `step`: what an interrupted one wrote beyond it is dropped, so that each step
    is there once. The events are written by tensorboardX's parts in our own thread: in its own, a full disk
    would end that thread in silence and leave us waiting for it.
    """

    def __init__(self, workdir: Path, step: int):
        self._path, folder = workdir / METRICS_FILE, workdir / 'tensorboard'
        kept = [line for line in read_metrics(workdir) if line['step'] <= step]
        with full_disk_explained(self._no_room):
            write_text(self._path, ''.join(json.dumps(line) + '\n' for line in kept))
            folder.mkdir(exist_ok=True)
            self._events = EventsWriter(str(folder / 'events'), f'.{os.getpid()}')
            self._events.write_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))  # purges

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of JSON, {'step': ..., name: value, ...}, and one scalar a name.

        Raises:
          UserError: if the disk is full.
        """
        with full_disk_explained(self._no_room):
            with open(self._path, 'a', encoding='utf-8') as file:
                file.write(json.dumps({'step': step, **metrics}) + '\n')
            self._add(step, *(scalar(name, value) for name, value in metrics.items()))

    def show(self, step: int, samples: str, figure: 'matplotlib.figure.Figure | None') -> None:
        """What an evaluation has to look at, in TensorBoard's tabs TEXT and IMAGES."""
        shown = []
        if samples:
            shown.append(text('samples', '\n'.join(f'    {line}' for line in samples.splitlines())))  # as code
        if figure:
            shown.append(image('attention', figure_to_image(figure), dataformats='CHW'))
        with full_disk_explained(self._no_room):
            self._add(step, *shown)

    def _add(self, step: int, *summaries: Summary) -> None:
        for summary in summaries:
            self._events.write_event(Event(step=step, wall_time=time.time(), summary=summary))
        self._events.flush()

    def close(self) -> None:
        """Writes what is left. Raises UserError if the disk is full."""
        with full_disk_explained(self._no_room):
            self._events.close()

    def _no_room(self, _, reason: str) -> str:
        return (f'{self._path} or the folder tensorboard beside it cannot be written: {reason}. The checkpoints are '
                'still valid: free space, then run the same command again')


class NoMetrics:
    """What all processes but one have in place of a MetricsWriter."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Does nothing."""

    def show(self, step: int, samples: str, figure: 'matplotlib.figure.Figure | None') -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
