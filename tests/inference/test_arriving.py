"""Arriving lines: a slow pipe gives single lines, a fast pipe gives large batches, and a prompt gives typed lines."""

import collections
import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inference import columns
from inference.arriving import Arriving
from inference.options import SearchOptions
from inference.outputs import Output
from tests.inference.test_text import Parrot

ROOT = Path(__file__).parents[2]
ANSWERING = '''
import sys
from inference.arriving import input_lines
from inference.options import SearchOptions
from inference.outputs import Hypothesis, Output
from inference.text import TextModel
from analysis import answering
from analysis.request import Request
import command_line

class Shout(TextModel):
    """A model whose answers contain the number of lines per batch."""
    def __init__(self): pass
    def respond(self, lines, options, *, first=0):
        return [Output(line, [], [Hypothesis(f'{len(lines)} {line.upper()}', [], 0.0, 0.0)]) for line in lines]
    attention = axes = examples = text_names = read_and_written = None

Shout.__abstractmethods__ = frozenset()

def main():
    answering.answer_file(Request(input=sys.argv[-1] if sys.argv[-1] == '-' else ''), Shout(), SearchOptions(), None)

path = sys.argv.pop()
sys.argv[1:] = []
command_line.read_command_line()
sys.argv.append(path)
command_line.run_script(main)
'''


class Slow(Arriving):
    """Lines of a slow pipe. At None, no further line has arrived when `ready` is called."""

    def __init__(self, *lines):
        self._waiting = collections.deque(lines)

    def __next__(self):
        while self._waiting:
            if (line := self._waiting.popleft()) is not None:
                return line
        raise StopIteration

    def ready(self, deadline):
        return not self._waiting or self._waiting[0] is not None


def start(path, **streams):
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONSTARTUP'}
    return subprocess.Popen([sys.executable, '-c', ANSWERING, path], cwd=ROOT, env=environment | streams.pop('env', {}),
                            **streams)


@pytest.mark.slow
def test_a_slow_pipe_is_answered_line_by_line_and_a_fast_one_in_batches():
    process = start('-', stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        for text, answer in ((b'one\n', b'1 ONE\n'), (b'\n', b'1 \n'), ('\u00e4\r\n'.encode(), b'1 \xc3\x84\n')):
            process.stdin.write(text)
            process.stdin.flush()
            assert select.select([process.stdout], [], [], 120)[0], 'no answer'
            assert process.stdout.readline() == answer
        process.stdin.write(b'half')  # no line yet
        process.stdin.flush()
        assert not select.select([process.stdout], [], [], 0.5)[0]
        process.stdin.write(b' a line\n' + b''.join(b'%d\n' % number for number in range(5000)) + b'no end')
        out, stderr = process.communicate(timeout=600)
    finally:
        process.kill()
    lines = out.decode().splitlines()
    assert process.returncode == 0, stderr.decode()
    assert [line.partition(' ')[2] for line in lines] == ['HALF A LINE', *map(str, range(5000)), 'NO END']
    assert max(int(line.partition(' ')[0]) for line in lines) == 4096


def test_a_document_of_a_slow_pipe_is_answered_when_a_blank_line_or_the_end_follows_it(monkeypatch):
    monkeypatch.setattr(columns, 'input_lines', lambda path: Slow(
        '', 'one', 'two', '', ' ', 'half', None, 'a document', '', 'next', '', None, 'last', 'line'))
    model = Parrot()
    chunks = model.respond_all(columns.input_texts('-', 'blank_line'), SearchOptions(),
                               lambda chunk, options, first: [Output(text, [], []) for text in chunk])
    assert [[output.source for output in chunk] for chunk in chunks] == [
        ['one\ntwo'], ['half\na document', 'next'], ['last\nline']]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('last, status', [(b'\x04', 0), (None, 130)])
def test_a_terminal_prompts_and_ends_cleanly(last, status, tmp_path):
    ours, its = pty.openpty()
    process = start('typed', stdin=its, stdout=its, stderr=subprocess.PIPE, start_new_session=True,
                    env={'XDG_CACHE_HOME': str(tmp_path), 'TERM': 'dumb'})
    os.close(its)

    def read_until(text):
        seen, deadline = b'', time.monotonic() + 300
        while text not in seen:
            assert select.select([ours], [], [], max(0, deadline - time.monotonic()))[0], seen
            seen += os.read(ours, 4096)

    try:
        for word in b'one', b'two':
            os.write(ours, word + b'\n')
            read_until(b'1 ' + word.upper())
        deadline = time.monotonic() + 300
        while last and process.poll() is None and time.monotonic() < deadline:
            os.write(ours, last)  # what comes before the prompt, while the terminal is in another mode, is lost
            time.sleep(0.5)
        while not last and process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)  # readline may ignore a signal while it prepares the terminal
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
        stderr = process.communicate(timeout=600)[1]
    finally:
        process.kill()
        os.close(ours)
    assert process.returncode == status and b'Traceback' not in stderr, stderr.decode()
    assert (tmp_path / 'allyouneed' / 'typed_lines').read_text().split() == ['one', 'two']
