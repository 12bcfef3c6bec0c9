"""train.py: data, models that do not fit the data, and run directories."""

import io
import zipfile

import numpy as np

from tests.bad_inputs.cases import (
    FIFO,
    FOLDER,
    GONE,
    LOOP,
    NULL,
    PIPES,
    Case,
    cut,
    flipped,
    with_values,
    without,
    zipped,
)

DEMO = '--config={root}/configs/demo.py --workdir={new} '
DIGITS = '--config={root}/configs/digits_vit.py --workdir={new} '
LETTERS = '--config={root}/configs/shakespeare_char.py --workdir={new} --config.data.file={data}/train.en '
FOLDERS = ('--config={root}/configs/shakespeare_char.py --workdir={new} --config.data.file= '
           '--config.data.dir={here}/data')
NPZ = DIGITS + '--config.data.source=files --config.data.name= --config.data.crop=0 --config.data.dir={here}/data '


def demo(override, *expected):
    key = override.partition('=')[0]
    return Case(f'{DEMO} --config.{override}', expected or f'config.{key}=')


def digits(override, *expected):
    return Case(f'{DIGITS} --config.{override}', expected or f'config.{override.partition("=")[0]}=')

TEXT = '{text} --workdir={new} '
RUN = '{same} --workdir={run} --config.train.steps=8 '  # of a finished run, only the records are read


LABELS = {'data/train-labels-idx1-ubyte': b'\0\0\x08\x01\0\0\0\x01\0',
          'data/train-images-idx3-ubyte': b'\0\0\x08\x03\0\0\0\x01\0\0\0\x01\0\0\0\x01\0'}


def text(files, *expected, **more):
    """Returns a case in which some text files have other content."""
    return Case(TEXT, expected, {f'data/{name}': content for name, content in files.items()}, **more)


def arrays(code, *expected):
    """Returns a case with array files that `code` makes."""
    return Case(NPZ, expected, {'data/x': 'x', **code})


def npz(name='train', **changed):
    """Returns an NPZ file of a few images, with some arrays replaced."""
    file = io.BytesIO()
    np.savez(file, **{'inputs': np.arange(64.0).reshape(4, 4, 4, 1), 'targets': np.arange(4) % 2, **changed})
    return {f'data/{name}.npz': file.getvalue()}


