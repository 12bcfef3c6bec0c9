"""The page of decode.py --explain in a real browser: what it shows against the arrays, and how it behaves.

Pictures of it are left in build/browser, to be looked at.
"""

import itertools

import numpy as np
import pytest

from analysis.explain import Explanation, picture_of
from tests.browser.explanations import (  # noqa: F401 (fixtures)
    HOSTILE,
    PRECISION,
    SOURCE,
    TARGET,
    attention,
    browser,
    cell,
    long,
    opened,
    picture,
    share,
    texts,
    thumbnail,
    translation,
)

pytestmark = pytest.mark.browser


def test_every_layer_and_head_of_every_kind_is_shown_unchanged(opened):
    explanation = translation()
    with opened([explanation]) as page:
        picture(page, 'light')
        for each in explanation.attention:
            page.locator('#kinds label', has_text=each.kind).click()
            assert texts(page, '#keys .token') == [piece.replace('▁', '') or '␣' for piece in each.keys]
            queries, keys = each.titles
            assert texts(page, '#query-title, #key-title') == [keys, queries]  # the keys are above the queries
            title = f'Rows: {queries} (queries). Columns: {keys} (keys). '
            assert page.locator('#matrix-title').inner_text().startswith(title)
            for layer, head in itertools.product(range(3), ['mean', 1, 2]):
                name = f'layer {layer + 1}, {head if head == "mean" else f"head {head}"}'
                page.get_by_role('button', name=name, exact=True).click()
                weights = each.weights[layer].mean(0) if head == 'mean' else each.weights[layer, head - 1]
                shown = np.array(page.evaluate('view.weights.map(row => [...row])'))
                np.testing.assert_allclose(shown, weights, atol=1 / 255)
                query, key = divmod(layer * 7 + len(str(head)) * 13, 8)
                assert cell(page, query % 8, key) == pytest.approx(weights[query % 8, key], abs=PRECISION)
                np.testing.assert_allclose(thumbnail(page), weights / weights.max(), atol=0.02)


def test_a_chosen_token_shows_where_it_looks_and_what_else_it_might_have_been(opened):
    explanation = translation()
    cross = explanation.attention[0].weights[-1].mean(0)
    with opened([explanation]) as page:
        token = page.locator('#queries .token').nth(3)
        token.click()
        assert token.get_attribute('aria-selected') == 'true'
        assert token.get_attribute('aria-label') == 'grand, probability 69.0 %'
        assert page.locator('#detail strong').inner_text() == 'grand'
        named = texts(page, '#detail .bars:not(.doubt) bdi')
        assert named == [SOURCE[place].replace('▁', '') or '␣' for place in np.argsort(-cross[3])[:5]]
        shares = list(map(share, texts(page, '#detail .bars:not(.doubt) span')))
        np.testing.assert_allclose(shares, np.sort(cross[3])[:-6:-1], atol=PRECISION)
        assert 'has probability 69.0 %. Alternatives:' in page.locator('#detail').inner_text()
        assert page.locator('#detail .doubt bdi').all_text_contents() == ['autre', HOSTILE.strip()]
        widths = page.evaluate(
            "[...document.querySelectorAll('#lines path')].map(path => +path.getAttribute('stroke-width'))")
        expected = [0.6 + 5.4 * weight for weight in np.sort(cross[3])[::-1] if weight >= 0.005]
        np.testing.assert_allclose(widths, expected, atol=5.4 / 255)
        picture(page, 'chosen')
        page.locator('#keys .token').nth(4).hover()  # a column: the tokens that attend to it
        assert 'receives attention from' in page.locator('#detail').inner_text()
        np.testing.assert_allclose(list(map(share, texts(page, '#detail .bars span'))), np.sort(cross[:, 4])[:-6:-1],
                                   atol=PRECISION)
        assert texts(page, '#answers td') == ['-0.5', '-1.5', explanation.texts[1][1], '-0.9', '-2.5', 'autre']


