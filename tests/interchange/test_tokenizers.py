"""Tokenizers of imported models against the libraries that they come from, on 10,000 lines of mixed scripts."""

import functools
import json
import os
import pickle

import numpy as np
import pytest

for library in 'tokenizers', 'transformers':
    pytest.importorskip(library, reason="it is in the extra 'test-interchange', and is not installed here")

import sentencepiece
import tokenizers
import transformers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from analysis.explain import words
from inference.constraints import DEAD, Automaton
from input_pipeline.foreign_tokenizers import NONE, sentencepiece_tokenizer, tokenizers_tokenizer
from input_pipeline.tokenizer import BOS, EOS, PAD, SPECIAL, UNK, ByteTokenizer, CharTokenizer, load_tokenizer
from interchange.foreign_config import ForeignConfig
from interchange.huggingface_tokenizers import (
    byte_level_bpe,
    original_order,
    read_text_tokenizer,
    read_translation_tokenizers,
    write_text_tokenizer,
    write_translation_tokenizers,
)
from interchange.marian import Config
from runtime.errors import UserError
from tests.interchange import originals
from tests.interchange.lines import mixed_lines, sentences
from tests.real_text import assert_continued

pytestmark = pytest.mark.interchange

LINES = mixed_lines(8000) + sentences(os.environ.get('ALLYOUNEED_DATA', 'data'), 2000)
LINES += mixed_lines(10_000 - len(LINES), seed=1)


@functools.cache
def llama():
    model = originals.llama_model()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = processor.get_piece_size()
    return sentencepiece_tokenizer(model, [None, 1, 2, 0], size), processor.encode, processor.decode


@functools.cache
def gpt2():
    original = originals.gpt2()
    end, size = original.token_to_id('<|endoftext|>'), original.get_vocab_size()
    return (tokenizers_tokenizer(original.to_str(), [None, end, end, None], size + 7),  # rows that nothing uses
            lambda text: original.encode(text, add_special_tokens=False).ids, original.decode)


@functools.cache
def llama_3():
    original = originals.llama_3()
    begin, end = map(original.token_to_id, ('<|begin_of_text|>', '<|end_of_text|>'))
    return (tokenizers_tokenizer(original.to_str(), [None, begin, end, None], original.get_vocab_size()),
            lambda text: original.encode(text, add_special_tokens=False).ids, original.decode)


TOKENIZERS = {'llama': llama, 'gpt2': gpt2, 'llama 3': llama_3}


@pytest.mark.parametrize('make', TOKENIZERS.values(), ids=TOKENIZERS)
def test_text_becomes_the_tokens_of_the_original_and_comes_back(make):
    ours, encode, decode = make()
    assert len(LINES) == 10_000
    for line in LINES:
        tokens, expected = ours.encode(line), list(encode(line))
        assert ours.order[tokens].tolist() == expected, line
        assert ours.decode(tokens) == decode(expected), line
        if make is not llama:  # SentencePiece takes the character U+2581 for a space
            assert ours.decode(tokens) == line


@pytest.fixture(scope='module')
def marian(tmp_path_factory):
    folder = tmp_path_factory.mktemp('marian')
    size = originals.marian_files(folder)
    vocabulary = transformers.MarianTokenizer.from_pretrained(folder).get_vocab()
    special = [None, vocabulary['<pad>'], vocabulary['</s>'], vocabulary['<unk>']]
    return (transformers.MarianTokenizer.from_pretrained(folder),
            *(sentencepiece_tokenizer((folder / f'{side}.spm').read_bytes(), special, size, vocabulary)
              for side in ('source', 'target')))


def test_marian_sources_become_the_tokens_of_transformers(marian):
    original, source, _ = marian
    lines = [*LINES, '>>fra<< How are you?', '>>deu<<the man', '>>xyz<< unknown', '>> no code']
    expected = original(lines).input_ids
    for line, numbers in zip(lines, expected, strict=True):
        assert [*source.order[source.encode(line)], 0] == numbers, line


