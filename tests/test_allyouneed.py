"""allyouneed.py: one name for notebooks in any folder, also beside modules that have the names of our packages."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import allyouneed

ROOT = Path(__file__).parents[1]


@pytest.fixture
def foreign(tmp_path):
    """A folder with modules that have the names of our packages."""
    (tmp_path / 'model.py').write_text('SIZE = 7\n')
    (tmp_path / 'tools.py').write_text('SIZE = 8\n')
    (tmp_path / 'configs').mkdir()
    (tmp_path / 'configs' / '__init__.py').write_text('SIZE = 9\n')
    return tmp_path


def python(folder, program, root=ROOT):
    """Runs a program in `folder`, whose modules come before those of `root`."""
    environment = os.environ | {'PYTHONPATH': str(root)}
    return subprocess.run([sys.executable, '-c', program], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_run_is_loaded_and_trained_beside_modules_of_the_same_names(foreign, run, tmp_path):
    trained, _ = run
    program = f'''
import allyouneed, tools
run = allyouneed.load({str(trained)!r})
print(run.translate(['one two'])[0].text)
config = run.config.copy_and_resolve_references()
config.train.steps, config.eval.every, config.checkpoint.every, config.optimizer.warmup = 5, 5, 5, 2
config.eval.bleu_sentences = 2
print(allyouneed.train(config, {str(tmp_path / "run")!r}).checkpoint, tools.SIZE)
'''
    done = python(foreign, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ['[5] 8']


def test_a_foreign_module_that_was_imported_before_is_named(foreign):
    done = python(foreign, 'import model, allyouneed; allyouneed.load')
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert f'{foreign / "model.py"} was imported as `model`' in message and f'Rename {foreign / "model.py"}' in message


def test_a_copy_without_the_packages_prints_how_to_install(tmp_path):
    (tmp_path / 'allyouneed.py').write_text((ROOT / 'allyouneed.py').read_text())
    done = python(tmp_path, 'import allyouneed', root=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith('Clone the repository and run `pip install -e .` in the clone\n')


def test_every_name_is_loaded_and_others_are_named():
    for name in allyouneed.__all__:
        assert callable(getattr(allyouneed, name))
    with pytest.raises(AttributeError, match="no attribute 'laod'.*load"):
        allyouneed.laod  # noqa: B018
    assert allyouneed.recipe('demo').model.kind == 'transformer'
    with pytest.raises(allyouneed.UserError, match="no recipe 'dmeo': did you mean demo"):
        allyouneed.recipe('dmeo')
    with pytest.raises(allyouneed.UserError, match="recipe 'demo:x': only fine_tune takes an argument. Use 'demo'"):
        allyouneed.recipe('demo:x')


def test_type_checkers_see_the_names_that_are_loaded():
    [block] = [node for node in ast.parse((ROOT / 'allyouneed.py').read_text()).body if isinstance(node, ast.If)][:1]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == allyouneed.MODULES and sorted(seen) == sorted(allyouneed.__all__)


def test_commands_need_no_install_of_the_project(tmp_path):
    checkout = tmp_path / 'any name'
    checkout.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ('.venv', '.git', 'runs', 'build'):
            (checkout / path.name).symlink_to(path)
    program = 'import sys; sys.path[:] = [path for path in sys.path if path != sys.argv[1]]; sys.argv[0:2] = []; ' \
              'sys.path.insert(0, "."); import runpy; runpy.run_path(sys.argv[0], run_name="__main__")'
    done = subprocess.run([sys.executable, '-c', program, str(ROOT), 'train.py', '--config=configs/demo.py',
                           '--print_config'], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0 and '--config.task=translation' in done.stdout, done.stderr