def test_subwords_are_merged_into_words(opened):
    explanation = translation()
    with opened([explanation]) as page:
        page.locator('#merged').check()
        assert texts(page, '#keys .token') == ['12', 'big', 'houses.', '</s>']
        assert texts(page, '#queries .token') == ['douze', 'grandes', 'maisons.', '</s>']
        cross = explanation.attention[0].weights[-1].mean(0)
        # To a word the sum, of a word the mean: grandes -> houses.
        assert cell(page, 1, 2) == pytest.approx(cross[3:5, 4:7].sum(axis=1).mean(), abs=PRECISION)
        rows = np.add.reduceat(np.add.reduceat(cross, [0, 3, 4, 7], axis=1), [0, 3, 5, 7]) / [[3], [2], [2], [1]]
        np.testing.assert_allclose(page.evaluate('view.weights.map(row => [...row])'), rows, atol=1 / 255)
        assert page.locator('#queries .token').first.get_attribute('aria-label') == \
            f'douze, probability {99 * 89 * 79 / 1e4:.1f} %'
        picture(page, 'words')


def test_words_are_apart_after_line_breaks_and_tabs(opened):
    program = ['▁x', '▁=', '▁1', '<U+000A>', 'def', '▁g', '(', 'y', '):', '<U+000A>', '<U+0009>return', '▁y', '<0x0A>',
               '▁▁▁▁', '▁return', '▁z', '</s>']
    with opened([translation(1, source=program)]) as page:
        page.locator('#merged').check()
        assert page.locator('#keys').inner_text() == 'x = 1 def g(y): return y return z </s>'
        picture(page, 'program')


def test_the_keyboard_reaches_everything(opened):
    with opened([translation(number) for number in (1, 2, 3)]) as page:
        def press(*keys):
            for key in keys:
                page.keyboard.press(key)

        def focused():
            return page.evaluate('document.activeElement.textContent')

        press('ArrowRight')
        assert focused() == 'do' and page.locator('#detail strong').inner_text() == 'do'
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == 'solid'
        press('ArrowRight', 'ArrowRight', 'ArrowLeft')
        assert focused() == 'uz'
        press('ArrowUp')
        assert focused() == '1' and 'receives attention from' in page.locator('#detail').inner_text()
        press('l')
        assert page.locator('#shown').inner_text() == 'layer 1, mean of the heads'
        assert focused() == '1'  # the token stays
        press('Shift+L', 'h')
        assert page.locator('#shown').inner_text() == 'layer 3, head 1'
        press('h', 'h')
        assert page.locator('#shown').inner_text() == 'layer 3, mean of the heads'
        press('k')
        assert page.locator('#kinds input[value=encoder]').is_checked()
        press('Shift+K', 'w')
        assert page.locator('#kinds input[value=cross]').is_checked() and page.locator('#merged').is_checked()
        press('ArrowRight', 'Escape')
        assert page.locator('[aria-selected=true]').count() == 0
        press('n', 'n', 'n', 'p')
        page.wait_for_selector('#list li:nth-child(2) [aria-current=true]')
        press('/', 'w', 'o', 'x')
        assert page.locator('#found').inner_text() == '0 of 3'
        assert page.locator('#merged').is_checked()  # the letters went into the field
        page.locator('#filter').fill('')
        press('Escape', 't')
        assert page.locator('#theme').inner_text() == 'Light'


def test_another_kind_keeps_the_layer_or_shows_the_last_layer(opened):
    explanation = translation()
    explanation.attention[1] = attention('encoder', SOURCE, SOURCE, ('source', 'source'), False, 1, layers=6)
    with opened([explanation]) as page:
        def after(*keys):
            for key in keys:
                page.keyboard.press(key)
            return page.locator('#shown').inner_text().partition(',')[0]

        assert after('k') == 'layer 3' and after('l', 'l') == 'layer 5'
        assert after('k') == 'layer 3'  # the last layer of the decoder
        assert after('l') == 'layer 1' and after('k') == 'layer 1'


def test_a_tap_shows_the_weight_of_a_cell(opened):
    explanation = translation()
    with opened([explanation], has_touch=True) as page:
        x, y = page.evaluate('(({left, top, cell}) => [left + cell * 2.5, top + cell * 1.5])(view.matrix)')
        page.locator('#matrix').tap(position={'x': x, 'y': y})
        weight = explanation.attention[0].weights[-1].mean(0)[1, 2]
        assert share(page.locator('#cell .number').inner_text()) == pytest.approx(weight, abs=PRECISION)
        assert page.locator('#cell').inner_text().startswith('uz attends to 2: ')


