"""A prompt and its continuation together equal the decoded text of all their tokens, character for character."""

import pytest

from configs.tasks import SUBWORDS, TOKENIZERS
from input_pipeline.tokenizer import BOS, PAD, ByteTokenizer, train_tokenizer
from tests.real_text import ODD, assert_continued, training_lines


@pytest.fixture(scope='module', params=[
    pytest.param(kind, marks=pytest.mark.slow) if kind == 'bpe' else kind for kind in TOKENIZERS])  # trains for seconds
def tokenizer(request):
    return train_tokenizer(training_lines(), kind=request.param, vocab_size=1500, split_digits=False,
                           normalization='identity', indentation=True)


def test_prompt_and_continuation_are_the_text_of_their_tokens(tokenizer):
    assert_continued(tokenizer, 1000)


@pytest.mark.slow
def test_prompt_and_continuation_are_the_text_of_their_tokens_for_10_000_pieces(tokenizer):
    assert_continued(tokenizer, 10_000)


@pytest.mark.parametrize('kind', SUBWORDS)
def test_a_word_that_continues_a_line_keeps_its_space(kind):
    code = ['def f(self):\n        return self.name\n'] * 20
    tokenizer = train_tokenizer(code, kind=kind, vocab_size=279, split_digits=False, normalization='identity',
                                indentation=True)
    prompt = 'def f(self):\n        return'
    before, after = tokenizer.encode(prompt), tokenizer.encode('self.name')
    assert tokenizer.continuation(before, after) == ' self.name'
    assert tokenizer.continuation([], after) == tokenizer.continuation([BOS, PAD], after) == 'self.name'


def test_a_character_that_is_cut_in_two_is_continued_whole():
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode('aé€😀b')
    for place in range(len(tokens)):
        before = tokens[:place]
        whole = tokenizer.decode(before).rstrip('\ufffd')
        assert whole + tokenizer.continuation(before, tokens[place:]) == 'aé€😀b'


def test_an_empty_text_has_no_tokens(tokenizer):
    assert tokenizer.encode('') == [] and tokenizer.decode([]) == ''
    assert all(tokenizer.encode(text) for text in ODD[1:])
