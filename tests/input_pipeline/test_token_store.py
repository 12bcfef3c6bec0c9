"""The token store: decoded rows are unchanged, a store is built once, and an incomplete store is never opened."""

import errno
import fcntl
import json
import os
import pathlib
import pickle
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from ml_collections import ConfigDict

from input_pipeline import builds
from input_pipeline.sources import TextCorpus
from input_pipeline.token_store import (
    SIDES,
    TokenStore,
    open_store,
    tokenizers_for,
)
from input_pipeline.tokenizer import ByteTokenizer, VocabularyTooLarge
from runtime import folders
from runtime.errors import UserError
from tests.input_pipeline.helpers import SETTINGS, stores

ROOT = pathlib.Path(__file__).parents[2]
PAIRS = [(f'the number {number}', f'le nombre {number} \u00a0écrit') for number in range(50)]


class Listed:
    """A corpus from a list of pairs, which it can be read from `readings` times."""

    def __init__(self, pairs, name='listed', readings=1000):
        self._pairs, self._name, self._readings = pairs, name, readings

    def pairs(self, split):
        assert self._readings > 0, 'read again'
        self._readings -= 1
        return iter(self._pairs)

    def fingerprint(self, split):
        return {'name': self._name, 'split': split}


def learn(corpus, cache, **options):
    return tokenizers_for(corpus, ConfigDict(SETTINGS | options), cache)


@pytest.fixture(scope='module')
def tokenizers(tmp_path_factory):
    return learn(Listed(PAIRS), tmp_path_factory.mktemp('tokenizers'))


def texts(store, tokenizers):
    """The pairs of a store, decoded."""
    return [tuple(tokenizers[side].decode(store.tokens(side, row)) for side in SIDES) for row in range(len(store))]


def test_content_goes_round(tokenizers, tmp_path):
    store = open_store(Listed(PAIRS), 'train', tokenizers, 64, tmp_path)
    assert texts(store, tokenizers) == PAIRS
    for side in SIDES:
        lengths = [len(store.tokens(side, row)) for row in range(len(store))]
        assert store.lengths(side).tolist() == lengths
        assert store.stats[f'{side}_tokens'] == sum(lengths)


def test_empty_and_long_pairs_are_dropped_and_counted(tokenizers, tmp_path, logged):
    left_out = [('', 'vide'), ('blank', ' \t\u00a0'), ('', ''), ('long ' * 99, 'longue'), ('long', 'longue ' * 99)]
    store = open_store(Listed([*left_out[:2], *PAIRS, *left_out[2:]]), 'train', tokenizers, 64, tmp_path)
    assert texts(store, tokenizers) == PAIRS
    assert (store.stats['pairs'], store.stats['dropped_empty'], store.stats['dropped_long']) == (len(PAIRS), 3, 2)
    assert 'train: 50 pairs' in logged.text
    assert 'dropped 3 pairs with an empty side, and 2 with more than 64 tokens, including the end token' in logged.text


def test_max_length_counts_the_end_token(tokenizers, tmp_path):
    longest = max(len(tokenizers[side].encode(text)) for side, text in zip(SIDES, PAIRS[0], strict=True))
    assert len(open_store(Listed(PAIRS[:1]), 'train', tokenizers, longest + 1, tmp_path)) == 1
    with pytest.raises(UserError):
        open_store(Listed(PAIRS[:1]), 'train', tokenizers, longest, tmp_path)


@pytest.mark.parametrize('pairs', [[], [('', '')], [('', 'vide'), ('long ' * 99, 'longue')]])
def test_empty_split(tokenizers, tmp_path, pairs):
    message = 'the test split is empty: .* pairs with an empty side .* config.data.max_length=64 .*listed'
    for _ in range(2):  # built, and opened again
        with pytest.raises(UserError, match=message):
            open_store(Listed(pairs), 'test', tokenizers, 64, tmp_path)


