"""Uses a trained model to translate, continue or classify; or scores it on a split of its data.

    python decode.py --workdir=RUN --input=FILE|- [--output=FILE] [--method=beam|greedy|sample] ...
    python decode.py --workdir=RUN                     # on a terminal: prompts for sentences
    python decode.py --workdir=RUN --input=PAIRS.tsv --score
    python decode.py --workdir=RUN --split=test [--confidence] [--compare=OTHER_RUN]

--workdir=A,B,C answers with an ensemble of several runs of one vocabulary.
stdout has one line for each line of the input, in order. The translation of an empty sentence is empty; the
continuation of an empty prompt begins a text. A continuation has the line breaks that the model wrote, so a line of
dashes separates two of them; --format=jsonl has one line for each prompt. A model of images or series reads an .npz
file with an array `inputs`, and writes a line for each example.
"""
# ruff: noqa: E402 (flags come before the imports that take seconds)

from command_line import STARTED, read_command_line, run_script, use_huge_pages

if __name__ == '__main__':
    use_huge_pages()

from absl import flags

from configs.allowed import OneOf
from configs.options import BY_NAME, OPTIONS, choices, flatten, is_used

WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory of a training; A,B,C: an ensemble of several.')
CHECKPOINT = flags.DEFINE_string('checkpoint', 'best', 'best, latest, a step, average:K or best:K (means of the '
                                 'last or the best K); raw: before it leaves out a moving average.')
DTYPE = flags.DEFINE_enum('dtype', None, choices('model.dtype'), 'Compute in this dtype; default as trained.')
INPUT = flags.DEFINE_string('input', None, 'Sentences or prompts, one a line, plain or .gz, - is stdin; or an .npz.')
OUTPUT = flags.DEFINE_string('output', None, 'Where the answers go; without it, stdout.')
FORMAT = flags.DEFINE_enum(
    'format', 'text', ['text', 'jsonl'], 'text: the best answer; jsonl: a line with all about it.')
SPLIT = flags.DEFINE_string('split', None, 'Score this split of the data instead: train, validation, test (all of '
                            'its sets), or one set of the test by its name.')
SCORE = flags.DEFINE_bool('score', False, 'The log-probability of given translations: a line of --input is '
                          'SOURCE<tab>TARGET, or a text for a language model.')
PREFIXES = flags.DEFINE_bool('prefixes', False, 'A line of --input is SOURCE<tab>PREFIX: its translation begins so.')
AVOID = flags.DEFINE_string('avoid', None, 'A file of words or phrases, one a line, that must not come.')
CONFIDENCE = flags.DEFINE_bool('confidence', False, '--split: the 95 % interval of each score of translations.')
COMPARE = flags.DEFINE_string('compare', None, '--split: how sure it is that translations are better or worse than '
                              'those of this other run directory.')
N_BEST = flags.DEFINE_integer('n_best', None, 'Hypotheses a sentence, or draws with --method=sample (jsonl only).')
SEED = flags.DEFINE_integer('seed', None, 'sample: another seed, other draws.')
SEARCH = [option.name.removeprefix('decode.') for option in OPTIONS if option.name.startswith('decode.')]
for name in SEARCH:  # the options of config.decode are flags here, too
    option = BY_NAME[f'decode.{name}']
    if isinstance(option.allowed, OneOf):
        flags.DEFINE_enum(name, None, option.allowed.choices, f'{option.meaning}; default as configured.')
    else:
        define = {int: flags.DEFINE_integer, float: flags.DEFINE_float}[type(option.default)]
        define(name, None, f'{option.meaning}; default as configured.')
ATTENTION = flags.DEFINE_bool('attention', False, 'jsonl: add the attention [layer][head][target][source].')
PICTURES = flags.DEFINE_string('pictures', None, 'Folder for a PNG of the attention of each line or example.')
PICTURE_COUNT = flags.DEFINE_integer('picture_count', 100, 'Pictures of the first so many lines or examples.')
LOOK = flags.DEFINE_string(
    'look', '', 'Which attention: KIND[:LAYER[:HEAD]], KIND cross, encoder or decoder, LAYER from 1 (default the '
    'last), HEAD from 1, mean or all (the default). positions: the image of the positional encoding instead.')
