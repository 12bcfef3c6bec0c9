"""Writes metrics over steps: metrics.jsonl for programs, TensorBoard for people, and whoever else is told."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ml_collections import ConfigDict
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue] (protobuf's)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import image, scalar, text
from tensorboardX.utils import figure_to_image

from run_directory.records import METRICS_FILE, read_metrics
from runtime.agreement import is_leader
from runtime.errors import full_disk_explained
from runtime.files import write_text
from training.trackers import open_trackers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@runtime_checkable
class Metrics(Protocol):
    """What the training loop tells its metrics to."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step, {name: value}."""

    def show(self, step: int, samples: str, figure: 'Figure | None') -> None:
        """Takes an evaluation's samples, and the picture of one if there is one."""

    def close(self, failed: bool) -> None:
        """Finishes what is pending. `failed`: an error or a signal ends the training."""


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

    def show(self, step: int, samples: str, figure: 'Figure | None') -> None:
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

    def close(self, failed: bool = False) -> None:
        """Writes pending events. Raises UserError if the disk is full."""
        with full_disk_explained(self._no_room):
            self._events.close()

    def _no_room(self, _, reason: str) -> str:
        return (f'{self._path} or the folder tensorboard beside it cannot be written: {reason}. The checkpoints are '
                'still valid: free space, then run the same command again')


class Several:
    """Several of these as one; none: the metrics of all processes but one."""

    def __init__(self, *parts: Metrics):
        self._parts = parts

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step everywhere."""
        for part in self._parts:
            part.write(step, metrics)

    def show(self, step: int, samples: str, figure: 'Figure | None') -> None:
        """Shows an evaluation's samples and figure everywhere."""
        for part in self._parts:
            part.show(step, samples, figure)

    def close(self, failed: bool) -> None:
        """Closes all, the first last: the files of the run."""
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.close, failed)


@contextlib.contextmanager
def open_metrics(config: ConfigDict, workdir: Path, step: int, watching: Sequence[Metrics] = ()) -> Iterator[Metrics]:
    """Opens all that is told the metrics of a run that goes on after `step`: its files, the trackers of config.track,
    and `watching`. In all processes but the one that writes, nothing is.

    Raises:
      UserError: if a disk is full, or a tracker is not installed or cannot be reached.
    """
    metrics = Several()
    if is_leader():
        metrics = Several(MetricsWriter(workdir, step), *open_trackers(config, workdir), *watching)
    try:
        yield metrics
    except BaseException:
        metrics.close(failed=True)
        raise
    metrics.close(failed=False)
