"""Files with one changed field or byte: each is refused with its name, or gives the same model as before.

Some fields have no redundancy: the format cannot reveal that they have changed. They are named in NAMED.
"""

import collections
import functools
import json
import os

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip('safetensors', reason="it is in the extra 'interchange', and is not installed here")

from input_pipeline.token_store import SIDES, open_store
from input_pipeline.tokenizer import ByteTokenizer
from interchange import huggingface
from interchange.folders import read_models
from run_directory import trained
from runtime.errors import UserError
from tests.input_pipeline.test_token_store import PAIRS, Listed, texts
from tests.interchange.small_models import LINES, write_small

# What changes a model without a trace elsewhere in the folder.
NAMED = {
    # Functions and rates that have no arrays; the numbers of the special tokens; the longest text of a model without
    # a table of positions.
    'marian/config.json': {'activation_function', 'scale_embedding', 'dropout', 'attention_dropout',
                           'activation_dropout', 'max_position_embeddings', 'pad_token_id', 'eos_token_id',
                           'decoder_start_token_id'},
    # The same; the heads divide arrays whose shapes do not depend on their number.
    'gpt2/config.json': {'activation_function', 'layer_norm_epsilon', 'attn_pdrop', 'n_head', 'bos_token_id',
                         'eos_token_id', 'pad_token_id'},
    'llama/config.json': {'hidden_act', 'rms_norm_eps', 'rope_parameters', 'attention_dropout', 'bos_token_id',
                          'eos_token_id', 'pad_token_id', 'max_position_embeddings'},
    'marian/vocab.json': 'the texts of the pieces',
    'marian/tokenizer_config.json': set(),
    'llama/tokenizer_config.json': {'add_bos_token'},
    # SentencePiece and tokenizers have no checksums of pieces and scores.
    'marian/source.spm': 'the file', 'llama/tokenizer.json': 'the file',
    # Our own files have checksums; so have the arrays that this project exports.
    'own/config.json': set(), 'own/data/sizes.json': set(), 'own/data/text.model': set(),
    'own/model.safetensors': set(), 'gpt2/model.safetensors': set(), 'marian/model.safetensors': set(),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.sampled_from([300, 1024, 2 ** 31, -2 ** 63, 10 ** 40]) |
    st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3)
CHANGES = st.tuples(st.sampled_from(['value', 'remove', 'rename', 'nudge']), st.integers(0, 2 ** 20), JSON)
counts = collections.Counter()
seen = collections.defaultdict(set)  # the names of NAMED that have changed a model


@pytest.fixture(scope='module')
def originals(tmp_path_factory):
    """The root of the folders, and a function that writes a small model there and returns its content.

    Modules are traced once, and nothing waits for a disk.
    """
    root, traced = tmp_path_factory.mktemp('originals'), {}

    def shapes(module, task, sizes):
        if (key := repr((module, task))) not in traced:
            traced[key] = trained.parameter_shapes(module, task, sizes)
        return traced[key]

    @functools.cache
    def expected(name):
        write_small(name, root / name)
        return content(root / name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, 'parameter_shapes', shapes)
        patch.setattr(os, 'fsync', lambda _: None)
        yield root, expected


def content(folder):
    """Returns the config, the sizes, the bytes of the parameters and the tokens of some lines of a folder."""
    model = read_models([folder], 'best')
    return (json.dumps(model.config.to_dict(), sort_keys=True, default=str), repr(model.sizes),
            [leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(model.params))],
            [tokenizer.encode(line) for tokenizer in model.tokenizers.values() for line in LINES[:3]])


def with_change(text, change):
    """JSON with one changed field, and the name of the field."""
    how, place, value = change
    found = json.loads(text)
    names = sorted(found)
    if not names:
        return text, ''
    name = names[place % len(names)]
    if how == 'remove':
        del found[name]
    elif how == 'rename':
        found[name + 'x'] = found.pop(name)
    elif how == 'nudge' and type(found[name]) in (int, float):
        found[name] += 1 if place % 2 else -1
    else:
        found[name] = value
    return json.dumps(found).encode(), name


def with_other_byte(content, place, value):
    place %= len(content)
    return content[:place] + bytes([content[place] ^ (value or 1)]) + content[place + 1:]


