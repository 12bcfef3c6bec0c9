"""The data of the explorer's page, without a browser. tests/browser tests the page in a browser."""

import base64
import hashlib
import io
import json
import re
import zlib

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from analysis import explain
from analysis.explain import STEPS, Attention, Explanation, Page, explain_example, explain_text, picture_of, words
from analysis.pictures import answer_figure
from inference.generate import Generator
from inference.outputs import Hypothesis, Output, TokenProbability
from inference.predict import Predictor
from inference.predictions import Prediction
from inference.translate import Translator
from input_pipeline.input_format import InputFormat
from input_pipeline.preprocessing import Preprocessing
from input_pipeline.tokenizer import BOS, EOS, ByteTokenizer
from model.blocks import BlockConfig
from model.language_model import LanguageModel
from model.patches import PatchTransformer
from model.transformer import Transformer
from runtime.errors import UserError

HOSTILE = '</script><script>alert(1)</script><!-- & \u2028 \u2029 \x00 "\''
BLOCKS = BlockConfig(d_model=16, d_ff=16, num_heads=2)
TOKENIZER = ByteTokenizer()


def initialised(module, **inputs):
    return jax.jit(module.init)(jax.random.key(0), **inputs)['params']


@pytest.fixture(scope='module')
def translator():
    module = Transformer(BLOCKS, num_layers=1, source_vocab_size=len(TOKENIZER), target_vocab_size=len(TOKENIZER))
    tokens = jnp.ones((1, 4), jnp.int32)
    return Translator(module, initialised(module, source=tokens, target=tokens),
                      {'source': TOKENIZER, 'target': TOKENIZER}, 64)


@pytest.fixture(scope='module')
def generator():
    module = LanguageModel(BLOCKS, num_layers=1, vocab_size=len(TOKENIZER))
    return Generator(module, initialised(module, tokens=jnp.ones((1, 4), jnp.int32)), TOKENIZER, 16, False)


def output(source, *targets):
    hypotheses = [Hypothesis(text, TOKENIZER.encode(text), -1.0 - rank, -2.0 - rank)
                  for rank, text in enumerate(targets)]
    return Output(source, TOKENIZER.encode(source), hypotheses)


