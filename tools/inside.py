"""Looks inside a trained model: prints a table, and writes the numbers and a picture. For example:

    python -m tools.inside --workdir=RUN --what=roles
    python -m tools.inside --workdir=RUN --what=attribution --text='Friday, August 25, 1922'

`importance`, `pruning` and `roles` use the first --count examples of --split. `logit_lens`, `attribution` and
`patching` use --text, and `patching` also needs --other. The files are OUTPUT/WHAT.json and OUTPUT/WHAT.png.
"""

from absl import flags

from command_line import run_script
from configs.options import SOME
from runtime.errors import UserError
from runtime.process_setup import slow_imports

SPLITS = 'importance', 'pruning', 'roles'
TEXTS = 'logit_lens', 'attribution', 'patching'
# {flag: analyses to which it applies}
NEEDS = {'other': ('patching',), 'place': ('patching', 'roles'), 'method': ('attribution',),
         'instead': ('attribution',), 'text': TEXTS, 'split': SPLITS, 'count': SPLITS}
WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory.')
CHECKPOINT = flags.DEFINE_string('checkpoint', 'best', "'best', 'latest', a step, 'average:K' or 'best:K'. See "
                                 'decode.py --help.')
WHAT = flags.DEFINE_enum('what', None, [*SPLITS, *TEXTS], 'The analysis (docs/inside.md).')
SPLIT = flags.DEFINE_string('split', 'validation', 'The split for importance, pruning and roles.')
COUNT = flags.DEFINE_integer('count', 100, 'The number of examples of the split.')
TEXT = flags.DEFINE_string('text', None, 'SOURCE (the run translates it) or SOURCE<tab>TARGET; for a language model, '
                           'TEXT or PROMPT<tab>CONTINUATION; for patching a language model, only '
                           'PROMPT<tab>CONTINUATION.')
OTHER = flags.DEFINE_string('other', None, 'patching: the sentence that gets values of --text. Both sentences have the '
                            'same number of tokens.')
PLACE = flags.DEFINE_string('place', None, 'patching, roles: the places, separated by commas (docs/inside.md).')
METHOD = flags.DEFINE_string('method', 'integrated', 'attribution: gradient, integrated, leave_one_out, weights, '
                             'rollout or flow.')
INSTEAD = flags.DEFINE_string('instead', '', 'attribution: explain each token against the first token of this text. '
                              'Tokens that are only spaces are skipped.')
OUTPUT = flags.DEFINE_string('output', None, 'The folder for the files; default: RUN/inside.')


def main() -> None:
    """Runs the analysis --what, prints its table and writes its files."""
    check_flags()
    import json
    import logging

    with slow_imports():
        from analysis.inside import ANALYSES, AnalysisRequest
        from analysis.pictures import save_figure
        from inference.run import load
    from runtime.files import check_file, check_folder, expanded, naming, write_text

    run = load(WORKDIR.value or '', CHECKPOINT.value)
    folder = expanded(OUTPUT.value) if OUTPUT.value else run.workdir / 'inside'
    numbers, picture = (folder / f'{WHAT.value}.{ending}' for ending in ('json', 'png'))
    check_folder(folder)
    for path in (numbers, picture) if folder.is_dir() else ():
        check_file(path)
    text: list[str] = (TEXT.value or '').split('\t')
    places = None if PLACE.value is None else [place.strip() for place in PLACE.value.split(',')]
    result = ANALYSES[WHAT.value or ''](run, AnalysisRequest(
        SPLIT.value, COUNT.value, text[0] if len(text) == 1 else (text[0], text[1]), OTHER.value, places, METHOD.value,
        INSTEAD.value))
    print(result.table)
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_text(numbers, json.dumps(result.numbers, indent=2, ensure_ascii=False) + '\n')
    save_figure(result.figure, picture)
    logging.getLogger('allyouneed.inside').info('%s, %s', numbers, picture)


def check_flags() -> None:
    """Raises UserError for flags that are missing or do not apply to the analysis."""
    values = {name: flags.FLAGS[name] for name in ('workdir', 'what', *NEEDS)}
    if missing := [name for name in ('workdir', 'what') if not values[name].value]:
        raise UserError(f'--{missing[0]} is missing. Use --workdir=RUN --what={"|".join([*SPLITS, *TEXTS])}')
    for name, analyses in NEEDS.items():
        if values[name].present and WHAT.value not in analyses:
            raise UserError(f'--{name} does not apply to --what={WHAT.value}. It applies only to --what='
                            f'{"|".join(analyses)}. Remove --{name}')
    for name in ['text'] * (WHAT.value in TEXTS) + ['other'] * (WHAT.value == 'patching'):
        if not values[name].value:
            raise UserError(f'--what={WHAT.value} needs --{name}=TEXT')
    if (TEXT.value or '').count('\t') > 1:
        raise UserError('--text has more than one tab. Write SOURCE or SOURCE<tab>TARGET')
    if problem := SOME.problem(COUNT.value):
        raise UserError(f'--count={COUNT.value} {problem}')


if __name__ == '__main__':
    run_script(main, computes=True)
