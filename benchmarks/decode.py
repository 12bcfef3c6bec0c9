"""Measures the speed of decoding: python -m benchmarks.decode [--workload=base] [--peers=ctranslate2]

Decodes a batch of 64 sources of 24 tokens with the functions of decode.py, from tokens to text, first with greedy
search and then with a beam of 4. Each output has exactly 32 tokens. For each beam size, the script prints the same JSON
lines as benchmarks.train_step. All systems take turns and have the same weights. The peer `ctranslate2` uses all cores
for one batch, which is the default of CTranslate2's Translator. The peer `ctranslate2.workers` gives each core a part
of the batch, as this project does. The line with the ratio also contains 'same_tokens', the share of equal tokens in
the outputs of both systems. The last token of an output is not compared, because this project forces an end token
there.

Use a machine without other work, and compare only figures of the same run.
"""

import tempfile
from pathlib import Path

from absl import flags

from benchmarks.turns import CORES, System, check_peers, in_turns, report_turns
from benchmarks.workloads import WORKLOADS, Search
from command_line import run_script

WORKERS = {'ctranslate2': 1, 'ctranslate2.workers': CORES}
LIBRARIES = dict.fromkeys(WORKERS, 'ctranslate2')  # {peer: the library that it needs}
WORKLOAD = flags.DEFINE_enum('workload', 'tiny', list(WORKLOADS), 'The sizes of the model and the batch.')
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'The type of the computation.')
TURNS = flags.DEFINE_integer('turns', 7, 'Timed searches per system.', lower_bound=1)
PEERS = flags.DEFINE_list('peers', [], f'Other systems to time: {", ".join(LIBRARIES)}.')


def main() -> None:
    check_peers(PEERS.value, LIBRARIES, DTYPE.value)
    workload = WORKLOADS[WORKLOAD.value]
    for search in Search(beam=1), Search(beam=4):
        with tempfile.TemporaryDirectory() as folder:
            model = str(Path(folder) / 'model.npz')  # written by this project's system, and read by the peers
            ours = System('allyouneed', 'benchmarks.ours:ready_decode',
                          (workload, DTYPE.value, search, model, bool(PEERS.value)))
            peers = [System(peer, 'benchmarks.peers:ctranslate2_decode', (workload, search, model, WORKERS[peer]))
                     for peer in PEERS.value]
            timed = in_turns([ours, *peers], TURNS.value)
        report_turns(timed, search.sentences * search.target, {
            'benchmark': 'decode', 'workload': WORKLOAD.value, 'dtype': DTYPE.value, 'method': search.method,
            'beam': search.beam})


if __name__ == '__main__':
    run_script(main, computes=True)
