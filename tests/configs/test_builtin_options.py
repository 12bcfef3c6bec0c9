"""Options that built-in data does not use are refused beside it."""

import pytest

from configs import base, demo, digits_vit, stdlib_lm
from configs.checks import config_problems


@pytest.mark.parametrize('recipe', [demo, digits_vit, stdlib_lm])
@pytest.mark.parametrize('split', ['train', 'validation', 'test'])
def test_built_in_data_has_no_names_on_disk(recipe, split):
    config = recipe.get_config()
    config.data.splits[split] = 'mine'
    default = base.get_config().data.splits[split]
    assert config_problems(config) == [f"config.data.splits.{split}='mine': means nothing to data.source=builtin: "
                                       f'leave it at its default, {default!r}']


def test_the_standard_library_depends_on_no_seed():
    config = stdlib_lm.get_config()
    config.data.seed = 1
    assert config_problems(config) == [
        'config.data.seed=1: means nothing to task=language_model: leave it at its default, 0']


def test_what_is_made_from_a_seed_has_one():
    for recipe in base, demo, digits_vit:
        config = recipe.get_config()
        config.data.seed = 1
        assert not config_problems(config)
