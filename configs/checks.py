"""What a config must satisfy before anything is read, built or written."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from configs import base
from errors import UserError, did_you_mean, faults_in, no_recipe, option_like
from input_pipeline.arrays import BUILTIN
from input_pipeline.data import TASKS
from input_pipeline.documents import DOCUMENT_KINDS
from input_pipeline.problems import data_problems
from input_pipeline.sources import SOURCES
from input_pipeline.tokenizer import KINDS, NORMALIZATIONS, SUBWORDS
from input_pipeline.windows import PACKINGS
from model.attention import KERNELS, SCORES
from model.blocks import ACTIVATIONS, NORMS
from model.build import KINDS as MODELS
from model.embedding import SHARING
from model.patches import POOLINGS, grid_sinusoids, patch_grid
from model.positional import SCHEMES
from model.recurrent import READOUTS
from training.compiled import MODES as PARALLEL_MODES
from training.mesh import AXES
from training.optimizer import SCHEDULES

METHODS = ('beam', 'greedy', 'sample')
METRICS = {
    'translation': ('bleu', 'exact_match', 'loss', 'perplexity', 'accuracy'),
    'language_model': ('loss', 'perplexity', 'accuracy', 'bits_per_character'),
    'classification': ('accuracy', 'loss', 'perplexity'),
    'regression': ('loss', 'absolute_error'),
}
CHOICES = {
    'task': tuple(TASKS), 'model.kind': tuple(MODELS), 'model.score': SCORES, 'model.attention_kernel': KERNELS,
    'model.recurrent.readout': READOUTS, 'model.patches.pooling': POOLINGS, 'data.documents': DOCUMENT_KINDS,
    'data.packing': PACKINGS,
    'model.norm': NORMS, 'model.activation': tuple(ACTIVATIONS), 'model.position': SCHEMES,
    'model.share_embeddings': SHARING, 'model.dtype': ('float32', 'bfloat16'),
    'data.source': SOURCES, 'data.tokenizer.kind': KINDS, 'data.tokenizer.normalization': NORMALIZATIONS,
    'optimizer.schedule': SCHEDULES, 'parallel.mode': PARALLEL_MODES, 'decode.method': METHODS, 'eval.method': METHODS,
}
# The least and the most that a number may be, both included. Nobody needs more, and much more fits into no machine.
DECODING = {  # of a search: the options of config.decode, and two that decode.py has besides
    'beam': (1, 1000), 'alpha': (-10, 10), 'n_best': (1, 1000), 'extra_length': (0, 100_000),
    'batch_size': (1, 100_000), 'temperature': (0.01, 100), 'top_k': (0, 1_000_000), 'top_p': (1e-6, 1),
    'seed': (0, 2 ** 32 - 1),
}
BOUNDS = {
    'seed': (0, 2 ** 32 - 1), 'data.seed': (0, 2 ** 32 - 1),
    'model.num_layers': (1, 256), 'model.d_model': (1, 100_000), 'model.d_ff': (1, 1_000_000),
    'model.num_heads': (1, 10_000), 'model.d_k': (0, 10_000), 'model.d_v': (0, 10_000),
    'model.max_length': (1, 1_000_000), 'model.recurrent.d_hidden': (1, 100_000),
    'model.recurrent.d_align': (0, 100_000), 'model.patches.patch': (1, 100_000),
    'data.max_length': (1, 1_000_000), 'data.context': (2, 1_000_000), 'data.crop': (0, 10_000),
    'data.tokenizer.vocab_size': (1, 1_000_000),
    'batch.tokens': (1, 100_000_000), 'batch.buckets': (1, 1000), 'batch.rows': (1, 1_000_000),
    'optimizer.factor': (0, 1000), 'optimizer.peak': (0, 1000), 'optimizer.warmup': (1, 10 ** 9),
    'optimizer.eps': (1e-30, 1), 'optimizer.clip': (0, 1e9), 'optimizer.weight_decay': (0, 1000),
    'train.steps': (1, 10 ** 9), 'train.accumulate': (1, 10_000), 'train.log_every': (1, 10 ** 9),
    'train.skip_nonfinite': (0, 10 ** 9), 'train.r_drop': (0, 1000),
    **{f'parallel.{axis}': (-1, 1_000_000) for axis in AXES},
    'eval.every': (1, 10 ** 9), 'eval.bleu_sentences': (0, 10 ** 9), 'eval.patience': (0, 10 ** 9),
    'checkpoint.every': (1, 10 ** 9), 'checkpoint.every_minutes': (0, 1_000_000),
    'checkpoint.keep_last': (1, 10 ** 9), 'checkpoint.keep_best': (1, 10 ** 9),
    **{f'decode.{name}': bounds for name, bounds in DECODING.items() if name not in ('n_best', 'seed')},
}
FRACTIONS = ('model.dropout', 'model.attention_dropout', 'model.feed_forward_dropout', 'train.label_smoothing',
             'data.validation_share', 'data.plain_spaces', 'optimizer.final',
             'optimizer.beta1', 'optimizer.beta2')

FILES = ('cache_dir', 'data.dir', 'data.file')  # names on disk, which need not be UTF-8
MOST_TOKENS = 100_000_000  # of a batch
LONGEST = 200  # characters of a value in a message
KIND_NAMES = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text'}

# Options that mean something only beside certain values of others, in addition to MODELS and TASKS.
TEXT_TASKS = ('translation', 'language_model')
ONLY_FOR = {
    'data.dir': {'data.source': ('files', 'tfds')},
    'data.file': {'data.source': ('files',)},
    'data.documents': {'data.source': ('files',)},
    'data.feature': {'data.source': ('tfds',)},
    'data.seed': {'data.source': ('builtin',)},
    'data.plain_spaces': {'data.source': ('builtin',)},
    'data.validation_share': {'data.source': ('files',)},
    'data.tokenizer.vocab_size': {'data.tokenizer.kind': SUBWORDS},
    'data.tokenizer.split_digits': {'data.tokenizer.kind': SUBWORDS},
    'data.tokenizer.normalization': {'data.tokenizer.kind': SUBWORDS},
    'data.tokenizer.joint': {'task': ('translation',)},
    'optimizer.factor': {'optimizer.schedule': ('paper',)},
    'optimizer.peak': {'optimizer.schedule': ('inverse_sqrt', 'cosine')},
    'optimizer.final': {'optimizer.schedule': ('cosine',)},
    'train.label_smoothing': {'task': (*TEXT_TASKS, 'classification')},
    'train.r_drop': {'task': (*TEXT_TASKS, 'classification')},
    'eval.method': {'task': ('translation',)},
    'eval.bleu_sentences': {'task': ('translation',)},
    **{f'decode.{name}': {'task': TEXT_TASKS} for name in (
        'method', 'beam', 'alpha', 'extra_length', 'temperature', 'top_k', 'top_p')},
}


def check_config(config: ConfigDict) -> None:
    """Raises UserError for what is impossible: for each such value a line with its key and what would do."""
    if problems := config_problems(config):
        raise UserError('\n'.join(problems))


def config_problems(config: ConfigDict) -> list[str]:
    """For each value that is impossible 'config.KEY=VALUE: what would do', in the order in which to look at them.

    What follows from another one is not told: of an unknown task nobody can say which options mean something to it.
    """
    if problems := _misshapen(config):
        return problems
    here, problems = flatten(config), {}

    def require(holds: bool, key: str, wanted: str):
        if not holds:
            problems.setdefault(key, f'config.{key}={written(here[key])}: {wanted}')

    def require_one_of(choices: Sequence[str], key: str, where: str = ''):
        near = did_you_mean(here[key], choices)
        require(here[key] in choices, key, f'must be one of {", ".join(choices)}{where}{near}')

    for key, choices in CHOICES.items():
        require_one_of(choices, key)
    for key, (least, most) in BOUNDS.items():
        wanted = outside(here[key], least, most)
        require(not wanted, key, wanted)
    for key in FRACTIONS:
        require(is_fraction(here[key]), key, 'must be at least 0 and below 1, as a number of 32 bits too')
    for key, value in here.items():
        require(not isinstance(value, str) or '\0' not in value, key, 'must not hold a character NUL')
        require(not isinstance(value, str) or _can_be_written(key, value), key, 'must be text that can be written in UTF-8')
    if not {'task', 'model.kind'} & problems.keys():
        kinds = MODELS[config.model.kind].tasks
        require(config.task in kinds, 'task', f'must be {" or ".join(kinds)} for model.kind={config.model.kind}')
    if {'task', 'model.kind'} & problems.keys():
        return list(problems.values())
    possible_alone = not problems
    require_one_of(METRICS[config.task], 'eval.metric', f' for task={config.task}')
    for key, because in unused(here).items():
        require(False, key, f'means nothing to {because}={here[because]}: leave it out')
    if possible_alone:
        _check_together(config, here, require)
    return list(problems.values())


def _check_together(config: ConfigDict, here: Mapping[str, Any], require: Callable[[bool, str, str], None]) -> None:
    """Of values that are possible each for itself, those that do not go together."""
    model, blocks = config.model, MODELS[config.model.kind].blocks
    require(not blocks or model.d_model % model.num_heads == 0 or bool(model.d_k and model.d_v), 'model.num_heads',
            f'must divide d_model={model.d_model}, or give d_k and d_v')
    require(model.position != 'sinusoidal' or model.d_model % 2 == 0, 'model.d_model',
            'must be even for sinusoidal positions')
    require(config.data.tokenizer.kind not in SUBWORDS or config.data.tokenizer.vocab_size > 260,
            'data.tokenizer.vocab_size', 'must be above 260, the special pieces and the bytes')
    require(config.task == 'language_model' or config.data.tokenizer.kind in SUBWORDS,
            'data.tokenizer.kind', 'must be bpe or unigram for a translation')
    require(config.data.tokenizer.joint or model.share_embeddings != 'all', 'model.share_embeddings',
            'needs one vocabulary for both languages: set data.tokenizer.joint=True or share_embeddings=target')
    longest = {'translation': 'data.max_length', 'language_model': 'data.context'}.get(config.task)
    require(model.position != 'learned' or not longest or here[longest] <= model.max_length, longest or '',
            f'must not exceed the learned positions of model.max_length={model.max_length}')
    require(model.attention_kernel != 'fused' or not model.attention_dropout and model.score in ('scaled_dot', 'dot'),
            'model.attention_kernel',
            'must not be fused with attention_dropout, or with scores other than scaled_dot and dot')
    d_k = model.d_k or model.d_model // model.num_heads
    require(model.position != 'rotary' or d_k % 2 == 0, 'model.position',
            f'needs an even d_k for rotary: positions turn pairs of numbers, and d_k is {d_k}')
    sizes = [config.parallel[axis] for axis in AXES]
    for axis, size in zip(AXES, sizes, strict=True):
        require(size != 0, f'parallel.{axis}', 'must be at least 1, or -1 for all devices that are left')
        require(size != -1 or sizes.count(-1) == 1, f'parallel.{axis}', 'must not be -1 where another axis is, too')
        require(config.parallel.mode != 'pmap' or axis == 'data' or size == 1, f'parallel.{axis}',
                'must be 1 for mode=pmap, which knows data parallelism only')
    require(config.optimizer.schedule != 'cosine' or config.optimizer.warmup < config.train.steps, 'optimizer.warmup',
            f'must be below train.steps={config.train.steps} for the cosine to have a place')
    require(config.task != 'language_model' or config.batch.rows * config.data.context <= MOST_TOKENS, 'batch.rows',
            f'must be at most {MOST_TOKENS // config.data.context:,} windows of data.context={config.data.context} tokens')
    require(config.task == 'translation' or config.train.accumulate <= config.batch.rows, 'train.accumulate',
            f'must not exceed batch.rows={config.batch.rows}: a part has at least one row')
    require(config.data.source != 'files' or bool(config.data.dir or config.data.file), 'data.dir',
            'must name the folder of the files')
    require(config.data.source != 'tfds' or bool(config.data.name), 'data.name', 'must name a TFDS dataset')
    require(config.data.source != 'builtin' or config.task not in ('classification', 'regression')
            or config.data.name in BUILTIN, 'data.name', f'must be one of {", ".join(BUILTIN)}')


def check_fits(config: ConfigDict, sizes: Mapping[str, Any]) -> None:
    """Raises UserError, with the key, for an option of the model that does not fit the data, whose `sizes` they are."""
    if config.model.kind != 'patches':
        return
    space, key = tuple(sizes['shape'][:-1]), 'patches.patch'
    try:
        counts, _ = patch_grid(space, config.model.patches.patch)
        key = 'd_model'
        if config.model.position == 'sinusoidal':
            grid_sinusoids((1,) * len(counts), config.model.d_model)
    except ValueError as error:
        raise UserError(f'config.model.{key}: {error}') from None


def outside(value: float, least: float, most: float) -> str:
    """What to say of a number that does not lie between two others, or is none; '' if it does."""
    if least <= value <= most:
        return ''
    if value != value:
        return 'must be a number'
    if value < least:
        return 'must not be negative' if least == 0 else f'must be at least {least:,}'
    return f'must be at most {most:,}'


def is_fraction(value: float) -> bool:
    """Whether a number is at least 0 and below 1, as training has it too: 0.9999999999 is 1 in 32 bits."""
    return 0 <= value < 1 and np.float32(value) < 1


def _can_be_written(key: str, text: str) -> bool:
    """Whether text can be written in UTF-8, which half of a surrogate pair cannot; as for files, whatever may name one."""
    try:
        text.encode(errors='surrogateescape' if key in FILES or key.startswith('data.splits.') else 'strict')
    except UnicodeEncodeError:
        return False
    return True


def written(value: Any) -> str:
    """A value as messages show it: of a long one the beginning."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = 'a number of thousands of digits'
    return text if len(text) <= LONGEST else f'{text[:LONGEST]}...'


