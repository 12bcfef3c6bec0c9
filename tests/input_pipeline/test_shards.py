"""A large text gives the same token store, bit for bit, no matter which process builds which shard."""

import contextlib
import functools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from input_pipeline import shards
from input_pipeline.builds import VERIFIED, build_once
from input_pipeline.shards import build_together
from input_pipeline.sources import TextCorpus
from input_pipeline.stores import SIDES, write_documents, write_pairs
from input_pipeline.token_store import TokenStore
from input_pipeline.tokenizer import ByteTokenizer, train_tokenizer
from runtime.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
PAIRS = 4000


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Text files; some lines are empty, some too long, and a run of lines gives no token to a whole shard."""
    folder, rng = tmp_path_factory.mktemp('text'), random.Random(3)
    lines = [' '.join(rng.choices(['one', 'zwei', 'trois', 'четыре', '五'], k=rng.choice([0, 1, 5, 9, 40])))
             for _ in range(2 * PAIRS)]
    lines[1000:1400] = ['long ' * 99] * 400
    for name, part in (('en', lines[:PAIRS]), ('xx', lines[PAIRS:])):
        (folder / f'train.{name}').write_text('\n'.join(part) + '\n')
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A text of 20 kB is a large one."""
    monkeypatch.setattr(shards, 'LARGE', 2_000)
    monkeypatch.setattr(shards, 'SHARD', 10_000)


def parts(folder, max_length=60):
    corpus = TextCorpus(folder, 'en', 'xx', {'train': 'train'})
    return functools.partial(corpus.pairs, 'train'), functools.partial(
        write_pairs, tokenizers=dict.fromkeys(SIDES, ByteTokenizer()), max_length=max_length)


def contents(store):
    return {path.name: path.read_bytes() for path in store.iterdir() if path.name != VERIFIED}


def at_once(folder, where, *args):
    rows, write = parts(folder, *args)
    return contents(build_once(where, lambda temporary: write(rows(), temporary)))


# A process of a job.
BUILD = '''
import functools, os, pathlib, sys
from input_pipeline import shards
from tests.input_pipeline.test_shards import parts
shards.LARGE, shards.SHARD = 2_000, 10_000
shards.build_together(pathlib.Path(sys.argv[1]), *parts(pathlib.Path(sys.argv[2])))
'''


def process(store, folder):
    return subprocess.Popen([sys.executable, '-c', BUILD, store, folder], cwd=ROOT, stderr=subprocess.PIPE)


def test_all_cores_build_what_one_does(folder, tmp_path, monkeypatch):
    joined, join = [], shards.join
    monkeypatch.setattr(shards, 'join', lambda parts, where: joined.extend(parts) or join(parts, where))
    found = contents(build_together(tmp_path / 'store', *parts(folder)))
    assert found == at_once(folder, tmp_path / 'once') and len(joined) > 20
    assert set(found) == {'checksums.json', 'source.offsets.npy', 'source.tokens', 'stats.json', 'target.offsets.npy',
                          'target.tokens'}
    assert json.loads(found['stats.json'])['dropped_long'] >= 400
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith('store')] == ['store']
    assert len(TokenStore(tmp_path / 'store')) > 500


@pytest.mark.slow
def test_a_damaged_shard_of_an_interrupted_build_is_built_again(folder, tmp_path, monkeypatch, logged):
    def damage(parts):
        tokens = parts[1] / 'source.tokens'
        content = bytearray(tokens.read_bytes())
        content[5] ^= 1
        tokens.write_bytes(content)
        return remove(parts)

    remove = shards.remove_damaged
    monkeypatch.setattr(shards, 'remove_damaged', damage)
    assert contents(build_together(tmp_path / 'store', *parts(folder))) == at_once(folder, tmp_path / 'once')
    assert 'source.tokens does not match its checksum' in logged.text