EXPLAIN = flags.DEFINE_string(
    'explain', None, 'An HTML page to explore what the model did: attention, probabilities, hypotheses. Needs no '
    'network.')
EXPLAIN_COUNT = flags.DEFINE_integer('explain_count', 200, 'The page holds the first so many lines or examples.')

if __name__ == '__main__':
    read_command_line()  # before the imports that take seconds

import dataclasses
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import inference
from analysis.explain import Page, explain_example, explain_text
from analysis.pictures import answer_figure, chosen_kind, positions_figure, save_figure
from inference.arriving import input_lines
from inference.columns import read_phrases, score_all, translate_all
from inference.options import SearchOptions, search_options
from inference.predict import Prediction, Predictor
from inference.run import Run
from inference.scores import compare_translations, confidence_intervals, read_translations, table_line
from inference.tables import as_json
from inference.text import Output, TextModel
from inference.translate import Translator
from input_pipeline.array_files import read_inputs
from input_pipeline.data import Data
from input_pipeline.sources import asked_splits
from model import parameter_count
from run_directory.records import read_config
from run_directory.trained import run_paths
from run_directory.workdir import OWN, changed_data
from runtime.errors import UserError
from runtime.files import check_file, check_folder, naming, open_output, write_text
from runtime.resources import compile_time

LINE_ENDS = str.maketrans({end: f'\\u{ord(end):04x}' for end in '\x85\u2028\u2029'})  # for some readers
BETWEEN = '-' * 15  # two continuations

log = logging.getLogger('allyouneed.decode')
IMPORTED = time.perf_counter()


def main() -> None:
    """Answers or scores, as the flags ask for."""
    typed = INPUT.value is None and not SPLIT.value and sys.stdin is not None and sys.stdin.isatty()
    check_flags_go_together(typed)
    workdirs = run_paths(WORKDIR.value or '')
    splits = asked_splits(SPLIT.value, read_config(workdirs[0]).data) if SPLIT.value else []
    check_writable(workdirs, splits)
    for flag, least in (PICTURE_COUNT, 0), (EXPLAIN_COUNT, 1):
        if flag.value < least:
            raise UserError(f'--{flag.name}={flag.value} must be at least {least}')
    avoid = read_phrases(AVOID.value) if AVOID.value else None
    run = inference.load(workdirs, CHECKPOINT.value, DTYPE.value)
    check_flags_are_used(run)
    options = search_options(run.config, avoid=avoid, **{
        name: flags.FLAGS[name].value for name in (*SEARCH, 'n_best', 'seed')})
    if FORMAT.value == 'text' and (options.n_best > 1 or ATTENTION.value):
        raise UserError('--n_best and --attention need --format=jsonl: text holds one line for each line')
    if PICTURES.value and LOOK.value == 'positions':
        save_figure(positions_figure(), Path(PICTURES.value) / 'positions.png')
    page, path = open_page(run), INPUT.value or ''
    if splits:
        score_splits(run, splits, options, page)
    elif isinstance(run.model, Predictor):
        if typed:
            raise UserError('--input=FILE.npz is missing: nobody types images or series')
        predict_file(run.model, path, options, page)
    else:
        answer_file(run.model, path, options, page)
    if page:
        page.write()
        log.info('%s explains %d', page.path, page.count)


def check_flags_go_together(typed: bool) -> None:
    """Raises UserError for flags that contradict each other; `typed`: without --input, lines are typed."""
    if not WORKDIR.value:
        raise UserError('--workdir is missing: give the run directory of a training')
    if not INPUT.value and not SPLIT.value and not typed or INPUT.value is not None and SPLIT.value:
        raise UserError('give either --input=FILE (or -) to answer, or --split=test to score')
    if SPLIT.value and OUTPUT.value is not None:
        raise UserError(f'--output={OUTPUT.value} is for --input: scores of a split go to stdout and to RUN/results')
    if not SPLIT.value and (CONFIDENCE.value or COMPARE.value is not None):
        raise UserError('--confidence and --compare are for scores: they need --split=test')
    if SPLIT.value and (SCORE.value or PREFIXES.value):
        raise UserError('--score and --prefixes say what the lines of --input are: give --input=FILE (or -)')
    for name in ('prefixes', 'avoid', 'method', 'beam', 'n_best', 'seed', 'temperature', 'top_k', 'top_p'):
        if SCORE.value and flags.FLAGS[name].value not in (None, False):
            raise UserError(f'--{name} is for a search, and --score searches for nothing: leave one of them out')
    if LOOK.value and not (PICTURES.value or ATTENTION.value):
        raise UserError(f'--look={LOOK.value} needs --pictures=DIR, or --attention')