def _misshapen(config: Any) -> list[str]:
    """For each option that is missing, unknown or of another kind than in configs/base.py, what is wrong with it."""
    if not isinstance(config, ConfigDict):
        return [f'the config is {written(config)}: get_config must return a ConfigDict, as configs/base.py makes it']
    if key := _holding_itself(config):
        return [f'config.{key}: holds itself, so that there is no end of options: leave it out']
    here, default = flatten(config), flatten(base.get_config())
    problems = [f'config.{key}: the config has no such option{option_like(key, default)}'
                for key in here.keys() - default.keys()]
    problems += [f'config.{key} is missing: begin with base.get_config(), which has every option'
                 for key in default.keys() - here.keys()]
    return problems + wrong_kinds(here)


def _holding_itself(config: ConfigDict, above: Sequence[ConfigDict] = (), prefix: str = '') -> str:
    """The key of a section that is one of those it lies in, or ''."""
    above = (*above, config)
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            if any(value is each for each in above):
                return f'{prefix}{key}'
            if found := _holding_itself(value, above, f'{prefix}{key}.'):
                return found
    return ''


def wrong_kinds(here: Mapping[str, Any]) -> list[str]:
    """For each of the options {'model.d_model': 512, ...} that is no number, no text ... as it should be, what it is."""
    problems = []
    for key, usual in flatten(base.get_config()).items():
        kind, value = type(usual), here.get(key, usual)
        number = isinstance(value, int) and not isinstance(value, bool)
        if not (type(value) is kind or kind in (int, float) and number):
            problems.append(f'config.{key}={written(value)}: must be {KIND_NAMES[kind]}')
    return problems


