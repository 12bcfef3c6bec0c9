"""Translates with a trained model, or scores it on a split of its data.

    python decode.py --workdir=RUN --input=FILE|- [--output=FILE] [--method=beam|greedy|sample] ...
    python decode.py --workdir=RUN --split=test

stdout carries one line for each line of the input, in order; an empty line stays empty.
"""

from errors import UserError, run_script, use_huge_pages

if __name__ == '__main__':
    use_huge_pages()

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from absl import flags

import inference
from inference.pictures import attention_figure, save_figure
from inference.run import Run, search_options
from inference.scores import corpus_scores, perplexity
from inference.translate import SearchOptions, Translation
from input_pipeline.sources import decode_lines, open_corpus, read_lines
from input_pipeline.token_store import cache_folder
from training.step import use_compilation_cache

WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory of a training.')
CHECKPOINT = flags.DEFINE_string('checkpoint', 'best', 'best, latest, a step, or average:K (mean of the last K).')
INPUT = flags.DEFINE_string('input', None, 'File to translate, one sentence a line, plain or .gz; - is stdin.')
OUTPUT = flags.DEFINE_string('output', None, 'Where the translations go; without it, stdout.')
FORMAT = flags.DEFINE_enum('format', 'text', ['text', 'jsonl'], 'text: the best translation a line; jsonl: all about it.')
SPLIT = flags.DEFINE_enum('split', None, ['train', 'validation', 'test'], 'Score this split of the data instead.')
METHOD = flags.DEFINE_enum('method', None, ['beam', 'greedy', 'sample'], 'How to search; default as configured.')
BEAM = flags.DEFINE_integer('beam', None, 'Hypotheses that live at a time; default as configured.')
ALPHA = flags.DEFINE_float('alpha', None, 'Length penalty ((5 + length) / 6)^alpha; default as configured.')
N_BEST = flags.DEFINE_integer('n_best', None, 'Hypotheses a sentence, or draws with --method=sample (jsonl only).')
EXTRA_LENGTH = flags.DEFINE_integer('extra_length', None, 'Outputs have at most this many tokens more than sources.')
BATCH_SIZE = flags.DEFINE_integer('batch_size', None, 'Sentences at a time; default as configured.')
TEMPERATURE = flags.DEFINE_float('temperature', None, 'sample: below 1 is bolder, above 1 more varied.')
TOP_K = flags.DEFINE_integer('top_k', None, 'sample: draw from the k most probable tokens; 0 is all.')
TOP_P = flags.DEFINE_float('top_p', None, 'sample: draw from the fewest tokens whose probability reaches this.')
SEED = flags.DEFINE_integer('seed', None, 'sample: another seed, other draws.')
ATTENTION = flags.DEFINE_bool('attention', False, 'jsonl: add the cross-attention [layer][head][target][source].')
PICTURES = flags.DEFINE_string('pictures', None, 'Folder for one PNG a sentence: cross-attention of the last layer.')
CHUNK = 32  # batches that are read, sorted by length and written at a time: memory is bounded

log = logging.getLogger('allyouneed.decode')


def main() -> None:
    if not WORKDIR.value:
        raise UserError('--workdir is missing: give the run directory of a training')
    if (INPUT.value is None) == (SPLIT.value is None):
        raise UserError('give either --input=FILE (or -) to translate, or --split=test to score')
    run = inference.load(WORKDIR.value, CHECKPOINT.value)
    use_compilation_cache(cache_folder(run.config.cache_dir))
    names = ('method', 'beam', 'alpha', 'n_best', 'extra_length', 'batch_size', 'temperature', 'top_k', 'top_p', 'seed')
    options = search_options(run.config, **{name: flags.FLAGS[name].value for name in names})
    if FORMAT.value == 'text' and (options.n_best > 1 or ATTENTION.value):
        raise UserError('--n_best and --attention need --format=jsonl: text holds one line for each line')
    if SPLIT.value:
        score_split(run, SPLIT.value, options)
    else:
        translate_file(run, INPUT.value, options)