def changed_names(before, after):
    """The fields in which two texts of JSON differ; all, if one is not JSON."""
    before, after = json.loads(before), json.loads(after)
    return {name for name in before.keys() | after.keys()
            if repr(before.get(name)) != repr(after.get(name)) or (name in before) != (name in after)}


def check(originals, file, changed):
    """Reads a folder with another content of a file; counts the outcome."""
    root, expected = originals
    name, path = file.split('/')[0], root / file
    original = path.read_bytes()
    path.write_bytes(changed)
    try:
        outcome = 'equal' if content(root / name) == expected(name) else 'different'
    except UserError as error:
        assert str(root / name) in str(error), str(error)
        outcome = 'refused, with the file' if str(path) in str(error) else 'refused, with the folder and the part'
    finally:
        path.write_bytes(original)
    if outcome == 'different' and NAMED[file]:
        outcome = 'different, as named'
        if isinstance(NAMED[file], set):
            names = changed_names(original, changed)
            # A misspelt field is a missing one, which has the library's default.
            assert names & json.loads(original).keys() <= NAMED[file], names
            seen[file] |= names & NAMED[file]
    counts[file, outcome] += 1
    assert outcome != 'different', (file, changed[:2000])


def examples(count):
    return settings(max_examples=count, deadline=None, database=None, derandomize=True,
                    suppress_health_check=[*HealthCheck])


FIELDS = [file for file in NAMED if file.endswith('.json') and not file.startswith('own')]


def fields(originals, file, count):
    root, expected = originals
    expected(file.split('/')[0])
    text = (root / file).read_bytes()

    @examples(count)
    @given(CHANGES)
    def run(change):
        check(originals, file, with_change(text, change)[0])

    run()


def other_bytes(originals, file, count, end=1.0):
    root, expected = originals
    expected(file.split('/')[0])
    whole = (root / file).read_bytes()
    last = max(1, int(len(whole) * end))

    @examples(count)
    @given(st.integers(0, last - 1), st.integers(1, 255))
    def run(place, value):
        check(originals, file, with_other_byte(whole, place, value))

    run()


def store_bytes(folder, count):
    """Any byte of any file of a token store: it is built again, or the byte was not used."""
    tokenizers = dict.fromkeys(SIDES, ByteTokenizer())

    def opened():
        return texts(open_store(Listed(PAIRS), 'train', tokenizers, 64, folder), tokenizers)

    opened()
    store, = (folder / 'tokens').iterdir()

    @examples(count)
    @given(st.integers(0, 6), st.integers(0, 2 ** 20), st.integers(1, 255))
    def run(number, place, value):
        files = sorted(store.iterdir())
        path = files[number % len(files)]
        before = path.stat().st_ino
        path.write_bytes(with_other_byte(path.read_bytes(), place, value))
        assert opened() == PAIRS
        counts['store', 'equal' if path.exists() and path.stat().st_ino == before else 'built again'] += 1

    run()


# Marian, which takes the longest to trace, is in the slow test.
@pytest.mark.parametrize('file', [file for file in FIELDS if not file.startswith('marian')])
def test_a_changed_field_is_refused_or_changes_nothing(originals, file):
    fields(originals, file, 10)


@pytest.mark.parametrize('file', [file for file in NAMED if not file.startswith('marian')])
def test_a_changed_byte_is_refused_or_changes_nothing(originals, file):
    other_bytes(originals, file, 3)


def test_a_changed_byte_of_a_store_is_repaired(tmp_path):
    store_bytes(tmp_path, 20)


@pytest.mark.slow
def test_1_500_changes_are_refused_or_change_nothing(originals, tmp_path):
    counts.clear()
    for file in FIELDS:
        fields(originals, file, 90)
    for file in NAMED:
        other_bytes(originals, file, 45)
    for file in ('gpt2/model.safetensors', 'marian/model.safetensors', 'own/model.safetensors'):
        other_bytes(originals, file, 50, end=0.3)  # the header
    store_bytes(tmp_path, 250)
    for (file, outcome), count in sorted(counts.items()):
        print(f'{count:6} {file}: {outcome}')
    for file, names in sorted(seen.items()):
        print(f'unseen {file}: {sorted(NAMED[file] - names)}')
    assert counts.total() >= 1_500 and not any(outcome == 'different' for _, outcome in counts)
