"""Files of decode.py that are no plain sentences: pairs to score, sources with a prefix, words to avoid."""

from collections.abc import Iterable, Iterator, Sequence

from inference.generate import Generator
from inference.options import SearchOptions
from inference.text import Output, TextModel
from inference.translate import Translator
from input_pipeline.sources import read_lines
from runtime.errors import UserError


def score_all(model: TextModel, lines: Iterable[str], options: SearchOptions, name: str) -> Iterator[list[Output]]:
    """For each line of the file `name` an output whose one hypothesis is given: SOURCE<tab>TARGET, or a text.

    Raises:
      UserError: if the model writes no text; with name:line if a line has not its columns.
    """
    if isinstance(model, Generator):
        return model.respond_all(lines, options, model.forced_all)
    translator = _translator(model, '--score')

    def respond(chunk: Sequence[str], options: SearchOptions, *, first: int) -> list[Output]:
        return translator.forced_all(_columns(chunk, 'SOURCE<tab>TARGET', name, first), options, first=first)

    return translator.respond_all(lines, options, respond)


def translate_all(translator: TextModel, lines: Iterable[str], options: SearchOptions,
                  name: str) -> Iterator[list[Output]]:
    """Translations of the file `name`, of lines SOURCE<tab>PREFIX; each begins with its prefix.

    Raises:
      UserError: if the model does not translate; with name:line if a line has not its columns.
    """
    model = _translator(translator, '--prefixes')

    def respond(chunk: Sequence[str], options: SearchOptions, *, first: int) -> list[Output]:
        columns = _columns(chunk, 'SOURCE<tab>PREFIX', name, first)
        sources, prefixes = zip(*columns, strict=True)
        return model.translate(sources, options, first=first, prefixes=prefixes)

    return model.respond_all(lines, options, respond)


def read_phrases(path: str) -> list[str]:
    """The lines of a file that are not blank.

    Raises:
      UserError: if there are none, or the file cannot be read.
    """
    if phrases := [line for line in read_lines(path) if line.strip()]:
        return phrases
    raise UserError(f'--avoid={path} has no words: give one a line')


def _translator(model: TextModel, flag: str) -> Translator:
    if not isinstance(model, Translator):
        raise UserError(f'{flag} is for translations: leave it out')
    return model


def _columns(lines: Sequence[str], what: str, name: str, first: int) -> list[tuple[str, str]]:
    found = []
    for number, line in enumerate(lines, first + 1):
        columns = line.split('\t')
        if len(columns) != 2:
            where = 'stdin' if name in ('', '-') else name
            raise UserError(f'{where}:{number}: {len(columns) - 1} tabs, but a line must be {what}, with one')
        found.append((columns[0], columns[1]))
    return found
