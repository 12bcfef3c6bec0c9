"""Links, tests and lines of code that the pages name exist; and the checker of links itself."""

import dataclasses
import importlib.util
import re
import textwrap
from pathlib import Path

from input_pipeline.data import Data
from model.cache import Cache

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location('links', ROOT / 'docs' / 'links.py')
links = importlib.util.module_from_spec(spec)
spec.loader.exec_module(links)


def test_no_link_of_a_page_is_broken(capsys):
    assert links.main([]) == 0, capsys.readouterr().out


def test_broken_links_are_found(tmp_path):
    (tmp_path / 'there.md').write_text('# A `b`, and c_d\n\n```\n# not a heading: [not](a link)\n```\n')
    (tmp_path / 'page.md').write_text(
        '[file](there.md) [heading](there.md#a-b-and-c_d) [site](https://example.org/x) `[code](nowhere)` '
        '[own](#title)\n'
        '[`gone`](gone.md) [no heading](there.md#not-a-heading) [outside](../outside.md)\n# Title\n')
    (tmp_path.parent / 'outside.md').touch()
    found = [*links.broken_links(tmp_path, sorted(tmp_path.glob('*.md')))]
    assert [line.split(': ')[1] for line in found] == ['gone.md', 'there.md#not-a-heading', '../outside.md']


def test_broken_links_of_built_pages_are_found(tmp_path):
    (tmp_path / 'a.html').write_text(
        '<a href="b.html#x">1</a> <a href="b.html#y">2</a> <a href="#z">3</a> <img src="i.png">')
    (tmp_path / 'b.html').write_text('<p id="x">x</p>')
    assert links.main([str(tmp_path)]) == 1
    found = [*links.broken_links(tmp_path, sorted(tmp_path.glob('*.html')))]
    assert [line.split(': ')[1] for line in found] == ['b.html#y', '#z', 'i.png']


def test_the_tests_that_the_page_of_faults_names_exist():
    tests = '\n'.join(path.read_text() for path in (ROOT / 'tests').rglob('*.py'))
    page = (ROOT / 'docs' / 'faults.md').read_text()
    named = re.findall(r'`(test_\w+?)(?:_?\.\.\.)?`', page)
    assert len(named) > 10
    assert [name for name in named if f'def {name}' not in tests] == []
    assert [path for path in re.findall(r'`(tests/[\w/.]+)`', page) if not (ROOT / path).exists()] == []


def test_the_makefile_names_files_that_exist():
    paths = re.findall(r'(?<![\w/])tests/[\w/.]+', (ROOT / 'Makefile').read_text())
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


def test_the_snippets_of_contributing_are_lines_of_the_code():
    # Without the tests and the environment.
    files = [path for pattern in ('*.py', '[a-z]*/*.py') for path in ROOT.glob(pattern) if 'tests' not in path.parts]
    code = '\n'.join(path.read_text() for path in files)
    snippets = re.findall(r'^ *```py\n(.*?)^ *```', (ROOT / 'CONTRIBUTING.md').read_text(), re.DOTALL | re.MULTILINE)
    assert len(snippets) >= 4
    for snippet in map(textwrap.dedent, snippets):
        assert any(textwrap.indent(snippet, ' ' * margin) in code for margin in (0, 4)), snippet


def test_contributing_names_the_fields_of_a_cache_and_the_members_of_data():
    page = (ROOT / 'CONTRIBUTING.md').read_text('utf-8')
    fields = re.search(r'has four fields\.(.*?)\n\n', page, re.DOTALL)[1]
    assert set(re.findall(r'`(\w+)`', fields)) == {field.name for field in dataclasses.fields(Cache)}
    members = re.search(r'^\| data \|.*\| `DATA`: (.*?);', page, re.MULTILINE)[1]
    assert set(re.findall(r'`(\w+)`', members)) == {
        name for name in (*Data.__annotations__, *vars(Data)) if not name.startswith('_')}
