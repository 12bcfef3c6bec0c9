"""The launch files, as far as they can be tried without a cluster: their commands, as two processes of this machine."""

import json
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
import yaml

from tests.scripts import ROOT, STEPS, cache, data, parameters, train_arguments  # noqa: F401 (fixtures)

# What Slurm's srun does for two tasks on one node: start the command twice, and tell each which one it is.
SRUN = '''#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_JOB_ID=1 SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=1 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
wait $first && wait $second
'''


def environment(devices, **more):
    return os.environ | {'JAX_NUM_CPU_DEVICES': str(devices), **more}


def free_port():
    with socket.socket() as probe:
        probe.bind(('localhost', 0))
        return probe.getsockname()[1]


def container():
    """That of the Job in launch/kubernetes.yaml, and the Job's spec."""
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


@pytest.mark.parametrize('path', ['launch/slurm.sh'])
def test_the_slurm_script_is_well_formed(path):
    assert subprocess.run(['bash', '-n', path], cwd=ROOT).returncode == 0
    assert os.access(ROOT / path, os.X_OK)


@pytest.mark.slow
def test_two_processes_of_two_devices_train_as_one_of_four_and_go_on_elsewhere(data, cache, tmp_path):  # noqa: F811
    def arguments(name):  # parameters are spread over all devices, hence over the processes
        return train_arguments(tmp_path / name, data, cache, model__dropout=0.0, parallel__data=1, parallel__fsdp=-1)

    alone = subprocess.run([sys.executable, *arguments('alone')], cwd=ROOT, capture_output=True, env=environment(4))
    assert alone.returncode == 0, alone.stderr.decode()

    srun = tmp_path / 'bin' / 'srun'
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    slurm = subprocess.run(
        ['timeout', '900', 'bash', 'launch/slurm.sh', *arguments('slurm')[1:]], cwd=ROOT, capture_output=True,
        env=environment(2, PATH=f'{srun.parent}:{os.environ["PATH"]}', PYTHON=sys.executable,
                        JAX_COORDINATOR_PORT=str(free_port())))
    said = slurm.stderr.decode()
    assert slurm.returncode == 0, said
    assert said.count('compilations of the train step') == 1  # one of them tells
    assert '4 x cpu in 2 process(es) as data=1, fsdp=4, tensor=1' in said
    assert_same_run(tmp_path / 'alone', tmp_path / 'slurm')

    # The same run from its checkpoint in the middle on, by the command of the Kubernetes pods, on a device each.
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
        said = pod.communicate()[1].decode()
        assert pod.returncode == 0, said
        assert (f'resuming from step {STEPS // 2}' in said) == (index == 0)
    assert_same_run(tmp_path / 'alone', moved)
