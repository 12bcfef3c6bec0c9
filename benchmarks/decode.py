"""Measures the speed of decoding: python -m benchmarks.decode [--workload=tiny|base|demo|multi30k|gpt2] [--peers=PEERS]

In the workloads tiny and base, the input is a batch of 64 random sources of 24 tokens. The functions of decode.py
decode the batch from tokens to text, first with greedy search and then with a beam of 4. Each output has exactly 32
tokens. For each beam, the script prints the same JSON lines as benchmarks.train_step. All systems take turns and have
the same weights.

`ctranslate2` uses all cores for one batch, which is the default of CTranslate2's Translator. `ctranslate2.workers`
gives each core a part of the batch, as this project does. The line with the ratio also contains 'same_tokens', the
share of equal tokens. The last token of an output is not compared, because this project forces an end token there.

In the workloads demo and multi30k, the input is the test set of a trained run, --workdir (by default runs/demo and
runs/multi30k). The search is greedy search, and then the beam search of the run. A turn is the translation of all
sentences, from text to text. By default, there is a peer for each computation type that CTranslate2 supports on this
processor. Each peer uses the faster number of workers. The peers use the CPU, so on a machine with a GPU, set
JAX_PLATFORMS=cpu, or --peers= to measure only this project. The first line describes the processor, with measured rates
of matrix products. The lines of the systems contain 'bleu', and the lines with the ratio contain 'same_translations'.
CTranslate2 uses a different length penalty and stops earlier, so some of its translations differ from the translations
of this project. With --patience=1, this project also has CTranslate2's default stopping rule. With --single, the first
100 sentences are translated one by one, as for a person who waits. Each peer then uses the faster number of threads.

In the workload gpt2, a language model of the size of the smallest GPT-2 continues prompts of random tokens with greedy
search. Each continuation has 128 tokens. The batches have 1 or 16 prompts of 16 or 256 tokens. The default peers are
CTranslate2's Generator with each computation type. The further peer `transformers` computes in float32. It needs
python -m pip install -e '.[benchmark]' transformers.

Use a machine without other work, and compare only figures of the same run.
"""

import contextlib
import importlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.turns import CORES, System, check_peers, check_precision, in_turns, report_turns
from benchmarks.workloads import WORKLOADS, Search
from command_line import run_script
from configs.allowed import Between
from runtime.errors import UserError

WORKERS = {'ctranslate2': 1, 'ctranslate2.workers': CORES}
TYPES = {f'ctranslate2.{compute_type}': compute_type for compute_type in ('float32', 'bfloat16', 'int8')}
RUNS = 'demo', 'multi30k'  # workloads with a trained run
PRODUCTS = (64, 256, 1024), (160, 256, 4000), (2048, 512, 2048)  # (n, d, f) of measured products [n, d] x [d, f]
WAITING = 100  # number of sentences that are translated one by one
PATIENCES = Between(0.1, 1000)  # decode.patience=0 is our exact rule, which CTranslate2 does not have
WORKLOAD = flags.DEFINE_enum('workload', 'tiny', [*WORKLOADS, *RUNS, 'gpt2'],
                             'The sizes of the model and the batch.')
WORKDIR = flags.DEFINE_string('workdir', None, 'The run of the workload demo or multi30k.')
CHECKPOINT = flags.DEFINE_string('checkpoint', 'best', 'The checkpoint of the run, as in decode.py.')
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'The type of tiny and base.')
PRECISION = flags.DEFINE_enum('matmul_precision', 'default', ['default', 'bfloat16'],
                              'The precision of this project\'s products, as in decode.py.')
SINGLE = flags.DEFINE_bool('single', False, f'Translate the first {WAITING} sentences of demo or multi30k one by one.')
PATIENCE = flags.DEFINE_float('patience', None, 'demo and multi30k: all systems stop beam search after beam x patience '
                              'ended hypotheses. By default, each system has its own rule.')
TURNS = flags.DEFINE_integer('turns', 7, 'Timed searches per system.', lower_bound=1)
PEERS = flags.DEFINE_list('peers', None, f'Other systems to time. tiny and base: {", ".join(WORKERS)}. '
                          f'demo and multi30k: {", ".join(TYPES)}. gpt2: the same, and transformers.')


def main() -> None:
    if DTYPE.present and WORKLOAD.value not in WORKLOADS:
        raise UserError(f'--dtype does not apply to --workload={WORKLOAD.value}. Remove --dtype')
    if WORKLOAD.value in RUNS:
        return real_sentences()
    for flag in ('workdir', 'checkpoint', 'single', 'patience'):
        if flags.FLAGS[flag].present:
            raise UserError(f'--{flag} does not apply to --workload={WORKLOAD.value}. Use --workload=demo or multi30k')
    if WORKLOAD.value == 'gpt2':
        return random_continuations()
    peers = PEERS.value or []
    check_peers(peers, dict.fromkeys(WORKERS, 'ctranslate2'), DTYPE.value)
    check_precision(PRECISION.value, DTYPE.value)
    if peers and PRECISION.value != 'default':
        raise UserError(f'--matmul_precision={PRECISION.value}: the peers of --workload={WORKLOAD.value} compute in '
                        'float32. Remove --matmul_precision or --peers')
    workload = WORKLOADS[WORKLOAD.value]
    for search in Search(beam=1), Search(beam=4):
        with tempfile.TemporaryDirectory() as folder:
            model = str(Path(folder) / 'model.npz')  # written by this project's system, and read by the peers
            ours = System('allyouneed', 'benchmarks.ours:ready_decode',
                          (workload, DTYPE.value, PRECISION.value, search, model, bool(peers)))
            others = [System(peer, 'benchmarks.peers:ctranslate2_decode', (workload, search, model, WORKERS[peer]))
                      for peer in peers]
            timed = in_turns([ours, *others], TURNS.value)
        report_turns(timed, search.sentences * search.target, {
            'benchmark': 'decode', 'workload': WORKLOAD.value, 'dtype': DTYPE.value, 'method': search.method,
            'beam': search.beam})


