"""Makes explanations, opens their page in a browser, and reads values from the page."""

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from analysis.explain import Attention, Explanation, Page
from inference.outputs import TokenProbability

PICTURES = Path(__file__).parents[2] / 'build' / 'browser'
NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable')  # as in install_chromium.sh
PRECISION = 1 / 255 + 0.0005  # of the weights, and of a percentage with one decimal
SOURCE = ['▁', '1', '2', '▁big', '▁house', 's', '.', '</s>']
TARGET = ['▁do', 'uz', 'e', '▁grand', 'es', '▁maisons', '.', '</s>']
HOSTILE = '</script><script>window.harmed=1</script><img src=x onerror="window.harmed=1"><!-- &amp;\u2028'


def attention(kind, queries, keys, titles, written, seed, layers=3, heads=2, causal=False):
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(layers, heads, len(queries), len(keys)))
    weights = np.exp(np.where(np.tri(len(queries), len(keys)), logits, -np.inf) if causal else logits)
    return Attention(kind, (weights / weights.sum(-1, keepdims=True)).astype(np.float32), queries, keys, titles,
                     written)


def translation(number=1, source=SOURCE, target=TARGET, texts=None, **sizes):
    text = [''.join(row[:-1]).replace('▁', ' ').strip() for row in (source, target)]
    predictions = [TokenProbability(piece, 0.99 - 0.1 * place, [('▁autre', 0.01), (HOSTILE, 0.005)])
                   for place, piece in enumerate(target)]
    return Explanation(
        number, texts or [('source', text[0]), ('translation', text[1])],
        [attention('cross', target, source, ('translation', 'source'), True, number, **sizes),
         attention('encoder', source, source, ('source', 'source'), False, number + 1, **sizes),
         attention('decoder', target, ['<s>', *target[:-1]], ('translation', 'translation so far'), True, number + 2,
                   causal=True, **sizes)],
        predictions,
        [('score', 'log-probability', 'translation'), ('-0.5', '-1.5', text[1]), ('-0.9', '-2.5', 'autre')])


def long(number):
    """Returns the explanation of a sentence pair with 30 pieces on each side."""
    row = [f'▁word{number}' if place % 3 else f'piece{place}' for place in range(29)]
    return translation(number, [*row, '</s>'], [*row, '</s>'], layers=4, heads=4)


@pytest.fixture(scope='module')
def browser():
    playwright = pytest.importorskip('playwright.sync_api', reason='pip install playwright; or make test-browser')
    path = next(filter(None, map(shutil.which, NAMES)), None)
    assert path, f'none of {", ".join(NAMES)} is installed: make test-browser installs it'
    PICTURES.mkdir(parents=True, exist_ok=True)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, ignore_default_args=['--hide-scrollbars'])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Returns a function (explanations, **settings of the browser) -> page. An error on the page fails the test."""
    @contextlib.contextmanager
    def open_page(explanations, width=1280, height=900, **settings):
        page_file = Page(tmp_path / 'page.html', 'a run', 1000)
        for each in explanations:
            page_file.add(each)
        page_file.write()
        context = browser.new_context(viewport={'width': width, 'height': height}, **settings)
        page = context.new_page()
        errors, asked_for = [], []
        page.on('console', lambda message: errors.append(message.text))
        page.on('pageerror', lambda error: errors.append(str(error)))
        page.on('request', lambda request: asked_for.append(request.url))
        page.goto(page_file.path.as_uri())
        page.wait_for_selector('html[data-ready]')
        page.complaints = errors
        yield page
        assert errors == []
        assert [url for url in asked_for if not url.startswith('data:')] == [page_file.path.as_uri()]
        assert page.evaluate('document.documentElement.scrollWidth') <= width
        assert page.evaluate('window.harmed') is None
        context.close()
    return open_page


def picture(page, name):
    page.screenshot(path=PICTURES / f'{name}.png', full_page=True)


def share(text):
    return 0.0005 if text.startswith('<') else float(text.removesuffix(' %')) / 100


def cell(page, query, key):
    """Returns the number that the page shows when the pointer is on a cell of the matrix."""
    x, y = page.evaluate('''([query, key]) => {
        const box = document.getElementById('matrix').getBoundingClientRect();
        const {top, cell, column} = view.matrix;
        return [box.left + column(key) + cell / 2, box.top + top + cell * (query + .5)];
    }''', [query, key])
    if not 0 < y < page.viewport_size['height']:
        page.mouse.wheel(0, y - 300)
        page.wait_for_timeout(50)
        return cell(page, query, key)
    page.mouse.move(x, y)
    return share(page.locator('#cell .number').inner_text())


def texts(page, selector):
    return page.locator(selector).all_inner_texts()


def thumbnail(page):
    """Returns the opacities of the pixels of the chosen head's picture, between 0 and 1."""
    width, height, data = page.evaluate('''() => {
        const canvas = document.querySelector('#heads [aria-pressed=true] canvas');
        const {width, height} = canvas;
        return [width, height, [...canvas.getContext('2d').getImageData(0, 0, width, height).data]]; }''')
    return np.reshape(data[3::4], (height, width)) / 255
