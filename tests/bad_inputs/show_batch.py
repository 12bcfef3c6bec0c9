"""python -m tools.show_batch: recipes, runs and steps."""

from tests.bad_inputs.cases import FOLDER, GONE, Case, with_values

QUICK = [
    Case('--flagfile={here}/none', '--flagfile={here}/none: No such file or directory'),
    Case('--noconfig.model.remat', '--config.model.remat needs a recipe. Add a recipe'),
    Case('', '--config is missing'),
    Case('--config= --workdir=', '--config is missing'),
    Case('--config={root}/configs/demo.py --workdir={run}', '--config and --workdir cannot be used together'),
    Case('--config={root}/configs/demo.py --step=-1', '--step=-1'),
    Case('--config={root}/configs/demo.py --step=x', '--step=x'),
    Case('--config={root}/configs/demo.py --step=', '--step='),
    Case('--config={root}/configs/demo.py --config.seed=-1', 'config.seed=-1'),
    Case('--config={root}/configs/dmeo.py', 'dmeo.py'),
    Case('--config={here}/recipe.py', 'recipe.py:1: SyntaxError', {'recipe.py': 'def'}),
    Case('--workdir={here}', '{here}'),
    Case('--workdir=/dev/null', '/dev/null'),
    Case('--workdir={run}', 'config.json', {'run/config.json': '{'}),
    Case('--workdir={run} 3', "'3'"),
    *(Case('--workdir={run}', ('config.json', f'config.{key.replace("__", ".")}='),
           {'run/config.json': with_values(**{key: '\ud800'})})
      for key in ('cache_dir', 'data__dir')),
]
SLOW = [
    Case('', '--config is missing', environment={'MPLBACKEND': 'nonsense'}, alone=True),
    Case('--workdir={run} --step=' + '9' * 30, '--step=' + '9' * 30),
    Case('--workdir={run}', 'sizes.json', {'run/data/sizes.json': GONE}),
    Case('--workdir={run}', 'sizes.json', {'run/data/sizes.json': '3'}),
    Case('--workdir={run}', 'source.model', {'run/data/source.model': FOLDER}),
    Case('--workdir={run}', '/none', {'run/config.json': with_values(data__dir='/none')}),
    Case('--workdir={run}', 'config.json', {'run/config.json': with_values(task=3)}),
    Case('--workdir={run}', 'config.json', {'run/config.json': with_values(batch__tokens='x')}),
    Case('--workdir={run}', 'batch.tokens=1', {'run/config.json': with_values(batch__tokens=1)}),
]
