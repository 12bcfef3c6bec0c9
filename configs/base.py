"""The paper's base Transformer on the built-in corpus: what every recipe begins with.

`configs/options.py` has all options with their meaning. Any of them can be given on the command line:
--config.model.num_layers=2. A name that does not exist is an error, so a typo never trains the wrong model; so is a
value for an option that the model, the task, the source or the kind of tokenizer does not use.
"""

from ml_collections import ConfigDict

from configs.options import DEFAULTS


def get_config() -> ConfigDict:
    """Every option with its default."""
    config = ConfigDict()
    for name, default in DEFAULTS.items():
        *sections, last = name.split('.')
        part = config
        for section in sections:
            if section not in part:
                part[section] = ConfigDict()
            part = part[section]
        part[last] = default
    return config