def check_flags_are_used(run: Run) -> None:
    """Raises UserError for a flag that means nothing to the run's model, such as one of a search."""
    asked = ATTENTION.value and '--attention' or PICTURES.value and '--pictures' or EXPLAIN.value and '--explain'
    if asked and len(run.workdirs) > 1 and LOOK.value != 'positions':
        raise UserError(f'{asked} means nothing to an ensemble: its runs have an attention each, and it has none. Give '
                        'one of them')
    here = flatten(run.config)
    for flag in (CONFIDENCE, COMPARE, PREFIXES):
        if flag.value and not isinstance(run.model, Translator):
            raise UserError(f'--{flag.name} is for translations, but this is a run of task={run.config.task}: leave it '
                            'out')
    for flag in (SCORE, AVOID):
        if flag.value and isinstance(run.model, Predictor):
            raise UserError(f'--{flag.name} is for text, but this is a run of task={run.config.task}: leave it out')
    for name in SEARCH:
        if flags.FLAGS[name].value is not None and not is_used(f'decode.{name}', here):
            raise UserError(f'--{name}={flags.FLAGS[name].value} means nothing to a run of task={run.config.task}: '
                            'leave it out')


def check_writable(workdirs: Sequence[Path], splits: Sequence[str]) -> None:
    """Sees, before anything is computed, that all files can be written.

    Raises:
      UserError: naming what cannot.
    """
    for flag in (OUTPUT, PICTURES, EXPLAIN, COMPARE, AVOID):
        if flag.value == '':
            raise UserError(f'--{flag.name}= is empty: give a name, or leave it out')
    named = [os.path.realpath(flag.value) for flag in (INPUT, AVOID, OUTPUT, EXPLAIN, PICTURES) if flag.value]
    if twice := [name for name in named if named.count(name) > 1]:
        raise UserError(f'{twice[0]} is given twice, to read or to write: give --input, --avoid, --output, '
                        '--explain and --pictures each a name of its own')
    for flag, workdir in itertools.product((OUTPUT, EXPLAIN), workdirs):
        check_not_own(flag, workdir)
    if OUTPUT.value:
        check_file(Path(OUTPUT.value))
    if PICTURES.value:
        check_folder(Path(PICTURES.value))
    if len(splits) > 1 and (PICTURES.value or EXPLAIN.value):
        raise UserError('--pictures and --explain show one set of the test: give '
                        f'--split={" or --split=".join(splits)}')
    results = workdirs[0] / 'results'
    if splits:
        check_folder(results)
    names = [results_name(split, workdirs) for split in splits]
    for name in (f'{name}.{ending}' for name in names for ending in ('json', 'tsv')) if results.is_dir() else ():
        check_file(results / name)


def results_name(split: str, workdirs: Sequence[Path]) -> str:
    """The name of the files of a split's results. An ensemble's are in its first run, whose own they leave alone."""
    return split if len(workdirs) == 1 else f'{split}.ensemble'


def check_not_own(flag: flags.FlagHolder, workdir: Path) -> None:
    """Sees that the file which a flag names is none of the run's own.

    Raises:
      UserError: if it is.
    """
    path = Path(os.path.realpath(flag.value or ''))
    own = [Path(os.path.realpath(workdir / name)) for name in OWN]
    if flag.value and (path in own or any(folder in own for folder in path.parents)):
        raise UserError(f'--{flag.name}={flag.value} is a file of the run itself: give another name')


def open_page(run: Run) -> Page | None:
    """The page of --explain; None without that flag."""
    if EXPLAIN.value is None:
        return None
    steps = ', '.join(map(str, run.checkpoint))
    return Page(EXPLAIN.value, f'{run.workdir.resolve().name}, step {steps}', EXPLAIN_COUNT.value)


