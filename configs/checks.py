"""Checks of a config. They run before data is read, a model is built or a file is written."""

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import recipes, sweeps
from configs.options import BEAM_METHODS, BY_NAME, DEFAULTS, decisive, flatten, kind_problem, plain
from configs.rules import rules, warmup_steps
from configs.tasks import TASKS
from runtime.errors import UserError, did_you_mean, faults_in, option_like

NO_CONFIG = '--config is missing. Set it to a recipe, for example --config=configs/demo.py'
LONGEST = 200  # maximum number of characters of a value in a message


def config_from(flag: flags.FlagHolder,
                more: Callable[[ConfigDict, Sequence[str]], list[str]] = lambda config, problems: [],
                resumes: bool = False) -> ConfigDict:
    """Returns the checked value of a --config flag.

    Args:
      flag: the flag, defined by ml_collections.
      more: a function that makes further checks, for example of the data. It takes the config and the list of messages
        so far, and returns a list of further messages.
      resumes: whether the config is for a run that exists. Such a run may keep the values in `new_run_problems`.

    Raises:
      UserError: if the flag is missing or is not a recipe, or if values are wrong. The message lists all wrong values.
    """
    named = config_flags.get_config_filename(flags.FLAGS['config']) if flag.present else ''
    path, _, _ = named.partition(':')  # the recipe's get_config gets the text after the colon
    if not path:
        raise UserError(NO_CONFIG)
    if not os.path.isfile(path):
        raise UserError(no_recipe(path))
    with faults_in(path):
        hasattr(flag.value, 'seed')  # ml_collections raises an OSError of the recipe only at the first access
    config = plain(flag.value)
    problems = config_problems(config)
    overrides = config_flags.get_override_values(flags.FLAGS['config'])
    if not problems and not resumes:
        problems = new_run_problems(config, overrides)
    problems += more(config, problems)
    if problems:
        raise UserError('\n'.join(problems))
    return config.lock()


def no_recipe(path: str) -> str:
    """Returns the message for a --config that is not a file."""
    return _no_file('config', path, 'recipe', 'configs/demo.py', recipes())


def no_sweep(path: str) -> str:
    """Returns the message for a --sweep that is not a file."""
    return _no_file('sweep', path, 'sweep', 'configs/sweeps/seeds.py', sweeps.files())


def _no_file(flag: str, path: str, kind: str, example: str, files: Iterable[Path]) -> str:
    use = f'Use the file of a {kind}, for example {example}'
    if os.path.isdir(path):
        return f'--{flag}={path} is a folder. {use}'
    paths = {file.stem: os.path.relpath(file) for file in files}
    near = difflib.get_close_matches(Path(path).stem, paths, n=1)
    return f'--{flag}={path} does not exist' + (f': did you mean {paths[near[0]]}?' if near else f'. {use}')


def check_config(config: ConfigDict) -> None:
    """Raises UserError if the config has values that are not allowed. The message has one line for each wrong value."""
    if problems := config_problems(config):
        raise UserError('\n'.join(problems))


def new_run_problems(config: ConfigDict, asked: Collection[str]) -> list[str]:
    """Returns messages about values that a new run must not have. A run that already exists may keep them.

    `asked` are the options that the user set. A warm-up that is too long is a problem only if the user set it.
    Otherwise, it is shortened.
    """
    return [*builtin_problems(config), *(warmup_problems(config) if 'optimizer.warmup' in asked else []),
            *frozen_problems(config), *window_problems(config)]


def builtin_problems(config: ConfigDict) -> list[str]:
    """Returns a message if the built-in data is for another task."""
    name, allowed = config.data.name, TASKS[config.task].builtin
    if config.data.source != 'builtin' or not allowed or name in allowed:
        return []
    return [f'config.data.name={written(name)}: must be {" or ".join(allowed)} for task={config.task}']


def frozen_problems(config: ConfigDict) -> list[str]:
    """Returns a message if train.frozen is not empty, but has no pattern."""
    frozen = config.train.frozen
    if not frozen or frozen.replace(',', '').strip():
        return []
    return [f'config.train.frozen={written(frozen)}: must contain a pattern of names of parameters, such as encoder']


def warmup_problems(config: ConfigDict) -> list[str]:
    """Returns a message if the warm-up of the config is too long for the training."""
    warmup, steps = config.optimizer.warmup, config.train.steps
    if warmup == warmup_steps(config.optimizer, steps):
        return []
    return [f'config.optimizer.warmup={warmup}: must be below train.steps={steps}, because the cosine decay begins '
            'after the warm-up']


