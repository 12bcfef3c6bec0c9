"""Stops a run on SIGTERM, which schedulers send before they kill a process, and on SIGINT (Ctrl-C)."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import jax

from runtime.agreement import Greatest

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = os.EX_TEMPFAIL  # 75: for a scheduler, the job has not failed and must be started again

log = logging.getLogger('allyouneed.train')


class StopSignals:
    """A handler of signals: the first one stops the run as soon as no work is lost, and the second one at once.

    Before the training loop, and inside `nothing_to_lose`, the first signal stops immediately: SystemExit(75) is raised
    in the main thread. Inside `at_a_step` the signal is only recorded, and the loop checks `requested` after each step.

    With exits=False, for notebooks, the second signal raises KeyboardInterrupt instead of ending the process. Outside
    the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self, *, exits: bool = True):
        self._received, self._later, self._done, self._exits = None, False, 'nothing is lost', exits
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
        # Python runs a handler only between two instructions of the main thread, and a step or a compilation may take
        # minutes. The number of a signal is written to this pipe at once, and a thread reads it.
        self._listener, pipe = socket.socketpair()
        pipe.setblocking(False)
        self._open.callback(pipe.close)  # ends the thread
        self._open.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(pipe.fileno(), warn_on_full_buffer=False))
        threading.Thread(target=self._listen, daemon=True).start()

    @contextlib.contextmanager
    def at_a_step(self) -> Iterator[None]:
        """Only records signals in the body."""
        self._later = True
        try:
            yield
        finally:
            self._later = False

    @contextlib.contextmanager
    def nothing_to_lose(self, done: str) -> Iterator[Callable[[], None]]:
        """Lets a signal stop the run in the body, inside `at_a_step`: the next start repeats the interrupted work.

        Yields a function to call before each batch of the work. Several processes stop in this function, all together,
        one batch after a signal to one of them. A single process stops at once. `done`, for the log, is the place of
        the stop and the step that is saved.
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
        """Returns whether the run should save and stop."""
        return self._received is not None

    def leave(self, done: str) -> None:
        """Logs the reason, and raises SystemExit with the status STOPPED."""
        by = signal.Signals(self._received).name if self._received else 'a signal to another process'
        log.info('stopped by %s: %s; run the same command again to resume', by, done)
        sys.exit(STOPPED)

    def _note(self, number: int, _) -> None:
        if self._received is None:
            self._received = number
            if not self._later:
                self.leave(self._done)
        elif not self._exits:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        with self._listener:
            count = 0
            while number := self._listener.recv(1):  # empty: the pipe is closed
                if number[0] in SIGNALS:
                    count += 1
                    if count == 2:
                        os._exit(128 + number[0])  # the status that a shell reports
                    name = signal.Signals(number[0]).name
                    os.write(2, f'\n{name}: stopping. Send it once more to stop at once\n'.encode())
