"""Functions that all commands use: for errors, files, flags, locks, processes, signals, executors and caches."""

import time

STARTED = time.perf_counter()  # the commands import this package first, about 0.1 s after the start of the process
