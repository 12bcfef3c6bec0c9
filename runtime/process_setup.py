"""Sets up the process of a script: restarts it with other settings, and controls its output, signals and imports."""

import contextlib
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from runtime.errors import UserError
from runtime.files import naming
from runtime.stopping import SAME_REQUEST


def use_utf8() -> None:
    """Restarts the script in Python's UTF-8 mode if the locale uses another encoding for text or file names.

    Otherwise texts would be decoded wrongly, and TensorStore could not open a checkpoint whose path is not ASCII.
    """
    if sys.getfilesystemencoding() != 'utf-8' and os.environ.get('PYTHONUTF8') != '1':
        os.environ['PYTHONUTF8'] = '1'
        os.execv(sys.executable, sys.orig_argv)


def use_huge_pages() -> None:
    """Restarts the script with settings of glibc's malloc: it requests huge pages, and does not return memory to Linux.

    Does nothing if the user has set GLIBC_TUNABLES, or on a system other than Linux.

    XLA on CPU allocates its buffers at every step, and Linux provides new memory as zeroed pages of 4 KB. Without these
    settings, the first access to new memory takes about a quarter of a training step (benchmarks/train_step.py).

    XLA allocates in several threads, and each thread has its own arena. A buffer larger than an arena (64 MB) is always
    requested from Linux and returned to Linux, regardless of mmap_max and trim_threshold. So if the process may use at
    most two cores, all threads share one arena. This reduced the time per step from 0.46 s to 0.39 s. With more cores,
    the process keeps glibc's default of 8 arenas per core, because many threads would wait for the lock of a single
    arena at each allocation.

    glibc reads the settings only when a process starts, so call this function before the slow imports.
    """
    if sys.platform == 'linux' and 'GLIBC_TUNABLES' not in os.environ:
        tunables = {'hugetlb': 1, 'mmap_max': 0, 'trim_threshold': 20_000_000_000, 'top_pad': 268_435_456}
        if len(os.sched_getaffinity(0)) <= 2:
            tunables['arena_max'] = 1
        os.environ['GLIBC_TUNABLES'] = ':'.join(f'glibc.malloc.{name}={value}' for name, value in tunables.items())
        os.execv(sys.executable, sys.orig_argv)


def replace_stdout() -> None:
    """Replaces sys.stdout by a stream in UTF-8 whose errors mention stdout. Does nothing if stdout is closed."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if stdout is closed
        sys.stdout = _Stdout(sys.stdout)


class _Stdout(io.TextIOWrapper):
    """stdout in UTF-8, independent of the locale. File names that are not valid UTF-8 keep their bytes.

    A failed write raises a UserError that mentions stdout. The system's error would not mention stdout.
    """

    def __init__(self, stdout: io.TextIOWrapper):
        line_buffering, write_through = stdout.line_buffering, stdout.write_through
        super().__init__(stdout.detach(), encoding='utf-8', errors='surrogateescape', line_buffering=line_buffering,
                         write_through=write_through)

    def write(self, text: str) -> int:
        with self._named():
            return super().write(text)

    def flush(self) -> None:
        with self._named():
            super().flush()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            with naming('stdout'):
                yield
        except UserError:
            # Otherwise Python would flush again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise


def replace_stderr() -> None:
    """Replaces sys.stderr by a stream that drops text which cannot be written.

    Otherwise, a pipe without a reader or a full disk would end a training before it saves, and would change the exit
    status of a script. For example, Ctrl-C ends both programs of `train.py 2>&1 | tee log`.
    """
    if not isinstance(sys.stderr, Lossy):
        sys.stderr = cast(TextIO, Lossy(sys.stderr))


class Lossy:
    """A stream that drops text which cannot be written. All other attributes are the attributes of `stream`."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes `text`, or drops it. Returns its length."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes the texts that are still in memory, or drops them."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:  # tqdm compares its stream with sys.stderr
        return self._stream == getattr(other, '_stream', other)

    def __hash__(self) -> int:
        return hash(self._stream)


def unless_left_behind(hook: Callable) -> Callable:
    """Returns a hook for exceptions that Python ignores. It calls `hook`, except in two cases.

    Tasks of Orbax raise 'Event loop is closed' if they still run after their event loop has closed. The hook ignores
    this error. Ctrl-C during a callback of JAX's garbage collection would be lost. The hook interrupts the main thread
    again.
    """
    def unless(event: Any) -> None:
        if issubclass(event.exc_type, KeyboardInterrupt):  # exc_value may be None
            # Here, the signal would be lost again, so it is sent after this hook has returned. If it were sent at once,
            # sweep.py would ignore it as part of the same request.
            timer = threading.Timer(SAME_REQUEST + 0.1, os.kill, (os.getpid(), signal.SIGINT))
            timer.daemon = True  # the process may end earlier
            timer.start()
        elif str(event.exc_value) != 'Event loop is closed':
            hook(event)

    return unless


@contextlib.contextmanager
def slow_imports() -> Iterator[None]:
    """Runs the body, which imports slow libraries, without garbage collection and without interruptions.

    Otherwise the collector would examine the objects of the libraries again and again, although they are never freed.
    If it skips these objects, an import of GPT-2 takes 5 % less processor time. SIGINT, SIGTERM and SIGHUP take effect
    after the body, because some modules in C++ abort the process if a signal handler raises an exception during their
    import.
    """
    gc.disable()
    try:
        with signals_delayed():
            yield
    finally:
        gc.freeze()  # later collections skip the objects of the imports
        gc.enable()


@contextlib.contextmanager
def signals_delayed() -> Iterator[None]:
    """Runs the body. SIGINT, SIGTERM and SIGHUP take effect after the body if these signals arrive during the body.

    Blocking the signals in the main thread would not delay them: another thread would receive a signal, and then Python
    would call the handler in the main thread. Outside the main thread, where Python calls no handlers, only runs the
    body.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # getsignal returns None for a handler that Python has not installed, and cannot restore. Such a handler stays. An
    # ignored signal stays ignored, so that processes that start in the body also ignore this signal.
    handlers = {number: handler for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN)}
    received = []
    for number in handlers:
        signal.signal(number, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in received:
            if callable(handler := handlers[number]):
                handler(number, frame)  # not raise_signal, which StopSignals would count as a second signal
            else:
                signal.raise_signal(number)
