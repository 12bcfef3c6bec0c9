"""The paper's base Transformer on the built-in corpus, with a smaller batch and vocabulary than in the paper.

Every recipe starts from this config. `configs/options.py` lists all options with their meaning.

Any option can be set on the command line: --config.model.num_layers=2. An unknown name is an error, so a typo never
trains the wrong model. It is also an error to set an option that has no effect with the selected model, task, data
source or kind of tokenizer.
"""

from ml_collections import ConfigDict

from configs.options import DEFAULTS


def get_config() -> ConfigDict:
    """Returns a config in which every option has its default value."""
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
