"""Images and series: data of train.py, and inputs of decode.py."""

import io

import numpy as np
from PIL import Image

from tests.bad_inputs.cases import LOOP, Case, cut, with_values
from tests.bad_inputs.train_data import DIGITS, NPZ, arrays, npz

PIXELS = np.arange(64, dtype=np.uint8).reshape(8, 8)
COLOUR = np.stack([PIXELS] * 3, axis=-1)
SHARE = NPZ + '--config.data.validation_share=0 '


def png(array=PIXELS, kind='png'):
    """Returns an image file."""
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind)
    return file.getvalue()


def csv(*rows, header='series,time,x,target', name='train'):
    return {f'data/{name}.csv': '\n'.join([header, *rows])}


def pngs(**changed):
    """Returns folders of images: two classes in two splits. `changed` replaces files of the test split."""
    files = {f'data/{split}/{name}/1.png': png() for split in ('train', 'validation') for name in 'ab'}
    return files | {f'data/validation/{name}': content for name, content in changed.items()}


def forecast(override, *expected, header='x', rows='1\n' * 20):
    """A case of forecasting from a table with one series."""
    return Case('--config={root}/configs/co2_forecast.py --workdir={new} --config.data.source=files '
                f'--config.data.name= --config.data.file={{here}}/series.csv --config.{override}', expected,
                {'series.csv': f'{header}\n{rows}'})


def splits(train, validation, **more):
    """Returns a function that makes a case with a training split and a validation split."""
    return lambda *expected: Case(SHARE, expected, {**npz(**train), **npz('validation', **validation)}, **more)


def text(content, *expected, flags=''):
    """Returns a case in which a language model is trained on one file."""
    return Case('--config={root}/configs/shakespeare_char.py --workdir={new} --config.data.file={here}/x.txt ' + flags,
                expected, {'x.txt': content})


def seen(content, *expected):
    """Returns a case in which decode.py gets an array of inputs."""
    return Case('--workdir={digits} --input={here}/data/in.npz', expected, npz('in', inputs=content))


