"""Writes the metrics of steps to metrics.jsonl (for programs), TensorBoard (for people) and experiment trackers."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ml_collections import ConfigDict

from run_directory.records import METRICS_FILE, read_metrics
from runtime.agreement import is_leader
from runtime.errors import full_disk_explained
from runtime.files import write_text
from runtime.imports import without
from training.trackers import grouped, open_trackers

# tensorboardX imports PyTorch if it is installed, only for the name of a type. This takes 1.7 s of processor time.
with without('torch'):
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue] (protobuf)
    from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboardX.summary import image, scalar, text
    from tensorboardX.utils import figure_to_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

@runtime_checkable
class Metrics(Protocol):
    """The interface of the objects that write metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of `step`, {name: value}."""

    def show(self, step: int, samples: str, figure: 'Figure | None') -> None:
        """Writes the samples of an evaluation (inputs and outputs), and `figure`, a picture of one sample.

        If `figure` is None, no picture is written.
        """

    def close(self, failed: bool) -> None:
        """Writes all pending metrics. `failed` is True if an error or a signal has ended the training."""


class MetricsWriter:
    """A writer that appends metrics to RUN/metrics.jsonl and to the event files in RUN/tensorboard.

    A resumed run continues after `step`. The interrupted run may have written lines for later steps. These lines are
    dropped, so each step appears once. Events are written in the calling thread and not in tensorboardX's own thread. A
    full disk would end tensorboardX's thread silently, and the training would wait for this thread forever.
    """

    def __init__(self, workdir: Path, step: int):
        self._path, folder = workdir / METRICS_FILE, workdir / 'tensorboard'
        kept = [line for line in read_metrics(workdir) if line['step'] <= step]
        with full_disk_explained(self._no_room):
            write_text(self._path, ''.join(json.dumps(line) + '\n' for line in kept))
            folder.mkdir(exist_ok=True)
            self._events = EventsWriter(str(folder / 'events'), f'.{os.getpid()}')
            # This event makes TensorBoard drop the later steps of the interrupted run.
            self._events.write_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one line of JSON, {'step': ..., name: value, ...}, and one TensorBoard scalar for each metric.

        Raises:
          UserError: if the disk is full.
        """
        with full_disk_explained(self._no_room):
            with open(self._path, 'a', encoding='utf-8') as file:
                file.write(json.dumps({'step': step, **metrics}) + '\n')
            self._add(step, *(scalar(grouped(name), value) for name, value in metrics.items()))

    def show(self, step: int, samples: str, figure: 'Figure | None') -> None:
        """Writes the samples and the figure of an evaluation to TensorBoard's tabs TEXT and IMAGES."""
        summaries = []
        if samples:
            code = '\n'.join(f'    {line}' for line in samples.splitlines())  # a code block in Markdown
            summaries.append(text('samples', code))
        if figure:
            summaries.append(image('attention', figure_to_image(figure), dataformats='CHW'))
        with full_disk_explained(self._no_room):
            self._add(step, *summaries)

    def _add(self, step: int, *summaries: Summary) -> None:
        for summary in summaries:
            self._events.write_event(Event(step=step, wall_time=time.time(), summary=summary))
        self._events.flush()

    def close(self, failed: bool = False) -> None:
        """Writes pending events to disk. Raises UserError if the disk is full."""
        with full_disk_explained(self._no_room):
            self._events.close()

    def _no_room(self, _, reason: str) -> str:
        return (f'{self._path} or the folder tensorboard next to this file cannot be written: {reason}. The '
                'checkpoints are still valid. Free space, then run the same command again')


class Writers:
    """A list of writers used as one. It is empty on every process except the leader."""

    def __init__(self, *writers: Metrics):
        self._writers = writers

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step to every writer."""
        for writer in self._writers:
            writer.write(step, metrics)

    def show(self, step: int, samples: str, figure: 'Figure | None') -> None:
        """Writes the samples and the figure of an evaluation to every writer."""
        for writer in self._writers:
            writer.show(step, samples, figure)

    def close(self, failed: bool) -> None:
        """Closes all writers in reverse order, so the files of the run are closed last."""
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close, failed)


@contextlib.contextmanager
def open_metrics(config: ConfigDict, workdir: Path, step: int, writers: Sequence[Metrics] = ()) -> Iterator[Metrics]:
    """Opens the metrics files of a run and the trackers in config.track. The run continues after `step`.

    Yields a writer for the files, the trackers and the given `writers`.

    Raises:
      UserError: if a disk is full, or a tracker is not installed or cannot be reached.
    """
    metrics = Writers()
    try:
        if is_leader():
            trackers = open_trackers(config, workdir)  # reads the lines that MetricsWriter drops
            metrics = Writers(*trackers)
            metrics = Writers(MetricsWriter(workdir, step), *trackers, *writers)
        yield metrics
    except BaseException:
        metrics.close(failed=True)
        raise
    metrics.close(failed=False)
