"""Speed of decoding: python -m benchmarks.decode [--workload=tiny|base] [--peers=ctranslate2,ctranslate2.workers]

A batch of 64 sources of 24 tokens, each decoded to exactly 32 tokens, greedy and with a beam of 4, by what decode.py
calls, from tokens to text. JSON lines as of benchmarks.train_step, for each beam; all systems take turns, with the same
weights. `ctranslate2` has all cores on one batch, as its Translator has by default; `ctranslate2.workers` gives each
core a share of the batch, as we do. The line of a ratio also says which share of the tokens is the same in both, but
for the last one of an output, which is the end token where we force it.

Run it on a quiet machine, and compare figures of one run only.
"""

from command_line import run_script, use_huge_pages

if __name__ == '__main__':
    use_huge_pages()

import tempfile
from pathlib import Path

from absl import flags

from benchmarks.turns import CORES, System, check_peers, in_turns, report_turns
from benchmarks.workloads import WORKLOADS, Search

WORKERS = {'ctranslate2': 1, 'ctranslate2.workers': CORES}
LIBRARIES = dict.fromkeys(WORKERS, 'ctranslate2')  # peer -> what it is imported from
WORKLOAD = flags.DEFINE_enum('workload', 'tiny', list(WORKLOADS), 'Which sizes.')
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Of the computation.')
TURNS = flags.DEFINE_integer('turns', 7, 'Timed searches of each system.', lower_bound=1)
PEERS = flags.DEFINE_list('peers', [], f'Time these too: {", ".join(LIBRARIES)}.')


def main() -> None:
    check_peers(PEERS.value, LIBRARIES, DTYPE.value)
    workload = WORKLOADS[WORKLOAD.value]
    for search in Search(beam=1), Search(beam=4):
        with tempfile.TemporaryDirectory() as folder:
            model = str(Path(folder) / 'model.npz')  # ours writes it, the peers read it
            ours = System('allyouneed', 'benchmarks.ours:ready_decode',
                          (workload, DTYPE.value, search, model, bool(PEERS.value)))
            peers = [System(peer, 'benchmarks.peers:ctranslate2_decode', (workload, search, model, WORKERS[peer]))
                     for peer in PEERS.value]
            found = in_turns([ours, *peers], TURNS.value)
        report_turns(found, search.sentences * search.target, {
            'benchmark': 'decode', 'workload': WORKLOAD.value, 'dtype': DTYPE.value, 'method': search.method,
            'beam': search.beam})


if __name__ == '__main__':
    run_script(main)
