"""Lines of text that are difficult for tokenizers: many scripts, emoji and unusual spaces."""

import gzip
import random
from pathlib import Path

RANGES = [  # of code points: Latin, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Thai, Georgian, kana, Han, Hangul
    (0x20, 0x7e), (0xa0, 0x17f), (0x370, 0x3ff), (0x400, 0x4ff), (0x5d0, 0x5ea), (0x620, 0x64a), (0x905, 0x939),
    (0xe01, 0xe3a), (0x10d0, 0x10f0), (0x3041, 0x30ff), (0x4e00, 0x9fff), (0xac00, 0xd7a3), (0x300, 0x36f),
    (0x1f300, 0x1f64f), (0x1f468, 0x1f469), (0x1d400, 0x1d4ff), (0x2000, 0x206f), (0xff01, 0xff5e), (0x20000, 0x20100)]
SPACES = [' ', ' ', ' ', '  ', '\t', '\u00a0', '\u202f', '\u3000', '\u200b', '\u200d', '\u2581', '']
WORDS = [
    'the', 'a', 'of', 'and', 'to', 'in', 'is', 'it', 'you', 'that', 'he', 'was', 'for', 'on', 'are', 'with', 'as',
    'his', 'they', "I'll", "don't", "we've", "can't", '1984', '3.14', 'Straße', 'naïve', 'café', 'Ⅻ', 'ﬁn', '½',
    'привет', '你好', '안녕', 'नमस्ते', 'שלום', 'مرحبا', 'สวัสดี', '👩\u200d👩\u200d👧', '🇫🇷', 'é', '…']


def mixed_lines(count, seed=0, words=0.6):
    """Returns `count` lines of 1 to 20 words. `words` is the share of real words; the remaining words are random."""
    rng, lines = random.Random(seed), []
    for _ in range(count):
        scripts = rng.sample(RANGES, 2)
        parts = [rng.choice(('', '', ' '))]
        for _ in range(rng.randint(1, 20)):
            if rng.random() < words:
                parts.append(rng.choice(WORDS))
            else:
                begin, end = rng.choice(scripts)
                parts.append(''.join(chr(rng.randint(begin, end)) for _ in range(rng.randint(1, 8))))
            parts.append(rng.choice(SPACES))
        line = ''.join(parts)
        lines.append(line if line.strip() else 'x')
    return lines


def sentences(data, count):
    """Returns `count` sentences of Multi30k, or [] if the folder `data` does not have Multi30k."""
    lines = []
    for name in 'train.en.gz', 'train.de.gz':
        if (path := Path(data) / 'multi30k' / name).exists():
            with gzip.open(path, 'rt', encoding='utf-8') as file:
                lines += [line.strip() for _, line in zip(range(count // 2), file, strict=False)]
    return lines
