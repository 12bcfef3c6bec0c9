"""Configuration of Sphinx. `make docs` builds the pages with Sphinx.

The source folder is the root of the repository, so that links between .md files work both on disk and in the pages.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import allyouneed  # noqa: E402, F401 (imported first, because allyouneed sets an XLA flag)

PACKAGES = 'analysis|configs|inference|input_pipeline|interchange|kernels|model|run_directory|runtime|training'
GUIDES = ('mathematics', 'configs', 'options', 'data', 'decoding', 'inside', 'deploying', 'distributed',
          'planning', 'notebooks', 'results', 'faults', 'extending', 'api')
PAGES = [*(f'docs/{name}' for name in GUIDES), 'CONTRIBUTING', 'CHANGELOG']
SECTION = re.compile(r'(Args|Attributes|Returns|Yields|Raises):')
SHORT = {r'jaxlib\.\w+\.Array': 'Array', r"<class 'jax\.numpy\.(\w+)'>": r'jnp.\1', r'<factory>': '...',
         r',? parent: .*name: str \| None = None': ''}

project = html_title = 'allyouneed'
root_doc = 'README'
include_patterns = ['README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'docs/*.md', 'docs/api/*.rst']
extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.autosummary', 'sphinx.ext.napoleon',
              'sphinx.ext.mathjax', 'sphinx.ext.viewcode', 'sphinx-mathjax-offline']
templates_path = [str(ROOT / 'docs' / 'templates')]
html_theme = 'furo'
html_static_path = ['static']
html_css_files = ['pages.css']

myst_enable_extensions = ['dollarmath']
myst_heading_anchors = 3
smartquotes = False  # quotes, as in 'post', are code and must not change

autodoc_default_options = {'members': True, 'special-members': '__call__', 'exclude-members': 'dtype',
                           'ignore-module-all': True}
autodoc_inherit_docstrings = False
autodoc_member_order = 'bysource'
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [('Attributes', 'params_style')]
add_module_names = False
python_maximum_signature_line_length = 100
default_role = 'py:obj'  # `name` in a docstring is a link if the name exists, and code otherwise

# The targets of references in pages must exist. In a docstring or an annotation, a name may belong to another library
# or to no object. But a name that begins with a package of this project must exist.
nitpicky = True
# Type variables have no page.
nitpick_ignore = [('py:class', name) for name in (
    'input_pipeline.builds.Content', 'input_pipeline.sources.T', 'interchange.foreign_config.Config',
    'runtime.agreement.T', 'runtime.flags.Values', 'runtime.schema.Content')]
nitpick_ignore_regex = [('py:obj', rf'(?!({PACKAGES})(\.\w+)+$).*'), ('py:(class|exc|data)', rf'(?!({PACKAGES})\.).*')]


def add_contents(app, docname, source):
    """Adds a table of contents with all pages to the README."""
    if docname == root_doc:
        pages = [page for page in PAGES if (ROOT / f'{page}.md').exists()]
        source[0] += '\n\n```{toctree}\n:hidden:\n\n' + '\n'.join(pages) + '\n```\n'


def link_to_modules(app, docname, source):
    """Replaces links to a module's file by links to the page of the module.

    If the text of a link is a name in the module, the new link points to this name.
    """
    def reference(link):
        text, module = link['text'], link['path'].replace('/', '.')
        target = f'{module}.{text}' if re.fullmatch(r'[\w.]+(?<!\.py)', text) else module
        return f'{{py:obj}}`{text} <{target}>`'

    link = rf'\[`(?P<text>[^`]+)`\]\((\.\./)?(?P<path>({PACKAGES})/[\w/]+)\.py\)'
    source[0] = re.sub(link, reference, source[0])


def plain_docstring(app, what, name, obj, options, lines):
    """Escapes the markup of reStructuredText, because docstrings are plain text with Google's sections.

    An indented paragraph (equations or commands) becomes a preformatted block. A paragraph in which only some lines are
    indented becomes a list.
    """
    paragraphs, in_block, plain = re.split(r'\n\s*\n', '\n'.join(lines).rstrip()), False, []
    for paragraph in (paragraph.split('\n') for paragraph in paragraphs):
        indented = [line.startswith(' ') for line in paragraph]
        if all(indented):
            plain += paragraph if in_block else ['::', '', *paragraph]
        elif any(indented) and not SECTION.fullmatch(paragraph[0]):
            plain += [('  ' if line.startswith(' ') else '* ') + escape(line.strip()) for line in paragraph]
        else:
            plain += map(escape, paragraph)
        in_block = all(indented)
        plain.append('')
    lines[:] = plain


def escape(line):
    """Escapes `*`, `|`, a `_` at the end of a word, and list numbers such as `1.`, but not within backticks."""
    parts = re.split(r'(`[^`]*`)', line)
    escaped = [part if part.startswith('`') else re.sub(r'[*|]|_(?!\w)', r'\\\g<0>', part) for part in parts]
    return re.sub(r'(^\s*|: )(?=\(?\w{1,2}[.)](\s|$))', r'\1\\', ''.join(escaped))


def short_signature(app, what, name, obj, options, signature, returns):
    """Shortens the names of array types and dtypes in a signature, and removes the two arguments that Flax adds."""
    def short(text):
        for pattern, name in SHORT.items():
            text = text and re.sub(pattern, name, text)
        return text

    return short(signature), short(returns)


def setup(app):
    """Registers the functions of this file as callbacks. Sphinx calls this function."""
    app.connect('source-read', add_contents)
    app.connect('source-read', link_to_modules)
    app.connect('autodoc-process-signature', short_signature)
    app.connect('autodoc-process-docstring', plain_docstring, priority=400)  # before napoleon
