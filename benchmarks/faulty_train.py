"""Runs train.py with a fault, for benchmarks/processes.py: python faulty_train.py FAULT RECORD [FLAG ...]

RECORD is a file. Each save appends a JSON line to RECORD, {"step": ..., "shards": {array and index: SHA-256}}, with the
shards of the state that this process holds. FAULT is a JSON object with any of these fields:

    kill_in_save: STEP    this process gets SIGKILL while the checkpoint of this step is written
    signal_at: STEP       this process gets SIGTERM in this step
    hide: STEP            this process does not see the checkpoint of this step, as on a network file system with delay
    slow_compile: S       compiling the train step takes S seconds longer, unless it is in the compilation cache
"""

import hashlib
import json
import os
import pathlib
import runpy
import signal
import sys
import threading
import time

fault, record = json.loads(sys.argv[1]), sys.argv[2]
sys.argv[:3] = ['train.py']
sys.path.insert(0, os.getcwd())

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax._src import compiler  # noqa: E402

from run_directory.checkpoints import Checkpoints  # noqa: E402
from training.compiled import Compiled  # noqa: E402


def shards(state) -> dict[str, str]:
    return {f'{jax.tree_util.keystr(path)} {shard.index}': hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
            for path, leaf in jax.tree_util.tree_leaves_with_path(state) for shard in leaf.addressable_shards}


def kill_in_save(folder, step) -> None:
    while not any(path.name.startswith(str(step)) for path in folder.glob('*')):
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)


def patched(kind, name):
    """Returns a decorator for functions that run before the method `name` of the class `kind`.

    The decorated function gets the positional arguments of the method. The method gets all arguments.
    """
    method = getattr(kind, name)

    def replace(before):
        def call(self, *arguments, **named):
            before(self, *arguments)
            return method(self, *arguments, **named)

        setattr(kind, name, call)
        return before

    return replace


@patched(Checkpoints, 'save')
def recorded(self, step, state, *_):
    with open(record, 'a', encoding='utf-8') as file:
        file.write(json.dumps({'step': step, 'shards': shards(state)}) + '\n')
    if step == fault.get('kill_in_save'):
        threading.Thread(target=kill_in_save, args=(self._folder, step), daemon=True).start()


@patched(Compiled, 'train')
def signalled(_, state, *__):
    if int(state.step) + 1 == fault.get('signal_at'):
        os.kill(os.getpid(), signal.SIGTERM)


if 'hide' in fault:
    listed = pathlib.Path.iterdir
    pathlib.Path.iterdir = lambda self: (
        path for path in listed(self) if (self.name, path.name) != ('checkpoints', str(fault['hide'])))

if 'slow_compile' in fault:
    compiled = compiler.backend_compile_and_load

    def slow(backend, module, *arguments):
        if 'step' in str(module.operation.attributes['sym_name']):
            time.sleep(fault['slow_compile'])
        return compiled(backend, module, *arguments)

    compiler.backend_compile_and_load = slow

runpy.run_path('train.py', run_name='__main__')
