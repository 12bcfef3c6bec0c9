"""Uses a trained model: translates, continues, classifies; or scores it on a split of its data.

    python decode.py --workdir=RUN --input=FILE|- [--output=FILE] [--method=beam|greedy|sample] ...
    python decode.py --workdir=RUN --split=test

stdout carries one line for each line of the input, in order. An empty sentence stays empty; an empty prompt begins
a text. A model of images or series
takes an .npz file with an array `inputs` and gives a line for each example.
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
from inference.pictures import chosen_kind, positions_figure, save_figure
from inference.predict import Predictor
from inference.run import Run
from inference.text import Output, SearchOptions, search_options
from input_pipeline.array_files import read_inputs
from input_pipeline.sources import decode_lines, read_lines
from input_pipeline.token_store import cache_folder
from training.step import parameter_count, use_compilation_cache

WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory of a training.')
CHECKPOINT = flags.DEFINE_string('checkpoint', 'best', 'best, latest, a step, or average:K (mean of the last K).')
INPUT = flags.DEFINE_string('input', None, 'Sentences or prompts, one a line, plain or .gz, - is stdin; or an .npz.')
OUTPUT = flags.DEFINE_string('output', None, 'Where the answers go; without it, stdout.')
FORMAT = flags.DEFINE_enum('format', 'text', ['text', 'jsonl'], 'text: the best answer a line; jsonl: all about it.')
SPLIT = flags.DEFINE_enum('split', None, ['train', 'validation', 'test'], 'Score this split of the data instead.')
METHOD = flags.DEFINE_enum('method', None, ['beam', 'greedy', 'sample'], 'How to search; default as configured.')
BEAM = flags.DEFINE_integer('beam', None, 'Hypotheses that live at a time; default as configured.')
ALPHA = flags.DEFINE_float('alpha', None, 'Length penalty ((5 + length) / 6)^alpha; default as configured.')
N_BEST = flags.DEFINE_integer('n_best', None, 'Hypotheses a sentence, or draws with --method=sample (jsonl only).')
EXTRA_LENGTH = flags.DEFINE_integer('extra_length', None, 'Tokens at most beyond those of the source, or of a prompt.')
BATCH_SIZE = flags.DEFINE_integer('batch_size', None, 'Sentences at a time; default as configured.')
TEMPERATURE = flags.DEFINE_float('temperature', None, 'sample: below 1 is bolder, above 1 more varied.')
TOP_K = flags.DEFINE_integer('top_k', None, 'sample: draw from the k most probable tokens; 0 is all.')
TOP_P = flags.DEFINE_float('top_p', None, 'sample: draw from the fewest tokens whose probability reaches this.')
SEED = flags.DEFINE_integer('seed', None, 'sample: another seed, other draws.')
ATTENTION = flags.DEFINE_bool('attention', False, 'jsonl: add the attention [layer][head][target][source].')
PICTURES = flags.DEFINE_string('pictures', None, 'Folder for a PNG of the attention of each line or example.')
PICTURE_COUNT = flags.DEFINE_integer('picture_count', 100, 'Pictures of the first so many lines or examples.')
LOOK = flags.DEFINE_string(
    'look', '', 'Which attention: KIND[:LAYER[:HEAD]], KIND cross, encoder or decoder, LAYER from 1 (default the last), '
    'HEAD from 1, mean or all (the default). positions: the image of the positional encoding instead.')
CHUNK = 32  # batches that are read, sorted by length and written at a time: memory is bounded

log = logging.getLogger('allyouneed.decode')


def main() -> None:
    if not WORKDIR.value:
        raise UserError('--workdir is missing: give the run directory of a training')
    if (INPUT.value is None) == (SPLIT.value is None):
        raise UserError('give either --input=FILE (or -) to answer, or --split=test to score')
    run = inference.load(WORKDIR.value, CHECKPOINT.value)
    use_compilation_cache(cache_folder(run.config.cache_dir))
    names = ('method', 'beam', 'alpha', 'n_best', 'extra_length', 'batch_size', 'temperature', 'top_k', 'top_p', 'seed')
    options = search_options(run.config, **{name: flags.FLAGS[name].value for name in names})
    if FORMAT.value == 'text' and (options.n_best > 1 or ATTENTION.value):
        raise UserError('--n_best and --attention need --format=jsonl: text holds one line for each line')
    if PICTURES.value and LOOK.value == 'positions':
        save_figure(positions_figure(), Path(PICTURES.value) / 'positions.png')
    if SPLIT.value:
        score_split(run, SPLIT.value, options)
    elif isinstance(run.model, Predictor):
        predict_file(run, INPUT.value, options)
    else:
        answer_file(run, INPUT.value, options)


def answer_file(run: Run, path: str, options: SearchOptions) -> None:
    """Streams the lines of `path` through the model."""
    lines = decode_lines(sys.stdin.buffer, 'stdin') if path == '-' else read_lines(path)
    count, seconds = 0, 0.0
    with open_output(OUTPUT.value) as output:
        while chunk := list(itertools.islice(lines, CHUNK * options.batch_size)):
            began = time.perf_counter()
            found = run.model.respond(chunk, options, first=count)
            seconds += time.perf_counter() - began
            for number, answer in enumerate(found, count + 1):
                output.write(written(run, answer, number) + '\n')
            output.flush()
            count += len(chunk)
    log.info('%d lines in %.1f s, %.1f a second (start-up not counted)', count, seconds, count / max(seconds, 1e-9))


def written(run: Run, answer: Output, number: int) -> str:
    """A line of the output; makes the line's picture where pictures are asked for."""
    pictured = PICTURES.value and LOOK.value != 'positions' and number <= PICTURE_COUNT.value
    if pictured and (figure := run.model.picture(answer, LOOK.value)):
        save_figure(figure, picture_path(number))
    if FORMAT.value == 'text':
        return ' '.join(answer.text.splitlines())
    line = as_json(run, answer)
    if ATTENTION.value and answer.hypotheses[0].tokens:
        weights = run.model.attention(answer)
        line['attention'] = weights[chosen_kind(weights, LOOK.value.partition(':')[0])].tolist()
    return json.dumps(line, ensure_ascii=False)


