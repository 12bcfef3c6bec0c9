"""A process that imports all libraries once and runs each command line in a fork, because imports take seconds.

    python -m tests.bad_inputs.server

A line of JSON on stdin is a command line: {'script', 'arguments', 'cwd', 'environment', 'stdin', 'out', 'seconds'}. The
output of the script goes to the files OUT.stdout and OUT.stderr. The server writes a line to stdout: the exit status,
or 'timeout' if the script has not ended after `seconds` seconds. Only the forks open JAX's devices.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable


def serve() -> None:
    """Runs the command lines until stdin ends."""
    importlib.import_module('command_line')  # before JAX, as in the scripts
    for heavy in ('analysis.answering', 'analysis.plots', 'input_pipeline.problems', 'training.loop',
                  'training.profiling'):
        importlib.import_module(heavy)  # scripts import these modules in main(), which takes seconds
    answers, sys.argv[1:] = os.fdopen(os.dup(1), 'w'), []
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            run(asked)
        answers.write(f'{json.dumps(status(child, asked["seconds"]))}\n')
        answers.flush()
    os._exit(0)  # without a cleanup of the imports, which takes a second


def run(asked: dict) -> None:
    """Runs a command line in this fork, which imports the script: several scripts define the same flags."""
    from command_line import run_script
    module = importlib.import_module(asked['script'])
    become(module, asked)
    leave(lambda: run_script(module.main, takes={'tools.show_run': 'RUN'}.get(asked['script'])))


def become(module, asked: dict) -> None:
    """Gives this fork the environment, the folder and the files of a process that a shell has started."""
    os.setsid()
    streams = [os.open(asked['stdin'], os.O_RDONLY),
               *(os.open(f'{asked["out"]}.{name}', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                 for name in ('stdout', 'stderr'))]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    # Opened like Python opens them. The files stay open until the process ends.
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate('rww'))  # noqa: SIM115
    os.environ.update(asked['environment'])
    os.chdir(asked['cwd'])
    sys.argv[:] = [module.__file__, *(os.fsdecode(bytes.fromhex(each)) for each in asked['arguments'])]


def leave(run: Callable[[], None]) -> None:
    """Runs the script and ends the process. Skips the cleanup of the imports, which takes longer than most cases."""
    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def status(child: int, seconds: float) -> int | str:
    """Returns the exit status of a fork. After `seconds` seconds, kills the fork and its children."""
    deadline = time.monotonic() + seconds
    while True:
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(code)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 'timeout'
        time.sleep(0.01)


if __name__ == '__main__':
    serve()
