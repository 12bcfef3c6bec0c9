"""The class of the cases in the tables, and a bench that runs the cases."""

import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from configs.options import flatten

ROOT = Path(__file__).parents[2]
PIPES = ('_CHECKPOINT_METADATA', 'progress/metadata', 'state/_METADATA', 'state/_sharding', 'state/manifest.ocdbt',
         'state/array_metadatas/process_0', 'state/new')  # paths in a checkpoint that may be pipes
SECONDS = 300  # time limit of a case
GONE, FOLDER, FIFO, LOOP, NULL = 'is not there', 'is a folder', 'is a fifo', 'is a link to itself', 'is /dev/null'


class Case(NamedTuple):
    """A mistake of a user and its expected outcome.

    Attributes:
      arguments: the command line; `Bench.fill` explains {here}, {run}, {new}, {data}, {root} and {same}.
      expected: texts that stderr must contain.
      files: {path below {here}: content}. The content is text, bytes, a constant such as GONE, or a function of the
        previous content.
      status: the exit status.
      stdin: the standard input.
      environment: environment variables, in addition to the variables of the tests.
      alone: whether a new Python process runs the case, because Python reads some variables when it starts.
    """
    arguments: str
    expected: str | tuple[str, ...]
    files: Mapping[str, str | bytes | Callable[[bytes], bytes] | list] = {}
    status: int = 2
    stdin: bytes = b''
    environment: Mapping[str, str] = {}
    alone: bool = False


def without(*names):
    """Returns a function that removes names from a JSON file."""
    return lambda content: json.dumps({name: value for name, value in json.loads(content).items()
                                       if name not in names}).encode()


def with_values(**values):
    """Returns a function that changes values of a JSON file. The keyword model__d_model stands for d_model in model."""
    def changed(content):
        found = json.loads(content)
        for name, value in values.items():
            *parents, last = name.split('__')
            place = found
            for parent in parents:
                place = place[parent]
            place[last] = value
        return json.dumps(found).encode()
    return changed


