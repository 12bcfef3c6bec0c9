"""Measures the speed of the train step: python -m benchmarks.train_step [--workload=base] [--peers=torch]

Prints a JSON line per system. With --peers, the script also prints a line per peer, with the time of the peer divided
by the time of this project: 'ratio' is the median over the turns, and 'quartiles' are the quartiles. All systems take
turns in one run, in separate processes. The line of a system contains the peak memory of its process. 'program_gb' is
the memory that XLA reports for the train step. The peers train the same model on the same number of tokens with
PyTorch's nn.Transformer, in eager mode or with torch.compile.

With --matmul_precision=bfloat16, this project computes its products in bfloat16, as a training with
--config.train.matmul_precision=bfloat16 does, and PyTorch computes within torch.autocast.

Use a machine without other work, and compare only figures of the same run.
"""

from absl import flags

from benchmarks.turns import System, check_peers, check_precision, in_turns, report_turns
from benchmarks.workloads import WORKLOADS
from command_line import run_script

LIBRARIES = {'torch': 'torch', 'torch.compile': 'torch'}  # {peer: the library that it needs}
WORKLOAD = flags.DEFINE_enum('workload', 'tiny', list(WORKLOADS), 'The sizes of the model and the batch.')
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'The type of the computation.')
PRECISION = flags.DEFINE_enum('matmul_precision', 'default', ['default', 'bfloat16'], 'The precision of products.')
TURNS = flags.DEFINE_integer('turns', 15, 'Timed steps per system.', lower_bound=1)
PEERS = flags.DEFINE_list('peers', [], f'Other systems to time: {", ".join(LIBRARIES)}.')


def main() -> None:
    check_peers(PEERS.value, LIBRARIES, DTYPE.value)
    check_precision(PRECISION.value, DTYPE.value)
    workload, half = WORKLOADS[WORKLOAD.value], PRECISION.value == 'bfloat16'
    ours = System('allyouneed', 'benchmarks.ours:ready_train_step',
                  (workload, DTYPE.value, PRECISION.value, bool(PEERS.value)))
    peers = [System(peer, 'benchmarks.peers:torch_train_step', (workload, peer == 'torch.compile', half),
                    own_arenas=half)
             for peer in PEERS.value]
    report_turns(in_turns([ours, *peers], TURNS.value), workload.batch * workload.length,
                 {'benchmark': 'train_step', 'workload': WORKLOAD.value, 'dtype': DTYPE.value})


if __name__ == '__main__':
    run_script(main, computes=True)
