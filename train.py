"""Trains a model: --config=configs/NAME.py --workdir=RUN [--config.OPTION=VALUE ...]. For example:

    python train.py --config=configs/demo.py --workdir=runs/demo --config.model.num_layers=3

After an interruption, run the same command again: training resumes where it stopped, and on the same machine it ends
with the same parameters, bit for bit, as a run without interruption.

Exit status: 0, training finished; 2, an error that the last lines on stderr explain; 75 (EX_TEMPFAIL), stopped by
SIGTERM or SIGINT after saving: start it again; 130 or 143, stopped at once by a second such signal.
"""

import logging
import shlex
from collections.abc import Collection

from absl import flags
from ml_collections import ConfigDict, config_flags

from command_line import flag_files_explained, run_script
from configs.checks import config_from
from configs.options import DEFAULTS, flatten

with flag_files_explained():
    CONFIG_FLAG = config_flags.DEFINE_config_file('config', None, 'The recipe, a file of configs/.', lock_config=True)
WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory: created, or resumed if it holds this config.')
COORDINATOR = flags.DEFINE_string('coordinator_address', None, 'Many processes: HOST:PORT of process 0. Slurm, TPU '
                                  'pods and GKE tell it without these three flags.')
PROCESSES = flags.DEFINE_integer('num_processes', None, 'Many processes: how many.')
PROCESS = flags.DEFINE_integer('process_id', None, 'Many processes: which one this is, from 0.')
PATIENCE = flags.DEFINE_integer('patience', 300, 'Many processes: seconds to wait for a missing or slow one.', 1)
PRINT_CONFIG = flags.DEFINE_bool('print_config', False, 'Print the resolved config as flags, and train nothing.')
PROFILE = flags.DEFINE_string('profile_steps', None, 'FIRST:LAST: trace these steps with the profiler.')

log = logging.getLogger('allyouneed.train')


def main() -> None:
    """Trains, or prints the config, as the flags say."""
    # Seconds of imports, which --help and mistyped flags do not wait for.
    from analysis.pictures import answer_figure
    from input_pipeline.problems import data_problems
    from run_directory.workdir import RunDirectory
    from runtime.preemption import StopSignals
    from runtime.processes import connect, ending_together
    from training.loop import run
    from training.profiling import ProfilerWindow

    if PRINT_CONFIG.value:
        return print_config(config_from(CONFIG_FLAG))
    config = config_from(CONFIG_FLAG, lambda config, problems: data_problems(config, problems, asked_options()))
    connect(COORDINATOR.value, PROCESSES.value, PROCESS.value, PATIENCE.value)
    with (StopSignals() as stop, ending_together(),
          RunDirectory(WORKDIR.value, config, asked=asked_options()) as directory):
        run(config, directory, stop, ProfilerWindow(PROFILE.value, directory.path, config.train.steps), answer_figure)


def asked_options() -> Collection[str]:
    """Returns the options that the command line sets."""
    return config_flags.get_override_values(flags.FLAGS['config'])


def print_config(config: ConfigDict) -> None:
    """Prints every option as a flag on stdout, to be copied; logs on stderr the options that are not defaults."""
    options = flatten(config)
    changed = [f'{option}={value}' for option, value in options.items() if value != DEFAULTS[option]]
    print('\n'.join(shlex.quote(f'--config.{option}={options[option]}') for option in options))
    log.info('\n%d of %d options are not the defaults of configs/options.py: %s',
             len(changed), len(options), ', '.join(changed))


if __name__ == '__main__':
    run_script(main, computes=True)