@pytest.mark.parametrize('pairs', [[], [('', ' ')]])
@pytest.mark.parametrize('joint', [True, False])
def test_no_text_to_learn_from(tmp_path, pairs, joint):
    with pytest.raises(UserError, match='the training split has no text: .*listed'):
        learn(Listed(pairs), tmp_path, joint=joint)


def test_second_opening_reads_nothing_again(tokenizers, tmp_path):
    corpus = Listed(PAIRS, readings=2)
    learned = [learn(corpus, tmp_path)['source'].model for _ in range(2)]
    opened = [texts(open_store(corpus, 'train', tokenizers, 64, tmp_path), tokenizers) for _ in range(2)]
    assert learned[0] == learned[1] and opened[0] == opened[1] == PAIRS


def test_joint_and_separate_vocabularies(tmp_path):
    joint, separate = (learn(Listed(PAIRS), tmp_path, joint=joint) for joint in (True, False))
    assert joint['source'] is joint['target']
    assert separate['source'].model != separate['target'].model
    assert 'é' not in ''.join(separate['source'].pieces(range(300)))
    assert 'é' in ''.join(separate['target'].pieces(range(300)))
    assert 'é' in ''.join(joint['source'].pieces(range(300)))


def test_a_size_that_both_vocabularies_allow_is_named(tmp_path):
    corpus = Listed([(f'{7 ** number}', 'the target is always equal') for number in range(50)])
    with pytest.raises(VocabularyTooLarge) as raised:
        learn(corpus, tmp_path, joint=False, vocab_size=9000)
    tokenizers = learn(corpus, tmp_path, joint=False, vocab_size=raised.value.most)
    assert {len(tokenizer) for tokenizer in tokenizers.values()} == {raised.value.most}


def test_each_split_limit_tokenizer_and_text_has_its_own_store(tokenizers, tmp_path):
    other = learn(Listed(PAIRS), tmp_path, vocab_size=290)
    for corpus, split, tokenizer, limit in [
            (Listed(PAIRS), 'train', tokenizers, 64), (Listed(PAIRS), 'test', tokenizers, 64),
            (Listed(PAIRS), 'train', tokenizers, 32), (Listed(PAIRS), 'train', other, 64),
            (Listed(PAIRS, 'other'), 'train', tokenizers, 64)]:
        open_store(corpus, split, tokenizer, limit, tmp_path)
    assert len(stores(tmp_path)) == 5


def test_changed_or_reversed_files_give_another_store(tokenizers, tmp_path):
    def opened(*languages):
        corpus = TextCorpus(tmp_path, *languages, {'train': 'train'})
        return texts(open_store(corpus, 'train', tokenizers, 64, tmp_path / 'cache'), tokenizers)

    (tmp_path / 'train.en').write_text('one\ntwo\n')
    (tmp_path / 'train.fr').write_text('un\ndeux\n')
    assert opened('en', 'fr') == [('one', 'un'), ('two', 'deux')]
    assert opened('fr', 'en') == [('un', 'one'), ('deux', 'two')]
    os.utime(tmp_path / 'train.en', (1, 1))
    opened('en', 'fr')
    assert len(stores(tmp_path / 'cache')) == 2
    (tmp_path / 'train.en').write_text('one\nthree\n')
    assert opened('en', 'fr') == [('one', 'un'), ('three', 'deux')]


def test_failed_build_leaves_nothing(tokenizers, tmp_path):
    class Broken(Listed):
        def pairs(self, split):
            yield from PAIRS
            raise UserError('line 51 is broken')

    with pytest.raises(UserError, match='line 51'):
        open_store(Broken(PAIRS), 'train', tokenizers, 64, tmp_path)
    assert stores(tmp_path) == []
    assert texts(open_store(Listed(PAIRS), 'train', tokenizers, 64, tmp_path), tokenizers) == PAIRS
    with pytest.raises(UserError, match='line 51'):
        learn(Broken(PAIRS), tmp_path)
    assert list(tmp_path.glob('tokenizers/*')) == []