def test_a_page_without_explanations_has_nothing_to_show(opened):
    from playwright.sync_api import expect  # here, because other tests run without it

    with opened([]) as page:
        assert page.locator('#found').inner_text() == 'nothing to show'
        assert not page.locator('#matrix').is_visible()
        for key in 'ArrowRight', 'l', 'h', 'k', 'w', 'n', 'p', 'Escape', '/':
            page.keyboard.press(key)
        page.emulate_media(color_scheme='dark')
        expect(page.locator('#theme')).to_have_text('Light')
        page.keyboard.press('t')
        assert page.locator('#theme').inner_text() == 'Dark'
        page.locator('#theme').click()
        assert page.locator('#theme').inner_text() == 'Light'


FOUND_BEHIND = """() => {  // [tokens that a line runs behind, ends of lines that touch no token]
    const boxes = [...document.querySelectorAll('#queries .token, #keys .token')].map(token => token.getClientRects())
        .flatMap(rects => [...rects]);
    const origin = document.getElementById('lines').getBoundingClientRect();
    const inside = ({x, y}, box, by) =>
        x > box.left + by && x < box.right - by && y > box.top + by && y < box.bottom - by;
    let behind = 0, loose = 0;
    for (const path of document.querySelectorAll('#lines path')) {
        const length = path.getTotalLength();
        const at = share => {
            const {x, y} = path.getPointAtLength(length * share);
            return {x: x + origin.left, y: y + origin.top};
        };
        const points = Array.from({length: 101}, (_, place) => at(place / 100));
        behind += boxes.filter(box => points.some(point => inside(point, box, 1))).length;
        loose += [points[0], points[100]].filter(point => !boxes.some(box => inside(point, box, -1))).length;
    }
    return [behind, loose];
}"""
ENGLISH = [
    '▁On', '▁Friday', ',', '▁August', '▁25', ',', '▁1', '9', '2', '2', ',', '▁about', '▁three', '▁hundred', '▁old',
    '▁friends', '▁of', '▁the', '▁famous', '▁wood', 'cut', 'ter', '▁gathered', '▁around', '▁the', '▁large', '▁oak',
    '▁table', '.', '</s>']
FRENCH = [
    '▁Le', '▁vendre', 'di', '▁25', '▁août', '▁1', '9', '2', '2', ',', '▁environ', '▁trois', '▁cents', '▁vieux',
    '▁amis', '▁du', '▁célèbre', '▁bû', 'cher', 'on', '▁se', '▁sont', '▁réunis', '▁autour', '▁de', '▁la', '▁grande',
    '▁table', '▁en', '▁chêne', '.', '</s>']
HEBREW = [*['▁של', 'ום', '▁New', '▁York', '▁2', '6', '▁בוקר', '▁טוב', '▁לכולם', '▁אנחנו', '▁הולכים', '▁לשוק', '▁הגדול',
            '▁בעיר'], '</s>']


@pytest.mark.parametrize('width', [320, 375, 768, 1280])
def test_no_line_runs_behind_a_token(opened, width):
    """Nor do tokens overlap; each line goes from one token to another, and there are as many as there should be."""
    pairs = [translation(1, ENGLISH, FRENCH), translation(2, HEBREW, ENGLISH), translation(3, ENGLISH, HEBREW),
             translation(4, ['▁' + 'long' * 40, *ENGLISH], FRENCH), translation(5)]
    with opened(pairs, width=width) as page:
        for number, explanation in enumerate(pairs, 1):
            page.wait_for_selector(f'#list li:nth-child({number}) [aria-current=true]')
            mean = explanation.attention[0].weights[-1].mean(0)
            drawn = page.locator('#lines path').count()
            assert np.sum(mean > 0.08 + 1 / 255) <= drawn <= np.sum(mean > 0.08 - 1 / 255)
            assert page.evaluate(FOUND_BEHIND) == [0, 0]
            page.locator('#queries .token').nth(7).click()
            assert page.locator('#lines path').count() >= np.sum(mean[7] > 0.01) > 3
            assert page.evaluate(FOUND_BEHIND) == [0, 0]
            page.keyboard.press('w')
            assert page.evaluate(FOUND_BEHIND) == [0, 0]
            page.keyboard.press('w')
            for side in ('keys', 'queries'):
                boxes = [token.bounding_box() for token in page.locator(f'#{side} .token').all()]
                assert all(one['y'] + one['height'] <= other['y'] + 1 or one['y'] >= other['y'] + other['height'] - 1
                           or one['x'] + one['width'] <= other['x'] + 1 or one['x'] >= other['x'] + other['width'] - 1
                           for one, other in itertools.combinations(boxes, 2))
            picture(page, f'lines-{number}-{width}')
            page.mouse.move(0, 0)  # away from the tokens of the next one
            page.keyboard.press('n')


