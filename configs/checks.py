"""What a config must satisfy before anything is read, built or written."""

from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from errors import UserError
from input_pipeline.sources import SOURCES
from input_pipeline.tokenizer import KINDS, NORMALIZATIONS
from model.blocks import ACTIVATIONS, NORMS
from model.positional import SCHEMES
from model.transformer import SHARING
from training.optimizer import SCHEDULES

METHODS = ('beam', 'greedy', 'sample')
METRICS = ('bleu', 'loss', 'perplexity', 'accuracy')
CHOICES = {
    'model.norm': NORMS, 'model.activation': tuple(ACTIVATIONS), 'model.position': SCHEMES,
    'model.share_embeddings': SHARING, 'model.dtype': ('float32', 'bfloat16'),
    'data.source': SOURCES, 'data.tokenizer.kind': KINDS, 'data.tokenizer.normalization': NORMALIZATIONS,
    'optimizer.schedule': SCHEDULES, 'eval.metric': METRICS, 'decode.method': METHODS,
    'eval.method': METHODS,
}
AT_LEAST_ONE = (
    'model.num_layers', 'model.d_model', 'model.d_ff', 'model.num_heads', 'model.max_length', 'data.max_length',
    'batch.tokens', 'batch.buckets', 'optimizer.warmup', 'train.steps', 'train.accumulate', 'train.log_every',
    'eval.every', 'checkpoint.every', 'checkpoint.keep_last', 'decode.beam', 'decode.batch_size',
)
NOT_NEGATIVE = (
    'seed', 'data.seed', 'model.d_k', 'model.d_v', 'optimizer.factor', 'optimizer.peak', 'optimizer.eps',
    'optimizer.clip', 'eval.bleu_sentences', 'eval.patience', 'decode.extra_length',
)
FRACTIONS = ('model.dropout', 'model.attention_dropout', 'model.feed_forward_dropout', 'train.label_smoothing',
             'optimizer.beta1', 'optimizer.beta2')


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

    for key, choices in CHOICES.items():
        require(value(key) in choices, key, f'must be one of {", ".join(choices)}')
    for key in AT_LEAST_ONE:
        require(value(key) >= 1, key, 'must be at least 1')
    for key in NOT_NEGATIVE:
        require(value(key) >= 0, key, 'must not be negative')
    for key in FRACTIONS:
        require(0 <= value(key) < 1, key, 'must be at least 0 and below 1')
    model = config.model
    require(model.d_model % model.num_heads == 0 or bool(model.d_k and model.d_v), 'model.num_heads',
            f'must divide d_model={model.d_model}, or give d_k and d_v')
    require(model.position != 'sinusoidal' or model.d_model % 2 == 0, 'model.d_model',
            'must be even for sinusoidal positions')
    require(config.data.tokenizer.vocab_size > 260, 'data.tokenizer.vocab_size',
            'must be above 260, the special pieces and the bytes')
    require(config.data.tokenizer.joint or model.share_embeddings != 'all', 'model.share_embeddings',
            'needs one vocabulary for both languages: set data.tokenizer.joint=True or share_embeddings=target')
    require(model.position != 'learned' or config.data.max_length <= model.max_length, 'data.max_length',
            f'must not exceed the learned positions of model.max_length={model.max_length}')
    require(config.optimizer.schedule != 'cosine' or config.optimizer.warmup < config.train.steps, 'optimizer.warmup',
            f'must be below train.steps={config.train.steps} for the cosine to have a place')
    require(config.data.source != 'text' or bool(config.data.dir), 'data.dir', 'must name the folder of the text files')
    require(config.data.source != 'tfds' or bool(config.data.name), 'data.name', 'must name a TFDS dataset')


def config_from(flag: flags.FlagHolder) -> ConfigDict:
    """The checked value of a --config flag.

    Raises:
      UserError: if it is missing, names no recipe, or holds an impossible value.
    """
    path = flags.FLAGS['config'].config_filename if flag.present else ''
    if not path:
        raise UserError('--config is missing: give a recipe, for example --config=configs/demo.py')
    if not Path(path).is_file():
        raise UserError(f'--config={path} does not exist: give a recipe, for example configs/demo.py')
    check_config(flag.value)
    return flag.value
