"""Commands that install this project: editable, with extras that pyproject.toml has."""

import re
import subprocess
import tomllib

import pytest

from tests.scripts import ROOT

EXTRAS = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
PROJECT = re.compile(r'''(?<![^\s'"\\])(\.|allyouneed)(?:\[([\w,{}-]*)\])?(?=['"\s\\,;)]|$)''')
EDITABLE = re.compile(r'''(?:^|\s)(?:-e|--editable) ?['"\\]*\.''')


def wrong_commands(text):
    """Yields the commands in `text` that install a copy of this project, or an extra that it does not have."""
    for command in re.findall(r'pip install ([^`\n]*)', text):
        for project, extras in PROJECT.findall(command):
            known = all(extra in EXTRAS or '{' in extra for extra in extras.split(',') if extra)
            if project != '.' or not EDITABLE.search(command) or not known:
                yield command


@pytest.mark.parametrize('command', [
    "'.[interchange]'", '"allyouneed[plan]"', '.', 'allyouneed', '-q .[test]', "-e '.[nothing]'"])
def test_a_copy_and_a_missing_extra_are_found(command):
    assert [*wrong_commands(f'text: `pip install {command}` first')] == [command]


@pytest.mark.parametrize('command', ["-e '.[interchange]'", '-e .', '--quiet --editable .', 'pandas', 'tensorboard.',
                                     "-e . 'jax[tpu]'", "-e '.[{package}]'"])
def test_an_editable_install_is_right(command):
    assert [*wrong_commands(f'run `pip install {command}`')] == []


def test_no_page_installs_by_make_without_a_target():
    """`make` lists the targets."""
    pages = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *(ROOT / 'docs').glob('*.md')]
    assert [page.name for page in pages if '`make`' in page.read_text('utf-8')] == []


@pytest.mark.parametrize('page', ['README.md', 'launch/tpu_vm.sh', 'launch/jobset.yaml'])
def test_pages_about_tpus_install_libtpu(page):
    """Without libtpu, JAX uses the CPUs of a TPU VM."""
    assert "pip install -e . 'jax[tpu]'" in (ROOT / page).read_text('utf-8')


def test_pages_notebooks_and_messages_install_this_project_editable():
    patterns = '*.md', '*.py', '*.ipynb', '*.sh', '*.yaml', ':!tests', ':!CHANGELOG.md'
    files = subprocess.run(['git', 'ls-files', '-z', *patterns], cwd=ROOT, capture_output=True, text=True,
                           check=True).stdout.split('\0')
    found = {name: [*wrong_commands((ROOT / name).read_text('utf-8'))] for name in filter(None, files)}
    assert {name: commands for name, commands in found.items() if commands} == {}
