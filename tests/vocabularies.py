"""Small vocabularies of several kinds that were learned from the same words."""

import functools

import numpy as np

from input_pipeline.tokenizer import ByteTokenizer, train_tokenizer

WORDS = ['Mann', 'Mannschaft', 'mit', 'einem', 'der', 'Tag', 'guten', 'Käse', 'groß', 'Straße', 'und', 'Manna']


@functools.cache
def vocabularies():
    rng = np.random.default_rng(0)
    texts = [' '.join(rng.choice(WORDS, rng.integers(1, 8))) + '.' for _ in range(300)]
    settings = {'vocab_size': 290, 'split_digits': True, 'normalization': 'identity'}
    return {'byte': ByteTokenizer(), **{kind: train_tokenizer(texts, kind=kind, **settings)
                                        for kind in ('bpe', 'unigram')}}
