"""Stops a run on SIGTERM and SIGINT (Ctrl-C). Schedulers send SIGTERM before they kill a process."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax

from runtime.agreement import Greatest
from runtime.stopping import SAME_REQUEST, STOPPED

SIGNALS = (signal.SIGINT, signal.SIGTERM)

log = logging.getLogger('allyouneed.train')


class StopSignals:
    """A signal handler that stops a run.

    The first signal stops the run without loss of work. A second signal ends the run immediately. Signals that arrive
    less than SAME_REQUEST seconds after the first signal are ignored.

    Before the training loop, and in the body of `nothing_to_lose`, the first signal stops the run at once by raising
    SystemExit(75) in the main thread. In the body of `at_a_step`, the first signal is only recorded, and the training
    loop checks `requested` after each step.

    With exits=False, for notebooks, a second signal raises KeyboardInterrupt instead of ending the process. Outside
    the main thread, the handler has no effect, because Python delivers signals only to the main thread.
    """

    def __init__(self, *, exits: bool = True):
        self._received, self._later, self._done, self._exits = None, False, 'nothing is lost', exits
        self._first = 0.0  # the time of the first signal
        self._open = contextlib.ExitStack()

    def __enter__(self) -> 'StopSignals':
        if threading.current_thread() is threading.main_thread():
            self._take_signals()
        return self

    def __exit__(self, *exception) -> None:
        self._open.close()

    def _take_signals(self) -> None:
        for number in SIGNALS:
            self._open.callback(signal.signal, number, signal.signal(number, self._note))
        if not self._exits:
            return
        # Python runs a signal handler only between two instructions of the main thread, and an instruction may take
        # minutes (a train step or a compilation). The number of a signal is written to this pipe at once, and a thread
        # reads the number.
        self._listener, pipe = socket.socketpair()
        pipe.setblocking(False)
        self._open.callback(pipe.close)  # ends the thread
        self._open.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(pipe.fileno(), warn_on_full_buffer=False))
        threading.Thread(target=self._listen, daemon=True).start()

    @contextlib.contextmanager
    def at_a_step(self) -> Iterator[None]:
        """Runs the body, which runs train steps. Until the body ends, signals are only recorded."""
        self._later = True
        try:
            yield
        finally:
            self._later = False

    @contextlib.contextmanager
    def nothing_to_lose(self, done: str) -> Iterator[Callable[[], None]]:
        """Runs the body, which a signal may stop at once, because the next start of the run repeats the body's work.

        For example, the body evaluates a saved step. This context manager is used inside `at_a_step`. Yields a
        function, which the body must call before each batch. A signal stops a single process at once. With several
        processes, if one process receives a signal, all processes stop one batch later, in the yielded function. `done`
        describes the work and the saved step, for the log.
        """
        if jax.process_count() > 1:
            greatest = Greatest()
            yield lambda: self.leave(done) if greatest(float(self.requested))[0] else None
            return
        self._later, self._done = False, done
        try:
            if self._received:
                self.leave(done)
            yield lambda: None
        finally:
            self._later = True

    @property
    def requested(self) -> bool:
        """Returns whether a signal has asked the run to save a checkpoint and stop."""
        return self._received is not None

    def leave(self, done: str) -> None:
        """Logs which signal stopped the run, and the text `done`. Raises SystemExit with the status STOPPED."""
        by = signal.Signals(self._received).name if self._received else 'a signal to another process'
        log.info('stopped by %s: %s. Run the same command again to resume', by, done)
        sys.exit(STOPPED)

    def _note(self, number: int, _) -> None:
        if self._received is None:
            self._received, self._first = number, time.monotonic()
            if not self._later:
                self.leave(self._done)
        elif not self._exits and time.monotonic() - self._first >= SAME_REQUEST:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        with self._listener:
            first = None  # the time of the first signal
            while number := self._listener.recv(1):  # empty when the pipe is closed
                if number[0] in SIGNALS:
                    if first is None:
                        first, name = time.monotonic(), signal.Signals(number[0]).name
                        with contextlib.suppress(OSError):  # the terminal may be closed
                            os.write(2, f'\n{name}: stopping. Send the signal again after {SAME_REQUEST:.0f} seconds '
                                        'to stop immediately\n'.encode())
                    elif time.monotonic() - first >= SAME_REQUEST:
                        os._exit(128 + number[0])  # the status that a shell reports
