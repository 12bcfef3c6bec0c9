"""How `make docs` builds the pages: Sphinx, with the root of the repository as the source, so that links between .md
files are the same on disk and in the pages.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import allyouneed  # noqa: E402, F401 (it sets an XLA flag before the modules are imported)

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
smartquotes = False  # 'post' is a value

autodoc_default_options = {'members': True, 'special-members': '__call__', 'exclude-members': 'dtype',
                           'ignore-module-all': True}
autodoc_inherit_docstrings = False
autodoc_member_order = 'bysource'
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [('Attributes', 'params_style')]
add_module_names = False
python_maximum_signature_line_length = 100
default_role = 'py:obj'  # `name` in a docstring is a link where there is such a name, and code elsewhere

# What a page refers to must exist. What a docstring or an annotation names may be of another library, or a name of no
# object; with a package of ours before it, it must exist too.
nitpicky = True
# Type variables.
nitpick_ignore = [('py:class', name) for name in ('runtime.agreement.T', 'runtime.flags.Values')]
nitpick_ignore_regex = [('py:obj', rf'(?!({PACKAGES})(\.\w+)+$).*'), ('py:(class|exc|data)', rf'(?!({PACKAGES})\.).*')]


def add_contents(app, docname, source):
    """The README has no table of contents in its text, so that of the pages is added here."""
    if docname == root_doc:
        pages = [page for page in PAGES if (ROOT / f'{page}.md').exists()]
        source[0] += '\n\n```{toctree}\n:hidden:\n\n' + '\n'.join(pages) + '\n```\n'


def link_to_modules(app, docname, source):
    """Links to a module's file lead to the module's page; those whose text is a name in it, to what it names."""
    def reference(link):
        text, module = link['text'], link['path'].replace('/', '.')
        target = f'{module}.{text}' if re.fullmatch(r'[\w.]+(?<!\.py)', text) else module
        return f'{{py:obj}}`{text} <{target}>`'

    link = rf'\[`(?P<text>[^`]+)`\]\((\.\./)?(?P<path>({PACKAGES})/[\w/]+)\.py\)'
    source[0] = re.sub(link, reference, source[0])


def plain_docstring(app, what, name, obj, options, lines):
    """Docstrings are plain text with Google's sections: what reStructuredText would take for markup is escaped. An
    indented paragraph, an equation or a command, becomes a preformatted block; hanging paragraphs become a list.
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
    """`*`, `|`, a last `_` of a word and what would number a list, outside of backticks."""
    parts = re.split(r'(`[^`]*`)', line)
    escaped = [part if part.startswith('`') else re.sub(r'[*|]|_(?!\w)', r'\\\g<0>', part) for part in parts]
    return re.sub(r'(^\s*|: )(?=\(?\w{1,2}[.)](\s|$))', r'\1\\', ''.join(escaped))


def short_signature(app, what, name, obj, options, signature, returns):
    """Arrays and dtypes by the names that the code has for them; modules without the two arguments that Flax adds."""
    def short(text):
        for pattern, name in SHORT.items():
            text = text and re.sub(pattern, name, text)
        return text

    return short(signature), short(returns)


def setup(app):
    """Sphinx calls this."""
    app.connect('source-read', add_contents)
    app.connect('source-read', link_to_modules)
    app.connect('autodoc-process-signature', short_signature)
    app.connect('autodoc-process-docstring', plain_docstring, priority=400)  # before napoleon
