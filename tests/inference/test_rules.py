"""Prefixes and words to avoid: each search, compared with a search in plain Python over whole texts."""

import dataclasses
import functools
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece

from inference import batches
from inference.constraints import DEAD, begin_words
from inference.generate import Generator
from inference.inputs import encode_prefix
from inference.options import SearchOptions
from inference.search import IMPOSSIBLE, NEW_WORD, Beam, Follow, advance, filter_logits
from inference.text import VOCABULARY
from inference.translate import Translator
from input_pipeline.foreign_tokenizers import sentencepiece_tokenizer
from input_pipeline.tokenizer import BOS, EOS, PAD, UNK, ByteTokenizer, CharTokenizer
from model.blocks import BlockConfig
from model.cache import Cache
from model.ensemble import Ensemble
from model.language_model import LanguageModel
from model.recurrent import RNNSearch
from model.transformer import Transformer
from runtime.errors import UserError
from tests.vocabularies import WORDS, vocabularies

TOKENIZER = CharTokenizer(json.dumps({'kind': 'char', 'characters': ' ,ABab'}).encode())
SIZE, EXTRA, WIDTH = len(TOKENIZER), 4, 16
AVOID = ('a', 'BA', 'b  a', 'aB, ab')
AVOIDED = re.compile(r'(?<!\w)(a|ba|b\s+a|ab,\s+ab)(?!\w)', re.IGNORECASE)
SOURCES = ['a', 'ab', 'b a,', 'BA', ' b', 'a, B']
PREFIXES = ['', 'b', 'Ab', 'B ', '', ', b']
SEARCHES = {
    'greedy': SearchOptions(method='greedy'),
    'beam': SearchOptions(beam=3, n_best=2),
    'samples': SearchOptions(method='sample', n_best=2, temperature=0.8, top_k=6, top_p=0.9),
}


def blocks(**options):
    return BlockConfig(d_model=16, d_ff=32, num_heads=2, **options)


def initialised(module, *ones):
    return jax.tree.map(lambda leaf: 2.5 * leaf, jax.jit(module.init)(jax.random.key(4), *ones)['params'])


def translator(module, tokenizer=TOKENIZER):
    ones = np.ones((1, 4), np.int32)
    return Translator(module, initialised(module, ones, ones), dict.fromkeys(('source', 'target'), tokenizer), 64)


@functools.cache
def of_kind(kind):
    if kind == 'language model':
        module = LanguageModel(blocks(position='rotary'), 1, SIZE)
        return Generator(module, initialised(module, np.ones((1, 4), np.int32)), TOKENIZER, WIDTH, False)
    if kind == 'ensemble':
        ones = np.ones((1, 4), np.int32)
        modules = Transformer(blocks(), 1, SIZE, SIZE), RNNSearch(SIZE, SIZE, d_model=8, d_hidden=8)
        params = {f'members_{index}': initialised(module, ones, ones) for index, module in enumerate(modules)}
        return Translator(Ensemble(modules), params, dict.fromkeys(('source', 'target'), TOKENIZER), 64)
    return translator({'transformer': Transformer(blocks(), 1, SIZE, SIZE),
                       'rnnsearch': RNNSearch(SIZE, SIZE, d_model=16, d_hidden=16)}[kind])


@functools.cache
def compiled(model):
    return jax.jit(lambda **inputs: model.module.apply({'params': model.params}, **inputs))


def next_logits(model, source):
    """Returns a function: tokens -> logits after these tokens [vocab], without a cache."""
    apply = compiled(model)

    def padded(tokens):
        return np.array([[*tokens, *[PAD] * (WIDTH - len(tokens))]])

    def after(tokens):
        if isinstance(model, Generator):
            return apply(tokens=padded([*source, *tokens]))[0, len(source) + len(tokens) - 1]
        return apply(source=padded([*source, EOS]), target=padded([BOS, *tokens]))[0, len(tokens)]

    return after