def test_a_long_text_on_a_phone_is_a_paragraph(opened):
    """The tokens that a token attends to are shaded, without lines that would run behind all others."""
    row = [f'▁word{place}' for place in range(79)] + ['</s>']
    with opened([translation(1, row, row)], width=375) as page:
        page.locator('#queries .token').nth(2).click()
        assert page.locator('#lines path').count() == 0
        shades = page.evaluate("tokens('keys').map(token => +token.style.getPropertyValue('--weight'))")
        assert max(shades) == 1 and sum(shade > 0 for shade in shades) > 3
        boxes = [token.bounding_box() for token in page.locator('#keys .token').all()]
        assert boxes[0]['y'] == boxes[1]['y']
        picture(page, 'paragraph')


def test_a_scroll_bar_that_appears_while_the_page_is_drawn_does_not_wrap_rows_with_lines(opened):
    """The longer row needs about 990 pixels. The page fits into 1,040 pixels until the matrix is drawn."""
    for width in range(1001, 1031, 10):
        with opened([translation()], width=width, height=1040) as page:
            assert page.evaluate('document.documentElement.scrollHeight') > 1040
            assert page.evaluate("""view.columns || ['queries', 'keys'].every(
                side => $(side).clientHeight < 1.5 * parseFloat(getComputedStyle($(side)).lineHeight))""")


def test_arrows_go_where_they_point_in_columns(opened):
    with opened([translation(1, ENGLISH, HEBREW)], width=375) as page:
        def after(key):
            page.keyboard.press(key)
            return page.evaluate('document.activeElement.textContent')

        keys = 'ArrowDown', 'ArrowDown', 'ArrowUp', 'ArrowLeft', 'ArrowDown', 'ArrowRight'
        assert [after(key) for key in keys] == [
            'של', 'ום', 'של', 'On', 'Friday', 'ום']
        keys, queries = (page.locator(f'#{side} .token').nth(1).bounding_box() for side in ('keys', 'queries'))
        assert keys['x'] + keys['width'] < queries['x']


@pytest.mark.parametrize('scheme, width', [('light', 360), ('dark', 360), ('dark', 1280)])
def test_phone_and_dark(opened, scheme, width):
    link = translation(2, texts=[('source', 'x' * 300), ('translation', '')],
                       source=['▁' + 'x' * 60, 'y' * 200, '</s>'])
    with opened([translation(), link, *map(long, range(3))], width=width, color_scheme=scheme) as page:
        background = page.evaluate("getComputedStyle(document.body).backgroundColor").removeprefix('rgb(')
        assert (int(background.partition(',')[0]) < 60) == (scheme == 'dark')
        page.locator('#queries .token').nth(2).click()
        picture(page, f'{scheme}-{width}')
        assert page.evaluate('document.documentElement.scrollWidth') <= width
        page.keyboard.press('n')
        page.keyboard.press('w')
        page.wait_for_selector('#list li:nth-child(2) [aria-current=true]')
        assert page.evaluate('document.documentElement.scrollWidth') <= width
        page.locator('#theme').click()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor").removeprefix('rgb(') != background


