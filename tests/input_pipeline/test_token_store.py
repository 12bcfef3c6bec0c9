"""The token store: what goes in comes out, once built it stays, and nothing half-built is ever opened."""

import json
import logging
import os
import pathlib
import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from errors import UserError
from input_pipeline import token_store
from input_pipeline.sources import TextCorpus
from input_pipeline.token_store import SIDES, open_store, tokenizers_for

ROOT = pathlib.Path(__file__).parents[2]
SETTINGS = {'kind': 'bpe', 'vocab_size': 300, 'split_digits': False, 'normalization': 'identity', 'joint': True}
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


@pytest.fixture
def logged(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger('allyouneed'), 'propagate', True)
    caplog.set_level(logging.INFO, 'allyouneed')
    return caplog


def texts(store, tokenizers):
    """The pairs of a store, decoded."""
    return [tuple(tokenizers[side].decode(store.tokens(side, row)) for side in SIDES) for row in range(len(store))]


def stores(cache):
    """The entries of the cache, whole or not."""
    return sorted((cache / 'tokens').iterdir())


def test_content_goes_round(tokenizers, tmp_path, monkeypatch):
    monkeypatch.setattr(token_store, 'CHUNK', 7)
    store = open_store(Listed(PAIRS), 'train', tokenizers, 64, tmp_path)
    assert texts(store, tokenizers) == PAIRS
    for side in SIDES:
        lengths = [len(store.tokens(side, row)) for row in range(len(store))]
        assert store.lengths(side).tolist() == lengths
        assert store.stats[f'{side}_tokens'] == sum(lengths)


def test_empty_and_long_pairs_are_dropped_and_counted(tokenizers, tmp_path, logged, monkeypatch):
    monkeypatch.setattr(token_store, 'CHUNK', 2)
    left_out = [('', 'vide'), ('blank', ' \t\u00a0'), ('', ''), ('long ' * 99, 'longue'), ('long', 'longue ' * 99)]
    store = open_store(Listed([*left_out[:2], *PAIRS, *left_out[2:]]), 'train', tokenizers, 64, tmp_path)
    assert texts(store, tokenizers) == PAIRS
    assert (store.stats['pairs'], store.stats['dropped_empty'], store.stats['dropped_long']) == (len(PAIRS), 3, 2)
    assert 'train: 50 pairs' in logged.text
    assert 'dropped 3 with an empty side, 2 longer than 64' in logged.text


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
    assert list((tmp_path / 'tokenizers').iterdir()) == []


# Both processes are in the middle of learning, and then of writing, before either goes on.
BUILDER = """
import json, pathlib, sys, time
from ml_collections import ConfigDict
from input_pipeline.token_store import open_store, tokenizers_for

cache, me, settings, pairs = pathlib.Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])

class Meeting:
    def pairs(self, split):
        (cache / f'{split}.{me}').touch()
        until = time.monotonic() + 30
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
