"""Measurements over steps: metrics.jsonl for programs, TensorBoard for eyes; memory and compile time."""

import contextlib
import importlib.util
import json
import os
import resource
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import jax
from matplotlib.figure import Figure
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue] (protobuf's)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import image, scalar, text
from tensorboardX.utils import figure_to_image

from errors import full_disk_explained
from files import read_bytes, write_text

METRICS = 'metrics.jsonl'
EVALUATED = 'validation_'  # what the names of an evaluation's measures begin with


class MetricsWriter:
    """Appends to RUN/metrics.jsonl and RUN/tensorboard.

    A resumed run goes on after `step`: what an interrupted one wrote beyond it is dropped, so that each step
    is there once. The events are written by tensorboardX's parts in our own thread: in its own, a full disk
    would end that thread in silence and leave us waiting for it.
    """

    def __init__(self, workdir: Path, step: int):
        self._path, folder = workdir / METRICS, workdir / 'tensorboard'
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

    def show(self, step: int, samples: str, figure: Figure | None) -> None:
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
        with full_disk_explained(self._no_room):
            self._events.close()

    def _no_room(self, _, reason: str) -> str:
        return (f'{self._path} or the folder tensorboard beside it cannot be written: {reason}. The checkpoints are '
                'still valid: free space, then run the same command again')


class NoMetrics:
    """What all processes but one have in place of a MetricsWriter."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def show(self, step: int, samples: str, figure: Figure | None) -> None:
        pass

    def close(self) -> None:
        pass


def tensorboard(folder: Path, *plugins: str) -> str:
    """The command that shows the events of a folder, and what to install first: TensorBoard is no part of this project.

    `plugins` are the packages that what is to be seen needs besides.
    """
    missing = [name for name in ('tensorboard', *plugins) if importlib.util.find_spec(name) is None]
    first = f' (after pip install {" ".join(missing)})' if missing else ''
    return f'tensorboard --logdir={shlex.quote(str(folder))}{first}'


def evaluations(workdir: Path, metric: str) -> dict[int, float]:
    """What the evaluations of a run found, by step."""
    name = EVALUATED + metric
    return {int(line['step']): line[name] for line in read_metrics(workdir) if name in line}


def read_metrics(workdir: Path) -> list[dict[str, int | float]]:
    """The lines of metrics.jsonl: {'step': 100, 'train_loss': 5.07, ...}.

    Without what a run that was killed in the middle of a line left there, and without what is no number.
    """
    path, lines = Path(workdir) / METRICS, []
    for line in read_bytes(path).splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(found.get('step'), int):
                lines.append({name: value for name, value in found.items()
                              if isinstance(value, float) or isinstance(value, int) and abs(value) < 2 ** 63})
    return lines


def peak_resident() -> int:
    """Bytes of memory that this process has had at most. The system counts them in kilobytes, but macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


def memory() -> dict[str, float]:
    """GB: 'resident_gb' of this process, and of the first device, where it tells, 'device_gb' and 'device_peak_gb'."""
    try:
        resident = int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()
    except OSError:  # no Linux: the peak instead
        resident = peak_resident()
    of_device = jax.local_devices()[0].memory_stats() or {}
    found = {'resident_gb': resident, 'device_gb': of_device.get('bytes_in_use'),
             'device_peak_gb': of_device.get('peak_bytes_in_use')}
    return {name: value / 2 ** 30 for name, value in found.items() if value is not None}


class CompileTime:
    """Seconds that JAX has spent on tracing, lowering and compiling since this was made.

    JAX keeps the listener for the life of the process, so there is one, `compile_time`.
    """

    def __init__(self):
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_) -> None:
        if event.startswith('/jax/core/compile/'):
            self.seconds += duration_secs


compile_time = CompileTime()