def as_json(run: Run, answer: Output) -> dict[str, Any]:
    """What --format=jsonl says about a line."""
    source, target = run.model.tokenizers['source'], run.model.tokenizers['target']

    def described(hypothesis):
        return {'text': hypothesis.text, 'tokens': target.pieces(hypothesis.tokens), 'score': hypothesis.score,
                'log_prob': hypothesis.log_prob}

    return {'source': answer.source, 'source_tokens': source.pieces(answer.source_tokens),
            **described(answer.hypotheses[0]), 'n_best': [described(each) for each in answer.hypotheses]}


def predict_file(run: Run, path: str, options: SearchOptions) -> None:
    """A line for each example of an .npz file: the class and its probability, or the values."""
    inputs = read_inputs(path)
    outputs = run.model.predict(inputs, options.batch_size)
    with open_output(OUTPUT.value) as output:
        for each in outputs:
            output.write('\t'.join(run.model.named(each)) + '\n')
    draw_examples(run, inputs, outputs)


def score_split(run: Run, split: str, options: SearchOptions) -> None:
    """Prints and writes RUN/results/SPLIT.json, and beside it SPLIT.tsv: what was asked, expected and answered."""
    data = run.data()
    results, table = run.model.score(data, split, run.config, options)
    results |= {'task': run.config.task, 'parameters': parameter_count(run.model.params), 'checkpoint': CHECKPOINT.value,
                'checkpoint_steps': run.checkpoint, 'decoding': dataclasses.asdict(options)}
    text = json.dumps(results, indent=2, ensure_ascii=False)
    folder = run.workdir / 'results'
    folder.mkdir(exist_ok=True)
    (folder / f'{split}.json').write_text(text + '\n')
    (folder / f'{split}.tsv').write_text(''.join(
        '\t'.join(' '.join(cell.split()) for cell in row) + '\n' for row in table))
    if isinstance(run.model, Predictor):
        inputs = data.arrays.inputs(split)[:PICTURE_COUNT.value]
        draw_examples(run, inputs, run.model.predict(inputs, options.batch_size))
    print(text)


def draw_examples(run: Run, inputs: np.ndarray, outputs: np.ndarray) -> None:
    """Where the model looked in the first images or series, where pictures are asked for."""
    if not PICTURES.value or LOOK.value == 'positions':
        return
    for number, (example, output) in enumerate(zip(inputs[:PICTURE_COUNT.value], outputs, strict=False), 1):
        save_figure(run.model.picture(example, output, LOOK.value), picture_path(number))


def picture_path(number: int) -> Path:
    path = Path(PICTURES.value) / f'{number:06d}.png'
    log.info('%s', path)
    return path


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