# Both processes are in the middle of learning, and then of writing, before one of the two continues.
BUILDER = """
import json, pathlib, sys, time
from ml_collections import ConfigDict
from input_pipeline.token_store import open_store, tokenizers_for

cache, me, settings, pairs = pathlib.Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])

class Meeting:
    def pairs(self, split):
        (cache / f'{split}.{me}').touch()
        until = time.monotonic() + 300
        while len(list(cache.glob(f'{split}.*'))) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        yield from map(tuple, pairs)

    def fingerprint(self, split):
        return {'split': split}

corpus = Meeting()
store = open_store(corpus, 'test', tokenizers_for(corpus, ConfigDict(settings), cache), 64, cache)
print(len(store), int(store.lengths('target').sum()))
"""


def test_two_processes_at_once_both_succeed(tmp_path):
    arguments = [json.dumps(SETTINGS), json.dumps(PAIRS)]
    both = [subprocess.Popen([sys.executable, '-c', BUILDER, tmp_path, me, *arguments], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE) for me in 'ab']
    printed = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert printed[0] == printed[1] and printed[0].startswith('50 ')
    assert len(list(tmp_path.glob('t*.[ab]'))) == 4  # they did meet, twice
    assert len(stores(tmp_path)) == len(list((tmp_path / 'tokenizers').iterdir())) == 1


# Reports that it is in the middle of writing, and then waits.
STUCK = """
import pathlib, sys, time
from input_pipeline.token_store import open_store
from input_pipeline.tokenizer import ByteTokenizer

cache = pathlib.Path(sys.argv[1])

class Endless:
    def pairs(self, split):
        yield from [('one', 'un')] * 10
        print('here', flush=True)
        time.sleep(600)

    def fingerprint(self, split):
        return {'name': 'listed', 'split': split}

open_store(Endless(), 'train', dict.fromkeys(('source', 'target'), ByteTokenizer()), 64, cache)
"""


def test_what_a_killed_build_left_is_never_opened_and_removed_by_the_next(tmp_path, logged):
    tokenizers = dict.fromkeys(SIDES, ByteTokenizer())
    started = [subprocess.Popen([sys.executable, '-c', STUCK, tmp_path], cwd=ROOT, stdout=subprocess.PIPE)
               for _ in range(2)]
    dead, alive = started
    try:
        for process in started:
            assert process.stdout.readline() == b'here\n'
        assert len(stores(tmp_path)) == 2
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert len(stores(tmp_path)) == 2
        store = open_store(Listed(PAIRS), 'train', tokenizers, 64, tmp_path)
        assert texts(store, tokenizers) == PAIRS
        left = stores(tmp_path)
        assert len(left) == 2 and '.building-' not in left[0].name and '.building-' in left[1].name
        assert 'which a killed process had left' in logged.text
        assert sorted(path.name for path in left[0].iterdir()) == [
            'checksums.json', 'source.offsets.npy', 'source.tokens', 'stats.json', 'target.offsets.npy',
            'target.tokens', 'verified.json']
    finally:
        for process in started:
            process.kill()
            process.communicate()
    open_store(Listed(PAIRS, 'other'), 'train', tokenizers, 64, tmp_path)
    assert len(stores(tmp_path)) == 2 and not any('.building-' in path.name for path in stores(tmp_path))


def test_a_build_that_another_removes_before_it_is_locked_begins_anew(tokenizers, tmp_path, monkeypatch):
    made, make = [], folders.tempfile.mkdtemp

    def make_and_lose(**options):
        made.append(make(**options))
        if len(made) < 3:
            os.rmdir(made[-1])
        return made[-1]

    monkeypatch.setattr(folders.tempfile, 'mkdtemp', make_and_lose)
    assert texts(open_store(Listed(PAIRS), 'train', tokenizers, 64, tmp_path), tokenizers) == PAIRS
    assert len(made) == 3 and len(stores(tmp_path)) == 1


