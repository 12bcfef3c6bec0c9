"""Systems for the tests of benchmarks.turns. Processes import this file, so it imports no heavy library."""

import os
import time

from benchmarks.turns import Ready
from runtime.errors import UserError


def logging_system(path, name, seconds):
    def call():
        with open(path, 'a') as log:
            log.write(name)
        time.sleep(seconds)

    return Ready(call, {'process': os.getpid(), 'tunables': os.environ.get('GLIBC_TUNABLES')}, answer=[[1, 2, 3]])


def impossible_system():
    raise UserError('this cannot be')


def dying_system():
    os._exit(3)
