"""Measures time and memory of a large corpus: python -m benchmarks.corpus [--pairs=5000000] [--folder=DIR] [--alone]

Writes text files of generated pairs, learns subwords from these files, builds the token store, plans an epoch and takes
batches, as train.py does with the settings of configs/wmt14_base.py. Prints a JSON line per phase, with seconds,
target tokens per second, and the memory of the process in MiB. 'peak_mb' is the peak of the phase. 'own_mb' is the
process's own memory at the end of the phase. 'mapped_mb' is the part of memory-mapped files that is in memory at the
end of the phase. The system can free this part. 'workers_peak_mb' is the largest peak of a worker.

Before the store is built, its stages (reading, tokenising, writing) are measured separately, in one process, with the
first --stages pairs. The last line compares the speed of the batches, in target tokens per second, with the speed that
256 chips need (--chip_tokens per chip).
"""

import filecmp
import functools
import itertools
import json
import random
import re
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from command_line import run_script
from configs import wmt14_base
from input_pipeline.batches import ALL, BatchPlan, Part, prefetch
from input_pipeline.sources import BuiltinCorpus, TextCorpus
from input_pipeline.stores import SIDES, write_pairs
from input_pipeline.token_store import open_store, tokenizers_for
from runtime.files import check_new_folder, expanded

PAIRS = flags.DEFINE_integer('pairs', 500_000, 'The number of pairs. Fewer than 20,000 may be too few for '
                             'the vocabulary.', lower_bound=1)
BATCHES = flags.DEFINE_integer('batches', 500, 'The number of batches that are taken.', lower_bound=1)
STAGES = flags.DEFINE_integer('stages', 100_000, 'The number of pairs for measuring the stages of building the store.',
                              lower_bound=1)
ALONE = flags.DEFINE_bool('alone', False, 'Also build the token store in one process, and compare the two stores.')
CHIP_TOKENS = flags.DEFINE_float('chip_tokens', 50_000, 'Target tokens per second that a chip needs.')
FOLDER = flags.DEFINE_string('folder', None, 'A new or an empty folder for the text and the store; by default a '
                             'temporary folder.')


def main() -> None:
    folder = expanded(FOLDER.value) if FOLDER.value else None
    if folder:
        check_new_folder(folder, '--folder')
    with tempfile.TemporaryDirectory() as temporary:
        measure(folder or Path(temporary))


def measure(folder: Path) -> None:
    settings = wmt14_base.get_config()
    phase('start', lambda: None)
    phase('write text', lambda: write(folder, PAIRS.value))
    corpus = TextCorpus(folder, 'en', 'fr', {'train': 'train'})
    tokenizers = phase('tokenizer', lambda: tokenizers_for(corpus, settings.data.tokenizer, folder))
    limit = settings.data.max_length
    sample = measure_stages(corpus, tokenizers, limit, folder)
    build = functools.partial(open_store, corpus, 'train', tokenizers, limit, folder)
    store = phase('token store', build, lambda store: store.stats['target_tokens'])
    if ALONE.value:
        compare_alone(folder, corpus, tokenizers, limit)
    plan = phase('plan', lambda: BatchPlan(store, tokens=settings.batch.tokens, num_buckets=settings.batch.buckets,
                                           seed=settings.seed), lambda _: store.stats['target_tokens'])
    phase('first batch', lambda: plan.batch(0))

    def take(part=ALL):
        began = time.perf_counter()
        tokens = sum(int(batch['weights'].sum()) for batch in prefetch(plan, 0, BATCHES.value, part))
        return tokens, tokens / (time.perf_counter() - began)

    _, whole = phase('batches', take, lambda taken: taken[0])
    hosts = 64  # each host has four chips
    _, shared = phase(f'batches, one of {hosts} hosts', functools.partial(take, Part(0, 4, 4 * hosts, 4 * hosts)),
                      lambda taken: taken[0])
    phase('next epoch', lambda: plan.batch(len(plan)))
    print(json.dumps({
        'pairs': len(store), 'stages_pairs': sample,
        **{f'{side}_tokens': store.stats[f'{side}_tokens'] for side in ('source', 'target')},
        'batches_of_an_epoch': len(plan), 'batches_taken': BATCHES.value, 'rows_of_batches': plan.rows.tolist(),
        'tokens_per_second': round(whole), 'tokens_per_second_of_a_host': round(shared),
        'needed_tokens_per_second': 256 * CHIP_TOKENS.value,
        'needed_tokens_per_second_of_a_host': 256 * CHIP_TOKENS.value / hosts,
        'text_mb': megabytes(sum(path.stat().st_size for path in folder.glob('train.*')))}))