def test_a_file_system_without_locks_will_do(tokenizers, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(fcntl, 'flock', no_locks)
    unfinished = tmp_path / 'tokens' / 'x.building-abcdefgh'
    unfinished.mkdir(parents=True)
    (unfinished / 'lock').touch()  # every builder makes it, also where it cannot be locked
    assert texts(open_store(Listed(PAIRS), 'train', tokenizers, 64, tmp_path), tokenizers) == PAIRS
    assert len(stores(tmp_path)) == 2  # another process may be building this folder


def test_a_cache_that_cannot_be_written_is_explained(tokenizers, tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match=r'cannot be written: .*Set config\.cache_dir'):
        open_store(Listed(PAIRS), 'train', tokenizers, 64, tmp_path / 'file')


def test_a_full_disk_is_explained_and_leaves_nothing(tokenizers, tmp_path):
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, old[1]))  # no file may be larger
        with pytest.raises(UserError, match='cannot be written: .*too large'):
            open_store(Listed(PAIRS * 40), 'train', tokenizers, 64, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert stores(tmp_path) == []
    assert len(open_store(Listed(PAIRS * 40), 'train', tokenizers, 64, tmp_path)) == 2000


class Canary:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self._path,)


def damage_file(path, damage, canary):
    """Changes a file of a store."""
    if damage == 'pickle':
        path.write_bytes(pickle.dumps(Canary(canary)))
    elif damage == 'object array':
        np.save(path.with_suffix('.npy'), np.array([Canary(canary)]), allow_pickle=True)
        path.with_suffix('.npy').rename(path)
    elif damage == 'truncated':
        path.write_bytes(path.read_bytes()[:-4])
    elif damage == 'other type':
        np.save(path.with_suffix('.npy'), np.zeros(51, np.float32))
        path.with_suffix('.npy').rename(path)
    elif damage == 'missing':
        path.unlink()
    elif damage == 'empty':
        path.write_bytes(b'')
    else:
        content, stat = bytearray(path.read_bytes()), path.stat()
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize('damage', ['pickle', 'object array', 'truncated', 'other type', 'missing', 'empty', 'one bit'])
@pytest.mark.parametrize('name', ['source.offsets.npy', 'target.tokens', 'stats.json', 'checksums.json'])
def test_a_damaged_store_is_built_again_and_runs_nothing(name, damage, tokenizers, tmp_path, logged):
    open_store(Listed(PAIRS), 'train', tokenizers, 64, tmp_path)
    damage_file(stores(tmp_path)[0] / name, damage, tmp_path / 'canary')
    logged.clear()
    assert texts(open_store(Listed(PAIRS), 'train', tokenizers, 64, tmp_path), tokenizers) == PAIRS
    assert 'is damaged: ' in logged.text and name in logged.text and 'The folder is built again' in logged.text
    assert not (tmp_path / 'canary').exists() and len(stores(tmp_path)) == 1
    logged.clear()
    open_store(Listed(PAIRS, readings=0), 'train', tokenizers, 64, tmp_path)
    assert 'damaged' not in logged.text


@pytest.mark.parametrize('damage', ['truncated', 'missing', 'empty', 'one bit'])
def test_a_damaged_tokenizer_in_the_cache_is_learned_again(damage, tmp_path, logged):
    first = learn(Listed(PAIRS), tmp_path)['source']
    path, = (tmp_path / 'tokenizers').glob('*/tokenizer.model')
    damage_file(path, damage, tmp_path / 'canary')
    assert learn(Listed(PAIRS), tmp_path)['source'].model == first.model
    assert 'tokenizer.model' in logged.text and 'The folder is built again' in logged.text


