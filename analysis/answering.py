"""Carries out a request of decode.py: writes answers, scores, pictures and pages."""

import contextlib
import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.alignments import Head, align, as_pharaoh, best_head, chosen_head
from analysis.buckets import bucket_scores, keys_of
from analysis.explain import Page, explain_example, explain_text
from analysis.pictures import answer_figure, chosen, chosen_kind, confusion_figure, positions_figure, save_figure
from analysis.request import Request
from configs.options import BEAM_METHODS
from inference.columns import input_texts, read_phrases, score_all, translate_all
from inference.edits import Edit, check_without, read_edits, without
from inference.generate import Generator
from inference.options import SearchOptions, search_options
from inference.outputs import Hypothesis, Output
from inference.predict import Predictor
from inference.predictions import Prediction, Predictions
from inference.report import Report
from inference.run import Run, load
from inference.scores import (
    compare_translations,
    confidence_intervals,
    read_translations,
    results_name,
    table_line,
)
from inference.tables import as_json
from inference.text import SearchModel, TextModel
from inference.translate import Translator
from input_pipeline.array_files import read_inputs
from input_pipeline.data import Data
from input_pipeline.splits import asked_splits
from input_pipeline.tokenizer import UNK
from kernels.product import use_precision, used_precision
from model.patches import patch_grid
from run_directory.fingerprints import changed_data, is_unchanged
from run_directory.records import read_config
from run_directory.trained import run_paths
from runtime import STARTED
from runtime.errors import prefixed
from runtime.files import naming, open_output, write_text
from runtime.resources import Stopwatch

# Some programs end a line at these characters.
JSON_ESCAPES = str.maketrans({end: f'\\u{ord(end):04x}' for end in '\x85\u2028\u2029'})
NOT_PRINTED = ('classes', 'confusion_matrix', 'by_step')  # only in the file, because they may have thousands of lines
BETWEEN = '-' * 15  # the line between two continuations
SHOWN_POSITIONS = 100  # number of positions of a text in the picture of --look=positions

log = logging.getLogger('allyouneed.decode')
IMPORTED = time.perf_counter()


def decode(request: Request) -> None:
    """Carries out a request of decode.py: answers the lines of the input, or scores splits of the data.

    Raises:
      UserError: if the request is impossible. In that case, nothing has been written.
    """
    request.check()
    workdirs = run_paths(request.workdir or '')
    splits = asked_splits(request.split, read_config(workdirs[0]).data) if request.split else []
    request.check_files(workdirs, splits)
    avoid = read_phrases(request.avoid) if request.avoid else None
    edits = read_edits(request.edit) if request.edit else []
    edits += [without(request.without)] if request.without else []
    use_precision(request.matmul_precision)
    run = load(workdirs, request.checkpoint, request.dtype)
    request.check_run(run)
    if request.without:
        check_without(request.without, run.places())
    run = edited(run, edits, request.edit) if edits else run
    if request.attention or request.draws_attention or request.explain is not None:
        check_shown(request, run.model)
    options = search_options(run.config, avoid=avoid, **request.search_of(run))
    if request.pictures and request.look == 'positions':
        length = SHOWN_POSITIONS
        if isinstance(run.model, Predictor):
            length, _ = patch_grid(run.model.shape[:-1], run.model.module.patch)
        save_figure(positions_figure(length, run.config.model.d_model), Path(request.pictures) / 'positions.png')
    steps, page = ', '.join(map(str, run.checkpoint)), None
    if request.explain is not None:
        page = Page(request.explain, f'{run.workdir.resolve().name}, step {steps}', request.explain_count)
    if splits:
        score_splits(request, run, splits, options, page)
    elif isinstance(run.model, Predictor):
        predict_file(request, run.model, options, page)
    else:
        answer_file(request, run.model, options, page, alignment_head(request, run))
    if page:
        page.write()
        log.info('%s: %d explanation%s', page.path, page.count, '' if page.count == 1 else 's')


def edited(run: Run, edits: Sequence[Edit], path: str | None) -> Run:
    """Returns a run whose model applies the edits. If `path` is given, error messages begin with the flag --edit."""
    with prefixed(f'--edit={path}') if path else contextlib.nullcontext():
        return run.edited(edits)


def check_shown(request: Request, model: TextModel | Predictor) -> None:
    """Checks, with one example, that the model has the attention that the flags show.

    Raises:
      UserError: if the model has no such attention, or --explain does not support its examples.
    """
    if isinstance(model, Predictor):
        outputs = np.zeros(len(model.classes or model.form.targets))
        example = Prediction(np.zeros(model.shape), outputs, model.form)
        weights = model.attention(example)
        if request.explain is not None:
            explain_example(model, example)
    else:
        weights = model.attention(Output('', [UNK], [Hypothesis('', [UNK], 0.0, 0.0)]))
    if request.draws_attention:
        chosen(weights, request.look)
    if request.attention or request.explain is not None:
        chosen_kind(weights, request.look.partition(':')[0] if request.attention else '')


