"""The settings of the process of a script."""

import os
import platform
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from runtime.process_setup import signals_delayed, unless_left_behind, use_huge_pages
from runtime.stopping import SAME_REQUEST

ROOT = Path(__file__).parents[2]


def run(script):
    return subprocess.run([sys.executable, '-c', script], cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_garbage_is_not_collected_during_slow_imports():
    script = '''
import gc
from runtime.process_setup import slow_imports
with slow_imports():
    print(gc.isenabled())
print(gc.isenabled(), gc.get_freeze_count() > 1_000)'''
    assert run(script).stdout == 'False\nTrue True\n'


def test_a_signal_takes_effect_after_slow_imports_although_another_thread_could_receive_it():
    script = '''
import os, signal, sys, threading, time
from runtime.process_setup import slow_imports
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
with slow_imports():
    with slow_imports():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        print('one')
    print('two')
print('not stopped')'''
    done = run(script)
    assert (done.returncode, done.stdout) == (75, 'one\ntwo\n')


def test_a_signal_that_is_ignored_stays_ignored_while_signals_are_delayed():
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with signals_delayed():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, handler)


def test_an_interrupt_that_was_lost_is_sent_again_as_a_new_request(monkeypatch):
    timers = []
    monkeypatch.setattr(threading.Timer, 'start', lambda timer: timers.append(timer))
    unless_left_behind(print)(types.SimpleNamespace(exc_type=KeyboardInterrupt))
    assert [timer.interval > SAME_REQUEST and timer.daemon for timer in timers] == [True]


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='only glibc has these tunables')
def test_memory_that_a_thread_frees_is_not_had_from_linux_anew_unless_the_user_has_tunables():
    """As a train step does, in a thread of XLA's: a large block, touched, freed, and again."""
    script = """
import ctypes, os, resource, threading
from runtime.process_setup import use_huge_pages
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # as on a machine of two cores
use_huge_pages()
libc, size = ctypes.CDLL(None), ctypes.c_size_t(100_000_000)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def step():
    block = libc.malloc(size)
    ctypes.memset(block, 1, size.value)
    libc.free(block)

def steps():
    step()
    began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - began)

threading.Thread(target=steps).start()
"""

    def faults(**tunables):
        environment = {name: value for name, value in os.environ.items() if name != 'GLIBC_TUNABLES'} | tunables
        return int(subprocess.run([sys.executable, '-c', script], cwd=ROOT, env=environment, check=True,
                                  capture_output=True, text=True, timeout=600).stdout)

    assert faults() < 50 < 400 < faults(GLIBC_TUNABLES='glibc.malloc.hugetlb=1')  # of 2 MB: at least 47 a step


@pytest.mark.parametrize('cores, one_arena', [(1, True), (2, True), (3, False), (16, False)])
def test_many_cores_do_not_share_one_lock_of_malloc(cores, one_arena, monkeypatch):
    """One arena for all threads was measured only on two cores."""
    started = []
    monkeypatch.setattr(sys, 'platform', 'linux')
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(os, 'execv', lambda *_: started.append(os.environ['GLIBC_TUNABLES']))
    monkeypatch.setenv('GLIBC_TUNABLES', '')  # so that it is put back
    monkeypatch.delenv('GLIBC_TUNABLES')
    use_huge_pages()
    assert ['glibc.malloc.arena_max=1' in each.split(':') for each in started] == [one_arena]
    assert 'glibc.malloc.hugetlb=1' in started[0].split(':')