def test_marian_targets_become_the_tokens_of_transformers_and_come_back(marian):
    original, _, target = marian
    expected = original(text_target=LINES).input_ids
    for line, numbers in zip(LINES, expected, strict=True):
        tokens = target.encode(line)
        assert [*target.order[tokens], 0] == numbers, line
        text = original.decode(numbers, skip_special_tokens=True, use_source_tokenizer=False)
        assert target.decode(tokens).strip() == text, line


@pytest.mark.parametrize('make', TOKENIZERS.values(), ids=TOKENIZERS)
def test_special_tokens_are_the_first_four_and_the_others_follow(make):
    ours, *_ = make()
    assert ours.pieces([PAD, BOS, EOS, UNK]) == list(SPECIAL) == ours.vocabulary[:4]
    assert len(ours) == len(ours.order) == len(ours.vocabulary)
    others = ours.order[4:]
    assert (np.diff(others) > 0).all()
    assert set(ours.order[ours.order != NONE]) == set(range(ours.order.max() + 1))
    assert ours.decode([BOS, *ours.encode('the man'), EOS, PAD]) == 'the man'


def test_tokens_that_a_vocabulary_lacks_are_absent():
    assert llama()[0].absent == (PAD,)
    assert llama_3()[0].absent == (PAD, UNK)
    assert gpt2()[0].absent == (PAD, BOS, UNK)  # one token begins and ends a text; the end has its probability


