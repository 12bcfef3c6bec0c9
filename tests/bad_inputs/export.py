"""python -m tools.export: wrong flags, output folders that cannot be written, and damaged runs."""

from tests.bad_inputs.cases import FIFO, FOLDER, GONE, LOOP, NULL, Case, cut, with_values

RUN = '--workdir={run} --to=safetensors '
OUT = RUN + '--output={new} '


def damaged(content, *expected, file='config.json'):
    return Case(OUT, expected or f'{{run}}/{file}', {f'run/{file}': content})


QUICK = [
    Case('', '--workdir is missing. Use --workdir=RUN --to=FORMAT --output=DIR'),
    Case('--to=safetensors --output={new}', '--workdir is missing'),
    Case('--workdir={run} --output={new}', '--to is missing'),
    Case(RUN, '--output is missing'),
    Case(RUN + '--output=', '--output is missing'),
    Case('--workdir= --to=safetensors --output={new}', '--workdir is missing'),
    Case('--workdir={run} --to=onnx --output={new}', '--to=onnx'),
    Case('--workdir={run} --to= --output={new}', '--to='),
    Case(OUT + '--quantization=int8', 'quantization=int8 does not apply to the format safetensors'),
    Case('--workdir={run} --to=ctranslate2 --quantization=int3 --output={new}', '--quantization=int3'),
    Case(OUT + 'more', "unexpected argument 'more'"),
    Case(OUT + '--chekpoint=best', 'chekpoint'),
]
SLOW = [
    Case(OUT, 'JAX_PLATFORMS=abacus', environment={'JAX_PLATFORMS': 'abacus'}, alone=True),
    # Folders
    *(Case(RUN + f'--output={{here}}/{name}', ('{here}/' + name, 'is not an empty folder'), {f'{name}/{file}': 'text'})
      for name, file in (('old', 'thesis.tex'), ('old', '.hidden'), ('old', 'model.safetensors'), ('ä', 'x'))),
    *(Case(RUN + '--output={here}/file', '{here}/file', {'file': content})
      for content in ('text', '', FIFO, LOOP, NULL)),
    Case(RUN + '--output={run}', '{run} exists and is not an empty folder'),
    *(Case(RUN + f'--output={{run}}/{name}', 'is inside {run}') for name in ('new', 'data/new', 'checkpoints/new')),
    Case(RUN + '--output={here}/file/new', '{here}/file', {'file': 'text'}),
    Case(RUN + '--output=/dev/null', '/dev/null'),
    Case(RUN + '--output=/dev/null/new', '/dev/null'),
    Case(RUN + '--output=/proc/new', '/proc/new cannot be written'),
    Case(RUN + '--output={here}/' + 'x' * 300, 'xxx'),
    Case(RUN + '--output=~nobody_of_this_name/new', '~nobody_of_this_name'),
    # Checkpoints
    *(Case(OUT + f'--checkpoint={choice}', f'{choice}') for choice in (
        '9999', 'worst', '-1', '1.5', 'best:0', 'average:-2', 'average:x')),
    Case(OUT + '--checkpoint=best:' + '9' * 5000, 'best:999'),
    *(Case(OUT + f'--checkpoint={choice}', "checkpoint=''") for choice in ('', 'raw:')),
    # Damaged runs
    Case('--workdir={here}/none --to=safetensors --output={new}', '{here}/none'),
    Case('--workdir={here} --to=safetensors --output={new}', '{here}'),
    *(damaged(content) for content in (
        '', '{', '[]', 'null', '3', '"text"', '[' * 100_000, '{"a": ' * 100_000, b'\xff', b'\x89PNG\r\n', FOLDER, FIFO,
        LOOP, NULL, cut, '{"version": 99}', '{"version": "1"}', with_values(model=3), with_values(model=None),
        with_values(task='chess'), with_values(model__d_model=-1), with_values(model__d_model=10 ** 40),
        with_values(model__d_model='8'), with_values(model__num_layers=[2]), with_values(version=None),
        with_values(model__dropout=1e400), with_values(data__max_length=2 ** 70), with_values(model__colour=3))),
    damaged(GONE, '{run} is not a run directory'),
    *(damaged(content, file='data/sizes.json') for content in ('', '{', '[]', '[' * 100_000, b'\xff', LOOP, cut,
                                                               '{"source_vocab_size": -1}')),
    *(damaged(content, '{run}', file='data/source.model') for content in (GONE, '', cut, b'\xff' * 99, FIFO, LOOP)),
]
