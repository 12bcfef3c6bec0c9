"""The flags of decode.py as one dataclass, and the checks of these flags.

Each field is a flag of the same name. decode.py imports this module to define its flags, so this module must not import
slow libraries.
"""

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.options import BEAM_METHODS, COUNT, SOME, choices, decisive, flatten, is_used
from configs.tasks import TASKS
from runtime.errors import UserError
from runtime.files import PARTIAL, check_file, check_folder, expanded
from runtime.flags import flag

BY = 'length', 'target_length', 'frequency'  # keys by which sentences are divided into buckets
PREDICTORS = 'predictor', 'forecaster'  # values of `Task.answerer` for images and series
DOCUMENTS = 'line', 'file', 'blank_line', 'jsonl'  # kinds of text in --input
FILES = 'input', 'avoid', 'edit', 'output', 'alignments', 'explain', 'pictures'  # flags that name a file or a folder
STDIN = 'input', 'avoid'  # flags that read stdin if they are -
SEARCHES = ('prefixes', 'avoid', 'method', 'beam', 'patience', 'n_best', 'seed', 'temperature', 'top_k', 'top_p')


@dataclasses.dataclass(frozen=True)
class Request:
    """The flags of decode.py.

    Attributes:
      search: the flags that change the search, {name: value}: the options of config.decode, 'n_best' and 'seed'. None
        stands for the value in the run's config.
      typed: whether lines are typed at a prompt, because neither --input nor --split is given.

    In the names of files and folders, ~ and ~NAME are expanded.
    """
    workdir: str | None = flag(None, 'The run directory of a training; A,B,C for an ensemble of several runs.')
    checkpoint: str = flag('best', 'best, latest, a step, average:K (mean of the last K) or best:K (mean of the best '
                           'K). With the prefix raw:, a moving average of the parameters is ignored.')
    dtype: str | None = flag(None, 'The dtype of the computation; default: the dtype of the training.',
                             choices('model.dtype'))
    matmul_precision: str = flag('default', 'The precision of matrix products, as in config.train.matmul_precision. '
                                 'bfloat16 is faster on CPUs that have fast bfloat16 instructions.',
                                 ('default', 'bfloat16', 'float32'))
    input: str | None = flag(None, 'Sentences or prompts, one per line, plain or .gz, - for stdin; for images and '
                             'series, an .npz or .csv file, an image, or a folder of images.')
    output: str | None = flag(None, 'The file for the answers; default: stdout.')
    format: str = flag('text', 'text: the best answer; jsonl: a line of JSON with all hypotheses and scores, or with '
                       'class and probability; tsv: a table of predictions for images or series.',
                       ('text', 'jsonl', 'tsv'))
    split: str | None = flag(None, 'Score the model on this split of the data: train, validation, test (all of its '
                             'sets), or the name of one set of the test.')
    documents: str = flag('line', 'The texts of --input for a language model: each line, the whole file, the lines up '
                          'to a blank line, or JSON Lines (strings, or objects with "text").', DOCUMENTS)
    score: bool = flag(False, 'Print the log-probability of given translations: each line of --input is '
                       'SOURCE<tab>TARGET, or a text for a language model. For texts, also report bits per byte.')
    prefixes: bool = flag(False, 'Each line of --input is SOURCE<tab>PREFIX. Translations begin with PREFIX.')
    avoid: str | None = flag(None, 'A file of words or phrases, one per line, that outputs must not contain.')
    confidence: bool = flag(False, 'With --split, add the 95 % interval of each score of translations.')
    compare: str | None = flag(None, 'With --split, compare the scores of translations with the scores of this other '
                               'run directory, and add p-values.')
    by: str | None = flag(None, 'With --split, add the scores of translations in buckets by the length of the source '
                          '(length) or reference (target_length), or by the frequency of the rarest source word in '
                          'the training data (frequency).', BY)
    edit: str | None = flag(None, 'A JSON file of edits of the values inside the model (docs/inside.md).')
    without: str | None = flag(None, 'Remove these attention heads: KIND:LAYER:HEADS, such as cross:1:2,3. KIND is '
                               'cross, encoder or decoder. Layers and heads are counted from 1.')
    attention: bool = flag(False, 'With --format=jsonl, add the attention [layer][head][target][source].')
    pictures: str | None = flag(None, 'Folder for a PNG of the attention of each line or example.')
    picture_count: int = flag(100, 'The number of lines or examples that have a picture.')
    look: str = flag('', 'The attention to show: KIND[:LAYER[:HEAD]]. KIND is cross, encoder or decoder. LAYER is a '
                     'number from 1; default: the last layer. HEAD is a number from 1, mean or all (the default). '
                     'encoder:rollout is the attention rollout over all layers. --look=positions draws the sinusoidal '
                     'positions of the run instead.')
    alignments: str | None = flag(None, 'A file of word alignments, one line for each line of --input, in the Pharaoh '
                                  'format (0-0 1-2). --look=cross:LAYER:HEAD chooses the head.')
    explain: str | None = flag(None, 'The file for an HTML page that shows attention, probabilities and hypotheses. '
                               'The page needs no network.')
    explain_count: int = flag(200, 'The number of lines or examples on the page.')
    search: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    typed: bool = False

    def __post_init__(self):
        for name in FILES:
            if (path := getattr(self, name) or '').startswith('~'):
                object.__setattr__(self, name, str(expanded(path)))

    @property
    def draws_attention(self) -> bool:
        """Whether a picture of the attention is drawn for each answer."""
        return bool(self.pictures) and self.look != 'positions'

    @property
    def edits_model(self) -> bool:
        """Whether values inside the model are edited."""
        return self.edit is not None or self.without is not None

    def check(self) -> None:
        """Raises UserError for flags that contradict each other or have impossible values."""
        values = dataclasses.asdict(self) | dict(self.search)
        if not self.workdir:
            raise UserError('--workdir is missing. Set it to the run directory of a training')
        if not self.input and not self.split and not self.typed or self.input is not None and self.split:
            raise UserError('exactly one of --input and --split is required. Use --input=FILE (- for stdin) to get '
                            'answers, or --split=test to score the model')
        if self.split and self.output is not None:
            raise UserError(f'--output={self.output} does not apply to --split. Scores go to stdout and to RUN/results')
        if not self.split and (flags := self._given('confidence', 'by', 'compare')):
            raise UserError(f'{flags} can be used only with --split. Add --split=test')
        several = (self.search.get('n_best') or 1) > 1
        answers_only = *['format'] * (self.format != 'text'), *['n_best'] * several
        if self.split and (flags := self._given('score', 'prefixes', 'alignments', 'attention', *answers_only)):
            raise UserError(f'{flags} cannot be used with --split. Use --input=FILE (or -) instead of --split')
        if self.documents != 'line' and not self.input:
            raise UserError(f'--documents={self.documents} needs --input=FILE (or -)')
        if self.score and (flags := self._given(*SEARCHES)):
            raise UserError(f'{flags} cannot be used with --score, because --score does not search. Remove --score '
                            'or the other flags')
        if self.look and not (self.pictures or self.attention or self.alignments):
            raise UserError(f'--look={self.look} needs --pictures=DIR, --attention or --alignments=FILE')
        if self.look == 'positions' and (flags := self._given('attention', 'alignments')):
            raise UserError('--look=positions draws the sinusoidal positions into --pictures=DIR, and has no effect on '
                            f'{flags}. Use another --look, or remove the other flag')
        kind, layer, _ = self.look.partition(':')
        if layer and not (self.pictures or self.alignments):
            raise UserError(f'--look={self.look}: --attention writes all layers and heads of one kind. Use '
                            f'--look={kind}, or add --pictures=DIR or --alignments=FILE')
        if self.format != 'jsonl' and (flags := self._given('attention', *['n_best'] * several)):
            raise UserError(f'{flags} can be used only with --format=jsonl, because the text of an answer is one line')
        for name, allowed, shows in ('picture_count', COUNT, 'pictures'), ('explain_count', SOME, 'explain'):
            if problem := allowed.problem(values[name]):
                raise UserError(f'--{name}={values[name]} {problem}')
            if values[name] != getattr(Request, name) and values[shows] is None:
                raise UserError(f'--{name}={values[name]} has no effect without --{shows}. Add --{shows}')
        if self.picture_count != Request.picture_count and self.look == 'positions':
            raise UserError(f'--picture_count={self.picture_count} has no effect on --look=positions, which draws one '
                            'picture. Remove --picture_count')
        for name in ('output', 'pictures', 'explain', 'compare', 'avoid', 'edit', 'without', 'alignments'):
            if values[name] == '':
                raise UserError(f'--{name}= is empty. Set it to a name, or remove the flag')
        for name in ('output', 'alignments', 'explain', 'pictures'):
            if values[name] == '-':
                raise UserError(f'--{name}=-: - does not mean stdout. Only answers are written to stdout, and only if '
                                f'--output is not set. Set --{name} to a path, or remove the flag')
        paths: dict[str, str] = {}
        for name in FILES:
            path = '-' if values[name] == '-' and name in STDIN else values[name] and os.path.realpath(values[name])
            if path in paths:
                raise UserError(f'--{paths[path]} and --{name} name the same file, {path}. Use different files')
            paths |= {path: name} if path else {}
        for name in ('output', 'alignments'):
            partial = values[name] and f'{os.path.realpath(values[name])}{PARTIAL}'
            if partial in paths:
                raise UserError(f'--{paths[partial]} names the file {partial}, into which --{name} is written until it '
                                'is complete. Use another file')

    def _given(self, *names: str) -> str:
        """Returns the names of the flags that are set, such as '--n_best and --attention', or ''."""
        values = dataclasses.asdict(self) | dict(self.search)
        return ' and '.join(f'--{name}' for name in names
                            if values[name] is not None and values[name] is not False)  # 0 is a value

    def check_files(self, workdirs: Sequence[Path], splits: Sequence[str]) -> None:
        """Checks, before anything is computed, that all files can be written.

        Raises:
          UserError: if a file or folder cannot be written, or an output file is a file of the run itself.
        """
        from inference.scores import results_name  # imports NumPy
        from run_directory.workdir import OWN  # imports JAX

        own = [Path(os.path.realpath(workdir / name)) for workdir, name in itertools.product(workdirs, OWN)]
        for name, value in ('output', self.output), ('explain', self.explain), ('alignments', self.alignments):
            path = Path(os.path.realpath(value or ''))
            if value and (path in own or any(folder in own for folder in path.parents)):
                raise UserError(f'--{name}={value} is a file of the run itself. Use another name')
        for value in (self.output, self.alignments):
            if value:
                check_file(Path(value))
        if self.pictures:
            check_folder(Path(self.pictures))
        if len(splits) > 1 and (flags := self._given('pictures', 'explain')):
            raise UserError(f'{flags} can show only one test set. Use --split={" or --split=".join(splits)}')
        results = workdirs[0] / 'results'
        if splits:
            check_folder(results)
        names = [results_name(split, workdirs, self.edits_model) for split in splits]
        for name in (f'{name}.{ending}' for name in names for ending in ('json', 'tsv')) if results.is_dir() else ():
            check_file(results / name)

    def check_run(self, run: Any) -> None:
        """Raises UserError for a flag that does not apply to the model of an `inference.run.Run`."""
        flags = self._given('attention', 'alignments', *['pictures'] * self.draws_attention, 'explain')
        if flags and len(run.workdirs) > 1:
            raise UserError(f'{flags} cannot be used with an ensemble, because each run has its own attention weights. '
                            'Use the directory of one run')
        task, answerer = run.config.task, TASKS[run.config.task].answerer
        if answerer != 'translator' and (flags := self._given('confidence', 'compare', 'prefixes', 'alignments', 'by')):
            raise UserError(f'{flags} can be used only for translation, but the run has task={task}. Remove the flag')
        predicts = answerer in PREDICTORS
        if predicts and (flags := self._given('score', 'avoid', 'seed')):
            raise UserError(f'{flags} can be used only for text, but the run has task={task}. Remove the flag')
        if not predicts and self.format == 'tsv':
            raise UserError(f'--format=tsv can be used only for images and series, but the run has task={task}. Use '
                            '--format=jsonl')
        if predicts and (n_best := self.search.get('n_best')) is not None:
            most = len(run.model.classes or ())
            if not most:
                raise UserError(f'--n_best={n_best} can be used only for classes, but the run predicts values. Remove '
                                'the flag')
            if not 1 <= n_best <= most:
                raise UserError(f'--n_best={n_best} must be from 1 to {most}, the number of classes')
        if answerer != 'generator' and self.documents != 'line':
            raise UserError(f'--documents={self.documents} can be used only for a language model, but the run has '
                            f'task={task}. Remove the flag')
        options = flatten(run.config)
        dtype, same = run.config.model.dtype, len(run.workdirs) == 1 or self.dtype  # the runs may have other dtypes
        if self.matmul_precision != 'default' and dtype != 'float32' and same:
            raise UserError(f'--matmul_precision={self.matmul_precision} has no effect with model.dtype={dtype}. '
                            'Remove the flag')
        for name, value in self.search.items():
            if value is not None and f'decode.{name}' in options and not is_used(f'decode.{name}', options):
                raise UserError(f'--{name}={value} does not apply to task={task}. Remove the flag')
        option = decisive('model.position', options) or 'model.position'  # model.kind if the model has no positions
        if self.look == 'positions' and options[option] != 'sinusoidal':
            raise UserError(f'--look=positions draws sinusoidal positions, but the run has {option}={options[option]}. '
                            'Use another --look, or a run with model.position=sinusoidal')
        if self.score and answerer == 'generator' and self.search.get('extra_length') is not None:
            raise UserError('--extra_length has no effect on the --score of a language model, which scores whole '
                            'texts. Remove the flag')
        uses_alpha = not self.score and (self.search.get('method') or run.config.decode.method) in BEAM_METHODS
        if self.search.get('alpha') is not None and not (uses_alpha or self.format == 'jsonl' or self.explain):
            raise UserError('--alpha has no effect on this output: without beam search, only the scores in '
                            '--format=jsonl and --explain use it. Remove the flag')
        if self.typed and predicts:
            raise UserError('--input=FILE (.npz, .csv, an image or a folder of images) is required: images and series '
                            'cannot be typed at a prompt')

    def search_of(self, run: Any) -> Mapping[str, Any]:
        """Returns the flags of the search.

        For images and series, --n_best is not an option of the search, but the number of classes in an answer. So the
        result does not contain n_best.
        """
        classes = TASKS[run.config.task].answerer in PREDICTORS
        return {name: value for name, value in self.search.items() if not (classes and name == 'n_best')}
