"""Trains a model: --config=configs/NAME.py --workdir=RUN [--config.OPTION=VALUE ...]. For example:

    python train.py --config=configs/demo.py --workdir=runs/demo --config.model.num_layers=3

After an interruption, run the same command again. Training resumes where it stopped. On the same machine, without a
GPU, the final parameters are the same, bit for bit, as without the interruption (docs/distributed.md, Stopping and
resuming).

Exit status: 0 if training is finished. 2 after an error, with an explanation on stderr. 75 (EX_TEMPFAIL) if training
has saved and stopped because of SIGTERM or SIGINT. In this case, run the same command again. 130 or 143 if a second
such signal, at least two seconds later, stopped training immediately.
"""

import logging
import shlex
from collections.abc import Collection, Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from command_line import flag_files_explained, run_script
from configs.checks import config_from
from configs.options import DEFAULTS, flatten
from run_directory.records import CONFIG, finished_at
from runtime.files import expanded
from runtime.process_setup import slow_imports

with flag_files_explained():
    CONFIG_FLAG = config_flags.DEFINE_config_file('config', None, 'The recipe: a file in configs/.', lock_config=True)
WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory. It is created, or resumed if it has this config.')
COORDINATOR = flags.DEFINE_string('coordinator_address', None, 'For several processes: HOST:PORT of process 0, or '
                                  '[ADDRESS]:PORT for an IPv6 address. On Slurm and on TPU pods (also in GKE), do not '
                                  'set this flag, --num_processes or --process_id. In other Kubernetes jobs, set all '
                                  'three flags, as launch/kubernetes.yaml does, unless JAX finds the processes '
                                  '(docs/distributed.md).')
PROCESSES = flags.DEFINE_integer('num_processes', None, 'For several processes: the number of processes.')
PROCESS = flags.DEFINE_integer('process_id', None, 'For several processes: the number of this process, from 0.')
PATIENCE = flags.DEFINE_integer('patience', 300, 'For several processes: seconds to wait for a missing or slow '
                                'process.', 1, 1_000_000)
PRINT_CONFIG = flags.DEFINE_bool('print_config', False, 'Print the resolved config as flags, without training.')
PROFILE = flags.DEFINE_string('profile_steps', None, 'FIRST:LAST: trace these steps with the profiler. With '
                              'several processes, only process 0 is traced.')

log = logging.getLogger('allyouneed.train')


def main() -> None:
    """Trains the model that the flags describe, or prints the config if --print_config is set."""
    resumes = bool(WORKDIR.value) and (expanded(WORKDIR.value) / CONFIG).exists()
    if PRINT_CONFIG.value:
        return print_config(config_from(CONFIG_FLAG, resumes=resumes))
    config = config_from(CONFIG_FLAG, problems_of_data, resumes)
    # These imports take seconds. They follow the check of the command line, so that --help and wrong flags do not wait
    # for them. A finished run does not even wait for the imports below.
    with slow_imports():
        from run_directory.workdir import RunDirectory
        from runtime.preemption import StopSignals
        from runtime.processes import connect, ending_together
        from training.profiling import ProfilerWindow

    connect(COORDINATOR.value, PROCESSES.value, PROCESS.value, PATIENCE.value)
    if config.train.edits or config.track.places:
        from inference.run import check_places

        check_places(config)
    with (StopSignals() as stop, ending_together(),
          RunDirectory(WORKDIR.value, config, asked=asked_options()) as directory):
        profiler = ProfilerWindow(PROFILE.value, directory.path, config.train.steps)
        if directory.finished_at is not None:
            return directory.report_finished(config)
        with slow_imports():
            from analysis.pictures import answer_figure
            from training.loop import run

        run(config, directory, stop, profiler, answer_figure)


def problems_of_data(config: ConfigDict, problems: Sequence[str]) -> list[str]:
    """Returns messages about problems of the data. `problems` are the messages about the config.

    For a finished run, returns no messages and does not read the data.
    """
    if not problems and WORKDIR.value and finished_at(expanded(WORKDIR.value), config) is not None:
        return []
    with slow_imports():
        from input_pipeline.problems import data_problems

    return data_problems(config, problems, asked_options())


def asked_options() -> Collection[str]:
    """Returns the names of the config's options that the command line sets."""
    return config_flags.get_override_values(flags.FLAGS['config'])


def print_config(config: ConfigDict) -> None:
    """Prints every option as a flag on stdout, and logs the options that differ from their defaults."""
    options = flatten(config)
    changed = [f'{option}={value}' for option, value in options.items() if value != DEFAULTS[option]]
    print('\n'.join(shlex.quote(f'--config.{option}={options[option]}') for option in options))
    log.info('\n%d of %d options differ from the defaults in configs/options.py: %s',
             len(changed), len(options), ', '.join(changed))


if __name__ == '__main__':
    run_script(main, computes=True)