def test_a_damaged_folder_that_cannot_be_removed_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
    folder = tmp_path / 'folder'

    def build():
        builds.build_once(folder, lambda temporary: (temporary / 'file').write_text('content'))

    def refused(*_):
        raise PermissionError('no permission')

    build()
    (folder / 'file').write_text('changed')
    monkeypatch.setattr(builds, '_remove', refused)
    with pytest.raises(UserError, match=f'{folder} cannot be written: no permission. .*cache_dir'):
        builds.open_built(folder, build, lambda folder, _: (folder / 'file').read_text())


def test_a_folder_that_another_process_removes_is_built_again(tmp_path):
    folder, removals = tmp_path / 'folder', iter((True, False))

    def build():
        builds.build_once(folder, lambda temporary: (temporary / 'file').write_text('content'))
        if next(removals):  # as another process does if it has found the folder damaged
            shutil.rmtree(folder)

    assert builds.open_built(folder, build, lambda folder, _: (folder / 'file').read_text()) == 'content'
    assert [path.name for path in tmp_path.iterdir()] == ['folder']


def test_a_folder_whose_content_does_not_fit_is_built_again_even_if_the_checksums_match(tmp_path):
    folder, contents = tmp_path / 'folder', iter(('bad', 'good'))

    def build():
        builds.build_once(folder, lambda temporary: (temporary / 'file').write_text(next(contents)))

    def read(folder, thorough):
        content = (folder / 'file').read_text()
        if thorough and content == 'bad':
            raise UserError('the content is bad')
        return content

    build()
    (folder / builds.VERIFIED).unlink()  # as in a copied folder
    assert builds.open_built(folder, build, read) == 'good'


def test_a_full_disk_leaves_no_part_of_the_file_that_marks_a_verified_folder(tmp_path, monkeypatch):
    folder = builds.build_once(tmp_path / 'folder', lambda temporary: (temporary / 'file').touch())
    (folder / builds.VERIFIED).unlink()

    def full(*_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(builds.os, 'fsync', full)
    assert builds.verify(folder)
    assert sorted(path.name for path in folder.iterdir()) == [builds.CHECKSUMS, 'file']


def test_a_copied_store_is_verified_once(tokenizers, tmp_path, monkeypatch):
    open_store(Listed(PAIRS), 'train', tokenizers, 64, tmp_path / 'one')
    shutil.copytree(tmp_path / 'one', tmp_path / 'two')
    verified, checksum = [], builds.file_checksum
    monkeypatch.setattr(builds, 'file_checksum', lambda path: verified.append(path.name) or checksum(path))
    for _ in range(2):
        assert len(open_store(Listed(PAIRS, readings=0), 'train', tokenizers, 64, tmp_path / 'two')) == len(PAIRS)
    assert sorted(verified) == ['source.offsets.npy', 'source.tokens', 'stats.json', 'target.offsets.npy',
                                'target.tokens']


@pytest.mark.parametrize('change, reason', [
    ({'stats.json': lambda stats: json.dumps({'pairs': -1}).encode()}, 'stats.json'),
    ({'stats.json': lambda stats: stats.replace(b'"pairs": 50', b'"pairs": 49')}, 'does not fit'),
    ({'source.offsets.npy': lambda offsets: offsets[:-16] + offsets[-8:] + offsets[-16:-8]}, 'does not fit'),
    ({'source.offsets.npy': lambda offsets: offsets[:-24] + offsets[-16:-8] + offsets[-24:-16] + offsets[-8:]},
     'source.offsets.npy contains decreasing offsets'),
    ({'target.tokens': lambda tokens: tokens[:-4] + b'\xff\xff\0\0'}, 'target.tokens contains the token 65535')])
def test_files_of_a_store_that_contradict_each_other_are_refused(change, reason, tokenizers, tmp_path):
    """Whoever changes the checksums, too, is not believed."""
    open_store(Listed(PAIRS), 'train', tokenizers, 64, tmp_path)
    for name, changed in change.items():
        path = stores(tmp_path)[0] / name
        path.write_bytes(changed(path.read_bytes()))
    with pytest.raises(UserError, match=reason):
        TokenStore(path.parent).check_rows(tokenizers)
