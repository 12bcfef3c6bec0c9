"""The automaton of words to avoid, against regular expressions and normalised words, in any vocabulary."""

import json
import re
import unicodedata

import numpy as np
import pytest

from inference.constraints import DEAD, Automaton
from inference.options import SearchOptions
from input_pipeline.tokenizer import EOS, UNK, ByteTokenizer, CharTokenizer
from runtime.errors import UserError
from tests.vocabularies import WORDS, vocabularies


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('kind', ['bpe', 'byte', 'unigram'])
def test_what_is_avoided_is_a_word_of_the_text_however_it_is_cut(kind):
    """Random tokens: the automaton and a regular expression on the decoded text agree."""
    tokenizer = vocabularies()[kind]
    avoid = 'Mann', 'guten  Tag', 'KÄSE', 'straße', 'x!', '9', 'caf\ufffd', 'x\ue000', '3\ue001'
    automaton = Automaton(avoid, tokenizer, False)
    letters = re.compile(r'(?<![^\W\d])(mann|guten\s+tag|käse|stra(ß|ss)e)(?![^\W\d])'
                         r'|(?<![^\W\d])(x!|caf\ufffd|x\ue000)', re.IGNORECASE)
    number = re.compile(r'(?<!\d)(9(?!\d)|3\ue001)')
    rng, counts = np.random.default_rng(1), {True: 0, False: 0}
    parts = [*WORDS, 'STRASSE', 'KÄSE', 'mAnn', 'man', 'n', ' ', ' ', '\u00a0', '.', '-', '9', '3', '_', 'x', '!', '…',
             'caf', '\ufffd', '\ue000', '\ue001']
    for _ in range(1500):
        text = ''.join(rng.choice(parts, rng.integers(1, 6)))
        tokens, cut = [], 0
        while cut < len(text):  # cut at random, so that words are written in many ways
            end = cut + int(rng.integers(1, 8))
            tokens += [token for token in tokenizer.encode(text[cut:end])]
            cut = end
        whole = tokenizer.decode(tokens)
        state = automaton.after(tokens)
        expected = bool(letters.search(whole) or number.search(whole))
        assert (state == DEAD or automaton.table[state, EOS] == DEAD) == expected, whole
        counts[expected] += 1
    assert min(counts.values()) > 100


def avoids(phrases, tokenizer):
    """A function of a text: whether an output cannot be the text."""
    automaton = Automaton(phrases, tokenizer, False)

    def avoided(text):
        state = automaton.after(tokenizer.encode(text))
        return state == DEAD or automaton.table[state, EOS] == DEAD

    return avoided


def test_forms_of_a_word():
    avoided = avoids(('naïve', 'groß', '猫', 'Straße', 'ना', 'नाम'), ByteTokenizer())
    for text in ('NAI\u0308VE', 'naïve', 'sehr GROSS', 'groẞ.', '黒い猫が', 'STRASSE', 'é naïve', '3naïve', 'naïve2',
                 'नाम।'):
        assert avoided(text), text
    for text in ('naive', 'naïves', 'grosse', 'größe', '黒い犬', 'Straßen', 'énaïve', 'naïve\u0301', '3', '',
                 'नामक', 'नाक'):
        assert not avoided(text), text


def char_tokenizer(text):
    return CharTokenizer(json.dumps({'kind': 'char', 'characters': ''.join(sorted({*text}))}).encode())


def test_ideographic_iteration_marks_and_zeros_do_not_make_words():
    avoided = avoids(['我々', '一〇'], char_tokenizer('我々Aは一〇5'))
    assert all(avoided(text) for text in ('我々', '我々A', '我々は', 'は我々', '我々々', '一〇5'))
    assert not avoided('我A々') and not avoided('〇一')


@pytest.mark.parametrize('phrase', [
    'ภาษา', 'ພາສາ', 'မြန်မာ', 'ꩡꩫ', 'ꧢꧣ', 'ខ្មែរ', 'かな', 'カナ', 'ｶﾅ', 'ㄅㄆ', 'ㆠㆡ', '漢字'])
def test_a_phrase_of_a_script_without_spaces_is_forbidden_inside_a_longer_text(phrase):
    other = phrase[0]  # a letter of the same script
    avoided = avoids([phrase], char_tokenizer(phrase))
    assert avoided(f'{other}{phrase}{other}') and avoided(phrase) and not avoided(other)


def test_a_prompt_with_a_word_to_avoid_may_begin_a_longer_phrase():
    tokenizer = char_tokenizer('New Yorkd')
    automaton = Automaton(['New', 'New York'], tokenizer, True)

    def may_end(prompt, output):
        state = automaton.after(tokenizer.encode(output), automaton.behind(tokenizer.encode(prompt)))
        return state != DEAD and state < automaton.ends

    assert not may_end('New ', 'York') and not may_end('New Yo', 'rk')
    assert may_end('New ', 'Yo') and may_end('New Yo', 'rd') and may_end('w ', 'York')


