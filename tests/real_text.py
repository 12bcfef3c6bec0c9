"""Pieces of real text with characters that tokenizers treat specially: spaces, line ends, scripts, emoji."""

import functools
import os
import random
import sysconfig
from pathlib import Path

from input_pipeline.builtin import make_corpus
from input_pipeline.tokens import BOS, EOS
from tests.interchange.lines import mixed_lines, sentences

DATA = Path(os.environ.get('ALLYOUNEED_DATA', 'data'))
ODD = ['', ' ', '  ', '\n', '\t', '\r\n', ' a', 'a ', 'a  b', '\n    x', '\u00a0', '26\u00a0%', '88\u202f926,93',
       '\u2581', ' \u2581 a', '\ufffd', '\ufeff', '\u2028', '😀', '👩\u200d👩\u200d👧', 'e\u0301é', '漢字', '</s>',
       '<s>', '<0x41>', '\x00']


@functools.cache
def texts():
    """Returns {source: text} without the sources that are missing on this machine."""
    library = Path(sysconfig.get_paths()['stdlib'])
    code = '\n'.join((library / name).read_text('utf-8') for name in ('argparse.py', 'textwrap.py', 'json/decoder.py'))
    english, french = zip(*make_corpus(sizes={'validation': 1000})['validation'], strict=True)
    found = {'code': code, 'code with tabs': code.replace('    ', '\t').replace('\n', '\r\n'),
             'English': '\n'.join(english), 'French': '\n'.join(french),  # with no-break spaces
             'Multi30k': '\n'.join(sentences(DATA, 2000)), 'scripts and emoji': '\n'.join(mixed_lines(500))}
    if (shakespeare := DATA / 'tinyshakespeare' / 'input.txt').exists():
        found['Shakespeare'] = shakespeare.read_text('utf-8')
    return {source: text for source, text in found.items() if text}


def training_lines():
    """Returns lines of all sources except `scripts and emoji`, whose characters exceed a small vocabulary."""
    return [line for source, text in texts().items() if source != 'scripts and emoji'
            for line in text.split('\n')[:2000]]


def pieces(count, seed=0):
    """Returns `count` pieces of 1 to 80 characters from random sources. The first pieces are ODD."""
    rng, found = random.Random(seed), ODD[:count]
    while len(found) < count:
        text = rng.choice(list(texts().values()))
        begin = rng.randrange(len(text))
        found.append(text[begin:begin + rng.randint(1, 80)])
    return found


def assert_continued(tokenizer, count):
    """Checks that the text of a prompt and its continuation is the text of their tokens, for `count` pieces of text.

    The continuations are the tokens that follow in the text, random tokens, and the tokens of the whole piece.
    """
    rng = random.Random(1)
    for text in pieces(count):
        tokens, place = tokenizer.encode(text), rng.randint(0, len(text))
        prompt, before = text[:place], tokenizer.encode(text[:place])
        for after in tokens[len(before):], rng.choices(range(4, len(tokenizer)), k=5), tokens:
            whole, written = tokenizer.decode([*before, *after]), tokenizer.continuation(before, after, prompt)
            assert (prompt if whole.startswith(prompt) else tokenizer.decode(before)) + written == whole, (text, place)
            assert tokenizer.decode(before) + tokenizer.continuation(before, after) == whole, (text, place)
            assert tokenizer.continuation([BOS, *before], [*after, EOS], prompt) == written, (text, place)
        place = rng.randint(0, len(tokens))
        before, after = tokens[:place], tokens[place:]
        if '\ufffd' not in tokenizer.decode(before):  # not cut within a character
            assert tokenizer.decode(before) + tokenizer.continuation(before, after) == tokenizer.decode(tokens), (
                text, place)
