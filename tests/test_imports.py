"""Packages import only lower packages: the contracts of pyproject.toml, and modules that are single files."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {'analysis', 'configs', 'inference', 'input_pipeline', 'interchange', 'kernels', 'model', 'run_directory',
            'runtime', 'training'}
MAY_IMPORT = {
    'allyouneed': PACKAGES,
    'command_line': {'runtime', 'configs', 'kernels'},
    'train': {'command_line', *PACKAGES},
    'decode': {'command_line', *PACKAGES},
    'sweep': {'command_line', *PACKAGES},
}


def imported(path):
    """The first parts of the names of all modules that a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split('.')[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split('.')[0]


def ours():
    """Everything at the root that can be imported."""
    return {path.stem for path in ROOT.iterdir() if path.suffix == '.py' or (path.is_dir() and [*path.glob('*.py')])}


def lint_imports(folder):
    code = 'from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True, no_logo=True))'
    return subprocess.run([sys.executable, '-c', code], cwd=folder, capture_output=True, text=True)


def test_packages_keep_the_contracts():
    pytest.importorskip('importlinter', reason="import-linter is in the extra 'test', and is not installed here")
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_is_under_the_contracts():
    settings = tomllib.loads((ROOT / 'pyproject.toml').read_text())
    assert set(settings['tool']['importlinter']['root_packages']) == ours() - set(MAY_IMPORT) - {'tests', 'docs'}


@pytest.mark.parametrize('module', sorted(MAY_IMPORT))
def test_a_module_of_one_file_imports_what_it_may(module):
    assert set(imported(ROOT / f'{module}.py')) & ours() <= MAY_IMPORT[module]


def test_an_upward_import_is_found(tmp_path):
    pytest.importorskip('importlinter', reason="import-linter is in the extra 'test', and is not installed here")
    (tmp_path / 'pyproject.toml').write_text((ROOT / 'pyproject.toml').read_text())
    for name in ours() - set(MAY_IMPORT):
        (tmp_path / name).mkdir()
        (tmp_path / name / '__init__.py').touch()
    assert lint_imports(tmp_path).returncode == 0
    # Inside a function, too.
    (tmp_path / 'model' / 'attention.py').write_text('def attend():\n    import configs\n')
    done = lint_imports(tmp_path)
    assert done.returncode == 1 and 'model.attention -> configs' in done.stdout


def test_tests_that_need_a_library_of_interchange_are_marked():
    """Without the mark, .ci/run would skip them: it installs these libraries after the unmarked tests."""
    unmarked = []
    for path in sorted(ROOT.glob('tests/**/test_*.py')):
        text = path.read_text()
        if re.search(r"importorskip\(('(torch|transform|ctranslate2|tokenizers|nnsight|mlflow|wandb)|library)",
                     text) and 'pytest.mark.interchange' not in text:
            unmarked.append(path.relative_to(ROOT))
    assert not unmarked