def cut(content):
    """Returns the first half of the content."""
    return content[:len(content) // 2]


def flipped(content):
    """Returns the content with inverted bits in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes(byte ^ 0xff for byte in content[middle:middle + 8]) + content[middle + 8:]


def zipped(text):
    return gzip.compress(text if isinstance(text, bytes) else text.encode())


class Bench:
    """A bench that runs cases. It has a folder for common files, and a server for each script."""

    def __init__(self, folder: Path):
        self.folder, self._server, self._count = folder, Server({'HOME': str(folder / 'home')}), 0
        with tarfile.open(ROOT / 'tests/runs/first.tar.gz') as archive:
            archive.extractall(folder / 'first', filter='data')
        self._change_config(folder / 'first/run', data__dir=str(folder / 'first/data'), cache_dir=str(folder / 'cache'))

    def _change_config(self, run, **values):
        (run / 'config.json').write_bytes(with_values(**values)((run / 'config.json').read_bytes()))

    def train(self, name: str, arguments: str) -> None:
        """Trains a run. The tables refer to this run as {name}."""
        out = self.folder / name
        command = [part.format(new=out, cache=self.folder / 'cache', root=ROOT) for part in shlex.split(arguments)]
        status = self._server.run('train', command, ROOT, {}, os.devnull, self.folder / 'training', 300)
        assert status == 0, Path(f'{self.folder}/training.stderr').read_text()

    def fill(self, text: str, here: Path, quote: Callable[[str], str] = str) -> str:
        """Replaces the names in braces in `text`. `quote` is applied to paths.

        {here}: the folder of the case; {run}: a copy of a finished translation run in this folder; {digits} and
        {letters}: copies of the runs that `train` made; {new}: a path without files; {data}: copies of text files;
        {root}: the repository; {same}: the flags with which {run} was trained; {text}: the same flags for {data}.
        """
        names = {'here': here, 'new': here / 'new', 'root': ROOT, 'cache': self.folder / 'cache'}
        for name, original in (('run', 'first/run'), ('data', 'first/data'), ('digits', 'digits'),
                               ('letters', 'letters')):
            names[name] = here / name
            if f'{{{name}}}' in text and not names[name].exists():
                shutil.copytree(self.folder / original, names[name])
        if '{text}' in text and not names['data'].exists():
            shutil.copytree(self.folder / 'first/data', names['data'])
        config = flatten(ConfigDict(json.loads((self.folder / 'first/run/config.json').read_text())))
        flags = [f'--config={ROOT}/configs/base.py', *(f'--config.{key}={value}' for key, value in config.items())]
        return text.format(**{name: quote(str(path)) for name, path in names.items()}, same=shlex.join(flags),
                           text=shlex.join([*flags, f'--config.data.dir={here}/data']))

    def check(self, script: str, case: Case) -> None:
        """Runs a case and checks its outcome."""
        self._count += 1
        here = self.folder / f'case{self._count}'
        here.mkdir()
        arguments = shlex.split(self.fill(case.arguments, here, shlex.quote))
        for name, content in case.files.items():
            if (original := name.partition('/')[0]) in ('run', 'data', 'digits', 'letters'):
                self.fill(f'{{{original}}}', here)
            place(here / name, content)
        (self.folder / 'stdin').write_bytes(case.stdin)
        out = self.folder / f'case{self._count}.out'
        asked = arguments, here, dict(case.environment), self.folder / 'stdin', out, SECONDS
        status = (alone(script, *asked) if case.alone else self._server.run(script, *asked))
        stderr = Path(f'{out}.stderr').read_text(errors='replace')
        assert status == case.status and 'Traceback' not in stderr, f'{status}: {stderr[-2000:]}'
        for part in (case.expected,) if isinstance(case.expected, str) else case.expected:
            assert self.fill(part, here) in stderr, stderr[-2000:]
        assert status or 'nan' not in Path(f'{out}.stdout').read_text(errors='replace')
        assert not (here / 'new').exists() or 'new' in case.files
        shutil.rmtree(here, ignore_errors=True)

    def close(self) -> None:
        self._server.close()


def place(path: Path, content) -> None:
    """Writes `content` to a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content = content(path.read_bytes())
    if isinstance(content, str) and content not in (GONE, FOLDER, FIFO, LOOP, NULL):
        content = content.encode()
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == FOLDER:
        path.mkdir()
    elif content == FIFO:
        os.mkfifo(path)
    elif content == LOOP:
        path.symlink_to(path.name)
    elif content == NULL:
        path.symlink_to('/dev/null')


class Server:
    """A running process of tests/bad_inputs/server.py."""

    def __init__(self, environment: Mapping[str, str]):
        self._process = subprocess.Popen([sys.executable, '-m', 'tests.bad_inputs.server'], cwd=ROOT,
                                         env={**os.environ, **environment}, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)

    def run(self, script, arguments, cwd, environment, stdin, out, seconds) -> int | str:
        asked = {'script': script, 'arguments': [os.fsencode(each).hex() for each in arguments], 'cwd': str(cwd),
                 'environment': environment, 'stdin': str(stdin), 'out': str(out), 'seconds': seconds}
        self._process.stdin.write(json.dumps(asked) + '\n')
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(600)


def alone(script, arguments, cwd, environment, stdin, out, seconds) -> int | str:
    """Runs a script in a new Python process, and returns its exit status."""
    command = [f'{ROOT}/{script}.py'] if '.' not in script else ['-m', script]
    with (open(stdin, 'rb') as given, open(f'{out}.stdout', 'wb') as stdout, open(f'{out}.stderr', 'wb') as stderr):
        try:
            return subprocess.run([sys.executable, *command, *arguments], cwd=cwd if '.' not in script else ROOT,
                                  env={**os.environ, **environment}, stdin=given, stdout=stdout, stderr=stderr,
                                  timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            return 'timeout'
