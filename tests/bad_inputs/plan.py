"""python -m tools.plan: wrong flags, absurd sizes, and configs that do not fit the devices."""

from tests.bad_inputs.cases import Case

DEMO = '--config={root}/configs/demo.py --formula '
TPU = DEMO + '--topology=v5e:4x4 '
GPU = '--config={root}/configs/demo.py --topology=h100:8 '

QUICK = [
    Case('', '--config is missing'),
    Case('--config={root}/configs/demo.py', '--topology is missing'),
    *(Case(DEMO + f'--topology={topology}', f'--topology={topology}') for topology in (
        'v9:4x4', 'v5e', 'v5e:', 'v5e:4', 'v5e:4x4x4', 'v5e:0x4', 'v5e:-4x4', 'v5e:4x', 'v5e:4.5x4', 'v4:2x2', 'a100:0',
        'a100:-8', 'a100:8x8', 'a100:x', 'h100:99999999', ':', 'v5e:99999x99999')),
    Case(DEMO + '--topology=h100:' + '9' * 5000, 'h100 needs a number of devices'),
    *(Case(TPU + f'--{flag}={value}', f'--{flag}={value}') for flag, value in (
        ('slices', 0), ('slices', -1), ('slices', 10 ** 12), ('slices', 10 ** 400), ('slices', 'two'), ('slices', 1.5),
        ('length', 0), ('length', -5), ('length', 10 ** 12), ('length', 'x'), ('compile', -1), ('compile', 10 ** 12),
        ('compile', 'all'), ('search', 'maybe'))),
    Case(TPU + '--slices=100000', 'devices are more than a plan supports'),
    Case(TPU + '--keep={new}', '--keep={new}: with --search or --formula'),
    Case(GPU + '--keep={new}', '--keep={new}: with --search or --formula'),
    Case(GPU + '--search --keep={new}', '--keep={new}: with --search or --formula'),
    *(Case(flags + '--compile=2', '--compile=2 applies only to --search for TPUs, without --formula. Remove --compile')
      for flags in (TPU.replace('--formula ', ''), TPU + '--search ', GPU + '--search ')),
    *(Case(flags + '--decode', '--decode: a plan by formula has no step of beam search')
      for flags in (TPU, GPU, TPU.replace('--formula', '--search --compile=0'))),
    Case(TPU + '--config.parallel.data=3', 'config.parallel: the product of'),
    Case(TPU + '--config.parallel.data=-1 --config.parallel.fsdp=-1', 'config.parallel'),
    Case(TPU + '--config.train.accumulate=0', 'config.train.accumulate=0'),
    Case(TPU + '--config.train.accumulate=7 --config.batch.tokens=64', 'config.batch.tokens=64'),
    Case(TPU + '--config.model.d_model=1000000000000', 'config.model.d_model=1000000000000'),
    Case(TPU + '--config.model.num_layers=1000000', 'config.model.num_layers=1000000'),
    Case(TPU + '--config.batch.tokens=1000000000000', 'config.batch.tokens=1000000000000'),
    Case(TPU + '--length=1000000', '--length'),
    Case(GPU.replace('demo', 'stdlib_lm') + '--length=512', '--length=512: config.model.position=learned'),
    Case(TPU.replace('demo', 'digits_vit'), 'config.task=classification'),
    Case(TPU + '--config.train.teacher={here}', 'config.train.teacher={here}'),
    Case(GPU + '--config.train.accumulate=7 --json', '', status=0),
    Case(GPU.replace('demo', 'rnnsearch_demo'), 'config.model.kind=rnnsearch: the formula supports only'),
    Case(TPU + 'more', "unexpected argument 'more'"),
]
SLOW = []
