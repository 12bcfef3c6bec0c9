"""Checks of a config, made before anything is read, built or written."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import recipes
from configs.options import BY_NAME, DEFAULTS, MOST_TOKENS, decisive, flatten, is_used, kind_problem
from configs.tasks import SUBWORDS, TASKS, Task
from runtime.errors import UserError, did_you_mean, faults_in, option_like

NO_CONFIG = '--config is missing: give a recipe, for example --config=configs/demo.py'
LONGEST = 200  # characters of a value in a message
AXES = ('data', 'fsdp', 'tensor')  # of the mesh
ELSEWHERE = ('builtin', 'tfds')  # sources that do not read the user's files


def config_from(flag: flags.FlagHolder,
                more: Callable[[ConfigDict, Sequence[str]], list[str]] = lambda config, problems: []) -> ConfigDict:
    """Returns the checked value of a --config flag.

    Args:
      flag: the flag, defined by ml_collections.
      more: a function of the config and the problems found so far that returns further problems, such as those of the
        data.

    Raises:
      UserError: if the flag is missing or is not a recipe. If values are wrong, the message lists all of them.
    """
    named = config_flags.get_config_filename(flags.FLAGS['config']) if flag.present else ''
    path, _, _ = named.partition(':')  # what follows is for the recipe's get_config
    if not path:
        raise UserError(NO_CONFIG)
    if not os.path.isfile(path):
        raise UserError(no_recipe(path))
    with faults_in(path):
        hasattr(flag.value, 'seed')  # ml_collections raises an OSError of the recipe only at the first access
    problems = config_problems(flag.value)
    problems += more(flag.value, problems)
    if problems:
        raise UserError('\n'.join(problems))
    return flag.value


def no_recipe(path: str) -> str:
    """Returns the message for a --config that is not a file."""
    near = did_you_mean(path if path.endswith('.py') else f'configs/{path}.py', map(os.path.relpath, recipes()))
    return f'--config={path} does not exist{near or ": give a recipe, for example configs/demo.py"}'


def check_config(config: ConfigDict) -> None:
    """Raises UserError if values are impossible: one line for each, with its key and what it must be."""
    if problems := config_problems(config):
        raise UserError('\n'.join(problems))


def config_problems(config: ConfigDict) -> list[str]:
    """Returns 'config.KEY=VALUE: what it must be' for each impossible value, in the order of the table of options.

    Problems that follow from another problem are left out: for an unknown task, for example, it is not known which
    options it uses.
    """
    if problems := _misshapen(config):
        return problems
    here, problems = flatten(config), {}

    def require(holds: bool, key: str, wanted: str) -> None:
        if not holds:
            problems.setdefault(key, f'config.{key}={written(here[key])}: {wanted}')

    for key, option in BY_NAME.items():
        wanted = option.allowed.problem(here[key])
        require(not wanted, key, wanted)
    if not {'task', 'model.kind'} & problems.keys():
        tasks = [name for name, task in TASKS.items() if config.model.kind in task.models]
        require(config.task in tasks, 'task', f'must be {" or ".join(tasks)} for model.kind={config.model.kind}')
    if {'task', 'model.kind'} & problems.keys():
        return list(problems.values())
    task, possible_alone = TASKS[config.task], not problems
    require(config.eval.metric in task.metrics, 'eval.metric', f'must be one of {", ".join(task.metrics)} for '
            f'task={config.task}{did_you_mean(config.eval.metric, task.metrics)}')
    for key, because in unused(here).items():
        require(False, key, f'means nothing to {because}={here[because]}: leave it at its default, '
                f'{written(DEFAULTS[key])}')
    if possible_alone:
        _check_together(config, task, require)
    return list(problems.values())


def _check_together(config: ConfigDict, task: Task, require: Callable[[bool, str, str], None]) -> None:
    """Finds values that are possible separately but not together."""
    model, data, train, here = config.model, config.data, config.train, flatten(config)

    d_k = model.d_k or model.d_model // model.num_heads
    divides = model.d_model % model.num_heads == 0 or bool(model.d_k and model.d_v)
    require(not is_used('model.num_heads', here) or divides, 'model.num_heads',
            f'must divide d_model={model.d_model}, or give d_k and d_v')
    groups = model.num_key_value_heads or model.num_heads
    require(model.num_heads % groups == 0, 'model.num_key_value_heads',
            f'must divide num_heads={model.num_heads}: each serves as many of them')
    require(not model.window or model.kind != 'patches' or model.patches.pooling == 'mean', 'model.window',
            'needs patches.pooling=mean: the class token would see the first patches only')
    require(model.position != 'sinusoidal' or model.d_model % 2 == 0, 'model.d_model',
            'must be even for sinusoidal positions')
    require(model.position != 'learned' or not task.longest or here[task.longest] <= model.max_length, task.longest,
            f'must not exceed the learned positions of model.max_length={model.max_length}')
    require(model.position != 'rotary' or d_k % 2 == 0, 'model.position',
            f'needs an even d_k for rotary: positions turn pairs of numbers, and d_k is {d_k}')
    require(model.attention_kernel != 'fused' or not model.attention_dropout and model.score in ('scaled_dot', 'dot'),
            'model.attention_kernel',
            'must not be fused with attention_dropout, or with scores other than scaled_dot and dot')
    require(model.attention_kernel != 'fused' or d_k == (model.d_v or model.d_model // model.num_heads),
            'model.attention_kernel', 'must not be fused with a d_v other than d_k')
    require(data.tokenizer.joint or model.share_embeddings != 'all', 'model.share_embeddings',
            'needs one vocabulary for both languages: set data.tokenizer.joint=True or share_embeddings=target')

    require(data.tokenizer.kind in task.tokenizers, 'data.tokenizer.kind',
            f'must be {" or ".join(task.tokenizers)} for task={config.task}')
    require(data.tokenizer.kind not in SUBWORDS or data.tokenizer.vocab_size > 260, 'data.tokenizer.vocab_size',
            'must be above 260, the special pieces and the bytes')
    require(data.source in ELSEWHERE or bool(data.dir or data.file), 'data.dir', 'must name the folder of the files')
    require(data.source != 'tfds' or bool(data.name), 'data.name', 'must name a TFDS dataset')
    sets = data.splits.test.split(',')
    require(len(sets) == 1 or task.data in ('pairs', 'documents') and not data.file, 'data.splits.test',
            'must be one name: only folders and datasets of text have several test sets')
    require(len(sets) == 1 or len({*sets, '', 'train', 'validation'}) == len(sets) + 3 and '/' not in data.splits.test,
            'data.splits.test', 'must be different names with commas between them, without train, validation or a /')
    require(data.source != 'builtin' or not task.builtin or data.name in task.builtin, 'data.name',
            f'must be one of {", ".join(task.builtin)}')

    require(not is_used('data.context', here) or config.batch.rows * data.context <= MOST_TOKENS, 'batch.rows',
            f'must be at most {MOST_TOKENS // data.context:,} windows of data.context={data.context} tokens')
    require(not is_used('batch.rows', here) or config.train.accumulate <= config.batch.rows, 'train.accumulate',
            f'must not exceed batch.rows={config.batch.rows}: a part has at least one row')
    require(config.optimizer.schedule != 'cosine' or config.optimizer.warmup < config.train.steps, 'optimizer.warmup',
            f'must be below train.steps={config.train.steps} for the cosine to have a place')

    require(not (train.r_drop and train.simcut), 'train.simcut',
            f'means nothing beside r_drop={train.r_drop}: each of them has a second pass of its own; choose one')
    require(bool(train.simcut) or train.cutoff == DEFAULTS['train.cutoff'], 'train.cutoff',
            'means nothing without SimCut: leave it out, or give train.simcut')

    for key in ('train.teacher_checkpoint', 'train.teacher_weight'):
        require(bool(train.teacher) or here[key] == DEFAULTS[key], key,
                'means nothing without a teacher: leave it out, or give train.teacher')

    require(bool(train.init_from) or train.init_vocabulary, 'train.init_vocabulary',
            'means nothing without train.init_from: leave it out, or give the run to begin from')
    require(not (train.teacher and not train.init_vocabulary), 'train.init_vocabulary',
            'must be True with a teacher, whose vocabulary a student has')
    require(not (train.frozen and train.lora_rank), 'train.frozen',
            f'means nothing beside lora_rank={train.lora_rank}, with which the adapters alone are trained')
    for key in ('train.lora_alpha', 'train.lora_parts'):
        require(bool(train.lora_rank) or here[key] == DEFAULTS[key], key,
                'means nothing without adapters: leave it out, or give train.lora_rank')

    sizes = [config.parallel[axis] for axis in AXES]
    for axis, size in zip(AXES, sizes, strict=True):
        require(size != 0, f'parallel.{axis}', 'must be at least 1, or -1 for all devices that are left')
        require(size != -1 or sizes.count(-1) == 1, f'parallel.{axis}', 'must not be -1 where another axis is, too')
        require(config.parallel.mode != 'pmap' or axis == 'data' or size == 1, f'parallel.{axis}',
                'must be 1 for mode=pmap, which knows data parallelism only')


def unused(here: Mapping[str, Any]) -> dict[str, str]:
    """Returns {option: deciding option} for options that were set but that this model, task or source does not use.

    The deciding option is the one whose value makes the option unused.
    """
    if here['task'] not in TASKS:
        return {}  # it is not known which options such a task uses
    return {key: because for key, value in here.items() if value != DEFAULTS[key] and (because := decisive(key, here))}


def data_can_be_looked_for(config: Any) -> bool:
    """Whether the data options are valid, so that the data can be opened and a tokenizer can be learned from it."""
    if _misshapen(config) or config.task not in TASKS:
        return False
    options = [option for key, option in BY_NAME.items() if key.startswith('data.') or key == 'cache_dir']
    here = flatten(config)
    return not any(option.allowed.problem(here[option.name]) for option in options)


def written(value: Any) -> str:
    """Returns a value as messages show it; a long one is cut."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of more than 4,300 digits
        text = 'a number of thousands of digits'
    return text if len(text) <= LONGEST else f'{text[:LONGEST]}...'


