"""Runs uv, the package installer, with the settings of pip: package indexes, local wheels, constraints, certificates.

    python -m tools.uv pip install --editable .

`make` runs this script in an environment that contains pip and uv. The environment variables of uv override the
settings of pip.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping

# {option of pip: (environment variable of uv, separator of the variable's values)}. Without a separator, the variable
# has one value. pip separates values by white space.
VARIABLES = {
    'index-url': ('UV_DEFAULT_INDEX', ''), 'extra-index-url': ('UV_INDEX', ' '), 'find-links': ('UV_FIND_LINKS', ','),
    'no-index': ('UV_NO_INDEX', ''), 'trusted-host': ('UV_INSECURE_HOST', ' '), 'cert': ('SSL_CERT_FILE', ''),
    'timeout': ('UV_HTTP_TIMEOUT', ''), 'default-timeout': ('UV_HTTP_TIMEOUT', ''), 'proxy': ('ALL_PROXY', ''),
}


def read_settings(listing: str) -> dict[str, str]:
    """Parses the output of `pip config list`, lines of the form section.option='value'. Returns {option: value}.

    Environment variables (:env:) override the section `install`. The section `install` overrides the section `global`.
    Sections of other commands of pip are ignored.
    """
    lines = [line.partition('=') for section in ('global.', 'install.', ':env:') for line in listing.splitlines()
             if line.startswith(section)]
    return {name.rpartition('.')[2]: str(ast.literal_eval(value)) for name, _, value in lines}


def uv_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of uv that correspond to pip's settings."""
    variables = {variable: separator.join(value.split()) if separator else value.strip()
                 for option, (variable, separator) in VARIABLES.items() if (value := settings.get(option))}
    if 'UV_INDEX' in variables:  # like pip, compare the versions of all indexes
        variables['UV_INDEX_STRATEGY'] = 'unsafe-best-match'
    return variables


def main() -> int:
    """Runs uv with the arguments of the command line and returns its exit status."""
    listing = subprocess.run([sys.executable, '-m', 'pip', 'config', 'list'], capture_output=True, text=True)
    if listing.returncode:  # pip.conf is damaged, and pip's message names the file
        print(listing.stderr, end='', file=sys.stderr)
        return 2
    settings = read_settings(listing.stdout)
    # The constraints are arguments, because --constraint on the command line would override UV_CONSTRAINT.
    constraints = [f'--constraint={path}' for path in settings.get('constraint', '').split()]
    environment = uv_environment(settings) | os.environ | {'VIRTUAL_ENV': sys.prefix}
    return subprocess.run([sys.executable, '-m', 'uv', *sys.argv[1:], *constraints], env=environment).returncode


if __name__ == '__main__':
    sys.exit(main())
