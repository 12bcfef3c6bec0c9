"""Every script: the messages and exit statuses for wrong command lines."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = """
from absl import flags
from ml_collections import config_flags
from command_line import run_script
from runtime.errors import UserError

config_flags.DEFINE_config_file('config', None, 'The recipe.', lock_config=True)
flags.DEFINE_integer('step', 0, 'The step.')

def main():
    print('began', flush=True)
    {body}

run_script(main)
"""


NO_OPTION = '--config.{}: the config has no such option'


def run(*arguments, body='pass'):
    return subprocess.run([sys.executable, '-c', SCRIPT.format(body=body), *arguments], cwd=ROOT, capture_output=True,
                          text=True, timeout=600)


@pytest.mark.parametrize('arguments, message', [
    (['--config.model.num_lyers=2'], NO_OPTION.format('model.num_lyers') + ': did you mean model.num_layers?'),
    (['--config.modle.num_layers=2'], NO_OPTION.format('modle.num_layers') + ': did you mean model.num_layers?'),
    (['--config.peak=2'], NO_OPTION.format('peak') + ': did you mean optimizer.peak?'),
    (['--config.eval.evry', '5'], NO_OPTION.format('eval.evry') + ': did you mean eval.every?'),
    (['--noconfig.model.num_layers'], '--noconfig.model.num_layers: only True/False options have the form '
     '--noconfig.OPTION. Use --config.model.num_layers=VALUE'),
    *(([f'--config.{given}'], f'--config.{given}: config.{given.partition("=")[0]} is a section. Set one of its '
       f'options, such as --config.{example}') for given, example in (
        ('model=rnnsearch', 'model.kind=rnnsearch'), ('data.tokenizer=char', 'data.tokenizer.kind=char'),
        ('optimizer=1', 'optimizer.schedule=paper'), ('batch', 'batch.tokens=4096'))),
    (['--noconfig.model.remta'], NO_OPTION.format('model.remta') + ': did you mean model.remat?'),
    (['--config.zzz=2'], NO_OPTION.format('zzz') + '. See configs/options.py'),
    (['--config.model.num_layers=x'], '--config.model.num_layers=x: must be a whole number'),
    (['--config.model.num_layers=2.5'], '--config.model.num_layers=2.5: must be a whole number'),
    (['--config.model.dropout=x'], '--config.model.dropout=x: must be a number'),
    (['--config.model.num_layers.x=2'], NO_OPTION.format('model.num_layers.x') + ': did you mean model.num_layers?'),
    (['--step=x'], '--step=x: must be a whole number'),
    (['--config.model.remat=x'], '--config.model.remat=x: must be true or false'),
    (['--stepp=1'], "Unknown command line flag 'stepp'. Did you mean: step ?"),
    (['step=1'], "unexpected argument 'step=1'. Write options as flags, --name=value"),
    (['--config=no/such.py', '--config.seed=1'],
     '--config=no/such.py does not exist. Use the file of a recipe, for example configs/demo.py'),
    (['--config=configs/dmeo.py', '--config.seed=1'],
     '--config=configs/dmeo.py does not exist: did you mean configs/demo.py?'),
])
def test_mistaken_flag_is_one_line_and_status_2(arguments, message):
    done = run('--config=configs/demo.py', *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, '', f'error: {message}\n')


def test_a_script_without_a_config_does_not_recommend_an_option_of_the_config():
    done = subprocess.run([sys.executable, 'decode.py', '--workdir=x', '--config.model=rnnsearch'], cwd=ROOT,
                          capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (2, "error: Unknown command line flag 'config.model'\n")


def test_help_shows_our_flags_first_and_where_the_options_are():
    short, full = run('--help'), run('--helpfull')
    assert short.returncode == full.returncode == 0 and short.stderr == ''
    assert short.stdout.index('--config: The recipe') < short.stdout.index('docs/options.md explains the options')
    assert len(short.stdout.splitlines()) < 30
    places = [full.stdout.index(each) for each in ('--step', '--config.model.num_heads=8:', 'absl.logging')]
    assert places == sorted(places)


def test_help_does_not_need_a_wide_terminal():
    done = subprocess.run([sys.executable, '-c', SCRIPT.format(body='pass'), '--help'], cwd=ROOT, text=True,
                          env=os.environ | {'COLUMNS': '1'}, capture_output=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, '') and '--config: The recipe' in done.stdout


@pytest.mark.parametrize('script, argument, status', [
    ('train.py', '--help', 0), ('train.py', '--hepl', 2), ('decode.py', '--help', 0), ('sweep.py', '--hepl', 2),
    ('-mtools.show_batch', '--help', 0), ('-mtools.show_run', '--hepl', 2), ('-mtools.plan', '--help', 0),
    ('-mtools.distil', '--hepl', 2), ('-mbenchmarks.profile', '--help', 0), ('-mbenchmarks.scaling', '--help', 0),
    ('-mbenchmarks.decode', '--help', 0)])
def test_help_and_mistyped_flags_do_not_wait_for_libraries(script, argument, status):
    done = subprocess.run([sys.executable, '-X', 'importtime', script, argument], cwd=ROOT, capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == status
    imported = {line.rpartition('|')[2].strip() for line in done.stderr.splitlines()}
    assert 'absl.flags' in imported
    assert not imported & {'jax', 'flax', 'optax', 'orbax', 'grain', 'matplotlib', 'tensorboardX', 'submitit'}


def test_a_script_may_take_one_argument():
    takes = SCRIPT.replace('main()', 'main(folder)').replace('run_script(main)', 'run_script(main, takes="RUN")')

    def run_it(*arguments):
        return subprocess.run([sys.executable, '-c', takes.format(body='print(folder)'), *arguments], cwd=ROOT,
                              capture_output=True, text=True, timeout=600)
    assert run_it('runs/demo').stdout == 'began\nruns/demo\n'
    assert run_it().stderr == 'error: RUN is missing. See --help\n'
    assert 'unexpected argument' in run_it('runs/demo', 'runs/other').stderr


def test_user_error_is_its_message_and_status_2():
    done = run(body='raise UserError("data.en:7: not UTF-8")')
    assert (done.returncode, done.stdout, done.stderr) == (2, 'began\n', 'error: data.en:7: not UTF-8\n')


def test_a_word_that_is_longer_than_any_path_is_shortened():
    done = run(body='raise UserError("x" * 10_000 + " cannot be read")')
    assert (done.returncode, done.stderr) == (2, f'error: {"x" * 100}... cannot be read\n')


def test_a_bug_in_this_code_keeps_its_traceback():
    done = run(body='assert False, "ours"')
    assert done.returncode == 1 and 'Traceback' in done.stderr and 'ours' in done.stderr


def test_ctrl_c_during_a_garbage_collection_is_not_lost():
    body = '''
    import gc, signal, time
    gc.callbacks.append(lambda *_: gc.callbacks.clear() or signal.raise_signal(signal.SIGINT))
    gc.collect()
    for _ in range(6000):  # a signal just before a sleep takes effect after this sleep
        time.sleep(0.01)
    print('not interrupted')'''
    done = run(body=body)
    assert (done.returncode, done.stdout, done.stderr) == (130, 'began\n', 'interrupted\n')


def test_log_goes_to_stderr():
    done = run(body='import logging; logging.getLogger("allyouneed.x").info("step %d", 3)')
    assert (done.returncode, done.stdout, done.stderr) == (0, 'began\n', 'step 3\n')


LOGGING = """
    import logging, sys
    from training.remaining import show_bar
    logging.getLogger("allyouneed").info("a line of the log")
    with show_bar(0, 10) as bar:
        bar.set_postfix(loss="1.0")
    print("ended")
    sys.exit(75)"""


SUCCESS = SCRIPT.format(body='pass').replace('run_script(main)', 'run_script(main, ends_at_once=True)')
ERROR = SCRIPT.format(body='raise UserError("data.en:7: not UTF-8")')


@pytest.mark.parametrize('stderr, command, status, output', [
    ('2>&-', ['-c', SUCCESS], 0, 'began\n'), ('2>/dev/full', ['-c', SUCCESS], 0, 'began\n'),
    ('2>&-', ['-c', ERROR], 2, 'began\n'), ('2>/dev/full', ['-c', ERROR], 2, 'began\n'),
    ('2>/dev/full', ['-c', SCRIPT.format(body=LOGGING)], 75, 'began\nended\n'),
    ('2>&-', ['sweep.py', '--flagfile=/none'], 2, ''), ('2>/dev/full', ['sweep.py', '--flagfile=/none'], 2, '')])
def test_a_stderr_that_cannot_be_written_does_not_change_the_status_and_stdout(stderr, command, status, output):
    done = subprocess.run(['sh', '-c', f'exec "$@" {stderr}', 'sh', sys.executable, *command], cwd=ROOT,
                          stdout=subprocess.PIPE, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (status, output)


def test_reader_that_leaves_is_no_error():
    process = subprocess.Popen([sys.executable, '-c', SCRIPT.format(body='[print("x" * 99) for _ in range(9999)]')],
                               cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b''
    assert process.wait(600) == 128 + signal.SIGPIPE


def test_interrupt_ends_quietly():
    process = subprocess.Popen([sys.executable, '-c', SCRIPT.format(body='import time; time.sleep(600)')], cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == 'interrupted\n'
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize('body, status, message', [
    ('signal.raise_signal(signal.SIGINT)', 128 + signal.SIGINT, 'interrupted\n'),
    ('raise UserError("data.en:7: not UTF-8")', 2, 'error: data.en:7: not UTF-8\n')])
def test_threads_that_compute_do_not_delay_the_end(body, status, message):
    code = SCRIPT.format(body='import signal, threading; threading.Thread(target=threading.Event().wait).start(); '
                              f'print("answer"); {body}').replace('run_script(main)',
                                                                 'run_script(main, ends_at_once=True)')
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (status, 'began\nanswer\n', message)


RUN = ['train', '--config=configs/demo.py', '--workdir=none']


@pytest.mark.slow
@pytest.mark.parametrize('arguments', [
    RUN, ['decode', '--workdir=none', '--input=-'], ['tools.import_weights', '--from=none', '--workdir=none']])
def test_interrupt_during_the_imports_ends_quietly(arguments):
    """The process sends itself the signal when it imports JAX. Like some C++ modules, the import cannot fail."""
    code = f"""
