"""python -m tools.show_run: damaged and foreign run directories."""

from tests.bad_inputs.cases import FIFO, FOLDER, GONE, LOOP, PIPES, Case, cut, flipped, with_values, without


def run(name, content, *expected, **more):
    return Case('{run}', expected or name.rpartition('/')[2], {f'run/{name}': content}, **more)


QUICK = [
    Case('', 'RUN is missing'),
    Case('{here}/none', '{here}/none'),
    Case('{here}', '{here}'),
    Case('/dev/null', '/dev/null'),
    Case('{here}/' + 'x' * 300, 'xxx'),
    Case('{here}/loop', '{here}/loop', {'loop': LOOP}),
    Case('~nobody_of_this_name', '~nobody_of_this_name'),
    Case('{run} {run}', 'unexpected argument'),
    run('config.json', ''),
    run('config.json', '{'),
    run('config.json', '[]'),
    run('config.json', FOLDER),
    run('config.json', b'\xff'),
    run('config.json', with_values(cache_dir='\ud800'), 'config.json', 'config.cache_dir='),
    run('config.json', with_values(data__dir='\ud800'), 'config.json', 'config.data.dir='),
    run('results/test.json', ''),
    run('results/test.json', '{'),
    run('results/test.json', '[]'),
    run('results/test.json', FOLDER),
    run('results/test.json', with_values(bleu='x')),
    run('results/test.json', with_values(bleu=10 ** 400), 'test.json is damaged: bleu is not a number'),
    run('results/test.json', with_values(checkpoint_steps=3)),
    run('results/other.json', 'x'),
]
SLOW = [
    Case('', 'RUN is missing', environment={'MPLBACKEND': 'nonsense'}, alone=True),
    run('metrics.jsonl', FOLDER),
    run('metrics.jsonl', b'\xff\n[]\n{"step": "x"}\n{"step": null}\n{"step": 3, "train_loss": "x"}\n3\n', '', status=0),
    run('metrics.jsonl', '{"step": 3, "validation_bleu": ' + '9' * 400 + '}\n', '', status=0),
    run('metrics.jsonl', '[' * 100_000 + '\n', '', status=0),
    run('metrics.jsonl', GONE, '', status=0),
    run('results/test.json', without('bleu', 'checkpoint', 'checkpoint_steps', 'parameters'), '', status=0),
    run('checkpoints', 'a file'),
    run('checkpoints/6', 'a file', 'checkpoints/6'),
    run('checkpoints/6', FOLDER, 'checkpoints/6'),
    run('checkpoints/060', FOLDER, '', status=0),
    run('checkpoints/6/state', GONE, 'checkpoints/6'),
    run('checkpoints/6/state/_METADATA', '', 'checkpoints/6'),
    run('checkpoints/6/state/_METADATA', '{}', 'checkpoints/6'),
    *(run(f'checkpoints/6/{name}', FIFO, 'checkpoints/6 is damaged', f'{name} is a pipe') for name in PIPES),
    run('checkpoints/6/state/_METADATA', cut, 'checkpoints/6'),
    run('checkpoints/6/state/_METADATA', flipped, 'checkpoints/6'),
    run('config.json', with_values(task=3)),
    run('config.json', with_values(model=3)),
    run('config.json', with_values(model__num_heads=0)),
    run('config.json', with_values(data__source='nowhere')),
    run('config.json', with_values(train__steps='x')),
    run('config.json', with_values(eval__patience=None)),
    run('config.json', '[' * 100_000),
    Case('{digits}', 'config.json', {'digits/config.json': cut}),
]
