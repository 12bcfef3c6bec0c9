"""Recipes that are compiled for TPUs (`make test-plan`), each within its budget of memory and traffic.

If a change makes a figure smaller, or makes it larger for a good reason, change the budget in tests/plan/budgets.json,
and give the reason. The models have one layer of each kind, because all layers are alike. A plan without a budget only
has to compile.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.scripts import ROOT

BUDGETS = json.loads((pathlib.Path(__file__).parent / 'budgets.json').read_text())
ROOM = 1.03  # for what a new libtpu lays out otherwise


@pytest.mark.slow
@pytest.mark.parametrize('name', BUDGETS)
def test_a_plan_keeps_to_its_budget(name):
    pytest.importorskip('libtpu', reason="it is in the extra 'plan': make test-plan installs it")
    budget = BUDGETS[name]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(('XLA_', 'JAX_'))}
    done = subprocess.run([sys.executable, '-m', 'tools.plan', *budget['flags'], '--json'], cwd=ROOT, text=True,
                          capture_output=True, timeout=1000, env=environment)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan['by'] == 'compiled' and plan['decode']['operands'] > 0
    found = {'temporaries': plan['memory']['temporaries'], 'bytes_per_token': plan['bytes_per_token'],
             'link_bytes': sum(each['bytes'] for each in plan['train']['collectives'])}
    for figure, most in budget['budget'].items():
        assert found[figure] <= ROOM * most, f'{figure}: {found[figure]:,.0f}, budget {most:,.0f}; all: {found}'


def test_three_topologies_and_three_meshes_for_tiny_base_and_big():
    def values_of(flag):
        return {recipe: {next((each.partition('=')[2] for each in budget['flags'] if each.startswith(flag)), '')
                         for name, budget in BUDGETS.items() if name.startswith(recipe)}
                for recipe in ('tiny', 'base', 'big')}
    assert all(len(each) >= 3 for each in values_of('--topology=').values())
    meshes = {tuple(flag for flag in budget['flags'] if flag.startswith('--config.parallel')) for budget in
              BUDGETS.values()}
    assert len(meshes) >= 3