def test_a_damaged_shard_is_built_again_before_the_shards_are_joined(folder, tmp_path, monkeypatch):
    """Builds all shards in this process, which is faster than starting workers."""
    calls = []

    def tokenise(place, rows, write):
        count = shards._build_all(place, functools.partial(shards._shards, rows, shards.SHARD), write)
        calls.append(count)
        if len(calls) == 1:
            tokens = place / '000001' / 'source.tokens'
            content = bytearray(tokens.read_bytes())
            content[5] ^= 1
            tokens.write_bytes(content)
        return [place / f'{number:06d}' for number in range(count)]

    monkeypatch.setattr(shards, 'SHARD', 100_000)
    monkeypatch.setattr(shards, '_tokenise', tokenise)
    assert contents(build_together(tmp_path / 'store', *parts(folder))) == at_once(folder, tmp_path / 'once')
    assert len(calls) == 2 and calls[0] > 1


def test_a_large_text_without_a_row_that_is_kept(folder, tmp_path):
    assert contents(build_together(tmp_path / 'store', *parts(folder, 2))) == at_once(folder, tmp_path / 'once', 2)


@pytest.mark.slow
def test_documents_too_and_subwords(folder, tmp_path):
    texts = (folder / 'train.en').read_text().splitlines()
    tokenizer = train_tokenizer(texts, kind='bpe', vocab_size=300, split_digits=False, normalization='identity')
    write = functools.partial(write_documents, tokenizer=tokenizer)
    rows = functools.partial(list, texts)
    found = contents(build_together(tmp_path / 'store', rows, write))
    assert found == contents(build_once(tmp_path / 'once', lambda temporary: write(texts, temporary)))


@pytest.mark.slow
def test_processes_of_a_job_build_together(folder, tmp_path):
    job = [process(tmp_path / 'store', folder) for _ in range(2)]
    for each in job:
        assert each.wait(600) == 0, each.stderr.read().decode()
    assert contents(tmp_path / 'store') == at_once(folder, tmp_path / 'once')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['once', 'store']


# Each file of this folder is imported by every process whose path begins with it.
WITHOUT_LOCKS = '''
import errno, fcntl
def flock(*_):
    raise OSError(errno.{}, 'flock does not work here')
fcntl.flock = flock
'''
# A process of a job that is slow: it waits until the other process has built the store and removed the shards.
SLOW = '''
import functools, pathlib, sys
from input_pipeline import shards
from tests.input_pipeline import test_shards
shards.LARGE, shards.SHARD = 2_000, 10_000
store, where = pathlib.Path(sys.argv[1]), sys.argv[3]
rows, write = test_shards.parts(pathlib.Path(sys.argv[2]))
if where == 'a worker':
    rows = functools.partial(test_shards.late_rows, store, rows)
elif where == 'joining':
    join = shards.join
    shards.join = lambda parts, folder: (test_shards.wait_for(store), join(parts, folder))
assert shards.build_together(store, rows, write) == store
'''


def wait_for(store):
    """Waits until the store is built and its shards are removed."""
    until = time.monotonic() + 300
    while not store.is_dir() or store.with_name(f'{store.name}.shards-10000').exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def late_rows(store, rows):
    for number, row in enumerate(rows()):
        if number == 500:  # in the middle of a shard, and after `build_together` has seen that the text is large
            wait_for(store)
        yield row


@pytest.mark.slow
@pytest.mark.parametrize('slow, error', [('a worker', 'ENOLCK'), ('joining', 'ENOTSUP'), ('neither', 'ENOLCK')])
def test_without_locks_the_slower_process_uses_the_store_of_the_faster_one(slow, error, folder, tmp_path):
    (tmp_path / 'site').mkdir()
    (tmp_path / 'site' / 'sitecustomize.py').write_text(WITHOUT_LOCKS.format(error))
    store = tmp_path / 'cache' / 'store'
    environment = os.environ | {'PYTHONPATH': str(tmp_path / 'site')}
    job = [subprocess.Popen([sys.executable, '-c', code, store, folder, slow], cwd=ROOT, stderr=subprocess.PIPE,
                            env=environment) for code in (SLOW, BUILD)]
    for each in job:
        assert each.wait(600) == 0, each.stderr.read().decode()
    assert contents(store) == at_once(folder, tmp_path / 'once')
    assert [path.name for path in (tmp_path / 'cache').iterdir()] == ['store']


