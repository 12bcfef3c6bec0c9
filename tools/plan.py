"""Plans a training run for devices that this machine may not have. For example:

    python -m tools.plan --config=configs/wmt14_base.py --topology=v5e:4x4 --config.parallel.fsdp=4

For TPUs (v4, v5e, v5p, v6e), the script compiles the train step of train.py and a step of beam search ahead of time.
This needs libtpu (`pip install -e ".[plan]"`) but no TPU. Plans for GPUs (a100:8, h100:16) use a formula. A plan
contains the memory, arithmetic, memory traffic and communication of each device, and an upper limit of the speed.
Options are set as for train.py. The script does not read the data. It assumes that every sentence of a batch has
--length tokens. The plan is printed as text or, with --json, as JSON.
"""

import json
import os

from absl import flags
from ml_collections import config_flags

from command_line import flag_files_explained, run_script
from configs.checks import config_from
from runtime.errors import UserError
from runtime.files import check_file, expanded
from runtime.process_setup import slow_imports

with flag_files_explained():
    CONFIG_FLAG = config_flags.DEFINE_config_file('config', None, 'The recipe, a file of configs/.', lock_config=True)
TOPOLOGY = flags.DEFINE_string('topology', None, 'The devices: v4:2x2x1, v5e:4x4, v5p:2x2x2, v6e:4x4, a100:8, h100:16.')
SLICES = flags.DEFINE_integer('slices', 1, 'The number of slices of this topology. Slices are data-parallel.')
LENGTH = flags.DEFINE_integer('length', None, 'Tokens of an assumed sentence, including padding; by default 64 (at '
                              'most config.data.max_length), or config.data.context for a language model.')
SEARCH = flags.DEFINE_bool('search', False, 'Search meshes, remat, batch sizes and train.accumulate, and print the '
                           'best plan that fits.')
COMPILE = flags.DEFINE_integer('compile', 1, 'With --search, the number of best candidates to compile; 0 means none.')
FORMULA = flags.DEFINE_bool('formula', False, 'Use only the formula, and compile nothing.')
DECODE = flags.DEFINE_bool('decode', True, 'Also compile a step of beam search.')
KEEP = flags.DEFINE_string('keep', None, 'A file for the compiled train step. Devices of this topology can load it.')
JSON = flags.DEFINE_bool('json', False, 'Print JSON.')
MOST = 1_000_000  # the largest value of a flag, to catch typing mistakes


def main() -> None:
    """Makes the plan that the flags request, and prints it."""
    # JAX must not look for a TPU or a metadata server of TPUs, and libtpu's own log is not for users.
    os.environ.update(JAX_PLATFORMS='cpu', TPU_SKIP_MDS_QUERY='1', ALLOW_MULTIPLE_LIBTPU_LOAD='1')
    for name in ('TPU_MIN_LOG_LEVEL', 'TPU_STDERR_LOG_LEVEL'):
        os.environ.setdefault(name, '3')
    with slow_imports():  # --help does not need them
        from tools import planning
        from tools.chips import parse_topology

    config = config_from(CONFIG_FLAG)
    if not TOPOLOGY.value:
        raise UserError('--topology is missing. Use for example --topology=v5e:4x4')
    for flag, least in (SLICES, 1), (LENGTH, 1), (COMPILE, 0):
        if flag.value is not None and not least <= flag.value <= MOST:
            raise UserError(f'--{flag.name}={flag.value}: must be from {least} to {MOST:,}')
    topology = parse_topology(TOPOLOGY.value, SLICES.value)
    by_formula = FORMULA.value or not topology.chip.libtpu
    if KEEP.value and (SEARCH.value or by_formula):
        raise UserError(f'--keep={KEEP.value}: with --search or --formula there is no compiled train step to keep. '
                        'Remove --keep')
    if COMPILE.present and (by_formula or not SEARCH.value):
        raise UserError(f'--compile={COMPILE.value} applies only to --search for TPUs, without --formula. Remove '
                        '--compile')
    if DECODE.present and (by_formula or SEARCH.value and not COMPILE.value):
        raise UserError('--decode: a plan by formula has no step of beam search. Remove --decode or --nodecode')
    if KEEP.value:
        check_file(expanded(KEEP.value))
    if SEARCH.value:
        plan = planning.search(config, topology, LENGTH.value, 0 if by_formula else COMPILE.value,
                               decode=DECODE.value)
    elif by_formula:
        plan = planning.by_formula(config, topology, LENGTH.value)
    else:
        plan = planning.compiled(config, topology, LENGTH.value, expanded(KEEP.value) if KEEP.value else None,
                                 decode=DECODE.value)
    if not plan.fits:
        raise planning.too_large(plan.config, topology, LENGTH.value, plan.train.peak)
    print(json.dumps(plan.to_dict(), indent=2) if JSON.value else planning.described(plan))
    if SEARCH.value and not JSON.value:
        print(f'best: {planning.as_flags(plan)}')


if __name__ == '__main__':
    run_script(main)
