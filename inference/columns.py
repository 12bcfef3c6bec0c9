"""Reads the other input files of decode.py: pairs to score, sources with prefixes, words to avoid."""

from collections.abc import Iterable, Iterator, Sequence

from inference.generate import Generator
from inference.options import SearchOptions
from inference.text import Output, TextModel
from inference.translate import Translator
from input_pipeline.sources import read_lines
from runtime.errors import UserError


def score_all(model: TextModel, lines: Iterable[str], options: SearchOptions, name: str) -> Iterator[list[Output]]:
    """Yields an output for each line of the file `name`, whose only hypothesis is the target that the line gives.

    A line is SOURCE<tab>TARGET, or a text for a language model.

    Raises:
      UserError: with name:line if a line does not have two columns.
    """
    if isinstance(model, Generator):
        return model.respond_all(lines, options, model.forced_all)
    translator = _translator(model, '--score')

    def respond(chunk: Sequence[str], options: SearchOptions, *, first: int) -> list[Output]:
        return translator.forced_all(_columns(chunk, 'SOURCE<tab>TARGET', name, first), options, first=first)

    return translator.respond_all(lines, options, respond)


def translate_all(translator: TextModel, lines: Iterable[str], options: SearchOptions,
                  name: str) -> Iterator[list[Output]]:
    """Yields translations of the lines SOURCE<tab>PREFIX of the file `name`. Each begins with its prefix.

    Raises:
      UserError: if the model is not a translator; with name:line if a line does not have two columns.
    """
    model = _translator(translator, '--prefixes')

    def respond(chunk: Sequence[str], options: SearchOptions, *, first: int) -> list[Output]:
        columns = _columns(chunk, 'SOURCE<tab>PREFIX', name, first)
        sources, prefixes = zip(*columns, strict=True)
        return model.translate(sources, options, first=first, prefixes=prefixes)

    return model.respond_all(lines, options, respond)


def read_phrases(path: str) -> list[str]:
    """Returns the lines of a file that are not blank.

    Raises:
      UserError: if all lines are blank, or the file cannot be read.
    """
    if phrases := [line for line in read_lines(path) if line.strip()]:
        return phrases
    raise UserError(f'--avoid={path} has no words. Write one on each line')


def _translator(model: TextModel, flag: str) -> Translator:
    if not isinstance(model, Translator):
        raise UserError(f'{flag} applies only to translation. Remove the flag')
    return model


def _columns(lines: Sequence[str], form: str, name: str, first: int) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(lines, first + 1):
        columns = line.split('\t')
        if len(columns) != 2:
            where = 'stdin' if name in ('', '-') else name
            raise UserError(f'{where}:{number}: a line must be {form}, with one tab, but it has {len(columns) - 1}')
        pairs.append((columns[0], columns[1]))
    return pairs
