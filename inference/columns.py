"""Reads the input of decode.py: lines, documents, lines with two columns (SOURCE<tab>TARGET), or words to avoid."""

from collections.abc import Iterable, Iterator, Sequence

from inference.arriving import Arriving, arriving_documents, input_lines
from inference.generate import Generator
from inference.options import SearchOptions
from inference.outputs import Output
from inference.text import TextModel
from inference.translate import Translator
from input_pipeline.text_files import divided, read_lines, read_text
from runtime.errors import UserError


def input_texts(path: str, documents: str) -> Iterator[str]:
    """Returns the texts of a file, of stdin (-), or of a prompt ('').

    Args:
      path: the path of the file.
      documents: how the input is divided into texts. With 'line', each line is a text. With 'file', the whole file is a
        text. With 'blank_line', a blank line separates two texts. With 'jsonl', each line is JSON with one text.

    Raises:
      UserError: if the input cannot be read. If a line is wrong, the message has the number of this line.
    """
    if documents == 'file':
        return (read_text(name) for name in [path])  # the file is read when its text is requested
    lines = input_lines(path)
    if documents == 'blank_line':
        return arriving_documents(lines) if isinstance(lines, Arriving) else divided(
            lines, documents, _named(path))
    if documents == 'jsonl':
        texts = divided(lines, documents, _named(path))
        return Arriving(texts, lines.ready) if isinstance(lines, Arriving) else texts
    return lines


def score_all(model: TextModel, lines: Iterable[str], options: SearchOptions, name: str) -> Iterator[list[Output]]:
    """Scores the targets in the lines of the file `name`.

    A line is SOURCE<tab>TARGET. For a language model, the whole line is the target. Yields lists of outputs, with one
    output for each line. The only hypothesis of an output is the target.

    Raises:
      UserError: if a line does not have two columns. The message begins with the file name and the line number.
    """
    if isinstance(model, Generator):
        return model.respond_all(lines, options, model.forced_all)
    assert isinstance(model, Translator), 'Request.check_run has refused other models'

    def respond(chunk: Sequence[str], options: SearchOptions, *, first: int) -> list[Output]:
        return model.forced_all(_columns(chunk, 'SOURCE<tab>TARGET', name, first), options, first=first)

    return model.respond_all(lines, options, respond)


def translate_all(model: TextModel, lines: Iterable[str], options: SearchOptions, name: str) -> Iterator[list[Output]]:
    """Yields translations of the lines SOURCE<tab>PREFIX of the file `name`. Each translation begins with the prefix.

    Raises:
      UserError: if a line does not have two columns.
    """
    assert isinstance(model, Translator), 'Request.check_run has refused other models'

    def respond(chunk: Sequence[str], options: SearchOptions, *, first: int) -> list[Output]:
        columns = _columns(chunk, 'SOURCE<tab>PREFIX', name, first)
        sources, prefixes = zip(*columns, strict=True)
        return model.translate(sources, options, first=first, prefixes=prefixes)

    return model.respond_all(lines, options, respond)


def read_phrases(path: str) -> list[str]:
    """Reads a file of words and phrases to avoid. Returns the lines that are not blank.

    Raises:
      UserError: if all lines are blank, or the file cannot be read.
    """
    if phrases := [line for line in read_lines(path) if line.strip()]:
        return phrases
    raise UserError(f'--avoid={path} contains no words. Write one word or phrase on each line')


def _named(path: str) -> str:
    return 'stdin' if path in ('', '-') else path


def _columns(lines: Sequence[str], form: str, name: str, first: int) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(lines, first + 1):
        columns = line.split('\t')
        if len(columns) != 2:
            raise UserError(f'{_named(name)}:{number}: a line must be {form}, with one tab, but this line has '
                            f'{len(columns) - 1} tabs')
        pairs.append((columns[0], columns[1]))
    return pairs