@pytest.mark.parametrize('make', TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer_is_read_from_its_file_and_pickled(make, tmp_path):
    ours, *_ = make()
    ours.save(tmp_path / 'text.model')
    for again in load_tokenizer(tmp_path / 'text.model'), pickle.loads(pickle.dumps(ours)):
        assert again.encode(LINES[0]) == ours.encode(LINES[0]) and again.model == ours.model


@pytest.mark.parametrize('make', TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_bytes_of_all_tokens_are_the_bytes_of_the_text(make):
    """The search for words to avoid reads these bytes."""
    ours, *_ = make()
    for line in LINES[::10]:
        written = b''.join(map(ours.bytes_of, ours.encode(line)))
        if make is llama:
            assert written.replace(b' ', b'') == line.replace('\u2581', '').replace(' ', '').encode(), line
        else:
            assert written == line.encode()


def controls():
    """SentencePiece with a control symbol, a piece that it never uses, and rows of the embedding that nothing uses."""
    model = originals.sentencepiece_model(model_type='bpe', control_symbols=['<sep>'], user_defined_symbols=['<tab>'])
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    proto.pieces[300].type = proto.SentencePiece.UNUSED
    return sentencepiece_tokenizer(proto.SerializeToString(), [None, 1, 2, 0], len(proto.pieces) + 3)


def controls_with_vocabulary():
    model, *_ = controls().parts
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = processor.id_to_piece([*range(processor.get_piece_size())])
    vocabulary = {piece: number for number, piece in enumerate([*reversed(pieces), '>>fra<<'])}
    return sentencepiece_tokenizer(model, [None, *(vocabulary[piece] for piece in ('<s>', '</s>', '<unk>'))],
                                   len(vocabulary), vocabulary)


OMITTED = {'llama': (lambda: llama()[0], 0), 'gpt2': (lambda: gpt2()[0], 7), 'llama 3': (lambda: llama_3()[0], 1),
           'controls': (controls, 4), 'controls with vocabulary': (controls_with_vocabulary, 1)}


@pytest.mark.parametrize('make, count', OMITTED.values(), ids=OMITTED)
def test_a_token_has_no_bytes_if_decoding_omits_it(make, count):
    """So words to avoid are also found if such tokens are inside them."""
    ours = make()
    the, man = ours.encode('the'), ours.encode('man')
    omitted = [token for token in range(UNK + 1, len(ours))
               if ours.decode([*the, token, *man]) == ours.decode([*the, *man])]
    assert omitted == [token for token in range(UNK + 1, len(ours)) if not ours.bytes_of(token)]
    assert len(omitted) == count
    automaton, (first, *others) = Automaton(['thean'], ours, False), ours.encode('thean')
    for token in omitted:
        state = automaton.after([first, token, *others, token])
        assert others and (state == DEAD or automaton.table[state, EOS] == DEAD)


def plain_sentencepiece():
    """SentencePiece with its defaults: NFKC, spaces collapsed and dropped at both ends."""
    model = originals.sentencepiece_model(model_type='unigram')
    return sentencepiece_tokenizer(model, [None, 1, 2, 0], sentencepiece.SentencePieceProcessor(
        model_proto=model).get_piece_size())


def trained(model, trainer, **parts):
    """A tokenizer of the library tokenizers, learned from the same lines as the others."""
    tokenizer = tokenizers.Tokenizer(model)
    for part, value in parts.items():
        setattr(tokenizer, part, value)
    tokenizer.train_from_iterator(originals.TEXT, trainer(
        vocab_size=1500, show_progress=False, special_tokens=['<unk>', '<s>', '</s>']))
    return tokenizers_tokenizer(tokenizer.to_str(), [None, 1, 2, 0], tokenizer.get_vocab_size())


def metaspace():
    return trained(models.Unigram(), functools.partial(trainers.UnigramTrainer, unk_token='<unk>'),
                   pre_tokenizer=pre_tokenizers.Metaspace(), decoder=decoders.Metaspace())


def word_pieces():
    return trained(models.WordPiece(unk_token='<unk>'), trainers.WordPieceTrainer,
                   pre_tokenizer=pre_tokenizers.BertPreTokenizer(), decoder=decoders.WordPiece(cleanup=True))


def word_ends():
    """BPE whose tokens have a sign at the end of a word instead of a space at its beginning, as the first GPT's."""
    return trained(models.BPE(unk_token='<unk>', end_of_word_suffix='</w>'), functools.partial(
        trainers.BpeTrainer, end_of_word_suffix='</w>'), pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.BPEDecoder())


CONTINUED = {name: lambda make=make: make()[0] for name, make in TOKENIZERS.items()} | {
    make.__name__: make for make in (plain_sentencepiece, metaspace, word_pieces, word_ends)}


@pytest.fixture(scope='module', params=[*CONTINUED, 'marian'])
def continued(request):
    """Each imported tokenizer, Marian's with its vocabulary beside it among them."""
    return request.getfixturevalue('marian')[2] if request.param == 'marian' else CONTINUED[request.param]()


def test_prompt_and_continuation_are_the_text_of_their_tokens(continued):
    assert_continued(continued, 500)


@pytest.mark.slow
def test_prompt_and_continuation_are_the_text_of_their_tokens_for_2_000_pieces(continued):
    assert_continued(continued, 2000)


@pytest.mark.parametrize('make', [plain_sentencepiece, metaspace])
def test_words_are_avoided_where_tokens_contain_the_spaces(make):
    tokenizer = make()
    assert Automaton(['the'], tokenizer, False).after(tokenizer.encode('the man')) == DEAD


@pytest.mark.parametrize('make', [word_pieces, word_ends])
def test_words_to_avoid_are_refused_where_tokens_do_not_contain_the_spaces(make):
    with pytest.raises(UserError, match='--avoid does not support this tokenizer: .* the decoded text is .the the.'):
        Automaton(['the'], make(), False)


def test_an_empty_text_has_no_tokens(continued):
    assert continued.encode('') == [] and continued.decode([]) == ''


def test_a_space_that_a_tokenizer_drops_is_not_repeated_in_the_continuation():
    tokenizer = plain_sentencepiece()
    before, after = tokenizer.encode('the and '), tokenizer.encode('is')
    assert before == tokenizer.encode('the and')
    assert tokenizer.continuation(before, after, 'the and ') == 'is'
    assert tokenizer.continuation(before, after, 'the and') == ' is'


def test_a_text_contains_no_padding():
    """Padding is masked, so a text with the name of the token would shift the positions of its continuation."""
    original = originals.llama_3()
    original.add_special_tokens(['<pad>'])
    begin, end, pad = map(original.token_to_id, ('<|begin_of_text|>', '<|end_of_text|>', '<pad>'))
    ours = tokenizers_tokenizer(original.to_str(), [pad, begin, end, None], original.get_vocab_size())
    assert ours.encode('the<pad>man') == [*ours.encode('the'), UNK, *ours.encode('man')]


def read(folder, size, kind='llama', start=1, end=2, pad=None, **config):
    """Reads the tokenizer in a folder. `config` is the content of tokenizer_config.json."""
    (folder / 'tokenizer_config.json').write_text(json.dumps(config))
    return read_text_tokenizer(folder, ForeignConfig(
        model_type=kind, vocab_size=size, bos_token_id=start, eos_token_id=end, pad_token_id=pad))


def read_with(folder, original, size=None, **options):
    """Reads a tokenizer.json from a folder. `options` are those of `read`."""
    original.save(str(folder / 'tokenizer.json'))
    return read(folder, size or original.get_vocab_size(), **options)


def read_llama(folder, further=0, **options):
    """Reads a tokenizer.model from a folder. The model has `further` more tokens, which the file lacks."""
    (folder / 'tokenizer.model').write_bytes(llama()[0].parts[0])
    return read(folder, int(llama()[0].order.max()) + 1 + further, **options)


def read_vocabulary(folder, kind='gpt2', **options):
    """Reads vocab.json and merges.txt from a folder."""
    models.BPE({'a': 0, 'b': 1, 'ab': 2, '<|endoftext|>': 3, '\u0120': 4}, [('a', 'b')]).save(str(folder))
    return read(folder, 9, kind, start=3, end=3, **options)


@pytest.mark.parametrize('vocabulary, message', [
    ({'a': 0, 'b': 1, '<e>': 2, 'z': 700}, 'tokenizer.json has ids of tokens up to 700, .* vocab_size=10'),
    ({'b': 0, '<s>': 1, '</s>': 2}, 'tokenizer.json cannot be read as a tokenizer: WordLevel error: Missing')])
def test_a_tokenizer_json_that_cannot_encode_is_refused(vocabulary, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_with(tmp_path, tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token='<unk>')), size=10)


def beginning(begins=True):
    vocabulary = {'a': 0, '<s>': 1, '</s>': 2, '<unk>': 3}
    original = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token='<unk>'))
    if begins:
        original.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 1)])
    return original


