"""Devices that do not divide the rows of a batch train and search as one device does."""

import dataclasses
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import inference
from benchmarks.modes import ROUNDING, Mode, compare, compiled
from inference.options import SearchOptions
from inference.translate import Translator
from input_pipeline.tokenizer import ByteTokenizer
from model.blocks import BlockConfig
from model.transformer import Transformer
from tests.tiny_run import outcome, start, tiny_config

# 16 rows: 3 devices need 18, and 5 devices with 3 parts need 30.
UNEVEN = [Mode(data=5, accumulate=3, dropout=0.2), Mode(data=3, fsdp=2), Mode(data=3, mode='pmap'),
          Mode(fsdp=6, dropout=0.2), Mode(accumulate=3), Mode(data=5, accumulate=2, mode='pmap'),
          Mode(data=3, tensor=2, dropout=0.2)]


@pytest.mark.slow
def test_devices_that_do_not_divide_the_rows_train_as_one_does():
    """Training, its dropout and an evaluation."""
    for mode, loss, parameters in compare(UNEVEN):
        assert loss < 1e-5 and parameters < ROUNDING, mode


@pytest.mark.slow
@pytest.mark.parametrize('devices', [12, 24])
def test_more_devices_than_rows_of_a_batch(devices):
    script = ('from benchmarks.modes import Mode, compare\n'
              f'modes = [Mode(data={devices}, dropout=0.2), Mode(fsdp={devices}, accumulate=2)]\n'
              'for found in compare(modes): print(*found)')
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True,
                          env=os.environ | {'JAX_NUM_CPU_DEVICES': str(devices)})
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert max(map(float, line.split()[-2:])) < 1e-5, line
    assert done.stdout.count('\n') == 2


@pytest.mark.slow
def test_train_py_takes_any_rows_on_any_devices(tmp_path):
    """21 rows in 3 parts over 8 devices; with dropout, crops and an evaluation."""
    found = []
    for axis in ('data', 'tensor'):  # 'tensor' leaves the rows on each device; these matrices are too small for it
        config = tiny_config(tmp_path / 'cache', batch__rows=21, train__accumulate=3, train__steps=4,
                             **{f'parallel__{axis}': 8, 'parallel__data': 8 if axis == 'data' else 1})
        start(tmp_path / axis, config)
        params = inference.load(tmp_path / axis, 'latest').model.params
        found.append((params, outcome(tmp_path / axis)[1]))
    (params, lines), (expected, expected_lines) = found
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), params, expected)
    for line, wanted in zip(lines, expected_lines, strict=True):
        assert line == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
def test_a_search_fills_its_rows_up_too():
    """5 sentences over 3 devices find what they find on one."""
    vocabulary = len(ByteTokenizer())
    module = Transformer(BlockConfig(d_model=16, d_ff=32, num_heads=2), 1, vocabulary, vocabulary)
    tokens = jnp.ones((1, 4), jnp.int32)
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), tokens, tokens))['params']
    alone, shared = (Translator(module, params, dict.fromkeys(('source', 'target'), ByteTokenizer()), 50)
                     for _ in range(2))
    steps = compiled(Mode(data=3))
    shared.params = jax.device_put(params, NamedSharding(steps.mesh, PartitionSpec()))
    shared.distribute = steps.distribute
    lines, options = ['one', 'two', 'three', 'four', 'and a longer one'], SearchOptions(batch_size=5, extra_length=3)
    for one, other in zip(*(model.translate(lines, options) for model in (alone, shared)), strict=True):
        assert one.hypotheses[0].tokens == other.hypotheses[0].tokens
        assert one.hypotheses[0].score == pytest.approx(other.hypotheses[0].score, abs=1e-4)
    options = dataclasses.replace(options, avoid=['a', 'one'])
    for one, other in zip(*(model.translate(lines, options, prefixes=['', 'b', 'on', 'o ', ''])
                            for model in (alone, shared)), strict=True):
        assert one.hypotheses[0].tokens == other.hypotheses[0].tokens
    assert {shard.data.shape for shard in steps.distribute(np.ones((5, 2))).addressable_shards} == {(2, 2)}
