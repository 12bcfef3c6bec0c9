"""The built-in corpus: texts as in CLDR, one target for each source, and the same corpus on every machine."""

import datetime
import json
import os
import pathlib
import random
import re
import subprocess
import sys

import pytest
from babel import Locale

from input_pipeline import builtin

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {'train': 1000, 'validation': 100, 'test': 100}


@pytest.fixture(scope='module')
def corpus():
    return builtin.make_corpus('en', 'fr', sizes=SMALL)


@pytest.fixture(scope='module')
def pairs(corpus):
    return [pair for split in corpus.values() for pair in split]


def test_date_as_cldr_writes_it():
    day = datetime.datetime(1922, 8, 25)
    assert builtin.write_date('full', None, day, Locale('en')) == 'Friday, August 25, 1922'
    assert builtin.write_date('full', None, day, Locale('fr')) == 'vendredi 25 août 1922'


def test_spaces_of_cldr_are_kept(pairs):
    characters = set(''.join(source + target for source, target in pairs))
    assert {'\u00a0', '\u202f'} <= characters
    assert not characters & set('\n\r\t\\')  # so a table of answers contains the unchanged sentences


def no_break(text):
    return '\u00a0' in text or '\u202f' in text


@pytest.mark.parametrize('share', [0.0, 0.25, 0.5, 1.0])
def test_a_share_of_the_sources_is_as_people_type(corpus, share):
    typed = builtin.with_plain_spaces(corpus, share, seed=0)
    for split, pairs in corpus.items():
        holding = plain = 0
        for (source, target), (there, same) in zip(pairs, typed[split], strict=True):
            assert same == target
            if no_break(source):
                holding, plain = holding + 1, plain + (not no_break(there))
                assert there in (source, source.replace('\u202f', ' ').replace('\u00a0', ' '))
            else:
                assert there == source
        assert holding and abs(plain - share * holding) <= 0.5


def test_the_sources_of_a_share_are_those_of_a_larger_one_too_and_follow_the_seed(corpus):
    def plain(share, seed=0):
        typed = builtin.with_plain_spaces(corpus, share, seed=seed)
        return {source for split, pairs in corpus.items()
                for (source, _), (there, _) in zip(pairs, typed[split], strict=True) if source != there}

    assert plain(0.3) < plain(0.5) and len(plain(0.5)) == len(plain(0.5, seed=1))
    assert plain(0.5) == plain(0.5) != plain(0.5, seed=1)


def test_no_source_becomes_another_by_its_spaces():
    pairs = [('4\u00a0J', 'a'), ('4 J', 'b'), ('5\u00a0J', 'c'), ('5\u202fJ', 'd'), ('6\u00a0J', 'e'), ('7 J', 'f')]
    corpus = {'train': pairs[:2], 'test': pairs[2:]}
    typed = builtin.with_plain_spaces(corpus, 1.0, seed=0)
    assert typed == {'train': pairs[:2], 'test': [*pairs[2:4], ('6 J', 'e'), ('7 J', 'f')]}


def test_sizes_lengths_and_disjoint_splits(corpus, pairs):
    assert {split: len(rows) for split, rows in corpus.items()} == SMALL
    assert len({source for source, _ in pairs}) == len(pairs)
    assert all(0 < len(text) <= builtin.LONGEST for pair in pairs for text in pair)


def test_depends_only_on_the_seed(corpus):
    # Another hash seed, time zone and system locale must not show.
    script = ('import json, sys; from input_pipeline import builtin; '
              f'json.dump(builtin.make_corpus("en", "fr", sizes={SMALL}), sys.stdout)')
    environment = {**os.environ, 'PYTHONHASHSEED': '12345', 'TZ': 'Asia/Tokyo', 'LC_ALL': 'de_DE.UTF-8'}
    output = subprocess.run([sys.executable, '-c', script], cwd=ROOT, env=environment, check=True,
                            capture_output=True, text=True).stdout
    assert {split: [tuple(pair) for pair in rows] for split, rows in json.loads(output).items()} == corpus


@pytest.mark.slow
def test_another_seed_gives_other_sentences(corpus):
    sizes = {'train': 50}
    drawn = [builtin.make_corpus(seed=seed, sizes=sizes)['train'] for seed in (1, -1)]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize('pattern', [
    r'^\w+day, \w+ \d+, \d{4}$', r'^\d+/\d+/\d\d$', r'\d:\d\d:\d\d\u202f[AP]M$', r'^in \d+ days?$', r' ago$',
    r'^[\d.,]+ (kilo|centi|milli)?(meter|gram|watt|liter)s?$', r'^[\d.,]+ (kg|km|cm|mm|g|mg|mL|W|kW)$',
    r'^[\d.,]+ euros?$', r'^€[\d,]+\.\d\d$', r'^[\d.]+%$',
    r'^\w+, \w+, and \w+$', r'^\w+ or \w+$', r'^.*\d.* – .*$', r'^\w.*: .*\d', r'^\w+, [\d,.]+ \w+'])
def test_each_kind_appears(pairs, pattern):
    assert any(re.search(pattern, source) for source, _ in pairs)


@pytest.mark.parametrize('source, target', [('en', 'de'), ('ja', 'de')])
def test_source_has_one_target(source, target):
    # Drawn without the corpus's own rejection of repeated sources: the kinds must settle it themselves.
    source, target = Locale(source), Locale(target)
    kinds, rng, target_of = builtin.usable_kinds(source, target), random.Random(0), {}
    for name in list(kinds) * 40:
        sentence = builtin.draw_sentence(rng, kinds, name, source)
        assert target_of.setdefault(sentence(source), sentence(target)) == sentence(target)


def test_two_digit_years_mean_one_year():
    for form in (('short', None), ('short', 'short')):
        rng = random.Random(0)
        years = {builtin.draw_moment(rng, form)[0].year for _ in range(2000)}
        assert min(years) >= 1951 and max(years) <= 2050


@pytest.mark.slow
@pytest.mark.parametrize('source, target', [('de', 'ja'), ('es', 'pt-BR'), ('en', 'en'), ('aa', 'bgc')])
def test_other_locales(source, target):
    # Afar and Haryanvi have neither currencies nor names in CLDR.
    corpus = builtin.make_corpus(source, target, sizes={'train': 40, 'test': 10})
    assert [len(rows) for rows in corpus.values()] == [40, 10]
    if source == target:
        assert all(text == translation for text, translation in corpus['train'])


@pytest.mark.parametrize('wrong, right', [('pt_BX', "'pt_BR'"), ('french', "'fr'"), ('', "'en'")])
def test_unknown_locale_names_its_neighbours(wrong, right):
    with pytest.raises(ValueError, match=f'Unknown locale .{wrong}.: .*{right}'):
        builtin.make_corpus('en', wrong)


def test_the_error_of_too_few_pairs_has_their_number(monkeypatch):
    monkeypatch.setattr(builtin, 'KINDS', {'territory': builtin.KINDS['territory']})
    with pytest.raises(ValueError, match=f'found {len(builtin.TERRITORIES)} unique pairs instead of 100'):
        builtin.make_corpus(sizes={'train': 90, 'test': 10})