def alignment_head(request: Request, run: Run) -> Head | None:
    """Returns the head for --alignments, or None without --alignments.

    This is the head that --look names. Without --look, it is the best head on the validation split.
    """
    if not request.alignments:
        return None
    assert isinstance(run.model, Translator), 'Request.check_run has refused other models'
    head = chosen_head(request.look, run.model) if request.look else best_head(run)
    log.info('alignments: %s', head)
    return head


def answer_file(request: Request, model: TextModel, options: SearchOptions, page: Page | None,
                head: Head | None = None) -> None:
    """Writes an answer for each line of the input. Lines are read and answered in chunks.

    With `head`, the word alignment of each answer is also written.
    """
    search = with_all_hypotheses(options) if page else options
    if isinstance(model, SearchModel) and not request.score:
        model.check_options(search)  # before a line is read, which may be typed
    report = Report(model, scored=request.score and isinstance(model, Generator))
    count, stopwatch, start = 0, Stopwatch(), ''
    parts = answers_to(request, model, search)
    # The output is opened after the first lines have been answered. Otherwise, a wrong name of the input would truncate
    # the incomplete output of an earlier command.
    begin = list(itertools.islice(parts, 1))
    with open_output(request.output) as output, (
            open_output(request.alignments) if head else contextlib.nullcontext()) as aligned:
        for answers in itertools.chain(begin, parts):
            for number, answer in enumerate(answers, count + 1):
                if number > 1 and request.format == 'text' and model.multiline and not request.score:
                    output.write(BETWEEN + '\n')
                output.write(output_line(request, report, answer, number, options.n_best, page) + '\n')
                if aligned and head and isinstance(model, Translator):
                    aligned.write(as_pharaoh(align(model, answer, head)) + '\n')
            output.flush()
            count += len(answers)
            report.add(answers)
            if request.typed:  # each line is answered and reported at once
                report.write()
                report = Report(model, scored=report.scored, first=count)
            start = start or (f'first {model.unit} after {time.perf_counter() - STARTED:.1f} s: imports '
                              f'{IMPORTED - STARTED:.1f}, opening the run {stopwatch.began - IMPORTED:.1f}, '
                              f'compiling the search {stopwatch.read()[1]:.1f}')
    if start:
        log.info('%s', start)
    report.write()
    seconds, compiling = stopwatch.read()
    log.info('%d %s in %.1f s: %.1f s of compilation, and %.1f %ss per second in the remaining time', count,
             model.unit if count == 1 else f'{model.unit}s', seconds, compiling,
             count / max(seconds - compiling, 1e-9), model.unit)


def answers_to(request: Request, model: TextModel, options: SearchOptions) -> Iterator[list[Output]]:
    """Yields lists of answers to the lines of the input, or to lines that are typed."""
    path = request.input or ''
    lines = input_texts(path, request.documents)
    if request.score:
        return score_all(model, lines, options, path)
    if request.prefixes:
        return translate_all(model, lines, options, path)
    return model.respond_all(lines, options)


def with_all_hypotheses(options: SearchOptions) -> SearchOptions:
    """Returns the options, changed for the explorer page: a beam search returns all hypotheses of the beam."""
    return dataclasses.replace(options, n_best=options.beam) if options.method in BEAM_METHODS else options


def output_line(request: Request, report: Report, answer: Output, number: int, n_best: int, page: Page | None) -> str:
    """Returns the line of the output for an answer. Also draws and explains the answer, if the flags request this."""
    model, weights = report.model, None
    pictured = request.draws_attention and number <= request.picture_count
    if page is not None and page.full:
        page = None
    count = len(answer.source_tokens) + len(answer.hypotheses[0].tokens)
    # The first token of a language model is not predicted, so a single token has nothing to show. An empty line is not
    # translated. But an empty pair is scored.
    if (pictured or page or request.attention) and (
            count > model.unpredicted or request.score and isinstance(model, Translator)):
        weights = model.attention(answer)
        report.add_attention(answer)
    if page and weights is not None:
        page.add(explain_text(model, answer, weights, number))
    if pictured and weights is not None:
        save_figure(answer_figure(model, answer, request.look, weights), picture_path(request, number))
    if request.format == 'text' and request.score:
        return f'{answer.hypotheses[0].log_prob:.6f}'
    if request.format == 'text':
        return answer.text if model.multiline else answer.line
    line = as_json(model, dataclasses.replace(answer, hypotheses=answer.hypotheses[:n_best]))
    if request.score:
        line = {name: value for name, value in line.items() if name in scored_entries(request, model)}
    if report.scored:
        line |= report.scores(answer)
    if request.attention and weights is not None:
        line['attention'] = weights_of(request, weights)
    return json_line(line)


