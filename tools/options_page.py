"""Writes docs/options.md from the table of options: python -m tools.options_page"""

from collections.abc import Iterator
from pathlib import Path

from command_line import run_script
from configs.options import OPTIONS, SECTIONS, Option
from configs.tasks import METRICS, TASKS

PAGE = Path(__file__).parents[1] / 'docs' / 'options.md'
HEAD = """# Options

`python -m tools.options_page` writes this page from `configs/options.py` and `configs/tasks.py`. Change these files,
not the page.

Each option can be set as a flag, `--config.model.num_layers=2`, or in a recipe, `config.model.num_layers = 2`. The
defaults of the model, the optimizer and the search are the values of the paper's base model (*Attention Is All You
Need*, sections 3, 5 and 6.1), if the paper gives a value. The batch and the vocabulary are smaller than in the paper:
`configs/wmt14_base.py` has the paper's values.

It is an error to set an option that has no effect with the other values of the config. Two options are ignored if they
have no effect: `data.name`, and `model.max_length` of a Transformer or a language model whose positions are not
learned. Options with the mark \N{ANTICLOCKWISE OPEN CIRCLE ARROW} may get a new value when a run resumes.

"""


def main() -> None:
    """Writes docs/options.md."""
    PAGE.write_text(page(), encoding='utf-8')
    print(PAGE)


def page() -> str:
    """Returns the whole page docs/options.md, in Markdown."""
    sections: dict[str, list[Option]] = {}
    for option in OPTIONS:
        sections.setdefault(option.name.rpartition('.')[0], []).append(option)
    return HEAD + '\n'.join(line for name, options in sections.items() for line in section(name, options)) + tasks()


def section(name: str, options: list[Option]) -> Iterator[str]:
    """Yields the lines of a section of the page: a heading, and a table with one row for each option."""
    yield from (f'## {SECTIONS[name]}', '', '| option | default | meaning | may be | used by |',
                '| --- | --- | --- | --- | --- |')
    for option in options:
        again = ' \N{ANTICLOCKWISE OPEN CIRCLE ARROW}' if option.resume is not None else ''
        cells = f'`{option.name}`{again}', f'`{option.default!r}`', option.meaning, str(option.allowed), used_by(option)
        yield '| ' + ' | '.join(cell.replace('|', r'\|') for cell in cells) + ' |'
    yield ''


def used_by(option: Option) -> str:
    """Returns the values of other options for which `option` has an effect, or '' if `option` always has an effect."""
    conditions = []
    for decider, values in option.only.items():
        part = decider.removeprefix('task.')
        if part != decider:
            decider, values = 'task', tuple(name for name, task in TASKS.items() if getattr(task, part) in values)
        conditions.append(f'{decider}: {", ".join(str(value) or repr(value) for value in values)}')
    return '; '.join(conditions)


def tasks() -> str:
    """Returns the table of tasks with their parts, in Markdown."""
    lines = ['', '## Tasks', '', '| task | meaning | models | data | objective | answers by | `eval.metric` |',
             '| --- | --- | --- | --- | --- | --- | --- |']
    for name, task in TASKS.items():
        metrics = ', '.join(f'{metric} ({"higher" if METRICS[metric] is max else "lower"})' for metric in task.metrics)
        lines.append(f'| `{name}` | {task.meaning} | {", ".join(task.models)} | {task.data} | {task.objective} | '
                     f'{task.answerer} | {metrics} |')
    return '\n'.join([*lines, '', '"higher" means that higher values of the metric are better.', ''])


if __name__ == '__main__':
    run_script(main)
