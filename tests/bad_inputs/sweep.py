"""sweep.py: sweep files, the directory of a sweep, flags."""

from tests.bad_inputs.cases import FIFO, FOLDER, GONE, LOOP, NULL, Case, cut, with_values, without

DEMO = '--config={root}/configs/demo.py --workdir={new} '


def sweep(content, *expected):
    return Case(DEMO + '--sweep={here}/grid.py --dry_run', expected, {'grid.py': content})


def old(content, *expected):
    """Returns a case in which sweep.json of a sweep directory has other content."""
    return Case('--workdir={here}/old --report', expected or 'sweep.json', {'old/sweep.json': content})


def returning(what):
    return f'def get_sweep(config):\n    return {what}\n'


QUICK = [
    Case('--flagfile={here}/none', '--flagfile={here}/none: No such file or directory'),
    Case('--noconfig.model.remat', '--config.model.remat needs a recipe. Add a recipe'),
    Case('--config={root}/configs/demo.py --sweep={root}/configs/sweeps/seeds.py', '--workdir is missing'),
    Case('--sweep={root}/configs/sweeps/seeds.py --workdir={new}', '--config is missing'),
    Case(DEMO, '--sweep is missing'),
    Case('--config= --workdir={new} --sweep={root}/configs/sweeps/seeds.py --config.seed=1', '--config is missing'),
    Case(DEMO + '--sweep=', '--sweep is missing'),
    Case(DEMO + '--sweep={here}', '--sweep={here}'),
    Case(DEMO + '--sweep={here}/none.py', 'none.py'),
    Case(DEMO + '--sweep={here}/' + 'x' * 300, 'xxx'),
    Case(DEMO + '--sweep={here}/grid.py', 'grid.py', {'grid.py': FIFO}),
    Case(DEMO + '--sweep={here}/grid.py', 'grid.py', {'grid.py': LOOP}),
    Case(DEMO + '--sweep={here}/grid.py', 'grid.py', {'grid.py': NULL}),
    # Files that are not Python
    Case(DEMO + '--sweep={root}/README.md', 'README.md:'),
    *(Case(DEMO + f'--sweep={{here}}/{name}', f'{name}:1: SyntaxError', {name: 'seeds: 3 4\n'})
      for name in ('x.txt', 'x.yaml', 'x', 'x.so', 'x.pyc')),
    Case(DEMO + '--sweep={here}/x.so', 'x.so', {'x.so': b'\x7fELF\0'}),
    Case(DEMO + '--sweep={root}/configs/sweeps/seeds.py --jobs=0', 'jobs'),
    Case(DEMO + '--sweep={root}/configs/sweeps/seeds.py --jobs=x', '--jobs=x'),
    Case(DEMO + '--sweep={root}/configs/sweeps/seeds.py --jobs=99999999999999999999 --executor=slurm', 'jobs'),
    Case(DEMO + '--sweep={root}/configs/sweeps/seeds.py --hours=nan', 'hours'),
    Case(DEMO + '--sweep={root}/configs/sweeps/seeds.py --hours=inf --executor=slurm', 'hours'),
    Case(DEMO + '--sweep={root}/configs/sweeps/seeds.py --hours=24',
         'error: --hours applies only to --executor=slurm. Add --executor=slurm'),
    Case(DEMO + '--sweep={root}/configs/sweeps/seeds.py --split=all', 'split=all'),
    Case(DEMO + '--sweep={root}/configs/sweeps/seeds.py --metric=blue',
         '--metric=blue: there is no such metric: did you mean bleu?'),
    Case(DEMO + '--sweep={root}/configs/sweeps/seeds.py --metric=validation_blue',
         '--metric=validation_blue: there is no such metric: did you mean validation_bleu?'),
    Case(DEMO + '--sweep={root}/configs/sweeps/seeds.py --metric=goodness',
         '--metric=goodness: there is no such metric. Use for example bleu, '),
    Case('--config={root}/configs/digits_vit.py --workdir={new} --sweep={root}/configs/sweeps/seeds.py --metric=bleu',
         '--metric=bleu: runs of task=classification do not have this metric. Use for example accuracy, '),
    *(Case(f'--config={{root}}/configs/{recipe}.py --workdir={{new}} --sweep={{root}}/configs/sweeps/seeds.py '
           f'--metric={metric}', f'--metric={metric}: runs of task={task} do not have this metric. Use for example ')
      for recipe, task, metric in (('digits_vit', 'classification', 'chrf++'), ('demo', 'translation', 'r_squared'),
                                   ('demo', 'translation', 'validation_absolute_error'),
                                   ('pendulum', 'regression', 'train_accuracy'))),
    Case('{text} --workdir={new} --config.data.splits.test=a,b --sweep={root}/configs/sweeps/seeds.py --split=test',
         '--split=test consists of 2 test sets. Use one of a, b'),
    # The data is checked before a run starts
    Case('{text} --workdir={new} --config.data.dir={here}/none --sweep={root}/configs/sweeps/seeds.py',
         "error: config.data.dir='{here}/none' is not a folder"),
    Case('{text} --workdir={new} --sweep={root}/configs/sweeps/seeds.py --split=test', 'data/test.en',
         {'data/test.en': GONE, 'data/test.xx': GONE}),
    Case('{text} --workdir={new} --sweep={here}/grid.py', '/grid.py, run {{\'data.dir\': \'none\'}}: config.data.dir',
         {'grid.py': 'def get_sweep(config):\n    return [{}, {"data.dir": "none"}]\n'}),
    Case(DEMO + '--sweep={root}/configs/sweeps/seeds.py --config.seed=-1', 'config.seed=-1'),
    Case('--config={root}/configs/demo.py --sweep={root}/configs/sweeps/seeds.py --workdir=/dev/null/sweep',
         '/dev/null/sweep'),
    Case('--config={root}/configs/demo.py --sweep={root}/configs/sweeps/seeds.py --workdir=/proc/sweep', '/proc/sweep'),
    Case('--config={root}/configs/demo.py --sweep={root}/configs/sweeps/seeds.py --workdir={here}/file', '{here}/file',
         {'file': 'text'}),
    Case('--config={root}/configs/demo.py --sweep={root}/configs/sweeps/seeds.py --workdir={here}/' + 'x' * 300, 'xxx'),
    Case('--config={root}/configs/demo.py --sweep={root}/configs/sweeps/seeds.py --workdir={here}/old', '{here}/old',
         {'old/thesis.tex': 'precious'}),
    Case('--config={root}/configs/demo.py --sweep={root}/configs/sweeps/seeds.py --workdir=~nobody_of_this_name',
         '~nobody'),
    Case('--workdir={here}/none --report', '{here}/none'),
    Case('--workdir={here} --report', '{here}'),
    Case('--workdir=/dev/null --report', '/dev/null'),
    Case('--report', '--workdir is missing'),
    sweep('def get_sweep(:\n', 'grid.py:1: SyntaxError'),
    sweep('', 'grid.py has no function get_sweep'),
    sweep('get_sweep = 3\n', 'grid.py has no function get_sweep'),
    sweep('import none\n', 'grid.py:1: ModuleNotFoundError'),
    sweep('x = y\n', 'grid.py:1: NameError'),
    sweep('import sys\nsys.exit(0)\n', 'grid.py:2: SystemExit: 0'),
    sweep('raise SystemExit\n', 'grid.py:1: SystemExit'),
    sweep(b'x = "\xe9"\n', 'grid.py'),
    sweep(b'\0', 'grid.py'),
    sweep('def get_sweep():\n    return []\n', 'grid.py', 'get_sweep()'),
    Case(DEMO + '--sweep={here}/grid.py --dry_run', '', {'grid.py': (
        'from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass Run:\n    seed: int\n'
        + returning('[dataclasses.asdict(Run(1))]'))}, status=0),
    sweep(returning('None'), 'grid.py'),
    sweep(returning('[]'), 'grid.py'),
    sweep(returning('3'), 'grid.py'),
    sweep(returning('{}'), 'grid.py'),
    sweep(returning('{"seed": 1}'), 'grid.py'),
    sweep(returning('"seed"'), 'grid.py'),
    sweep(returning('[3]'), 'grid.py'),
    sweep(returning('[[]]'), 'grid.py'),
    sweep(returning('[{3: 4}]'), 'grid.py'),
    sweep(returning('({"seed": seed} for seed in range(3))'), 'grid.py'),
    sweep(returning('[{"sede": 1}]'), 'grid.py', 'sede'),
    sweep(returning('[{"model": 1}]'), 'grid.py', 'model'),
    sweep(returning('[{"model.num_layers": "x"}]'), 'grid.py', 'num_layers'),
    sweep(returning('[{"model.num_layers": None}]'), 'grid.py', 'num_layers'),
    sweep(returning('[{"model.num_layers": [1]}]'), 'grid.py', 'num_layers'),
    sweep(returning('[{"model.num_layers": object()}]'), 'grid.py', 'num_layers'),
    sweep(returning('[{"model.num_layers": 10 ** 30}]'), 'grid.py', 'num_layers'),
    sweep(returning('[{"model.dropout": float("nan")}]'), 'grid.py', 'dropout'),
    sweep(returning('[{"optimizer.factor": 10 ** 400}]'), 'grid.py, run', 'config.optimizer.factor=1000'),
    sweep(returning('[{"seed": "x", "train.steps": "y"}]'), "config.seed='x': must", "config.train.steps='y': must"),
    sweep(returning('[{"seed": -1}]'), 'grid.py', 'config.seed=-1'),
    sweep(returning('[{"optimizer.warmup": 1200}]'), 'grid.py, run', 'config.optimizer.warmup=1200: must be below'),
    Case(DEMO + '--config.optimizer.warmup=9 --sweep={here}/grid.py --dry_run',
         'config.optimizer.warmup=9: must be below train.steps=5', {'grid.py': returning('[{"train.steps": 5}]')}),
    sweep(returning('[{"data.dir": "a\\0b", "data.source": "files"}]'), 'grid.py', 'data.dir'),
    sweep(returning('1 / 0'), 'grid.py:2: ZeroDivisionError'),
    sweep(returning('config.modle'), 'grid.py:2: AttributeError'),
    sweep(returning('open("/none")'), 'grid.py:2: FileNotFoundError'),
    sweep(returning('exit(0)'), 'grid.py:2: SystemExit'),
    sweep(returning('get_sweep(config)'), 'grid.py:2: RecursionError'),
    sweep('from configs.sweeps import over, product\n\n' + returning('product(over("seed", [1]), over("seed", [2]))'),
          'grid.py:4: ', 'seed'),
    sweep('from configs.sweeps import over\n\n' + returning('over("seed", 3)'), 'grid.py:4: TypeError'),
    old(''),
    old('{'),
    old('{}'),
    old('[]'),
    old('null'),
    old('[' * 100_000),
    old('{"config": {}, "runs": {}}'),
    old('{"config": 3, "runs": {"a": {}}}'),
    old('{"config": {}, "runs": ["a"]}'),
    old('{"config": {}, "runs": {"a": 3}}'),
    old('{"config": {"train.steps": "x"}, "runs": {"a": {}}}'),
    old('{"config": {}, "runs": {"a": {"train.steps": "x"}}}'),
    old('{"config": {"model.num_heads": 0}, "runs": {"a": {}}}', 'sweep.json', 'config.model.num_heads=0'),
    old('{"config": {}, "runs": {"a": {}, "b": {"model.num_heads": 0}}}', 'sweep.json', 'config.model.num_heads=0'),
    old('{"config": {}, "runs": {"a": {}, "b": {"model.num_heads": null}}}', 'sweep.json', 'model.num_heads=None'),
    old(f'{{"config": {{}}, "runs": {{"a": {{}}, "b": {{"model.d_ff": {10 ** 400}}}}}}}', 'sweep.json',
        'config.model.d_ff='),
    old(f'{{"config": {{}}, "runs": {{"a": {{}}, "b": {{"optimizer.factor": {10 ** 400}}}}}}}', 'sweep.json'),
    old('{"config": {}, "runs": {"a": {}, "b": {"model.dropout": NaN}}}', 'sweep.json', 'config.model.dropout=nan'),
    old('{"config": {"cache_dir": "\\ud800"}, "runs": {"a": {}}}', 'sweep.json', 'config.cache_dir='),
    old(b'\xff'),
    old(FOLDER),
    Case('--config={root}/configs/demo.py --sweep={root}/configs/sweeps/seeds.py --workdir={here}/old', 'sweep.json',
         {'old/sweep.json': ''}),
    Case('--config={root}/configs/demo.py --sweep={root}/configs/sweeps/seeds.py --workdir={here}/old', 'sweep.json',
         {'old/sweep.json': '{"config": {}, "runs": 3}'}),
]

