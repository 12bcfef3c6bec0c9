"""The token store of documents: the decoded documents are unchanged, and the documents are read only once."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs.tasks import TOKENIZERS
from input_pipeline.token_store import (
    document_tokenizers,
    open_document_store,
)
from input_pipeline.windows import WindowPlan
from runtime.errors import UserError
from tests.input_pipeline.helpers import SETTINGS, stores

DOCUMENTS = ['', *(f'def f{number}():\n    return "é"  # {number}\n' for number in range(50)), ' \n', 'long\n' * 5000]


class ListedDocuments:
    """Documents from a list, which they can be read from `readings` times."""

    def __init__(self, documents, readings=1000):
        self._documents, self._readings = documents, readings

    def documents(self, split):
        assert self._readings > 0, 'read again'
        self._readings -= 1
        return iter(self._documents)

    def fingerprint(self, split):
        return {'name': 'listed', 'split': split}


def learn_documents(documents, cache, **options):
    return document_tokenizers(documents, ConfigDict(SETTINGS | options), cache)


@pytest.mark.parametrize('kind', TOKENIZERS)
def test_documents_go_round(kind, tmp_path, logged):
    tokenizers = learn_documents(ListedDocuments(DOCUMENTS), tmp_path, kind=kind)
    assert list(tokenizers) == ['text']
    store = open_document_store(ListedDocuments(DOCUMENTS), 'train', tokenizers, tmp_path)
    kept = [text for text in DOCUMENTS if text.strip()]
    rows = [store.tokens('text', row) for row in range(len(store))]
    assert [tokenizers['text'].decode(row) for row in rows] == kept
    assert store.lengths('text').tolist() == [len(row) for row in rows]
    assert store.at('text', store.lengths('text')[:3].cumsum()).tolist() == [row[0] for row in rows[1:4]]
    assert store.stats == {
        'documents': len(kept), 'dropped_empty': 2, 'text_tokens': sum(map(len, rows)),
        'characters': sum(map(len, kept)), 'bytes': sum(len(text.encode()) for text in kept)}
    counts = f'{sum(map(len, kept))} characters in {sum(map(len, rows))} tokens; dropped 2 documents without text'
    assert f'train: 51 documents, {counts}' in logged.text


def test_documents_are_read_and_learned_from_once(tmp_path):
    documents = ListedDocuments(DOCUMENTS, readings=2)
    for _ in range(2):
        tokenizers = learn_documents(documents, tmp_path)
        store = open_document_store(documents, 'train', tokenizers, tmp_path)
    assert len(store) == 51 and len(stores(tmp_path)) == 1
    assert len(list((tmp_path / 'tokenizers').iterdir())) == 1


def test_each_tokenizer_and_each_split_has_its_own_store(tmp_path):
    documents = ListedDocuments(['abc\n', 'cab\n'])
    learned = [learn_documents(documents, tmp_path, kind=kind) for kind in ('char', 'byte')]
    for tokenizers in learned:
        store = open_document_store(documents, 'train', tokenizers, tmp_path)
        assert tokenizers['text'].decode(store.tokens('text', 0)) == 'abc\n'
    open_document_store(documents, 'test', learned[0], tmp_path)
    assert len(stores(tmp_path)) == 3


def test_windows_of_a_store_on_disk(tmp_path):
    tokenizers = learn_documents(ListedDocuments(DOCUMENTS), tmp_path, kind='byte')
    store = open_document_store(ListedDocuments(DOCUMENTS), 'train', tokenizers, tmp_path)
    plan = WindowPlan(store, rows=4, context=64, packing='contiguous', seed=None)
    targets = np.concatenate([plan.batch(step)['targets'].ravel() for step in range(len(plan))])
    text = tokenizers['text'].decode(targets)
    assert text == ''.join(DOCUMENTS[1:-2] + DOCUMENTS[-1:])
    assert (plan.characters, plan.bytes) == (len(text), len(text.encode()))


@pytest.mark.parametrize('documents', [[], ['', ' \n']])
def test_no_documents(documents, tmp_path):
    with pytest.raises(UserError, match='the training split has no text: .*listed'):
        learn_documents(ListedDocuments(documents), tmp_path)
    tokenizers = learn_documents(ListedDocuments(DOCUMENTS), tmp_path)
    with pytest.raises(UserError, match=rf'the test split is empty: {len(documents)} documents without .*listed'):
        open_document_store(ListedDocuments(documents), 'test', tokenizers, tmp_path)


def test_failed_build_of_documents_leaves_nothing(tmp_path):
    def broken():
        yield from DOCUMENTS
        raise UserError('x.txt:3: not UTF-8')

    tokenizers = learn_documents(ListedDocuments(DOCUMENTS), tmp_path)
    with pytest.raises(UserError, match='x.txt:3'):
        open_document_store(ListedDocuments(broken()), 'train', tokenizers, tmp_path)
    assert stores(tmp_path) == []