def answer_file(model: TextModel, path: str, options: SearchOptions, page: Page | None) -> None:
    """Writes an answer for each line of `path`; lines are read as they are answered."""
    search = with_all_hypotheses(options) if page else options
    count, began, compiled_before, start = 0, time.perf_counter(), compile_time.seconds, ''
    with open_output(OUTPUT.value) as output:
        for answers in answers_to(model, path, search):
            for number, answer in enumerate(answers, count + 1):
                if number > 1 and FORMAT.value == 'text' and model.multiline and not SCORE.value:
                    output.write(BETWEEN + '\n')
                output.write(output_line(model, answer, number, options.n_best, page) + '\n')
            output.flush()
            count += len(answers)
            start = start or (f'first line after {time.perf_counter() - STARTED:.1f} s: imports '
                              f'{IMPORTED - STARTED:.1f}, opening the run {began - IMPORTED:.1f}, compiling the search '
                              f'{compile_time.seconds - compiled_before:.1f}')
    if start:
        log.info('%s', start)
    seconds, compiling = time.perf_counter() - began, compile_time.seconds - compiled_before
    log.info('%d lines in %.1f s, of which %.1f s compiling: %.1f a second otherwise', count, seconds, compiling,
             count / max(seconds - compiling, 1e-9))


def answers_to(model: TextModel, path: str, options: SearchOptions) -> Iterator[list[Output]]:
    """Answers to the lines of `path` as the flags ask for them, some at a time; '': to what is typed."""
    lines = input_lines(path)
    if SCORE.value:
        return score_all(model, lines, options, path)
    if PREFIXES.value:
        return translate_all(model, lines, options, path)
    return model.respond_all(lines, options)


def with_all_hypotheses(options: SearchOptions) -> SearchOptions:
    """The same search with every hypothesis of its beam, for the page."""
    return dataclasses.replace(options, n_best=options.beam) if options.method == 'beam' else options


def output_line(model: TextModel, answer: Output, number: int, n_best: int, page: Page | None) -> str:
    """A line of the output. Makes the picture of the answer, and explains it, if the flags ask for that."""
    weights = None
    pictured = PICTURES.value and LOOK.value != 'positions' and number <= PICTURE_COUNT.value
    if page is not None and page.full:
        page = None
    if (pictured or page or ATTENTION.value) and answer.hypotheses[0].tokens:
        weights = model.attention(answer)
    if page and weights is not None:
        page.add(explain_text(model, answer, weights, number))
    if pictured and weights is not None:
        save_figure(answer_figure(model, answer, LOOK.value, weights), picture_path(number))
    if FORMAT.value == 'text' and SCORE.value:
        return f'{answer.hypotheses[0].log_prob:.6f}'
    if FORMAT.value == 'text':
        return answer.text if model.multiline else answer.line
    line = as_json(model, dataclasses.replace(answer, hypotheses=answer.hypotheses[:n_best]))
    if ATTENTION.value and weights is not None:
        line['attention'] = weights[chosen_kind(weights, LOOK.value.partition(':')[0])].tolist()
    return json.dumps(line, ensure_ascii=False).translate(LINE_ENDS)


def predict_file(model: Predictor, path: str, options: SearchOptions, page: Page | None) -> None:
    """Writes a line for each example of an .npz file: the class and its probability, or the values."""
    inputs = read_inputs(path, model.shape)
    outputs = model.predict(inputs, options.batch_size, f'{path}: inputs')
    with open_output(OUTPUT.value) as output:
        for each in outputs:
            output.write('\t'.join(model.named(each)) + '\n')
    draw_examples(model, inputs, outputs)
    explain_examples(model, inputs, outputs, page)


def score_splits(run: Run, splits: Sequence[str], options: SearchOptions, page: Page | None) -> None:
    """Scores splits, and prints the scores: those of several by the names of the splits."""
    data: Any = run.data()  # of the class that the model's task has
    for changed in changed_data(run.workdir, data, splits):  # an error if the files of one are not there
        log.warning('not the data that the run was trained with: %s', changed)
    others = {split: read_translations(COMPARE.value, split, data.pairs(split)) if COMPARE.value else None
              for split in splits}
    scored = {split: score_split(run, data, split, options, page, others[split]) for split in splits}
    print(as_text(scored if len(splits) > 1 else scored[splits[0]]))


