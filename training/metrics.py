"""Writes metrics over steps: metrics.jsonl for programs, TensorBoard for people."""

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

    A resumed run continues after `step`. Later lines, which an interrupted run wrote, are dropped, so each step appears
    once. We call tensorboardX's event writer in our own thread: in tensorboardX's thread, a full disk would end the
    thread silently, and we would wait for it forever.
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
        """Writes one line of JSON, {'step': ..., name: value, ...}, and one TensorBoard scalar for each name.

        Raises:
          UserError: if the disk is full.
        """
        with full_disk_explained(self._no_room):
            with open(self._path, 'a', encoding='utf-8') as file:
                file.write(json.dumps({'step': step, **metrics}) + '\n')
            self._add(step, *(scalar(name, value) for name, value in metrics.items()))

    def show(self, step: int, samples: str, figure: 'matplotlib.figure.Figure | None') -> None:
        """Writes an evaluation's samples and figure to TensorBoard's tabs TEXT and IMAGES."""
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
        """Writes pending events. Raises UserError if the disk is full."""
        with full_disk_explained(self._no_room):
            self._events.close()

    def _no_room(self, _, reason: str) -> str:
        return (f'{self._path} or the folder tensorboard beside it cannot be written: {reason}. The checkpoints are '
                'still valid: free space, then run the same command again')


class NoMetrics:
    """A MetricsWriter that does nothing, for all processes but one."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Does nothing."""

    def show(self, step: int, samples: str, figure: 'matplotlib.figure.Figure | None') -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