def real_sentences() -> None:
    """Times the translation of the run's test set, with greedy search and with beam search."""
    if PATIENCE.value is not None and (problem := PATIENCES.problem(PATIENCE.value)):
        raise UserError(f'--patience={PATIENCE.value:g} {problem}')
    peers = chosen_peers(dict.fromkeys(TYPES, 'ctranslate2'))
    from benchmarks.ours import check_run  # these imports take seconds, and --help needs none
    from benchmarks.sentences import with_bleu
    from inference.run import load
    from interchange.to_ctranslate2 import write_ctranslate2
    from run_directory.trained import read_model
    from runtime.files import expanded

    workdir = expanded(WORKDIR.value or f'runs/{WORKLOAD.value}')
    run: Any = load(workdir, CHECKPOINT.value)
    check_run(workdir, run.config, peers)
    check_precision(PRECISION.value, run.config.model.dtype)
    describe_processor()
    pairs = run.data().pairs('test')
    sources, references = map(list, zip(*(pairs[:WAITING] if SINGLE.value else pairs), strict=True))
    rule = {} if PATIENCE.value is None else {'patience': PATIENCE.value}
    for search in {'method': 'greedy', 'beam': 1, 'alpha': 0.0}, {
            'method': 'beam', 'beam': run.options.beam, 'alpha': run.options.alpha, **rule}:
        with contextlib.ExitStack() as stack:
            systems = [System('allyouneed', 'benchmarks.sentences:ready_run', (
                str(workdir), CHECKPOINT.value, PRECISION.value, sources, search, SINGLE.value, bool(peers)))]
            if peers:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                write_ctranslate2(read_model(workdir, CHECKPOINT.value), Path(folder))
                systems += [System(peer, 'benchmarks.sentences:ready_ctranslate2',
                                   (folder, sources, search, SINGLE.value, TYPES[peer])) for peer in peers]
            timed = in_turns(systems, TURNS.value)
        tokenizer = run.model.tokenizers['target']
        tokens = sum(len(tokenizer.encode(text)) + 1 for text in timed['allyouneed'].answer)
        language = run.config.data.target_lang
        report_turns({name: with_bleu(system, references, language) for name, system in timed.items()}, tokens, {
            'benchmark': 'decode', 'workload': WORKLOAD.value, 'sentences': len(sources), 'single': SINGLE.value,
            **search})


def random_continuations() -> None:
    """Times the continuation of random prompts by a language model, for each batch of prompts in BATCHES."""
    peers = chosen_peers({**dict.fromkeys(TYPES, 'ctranslate2'), 'transformers': 'torch transformers'})
    from benchmarks.continuations import BATCHES, NEW, random_model, random_prompts
    from interchange.huggingface import write_huggingface
    from interchange.to_ctranslate2 import write_ctranslate2

    describe_processor()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as huggingface:
        if {*peers} & {*TYPES}:
            write_ctranslate2(random_model({}), Path(folder))
        if 'transformers' in peers:
            write_huggingface(random_model({}), Path(huggingface))
        for count, length in BATCHES:
            prompts = random_prompts(count, length)
            systems = [System('allyouneed', 'benchmarks.continuations:ready_ours',
                              ({}, PRECISION.value, prompts, NEW, bool(peers)))]
            systems += [System(peer, 'benchmarks.continuations:ready_transformers', (huggingface, prompts, NEW))
                        if peer == 'transformers' else
                        System(peer, 'benchmarks.continuations:ready_ctranslate2', (folder, prompts, NEW, TYPES[peer]))
                        for peer in peers]
            report_turns(in_turns(systems, TURNS.value), NEW * count, {
                'benchmark': 'decode', 'workload': 'gpt2', 'prompts': count, 'prompt_length': length,
                'new_tokens': NEW})


def describe_processor() -> None:
    """Prints a JSON line with the processor and its measured rates of matrix products."""
    from kernels.rates import processor, product_rate

    rates = {dtype: {'x'.join(map(str, sizes)): round(product_rate([sizes], dtype)) for sizes in PRODUCTS}
             for dtype in ('float32', 'bfloat16')}
    print(json.dumps({'benchmark': 'decode', **processor(), 'cores': CORES, 'gflops': rates}), flush=True)


def chosen_peers(libraries: Mapping[str, str]) -> list[str]:
    """Returns the peers of --peers. The default is a peer for each type in TYPES that this processor supports.

    Raises:
      UserError: if a peer is unknown or a duplicate, if its library is not installed, or if CTranslate2 does not
        support its type on this processor.
    """
    chosen = [*TYPES] if PEERS.value is None else PEERS.value
    check_peers(chosen, libraries, DTYPE.value)
    if not {*chosen} & {*TYPES}:
        return chosen
    ctranslate2: Any = importlib.import_module('ctranslate2')
    supported = ctranslate2.get_supported_compute_types('cpu')
    unsupported = [peer for peer in chosen if peer in TYPES and TYPES[peer] not in supported]
    if unsupported and PEERS.value:
        raise UserError(f'--peers={unsupported[0]}: on this processor, CTranslate2 does not support '
                        f'{TYPES[unsupported[0]]}. Remove this peer')
    return [peer for peer in chosen if peer not in unsupported]


if __name__ == '__main__':
    run_script(main, computes=True)