def _can_be_looked_for(config: Any) -> bool:
    """Whether what a config says of its data is possible so far that the data can be opened and learned from."""
    if _misshapen(config):
        return False
    here = {key: value for key, value in flatten(config).items() if key.startswith('data.') or key == 'cache_dir'}
    return not any(outside(here[key], *BOUNDS[key]) for key in here.keys() & BOUNDS.keys()) and all(
        is_fraction(here[key]) for key in here.keys() & set(FRACTIONS)) and all(
        '\0' not in value and _can_be_written(key, value) for key, value in here.items() if isinstance(value, str))


def unused(here: Mapping[str, Any]) -> dict[str, str]:
    """The options that were set, but mean nothing to this model, task or source, and the option that decides that."""
    if here['task'] not in TASKS or here['model.kind'] not in MODELS:
        return {}  # nobody can say
    used = {'model': MODELS[here['model.kind']].options(), **TASKS[here['task']].options}
    default, unused = flatten(base.get_config()), {}
    for key, value in here.items():
        section, name, *_ = *key.split('.'), ''
        decisive = []
        if name not in used.get(section, {name}):
            decisive.append('model.kind' if section == 'model' else 'task')
        decisive += [other for other, choices in ONLY_FOR.get(key, {}).items() if here[other] not in choices]
        if decisive and value != default[key]:
            unused[key] = decisive[0]
    return unused


def flatten(config: ConfigDict, prefix: str = '') -> dict[str, Any]:
    """{'model.d_model': 512, ...}"""
    flat = {}
    for key, value in config.items():
        flat |= flatten(value, f'{prefix}{key}.') if isinstance(value, ConfigDict) else {f'{prefix}{key}': value}
    return flat


def config_from(flag: flags.FlagHolder, *, with_data: bool = False) -> ConfigDict:
    """The checked value of a --config flag; `with_data` looks at the data that it names too.

    Raises:
      UserError: if it is missing, names no recipe, or with all that is wrong with its values and the data.
    """
    path = flags.FLAGS['config'].config_filename if flag.present else ''
    if not path:
        raise UserError('--config is missing: give a recipe, for example --config=configs/demo.py')
    if not os.path.isfile(path):
        raise UserError(no_recipe(path))
    with faults_in(path):
        hasattr(flag.value, 'seed')  # ml_collections keeps an OSError of the recipe's for this moment
    problems = config_problems(flag.value)
    if with_data and _can_be_looked_for(flag.value):
        problems += data_problems(flag.value, problems)
    if problems:
        raise UserError('\n'.join(problems))
    return flag.value
