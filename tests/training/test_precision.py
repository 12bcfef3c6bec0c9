"""config.train.matmul_precision=auto, with given rates of products."""

import jax
import jax.numpy as jnp
import pytest

from configs import base, demo, multi30k
from configs.versions import config_text
from kernels import rates
from run_directory.workdir import RunDirectory
from runtime.errors import UserError
from tests.tiny_run import tiny_config
from training import loop, precision


@pytest.mark.parametrize('single, half, expected', [(170, 400, 'bfloat16'), (250, 150, 'default'), (9, 9, 'default')])
@pytest.mark.parametrize('backend', ['cpu', 'gpu'])
def test_auto_is_the_faster_precision_of_a_cpu(single, half, expected, backend, monkeypatch, caplog):
    caplog.set_level('INFO', logger='allyouneed')
    monkeypatch.setattr(jax, 'default_backend', lambda: backend)
    measured = []
    monkeypatch.setattr(rates, 'product_rate', lambda sizes, dtype: (
        measured.append(sizes), {jnp.float32: single, jnp.bfloat16: half}[dtype])[1])
    config = multi30k.get_config()
    precision.resolve_precision(config, tokens=1536)
    assert config.train.matmul_precision == (expected if backend == 'cpu' else 'default')
    if backend == 'cpu':
        assert measured == [[(1536, 256, 512), (1536, 512, 256), (256, 1536, 512)]] * 2
        assert f'{single} GFLOP/s in float32 and at {half} GFLOP/s in bfloat16. This run uses {expected}' in caplog.text
    measured.clear()
    precision.resolve_precision(config, tokens=1536)
    assert not measured  # only auto is measured


def test_the_measured_sizes_are_limited():
    config = base.get_config()
    assert precision.product_sizes(config, 25_000)[0] == (precision.ROWS, 512, 2048)


@pytest.mark.parametrize('asked', [[], ['train.matmul_precision']])
@pytest.mark.parametrize('saved', ['bfloat16', 'default'])
def test_a_resumed_run_keeps_its_precision(saved, asked, tmp_path, caplog):
    caplog.set_level('INFO', logger='allyouneed')
    resume_with_auto(saved, tmp_path, asked)
    message = f"config.train.matmul_precision={saved!r} is used instead of 'auto', because a run keeps the precision"
    assert f'{message} with which it began' in caplog.messages


def test_a_resumed_run_with_a_precision_that_auto_cannot_choose_refuses_auto_only_if_the_user_set_it(tmp_path):
    resume_with_auto('float32', tmp_path, [])
    with pytest.raises(UserError, match="train.matmul_precision: 'float32' in the run, 'auto' now"):
        resume_with_auto('float32', tmp_path, ['train.matmul_precision'])


def resume_with_auto(saved, path, asked):
    config = demo.get_config()
    config.train.matmul_precision = saved
    (path / 'config.json').write_text(config_text(config))
    config.train.matmul_precision = 'auto'
    with RunDirectory(str(path), config, asked=asked):
        assert config.train.matmul_precision == saved


@pytest.mark.parametrize('chosen', ['bfloat16', 'default'])
def test_the_train_step_has_the_precision_and_the_parts_of_the_config(chosen, cache, tmp_path):
    config = tiny_config(cache, train__matmul_precision=chosen, train__accumulate=3)
    with RunDirectory(str(tmp_path / 'run'), config) as directory:
        parts = loop.build(config, directory)
        program = parts.compiled.lower(parts.plan.batch(0)).as_text()
    assert ('bf16' in program) == (chosen == 'bfloat16')
    assert parts.compiled.part.multiple == 3 * jax.device_count()