def translate_file(run: Run, path: str, options: SearchOptions) -> None:
    """Streams `path` through the model."""
    lines = decode_lines(sys.stdin.buffer, 'stdin') if path == '-' else read_lines(path)
    sentences, seconds = 0, 0.0
    with open_output(OUTPUT.value) as output:
        while chunk := list(itertools.islice(lines, CHUNK * options.batch_size)):
            began = time.perf_counter()
            found = run.translator.translate(chunk, options, first=sentences)
            seconds += time.perf_counter() - began
            for number, translation in enumerate(found, sentences + 1):
                output.write(written(run, translation, number) + '\n')
            output.flush()
            sentences += len(chunk)
    log.info('%d lines in %.1f s, %.1f a second (start-up not counted)', sentences, seconds,
             sentences / max(seconds, 1e-9))


def written(run: Run, translation: Translation, number: int) -> str:
    """A line of the output; makes the sentence's picture where pictures are asked for."""
    weights = None
    if (PICTURES.value or ATTENTION.value) and translation.source_tokens:
        weights = run.translator.attention(translation)['cross']
    if PICTURES.value and weights is not None:
        draw(run, translation, weights, Path(PICTURES.value) / f'{number:06d}.png')
    if FORMAT.value == 'text':
        return ' '.join(translation.text.splitlines())
    return json.dumps(as_json(run, translation) | ({'attention': weights.tolist()} if weights is not None and
                                                   ATTENTION.value else {}), ensure_ascii=False)


def as_json(run: Run, translation: Translation) -> dict[str, Any]:
    """What --format=jsonl says about a sentence."""
    source, target = run.translator.tokenizers['source'], run.translator.tokenizers['target']

    def described(hypothesis):
        return {'text': hypothesis.text, 'tokens': target.pieces(hypothesis.tokens), 'score': hypothesis.score,
                'log_prob': hypothesis.log_prob}

    return {'source': translation.source, 'source_tokens': source.pieces(translation.source_tokens),
            **described(translation.hypotheses[0]), 'n_best': [described(each) for each in translation.hypotheses]}


def draw(run: Run, translation: Translation, weights: np.ndarray, path: Path) -> None:
    """The last layer's cross-attention, head by head, and the mean over the heads."""
    source, target = run.translator.tokenizers['source'], run.translator.tokenizers['target']
    panels = np.stack([weights[-1].mean(axis=0), *weights[-1]])
    titles = ['mean', *(f'head {head}' for head in range(1, len(panels)))]
    figure = attention_figure(panels, [*target.pieces(translation.hypotheses[0].tokens), '</s>'],
                              [*source.pieces(translation.source_tokens), '</s>'], titles)
    save_figure(figure, path)
    log.info('%s', path)


def score_split(run: Run, split: str, options: SearchOptions) -> None:
    """Prints and writes RUN/results/SPLIT.json, and SPLIT.tsv beside it: source, reference, translation."""
    pairs = list(open_corpus(run.config.data).pairs(split))
    if not pairs:
        raise UserError(f'the {split} split is empty')
    sources, references = zip(*pairs, strict=True)
    began = time.perf_counter()
    found = run.translator.translate(sources, options)
    seconds = time.perf_counter() - began
    outputs = [translation.text for translation in found]
    tokens = sum(len(translation.hypotheses[0].tokens) + 1 for translation in found)
    results = corpus_scores(outputs, references) | {
        'perplexity': perplexity(run.translator, pairs, options.batch_size), 'seconds': seconds,
        'tokens_per_second': tokens / seconds, 'checkpoint': CHECKPOINT.value, 'checkpoint_steps': run.checkpoint,
        'decoding': dataclasses.asdict(options)}
    text = json.dumps(results, indent=2, ensure_ascii=False)
    folder = run.workdir / 'results'
    folder.mkdir(exist_ok=True)
    (folder / f'{split}.json').write_text(text + '\n')
    (folder / f'{split}.tsv').write_text(''.join(
        '\t'.join(' '.join(text.split()) for text in row) + '\n' for row in zip(sources, references, outputs)))
    print(text)


@contextlib.contextmanager
def open_output(path: str | None) -> Iterator[TextIO]:
    """stdout, or a file that appears under its name when it is whole: a failure leaves what was there."""
    if path is None:
        sys.stdout.reconfigure(encoding='utf-8')
        yield sys.stdout
        return
    partial = f'{path}.partial'
    try:
        with open(partial, 'w', encoding='utf-8') as file:
            yield file
    except OSError as error:
        raise UserError(f'--output={path} cannot be written: {error}') from None
    os.replace(partial, path)


if __name__ == '__main__':
    run_script(main)
