"""The table of rules: requirements that involve several options. `configs/checks.py` evaluates the rules."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs.options import AXES, DEFAULTS, DROPOUTS, ELSEWHERE, MOST_TOKENS, flatten, is_used
from configs.tasks import SUBWORDS, TASKS, Task


class Rule(NamedTuple):
    """A requirement for the value of an option, and whether one config meets the requirement."""
    option: str    # the option that the message names
    applies: bool  # whether the rule applies to this config
    holds: bool    # whether the requirement is met; arbitrary if the rule does not apply
    requirement: str  # text for the message, such as 'must be at most 8'


def cross_heads(model: ConfigDict) -> tuple[int, int]:
    """Returns the number of layers with cross-attention, and the number of heads per layer. `model` is config.model."""
    if model.kind == 'rnnsearch':
        return 1, 1
    return model.num_decoder_layers or model.num_layers, model.num_heads


def cross_head(name: str, layers: int, heads: int) -> tuple[int, int | None] | None:
    """Returns the indices, from 0, of the layer and the head that `name` selects.

    `name` is 'cross:LAYER:HEAD', 'cross:LAYER:mean' or 'cross:LAYER'. LAYER and HEAD are counted from 1. In the last
    two forms, the head is None, which means the mean of all heads. Returns None if `name` has another form, or if there
    is no such head.
    """
    kind, layer, head, *rest = [*name.split(':'), 'mean'] if name.count(':') == 1 else [*name.split(':'), '', '']
    numbers = [int(text) if re.fullmatch('[0-9]{1,9}', text) else 0 for text in (layer, head)]
    exists = 1 <= numbers[0] <= layers and (head == 'mean' or 1 <= numbers[1] <= heads)
    if kind != 'cross' or any(rest) or not exists:
        return None
    return numbers[0] - 1, None if head == 'mean' else numbers[1] - 1


def default_cross_head(layers: int) -> tuple[int, None]:
    """Returns the layer and the head for alignments if none is selected: the mean of the second-to-last layer's heads.

    Garg et al. 2019 (arXiv:1909.02074) found the best alignments in this layer. The result is as in `cross_head`.
    """
    return max(0, layers - 2), None


def warmup_steps(optimizer: ConfigDict | Mapping[str, Any], steps: int) -> int:
    """Returns the number of steps of warm-up in a training of `steps` steps. `optimizer` is config.optimizer.

    If the warm-up of a cosine schedule is not shorter than the training, the result is a tenth of the training. The
    config keeps its value. So a short run can resume with more steps, and then has the whole warm-up.
    """
    too_long = optimizer['schedule'] == 'cosine' and optimizer['warmup'] >= steps
    return max(1, steps // 10) if too_long else optimizer['warmup']


def rules(config: ConfigDict, task: Task) -> list[Rule]:
    """Returns the rules, evaluated for a config. Each value of the config must be allowed by itself.

    If a config breaks several rules about the same option, only the first of these rules is reported.
    """
    model, data, batch, train, values = config.model, config.data, config.batch, config.train, flatten(config)
    d_k, d_v = (width or model.d_model // model.num_heads for width in (model.d_k, model.d_v))
    fused, test_sets = model.attention_kernel == 'fused', data.splits.test.split(',')
    file = data.file if is_used('data.file', values) else ''
    mesh = {f'parallel.{axis}': config.parallel[axis] for axis in AXES}

    def needs(option: str, other: str) -> Rule:
        return Rule(option, values[option] != DEFAULTS[option], bool(values[other]),
                    f'has no effect without {other}. Set it to its default, {DEFAULTS[option]!r}, or set {other}')

    return [
        Rule('model.num_heads', is_used('model.num_heads', values) and not (model.d_k and model.d_v),
             model.d_model % model.num_heads == 0, f'must divide d_model={model.d_model}. Otherwise, set d_k and d_v'),
        Rule('model.num_key_value_heads', True, model.num_heads % (model.num_key_value_heads or 1) == 0,
             f'must divide num_heads={model.num_heads}'),
        Rule('model.window', model.window > 0 and model.kind == 'patches', model.patches.pooling == 'mean',
             'needs patches.pooling=mean, because the class token would see only the first patches'),
        Rule('model.d_model', is_used('model.position', values) and model.position == 'sinusoidal',
             model.d_model % 2 == 0, 'must be even for sinusoidal positions'),
        Rule(task.longest, model.position == 'learned', values.get(task.longest, 0) <= model.max_length,
             f'must be at most model.max_length={model.max_length}, because positions are learned'),
        Rule('model.position', model.position == 'rotary', d_k % 2 == 0,
             f'needs an even d_k, because rotary positions rotate pairs of numbers, but d_k={d_k}'),
        Rule('model.rotary_scaling', model.rotary_scaling != 'none', model.rotary_factor != 1,
             'has no effect with rotary_factor=1. Set rotary_factor above 1, or set rotary_scaling to none'),
        Rule('model.attention_kernel', fused, not model.attention_dropout and model.score in ('scaled_dot', 'dot'),
             'needs score=scaled_dot or dot, and attention_dropout=0. Use auto'),
        Rule('model.attention_kernel', fused, d_k == d_v,
             f'needs equal d_k and d_v, but d_k={d_k} and d_v={d_v}. Use auto'),
        Rule('model.share_embeddings', model.share_embeddings == 'all', data.tokenizer.joint,
             'needs one vocabulary for both languages. Set data.tokenizer.joint=True or share_embeddings=target'),

        Rule('data.tokenizer.vocab_size', data.tokenizer.kind in SUBWORDS, data.tokenizer.vocab_size > 260,
             'must be above 260, the number of special tokens and bytes'),
        Rule('data.dir', data.source not in ELSEWHERE and task.data != 'series', bool(data.dir or file),
             'must name the folder of the files'
             + (', or set data.file to one text' if task.data == 'documents' else '')),
        Rule('data.source', task.data == 'series', data.source != 'tfds', 'must be builtin or files for forecasting'),
        Rule('data.file', task.data == 'series' and data.source == 'files', bool(file),
             'must name a table of series, such as co2.csv'),
        Rule('data.season', task.data == 'series', data.season <= data.context,
             f'must be at most data.context={data.context}, because the seasonal-naive forecast repeats the last '
             'season of the context'),
        Rule('model.patches.patch', task.data == 'series',
             data.context % model.patches.patch == data.horizon % model.patches.patch == 0,
             f'must divide data.context={data.context} and data.horizon={data.horizon}'),
        Rule('data.validation_share', bool(file), data.validation_share > 0,
             f'must be above 0, because the validation split is a part of data.file={file}'),
        Rule('data.file', bool(file), not data.dir,
             f'must not be combined with data.dir={data.dir}. Clear one option: --config.data.file= or '
             '--config.data.dir='),
        Rule('data.name', data.source == 'tfds', bool(data.name), 'must name a TFDS dataset'),
        Rule('data.splits.test', len(test_sets) > 1, task.data in ('pairs', 'documents'),
             'must be one name, because only folders and datasets of text can have several test sets'),
        Rule('data.splits.test', len(test_sets) > 1, '/' not in data.splits.test and
             len({*test_sets, '', 'train', 'validation'}) == len(test_sets) + 3,
             'must be unique names without /, separated by commas. The names train and validation are not allowed'),
        # A run of an earlier version may have the set of another task, which configs/checks.py refuses in new runs.
        Rule('data.name', data.source == 'builtin' and bool(task.builtin),
             any(data.name in peer.builtin for peer in TASKS.values() if peer.answerer == task.answerer),
             f'must be {" or ".join(task.builtin)}'),

        Rule('batch.rows', is_used('data.context', values), batch.rows * data.context <= MOST_TOKENS,
             f'must be at most {MOST_TOKENS // data.context:,} windows of data.context={data.context} tokens or '
             'steps'),
        Rule('train.accumulate', is_used('batch.rows', values), train.accumulate <= batch.rows,
             f'must be at most batch.rows={batch.rows}, because each part has at least one row'),
        Rule('train.steps', config.optimizer.schedule == 'cosine', train.steps > 1,
             'must be above 1 for optimizer.schedule=cosine, because the cosine decay begins after the warm-up'),
        Rule('train.r_drop', train.r_drop > 0, any(values[name] for name in DROPOUTS),
             'needs dropout, because without dropout both passes are equal. Set model.dropout, or set r_drop to 0'),
        Rule('train.simcut', train.simcut > 0, not train.r_drop,
             f'must not be combined with r_drop={train.r_drop}, because each adds a second pass. Set one option to 0'),
        Rule('train.simcut', train.simcut > 0, any(values[name] for name in ('train.cutoff', *DROPOUTS)),
             'needs train.cutoff or dropout, because without them both passes are equal. Set train.cutoff, or set '
             f'simcut to 0 and cutoff to its default, {DEFAULTS["train.cutoff"]}'),
        needs('train.cutoff', 'train.simcut'),
        Rule('data.mixup', data.mixup > 0, not train.r_drop,
             f'must not be combined with train.r_drop={train.r_drop}. Set one option to 0'),
        needs('train.guided_head', 'train.guided_alignment'),
        Rule('train.guided_alignment', train.guided_alignment > 0 and model.kind == 'rnnsearch',
             model.recurrent.attention, 'needs model.recurrent.attention=True'),
        Rule('train.guided_alignment', train.guided_alignment > 0, not model.layer_dropout,
             f'must not be combined with model.layer_dropout={model.layer_dropout}, because a skipped sublayer has no '
             'attention weights. Set one option to 0'),
        Rule('train.guided_head', bool(train.guided_head),
             cross_head(train.guided_head, *cross_heads(model)) is not None,
             'must be cross:LAYER:HEAD or cross:LAYER. LAYER is from 1 to {}, and HEAD is from 1 to {}'.format(
                 *cross_heads(model))),
        needs('train.teacher_checkpoint', 'train.teacher'),
        needs('train.teacher_weight', 'train.teacher'),
        needs('train.init_vocabulary', 'train.init_from'),
        Rule('train.init_vocabulary', bool(train.teacher), train.init_vocabulary,
             'must be True with a teacher, because a student has the vocabulary of its teacher'),
        Rule('train.frozen', bool(train.frozen), not train.lora_rank,
             f'must not be combined with lora_rank={train.lora_rank}, because then only the adapters are trained'),
        needs('train.lora_alpha', 'train.lora_rank'),
        needs('train.lora_parts', 'train.lora_rank'),
        *(rule for axis, size in mesh.items() for rule in (
            Rule(axis, True, size != 0, 'must be at least 1, or -1 for all remaining devices'),
            Rule(axis, size == -1, list(mesh.values()).count(-1) == 1, 'must not be -1, because another axis is -1'),
            Rule(axis, config.parallel.mode == 'pmap' and axis != 'parallel.data', size == 1,
                 'must be 1 for mode=pmap, which supports only data parallelism'))),
    ]