def test_padding_of_the_file_does_not_hide_the_start_token(tmp_path):
    original = beginning()
    original.enable_padding(direction='left', pad_id=3, length=8)
    assert read_with(tmp_path, original)[1]


def test_an_explicit_add_bos_token_decides_whether_texts_begin_with_the_start_token(tmp_path):
    for in_file in False, True:
        assert read_with(tmp_path, beginning(in_file))[1] is in_file
        for explicit in False, True:
            assert read_with(tmp_path, beginning(in_file), add_bos_token=explicit)[1] is explicit


@pytest.mark.parametrize('read_from, end, expected', [
    (lambda folder, **options: read_with(folder, beginning(), **options), 2, [NONE, 1, 2, 3]),
    (read_llama, 2, [NONE, 1, 2, 0]), (read_llama, 1, [NONE, 1, 1, 0])])
def test_the_start_token_that_the_tokenizer_adds_overrides_that_of_config_json(
        read_from, end, expected, tmp_path, caplog):
    tokenizer, begins = read_from(tmp_path, start=0, end=end, pad=-1)
    assert begins and tokenizer.order[:4].tolist() == expected
    assert 'bos_token_id=0, but the tokenizer adds the start token 1 to each text. The import uses 1' in caplog.text
    caplog.clear()
    tokenizer, begins = read_from(tmp_path, start=0, end=end, add_bos_token=False)
    assert not begins and tokenizer.order[BOS] == 0 and not caplog.text


@pytest.mark.parametrize('pad, expected', [(0, NONE), (4, 4), (7, 7)])
def test_an_ordinary_token_of_a_tokenizer_json_is_not_padding(pad, expected, tmp_path):
    original = beginning()
    original.add_special_tokens(['<pad>'])
    assert read_with(tmp_path, original, size=9, pad=pad)[0].order[PAD] == expected


