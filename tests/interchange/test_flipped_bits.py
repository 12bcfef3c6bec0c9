"""Flipped bits in the files of exports and imports, and kills while they are written: no wrong model is ever read."""

import collections
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('safetensors', reason="it is in the extra 'interchange', and is not installed here")

from interchange.export import export
from run_directory.records import RECIPE
from runtime.errors import UserError
from runtime.folders import UNFINISHED
from tests.interchange.small_models import write_small
from tests.interchange.test_changed_files import content
from training.imported import import_weights

ROOT = Path(__file__).parents[2]
# The config of a run may be edited, so it has no checksum.
WITHOUT_CHECKSUM = {'import': {RECIPE, 'config.json'}, 'export': set()}
KILLED = """
import itertools, os, random, signal, sys, time
from interchange.export import export
from training.imported import import_weights

root, random, parent = sys.argv[1], random.Random(0), os.getpid()
for number in range(20):  # JAX's devices are opened in the forks only
    kind = 'export' if number % 2 else 'import'
    first = f'{root}/{kind}-{number}-0'
    child = os.fork()
    if not child:
        for count in itertools.count():
            if os.getppid() != parent:
                os._exit(0)  # otherwise, the fork would fill the disk after the test has failed
            folder = f'{root}/{kind}-{number}-{count}'
            if kind == 'import':
                import_weights(f'{root}/small', folder)
            else:
                export(f'{root}/small', folder, 'safetensors')
    while not os.path.exists(first):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), 'the fork has ended'
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.5))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def write(kind, folder):
    write_small('gpt2', folder / 'small')
    if kind == 'import':
        import_weights(folder / 'small', folder / 'import')
    else:
        export(folder / 'small', folder / 'export', 'safetensors')
    return folder / kind


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['export', 'import'])
def test_40_flipped_bits_change_no_model(kind, tmp_path):
    folder, outcomes, chosen = write(kind, tmp_path), collections.Counter(), random.Random(0)
    expected = content(folder)
    files = [path for path in sorted(folder.rglob('*')) if path.is_file() and path.stat().st_size
             and str(path.relative_to(folder)) not in WITHOUT_CHECKSUM[kind]]
    for path in chosen.choices(files, [path.stat().st_size for path in files], k=40):
        whole = path.read_bytes()
        place = chosen.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << chosen.randrange(8)]) + whole[place + 1:])
        try:
            assert content(folder) == expected, (path, place)
            outcomes['equal'] += 1
        except UserError as error:
            assert str(folder) in str(error)
            outcomes['refused'] += 1
        path.write_bytes(whole)
    print(outcomes)
    assert outcomes['refused'] >= 10


@pytest.mark.slow
def test_20_kills_leave_complete_folders_or_none(tmp_path):
    expected = {kind: content(write(kind, tmp_path / kind)) for kind in WITHOUT_CHECKSUM}
    write_small('gpt2', tmp_path / 'root/small')
    subprocess.run([sys.executable, '-c', KILLED, tmp_path / 'root'], cwd=ROOT, check=True, timeout=1000)
    names = sorted(path.name for path in (tmp_path / 'root').iterdir() if path.name != 'small')
    complete = [name for name in names if UNFINISHED not in name]
    print(f'{len(complete)} complete folders, {len(names) - len(complete)} temporary ones')
    for name in complete:
        assert content(tmp_path / 'root' / name) == expected[name.partition('-')[0]]
    assert len(complete) >= 20
    # The next export removes the temporary folders.
    export(tmp_path / 'root/small', tmp_path / 'root/last', 'safetensors')
    assert not list((tmp_path / 'root').glob(f'*{UNFINISHED}*'))