def measure_stages(corpus, tokenizers, limit: int, folder: Path) -> int:
    """Measures reading, tokenising and writing of the first --stages pairs. Returns the number of these pairs.

    `limit` is the maximum number of tokens of a sentence. Pairs with a longer sentence are not written.
    """
    pairs = phase('stage: read', lambda: list(itertools.islice(corpus.pairs('train'), STAGES.value)))

    def tokenise():
        return [[list(tokenizers[side].encode_parts(text)) for side, text in zip(SIDES, pair, strict=True)]
                for pair in pairs]

    rows = phase('stage: tokenise', tokenise, lambda rows: sum(map(len, itertools.chain(*(row[1] for row in rows)))))
    tokenized: Any = {side: Tokenized([row[place] for row in rows]) for place, side in enumerate(SIDES)}

    def write_rows():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            write_pairs(pairs, Path(temporary), tokenizers=tokenized, max_length=limit)

    phase('stage: write', write_rows)
    return len(pairs)


class Tokenized:
    """A replacement for a tokenizer. It returns prepared results in order, so that tokenising takes no time."""

    def __init__(self, rows):
        self._rows = iter(rows)

    def encode_parts(self, text):
        return next(self._rows)


def compare_alone(folder: Path, corpus, tokenizers, limit: int) -> None:
    """Builds a second store in one process, and prints whether the files of both stores are equal."""
    [store] = [path for path in (folder / 'tokens').iterdir() if path.is_dir()]
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        phase('token store, one process', lambda: write_pairs(
            corpus.pairs('train'), Path(temporary), tokenizers=tokenizers, max_length=limit))
        names = [path.name for path in store.iterdir()]
        print(json.dumps({'the same bits': not any(filecmp.cmpfiles(store, temporary, names, shallow=False)[1:])}))


def write(folder: Path, count: int) -> None:
    """Writes FOLDER/train.en and FOLDER/train.fr. Each line contains one to three pairs of the built-in corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, pieces = random.Random(0), list(BuiltinCorpus('en', 'fr', seed=0).pairs('train'))
    with open(folder / 'train.en', 'w', encoding='utf-8') as source, open(
            folder / 'train.fr', 'w', encoding='utf-8') as target:
        for _ in range(count):
            drawn = [pieces[rng.randrange(len(pieces))] for _ in range(rng.randint(1, 3))]
            for file, side in zip((source, target), zip(*drawn, strict=True), strict=True):
                file.write(', '.join(side) + '\n')


def phase(name: str, work: Callable[[], Any], tokens: Callable[[Any], int] | None = None) -> Any:
    """Runs `work`, and prints its time, memory and tokens per second. Returns the result of `work`.

    `tokens` is a function that returns the number of tokens in the result.
    """
    Path('/proc/self/clear_refs').write_text('5')  # resets the peak memory of this process
    began = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - began
    status = {key: int(value) * 1024 for key, value in re.findall(
        r'(\w+):\s+(\d+) kB', Path('/proc/self/status').read_text())}
    print(json.dumps({
        'phase': name, 'seconds': round(seconds, 2),
        **({'tokens_per_second': round(tokens(result) / seconds)} if tokens else {}),
        'workers_peak_mb': megabytes(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024),
        'peak_mb': megabytes(status['VmHWM']),
        'own_mb': megabytes(status['RssAnon']), 'mapped_mb': megabytes(status['RssFile'])}), flush=True)
    return result


def megabytes(count: int) -> int:
    return round(count / 2 ** 20)


if __name__ == '__main__':
    run_script(main)