def may_come(tokens, token, step, limit, cut, prefix, prompt=''):
    """The rules, over whole texts."""
    if step < len(prefix):
        return token == prefix[step]
    if step == limit - 1 and not cut:
        return token == EOS
    if token in (PAD, BOS, UNK):
        return False
    text = TOKENIZER.decode([*tokens, token])
    final = token == EOS or step == limit - (1 if cut else 2)
    for before in {'', prompt}:  # a continuation is read alone, and behind its prompt, whose words are its own
        whole = before + text
        for end in range(len(before) + 1, len(whole) + 1):
            for begin in range(end):
                found = AVOIDED.fullmatch(whole, begin, end)
                if found and not (begin and re.match(r'\w', whole[begin - 1]) and re.match(r'\w', whole[begin])):
                    if end == len(whole) and not final:
                        continue
                    if end == len(whole) or not re.match(r'\w', whole[end]):
                        return False
    return True


def may_end(tokens, prompt):
    return tokens[-1] == EOS or may_come(tokens, EOS, 0, 9 ** 9, True, (), prompt)


def alone(model, source, limit, options, allowed, number):
    """[(score, log-probability, tokens)], the best first."""
    after, penalty = next_logits(model, source), lambda length: ((5 + length) / 6) ** options.alpha

    def possible(tokens, step):
        return [token for token in range(SIZE) if allowed(tokens, token, step)]

    if options.method == 'beam':
        alive, ended = [(0.0, ())], []
        for step in range(limit):
            found, given_up = [], []
            for log_prob, tokens in alive:
                row = np.asarray(jax.nn.log_softmax(after(tokens)), np.float64)
                new = sorted(((log_prob + row[token], (*tokens, token)) for token in possible(tokens, step)),
                             reverse=True)[:options.beam]
                # The text ends with a word to avoid, and the model's best token would end the word, too.
                stops = not allowed(tokens, EOS, step) and int(row.argmax()) not in possible(tokens, step)
                (given_up if stops else found).extend(new)
            found = found or ([] if ended else given_up)
            others = sorted(each for each in found if may_end(each[1], allowed.keywords.get('prompt', '')))
            found = sorted(found, reverse=True)[:options.beam]
            if others and not {*others} & {*found}:
                found[-1] = others[-1]
            over = [each for each in found if each[1][-1] == EOS or step == limit - 1]
            alive = [each for each in found if each not in over]
            ended += [(log_prob / penalty(step + 1), log_prob, tokens) for log_prob, tokens in over]
            ended = sorted(ended, reverse=True)[:options.beam]
        return ended[:options.n_best]
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(options.seed), 0), number)
    tokens, log_probs = [()] * options.n_best, np.zeros(options.n_best)
    for step in range(limit):
        logits = jnp.stack([after(each) if EOS not in each else jnp.zeros(SIZE) for each in tokens])
        mask = np.array([[token in possible(each, step) for token in range(SIZE)] for each in tokens])
        allowing = jnp.where(mask, logits, IMPOSSIBLE)
        chosen = allowing.argmax(axis=-1) if options.method == 'greedy' else jax.random.categorical(
            jax.random.fold_in(key, step), filter_logits(allowing, options.temperature, options.top_k, options.top_p))
        new = np.asarray(jax.nn.log_softmax(logits), np.float64)
        for row, each in enumerate(tokens):
            if EOS not in each:
                token = int(chosen[row]) if mask[row].sum() > 1 else int(mask[row].argmax())
                tokens[row], log_probs[row] = (*each, token), log_probs[row] + new[row, token]
    return sorted(((log_prob / penalty(len(each)), log_prob, each)
                   for log_prob, each in zip(log_probs, tokens, strict=True)), reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize('search', ['greedy', 'beam', 'samples'])
@pytest.mark.parametrize('kind', ['transformer', 'ensemble', 'rnnsearch'])
def test_a_batch_of_mixed_prefixes_and_avoided_words_equals_single_searches(kind, search, monkeypatch):
    monkeypatch.setattr(batches, 'FEWEST', 2)
    monkeypatch.setattr(batches, 'ROOM', 2)
    model = of_kind(kind)
    options = dataclasses.replace(SEARCHES[search], extra_length=EXTRA, batch_size=4)
    free = model.translate(SOURCES, options)
    found = model.translate(SOURCES, dataclasses.replace(options, avoid=AVOID), prefixes=PREFIXES)
    for number, (output, prefix) in enumerate(zip(found, PREFIXES, strict=True)):
        forced, limit = TOKENIZER.encode(prefix), len(output.source_tokens) + EXTRA + 1
        expected = alone(model, output.source_tokens, limit, options, functools.partial(
            may_come, limit=limit, cut=False, prefix=forced), number)
        assert [(*each.tokens, *[EOS] * each.ended) for each in output.hypotheses] == [each[2] for each in expected]
        np.testing.assert_allclose([(each.score, each.log_prob) for each in output.hypotheses],
                                   [each[:2] for each in expected], atol=2e-4, rtol=2e-4)
        assert all(each.text.startswith(prefix) and not AVOIDED.search(each.text) for each in output.hypotheses)
    assert [output.text for output in free] != [output.text for output in found]


@pytest.mark.slow
@pytest.mark.parametrize('search', SEARCHES)
def test_a_continuation_avoids_words_that_its_prompt_begins(search):
    model, limit = of_kind('language model'), EXTRA
    options = dataclasses.replace(SEARCHES[search], extra_length=EXTRA, avoid=AVOID)
    for number, output in enumerate(model.generate(SOURCES, options)):
        expected = alone(model, output.source_tokens, limit, options, functools.partial(
            may_come, limit=limit, cut=True, prefix=(), prompt=output.source), number)
        for each, (score, log_prob, tokens) in zip(output.hypotheses, expected, strict=True):
            assert (*each.tokens, *[EOS] * each.ended) == tokens
            assert (each.score, each.log_prob) == pytest.approx((score, log_prob), abs=2e-4)
            assert not AVOIDED.search(each.text)


@pytest.mark.slow
def test_words_are_avoided_from_window_to_window():
    model = of_kind('language model')
    options = SearchOptions(method='sample', temperature=1.5, extra_length=60, avoid=AVOID, n_best=1)
    before = model.generate(SOURCES * 4, dataclasses.replace(options, avoid=()))
    after = model.generate(SOURCES * 4, options)
    assert any(AVOIDED.search(output.text) for output in before)
    assert max(len(output.hypotheses[0].tokens) for output in after) > WIDTH
    assert not any(AVOIDED.search(output.text) for output in after)


def best_of(probabilities, follow):
    """The best output of a model in which the next token depends only on the last one."""
    def decode_step(tokens, cache):
        return jnp.log(jnp.asarray(probabilities, jnp.float32))[tokens], cache

    search = Beam(VOCABULARY, max_length=4, beam=2)
    state = search.begin(Cache((), (), jnp.int32(0)), jnp.array([BOS]), jnp.array([4]), places=jnp.array([0]))
    found = search.found(advance(search, decode_step, state, 4, follow=follow))
    return [token for token in found.tokens[0, 0] if token != PAD]


@pytest.mark.parametrize('longer, expected', [(0.01, 'Frau'), (0.6, 'Mannschaft')])
def test_a_beam_continues_a_word_to_avoid_only_if_the_model_would(longer, expected):
    """A language of the tokens Mann, schaft and Frau, in which Mann is nearly certain; `longer` is p(schaft | Mann)."""
    mann, schaft, frau = range(UNK + 1, UNK + 4)
    probabilities = np.full((7, 7), 1e-9)
    probabilities[BOS, [mann, frau]] = 0.999, 0.001
    probabilities[mann, [schaft, EOS]] = longer, 1 - longer
    probabilities[[schaft, frau], EOS] = 1.0

    # The state after each token: 0, or 1 after Mann, where the text cannot end.
    table = jnp.array([[0] * mann + [1, 0, 0], [DEAD] * mann + [DEAD, 0, DEAD]])
    words = {'Frau': [frau, EOS], 'Mannschaft': [mann, schaft, EOS]}
    assert best_of(probabilities, Follow(table, jnp.int32(1))) == words[expected]


def test_a_beam_keeps_a_hypothesis_without_the_word_to_avoid():
    """All likely sentences contain Mann: after 'der' and after 'ein', Frau is unlikely."""
    mann, schaft, frau, der, ein = range(UNK + 1, UNK + 6)
    probabilities = np.full((9, 9), 1e-9)
    probabilities[BOS, [der, ein]] = 0.5, 0.5
    probabilities[[der, ein], mann], probabilities[[der, ein], frau] = 0.999, 0.001
    probabilities[mann, [schaft, EOS]] = 0.01, 0.99
    probabilities[[schaft, frau], EOS] = 1.0
    table = jnp.array([[0] * mann + [1, 0, 0, 0, 0], [DEAD] * mann + [DEAD, 0, DEAD, DEAD, DEAD]])
    assert best_of(probabilities, Follow(table, jnp.int32(1))) in ([der, frau, EOS], [ein, frau, EOS])


def test_no_letters_are_appended_where_the_model_would_begin_a_word_to_avoid():
    """After Haus, the model writes ' Mann'. Without that word, 'x' (Hausx) is more likely than ' Frau'."""
    mann, haus, x, frau = range(UNK + 1, UNK + 5)
    probabilities = np.full((8, 8), 1e-9)
    probabilities[BOS, haus] = probabilities[[x, frau], EOS] = 1.0
    probabilities[haus, [mann, x, frau]] = 0.9, 0.06, 0.04
    probabilities[mann, EOS] = 1.0
    table = jnp.array([[0] * mann + [1, 0, 0, 0], [DEAD] * mann + [DEAD, DEAD, 0, DEAD]])
    new_word = jnp.zeros(8, bool).at[jnp.array([mann, haus, frau])].set(True)
    joins = jnp.zeros(8, bool).at[x].set(True)
    assert best_of(probabilities, Follow(table, jnp.int32(1), new_word, joins)) == [haus, frau, EOS]


@pytest.mark.slow
@pytest.mark.parametrize('method', SEARCHES)
def test_bytes_follow_prefixes_and_avoid_words_that_are_not_ascii(method):
    model = translator(Transformer(blocks(), 1, 260, 260), ByteTokenizer())
    options = dataclasses.replace(SEARCHES[method], extra_length=6, avoid=('ÉTÉ', '猫'))
    for output, prefix in zip(model.translate(['été', 'a'], options, prefixes=['é', 'Ét']), ['é', 'Ét'], strict=True):
        assert output.text.startswith(prefix)
        assert not re.search(r'(?<!\w)été(?!\w)|猫', output.text, re.IGNORECASE)


@pytest.mark.slow
def test_a_space_ends_the_word_of_a_prefix():
    tokenizer = vocabularies()['bpe']
    assert encode_prefix(tokenizer, 'Ein Ma').prefix == tokenizer.encode('Ein Ma')
    assert encode_prefix(tokenizer, 'Ein Ma ').prefix == [*tokenizer.encode('Ein Ma'), NEW_WORD]
    assert not encode_prefix(tokenizer, '  ').prefix and not encode_prefix(tokenizer, '').prefix
    assert encode_prefix(TOKENIZER, 'a ').prefix == TOKENIZER.encode('a ')
    size = len(tokenizer)
    model = translator(Transformer(blocks(), 1, size, size), tokenizer)
    prefixes = ['der ', 'der', 'guten Ta', 'Mann ', '']
    for method in ('greedy', 'beam', 'sample'):
        options = SearchOptions(method=method, extra_length=9, avoid=('M',))
        for output, prefix in zip(model.translate(WORDS[:5], options, prefixes=prefixes), prefixes, strict=True):
            assert output.text.startswith(prefix)
            pairs = [(output.source_tokens, output.hypotheses[0].tokens)]
            assert output.hypotheses[0].log_prob == pytest.approx(sum(model.token_log_probs(pairs)[0]), abs=1e-3)
    assert begin_words(tokenizer).sum() > 1


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['unigram', *(pytest.param(kind, marks=pytest.mark.slow) for kind in ('bpe', 'char'))])
@pytest.mark.parametrize('numbered', [
    pytest.param(False, id='alone', marks=pytest.mark.slow), pytest.param(True, id='with a vocabulary beside it')])
