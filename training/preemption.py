"""Stopping on request: SIGTERM, which schedulers send before they kill, and SIGINT, which is Ctrl-C."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import jax

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = os.EX_TEMPFAIL  # 75, "try again": tells a scheduler that this is no failure

log = logging.getLogger('allyouneed.train')


class StopSignals:
    """While this is open, the first signal stops the run as soon as nothing is lost; the second, at once.

    Before the loop, and inside `nothing_to_lose`, that is immediately: SystemExit(75) is raised in the main thread.
    Within `at_a_step` the signal is only noted, and the loop looks at `requested` after each step.
    """

    def __init__(self):
        self._received, self._later, self._done = None, False, 'nothing is lost'

    def __enter__(self) -> 'StopSignals':
        # Python runs a handler between two instructions of the main thread only, and one step or compilation may take
        # minutes. The number of the signal is in this pipe at once, for a thread that waits for the second one.
        self._listener, self._pipe = socket.socketpair()
        self._pipe.setblocking(False)
        self._former = {number: signal.signal(number, self._note) for number in SIGNALS}
        self._former_pipe = signal.set_wakeup_fd(self._pipe.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        signal.set_wakeup_fd(self._former_pipe)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._pipe.close()  # ends the thread

    @contextlib.contextmanager
    def at_a_step(self) -> Iterator[None]:
        """Within this, a signal is only noted."""
        self._later = True
        try:
            yield
        finally:
            self._later = False

    @contextlib.contextmanager
    def nothing_to_lose(self, done: str) -> Iterator[None]:
        """Within this, inside `at_a_step`, a signal stops the run: the next start repeats what it interrupts.

        `done` says what is saved. Of several processes, none leaves alone, since the others would wait for it: they
        go on to the next step.
        """
        if jax.process_count() > 1:
            yield
            return
        self._later, self._done = False, done
        try:
            if self._received:
                self.leave(done)
            yield
        finally:
            self._later = True

    @property
    def requested(self) -> bool:
        """Whether the run is to be saved and left."""
        return self._received is not None

    def leave(self, done: str) -> None:
        """Raises SystemExit with the status STOPPED, after saying why."""
        by = signal.Signals(self._received).name if self._received else 'a signal to another process'
        log.info('stopped by %s: %s; run the same command again to go on', by, done)
        sys.exit(STOPPED)

    def _note(self, number: int, _) -> None:
        if self._received is None:
            self._received = number
            if not self._later:
                self.leave(self._done)

    def _listen(self) -> None:
        with self._listener:
            count = 0
            while number := self._listener.recv(1):  # nothing: the pipe is closed
                if number[0] in SIGNALS:
                    count += 1
                    if count == 2:
                        os._exit(128 + number[0])  # as a shell reports it
                    name = signal.Signals(number[0]).name
                    os.write(2, f'\n{name}: stopping; once more, and it is at once\n'.encode())