def scored_entries(request: Request, model: TextModel) -> Sequence[str]:
    """Returns the names of the entries of `as_json` that a line of --score --format=jsonl contains.

    With --documents=file, the text is omitted. The tokens are written only with --attention, as labels of the weights.
    """
    texts = [] if request.documents == 'file' else ['text'] if isinstance(model, Generator) else ['source', 'text']
    return [*texts, 'log_prob', 'score', *['source_tokens', 'tokens'] * request.attention]


def predict_file(request: Request, model: Predictor, options: SearchOptions, page: Page | None) -> None:
    """Writes a line for each image or series of the input: the class and its probability, or the values."""
    names, inputs = read_inputs(request.input or '', model.form)
    named = request.format == 'tsv' or any(names)  # a table without the column series has no names
    names = [name or str(index) for index, name in enumerate(names)]
    predictions = model.predict_raw(inputs, options.batch_size, names)
    with open_output(request.output) as output:
        if request.format == 'tsv':
            header = model.form.targets if model.classes is None else ('class', 'probability')
            output.write(table_line(('name', *header)))
        for prediction in predictions:
            output.write(predicted_json(request, model, prediction) if request.format == 'jsonl' else
                         table_line([prediction.name] * named + [*prediction.cells]))
    draw_examples(request, model, predictions)
    explain_examples(model, predictions, page)


def predicted_json(request: Request, model: Predictor, prediction: Prediction) -> str:
    """Returns a line of --format=jsonl for an image or a series."""
    line = prediction.as_json(request.search['n_best'] or 1)
    if request.attention:
        line['attention'] = weights_of(request, model.attention(prediction))
    return json_line(line) + '\n'


def weights_of(request: Request, weights: Mapping[str, np.ndarray]) -> list[Any]:
    """Returns the attention weights of the kind that --look selects, as JSON."""
    return weights[chosen_kind(weights, request.look.partition(':')[0])].tolist()


def json_line(entries: dict[str, Any]) -> str:
    """Returns one line of JSON, without the end of the line."""
    return as_text(entries, indent=None)


def score_splits(request: Request, run: Run, splits: Sequence[str], options: SearchOptions, page: Page | None) -> None:
    """Scores splits, and prints the scores. If there are several splits, the scores are grouped by split."""
    data: Any = run.data()  # its class depends on the task
    for changed in changed_data(run.workdir, data, splits):  # raises an error if files of a split are missing
        log.warning('the data differs from the data on which the run was trained: %s', changed)
    doubtful = [split for split in splits if data.held_out(split) and not is_unchanged(run.workdir, data, split)]
    for split in doubtful:
        for changed in changed_data(run.workdir, data, ['train']):
            log.warning('the training data differs from the data on which the run was trained: %s. The %s split is '
                        'held out from the training data, so it may have changed, too, and may contain examples on '
                        'which the model was trained. Restore the previous data', changed.removeprefix('train: '),
                        split)
    # Read before anything is translated, so that a missing file is reported at once.
    other_outputs = {split: read_translations(request.compare, split, data.pairs(split)) if request.compare else None
                     for split in splits}
    keys = {split: keys_of(data.pairs(split), request.by, lambda: data.pairs('train')) if request.by else None
            for split in splits}
    scored = {split: score_split(request, run, data, split, options, page, other_outputs[split], keys[split])
              for split in splits}
    shown = {split: {name: value for name, value in results.items() if name not in NOT_PRINTED}
             for split, results in scored.items()}
    print(as_text(shown if len(splits) > 1 else shown[splits[0]]))