def test_a_space_ends_the_word_of_a_prefix_where_sentencepiece_drops_it(kind, numbered):
    content, rng = io.BytesIO(), np.random.default_rng(0)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(' '.join(rng.choice(WORDS, 6)) for _ in range(300)), model_writer=content, vocab_size=60,
        model_type=kind, hard_vocab_limit=False, num_threads=1, minloglevel=2)
    processor = sentencepiece.SentencePieceProcessor(model_proto=content.getvalue())
    size = processor.get_piece_size()
    numbers = {processor.id_to_piece(number): size - 1 - number for number in range(size)}
    special, vocabulary = ([None, size - 2, size - 3, size - 1], numbers) if numbered else ([None, 1, 2, 0], None)
    tokenizer = sentencepiece_tokenizer(content.getvalue(), special, size, vocabulary)
    assert tokenizer.encode('guten Ta ') == tokenizer.encode('guten Ta')
    assert encode_prefix(tokenizer, 'guten Ta ').prefix == [*tokenizer.encode('guten Ta'), NEW_WORD]
    model = translator(Transformer(blocks(), 1, len(tokenizer), len(tokenizer)), tokenizer)
    prefixes = ['der ', 'guten Ta ', 'Mann ']
    for method in ('greedy', 'beam', 'sample'):
        for output, prefix in zip(model.translate(WORDS[:3], SearchOptions(method=method, extra_length=9),
                                                  prefixes=prefixes), prefixes, strict=True):
            assert output.text.startswith(prefix)