ONE = '{"config": {}, "runs": {"run": {}}}'
SLOW = [
    Case('', '--workdir is missing', environment={'MPLBACKEND': 'nonsense'}, alone=True),
    # Runs of the sweep: a damaged file is reported and counts as missing
    Case('--workdir={here} --report', 'test.json', {'sweep.json': ONE, 'run/results/test.json': ''}, status=0),
    Case('--workdir={here} --report', 'test.json', {'sweep.json': ONE, 'run/results/test.json': '[]'}, status=0),
    Case('--workdir={here} --report', 'test.json', {'sweep.json': ONE, 'run/results/test.json': cut}, status=0),
    Case('--workdir={here} --report', 'test.json', {'sweep.json': ONE, 'run/results/test.json': with_values(bleu='x')},
         status=0),
    Case('--workdir={here} --report', '',
         {'sweep.json': ONE, 'run/metrics.jsonl': '[]\n{"step": "x"}\n3\n{"step": 3}\n'}, status=0),
    Case('--workdir={here} --report', '', {'sweep.json': ONE, 'run/results/test.json': without('parameters')},
         status=0),
    # A metric that the runs do not have: the report is written
    Case('--workdir={here} --report --metric=chrf',
         ('wrote {here}/report.md', '--metric=chrf: no run has this metric. The plots show the default metric.'),
         {'sweep.json': ONE.replace('"run"', '"scored"'), 'scored/results/validation.json': '{"bleu": 38.5}'},
         status=1),
    Case('--workdir={here} --report', 'report.csv', {'sweep.json': ONE, 'report.csv': FOLDER}),
    Case('--workdir={here} --report', 'curves.png', {'sweep.json': ONE, 'curves.png': FOLDER}),
]
