"""Time and memory of a large corpus: python -m benchmarks.corpus [--pairs=5000000] [--folder=DIR]

Writes text files of generated pairs, learns subwords from them, builds the token store, plans an epoch and takes
batches, as train.py does, with the settings of configs/wmt14_base.py. A JSON line for each phase: seconds, and the
memory of the process in MB: the peak in the phase, and at its end what it holds itself ('own') and what of the
memory-mapped files is in memory just then ('mapped': the system takes it back when it is wanted elsewhere).
"""

import json
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from command_line import run_script
from configs import wmt14_base
from input_pipeline.batches import BatchPlan, prefetch
from input_pipeline.sources import BuiltinCorpus, TextCorpus
from input_pipeline.token_store import open_store, tokenizers_for

PAIRS = flags.DEFINE_integer('pairs', 500_000, 'How many.', lower_bound=1)
BATCHES = flags.DEFINE_integer('batches', 500, 'How many are taken from the epoch.', lower_bound=1)
FOLDER = flags.DEFINE_string('folder', None, 'Where text and store go, and stay; without it a temporary folder.')


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        measure(Path(FOLDER.value or temporary))


def measure(folder: Path) -> None:
    settings = wmt14_base.get_config()
    phase('start', lambda: None)
    phase('write text', lambda: write(folder, PAIRS.value))
    corpus = TextCorpus(folder, 'en', 'fr', {'train': 'train'})
    tokenizers = phase('tokenizer', lambda: tokenizers_for(corpus, settings.data.tokenizer, folder))
    store = phase('token store', lambda: open_store(corpus, 'train', tokenizers, settings.data.max_length, folder))
    plan = phase('plan', lambda: BatchPlan(store, tokens=settings.batch.tokens, num_buckets=settings.batch.buckets,
                                           seed=settings.seed))
    phase('first batch', lambda: plan.batch(0))
    phase('batches', lambda: sum(1 for _ in prefetch(plan, 0, BATCHES.value)))
    phase('next epoch', lambda: plan.batch(len(plan)))
    print(json.dumps({
        'pairs': len(store), **{f'{side}_tokens': store.stats[f'{side}_tokens'] for side in ('source', 'target')},
        'batches_of_an_epoch': len(plan), 'batches_taken': BATCHES.value,
        'text_mb': megabytes(sum(path.stat().st_size for path in folder.glob('train.*')))}))


def write(folder: Path, count: int) -> None:
    """DIR/train.en and train.fr: one to three pairs of the built-in corpus on a line."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, pieces = random.Random(0), list(BuiltinCorpus('en', 'fr', seed=0).pairs('train'))
    with open(folder / 'train.en', 'w', encoding='utf-8') as source, open(
            folder / 'train.fr', 'w', encoding='utf-8') as target:
        for _ in range(count):
            drawn = [pieces[rng.randrange(len(pieces))] for _ in range(rng.randint(1, 3))]
            for file, side in zip((source, target), zip(*drawn, strict=True), strict=True):
                file.write(', '.join(side) + '\n')


def phase(name: str, work: Callable[[], Any]) -> Any:
    """What `work` returns; prints how long it took and the memory."""
    Path('/proc/self/clear_refs').write_text('5')  # the peak begins anew
    began = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - began
    status = {key: int(value) * 1024 for key, value in re.findall(
        r'(\w+):\s+(\d+) kB', Path('/proc/self/status').read_text())}
    print(json.dumps({
        'phase': name, 'seconds': round(seconds, 2), 'peak_mb': megabytes(status['VmHWM']),
        'own_mb': megabytes(status['RssAnon']), 'mapped_mb': megabytes(status['RssFile'])}), flush=True)
    return result


def megabytes(count: int) -> int:
    return round(count / 2 ** 20)


if __name__ == '__main__':
    run_script(main)