@pytest.mark.parametrize('width', [360, 1280])
@pytest.mark.parametrize('heads', [1, 4, 8, 16])
def test_the_labels_of_the_heads_are_apart_and_the_chosen_head_is_visible(opened, heads, width):
    with opened([translation(heads=heads)], width=width) as page:
        spans = page.evaluate("""[...document.querySelectorAll('#heads > span')].map(span => {
            const text = document.createRange();
            text.selectNodeContents(span);
            return text.getBoundingClientRect();
        }).filter(box => box.width).sort((one, other) => one.y - other.y || one.x - other.x)""")
        assert all(one['bottom'] <= other['top'] or one['right'] < other['left']
                   for one, other in itertools.pairwise(spans))
        for _ in range(heads + 1):  # the last press returns to the mean
            page.keyboard.press('h')
            panel, chosen = (page.locator(f'#heads{chosen}').bounding_box() for chosen in ('', ' [aria-pressed=true]'))
            # The numbers of the layers cover 22 pixels.
            assert panel['x'] + 22 <= chosen['x'] and chosen['x'] + chosen['width'] <= panel['x'] + panel['width']
        picture(page, f'{heads}-heads-{width}')


CONTRASTS = """() => {  // of the texts of the keys with their backgrounds
    const ink = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const luminance = color => {  // as WCAG 2 defines it
        ink.fillStyle = color;
        ink.fillRect(0, 0, 1, 1);
        const [red, green, blue] = [...ink.getImageData(0, 0, 1, 1).data].map(value => value / 255)
            .map(value => value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4);
        return .2126 * red + .7152 * green + .0722 * blue;
    };
    return tokens('keys').map(token => {
        const {color, backgroundColor} = getComputedStyle(token);
        const [dark, light] = [luminance(color), luminance(backgroundColor)].sort((one, other) => one - other);
        return (light + .05) / (dark + .05);
    });
}"""


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_tokens_contrast_with_their_shade(opened, scheme):
    """The contrast is at least 4.5, the minimum of WCAG 2, with every weight, also for quiet tokens."""
    explanation = translation()
    most = {SOURCE[key] for key in explanation.attention[0].weights[-1].mean(0).argmax(-1)}
    assert most & {'▁', '</s>'} and most - {'▁', '</s>'}
    with opened([explanation], color_scheme=scheme) as page:
        for query in range(len(TARGET)):
            page.locator('#queries .token').nth(query).click()
            assert min(page.evaluate(CONTRASTS)) >= 4.5


def test_text_runs_as_its_script_does(opened):
    hebrew = ['▁של', 'ום', '▁New', '▁York', '▁2', '6', '</s>']
    chinese = ['▁', '我', '喜欢', '猫', '。', '</s>']
    arabic = ['▁مر', 'حبا', '▁بالعالم', '</s>']
    first = translation(1, hebrew, chinese)
    with opened([first, translation(2, chinese, arabic)]) as page:
        def places(side):
            return [token.bounding_box()['x'] for token in page.locator(f'#{side} .token').all()]

        def direction(side):
            return page.evaluate(f"getComputedStyle(document.getElementById('{side}')).direction")

        assert (direction('keys'), direction('queries')) == ('rtl', 'ltr')
        x = places('keys')
        assert x[0] > x[1] > x[5] > x[4] > x[3] > x[2] > x[6]  # New York 26 runs to the right
        assert places('queries') == sorted(places('queries'))
        assert page.evaluate('view.matrix.column(0) > view.matrix.column(1)')
        weights = first.attention[0].weights[-1].mean(0)
        np.testing.assert_allclose(thumbnail(page), weights[:, ::-1] / weights.max(), atol=0.02)
        page.locator('#keys .token').first.click()
        page.keyboard.press('ArrowLeft')  # onwards
        assert page.evaluate('document.activeElement.textContent') == 'ום'
        picture(page, 'hebrew')
        page.keyboard.press('k')
        page.keyboard.press('k')
        assert texts(page, '#keys .token')[0] == '<s>' and direction('keys') == 'ltr'
        page.keyboard.press('n')
        page.wait_for_selector('#list li:nth-child(2) [aria-current=true]')
        assert (direction('keys'), direction('queries')) == ('rtl', 'rtl')  # the start token does not decide
        page.keyboard.press('w')
        page.keyboard.press('k')
        assert texts(page, '#keys .token') == ['我', '喜欢', '猫', '。', '</s>']
        assert texts(page, '#queries .token')[:2] == ['مرحبا', 'بالعالم']
        picture(page, 'arabic')