def test_an_ordinary_piece_of_a_tokenizer_model_is_not_padding(tmp_path):
    further = int(llama()[0].order.max()) + 1
    assert read_llama(tmp_path, further=1, pad=300)[0].order[PAD] == NONE
    assert read_llama(tmp_path, further=1, pad=further)[0].order[PAD] == further


def test_a_vocab_json_of_another_family_than_gpt2_is_refused(tmp_path):
    tokenizer, begins = read_vocabulary(tmp_path)
    assert tokenizer.order[tokenizer.encode('ab')].tolist() == [2] and not begins
    with pytest.raises(UserError, match='has no tokenizer.json, and model_type=qwen2 needs it. .* save_pretrained'):
        read_vocabulary(tmp_path, 'qwen2')


@pytest.mark.parametrize('in_file, options, expected', [  # in_file is None if the folder has no tokenizer.json
    (None, {'add_prefix_space': False}, False), (None, {'add_prefix_space': True}, True),
    (False, {'add_prefix_space': True}, True), (True, {'add_prefix_space': False}, False), (True, {}, False),
    (False, {'add_prefix_space': True, 'tokenizer_class': 'GPT2Tokenizer'}, True),
    (True, {'tokenizer_class': 'PreTrainedTokenizerFast'}, True)])
def test_a_space_is_added_before_a_text_of_gpt2_as_in_transformers(in_file, options, expected, tmp_path):
    tokenizer, _ = read_vocabulary(tmp_path, **options)
    if in_file is not None:
        original = byte_level_bpe(tmp_path / 'vocab.json', tmp_path / 'merges.txt', in_file)
        tokenizer, _ = read_with(tmp_path, original, 9, kind='gpt2', start=3, end=3, **options)
    (tmp_path / 'config.json').write_text('{"model_type": "gpt2"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    numbers = [4] * expected + [2]  # \u0120 is a space
    assert tokenizer.order[tokenizer.encode('ab')].tolist() == theirs('ab').input_ids == numbers


@pytest.mark.parametrize('add_prefix_space', [False, True])
@pytest.mark.parametrize('read_from, kind', [(read_vocabulary, 'gpt2'), (read_llama, 'llama')])
def test_a_written_tokenizer_adds_a_space_before_a_text_as_the_original(read_from, kind, add_prefix_space, tmp_path):
    tokenizer, _ = read_from(tmp_path, add_prefix_space=add_prefix_space, add_bos_token=False)
    (tmp_path / 'written').mkdir()
    write_text_tokenizer(tokenizer, tmp_path / 'written', False)
    theirs = {'gpt2': transformers.GPT2Tokenizer, 'llama': transformers.LlamaTokenizer}[kind]
    for folder in tmp_path, tmp_path / 'written':
        (folder / 'config.json').write_text(json.dumps({'model_type': kind}))
        assert theirs.from_pretrained(folder)('ab').input_ids == tokenizer.order[tokenizer.encode('ab')].tolist()


@pytest.mark.parametrize('read_from, known', [(read_vocabulary, '<|endoftext|>'), (read_llama, '</s>')])
def test_added_tokens_that_the_vocabulary_lacks_are_named(read_from, known, tmp_path, caplog):
    names = [known, '<x>', '<y>']
    decoder = {str(number): {'content': name, 'special': True} for number, name in enumerate(names)}
    read_from(tmp_path, added_tokens_decoder=decoder)
    assert 'the vocabulary lacks added tokens: <x>, <y> (2 in total)' in caplog.text
    (tmp_path / 'added_tokens.json').write_text(json.dumps({'<x>': 5, '<tool>': 6, '<pad>': 7}))
    read_from(tmp_path, added_tokens_decoder=decoder)
    assert 'the vocabulary lacks added tokens: <x>, <y>, <tool> (4 in total)' in caplog.text


def test_added_tokens_and_further_end_tokens_of_marian_are_named(tmp_path, caplog):
    size = originals.marian_files(tmp_path)
    (tmp_path / 'generation_config.json').write_text('{"eos_token_id": [0, 1]}')
    original = transformers.MarianTokenizer.from_pretrained(tmp_path)
    original.add_tokens(['<x>', '>>spa<<'])
    original.save_pretrained(tmp_path)
    config = Config(model_type='marian', vocab_size=size + 2, pad_token_id=size - 1, decoder_start_token_id=size - 1)
    read_translation_tokenizers(tmp_path, config)
    assert f'{tmp_path}: the vocabulary lacks added tokens: <x>, >>spa<< (2 in total)' in caplog.text
    assert 'add it to vocab.json with its id' in caplog.text
    assert 'eos_token_id has further end tokens. Only </s> (0) ends a text, not <unk> (1)' in caplog.text
    caplog.clear()
    path, added = tmp_path / 'vocab.json', '>>spa<<'
    path.write_text(json.dumps(json.loads(path.read_text()) | {added: size + 1}))
    source = read_translation_tokenizers(tmp_path, config)['source']
    assert 'added tokens: <x> (1 in total)' in caplog.text
    assert [*source.order[source.encode(f'{added} the man')], 0] == original(f'{added} the man').input_ids


WRITTEN = {**TOKENIZERS, 'bytes': lambda: [ByteTokenizer()], 'characters': lambda: [CharTokenizer(
    json.dumps({'kind': 'char', 'characters': ' aehmnt'}).encode())]}


@pytest.mark.parametrize('begins', [False, True])
@pytest.mark.parametrize('make', WRITTEN.values(), ids=WRITTEN)
def test_a_written_tokenizer_begins_texts_as_the_run_does(make, begins, tmp_path):
    ours, order = make()[0], original_order(make()[0])
    write_text_tokenizer(ours, tmp_path, begins)
    size, begin, end = int(order.max()) + 1, int(order[BOS]), int(order[EOS])
    again, found = read_text_tokenizer(tmp_path, ForeignConfig(
        model_type='llama', vocab_size=size, bos_token_id=begin, eos_token_id=end))
    text = 'the </s>man'  # ordinary text for our own tokenizers and SentencePiece; GPT-2 and Llama 3 have no such token
    expected = order[ours.encode(text)].tolist()
    assert found is begins and again.order[again.encode(text)].tolist() == expected
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs(text).input_ids == [begin] * begins + expected


@pytest.mark.parametrize('add_prefix_space', [False, True])
@pytest.mark.parametrize('kind', ['llama', 'mistral'])
def test_a_written_tokenizer_model_has_the_same_tokens_in_transformers_and_when_it_is_read_again(
        kind, add_prefix_space, tmp_path):
    ours, _ = read_llama(tmp_path, kind=kind, add_prefix_space=add_prefix_space)
    (tmp_path / 'written').mkdir()
    write_text_tokenizer(ours, tmp_path / 'written', False)
    (tmp_path / 'written' / 'config.json').write_text(json.dumps({'model_type': kind}))
    again, _ = read_text_tokenizer(tmp_path / 'written', ForeignConfig(
        model_type=kind, vocab_size=len(ours) - 1, bos_token_id=1, eos_token_id=2))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'written')
    assert again.order.tolist() == ours.order.tolist()
    for line in ' the', '  the', '\u2581the', ' ', 'a <s>b</s>', *LINES[::20]:
        tokens = ours.encode(line)
        assert again.encode(line) == tokens and theirs(line).input_ids == ours.order[tokens].tolist(), line
        assert again.decode(tokens) == theirs.decode(ours.order[tokens]) == ours.decode(tokens), line