def score_split(request: Request, run: Run, data: Any, split: str, options: SearchOptions, page: Page | None,
                other_outputs: Sequence[str] | None, keys: Sequence[int] | None) -> dict[str, Any]:
    """Writes the scores to RUN/results/SPLIT.json, and examples with answers to SPLIT.tsv. Returns the scores.

    The files of an ensemble are SPLIT.ensemble.json and .tsv in the first run. The files of an edited model are
    SPLIT.edited.json and .tsv. `other_outputs` are the translations of the run in --compare. `keys` are the keys of
    --by, one for each pair.
    """
    results, table = run.model.score(data, split, run.config, options)
    decoding = dataclasses.asdict(options)
    if isinstance(run.model, Predictor):  # a Predictor does not search
        decoding = {'batch_size': options.batch_size}
    results |= {'task': run.config.task, 'parameters': run.parameters,
                'checkpoint': request.checkpoint, 'checkpoint_steps': run.checkpoint,
                **({'ensemble': list(map(str, run.workdirs))} if len(run.workdirs) > 1 else {}),
                **({'edits': [edit.as_json() for edit in run.edits]} if run.edits else {}),
                'dtype': run.config.model.dtype, 'matmul_precision': used_precision(), 'decoding': decoding}
    if request.confidence or keys or other_outputs:
        sources, references, outputs = zip(*table, strict=True)
        language = run.config.data.target_lang
        if request.confidence:
            results['confidence'] = confidence_intervals(outputs, references, language)
        if keys:
            assert isinstance(run.model, Translator), 'Request.check_run has refused other models'
            pairs = list(zip(sources, references, strict=True))
            log_probs = run.model.reference_log_probs(pairs, options.batch_size)
            results['by'] = {request.by: [dataclasses.asdict(bucket) for bucket in bucket_scores(
                keys, outputs, references, language, log_probs)]}
        if other_outputs:
            results['compared'] = {'with': request.compare,
                                   **compare_translations(outputs, other_outputs, references, language)}
    folder = run.workdir / 'results'
    with naming(folder):
        folder.mkdir(exist_ok=True)
    name = results_name(split, run.workdirs, request.edits_model)
    write_text(folder / f'{name}.tsv', ''.join(map(table_line, table)))
    write_text(folder / f'{name}.json', as_text(results) + '\n')  # last, because this file marks the split as scored
    if page or request.draws_attention:
        show_split(request, run, data, split, options, page, results)
    return results


def show_split(request: Request, run: Run, data: Any, split: str, options: SearchOptions, page: Page | None,
               results: dict[str, Any]) -> None:
    """Draws and explains the first examples of a split. Also draws the confusion matrix of a classifier."""
    model = run.model
    if not isinstance(model, Predictor):
        explain_split(request, model, data, split, options, page)
        return
    count = max(request.picture_count if request.draws_attention else 0, request.explain_count if page else 0)
    predictions = model.predict_raw(data.arrays.prepared(split, model.form)[:count], options.batch_size)
    draw_examples(request, model, predictions)
    explain_examples(model, predictions, page, map(model.named_target, data.arrays.targets(split)))
    if request.draws_attention and model.classes:
        name = results_name(split, run.workdirs, request.edits_model)
        path = Path(request.pictures or '') / f'confusion_{name}.png'
        save_figure(confusion_figure(results['confusion_matrix'], model.classes), path)
        log.info('%s', path)


def as_text(results: dict[str, Any], indent: int | None = 2) -> str:
    """Returns results as JSON. Surrogates, which UTF-8 cannot encode, are escaped."""
    text = json.dumps(results, indent=indent, ensure_ascii=False).translate(JSON_ESCAPES)
    return text.encode(errors='backslashreplace').decode()


def explain_split(request: Request, model: TextModel, data: Data, split: str, options: SearchOptions,
                  page: Page | None) -> None:
    """Adds explanations of the first texts of a split to the page, and draws the attention, as the flags request."""
    counts = request.explain_count if page else 0, request.picture_count if request.draws_attention else 0
    if not any(counts):
        return
    examples = model.examples(data, split, max(counts), with_all_hypotheses(options) if page else options)
    for number, (answer, reference) in enumerate(examples, 1):
        if not answer.source_tokens:
            continue
        weights = model.attention(answer)
        if page and not page.full:
            page.add(explain_text(model, answer, weights, number, reference))
        if number <= counts[1]:
            save_figure(answer_figure(model, answer, request.look, weights), picture_path(request, number))


def draw_examples(request: Request, model: Predictor, predictions: Predictions) -> None:
    """Draws the attention over the first images or series, if the flags request it."""
    if not request.draws_attention:
        return
    for number, prediction in enumerate(predictions[:request.picture_count], 1):
        save_figure(answer_figure(model, prediction, request.look), picture_path(request, number))


def explain_examples(model: Predictor, predictions: Predictions, page: Page | None,
                     targets: Iterable[str] = itertools.repeat('')) -> None:
    """Adds explanations of the first images or series to the page. Does nothing without a page."""
    for number, (prediction, target) in enumerate(zip(predictions, targets, strict=False), 1):
        if page is None or page.full:
            return
        page.add(explain_example(model, prediction, number, target))


def picture_path(request: Request, number: int) -> Path:
    """Returns the path for the picture of a line or an example, and logs the path."""
    path = Path(request.pictures or '') / f'{number:06d}.png'
    log.info('%s', path)
    return path