def test_an_unknown_token_does_not_determine_the_writing_direction(opened):
    with opened([translation(1, ['▁', '<unk>', '▁של', 'ום', '</s>'])]) as page:
        for key in 'ww':
            assert page.evaluate("getComputedStyle(document.getElementById('keys')).direction") == 'rtl'
            page.keyboard.press(key)


def test_text_that_is_a_program_does_nothing(opened):
    hostile = translation(1, ['▁' + HOSTILE, '▁<b>bold</b>', '</s>'], ['▁"\'`${1}', '▁<!--', '</s>'],
                          [('source', HOSTILE), ('translation', '<!--<script>')])
    hostile.answers.append(('<i>1</i>', '2', HOSTILE))
    with opened([hostile, translation(2)]) as page:
        assert page.locator('#texts dd').first.text_content() == HOSTILE
        assert texts(page, '#keys .token')[1] == '<b>bold</b>'
        assert page.locator('#answers td').nth(6).inner_text() == '<i>1</i>'
        page.locator('#keys .token').first.click()
        cell(page, 0, 0)
        picture(page, 'hostile')
        assert page.locator('main b, main i, main script').count() == 0
        # Nor would markup that got in: the page's policy runs and loads nothing. It also forbids page.wait_for_function
        # to wait, because that evaluates a string in the page.
        assert page.evaluate('''() => new Promise(resolve => {
            document.addEventListener('securitypolicyviolation', event => resolve(event.effectiveDirective));
            document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.harmed = 1'}));
        })''') == 'script-src-elem'
        page.complaints.clear()


def test_images_and_series(opened):
    rng = np.random.default_rng(0)
    patches = [f'row {1 + place // 4}, column {1 + place % 4}' for place in range(8)]
    tokens = ['class token', *patches]
    one = Explanation(1, [('class', 'cat'), ('expected', 'dog')],
                      [attention('encoder', tokens, tokens, ('patches', 'patches'), False, 5)], [],
                      [('probability', 'class'), ('0.9', 'cat')],
                      picture_of(rng.integers(0, 255, (16, 32, 3)).astype(np.uint8)), (2, 4))
    windows = [f'window {1 + place}' for place in range(16)]
    two = Explanation(2, [('value', '1.5')], [attention('encoder', windows, windows, ('windows', 'windows'), False, 6)],
                      [], [('output', 'value'), ('1', '1.5')],
                      picture_of(np.cumsum(rng.normal(size=(128, 1)), axis=0)), (1, 16))
    weights = one.attention[0].weights[-1].mean(0)

    def relative(row):  # the class token does not outshine the patches
        return np.minimum(row / row[1:].max(), 1)

    with opened([one, two]) as page:
        def shades():
            return page.evaluate("tokens('queries').map(token => +token.style.getPropertyValue('--weight'))")

        mean = weights.mean(0)
        np.testing.assert_allclose(shades(), relative(mean), atol=0.02)
        page.locator('#patches .token').nth(5).click()
        np.testing.assert_allclose(shades(), relative(weights[6]), atol=0.02)
        assert page.locator('#detail strong').inner_text() == 'row 2, column 2'
        page.keyboard.press('ArrowUp')
        assert page.locator('#detail strong').inner_text() == 'row 1, column 2'
        page.locator('#others .token').click()
        np.testing.assert_allclose(shades(), relative(weights[0]), atol=0.02)
        assert page.evaluate("document.querySelector('#figure img').naturalWidth") == 32
        picture(page, 'image')
        page.keyboard.press('n')
        page.wait_for_selector('#list li:nth-child(2) [aria-current=true]')
        page.locator('#patches .token').nth(7).click()
        assert page.locator('#detail strong').inner_text() == 'window 8'
        picture(page, 'series')


def test_only_the_picture_of_a_series_has_the_full_width(opened):
    """An image may have a single row of patches, like a series."""
    def explanation(number, title):
        names = [f'{title} {place}' for place in range(4)]
        return Explanation(number, [('value', '1.5')],
                           [attention('encoder', names, names, (title, title), False, number)], [], [],
                           picture_of(np.zeros((4, 16, 3), np.uint8)), (1, 4))

    with opened([explanation(1, 'patches'), explanation(2, 'windows')]) as page:
        assert not page.locator('#figure.series').count()
        page.keyboard.press('n')
        page.wait_for_selector('#list li:nth-child(2) [aria-current=true]')
        assert page.locator('#figure.series').count()