@pytest.mark.parametrize('source, prefix, avoid, message', [
    ('ab', 'bbbbbbb', (), 'line 8: .* this prefix needs 7 tokens, but the translation may have at most 7'),
    ('ab', 'bxb', (), 'characters that are not in the vocabulary'),
    ('', 'b', (), 'the sentence is empty'),
    ('ab', 'b a, ', ('A',), 'a word to avoid'),
    ('ab', 'b bb a', ('A',), 'a word to avoid'),  # nothing can follow
])
def test_a_prefix_that_cannot_begin_a_translation(source, prefix, avoid, message):
    with pytest.raises(UserError, match=message):
        of_kind('transformer').translate(['a', source], SearchOptions(extra_length=4, avoid=avoid), first=6,
                                         prefixes=['', prefix])


@pytest.mark.parametrize('kind', ['bpe', 'byte'])
def test_a_prefix_with_a_space_at_its_end_leaves_room_for_the_next_word(kind):
    tokenizer, module = vocabularies()[kind], Transformer(blocks(), 1, SIZE, SIZE)
    model = Translator(module, {}, dict.fromkeys(('source', 'target'), tokenizer), 64)
    limit = len(encode_prefix(tokenizer, 'Mann ').prefix) + (kind != 'bpe')
    extra = limit - len(tokenizer.encode('Mann')) - 1  # the limit includes the end token
    needed = f'needs {limit} tokens, including the beginning of the next word, but .* at most {limit} tokens'
    with pytest.raises(UserError, match=needed):
        model.translate(['Mann'], SearchOptions(extra_length=extra), prefixes=['Mann '])


@pytest.mark.slow
def test_a_prefix_with_more_tokens_than_learned_positions_can_only_be_shortened():
    model = translator(Transformer(blocks(position='learned'), 1, SIZE, SIZE, max_length=6))
    with pytest.raises(UserError, match=r'at most 6 tokens, .* \(config\.model\.max_length\)\. Shorten the prefix$'):
        model.translate(['ab'], SearchOptions(extra_length=99), prefixes=['b' * 6])


def test_as_many_prefixes_as_sentences():
    with pytest.raises(UserError, match='there are 1 prefixes for 2 sentences'):
        of_kind('transformer').translate(['a', 'b'], prefixes=['a'])