import os, runpy, signal, sys
class Interrupter:
    def find_spec(self, name, *_):
        if name == 'jax':
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                os.abort()
sys.meta_path.insert(0, Interrupter())
sys.path.insert(0, {str(ROOT)!r})
sys.argv[1:] = {arguments[1:]}
runpy.run_module({arguments[0]!r}, run_name='__main__', alter_sys=True)
"""
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, 'interrupted\n')


@pytest.mark.parametrize('name, value', [
    ('JAX_ENABLE_X64', 'maybe'), ('JAX_NUM_CPU_DEVICES', 'two'), ('JAX_DEFAULT_MATMUL_PRECISION', 'bf')])
@pytest.mark.fast_cases(2)
def test_a_wrong_value_of_a_variable_of_jax_is_explained(name, value):
    done = subprocess.run([sys.executable, '-m', *RUN], cwd=ROOT, env={**os.environ, name: value},
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and 'Traceback' not in done.stderr
    assert done.stderr.startswith(f'error: {name}={value}: JAX does not accept this value')


@pytest.mark.parametrize('command', [
    ['train.py', '--help'], ['sweep.py', '--helpfull'], ['train.py', '--config=configs/demo.py', '--print_config']])
@pytest.mark.parametrize('environment', [{}, {'PYTHONUNBUFFERED': '1'}], ids=['buffered', 'unbuffered'])
def test_a_full_stdout_is_named(command, environment):
    usual = {name: value for name, value in os.environ.items() if name != 'PYTHONUNBUFFERED'}
    with open('/dev/full', 'w') as full:
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=usual | environment, stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 2 and 'Traceback' not in done.stderr
    assert done.stderr.endswith('error: stdout cannot be written: No space left on device\n')
