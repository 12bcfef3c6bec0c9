"""What a config must satisfy before anything is read, built or written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from configs import base
from errors import UserError, did_you_mean, no_recipe, told
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
from model.patches import POOLINGS
from model.positional import SCHEMES
from model.recurrent import READOUTS
from training.optimizer import SCHEDULES
from training.parallel import AXES
from training.parallel import MODES as PARALLEL_MODES

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
AT_LEAST_ONE = (
    'model.num_layers', 'model.d_model', 'model.d_ff', 'model.num_heads', 'model.max_length', 'data.max_length',
    'model.recurrent.d_hidden', 'model.patches.patch', 'data.context', 'batch.tokens', 'batch.buckets', 'batch.rows',
    'optimizer.warmup', 'train.steps', 'train.accumulate', 'train.log_every',
    'eval.every', 'checkpoint.every', 'checkpoint.keep_last', 'checkpoint.keep_best', 'decode.beam', 'decode.batch_size',
)
NOT_NEGATIVE = (
    'seed', 'data.seed', 'data.crop', 'model.d_k', 'model.d_v', 'model.recurrent.d_align', 'optimizer.weight_decay',
    'decode.top_k',
    'optimizer.factor', 'optimizer.peak', 'optimizer.eps',
    'optimizer.clip', 'eval.bleu_sentences', 'eval.patience', 'decode.extra_length',
    'train.skip_nonfinite', 'train.r_drop', 'checkpoint.every_minutes',
)
FRACTIONS = ('model.dropout', 'model.attention_dropout', 'model.feed_forward_dropout', 'train.label_smoothing',
             'data.validation_share', 'data.plain_spaces', 'optimizer.final',
             'optimizer.beta1', 'optimizer.beta2')

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
    """Raises UserError for the first value that is impossible, with the key and what would do."""

    def require(holds: bool, key: str, wanted: str):
        if not holds:
            raise UserError(f'config.{key}={value(key)!r}: {wanted}')

    def value(key: str) -> Any:
        node = config
        for part in key.split('.'):
            node = node[part]
        return node

    def require_one_of(choices: Sequence[str], key: str, where: str = ''):
        near = did_you_mean(str(value(key)), choices)
        require(value(key) in choices, key, f'must be one of {", ".join(choices)}{where}{near}')

    for key, choices in CHOICES.items():
        require_one_of(choices, key)
    for key in AT_LEAST_ONE:
        require(value(key) >= 1, key, 'must be at least 1')
    for key in NOT_NEGATIVE:
        require(value(key) >= 0, key, 'must not be negative')
    for key in FRACTIONS:
        require(0 <= value(key) < 1, key, 'must be at least 0 and below 1')
    model, kind = config.model, MODELS[config.model.kind]
    require(config.task in kind.tasks, 'task', f'must be {" or ".join(kind.tasks)} for model.kind={model.kind}')
    require_one_of(METRICS[config.task], 'eval.metric', f' for task={config.task}')
    check_all_used(config)
    require(not kind.blocks or model.d_model % model.num_heads == 0 or bool(model.d_k and model.d_v), 'model.num_heads',
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
    require(model.position != 'learned' or not longest or value(longest) <= model.max_length, longest or '',
            f'must not exceed the learned positions of model.max_length={model.max_length}')
    require(model.attention_kernel != 'fused' or not model.attention_dropout and model.score in ('scaled_dot', 'dot'),
            'model.attention_kernel',
            'must not be fused with attention_dropout, or with scores other than scaled_dot and dot')
    d_k = model.d_k or model.d_model // model.num_heads
    require(model.position != 'rotary' or d_k % 2 == 0, 'model.position',
            f'needs an even d_k for rotary: positions turn pairs of numbers, and d_k is {d_k}')
    sizes = [config.parallel[axis] for axis in AXES]
    for axis, size in zip(AXES, sizes, strict=True):
        require(size == -1 or size >= 1, f'parallel.{axis}', 'must be at least 1, or -1 for all devices that are left')
        require(size != -1 or sizes.count(-1) == 1, f'parallel.{axis}', 'must not be -1 where another axis is, too')
        require(config.parallel.mode != 'pmap' or axis == 'data' or size == 1, f'parallel.{axis}',
                'must be 1 for mode=pmap, which knows data parallelism only')
    require(config.decode.temperature > 0, 'decode.temperature', 'must be positive; decode.method=greedy takes the best')
    require(0 < config.decode.top_p <= 1, 'decode.top_p', 'must be above 0 and at most 1')
    require(config.optimizer.schedule != 'cosine' or config.optimizer.warmup < config.train.steps, 'optimizer.warmup',
            f'must be below train.steps={config.train.steps} for the cosine to have a place')
    require(config.data.source != 'files' or bool(config.data.dir or config.data.file), 'data.dir',
            'must name the folder of the files')
    require(config.data.source != 'tfds' or bool(config.data.name), 'data.name', 'must name a TFDS dataset')
    require(config.data.source != 'builtin' or config.task not in ('classification', 'regression')
            or config.data.name in BUILTIN, 'data.name', f'must be one of {", ".join(BUILTIN)}')


def check_all_used(config: ConfigDict) -> None:
    """Raises UserError for an option that was set, but means nothing to this model, task or source."""
    used = {'model': MODELS[config.model.kind].options(), **TASKS[config.task].options}
    here, default = flatten(config), flatten(base.get_config())
    for key, value in here.items():
        section, name, *_ = *key.split('.'), ''
        decisive = []
        if name not in used.get(section, {name}):
            decisive.append('model.kind' if section == 'model' else 'task')
        decisive += [other for other, choices in ONLY_FOR.get(key, {}).items() if here[other] not in choices]
        if decisive and value != default[key]:
            raise UserError(f'config.{key}={value!r}: means nothing to {decisive[0]}={here[decisive[0]]}: leave it out')


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
    if not Path(path).is_file():
        raise UserError(no_recipe(path))
    problems = told(lambda: check_config(flag.value))
    if with_data:
        problems += data_problems(flag.value, problems)
    if problems:
        raise UserError('\n'.join(problems))
    return flag.value