def _misshapen(config: Any) -> list[str]:
    """Returns a message for each option that is missing, unknown or of another type than its default."""
    if not isinstance(config, ConfigDict):
        return [f'the config is {written(config)}: get_config must return a ConfigDict, as configs/base.py makes it']
    if key := _holding_itself(config):
        return [f'config.{key}: holds itself, so that there is no end of options: leave it out']
    here = flatten(config)
    problems = [f'config.{key}: the config has no such option{option_like(key, DEFAULTS)}'
                for key in here.keys() - DEFAULTS.keys()]
    problems += [f'config.{key} is missing: begin with base.get_config(), which has every option'
                 for key in DEFAULTS.keys() - here.keys()]
    return problems + wrong_kinds(here)


def _holding_itself(config: ConfigDict, above: Sequence[ConfigDict] = (), prefix: str = '') -> str:
    """Returns the key of a section that contains itself, or ''."""
    above = (*above, config)
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            if any(value is each for each in above):
                return f'{prefix}{key}'
            if found := _holding_itself(value, above, f'{prefix}{key}.'):
                return found
    return ''


def wrong_kinds(here: Mapping[str, Any]) -> list[str]:
    """Returns a message for each option of {'model.d_model': 512, ...} whose value has the wrong type."""
    return [f'config.{key}={written(here[key])}: {problem}' for key in DEFAULTS
            if key in here and (problem := kind_problem(key, here[key]))]