@pytest.mark.parametrize('class_token', [False, True])
def test_vertical_arrows_stay_in_their_column_of_a_picture(class_token, opened):
    def explanation(number, patches, grid):
        tokens = [*['class token'] * class_token, *patches]
        return Explanation(number, [('class', 'cat')],
                           [attention('encoder', tokens, tokens, ('patches', 'patches'), False, number)], [], [],
                           picture_of(np.zeros((16, 16, 3), np.uint8)), grid)

    image = explanation(1, [f'row {1 + place // 4}, column {1 + place % 4}' for place in range(16)], (4, 4))
    series = explanation(2, [f'window {1 + place}' for place in range(8)], (1, 8))
    with opened([image, series]) as page:
        def after(*keys):
            for key in keys:
                page.keyboard.press(f'Arrow{key}')
            return page.locator('#detail strong').inner_text()

        def chosen(patch, *keys):
            page.locator('#patches .token').nth(patch).click()
            return after(*keys)

        assert after('Down') == 'row 1, column 1'  # before this key, no token is chosen
        assert chosen(6, 'Up') == 'row 1, column 3' and chosen(6, 'Down', 'Down') == 'row 4, column 3'
        assert chosen(2, 'Up') == ('class token' if class_token else 'row 1, column 3')
        assert chosen(13, 'Down') == 'row 4, column 2'
        if class_token:
            page.locator('#others .token').click()
            assert after('Up') == 'class token' and after('Down') == 'row 1, column 1'
        page.keyboard.press('n')
        page.wait_for_selector('#list li:nth-child(2) [aria-current=true]')
        assert after('Up') == ('class token' if class_token else 'window 1')
        assert chosen(3, 'Down') == 'window 4'
        assert chosen(3, 'Up') == ('class token' if class_token else 'window 4')


def test_hidden_patches_of_a_series_are_no_queries(opened):
    windows = [f'window {1 + place}' for place in range(8)]
    windows[3] += ' (hidden)'
    each = attention('encoder', windows, windows, ('windows', 'windows'), False, 7)
    each.weights[:, :, 3] = np.eye(8)[0]  # the largest weight of all, in the row of the hidden patch
    series = np.cumsum(np.random.default_rng(0).normal(size=(64, 1)), axis=0)
    expected = each.weights[-1].mean(0)
    expected[3] = 0
    with opened([Explanation(1, [('value', '1.5')], [each], [], [('output', 'value'), ('1', '1.5')],
                             picture_of(series), (1, 8), [3])]) as page:
        def shades():
            return page.evaluate("tokens('queries').map(token => +token.style.getPropertyValue('--weight'))")

        np.testing.assert_allclose(shades(), expected.sum(0) / expected.sum(0).max(), atol=0.02)
        largest = page.locator('#matrix-title').inner_text().rpartition(': ')[2]
        assert share(largest) == pytest.approx(expected.max(), abs=PRECISION)
        np.testing.assert_allclose(thumbnail(page), expected / expected.max(), atol=0.02)
        means = page.evaluate('weightsOf(null)')
        np.testing.assert_allclose(means, expected.sum(0) / 7, atol=1 / 255)
        page.locator('#patches .token').nth(3).click()
        assert page.locator('#detail strong').inner_text() == 'window 4 (hidden)' and not any(shades())


def test_200_sentences_open_at_once(opened):
    with opened(map(long, range(200))) as page:
        milliseconds = int(page.locator('html').get_attribute('data-ready'))
        print(f'200 sentences, 4 layers of 4 heads, 30 tokens: ready after {milliseconds} ms')
        assert milliseconds < 60_000  # a few hundred on a quiet machine
        assert page.locator('#list li').count() == 200
        page.locator('#filter').fill('word123')
        assert page.locator('#found').inner_text() == '1 of 200'
        page.keyboard.press('Enter')
        page.locator('#list button:visible').click()
        page.wait_for_selector('#list li:nth-child(124) [aria-current=true]')
        assert 'word123' in texts(page, '#keys .token')