def extended_llama():
    """Llama's SentencePiece model with two pieces that were added later, both with the score 0."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(originals.llama_model())
    for piece in 'manthe', 'theman':
        proto.pieces.add(piece=piece, score=0)
    return sentencepiece_tokenizer(proto.SerializeToString(), [None, 1, 2, 0], len(proto.pieces))


@pytest.mark.parametrize('make', [plain_sentencepiece, controls, extended_llama])
def test_a_tokenizer_model_with_other_rules_than_that_of_llama_is_written_without_a_tokenizer_json(make, tmp_path):
    write_text_tokenizer(make(), tmp_path, True)
    assert {path.name for path in tmp_path.iterdir()} == {'tokenizer.model', 'tokenizer_config.json'}


def test_written_files_of_marian_take_the_names_of_special_tokens_as_text(marian, tmp_path):
    source, target = marian[1:]
    write_translation_tokenizers({'source': source, 'target': target}, tmp_path, joint=True)
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path)
    for text in 'the </s> man', '>>fra<< <unk> <pad>':
        assert theirs(text).input_ids == [*source.order[source.encode(text)], 0]
        assert theirs(text_target=text).input_ids == [*target.order[target.encode(text)], 0]


@pytest.mark.parametrize('pad, unknown', [('<pad>', '<unk>'), ('[PAD]', '[UNK]')])
def test_special_tokens_of_marian_keep_their_names_and_ids(pad, unknown, marian, tmp_path):
    for side, tokenizer in zip(('source', 'target'), marian[1:], strict=True):
        model, vocabulary = tokenizer.parts
        (tmp_path / f'{side}.spm').write_bytes(model)
    names, last = {'<pad>': pad, '<unk>': unknown}, len(vocabulary) - 1
    (tmp_path / 'vocab.json').write_text(json.dumps(
        {names.get(piece, piece): number for piece, number in vocabulary.items()}))
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps({
        'pad_token': pad, 'unk_token': {'__type': 'AddedToken', 'content': unknown}}))
    tokenizers = read_translation_tokenizers(tmp_path, Config(
        model_type='marian', vocab_size=last + 1, pad_token_id=last, decoder_start_token_id=last))
    write_translation_tokenizers(tokenizers, tmp_path, joint=True)
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path)
    assert (theirs.pad_token, theirs.unk_token) == (pad, unknown)
    assert (theirs.eos_token_id, theirs.unk_token_id, theirs.pad_token_id) == (0, 1, last)


def test_a_written_tokenizer_gives_a_language_model_no_token_types(tmp_path):
    """transformers 4 gives token types to each model by default. GPT-2 adds embeddings for them, and Llama fails."""
    write_text_tokenizer(ByteTokenizer(), tmp_path, True)
    written = json.loads((tmp_path / 'tokenizer_config.json').read_text())
    assert written['model_input_names'] == ['input_ids', 'attention_mask']


def test_special_tokens_keep_their_names(tmp_path):
    model = originals.sentencepiece_model(model_type='bpe', bos_piece='<|start|>', eos_piece='<|end|>')
    size = sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    write_text_tokenizer(sentencepiece_tokenizer(model, [None, 1, 2, 0], size), tmp_path, True)
    written = json.loads((tmp_path / 'tokenizer_config.json').read_text())
    assert [written[f'{kind}_token'] for kind in ('bos', 'eos', 'unk')] == ['<|start|>', '<|end|>', '<unk>']


@pytest.mark.parametrize('ends, generation, files, message', [
    ([2, 3, 0], None, '{0}/config.json', '<unk> (3) or a (0)'), ([2, 3], [2, 3, 0], '{0}/config.json and '
     '{0}/generation_config.json', '<unk> (3) or a (0)'), (2, 3, '{0}/generation_config.json', '<unk> (3)'),
    (2, [2], '', ''), (2, None, '', ''), (2, -1, '', '')])
def test_further_end_tokens_are_named(ends, generation, files, message, tmp_path, caplog):
    (tmp_path / 'generation_config.json').write_text(json.dumps({'eos_token_id': generation, 'num_beams': 4}))
    read_with(tmp_path, beginning(), end=ends)
    expected = (f'eos_token_id has further end tokens. Only </s> (2) ends a text, not {message}. To use a '
                'different one of these tokens as the end token, set eos_token_id of config.json to the id of this '
                'token before the import')
    assert [record.getMessage() for record in caplog.records] == (
        [f'{files.format(tmp_path)}: {expected}'] if message else [])


@pytest.mark.parametrize('options, field', [
    ({'pad': 5000}, 'pad_token_id'), ({'end': 5000}, 'eos_token_id'), ({'end': [5000, 2]}, 'eos_token_id'),
    ({'start': 5000, 'add_bos_token': False}, 'bos_token_id')])
@pytest.mark.parametrize('read_from', [lambda folder, **options: read_with(folder, beginning(), **options), read_llama])
def test_an_id_that_the_vocabulary_lacks_is_an_error_in_config_json(read_from, options, field, tmp_path):
    with pytest.raises(UserError, match=f'/config.json: {field}=5000 is not the id of a token, because the vocabulary'):
        read_from(tmp_path, **options)


@pytest.mark.parametrize('in_field', [False, True])
def test_a_chat_template_that_is_not_imported_is_reported(in_field, tmp_path, caplog):
    template = '{{ messages[0].content }}'
    if not in_field:
        (tmp_path / 'chat_template.jinja').write_text(template)
    read_with(tmp_path, beginning(), **({'chat_template': template} if in_field else {}))
    assert f'{tmp_path}: the chat template is not imported' in caplog.text


def test_pieces_of_bytes_are_readable():
    ours, *_ = gpt2()
    assert ours.pieces(ours.encode('the the'))[-1] == '\u2581the'
    assert ours.vocabulary[ours.encode('the the')[-1]] == '\u0120the'
    assert ours.pieces(ours.encode('\n')) == ['<U+000A>']
    ours, *_ = llama_3()
    assert ours.pieces([len(ours) - 1]) == ['<|eot_id|>'] and ours.pieces(range(4)) == list(SPECIAL)


@pytest.mark.parametrize('make', [gpt2, llama_3])
def test_pieces_of_a_whole_vocabulary_search_the_json_text_once(make):
    class Text(str):
        searches = 0

        def __contains__(self, text):
            self.searches += 1
            return super().__contains__(text)

    ours, *_ = make()
    ours._settings['model'] = text = Text(ours.json)
    ours.pieces(range(len(ours)))
    assert text.searches <= 1


@pytest.mark.parametrize('make', [gpt2, llama_3])
@pytest.mark.parametrize('text, expected', [
    ('x = 1\ndef g(y):\n\treturn y', ['x', '=', '1', 'def', 'g(y):', 'return', 'y']),
    ('café 我喜欢 😀', ['café', '我', '喜', '欢', '😀'])])
def test_line_breaks_and_characters_of_several_bytes_make_words(make, text, expected):
    ours, *_ = make()
    assert [word for word, *_ in words(ours.pieces(ours.encode(text)))] == expected


def test_pieces_of_a_tokenizer_json_with_byte_fallback_are_as_in_sentencepiece():
    """The decoder removes the space at the beginning of a text, so a decoded token has lost its space."""
    names = '<unk>', '</s>', '\u2581', 'a', '\u2581a', '<0x0A>', '<0x20>', '<0x61>', '\r'
    vocabulary = {name: number for number, name in enumerate(names)}
    original = tokenizers.Tokenizer(models.BPE(vocabulary, [('\u2581', 'a')], byte_fallback=True, unk_token='<unk>'))
    original.normalizer = normalizers.Sequence([normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')])
    original.decoder = decoders.Sequence([decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse(),
                                          decoders.Strip(' ', 1, 0)])
    ours = tokenizers_tokenizer(original.to_str(), [None, None, 1, 0], len(vocabulary))
    assert ours.pieces(ours.encode('a a\na')) == ['\u2581a', '\u2581a', '<0x0A>', 'a']
    # A byte and a letter are different pieces. They have the names as in SentencePiece, for train.init_from.
    assert ours.pieces(range(len(ours))) == [*SPECIAL, *names[2:]]


@pytest.mark.parametrize('content', ['{"kind": "tokenizers"}', '{"kind": "sentencepiece", "special": [0, 1, 2, 9], '
                                     '"size": 4, "vocabulary": null, "model": ""}', '{"kind": "tokenizers", "special": '
                                     '[0, 1, 2, 3], "size": 9, "model": "{}"}'])
def test_a_damaged_file_is_refused(content, tmp_path):
    (tmp_path / 'text.model').write_text(content)
    with pytest.raises(UserError, match='cannot be read'):
        load_tokenizer(tmp_path / 'text.model')