def window_problems(config: ConfigDict) -> list[str]:
    """Returns a message if beam search of a language model cannot generate as many tokens as the config asks for.

    decode.py refuses such a search. Without this check, a run could be trained, but not scored.
    """
    method, length, context = config.decode.method, config.decode.extra_length, config.data.context
    if TASKS[config.task].data != 'documents' or method not in BEAM_METHODS or length <= context:
        return []
    return [f'config.decode.extra_length={length}: must be at most data.context={context} for decode.method={method}, '
            'because beam search uses only one window of the model']


def config_problems(config: ConfigDict) -> list[str]:
    """Returns the message 'config.OPTION=VALUE: requirement' for each value that is not allowed.

    Each option has at most one message. The messages are in the order of the table of options. A problem that follows
    from another problem is not reported. For example, if the task is unknown, no option is reported as unused.
    """
    if problems := _misshapen(config):
        return problems
    values = flatten(config)
    wrong = {name: problem for name, option in BY_NAME.items() if (problem := option.allowed.problem(values[name]))}
    allowed_alone = not wrong
    if not {'task', 'model.kind'} & wrong.keys():
        wrong |= _wrong_together(config, values, wrong, allowed_alone)
    return [f'config.{name}={written(values[name])}: {wrong[name]}' for name in BY_NAME if name in wrong]


def _wrong_together(config: ConfigDict, values: Mapping[str, Any], wrong: Mapping[str, str],
                    allowed_alone: bool) -> dict[str, str]:
    """Returns {option: requirement} for options whose values conflict with the values of other options.

    The result does not contain the options in `wrong`, which already have a message. `values` are the options of the
    config. The table of rules is used only if `allowed_alone` is True, that is, if each value is allowed by itself.
    """
    task = TASKS[config.task]
    if config.model.kind not in task.models:
        tasks = [name for name, task in TASKS.items() if config.model.kind in task.models]
        return {'task': f'must be {" or ".join(tasks)} for model.kind={config.model.kind}'}
    problems = {name: (f'has no effect with {reason}={values[reason]}. '
                       f'Set it to its default, {written(DEFAULTS[name])}')
                for name, reason in unused(values).items()}
    if config.eval.metric not in task.metrics:
        problems['eval.metric'] = (f'must be one of {", ".join(task.metrics)} for task={config.task}'
                                   f'{did_you_mean(config.eval.metric, task.metrics)}')
    for rule in rules(config, task) if allowed_alone else ():
        if rule.applies and not rule.holds:
            problems.setdefault(rule.option, rule.requirement)
    return {name: problem for name, problem in problems.items() if name not in wrong}


def unused(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options that were set but have no effect, as {option: deciding option}.

    The value of the deciding option, such as model.kind, is the reason why the option has no effect. `values` are all
    options of a config.
    """
    if values['task'] not in TASKS:
        return {}  # the task decides which options have an effect
    return {name: reason for name, value in values.items()
            if value != DEFAULTS[name] and (reason := decisive(name, values))}


def data_options_are_possible(config: Any) -> bool:
    """Returns whether the options for opening the data and for learning a tokenizer are valid."""
    if _misshapen(config) or config.task not in TASKS:
        return False
    values = flatten(config)
    return not any(option.allowed.problem(values[name]) for name, option in BY_NAME.items()
                   if name.startswith('data.') or name in ('cache_dir', 'model.patches.patch'))


def written(value: Any) -> str:
    """Returns a value as text for a message. Long text is truncated."""
    text = repr(value)
    return text if len(text) <= LONGEST else f'{text[:LONGEST]}...'


def _misshapen(config: Any) -> list[str]:
    """Returns a message for each option that is missing or unknown, or has another type than its default."""
    if not isinstance(config, ConfigDict):
        return [f'the config is {written(config)}: get_config must return a ConfigDict, as in configs/base.py']
    values = flatten(config)
    problems = [f'config.{name}: the config has no such option{option_like(name, DEFAULTS)}'
                for name in values if name not in DEFAULTS]
    problems += [f'config.{name} is missing. Start with base.get_config(), which has every option'
                 for name in DEFAULTS if name not in values]
    return problems + kind_problems({name: values[name] for name in DEFAULTS if name in values})


def kind_problems(values: Mapping[str, Any]) -> list[str]:
    """Returns a message for each option in `values` that has another type than its default."""
    return [f'config.{name}={written(value)}: {problem}' for name, value in values.items()
            if (problem := kind_problem(name, value))]
