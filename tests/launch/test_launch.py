"""The launch files without a cluster: their commands run as two processes of this machine."""

import json
import math
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.processes import free_port
from configs import multi30k_best
from runtime.processes import detected
from runtime.stopping import STOPPED
from tests.scripts import ROOT, STEPS, parameters, train_arguments

SCRIPTS = sorted(path.name for path in (ROOT / 'launch').glob('*.sh'))


def environment(devices, **more):
    return os.environ | {'JAX_NUM_CPU_DEVICES': str(devices), **more}


def container():
    """Returns the container of the Job in launch/kubernetes.yaml, and the spec of the Job."""
    service, job = yaml.safe_load_all((ROOT / 'launch' / 'kubernetes.yaml').read_text())
    assert service['metadata']['name'] == job['spec']['template']['spec']['subdomain']
    assert service['spec']['selector'] == {'job-name': job['metadata']['name']}
    return job['spec']['template']['spec']['containers'][0], job['spec']


def measured(workdir, name):
    lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
    return [(line['step'], line[name]) for line in lines if name in line]


def assert_same_run(one, other):
    for name in ('train_loss', 'validation_loss', 'validation_bleu'):
        np.testing.assert_allclose(measured(one, name), measured(other, name), rtol=1e-5)
    for a, b in zip(parameters(one), parameters(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_kubernetes_job_counts_its_pods_once():
    pod, spec = container()
    assert spec['completions'] == spec['parallelism'] == int({e['name']: e['value'] for e in pod['env']}['PODS'])
    assert spec['completionMode'] == 'Indexed'


@pytest.mark.parametrize('name', SCRIPTS)
def test_shellcheck_finds_nothing_in_the_scripts(name):
    shellcheck = shutil.which('shellcheck', path=f'{Path(sys.executable).parent}:{os.environ["PATH"]}')
    if not shellcheck:
        pytest.skip("needs shellcheck: pip install -e '.[test]'")
    done = subprocess.run([shellcheck, name], cwd=ROOT / 'launch', capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert os.access(ROOT / 'launch' / name, os.X_OK)


def test_the_directives_of_slurm_are_known():
    """The directives and their values have the form that `man sbatch` describes."""
    forms = {'job-name': r'\w+', 'cpus-per-task': r'\d+', 'output': r'.*%j.*', 'open-mode': 'append',
             'signal': r'(B:)?\w+@\d+', 'requeue': None}
    directives = re.findall('^#SBATCH --(.*)$', (ROOT / 'launch' / 'slurm.sh').read_text(), re.MULTILINE)
    assert [directive.partition('=')[0] for directive in directives] == list(forms)
    for directive in directives:
        name, given, value = directive.partition('=')
        assert bool(given) == (forms[name] is not None)
        assert not given or re.fullmatch(forms[name], value), directive


def unknown_fields(document, model, path=''):
    """Yields the fields of a document that its model does not have."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key in model:
                yield from unknown_fields(value, model[key], f'{path}.{key}')
            else:
                yield f'{path}.{key}'
    elif isinstance(document, list):
        for number, (one, other) in enumerate(zip(document, model, strict=True)):
            yield from unknown_fields(one, other, f'{path}[{number}]')


@pytest.mark.parametrize('name', ['kubernetes.yaml', 'jobset.yaml'])
def test_the_launch_files_match_the_schemas_of_kubernetes_and_jobset(name):
    """Kubeflow's models are generated from these schemas: names, types and required fields."""
    models = pytest.importorskip('kubeflow_trainer_api.models', reason="needs pip install -e '.[test]'")
    schemas = {'Service': models.IoK8sApiCoreV1Service, 'Job': models.IoK8sApiBatchV1Job,
               'JobSet': models.JobsetV1alpha2JobSet}

    def check(document):
        model = schemas[document['kind']].model_validate(document)
        assert not list(unknown_fields(document, model.to_dict()))

    def without_quantities(fields):  # the models accept no quantities; ours are all counts of devices
        return {key: value for key, value in fields.items()
                if key != 'limits' or not all(isinstance(count, int) for count in value.values())}

    for document in yaml.safe_load_all((ROOT / 'launch' / name).read_text()):
        document = json.loads(json.dumps(document), object_hook=without_quantities)
        check(document)
        for wrong in (document | {'misspelt': 1}, document | {'spec': document['spec'] | {'misspelt': 1}},
                      document | {'spec': []}):
            with pytest.raises((AssertionError, ValueError)):
                check(wrong)


def jobs():
    jobset = yaml.safe_load((ROOT / 'launch' / 'jobset.yaml').read_text())
    return {'Job': container()[1], 'JobSet': jobset['spec']['replicatedJobs'][0]['template']['spec']}, jobset['spec']


def test_kubernetes_restarts_only_jobs_that_can_resume():
    both, jobset = jobs()
    for job in both.values():
        [rule] = job['podFailurePolicy']['rules']
        pod = job['template']['spec']
        assert rule['action'] == 'FailJob' and rule['onExitCodes']['values'] == [2]
        assert rule['onExitCodes']['containerName'] == pod['containers'][0]['name']
        assert pod['restartPolicy'] == 'Never'  # the policy needs it
        volumes = {volume['name'] for volume in pod['volumes']}
        assert {mount['name'] for mount in pod['containers'][0]['volumeMounts']} <= volumes
    # The Job starts single pods again, and counts for each; the JobSet starts the whole Job again.
    assert both['JobSet']['backoffLimit'] == 0 and jobset['failurePolicy']['maxRestarts'] == 100
    assert jobset['failurePolicy']['rules'][0]['action'] == 'FailJobSet'
    assert 'backoffLimit' not in both['Job'] and both['Job']['backoffLimitPerIndex'] == 100
    assert both['Job']['maxFailedIndexes'] == 0 and both['Job']['completionMode'] == 'Indexed'
    assert both['Job']['successPolicy'] == {'rules': [{'succeededIndexes': '0'}]}


def test_the_slice_has_the_machines_of_its_topology():
    job = jobs()[0]['JobSet']
    pod = job['template']['spec']
    chips = math.prod(map(int, pod['nodeSelector']['cloud.google.com/gke-tpu-topology'].split('x')))
    assert chips == job['completions'] * pod['containers'][0]['resources']['limits']['google.com/tpu']
    assert job['completions'] == job['parallelism']


def test_the_pods_of_a_slice_are_detected_from_variables():
    """By the variables that GKE sets, without a flag."""
    assert detected({'TPU_WORKER_HOSTNAMES': 'a,b,c,d', 'TPU_WORKER_ID': '3'}) == {}


def test_the_command_of_the_jobset_is_one_that_train_py_takes(tmp_path):
    command = jobs()[0]['JobSet']['template']['spec']['containers'][0]['command']
    done = subprocess.run([sys.executable, *command[1:], '--print_config'], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and '--config.cache_dir=/runs/cache' in done.stdout, done.stderr


# Replaces Python. Each call ends with the next status in a file.
FAKE = '''#!/bin/bash
echo "$@" >> "$0.calls"
status=$(sed -n "$(wc -l < "$0.calls")p" "$0.statuses")
[[ $status == wait ]] && { trap 'exit 75' TERM; touch "$0.up"; sleep 600 & wait; }
exit $status
'''


@pytest.fixture
def fake(tmp_path):
    """A function that writes a program that ends with `statuses`, and returns its path."""
    def make(*statuses, name='python', text=FAKE):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
        (tmp_path / f'{name}.statuses').write_text('\n'.join(map(str, statuses)) + '\n')
        return path
    return make


def calls(path):
    return path.with_name(f'{path.name}.calls').read_text().splitlines()


@pytest.mark.parametrize('statuses, status', [
    ([0], 0), ([2], 2), ([75, 75, 0], 0), ([75, 137, 2], 2), ([134, 0], 0), ([1], 1), ([75, 75, 75, 75], 75)])
def test_a_tpu_vm_restarts_a_run_that_can_resume(statuses, status, fake):
    python = fake(*statuses)
    run = python.with_name('a b')
    done = subprocess.run(['launch/tpu_vm.sh', '--config=x', f'--workdir={run}'], cwd=ROOT, capture_output=True,
                          env=os.environ | {'PYTHON': str(python), 'PAUSE': '0', 'RESTARTS': '3'}, timeout=600)
    assert done.returncode == status
    assert calls(python) == [f'train.py --config=x --workdir={run}'] * len(statuses)


@pytest.mark.parametrize('written, age, status', [('2 vm-0', 0, 0), ('2 vm-1', 300, 0), ('2 vm-1', 60, 2)])
def test_a_status_that_another_vm_has_just_written_belongs_to_the_same_start(written, age, status, fake, tmp_path):
    ended = tmp_path / '.a b.ended'
    ended.write_text(f'{written}\n')
    os.utime(ended, times=(time.time() - age,) * 2)
    done = subprocess.run(['launch/tpu_vm.sh', f'--workdir={tmp_path}/a b'], cwd=ROOT, timeout=600,
                          env=os.environ | {'PYTHON': str(fake(75, 0)), 'PAUSE': '0', 'HOSTNAME': 'vm-0'})
    assert done.returncode == status
    assert ended.read_text() == (f'{written}\n' if status else '0 vm-0\n')


@pytest.mark.parametrize('age, status', [(0, 2), (300, 0)])
def test_an_empty_file_stands_for_status_2_of_another_vm(age, status, fake, tmp_path):
    ended = tmp_path / '.run.ended'
    ended.touch()
    os.utime(ended, times=(time.time() - age,) * 2)
    done = subprocess.run(['launch/tpu_vm.sh', f'--workdir={tmp_path}/run'], cwd=ROOT, timeout=600,
                          env=os.environ | {'PYTHON': str(fake(75, 0)), 'PAUSE': '0'})
    assert done.returncode == status


def test_a_tpu_vm_leaves_an_empty_file_on_a_full_disk(fake, tmp_path):
    fake(name='mktemp', text='#!/bin/sh\nln -s /dev/full "$1"\necho "$1"\n')
    subprocess.run(['launch/tpu_vm.sh', f'--workdir={tmp_path}/run'], cwd=ROOT, timeout=600, stderr=subprocess.DEVNULL,
                   env=os.environ | {'PYTHON': str(fake(2)), 'PATH': f'{tmp_path}:{os.environ["PATH"]}'})
    assert (tmp_path / '.run.ended').is_symlink()


def test_a_tpu_vm_expands_the_home_folder_of_a_user(fake):
    """Else the file that ends the scripts of other VMs would be in a folder with the name ~NAME."""
    python, user = fake(0), next(user for user in pwd.getpwall() if os.access(user.pw_dir, os.X_OK))
    ended = python.with_name('.run.ended')
    run = f'~{user.pw_name}/{os.path.relpath(ended.with_name("run"), os.path.realpath(user.pw_dir))}'
    done = subprocess.run(['launch/tpu_vm.sh', f'--workdir={run}'], cwd=ROOT, capture_output=True,
                          env=os.environ | {'PYTHON': str(python), 'PAUSE': '0', 'HOSTNAME': 'vm'}, timeout=600)
    assert done.returncode == 0 and ended.read_text() == '0 vm\n'


@pytest.mark.parametrize('leader, others, status', [
    ([2], [75], 2), ([0], [137], 0), ([0], [0], 0), ([1], [75], 1)])
def test_the_vms_of_a_slice_end_together(leader, others, status, fake, tmp_path):
    """Each VM runs the script. A script whose train.py has lost the leader does not start it again forever."""
    until = 'for _ in {{1..9999}}; do [[ -e {} ]] && break; sleep 0.02; done\nexit $status'.format
    pythons = [fake(*leader, name='leader', text=FAKE.replace('exit $status', until(f'{tmp_path}/other.calls'))),
               fake(*others, 0, name='other', text=FAKE.replace('exit $status', until(f'{tmp_path}/.run.ended')))]
    scripts = [subprocess.Popen(['launch/tpu_vm.sh', f'--workdir={tmp_path}/run'], cwd=ROOT,
                                env=os.environ | {'PYTHON': str(python), 'PAUSE': '0'}) for python in pythons]
    assert [script.wait(300) for script in scripts] == [status, status]
    assert [len(calls(python)) for python in pythons] == [len(leader), len(others)]


@pytest.mark.parametrize('arguments', [['--workdir=~/a run'], ['--workdir', '~/a run']])
def test_the_file_of_the_last_status_is_beside_a_run_in_the_home_folder(arguments, fake, tmp_path):
    subprocess.run(['launch/tpu_vm.sh', *arguments], cwd=ROOT, check=True, timeout=600,
                   env=os.environ | {'PYTHON': str(fake(0)), 'HOME': str(tmp_path), 'HOSTNAME': 'vm'})
    assert (tmp_path / '.a run.ended').read_text() == '0 vm\n'


def test_a_tpu_vm_needs_the_run_directory(fake):
    done = subprocess.run(['launch/tpu_vm.sh', '--config=x'], cwd=ROOT, capture_output=True, text=True, timeout=600,
                          env=os.environ | {'PYTHON': str(fake(0))})
    assert done.returncode == 2 and '--workdir is missing. Add --workdir=RUN' in done.stderr


@pytest.mark.parametrize('statuses, interrupted', [(['wait', 0], 'python'), ([75, 0], 'sleep')])
def test_a_tpu_vm_stops_on_request(statuses, interrupted, fake, tmp_path):
    """During train.py, or during the pause before the next start."""
    python = fake(*statuses)
    fake(name='sleep', text='#!/bin/bash\ntouch "$0.up"\nPATH=${PATH#*:}\nexec sleep "$@"\n')
    script = subprocess.Popen(
        ['launch/tpu_vm.sh', f'--workdir={tmp_path}/run'], cwd=ROOT,
        env=os.environ | {'PYTHON': str(python), 'PAUSE': '600', 'PATH': f'{tmp_path}:{os.environ["PATH"]}'})
    deadline = time.monotonic() + 300
    while not python.with_name(f'{interrupted}.up').exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    script.terminate()
    assert script.wait(300) == STOPPED
    assert len(calls(python)) == 1


@pytest.mark.slow
def test_two_processes_of_two_devices_train_as_one_of_four_and_go_on_elsewhere(data, cache, tmp_path):
    def arguments(name):  # parameters are spread over all devices, hence over the processes
        return train_arguments(tmp_path / name, data, cache, model__dropout=0.0, parallel__data=1, parallel__fsdp=-1)

    alone = subprocess.run([sys.executable, *arguments('alone')], cwd=ROOT, capture_output=True, env=environment(4))
    assert alone.returncode == 0, alone.stderr.decode()

    srun = tmp_path / 'bin' / 'srun'
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/launch/srun.py" "$@"\n')
    srun.chmod(0o755)
    slurm = subprocess.run(
        ['timeout', '900', 'bash', 'launch/slurm.sh', *arguments('slurm')[1:]], cwd=ROOT, capture_output=True,
        env=environment(2, PATH=f'{srun.parent}:{os.environ["PATH"]}', PYTHON=sys.executable,
                        TASKS='2', SLURM_JOB_ID='7', SLURM_CPUS_PER_TASK='8',
                        JAX_COORDINATOR_PORT=str(free_port())))
    stderr = slurm.stderr.decode()
    assert slurm.returncode == 0, stderr
    assert stderr.count('compilations of the train step') == 1  # only the leader logs
    assert '4 x cpu in 2 process(es) as data=1, fsdp=4, tensor=1' in stderr
    assert_same_run(tmp_path / 'alone', tmp_path / 'slurm')

    # The same run resumes from its middle checkpoint with the command of the Kubernetes pods, one device per pod.
    moved = tmp_path / 'kubernetes'
    shutil.copytree(tmp_path / 'slurm', moved)
    for checkpoint in (moved / 'checkpoints').iterdir():
        if checkpoint.name.isdecimal() and int(checkpoint.name) > STEPS // 2:
            shutil.rmtree(checkpoint)
    port, pods = free_port(), []
    command = container()[0]['command']
    ours = [argument for argument in command[2:] if not argument.startswith('--config') and 'workdir' not in argument]
    for index in ('0', '1'):
        filled = [argument.replace('$(PODS)', '2').replace('$(JOB_COMPLETION_INDEX)', index)
                  .replace('allyouneed-0.allyouneed:8476', f'localhost:{port}') for argument in ours]
        pods.append(subprocess.Popen(['timeout', '900', sys.executable, *arguments('kubernetes'), *filled], cwd=ROOT,
                                     stderr=subprocess.PIPE, env=environment(1)))
    for index, pod in enumerate(pods):
        stderr = pod.communicate()[1].decode()
        assert pod.returncode == 0, stderr
        assert (f'resuming from step {STEPS // 2}' in stderr) == (index == 0)
    assert_same_run(tmp_path / 'alone', moved)


def test_the_steps_of_the_best_recipe_go_on_after_a_stop(tmp_path):
    """A fake python writes its arguments to a file, makes the folder of tools.distil, and stops at $STOP."""
    python, commands = tmp_path / 'python', tmp_path / 'commands'
    python.write_text(f"""#!/bin/bash
        echo "$*" >> {commands}
        for each; do [[ $each == --output=* ]] && mkdir -p "${{each#*=}}"; done
        [[ "$*" == *"$STOP"* ]] && exit 75
        exit 0
    """)
    python.chmod(0o755)
    runs = tmp_path / 'my runs'

    def steps(stop):
        """Returns the commands of the script, with short paths, and its exit status."""
        commands.unlink(missing_ok=True)
        done = subprocess.run(['launch/multi30k_best.sh', 'my pairs', runs, '--config.seed=3'], cwd=ROOT, timeout=600,
                              env=os.environ | {'PYTHON': str(python), 'STOP': stop})
        return commands.read_text().replace(f'{runs}/', '').splitlines(), done.returncode

    first, second, translations, student, scores = steps('nowhere')[0]
    assert first == 'train.py --config=configs/multi30k.py --config.data.dir=my pairs --workdir=first --config.seed=3'
    assert second.startswith('train.py --config=configs/multi30k.py --config.data.dir=my pairs --config.model.dropout')
    assert translations.startswith('-m tools.distil --workdir=first,second ') and ' --pairs ' in translations
    assert student == ('train.py --config=configs/multi30k_best.py --workdir=best --config.seed=3 '
                       '--config.data.dir=distilled --config.data.splits.train=train,distilled')
    assert scores == 'decode.py --workdir=best --checkpoint=average:10 --split=test'
    docstring = multi30k_best.__doc__.replace('\\\n', ' ').replace('RUNS/', '').replace('=DIR', '=my pairs')
    documented = re.findall('^    python (.*)', docstring, re.MULTILINE)
    for words, command in zip(documented, (first, second, translations, student, scores), strict=True):
        assert set(words.split()) <= set(command.replace('.partial', '').split())
    assert steps('nowhere') == ([first, second, student, scores], 0)  # the translations exist already
    shutil.rmtree(runs / 'distilled')
    assert steps('dropout=0.2') == ([first, second], 75)
    assert steps('-m tools.distil') == ([first, second, translations], 75)
    assert steps('nowhere') == ([first, second, translations, student, scores], 0)


def test_the_steps_of_the_best_recipe_stop_on_request(fake, tmp_path):
    python = fake('wait', 0)
    script = subprocess.Popen(['launch/multi30k_best.sh', 'pairs', tmp_path], cwd=ROOT,
                              env=os.environ | {'PYTHON': str(python)})
    deadline = time.monotonic() + 300
    while not python.with_name('python.up').exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    script.terminate()
    assert script.wait(300) == STOPPED and len(calls(python)) == 1