def shards_in(folder):
    """Returns the shards and their times. Another process may remove them meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return {path: path.stat().st_mtime_ns for path in folder.glob('0*[0-9]')}
    return {}


def workers_of(pid):
    return [int(each) for each in pathlib.Path(f'/proc/{pid}/task/{pid}/children').read_text().split()]


@pytest.mark.skipif(sys.platform != 'linux', reason='looks for processes in /proc')
@pytest.mark.slow
@pytest.mark.parametrize('victim', ['a worker', 'the process'])
def test_a_killed_process_loses_only_one_shard(victim, folder, tmp_path):
    """At any moment of the kill, the next build or the remaining workers build the shard again."""
    rng = random.Random(victim)
    for attempt in range(2):
        store = tmp_path / str(attempt)
        building = process(store, folder)
        deadline = time.monotonic() + 300
        made = store.with_name(f'{attempt}.shards-10000')
        wanted = rng.randrange(1, 5)
        while building.poll() is None and len(shards_in(made)) < wanted and time.monotonic() < deadline:
            time.sleep(0.002)
        workers = workers_of(building.pid) if building.poll() is None else []
        kept = shards_in(made)
        if victim == 'the process':
            building.kill()
            building.wait()
            until = time.monotonic() + 120
            while any(os.path.exists(f'/proc/{each}') for each in workers):  # they do not outlive it
                assert time.monotonic() < until
                time.sleep(0.01)
            again = process(store, folder)
            assert again.wait(600) == 0, again.stderr.read().decode()
        else:
            for each in workers[:1]:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.kill(each, signal.SIGKILL)
            ended = building.wait(600)
            assert ended == 0 or len(workers) == 1, building.stderr.read().decode()
            if ended:
                assert process(store, folder).wait(600) == 0
        remaining = shards_in(made)
        assert all(remaining.get(path, when) == when for path, when in kept.items())
        assert contents(store) == at_once(folder, tmp_path / f'once-{attempt}')


def test_an_error_in_the_text_is_the_users_and_leaves_nothing(folder, tmp_path):
    lines = (folder / 'train.xx').read_bytes().split(b'\n')
    lines[3500] = b'caf\xe9'
    (tmp_path / 'text').mkdir()
    (tmp_path / 'text' / 'train.xx').write_bytes(b'\n'.join(lines))
    (tmp_path / 'text' / 'train.en').write_bytes((folder / 'train.en').read_bytes())
    with pytest.raises(UserError, match=r'train\.xx:3501: not UTF-8'):
        build_together(tmp_path / 'store', *parts(tmp_path / 'text'))
    assert [path.name for path in tmp_path.iterdir()] == ['text']


def test_an_error_reports_that_all_workers_were_killed(folder, tmp_path, monkeypatch):
    class Killed(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__([command[0], '-c', 'import os; os.kill(os.getpid(), 9)'], **options)

    monkeypatch.setattr(shards.subprocess, 'Popen', Killed)
    with pytest.raises(UserError, match='were killed, perhaps because there is too little memory'):
        build_together(tmp_path / 'store', *parts(folder))


def test_shards_that_another_process_removed_after_an_error_are_an_error(folder, tmp_path, monkeypatch):
    def removed(place, *_):
        place.rmdir()
        return []

    monkeypatch.setattr(shards, '_tokenise', removed)
    with pytest.raises(UserError, match='because another process found an error'):
        build_together(tmp_path / 'store', *parts(folder))
