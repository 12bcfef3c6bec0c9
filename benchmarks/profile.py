"""Profiles the train step or the search: python -m benchmarks.profile --what=train_step|decode [--top=40]

Profiles a few runs and prints two tables. A line of the first table is the sum of all operations with the same kind and
the same place in the model, over all layers. A line of the second table is the sum of all operations of the same kind.
`ms` is the number of milliseconds per train step, or per decoding step of a search. The time of a search includes the
encoder. The time during which several operations run is divided equally among these operations, so that the sum of all
lines is the time of the step. `threads` is the mean number of threads that worked on an operation while the operation
ran. `GFLOP/s` is the speed of the matrix products of an operation during the whole time in which the operation ran,
also if other operations ran at the same time. It is empty if a search has several programs with different products.

--each prints every operation with its name in the compiled program. --hlo=DIR keeps the texts of the compiled programs.
"""

import dataclasses
import math
import os
import shutil
import tempfile
from pathlib import Path

from absl import flags

from benchmarks.operations import Op, ops_of
from benchmarks.turns import check_precision
from benchmarks.workloads import WORKLOADS, Search
from command_line import run_script
from kernels.xla import xla_flags
from runtime.errors import UserError
from runtime.files import expanded

WHAT = flags.DEFINE_enum('what', 'train_step', ['train_step', 'decode'], 'The program to profile.')
WORKLOAD = flags.DEFINE_enum('workload', 'tiny', list(WORKLOADS), 'The sizes of the model and the batch.')
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'The type of the computation.')
PRECISION = flags.DEFINE_enum('matmul_precision', 'default', ['default', 'bfloat16'], 'The precision of products.')
BEAM = flags.DEFINE_integer('beam', 4, 'The beam size of the search; 1 means greedy search.', lower_bound=1)
RUNS = flags.DEFINE_integer('runs', 4, 'The number of profiled steps or searches. The tables show the fastest one.',
                             lower_bound=1)
TOP = flags.DEFINE_integer('top', 40, 'The number of lines of the first table.', lower_bound=1)
EACH = flags.DEFINE_bool('each', False, 'Print every operation.')
HLO = flags.DEFINE_string('hlo', None, 'A folder for the compiled programs, as text.')


def main() -> None:
    if BEAM.present and WHAT.value != 'decode':
        raise UserError('--beam applies only to --what=decode. Remove --beam')
    check_precision(PRECISION.value, DTYPE.value)
    with tempfile.TemporaryDirectory() as dump:
        # XLA reads the variable when XLA is first used, and writes all compiled programs into the folder.
        os.environ['XLA_FLAGS'] = f'--xla_dump_to={dump} --xla_dump_hlo_as_text {xla_flags()}'
        report(Path(dump))


def report(dump: Path) -> None:
    """Profiles the program of --what, and prints the two tables. XLA writes compiled programs to the folder `dump`."""
    from benchmarks.ours import Translations, train_program  # these imports take seconds, and --help needs none
    from benchmarks.trace import IDLE, print_table, profile
    from kernels.product import use_precision, used_precision

    use_precision(PRECISION.value)
    workload = WORKLOADS[WORKLOAD.value]
    if WHAT.value == 'train_step':
        call, steps = train_program(workload, DTYPE.value).call, 1
    else:
        search = Search(beam=BEAM.value)
        call, steps = Translations(workload, DTYPE.value, search), search.target
    seconds, costs = profile(call, RUNS.value)
    for cost in costs.values():
        for field in dataclasses.fields(cost):
            setattr(cost, field.name, getattr(cost, field.name) / steps)
    ops = {IDLE: Op(IDLE[1], IDLE[1], '', '', 0)}
    for program in {program for program, _ in costs if program}:
        for text in sorted(dump.glob(f'*.{program}.*after_optimizations.txt')):
            if HLO.value:
                expanded(HLO.value).mkdir(parents=True, exist_ok=True)
                shutil.copy(text, expanded(HLO.value))
            for name, op in ops_of(text.read_text(), workload.vocab_size).items():
                earlier = ops.setdefault((program, name), op)
                # The trace has only the names of programs, and a search has a program for each size of its cache.
                if (earlier.shape, earlier.flops) != (op.shape, op.flops):
                    flops = op.flops if op.flops == earlier.flops else math.nan
                    ops[program, name] = dataclasses.replace(op, shape='several shapes', flops=flops)
    what = f'{WHAT.value}, {WORKLOAD.value}, {DTYPE.value}, precision {used_precision()}'
    print(f'{what}: {1e3 * seconds / steps:.2f} ms per step, not profiled')
    print_table(costs, ops, by=(lambda op: (op.kind, op.place, op.shape, op.name)) if EACH.value else
                (lambda op: (op.kind, op.place, op.shape)), top=TOP.value)
    print()
    print_table(costs, ops, by=lambda op: (op.kind,), top=100)


if __name__ == '__main__':
    run_script(main, computes=True)