def npy(header):
    """Returns an NPZ file whose inputs begin with these bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w') as archive:
        archive.writestr('inputs.npy', b'\x93NUMPY\1\0\x7f\0' + header.encode().ljust(126) + b'\n')
        archive.writestr('targets.npy', b'')
    return file.getvalue()


HEADERS = [f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}" for shape in (
    f'({10 ** 23}, 3, 3)', '((4, 4, 1)', '(4, 4, 01L)')]
HUGE = np.full((4, 4, 4, 1), 1e300)

SLOW = [
    Case('', '--config is missing', environment={'MPLBACKEND': 'nonsense'}, alone=True),
    # The model and the data
    digits('model.patches.patch=3', 'config.model.patches.patch'),
    digits('model.patches.patch=16', 'config.model.patches.patch'),
    Case(DIGITS + '--config.model.position=sinusoidal --config.model.d_model=66 --config.model.num_heads=2',
         'config.model.d_model'),
    digits('data.crop=1000', 'config.data.crop=1000'),
    digits('parallel.data=3', 'config.parallel: the product of data=3'),
    digits('data.name=mnist', 'config.data.name'),
    demo('data.source_lang=xx', "Unknown locale 'xx'"),
    demo('data.tokenizer.vocab_size=261', 'config.data.tokenizer.vocab_size=261'),
    Case(TEXT + '--config.data.tokenizer.vocab_size=1000000', 'config.data.tokenizer.vocab_size=1000000'),
    Case(TEXT + '--config.model.d_model=100000 --config.model.d_ff=1000000 --config.model.num_layers=100',
         ('GiB', 'config.model.d_model')),
    Case(TEXT + '--config.batch.tokens=8', 'config.batch.tokens=8'),
    Case(TEXT + '--config.data.max_length=1', 'config.data.max_length=1'),
    Case(TEXT + '--config.data.dir={here}/none', '{here}/none'),
    Case(TEXT + '--config.data.dir={here}/' + 'x' * 300, 'xxx'),
    Case(TEXT + '--config.data.dir={here}/data/train.en', '{here}/data/train.en'),
    Case(TEXT + '--config.data.dir=~nobody_of_this_name', '~nobody_of_this_name'),
    Case(TEXT + '--config.data.splits.train=', 'splits.train'),
    Case(TEXT + '--config.data.splits.validation=' + 'x' * 300, 'xxx'),
    Case(TEXT + '--config.data.splits.train=../../none', '../none'),
    *(Case(TEXT + f'--config.data.splits.test={names}', 'config.data.splits.test=')
      for names in ('a,a', 'a,', ',a', 'a,train', 'validation,a', 'a,b/c')),
    Case(TEXT + '--config.data.splits.test=test,none', 'none.en'),
    Case(LETTERS + '--config.data.splits.test=a,b', 'config.data.splits.test='),
    Case(NPZ + '--config.data.splits.test=a,b', 'config.data.splits.test=', npz()),
    Case(TEXT + '--config.data.tokenizer.dropout=1.1', 'config.data.tokenizer.dropout=1.1'),
    Case(TEXT + '--config.data.tokenizer.dropout=-0.1', 'config.data.tokenizer.dropout=-0.1'),
    Case(TEXT + '--config.data.tokenizer.dropout=nan', 'config.data.tokenizer.dropout=nan'),
    Case(TEXT + '--config.data.tokenizer.dropout=0.1 --config.data.tokenizer.kind=unigram',
         ('config.data.tokenizer.dropout=0.1', 'data.tokenizer.kind=unigram')),
    Case(LETTERS + '--config.data.tokenizer.kind=bpe --config.data.tokenizer.dropout=0.1',
         'config.data.tokenizer.dropout=0.1'),
    Case(TEXT + '--config.data.tokenizer.normalization=nfkc_fc', 'nfkc_cf'),
    Case(TEXT + '--config.data.target_lang=de', 'train.de'),
    Case(TEXT + '--config.cache_dir=/dev/null/cache', '/dev/null/cache'),
    Case(TEXT + '--config.cache_dir={here}/file', '{here}/file', {'file': 'text'}),
    Case(TEXT + '--config.cache_dir=/proc/none', '/proc/none'),
    Case(TEXT + '--config.cache_dir={here}/' + 'x' * 300, 'xxx'),
    Case(TEXT + '--config.cache_dir=~nobody_of_this_name', '~nobody_of_this_name'),
    Case(TEXT + '--config.data.source=tfds --config.data.name=no_such_dataset', 'no_such_dataset'),
    Case(TEXT + '--config.data.source=tfds --config.data.name=/', 'config.data.name'),
    Case(TEXT + '--config.data.source=tfds --config.data.name=x:y', 'x:y'),
    Case(TEXT, 'gpu', environment={'JAX_PLATFORMS': 'gpu'}, alone=True),
    Case(TEXT, 'nonsense', environment={'JAX_PLATFORMS': 'nonsense'}, alone=True),
    # Text files
    text({'train.en': GONE}, 'train.en'),
    text({'train.en': FOLDER}, 'train.en'),
    text({'train.en': LOOP}, 'train.en'),
    text({'train.en': FIFO}, 'train.en'),
    text({'train.en': NULL}, 'train.en'),
    text({'train.en': ''}, 'train.en'),
    text({'train.en': '', 'train.xx': ''}, 'train'),
    text({'train.en': '\n' * 50, 'train.xx': '\n' * 50}, 'train'),
    text({'train.en': 'one\n'}, 'train.en has 1 lines'),
    text({'train.xx': cut}, 'train.xx'),
    text({'train.en': b'one\ncaf\xe9\n'}, 'train.en:2: not UTF-8'),
    text({'train.en': 'one\n'.encode('utf-16')}, 'train.en:1: not UTF-8'),
    text({'train.en': GONE, 'train.en.gz': b'no gzip'}, 'train.en.gz'),
    text({'train.en': GONE, 'train.en.gz': cut(zipped('one two three\n' * 500))}, 'train.en.gz'),
    text({'train.en': GONE, 'train.en.gz': flipped(zipped('one two three\n' * 500))}, 'train.en.gz'),
    text({'train.en': GONE, 'train.en.gz': ''}, 'train.en.gz'),
    text({'train.en': GONE, 'train.tsv': 'one\ttwo\tthree\n'}, 'train.tsv:1'),
    text({'train.en': GONE, 'train.tsv': 'one\n'}, 'train.tsv:1'),
    text({'train.en': GONE, 'train.tsv': ''}, 'train.tsv'),
    text({'train.en': GONE, 'train.tsv': FOLDER}, 'train.en'),
    text({'train.en': GONE, 'train.tsv': b'one\t\xff\n'}, 'train.tsv:1'),
    text({'validation.en': GONE}, 'validation.en'),
    text({'validation.en': '', 'validation.xx': ''}, 'validation'),
    text({'validation.xx': b'\xff\n'}, 'validation.xx:1'),
    # One file, folders of files
    Case(LETTERS + '--config.data.file={here}/none', 'config.data.file'),
    Case(LETTERS + '--config.data.file={here}', 'config.data.file'),
    Case(LETTERS + '--config.data.file={here}/empty', 'empty', {'empty': ''}),
    Case(LETTERS + '--config.data.file={here}/fifo', 'fifo', {'fifo': FIFO}),
    Case(LETTERS + '--config.data.file={here}/bytes', 'bytes:1', {'bytes': b'\xff\xfe'}),
    Case(LETTERS + '--config.data.file={here}/text.gz', 'text.gz', {'text.gz': 'no gzip'}),
    Case(LETTERS + '--config.data.file={here}/short', 'short', {'short': 'x'}),
    Case(LETTERS + '--config.data.file={here}/' + 'x' * 300, 'xxx'),
    Case(LETTERS + '--config.data.dir={data}', 'config.data'),
    Case(FOLDERS, 'train.txt', {'data/train.en': 'x'}),
    Case(FOLDERS, 'train', {'data/train': FOLDER}),
    Case(FOLDERS, 'a.txt:1', {'data/train/a.txt': b'\xff'}),
    # Arrays
    arrays({}, 'data'),
    arrays({'data/train.npz': 'text'}, 'train.npz'),
    arrays({'data/train.npz': ''}, 'train.npz'),
    arrays({'data/train.npz': FOLDER}, 'data'),
    arrays({'data/train.csv': ''}, 'train.csv'),
    arrays({'data/train.csv': '\n\n'}, 'train.csv'),
    arrays({'data/train.csv': 'series,x,target\n'}, 'train.csv'),
    arrays({'data/train.csv': 'series,target\na,1\n'}, 'train.csv:1'),
    arrays({'data/train.csv': 'x,target\n1,1\n'}, 'train.csv:1'),
    arrays({'data/train.csv': 'series,x\na,1\n'}, 'train.csv:1'),
    arrays({'data/train.csv': 'series,x,x,target\na,1,2,1\n'}, 'train.csv:1'),
    arrays({'data/train.csv': 'series,x,target\na,1\n'}, 'train.csv:2'),
    arrays({'data/train.csv': 'series,x,target\na,nan,1\n'}, 'train.csv:2'),
    arrays({'data/train.csv': 'series,x,target\na,1e999,1\n'}, 'train.csv:2'),
    arrays({'data/train.csv': 'series,x,target\na,one,1\n'}, 'train.csv:2'),
    arrays({'data/train.csv': 'series,x,target\na,1,-1\n'}, 'class -1'),
    arrays({'data/train.csv': 'series,x,target\na,1,999999999\n'}, '999999999'),
    arrays({'data/train.csv': 'series,x,target\na,1,1\na,1,2\n'}, 'train.csv:3'),
    arrays({'data/train.csv': 'series,x,target\na,1,1\nb,1,1\na,1,1\n'}, 'train.csv:4'),
    arrays({'data/train.csv': b'series,x,target\na,\xff,1\n'}, 'train.csv:2'),
    arrays({'data/train.csv': 'series,x,target\n"a,1,1\n'}, 'train.csv'),
    arrays({'data/train.csv': 'series,x,target\na,1,1\0\n'}, 'train.csv:2'),
    arrays({'data/train.csv': 'series,x,target\na,' + '1' * 200_000 + ',1\n'}, 'train.csv'),
    arrays({'data/train.csv.gz': 'no gzip'}, 'train.csv.gz'),
    arrays({**LABELS, 'data/train-images-idx3-ubyte': ''}, 'train-images-idx3-ubyte'),
    arrays({**LABELS, 'data/train-images-idx3-ubyte': b'\0\0\x08\x03'}, 'train-images-idx3-ubyte'),
    arrays({**LABELS, 'data/train-images-idx3-ubyte': b'\0\0\x08\x03' + b'\xff' * 12}, 'train-images-idx3-ubyte'),
    arrays({**LABELS, 'data/train-images-idx3-ubyte': b'\0\0\x08\x03' + bytes(12)}, 'train-'),
    arrays({**LABELS, 'data/train-images-idx3-ubyte': GONE, 'data/train-images-idx3-ubyte.gz': b'\x1f\x8b'},
           'train-images-idx3-ubyte.gz'),
    arrays({'data/train-images-idx3-ubyte': ''}, 'train-labels-idx1-ubyte'),
    arrays({**LABELS, 'data/train-labels-idx1-ubyte': bytes(8)}, 'train-'),
    # A run to resume
    Case(RUN + '--config.model.d_ff=64', 'model.d_ff'),
    Case(RUN, 'config.json', {'run/config.json': ''}),
    Case(RUN, 'config.json', {'run/config.json': '[]'}),
    Case(RUN, 'config.json', {'run/config.json': 'null'}),
    Case(RUN, 'config.json', {'run/config.json': '{"seed": NaN}'}),
    Case(RUN, 'config.json', {'run/config.json': '[' * 100_000}),
    Case(RUN, 'config.json', {'run/config.json': b'\xff\xfe'}),
    Case(RUN, 'config.json', {'run/config.json': FOLDER}),
    Case(RUN, 'config.json', {'run/config.json': cut}),
    Case(RUN, 'run', {'run/config.json': GONE}),
    Case(RUN, 'config', {'run/config.json': with_values(model=3)}),
    Case(RUN, ('config.json', 'config.data.dir='), {'run/config.json': with_values(data__dir='\ud800')}),
    Case(RUN, 'sizes.json', {'run/data/sizes.json': GONE}),
    Case(RUN, 'sizes.json', {'run/data/sizes.json': ''}),
    Case(RUN, 'sizes.json', {'run/data/sizes.json': '{}'}),
    Case(RUN, 'sizes.json', {'run/data/sizes.json': with_values(source_vocab_size='285')}),
    Case(RUN, 'sizes.json', {'run/data/sizes.json': with_values(source_vocab_size=10 ** 30)}),
    Case(RUN, 'sizes.json', {'run/data/sizes.json': without('target_vocab_size')}),
    Case(RUN, 'source.model', {'run/data/source.model': GONE}),
    Case(RUN, 'source.model', {'run/data/source.model': ''}),
    Case(RUN, 'source.model', {'run/data/source.model': cut}),
    Case(RUN, 'source.model', {'run/data/source.model': '{"kind": "char", "characters": 3}'}),
    Case(RUN, 'fingerprints.json', {'run/data/fingerprints.json': GONE}),
    Case(RUN, 'fingerprints.json', {'run/data/fingerprints.json': ''}),
    Case(RUN, 'fingerprints.json', {'run/data/fingerprints.json': '[]'}),
    Case(RUN, 'fingerprints.json', {'run/data/fingerprints.json': with_values(train=3)}),
    Case(RUN, 'train', {'run/data/fingerprints.json': with_values(train__files=3)}),
    Case(RUN, 'train', {'run/data/fingerprints.json': with_values(train__files={'a': 1})}),
    Case(RUN, 'train', {'run/data/fingerprints.json': with_values(train__files=[3, [4]])}),
    Case(RUN, 'checkpoints', {'run/checkpoints/6/progress/metadata': ''}),
    Case(RUN, 'checkpoints', {'run/checkpoints/6/state/_METADATA': cut}),
    *(Case(RUN, ('checkpoints/6 is damaged', f'{name} is a pipe'),
           {f'run/checkpoints/6/{name}': FIFO})
      for name in PIPES),
    *(Case(RUN, ('run/checkpoints has no checkpoint', 'up to step 6'), {f'run/checkpoints{name}': what})
      for name, what in (('', GONE), ('', FOLDER), ('/6', GONE))),
    Case(RUN, 'lock', {'run/lock': FOLDER}),
    Case(RUN, 'lock', {'run/lock': LOOP}),
    Case(RUN, 'config.json', {'run/config.json': FIFO}),
    Case(RUN, 'fingerprints.json', {'run/data/fingerprints.json': FIFO}),
    Case(RUN, 'metrics.jsonl', {'run/metrics.jsonl': FIFO}),
    Case(RUN, 'tensorboard', {'run/tensorboard': LOOP}),
    Case(RUN, 'train.en', {'run/data/fingerprints.json': with_values(train={})}),
    Case(RUN + '--config.checkpoint.every=7', 'changes.jsonl', {'run/changes.jsonl': FOLDER}),
    Case(RUN + '--config.optimizer.warmup=4', 'metrics.jsonl', {'run/metrics.jsonl': FOLDER}),
    Case(RUN + '--config.train.steps=3', 'this run is finished, at step 6', status=0),  # fewer than the warm-up
    Case(RUN, 'tensorboard', {'run/tensorboard': 'a file'}),
    Case(RUN, 'checkpoints', {'run/checkpoints': 'a file'}),
]

QUICK_DATA = [
    arrays({'data/train.csv': 'series,x,target\na,1e300,1\n'}, 'train.csv:2', '1e300'),
    arrays({'data/train.csv': 'series,x,target\na,1,1\nb,1,-1e300\n'}, 'train.csv:3', '1e300'),
    arrays({'data/train.csv': 'series,x,target\na,1_0,1\n'}, 'train.csv:2', '1_0'),
    arrays(npz(inputs=HUGE), 'train.npz: inputs'),
    arrays({**npz(inputs=1e30 * np.arange(64.0).reshape(4, 4, 4, 1)), **npz('validation'), **npz('test')},
           'train.npz: inputs'),
    arrays({**npz(), **npz('validation', inputs=HUGE), **npz('test')}, 'validation.npz: inputs'),
    arrays({**npz(), **npz('validation', inputs=HUGE / 1e262), **npz('test')}, 'validation.npz: inputs'),
    arrays(npz(targets=HUGE[:, 0, 0, 0]), 'train.npz: targets'),
    arrays(npz(targets=np.float64(3)), 'train.npz has 4 inputs, but targets'),
    arrays(npz(targets=np.zeros((4, 0))), 'train.npz has 4 inputs, but targets'),
    *(arrays({'data/train.npz': npy(header)}, 'train.npz cannot be read') for header in HEADERS),
]