def written(path):
    """(The page, the data in it.)"""
    html = path.read_text(encoding='utf-8')
    return html, json.loads(re.search('<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def example(number=1, text='one', pieces=('a', 'b')):
    weights = np.random.default_rng(number).dirichlet(np.ones(len(pieces)), (2, 3, len(pieces))).astype(np.float32)
    return Explanation(number, [('source', text), ('translation', text)],
                       [Attention('cross', weights, list(pieces), list(pieces), ('a', 'b'), True)],
                       [TokenProbability(piece, 0.5, [(text, 0.25)]) for piece in pieces], [('score',), (text,)])


@pytest.mark.parametrize('pieces, expected', [
    (['▁the', '▁h', 'ous', 'e', '.', '</s>'], ['the', 'house.', '</s>']),
    (['<s>', '▁', '2', '6'], ['<s>', '26']),
    (['▁na', '<0xC3>', '<0xAF>', 've'], ['naïve']),
    (['▁', '我', '喜欢', '<0xE7>', '<0x8C>', '<0xAB>', '。'], ['我', '喜欢', '猫', '。']),
    (['T', 'o', '▁', 'b', 'e', '<U+000A>', 'o', 'r'], ['To', 'be', 'or']),
    (['2', '6', '\xa0', '%'], ['26', '%']),
    (['<0xFF>', 'a'], ['\ufffda']),
    (['a', '<0xyz>', '<0xe6>'], ['a<0xyz><0xe6>']),  # ordinary text, not bytes
    (['a', '<0x0A>', '<0x0A>', '<0xC3>', '<0xA9>'], ['a', 'é']),
    (['▁=', '▁1', '<U+000A>', 'g', '(', '):<U+000A>', '<U+0009>return', '▁y'], ['=', '1', 'g():', 'return', 'y']),
    (['<U+000A>', '▁▁▁▁', '▁return', '▁', '▁y', '▁▁', '</s>'], ['', 'return', 'y', '', '</s>']),
    (['▁<0xE6><0x88>', '<0x91>', '喜<0xE6><0xAC>', '<0xA2>', '▁<0xF0><0x9F><0x98>', '<0x80>'], ['我', '喜欢', '😀']),
    (['▁na', '<unk>', 've', '▁', '<unk>'], ['na<unk>ve', '<unk>']),
    (['我', '<unk>', '猫'], ['我', '<unk>', '猫']),
    (['▁', '2026', '年', '8', '月'], ['2026', '年', '8', '月']),
    (['▁', '我', '喜欢', 'Py', 'thon'], ['我', '喜欢', 'Python']),
    ([], []),
])
def test_pieces_make_words(pieces, expected):
    found = words(pieces)
    assert [text for text, _, _ in found] == expected
    places = [place for _, begin, end in found for place in range(begin, end)]
    assert places == list(range(len(pieces)))  # every piece once


def test_the_page_contains_the_explanation_unchanged(tmp_path):
    page = Page(tmp_path / 'new' / 'page.html', 'about', 5)
    explanation = example(pieces=('▁a', 'b', '</s>'))
    page.add(explanation)
    page.write()
    html, data = written(page.path)
    item, = data['items']
    attention, = item['attention']
    halves = np.frombuffer(zlib.decompress(base64.b64decode(attention['weights'])), np.uint8).astype(int)
    low, high = halves.reshape(2, *attention['shape'])
    np.testing.assert_allclose((low + 256 * high) / data['steps'], explanation.attention[0].weights, atol=0.51 / STEPS)
    assert item['predictions'][0] == ['▁a', 0.5, [['one', 0.25]]]
    assert attention['queries']['words'] == [['ab', 0, 2], ['</s>', 2, 3]]
    assert [path.name for path in page.path.parent.iterdir()] == ['page.html']
    # The policy lets run what the page has, and nothing else.
    for tag in 'style', 'script':
        content = re.search(f'<{tag}>(.*?)</{tag}>', html, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in html
    assert "default-src 'none'" in html
    assert set(re.findall(r'https?://[^\'"]*', html)) == {'http://www.w3.org/2000/svg'}  # a name, never asked for


@pytest.mark.parametrize('pieces, expected', [
    (['<s>', '▁a', 'b', '</s>'], '<s> ▁ab </s>'),
    (['▁1', '<U+000A>', 'g', ':<U+000D><U+000A>', '<U+0009>y', '<0x0A>', '(', '<U+00A0>', '%'],
     '▁1<U+000A> g:<U+000D><U+000A> <U+0009>y<0x0A> (<U+00A0> %'),
    (['a', '▁', '2', '▁▁', '▁b'], 'a ▁2 ▁▁▁b'),
    (['▁', '我', '喜欢', '<0x0A>', '猫'], '▁我喜欢<0x0A> 猫'),
])
def test_pieces_are_apart_at_white_space_and_special_tokens(pieces, expected, tmp_path):
    page = Page(tmp_path / 'page.html', '', 1)
    page.add(example(pieces=pieces))
    page.write()
    apart = written(page.path)[1]['items'][0]['attention'][0]['queries']['apart']
    assert ''.join(' ' * gap + piece for gap, piece in zip(apart, pieces, strict=True)).lstrip() == expected


@pytest.mark.parametrize('weight', [-0.01, 33.0, np.nan])
def test_weights_that_the_page_cannot_show_are_refused(weight, tmp_path):
    explanation = example()
    explanation.attention[0].weights[0, 0, 0, 0] = weight
    with pytest.raises(UserError, match='shows weights from 0 to 32, but this .* Remove the edit of the weights, use '
                                        'another --checkpoint if they are NaN, or'):
        Page(tmp_path / 'page.html', '', 1).add(explanation)


@pytest.mark.parametrize('prediction', [TokenProbability('a', np.nan, []), TokenProbability('a', 0.5, [('b', np.nan)])])
def test_probabilities_that_are_nan_are_refused(prediction, tmp_path):
    explanation = example()
    explanation.predictions[0] = prediction
    with pytest.raises(UserError, match='the probabilities of this model are NaN. Remove the edit'):
        Page(tmp_path / 'page.html', '', 1).add(explanation)


def test_hostile_text_stays_text(tmp_path):
    page = Page(tmp_path / 'page.html', HOSTILE, 5)
    page.add(example(text=HOSTILE, pieces=(HOSTILE, '▁<b>')))
    page.write()
    html, data = written(page.path)
    assert data['about'] == data['items'][0]['texts'][0][1] == data['items'][0]['answers'][1][0] == HOSTILE
    assert data['items'][0]['attention'][0]['keys']['pieces'] == [HOSTILE, '▁<b>']
    assert html.count('<script') == html.count('</script') == 2 and '<!--' not in html


def test_a_page_has_limits(tmp_path, monkeypatch):
    page = Page(tmp_path / 'page.html', '', 2)
    assert not page.full
    page.add(example(1))
    page.add(example(2))
    assert page.full and page.count == 2
    monkeypatch.setattr(explain, 'MOST_BYTES', 10)
    page = Page(tmp_path / 'page.html', '', 100)
    page.add(example(1))
    assert page.full


@pytest.mark.parametrize('name, most, message', [
    ('.', 1, 'cannot be written: it is a folder'),
    ('file/page.html', 1, 'cannot be written'),
    ('page.html', 0, 'explain_count=0'),
])
def test_a_page_that_cannot_be_is_refused_at_once(tmp_path, name, most, message):
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match=message):
        Page(tmp_path / name, '', most)
    assert not list(tmp_path.glob('*.partial'))


def test_probabilities_are_the_models_own(translator):
    answer = output('ab', 'cde')
    found = translator.token_probabilities(answer, top=3)
    logits = jax.jit(translator.module.apply)({'params': translator.params}, jnp.array([[*answer.source_tokens, EOS]]),
                                     jnp.array([[BOS, *TOKENIZER.encode('cde')]]))
    probabilities = np.asarray(jax.nn.softmax(logits))[0]
    for place, token in enumerate([*TOKENIZER.encode('cde'), EOS]):
        piece, probability, alternatives = found[place]
        assert piece == TOKENIZER.pieces([token])[0]
        assert probability == pytest.approx(probabilities[place, token], rel=1e-4)
        order = [other for other in np.argsort(-probabilities[place]) if other != token][:3]
        assert [name for name, _ in alternatives] == TOKENIZER.pieces(order)
        np.testing.assert_allclose([share for _, share in alternatives], probabilities[place, order], rtol=1e-4)
    assert len(found) == 4
    log_probs, = translator.token_log_probs([(answer.source_tokens, answer.hypotheses[0].tokens)])
    np.testing.assert_allclose(np.log([each.probability for each in found]), log_probs, rtol=1e-4)


def test_a_translation_is_explained(translator):
    answer = output('ab c', 'de', 'f')
    weights = translator.attention(answer)
    explanation = explain_text(translator, answer, weights, 7, 'expected')
    assert explanation.number == 7
    assert explanation.texts == [('source', 'ab c'), ('translation', 'de'), ('reference', 'expected')]
    assert [each.kind for each in explanation.attention] == ['cross', 'encoder', 'decoder']
    for each in explanation.attention:
        np.testing.assert_array_equal(each.weights, weights[each.kind])
        assert each.weights.shape == (1, 2, len(each.queries), len(each.keys))
        assert each.written == (each.kind != 'encoder')
    assert [each.piece for each in explanation.predictions] == explanation.attention[0].queries == ['d', 'e', '</s>']
    assert explanation.answers == [('score', 'log-probability', 'translation'), ('-2.000', '-1.000', 'de'),
                                   ('-3.000', '-2.000', 'f')]


def test_the_titles_mention_that_tokens_are_left_out(translator, monkeypatch):
    answer = output('abcdef', 'gh')
    weights = translator.attention(answer)
    count = len(explain_text(translator, answer, weights).attention[0].keys)
    monkeypatch.setattr(explain, 'MOST_TOKENS', 3)
    cross = explain_text(translator, answer, weights).attention[0]
    assert cross.titles == ('translation', f'source (first 3 of {count})')
    assert cross.weights.shape[2:] == (3, 3) == (len(cross.queries), len(cross.keys))


def test_the_titles_give_the_number_of_all_tokens_of_a_text_that_is_longer_than_a_window(generator):
    answer, weights = output('abc', 'defghijklmnopqrstuv'), {'encoder': np.full((1, 2, 16, 16), 1 / 16, np.float32)}
    assert explain_text(generator, answer, weights).attention[0].titles == ('text (first 16 of 22)',) * 2
    axes = answer_figure(generator, answer, '', weights).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ('keys (first 16 of 22)', 'queries (first 16 of 22)')


@pytest.mark.slow
def test_a_continuation_is_explained_as_far_as_a_window_reaches(generator):
    explanation = explain_text(generator, answer := output('abc', 'defghijklmnopqrstuv'), generator.attention(answer))
    attention, = explanation.attention
    assert ''.join(attention.queries) == ''.join(attention.keys) == 'abcdefghijklmnop'
    assert explanation.predictions[0] is None
    assert [each.piece for each in explanation.predictions[1:]] == attention.queries[1:]
    logits = jax.jit(generator.module.apply)({'params': generator.params}, jnp.array([TOKENIZER.encode('abcd')]))
    assert explanation.predictions[4].probability == pytest.approx(
        float(jax.nn.softmax(logits)[0, 3, TOKENIZER.encode('e')[0]]), rel=1e-4)


def test_empty_hypotheses_are_listed(translator, generator, monkeypatch):
    answer = output('ab', '', 'c')
    for model, kind, names in (translator, 'cross', ('source', 'translation')), (
            generator, 'encoder', ('prompt', 'continuation')):
        monkeypatch.setattr(model, 'token_probabilities', lambda *_: [])
        explanation = explain_text(model, answer, {kind: np.ones((1, 1, 2, 2), np.float32)})
        assert explanation.texts == [(names[0], 'ab'), (names[1], '')]
        assert explanation.answers == [('score', 'log-probability', names[1]), ('-2.000', '-1.000', ''),
                                       ('-3.000', '-2.000', 'c')]


def test_an_example_of_a_split_has_no_continuation(generator, monkeypatch):
    monkeypatch.setattr(generator, 'token_probabilities', lambda *_: [])
    answer = Output('ab', TOKENIZER.encode('ab'), [Hypothesis('', [], 0.0, 0.0, ended=False)])
    explanation = explain_text(generator, answer, {'encoder': np.ones((1, 1, 2, 2), np.float32)})
    assert explanation.texts == [('text', 'ab')] and explanation.answers == []


def test_a_model_of_another_kind_is_explained_in_its_own_words(generator):
    class Repairer(Generator):
        unpredicted = 0
        titles = {'encoder': ('repaired', 'broken')}

        def text_names(self, output):
            return 'broken', 'repaired'

        def read_and_written(self, output):
            return {'tokens': output.source_tokens}, output.hypotheses[0].tokens

    repairer = Repairer(generator.module, generator.params, TOKENIZER, 16, False)
    answer = output('ab', 'cd')
    explanation = explain_text(repairer, answer, repairer.attention(answer))
    assert explanation.texts == [('broken', 'ab'), ('repaired', 'cd')]
    assert explanation.attention[0].titles == ('repaired', 'broken')
    assert [each.piece for each in explanation.predictions] == ['c', 'd']


def test_a_recurrent_models_alignment_is_one_head(translator):
    alignment = np.full((1, 1, 3, 4), 0.25, np.float32)  # such a model has 'cross' alone
    attention, = explain_text(translator, output('abc', 'de'), {'cross': alignment}).attention
    assert attention.kind == 'cross' and len(attention.queries) == 3 and len(attention.keys) == 4
    with pytest.raises(UserError, match='no attention weights'):
        explain_text(translator, output('abc', 'de'), {})


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('space, classes, grid, first', [
    ((4, 8), ['cat', 'dog'], (2, 4), 'row 1, column 1'), ((8,), None, (1, 4), 'window 1')])
def test_an_image_and_a_series_are_explained(space, classes, grid, first):
    module = PatchTransformer(BLOCKS, num_layers=1, patch=2, outputs=2)
    inputs = np.random.default_rng(0).integers(0, 255, (1, *space, 3)).astype(np.float32)
    form = InputFormat(inputs.shape[1:], Preprocessing(
        [0.0] * 3, [1.0] * 3, None if classes else [0.0] * 2, None if classes else [1.0] * 2), classes and (*classes,),
        () if classes else ('x', 'y'))
    model = Predictor(module, initialised(module, inputs=jnp.asarray(inputs)), form)
    found = model.predict(inputs).outputs[0]
    explanation = explain_example(model, model.predict(inputs)[0], 3, 'dog')
    attention, = explanation.attention
    assert explanation.grid == grid and attention.keys[:2] == ['class token', first]
    assert attention.weights.shape == (1, 2, len(attention.queries), len(attention.keys))
    assert explanation.picture.startswith(b'\x89PNG') and explanation.texts[1] == ('expected', 'dog')
    assert explanation.texts[0] == (('class', classes[found.argmax()]) if classes
                                    else ('value', f'{found[0]:.10g} {found[1]:.10g}'))
    assert len(explanation.answers) == 3


@pytest.mark.parametrize('tokens, hidden', [(3, [1]), (4, [2])], ids=['mean', 'class token'])
def test_hidden_patches_of_a_series_are_marked(tokens, hidden, monkeypatch):
    module = PatchTransformer(BLOCKS, num_layers=1, patch=2, outputs=2)
    form = InputFormat((6, 1), Preprocessing([0.0], [1.0], None, None), ('a', 'b'), padded=True, missing=True)
    series = np.array([[1.0], [2.0], [np.nan], [np.nan], [3.0], [np.nan]])  # the middle patch is hidden
    model, weights = Predictor(module, {}, form), np.full((1, 2, tokens, tokens), 1 / tokens, np.float32)
    monkeypatch.setattr(model, 'attention', lambda prediction: {'encoder': weights})
    explanation = explain_example(model, Prediction(series, np.log([0.4, 0.6]), form))
    assert explanation.hidden == hidden
    assert explanation.attention[0].queries[-3:] == ['window 1', 'window 2 (hidden)', 'window 3']


def test_a_picture_is_the_image():
    image = np.random.default_rng(0).integers(0, 256, (3, 5, 3)).astype(np.uint8)
    image[0, 0], image[0, 1] = 0, 255
    shown = matplotlib.image.imread(io.BytesIO(picture_of(image)))
    np.testing.assert_allclose(shown[..., :3], image / 255, atol=0.01)


@pytest.mark.parametrize('values', [[1.0], [np.nan, 1.0, np.nan, 2.0]])
def test_values_of_a_series_without_a_neighbouring_value_are_drawn(values):
    shown = matplotlib.image.imread(io.BytesIO(picture_of(np.array(values)[:, None])))
    drawn = shown[..., 3].any(axis=0).reshape(len(values), -1).any(axis=1)  # by step
    np.testing.assert_array_equal(drawn, ~np.isnan(values))