def score_split(run: Run, data: Any, split: str, options: SearchOptions, page: Page | None,
                others: Sequence[str] | None) -> dict[str, Any]:
    """Writes the scores to RUN/results/SPLIT.json, and each example and its answer to SPLIT.tsv; returns the scores.

    The files of an ensemble are SPLIT.ensemble.json and .tsv in its first run. `others` are the translations of another
    run, to compare with.
    """
    results, table = run.model.score(data, split, run.config, options)
    results |= {'task': run.config.task, 'parameters': parameter_count(run.model.params),
                'checkpoint': CHECKPOINT.value, 'checkpoint_steps': run.checkpoint,
                **({'ensemble': list(map(str, run.workdirs))} if len(run.workdirs) > 1 else {}),
                'dtype': run.config.model.dtype, 'decoding': dataclasses.asdict(options)}
    if CONFIDENCE.value or others:
        _, references, outputs = zip(*table, strict=True)
        language = run.config.data.target_lang
        if CONFIDENCE.value:
            results['confidence'] = confidence_intervals(outputs, references, language)
        if others:
            results['compared'] = {'with': COMPARE.value,
                                   **compare_translations(outputs, others, references, language)}
    folder = run.workdir / 'results'
    with naming(folder):
        folder.mkdir(exist_ok=True)
    name = results_name(split, run.workdirs)
    write_text(folder / f'{name}.tsv', ''.join(map(table_line, table)))
    write_text(folder / f'{name}.json', as_text(results) + '\n')  # last, as it says that the split is scored
    if isinstance(run.model, Predictor):
        inputs = data.arrays.inputs(split)[:max(PICTURE_COUNT.value, EXPLAIN_COUNT.value if page else 0)]
        outputs = run.model.predict(inputs, options.batch_size)
        draw_examples(run.model, inputs, outputs)
        explain_examples(run.model, inputs, outputs, page, map(run.model.named_target, data.arrays.targets(split)))
    elif page or PICTURES.value and LOOK.value != 'positions':
        explain_split(run.model, data, split, options, page)
    return results


def as_text(results: dict[str, Any]) -> str:
    """Results as stdout and the file have them."""
    return json.dumps(results, indent=2, ensure_ascii=False)


def explain_split(model: TextModel, data: Data, split: str, options: SearchOptions, page: Page | None) -> None:
    """Puts the first examples of text on the page, and makes pictures of them, as the flags ask for."""
    counts = EXPLAIN_COUNT.value if page else 0, PICTURE_COUNT.value if PICTURES.value else 0
    examples = model.examples(data, split, max(counts), with_all_hypotheses(options) if page else options)
    for number, (answer, reference) in enumerate(examples, 1):
        if not answer.source_tokens:
            continue
        weights = model.attention(answer)
        if page and not page.full:
            page.add(explain_text(model, answer, weights, number, reference))
        if number <= counts[1] and LOOK.value != 'positions':
            save_figure(answer_figure(model, answer, LOOK.value, weights), picture_path(number))


def draw_examples(model: Predictor, inputs: np.ndarray, outputs: np.ndarray) -> None:
    """Makes pictures of the attention over the first images or series, if the flags ask for them."""
    if not PICTURES.value or LOOK.value == 'positions':
        return
    for number, (example, output) in enumerate(zip(inputs[:PICTURE_COUNT.value], outputs, strict=False), 1):
        save_figure(answer_figure(model, Prediction(example, output), LOOK.value), picture_path(number))


def explain_examples(model: Predictor, inputs: np.ndarray, outputs: np.ndarray, page: Page | None,
                     targets: Iterable[str] = itertools.repeat('')) -> None:
    """Puts the first images or series on the page, if there is one."""
    for number, (example, output, target) in enumerate(zip(inputs, outputs, targets, strict=False), 1):
        if page is None or page.full:
            return
        page.add(explain_example(model, example, output, number, target))


def picture_path(number: int) -> Path:
    """The file for the picture of a line or an example, which is logged."""
    path = Path(PICTURES.value or '') / f'{number:06d}.png'
    log.info('%s', path)
    return path


if __name__ == '__main__':
    run_script(main)