@pytest.mark.parametrize('kind', ['bpe', 'byte', 'char'])
def test_a_word_is_avoided_in_each_canonically_equivalent_order_of_its_marks(kind):
    """Random orders of marks: the automaton agrees with a comparison of normalised words."""
    phrases = ['q\u0307\u0323', '\u0645\u0651\u064e\u062f', '\u05e9\u05c1\u05b8\u05dd', 'e\u0323\u0301\u0302x', 'éa']
    words, extra = {unicodedata.normalize('NFD', phrase) for phrase in phrases}, 'aéx\u0307\u0323\u064e\u05b8'
    avoided = avoids(phrases, char_tokenizer(' ẹ'.join([*phrases, *words, extra])) if kind == 'char' else
                     vocabularies()[kind])
    rng, counts = np.random.default_rng(0), {True: 0, False: 0}

    def changed(word):
        word = word[0] + ''.join(rng.permutation([*word[1:]]))
        return word.replace('e\u0323', 'ẹ') + rng.choice(['', '', *extra])

    for _ in range(1000):
        text = ' '.join(map(changed, rng.choice([*phrases, *words], rng.integers(1, 4))))
        expected = not words.isdisjoint(unicodedata.normalize('NFD', text).split())
        assert avoided(text) == expected, ascii(text)
        counts[expected] += 1
    assert min(counts.values()) > 100


@pytest.mark.parametrize('tokenizer, allowed', [
    (char_tokenizer(' .𞤀𞤁𞤂𞤢𞤣'), ['𞤂𞤀𞤁', '𞤀𞤁𞤂', '𞤢𞤣𞤂.']), (ByteTokenizer(), ['𞤂𞤀𞤁'])], ids=['char', 'byte'])
def test_a_script_above_u_ffff_has_whole_words(tokenizer, allowed):
    avoided = avoids(['𞤀𞤁'], tokenizer)
    for text in ('𞤀𞤁', '𞤢𞤣', '𞤂 𞤀𞤁.'):
        assert avoided(text), text
    for text in allowed:
        assert not avoided(text), text


KANA = char_tokenizer('かがきぎ\u3099ハバパ')


@pytest.mark.parametrize('tokenizer, phrase, forbidden, allowed', [
    (KANA, 'かき', ['かき', 'がかき', 'かきか'], ['かぎ', 'がぎ', 'がき', 'かき\u3099か']),
    (KANA, 'かぎ', ['かぎ', 'かき\u3099', 'がかぎ'], ['かき', 'がぎ', 'がき']),
    (KANA, 'ハ', ['ハ', 'かハ'], ['バ', 'パ', 'かバ']),
    (char_tokenizer('ｶｷﾞ'), 'ｶｷ', ['ｶｷ', 'ﾞｶｷ', 'ｶｷﾞ'], ['ｶﾞｷ', 'ｷﾞ']),  # the half-width mark is a separate character
    (ByteTokenizer(), 'かき', ['かき', 'がかき', 'かきか'], ['かぎ', 'がぎ', 'がき', 'かぎか']),
])
def test_a_voiced_kana_is_another_character(tokenizer, phrase, forbidden, allowed):
    avoided = avoids([phrase], tokenizer)
    for text in forbidden + allowed:
        assert avoided(text) == (text in forbidden), text


@pytest.mark.slow
def test_what_is_avoided_where_characters_are_cut_into_bytes():
    """Random characters and bytes: the automaton and a regular expression on the decoded text agree."""
    phrases, first = ('من', 'नाम', 'নাম', 'name', '٣٤', '猫', 'q\ufffd'), UNK + 1
    automaton = Automaton(phrases, ByteTokenizer(), False)
    letter = r'[^\W\d\u0e00-\u0eff\u4e00-\u9fff\U00010000-\U0010ffff]'
    letter = rf'(?:{letter}|[\u064b-\u065f\u093e-\u094d\u09be-\u09cd])'  # marks are part of words, but not of \w
    avoided = re.compile(rf'(?<!{letter})(?:من|नाम|নাম|name)(?!{letter})|(?<!\d)٣٤(?!\d)|猫'
                         rf'|(?<!{letter})q\ufffd', re.IGNORECASE)
    parts = [part.encode() for part in (*phrases, *phrases, *'مكसéx،؟٣।×ไ“ 🙂𐐀Ａ한q\u00a0\u0650\u093e')]
    cut = [bytes([byte]) for byte in '٣猫।é🙂'.encode()]
    rng, counts = np.random.default_rng(0), {True: 0, False: 0}
    texts = ['من، او', 'من؟', '،من ', 'नाम।', 'নাম।', 'name×2', 'name٣ ', 'nameไทย', 'नामक', 'منه', 'name한', 'nameé']
    texts = [text.encode() for text in texts]
    for _ in range(2000):
        chosen = rng.integers(len(parts + cut), size=rng.integers(5))
        texts.append(b''.join([*map((parts + cut).__getitem__, chosen), parts[rng.integers(len(parts))]]))
    for text in texts:
        state = automaton.after(first + byte for byte in text)
        found, whole = state == DEAD or automaton.table[state, EOS] == DEAD, text.decode(errors='replace')
        assert found == bool(avoided.search(whole)), whole
        counts[found] += 1
    assert min(counts.values()) > 500


@pytest.mark.parametrize('avoid', ['one', ['  '], [''], [3], ['\ud800'], ['q' + 9 * '\u0307']])
def test_values_that_are_not_phrases_are_refused(avoid):
    with pytest.raises(UserError, match='avoid'):
        SearchOptions(avoid=avoid)


def test_a_phrase_with_exponentially_many_states_is_refused_early(monkeypatch):
    monkeypatch.setattr('inference.constraints.MAX_STATES', 100)
    with pytest.raises(UserError, match='the table for 1 phrases is too large'):
        Automaton(['a' * 100], ByteTokenizer(), True)
