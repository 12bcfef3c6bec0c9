import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tools.uv import read_settings, uv_environment

ROOT = Path(__file__).parents[2]
LISTING = """\
:env:.index-url='https://of.variable/simple'
global.constraint='/etc/a.txt /etc/b.txt'
global.extra-index-url='https://one/simple\\nhttps://two/simple'
global.index-url='https://of.file/simple'
install.find-links='/wheels /more wheels'
"""


def test_a_variable_of_pip_overrides_its_files():
    assert read_settings(LISTING)['index-url'] == 'https://of.variable/simple'
    assert read_settings("global.cert='g'\ninstall.cert='i'\n:env:.cert='e'") == {'cert': 'e'}
    assert read_settings('install.cert=\'a\'\nglobal.cert=\'b\'\nwheel.cert=\'c\'\n') == {'cert': 'a'}


def test_indexes_of_pip_become_indexes_of_uv():
    assert uv_environment(read_settings(LISTING)) == {
        'UV_DEFAULT_INDEX': 'https://of.variable/simple', 'UV_INDEX': 'https://one/simple https://two/simple',
        'UV_FIND_LINKS': '/wheels,/more,wheels', 'UV_INDEX_STRATEGY': 'unsafe-best-match'}
    assert uv_environment({}) == {}
    assert uv_environment({'cert': ' /my certificates/ca.pem\n'}) == {'SSL_CERT_FILE': '/my certificates/ca.pem'}


def test_uv_runs_with_the_settings_of_pip_and_in_this_environment(tmp_path):
    (tmp_path / 'uv.py').write_text('import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))')
    environment = os.environ | {
        'PIP_CONFIG_FILE': os.devnull, 'PIP_INDEX_URL': 'https://mine/simple', 'PIP_CONSTRAINT': '/a.txt',
        'PIP_CERT': '/of/pip', 'SSL_CERT_FILE': '/of/uv', 'VIRTUAL_ENV': '/another', 'PYTHONPATH': str(tmp_path)}
    done = subprocess.run([sys.executable, '-m', 'tools.uv', 'pip', 'install', 'x'], cwd=ROOT, env=environment,
                          capture_output=True, check=True)
    arguments, seen = json.loads(done.stdout)
    assert arguments == ['pip', 'install', 'x', '--constraint=/a.txt']
    assert seen['UV_DEFAULT_INDEX'] == 'https://mine/simple'
    assert seen['SSL_CERT_FILE'] == '/of/uv'  # the user's own variable
    assert seen['VIRTUAL_ENV'] == sys.prefix


def test_the_lock_file_has_all_dependencies_and_no_address_of_an_index():
    lock = (ROOT / 'requirements.lock').read_text()
    assert '://' not in lock and not re.search('^(-|/)', lock, re.M)
    locked = set(re.findall('^[a-z0-9-]+(?===)', lock, re.M))
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    extras = project['optional-dependencies']
    needed = project['dependencies'] + [one for name in ('test', 'lint', 'docs', 'browser', 'interchange', 'notebooks')
                                        for one in extras[name]]
    names = {re.match('[A-Za-z0-9._-]+', one)[0].lower().replace('_', '-') for one in needed} - {'allyouneed'}
    assert names <= locked, f'{names - locked}: run make lock'
