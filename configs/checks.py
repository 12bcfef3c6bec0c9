"""Checks of a config, made before anything is read, built or written."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import recipes
from configs.options import BY_NAME, DEFAULTS, decisive, flatten, kind_problem
from configs.rules import rules
from configs.tasks import TASKS
from runtime.errors import UserError, did_you_mean, faults_in, option_like

NO_CONFIG = '--config is missing: give a recipe, for example --config=configs/demo.py'
LONGEST = 200  # characters of a value in a message


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
    if os.path.isdir(path):
        return f'--config={path} is a folder. Give a recipe, for example configs/demo.py'
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
        for rule in rules(config, task):
            require(rule.holds or not rule.applies, rule.option, rule.wanted)
    return list(problems.values())


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