NAMES, FOUR = np.array(['cat', 'dog'] * 2), np.arange(64.0).reshape(4, 4, 4, 1)
TRAIN = [
    # Names of splits
    Case(NPZ + '--config.data.splits.train=nosuch', ("config.data.splits.train='nosuch'", 'nosuch.npz'), npz()),
    Case(NPZ + "--config.data.splits.train='train[:90%]'", 'train[:90%].npz', npz()),
    Case(NPZ + '--config.data.splits.train=train,train', 'train,train.npz', npz()),
    Case(NPZ + '--config.data.splits.validation=dev', ('dev.npz does not exist', 'splits.validation'), npz()),
    # Classes and targets
    splits({'targets': NAMES}, {})("validation.npz: the classes are numbers, such as 0", "such as 'cat'"),
    splits({}, {'targets': NAMES})("validation.npz: the classes are names, such as 'cat'", 'Use numbers'),
    splits({'targets': NAMES}, {'targets': np.array(['cat', 'cow'] * 2)})("class 'cow' of example 1 is not in the"),
    splits({'targets': np.array(['cat', '', 'cat', ''])}, {})("the class of example 1 is ''"),
    splits({'targets': np.array(['a\tb'] * 4)}, {})(r"the class of example 0 is 'a\tb'", 'one line of text'),
    arrays(npz(targets=np.array([[1, 2]] * 4).astype(object)), 'train.npz cannot be read', 'text, not objects'),
    Case(NPZ + '--config.task=regression --config.eval.metric=loss --config.train.label_smoothing=0.1',
         "target 'cat' of example 0 is not a number", npz(targets=NAMES)),
    # Inputs
    arrays(npz(inputs=np.where(np.arange(4)[:, None, None, None] == 2, np.nan, FOUR)), 'example 2 contains nan'),
    arrays(npz(inputs=np.where(FOUR > 60, -np.inf, FOUR)), 'example 3 contains -inf'),
    arrays(npz(inputs=FOUR * 1j), 'their type is complex128, such as'),
    arrays(npz(inputs=FOUR.astype(str)), "their type is <U"),
    arrays(npz(inputs=FOUR > 3), 'their type is bool'),
    Case(DIGITS + '--config.data.source=files --config.data.dir={here}/data',
         ('config.data.crop=1', 'series of shape (', 'inputs[..., None]'), npz(inputs=FOUR[..., 0])),
    splits({'inputs': FOUR.astype(np.uint8)}, {'inputs': FOUR / 500})('validation.npz: inputs: value 0.002 of exam'),
    splits({'inputs': FOUR.astype(np.uint8)}, {'inputs': FOUR - 60})('value -60 of example 0 is neither a byte'),
    splits({'inputs': FOUR / 10 - 2}, {'inputs': FOUR + 100})('validation.npz', 'far outside the range'),
    arrays(npz(groups=np.arange(3)), 'groups have the shape (3,)'),
    Case(NPZ + '--config.data.image_size=8', 'config.data.image_size=8 is only for folders of images', npz()),
    # Forecasts
    forecast('data.horizon=0', 'config.data.horizon=0'),
    forecast('data.season=105', 'config.data.season=105: must be at most data.context=104'),
    forecast('model.patches.patch=10', 'config.model.patches.patch=10: must divide data.context=104'),
    forecast('data.dir=.', "config.data.dir='.': has no effect with task=forecasting"),
    forecast('data.source=tfds', "config.data.source='tfds': must be builtin or files"),
    forecast('data.file=', "config.data.file='': must name a table of series"),
    forecast('data.file={here}/no.csv', '{here}/no.csv'),
    forecast('seed=0', 'the series has 20 steps, of which 16 are for training', 'config.data.horizon = 156'),
    forecast('seed=0', "series.csv:3: x is 'nan', not a number. Forecasting needs every value", rows='1\nnan\n'),
    forecast('seed=0', "column 'target' is not used for forecasting", header='x,target', rows='1,2\n'),
    forecast('task=regression', "config.task='regression': must be forecasting for model.kind=forecaster"),
    # Augmentation
    Case(DIGITS + '--config.data.mixup=-1', 'config.data.mixup=-1'),
    Case(DIGITS + '--config.data.mixup=0.2 --config.train.r_drop=1', 'must not be combined with train.r_drop=1'),
    Case('--config={root}/configs/pendulum.py --workdir={new} --config.data.mixup=0.2', 'config.data.mixup=0.2: has'),
    # Tables of series
    arrays(csv('a,x,1,0'), "train.csv:2: time is 'x'", 'such as 2024-01-31T12:00'),
    arrays(csv('a,0,1,0', 'a,,2,0'), "train.csv:3: time is ''"),
    arrays(csv('a,0,1,0', 'a,0,2,0'), "train.csv:3: time '0' of series 'a' is also at line 2"),
    arrays(csv('a,0,1,0', 'a,2024-01-01,2,0'), "train.csv:3: time is '2024-01-01', not a number"),
    arrays(csv('a,2024-01-01,1,0', 'a,2024-02-30,2,0'), "train.csv:3: time is '2024-02-30', not a date"),
    arrays(csv('a,1,0', 'b,1,0', 'a,2,0', header='series,x,target'), 'train.csv:4: ', 'or add a column time'),
    arrays(csv('a,0,1,0', 'b,0,1,cat'), "train.csv:3: target is 'cat', not a number, but 1 of 2"),
    arrays(csv('a,p,1,0', 'a,q,2,0', header='series,group,x,target'), "train.csv:3: group is 'q', but it is 'p'"),
    Case(SHARE, ("class 'cow' of example 0 (validation.csv:2) is not in the training split",),
         csv('a,0,1,cat', 'b,0,2,dog') | csv('a,0,1,cow', name='validation')),
    arrays(csv('a,0,,0'), "train.csv:2: x is '', not a number", 'config.data.missing=mean'),
    Case(NPZ + '--config.data.missing=mean', 'example 1 (train.csv:3) has no values', csv('a,0,1,0', 'b,0,,1')),
    Case(NPZ + '--config.data.missing=drop', 'config.data.missing', csv('a,0,1,0', 'b,0,,1')),
    Case(SHARE, ('validation.csv: inputs: example 0 (validation.csv:2) has the shape (3, 1)', 'at most 2 steps'),
         csv('a,0,1,0', 'a,1,1,0', 'b,0,2,1') | csv('a,0,1,0', 'a,1,1,0', 'a,2,2,0', name='validation')),
    arrays({'data/train.csv': 'series;x;target\na;1;0\n'}, "train.csv:1: the columns are separated by ';'"),
    arrays({'data/train.csv': 'series\tx\ttarget\na\t1\t0\n'}, "train.csv:1: the columns are separated by '\\t'"),
    arrays({'data/train.csv': ',series,x,target\n0,a,1,0\n'}, 'train.csv:1: column 1 has no name', 'index=False'),
    arrays({'data/train.csv': 'a,1,0\nb,2,1\n'}, "train.csv:1: column 'series' is missing"),
    arrays({'data/train.csv': 'series,x,target\n'.encode('utf-16')}, 'train.csv:1: not UTF-8'),
    arrays({'data/train.csv': b'PK\3\4\x14\0\6\0' + bytes(range(256))}, 'train.csv:1: '),
    arrays(csv(',0,1,0', 'b,0,2,1'), 'train.csv:2: the cell of column series is empty'),
    arrays(csv('a,0,"1,5",0'), "train.csv:2: x is '1,5', not a number. Write 1234.5"),
    arrays(csv('a,0,5%,0'), "train.csv:2: x is '5%', not a number"),
    arrays(csv('a,0,0x1F,0'), "train.csv:2: x is '0x1F', not a number"),
    arrays(csv('a,0,True,0'), "train.csv:2: x is 'True', not a number"),
    Case(NPZ + '--config.data.missing=mean', "train.csv:2: x is 'inf', not a number", csv('a,0,inf,0', 'b,0,2,1')),
    arrays(csv('a,inf,1,0', 'a,2,2,0'), "train.csv:2: time is 'inf', not a date"),
    arrays(csv('a,2024-01-01T00:00Z,1,0', 'a,2024-01-01T02:00+02:00,2,0'), "is also at line 2"),
    arrays(csv('a,2024-01-01T00:00Z,1,0', 'a,2024-01-01T00:00,2,0'), 'has no time zone, but'),
    arrays(csv('a,0,1,', 'b,0,2,'), 'train.csv:2: the cell of column target is empty. Each series needs a target'),
    arrays(csv('a,0,1,0.5', 'b,0,2,1'), 'class 0.5 of example 0 (train.csv:2)', 'Use task=regression'),
    arrays(csv('a,0,1,0'), 'validation_share=0.1: too few of 1 distinct inputs'),
    forecast('seed=0', "series.csv:2: x is 'one', not a number", rows='one\n'),
    forecast('seed=0', 'series.csv has a header but no rows', rows=''),
    # Texts
    *(text(content, "x.txt' is empty, or has only white space. Use a file with text") for content in ('', ' \n\n')),
    text(b'\xef\xbb\xbf', "x.txt' is empty"),
    text('x', 'the train split has no text', 'Use files with more text'),
    text('one\n'.encode('utf-16'), 'x.txt:1: not UTF-8 (byte 0xff at column 1)'),
    text(b'one\ncaf\xe9\n', 'x.txt:2: not UTF-8'),
    text(b'one\xed\xa0\x80', 'x.txt:1: not UTF-8'),
    text(b'%PDF-1.7\n%\xe2\xe3\n', 'x.txt:2: not UTF-8'),
    text('one two\n' * 50, 'config.data.validation_share=0.0: must be above 0',
         flags='--config.data.validation_share=0'),
    text('one two\n' * 50, 'config.data.context=128: must be at most model.max_length=64',
         flags='--config.data.context=128'),
    text('one two\n' * 50, "config.data.documents='page': must be one of", flags='--config.data.documents=page'),
    text('one two\n' * 50, 'vocab_size=10: must be above 260',
         flags='--config.data.tokenizer.kind=bpe --config.data.tokenizer.vocab_size=10'),
    text('one two\n' * 50, 'vocab_size=100000: too large for this text',
         flags='--config.data.tokenizer.kind=bpe --config.data.tokenizer.vocab_size=100000'),
    # Folders of images
    Case(SHARE, ('validation/a/2.png cannot be read as an image',), pngs(**{'a/2.png': b'text'})),
    Case(SHARE, ('validation/a/2.png cannot be read as an image',), pngs(**{'a/2.png': cut(png())})),
    Case(SHARE, ('validation/a/2.png cannot be read as an image', 'Repair or remove'), pngs(**{'a/2.png': LOOP})),
    Case(SHARE, (r"is 'b\n'. The name of a class must be one line", r"example 2 ('b\n/1.png')"),
         pngs(**{'b\n/1.png': png()})),
    Case(SHARE, '2.tif has more than 8 bits per channel (mode F)',
         pngs(**{'a/2.tif': png(np.float32(PIXELS), 'tiff')})),
    Case(SHARE + '--config.data.image_size=1', 'does not divide inputs of 1 x 1', pngs()),
    Case(SHARE, ('validation/a/2.png has 4 x 8 pixels', 'config.data.image_size'),
         pngs(**{'a/2.png': png(PIXELS[:, :4])})),
    Case(SHARE, ('validation/b/2.png is a colour image',), pngs(**{'b/2.png': png(COLOUR)})),
    Case(SHARE, ('validation/b/2.png has more than 8 bits',), pngs(**{'b/2.png': png(PIXELS.astype(np.uint16))})),
    Case(SHARE, ("class 'c' of example 2 (c/1.png) is not in the training split",), pngs(**{'c/1.png': png()})),
    Case(SHARE, ('has no data set', 'train/CLASS/FILE.png'), {'data/train/1.png': png()}),
    Case(SHARE, ("'Testing', 'Training' would be the classes", '--config.data.splits.train=Training'),
         {f'data/{name}/1.png': png() for name in ('Training/a', 'Training/b', 'Testing/a', 'Testing/b')}),
    Case(SHARE, ('validation has no folders of images CLASS/FILE.png',), {'data/train/a/1.png': png()}),
]
DECODE = [
    seen(np.full((2, 8, 8, 1), 0.3), 'in.npz: inputs: value 0.3 of example 0', 'Convert the images to uint8'),
    seen(PIXELS[None, ..., None] % 2 * 1.0, 'have the type float64 and only the values 0 and 1'),
    seen(np.full((2, 8, 8, 1), -5), 'value -5 of example 0 is neither a byte'),
    seen(PIXELS[None], 'inputs[..., None]'),
    seen(PIXELS[..., None], 'inputs[None]'),
    Case('--workdir={digits} --input={here}/x.png', 'x.png has 8 x 4 pixels, but the model reads images of 8 x 8',
         {'x.png': png(PIXELS[:4])}),
    Case('--workdir={digits} --input={here}/x.png', 'x.png is a colour image (RGB)', {'x.png': png(COLOUR)}),
    Case('--workdir={digits} --input={here}/x.png', 'x.png cannot be read as an image', {'x.png': 'text'}),
    Case('--workdir={digits} --input={here}/none.png', 'none.png cannot be read as an image'),
    Case('--workdir={digits} --input={here}/x.csv', 'x.csv is a table of series, but', {'x.csv': 'series,x\na,1\n'}),
    Case('--workdir={digits} --split=test', 'sizes.json', {'digits/data/sizes.json': with_values(inputs=3)}),
    Case('--workdir={digits} --split=test', 'sizes.json', {'digits/data/sizes.json': with_values(inputs__low=[1, 2])}),
    Case('--workdir={digits} --split=test', 'sizes.json', {'digits/data/sizes.json': with_values(inputs__dtype=1)}),
    Case('--workdir={digits} --split=test', 'sizes.json', {'digits/data/sizes.json': with_values(targets=['a', 'b'])}),
]
