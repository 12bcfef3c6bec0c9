"""Speed of the train step: python -m benchmarks.train_step [--workload=tiny|base] [--peers=torch,torch.compile]

One JSON line for each system; with --peers also one for the ratio to each of them: how many times as fast we are, the
median over the turns, and its quartiles. All systems take turns in one run, each in a process of its own, whose peak
memory is given; `program_gb` is what the step itself holds, by XLA's account. The peers train the same model on as many
tokens: PyTorch's nn.Transformer, eager or through torch.compile.

Run it on a quiet machine, and compare figures of one run only.
"""

from command_line import run_script, use_huge_pages

if __name__ == '__main__':
    use_huge_pages()

from absl import flags

from benchmarks.turns import System, check_peers, in_turns, report_turns
from benchmarks.workloads import WORKLOADS

LIBRARIES = {'torch': 'torch', 'torch.compile': 'torch'}  # peer -> what it is imported from
WORKLOAD = flags.DEFINE_enum('workload', 'tiny', list(WORKLOADS), 'Which sizes.')
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Of the computation.')
TURNS = flags.DEFINE_integer('turns', 15, 'Timed steps of each system.', lower_bound=1)
PEERS = flags.DEFINE_list('peers', [], f'Time these too: {", ".join(LIBRARIES)}.')


def main() -> None:
    check_peers(PEERS.value, LIBRARIES, DTYPE.value)
    workload = WORKLOADS[WORKLOAD.value]
    ours = System('allyouneed', 'benchmarks.ours:ready_train_step', (workload, DTYPE.value, bool(PEERS.value)))
    peers = [System(peer, 'benchmarks.peers:torch_train_step', (workload, peer == 'torch.compile'))
             for peer in PEERS.value]
    found = in_turns([ours, *peers], TURNS.value)
    report_turns(found, workload.batch * workload.length,
                 {'benchmark': 'train_step', 'workload': WORKLOAD.value, 'dtype': DTYPE.value})


if __name__ == '__main__':
    run_script(main)
