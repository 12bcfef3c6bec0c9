"""Every way to divide the work among eight devices gives the same result. tests/launch tests several processes."""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from benchmarks.modes import ROUNDING, Mode, compare, compiled, modes, ragged_batch, train
from configs import base
from configs.options import AXES
from model.blocks import BlockConfig
from model.build import MODELS, build_model
from model.transformer import Transformer
from run_directory.checkpoints import open_checkpoints
from runtime import processes
from runtime.errors import UserError
from runtime.processes import connect, detected
from tests.bad_inputs.cases import ROOT
from training import mesh
from training.mesh import check_kernel, computing_shardings_of, make_mesh, shardings_of
from training.step import boxed_state

QUICK = [Mode(data=2, fsdp=2, tensor=2)]
SLOW = [mode for mode in modes(8) if mode not in QUICK]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('found', [QUICK, SLOW], ids=['one mode', 'all others'])
def test_every_mode_trains_as_one_device_does(found):
    for mode, loss, parameters in compare(found):
        assert loss < 1e-5 and parameters < ROUNDING, mode
        assert loss + parameters > 0 or mode == Mode(), mode  # another program did run


# Of today's language models; two heads of keys and values are fewer than 'tensor' has devices, and are on all of them.
GROUPED = {'num_key_value_heads': 2, 'attention_bias': 'all', 'feed_forward': 'gated', 'norm_function': 'rms_norm',
           'position': 'rotary', 'window': 4}


@pytest.mark.slow
def test_every_mode_trains_grouped_queries_as_one_device_does():
    # Adam would make gradients that are only rounding large, as those of the bias of keys that are not turned.
    make = functools.partial(compiled, optimizer=optax.sgd(0.1), **GROUPED)
    expected, expected_losses = train(make(Mode()))
    assert expected_losses[-1] < expected_losses[0]
    for mode in [Mode(data=2, tensor=4), *(mode for mode in modes(8) if not mode.dropout)]:
        state, losses = train(make(mode))
        np.testing.assert_allclose(losses, expected_losses, atol=1e-5, err_msg=str(mode))
        jax.tree.map(lambda leaf, wanted, mode=mode: np.testing.assert_allclose(
            leaf, wanted, atol=1e-5, err_msg=str(mode)), state.params, expected.params)


def test_parameters_and_moments_are_sharded_by_the_rules():
    state = jax.eval_shape(lambda: boxed_state(
        Transformer(BlockConfig(d_model=16, d_ff=32, num_heads=8, d_k=4), 1, 32, 32), optax.adam(1e-3),
        ragged_batch(0), 0))
    mesh = make_mesh({'data': -1, 'fsdp': 2, 'tensor': 2})
    shardings = shardings_of(state, mesh)
    layer = shardings.params['encoder']['layers_0']
    assert layer['self_attention']['query']['kernel'].spec == PartitionSpec('fsdp', 'tensor', None)
    assert layer['self_attention']['output']['kernel'].spec == PartitionSpec('tensor', None, 'fsdp')
    assert layer['feed_forward']['inner']['kernel'].spec == PartitionSpec('fsdp', 'tensor')
    assert layer['feed_forward']['outer']['kernel'].spec == PartitionSpec('tensor', 'fsdp')
    assert layer['feed_forward']['outer']['bias'].spec == PartitionSpec()
    assert shardings.params['target_embedding']['embedding'].spec == PartitionSpec('tensor', 'fsdp')
    assert shardings.opt_state[0].mu == shardings.params


@pytest.mark.parametrize('kind', MODELS)
def test_every_matrix_of_every_model_names_its_axes(kind):
    options = base.get_config().model
    options.update(kind=kind, num_layers=1, d_model=16, d_ff=32, num_heads=2, share_embeddings='none',
                   tie_embeddings=False, position='learned', attention_bias='all', feed_forward='gated',
                   output_bias=True, num_key_value_heads=1)
    module = build_model(options, source_vocab_size=40, target_vocab_size=40, vocab_size=40, outputs=5)
    tokens = jnp.ones((1, 4), jnp.int32)
    inputs = {'language_model': {'tokens': tokens}, 'patches': {'inputs': jnp.ones((1, 8, 8, 1))},
              'forecaster': {'inputs': jnp.ones((1, 8, 1)), 'following': jnp.ones((1, 8, 1))}}.get(
        kind, {'source': tokens, 'target': tokens})
    params = jax.eval_shape(lambda: module.init(jax.random.key(0), **inputs))['params']
    known = {name for name, _ in mesh.RULES}
    boxes = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    for path, leaf in boxes:
        where = jax.tree_util.keystr(path)
        if isinstance(leaf, nn.LogicallyPartitioned):
            assert len(leaf.names) == leaf.value.ndim and {*leaf.names} <= known | {None}, where
        else:
            assert leaf.ndim == 1 or 'class_token' in where, where


def test_what_a_mesh_does_not_divide_stays_whole(caplog):
    boxed = nn.LogicallyPartitioned(jax.ShapeDtypeStruct((6, 9), jnp.float32), ('embed', 'mlp'))
    mesh = make_mesh({'data': 1, 'fsdp': 2, 'tensor': 4})
    with caplog.at_level('INFO', 'allyouneed.train'):
        assert shardings_of({'w': boxed}, mesh)['w'].spec == PartitionSpec('fsdp', None)
    assert '9 over tensor=4' in caplog.text


# One vocabulary that no mesh divides, and two heads of keys and values for four or eight devices.
ODD = [Mode(tensor=2), Mode(data=2, tensor=4), Mode(tensor=8), Mode(tensor=3), Mode(data=2, fsdp=2, tensor=2),
       Mode(fsdp=2, tensor=4, accumulate=3)]


@pytest.mark.slow
@pytest.mark.parametrize('size, found', [(37, ODD), (41, ODD[:2])])
def test_a_vocabulary_that_no_mesh_divides(size, found, monkeypatch):
    monkeypatch.setattr('benchmarks.modes.VOCABULARY', size)
    make = functools.partial(compiled, optimizer=optax.sgd(0.1), num_key_value_heads=2)
    expected, expected_losses = train(make(Mode()))
    for mode in found:
        steps = make(mode)
        state, losses = train(steps)
        np.testing.assert_allclose(losses, expected_losses, atol=1e-5, err_msg=str(mode))
        jax.tree.map(lambda leaf, wanted, mode=mode: np.testing.assert_allclose(
            leaf, wanted, atol=1e-5, err_msg=str(mode)), state.params, expected.params)
        params = steps.gather(state.params)
        batch = ragged_batch(9, steps.part)
        np.testing.assert_allclose(steps.eval(params, batch).loss, make(Mode()).eval(
            expected.params, ragged_batch(9)).loss, rtol=1e-5)
        if 16 % (mode.fsdp * mode.tensor) == 0:
            table = state.params['target_embedding']['embedding']
            shares = {shard.data.shape for shard in table.addressable_shards}
            assert shares == {(size, 16 // (mode.fsdp * mode.tensor))}, 'whole on no device'
            assert table.shape == (size, 16)  # as any other mesh opens it


@pytest.mark.slow
def test_heads_of_keys_fewer_than_devices_are_stored_in_shares():
    state = compiled(Mode(data=2, tensor=4), num_key_value_heads=2).init(seed=0)
    for name in ('key', 'value'):
        kernel = state.params['encoder']['layers_0']['self_attention'][name]['kernel']
        assert {math.prod(shard.data.shape) for shard in kernel.addressable_shards} == {kernel.size // 4}


@pytest.mark.parametrize('mode, devices', [(Mode(data=8), 8), (Mode(data=8, mode='pmap'), 1)], ids=str)
def test_the_tiles_of_the_loss_are_for_the_devices_that_share_the_rows_of_a_program(mode, devices, monkeypatch):
    shared = []
    monkeypatch.setattr('training.compiled.forward', lambda module, devices: shared.append(devices))
    compiled(mode)
    assert shared == [devices]


def test_the_padding_of_a_vocabulary_is_in_the_program_only():
    boxed = {'table': nn.LogicallyPartitioned(jax.ShapeDtypeStruct((37, 16), jnp.float32), ('vocab', 'embed')),
             'keys': nn.LogicallyPartitioned(jax.ShapeDtypeStruct((16, 2, 8), jnp.float32), ('embed', 'heads', 'kv'))}
    mesh = make_mesh({'data': 1, 'fsdp': 2, 'tensor': 4})
    stored = shardings_of(boxed, mesh)
    assert stored['table'].spec == PartitionSpec(None, ('fsdp', 'tensor'))
    assert stored['keys'].spec == PartitionSpec(('fsdp', 'tensor'), None, None)
    computing = computing_shardings_of(boxed, stored, mesh)
    assert computing['table'].spec == PartitionSpec('tensor', None)
    assert computing['keys'].spec == PartitionSpec(None, None, None)


@pytest.mark.slow
def test_a_fresh_state_is_the_same_on_every_mesh_and_no_device_has_it_all():
    one, spread = compiled(Mode()).init(seed=0), compiled(Mode(fsdp=4, tensor=2)).init(seed=0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, spread)
    table = spread.params['target_embedding']['embedding']
    assert {shard.data.shape for shard in table.addressable_shards} == {(16, 4)}  # of 32 x 16


LAYOUTS = [Mode(), Mode(data=2, fsdp=2, tensor=2), Mode(data=8, mode='pmap'), Mode(fsdp=8)]


@pytest.mark.slow
def test_a_checkpoint_of_any_layout_restores_on_any_other(tmp_path):
    states = {layout: compiled(layout).init(seed=0) for layout in LAYOUTS}
    for number, (one, other) in enumerate(itertools.permutations(LAYOUTS, 2)):
        saved = jax.tree.map(lambda leaf: leaf + 1, states[one])
        with open_checkpoints(tmp_path / str(number)) as checkpoints:
            checkpoints.save(5, saved, {})
        with open_checkpoints(tmp_path / str(number)) as checkpoints:
            restored, _ = checkpoints.restore(states[other])
            alone, _ = checkpoints.parameters('latest')
        for leaf, wanted, there in zip(*map(jax.tree.leaves, (restored, saved, states[other])), strict=True):
            np.testing.assert_array_equal(leaf, wanted)
            assert leaf.sharding == there.sharding
        for leaf, wanted in zip(*map(jax.tree.leaves, (alone, saved.params)), strict=True):
            np.testing.assert_array_equal(leaf, wanted)
            assert leaf.devices() == {jax.devices()[0]}


@pytest.mark.slow
def test_changing_the_mesh_in_mid_run_changes_nothing_but_rounding():
    expected, _ = train(compiled(Mode()))
    state, _ = train(compiled(Mode(data=8)), 2)
    for step, mode in ((2, Mode(fsdp=2)), (3, Mode(data=4, mode='pmap'))):
        steps = compiled(mode)
        there = steps.init(seed=0)
        state = jax.tree.map(lambda leaf, like: jax.device_put(np.asarray(leaf), like.sharding), state, there)
        state, _ = steps.train(state, ragged_batch(step))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), expected, state)


@pytest.mark.slow
def test_a_language_model_trained_by_pmap_on_one_device_writes_samples(cache, tmp_path):
    """Samples have random keys, and JAX refuses to combine keys and parameters of two meshes."""
    options = {'cache_dir': cache, 'parallel.mode': 'pmap', 'data.file': ROOT / 'LICENSE', 'data.context': 16,
               'model.num_layers': 1, 'model.d_model': 8, 'model.d_ff': 8, 'model.num_heads': 2, 'train.steps': 2,
               'optimizer.warmup': 1, 'decode.extra_length': 4}
    ended = subprocess.run([
        sys.executable, 'train.py', '--config=configs/shakespeare_char.py', f'--workdir={tmp_path / "run"}',
        *(f'--config.{name}={value}' for name, value in options.items())], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, 'XLA_FLAGS': ''}, check=False)
    assert ended.returncode == 0 and 'validation_loss' in ended.stderr, ended.stderr[-2000:]


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A device of another machine, with the attributes that JAX reads."""
    id: int
    device_kind: str = 'NVIDIA H100'
    platform: str = 'gpu'
    process_index: int = 0
    slice_index: int = 0
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


@pytest.mark.parametrize('sizes, machines, within', [
    ((-1, 1, 1), 2, (4, 1, 1)), ((2, 4, 1), 2, (1, 4, 1)), ((2, 2, 2), 2, (1, 2, 2)), ((1, -1, 1), 2, (1, 4, 1)),
    ((1, 1, 8), 2, (1, 1, 4)), ((2, 2, 8), 4, (1, 1, 8)), ((2, 16, 1), 4, (1, 8, 1)), ((3, 2, 2), 6, (1, 1, 2))])
def test_the_first_axes_connect_machines_with_gpus(sizes, machines, within):
    """`within` is the block of devices of each machine. For JAX, each machine with GPUs is a slice."""
    count = machines * math.prod(within)
    devices = [FakeDevice(number, slice_index=number // math.prod(within)) for number in range(count)]
    grid = make_mesh(dict(zip(AXES, sizes, strict=True)), devices).devices
    owner = np.vectorize(lambda device: device.slice_index)(grid)
    for place in itertools.product(*(range(0, size, step) for size, step in zip(grid.shape, within, strict=True))):
        block = owner[tuple(slice(begin, begin + step) for begin, step in zip(place, within, strict=True))]
        assert len({*block.flat}) == 1
    assert len({device.id for device in grid.flat}) == count


@pytest.mark.parametrize('sizes, slice_of', [((3, 4, 1), lambda number: number // 8),  # 8 devices and 4 devices
                                             ((9, 1, 1), lambda number: min(number // 4, 1))])
def test_machines_of_different_sizes_follow_one_another(sizes, slice_of):
    devices = [FakeDevice(number, slice_index=slice_of(number)) for number in range(math.prod(sizes))]
    mesh = make_mesh(dict(zip(AXES, sizes, strict=True)), devices[::-1])
    assert [device.id for device in mesh.devices.flat] == [*range(math.prod(sizes))]


@pytest.mark.parametrize('backend, dtype, groups, tensor, refused', [
    ('gpu', 'bfloat16', 1, 2, True), ('gpu', 'bfloat16', 2, 2, False), ('gpu', 'bfloat16', 0, 8, False),
    ('gpu', 'bfloat16', 1, 1, False), ('gpu', 'float32', 1, 2, False), ('tpu', 'bfloat16', 1, 2, False)])
def test_cudnn_gets_no_keys_that_the_mesh_does_not_divide(backend, dtype, groups, tensor, refused, monkeypatch):
    model = base.get_config().model
    model.update(attention_kernel='fused', dtype=dtype, num_heads=4, num_key_value_heads=groups)
    fitting = make_mesh({'data': -1, 'fsdp': 1, 'tensor': tensor})
    monkeypatch.setattr(jax, 'default_backend', lambda: backend)
    with pytest.raises(UserError, match='parallel.tensor=2 must divide') if refused else contextlib.nullcontext():
        check_kernel(model, fitting)


def test_pmap_has_the_devices_of_a_process_side_by_side():
    """JAX arranges the 16 chips of four TPU machines in a ring, and then its pmap refuses the mesh."""
    chips = [(x, y, 0) for y in range(4) for x in range(4)]
    devices = [FakeDevice(number, 'TPU v5 lite', 'tpu', process_index=x // 2 + 2 * (y // 2), coords=(x, y, z))
               for number, (x, y, z) in enumerate(chips)]
    mesh = make_mesh({'mode': 'pmap', 'data': -1, 'fsdp': 1, 'tensor': 1}, devices)
    assert [device.process_index for device in mesh.devices.flat] == sorted(4 * [0, 1, 2, 3])
    ring = make_mesh({'mode': 'jit', 'data': -1, 'fsdp': 1, 'tensor': 1}, devices)
    assert [device.id for device in ring.devices.flat] != [device.id for device in mesh.devices.flat]


@pytest.mark.parametrize('sizes, message', [
    ({'data': 3, 'fsdp': 1, 'tensor': 1}, r'tensor=1 must be the number of devices, but there are 8 devices \(cpu\)'),
    ({'data': -1, 'fsdp': 3, 'tensor': 1},
     'data=-1, fsdp=3, tensor=1 must be the number .* Set fsdp and tensor to sizes whose product divides 8$'),
    ({'data': -1, 'fsdp': 4, 'tensor': 4}, 'must be the number of devices'),
])
def test_a_mesh_that_does_not_fit_the_devices_is_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        make_mesh(sizes)


SLURM = {'SLURM_JOB_ID': '7', 'SLURM_STEP_NODELIST': 'node[01-02]', 'SLURM_NTASKS': '8', 'SLURM_PROCID': '0',
         'SLURM_LOCALID': '0', 'SLURM_STEP_NUM_NODES': '2', 'SLURM_STEP_NUM_TASKS': '8'}


@pytest.mark.parametrize('environment, expected', [
    ({}, None),
    ({'SLURM_JOB_ID': '7', 'SLURM_NTASKS': '8', 'SLURM_PROCID': '0'}, None),  # an sbatch script before its srun, salloc
    (SLURM | {'SLURM_STEP_NUM_TASKS': '1', 'SLURM_STEP_NUM_NODES': '1'}, None),  # srun --ntasks=1 --pty in a larger one
    (SLURM | {'CUDA_VISIBLE_DEVICES': '0,1,2,3'}, {'cluster_detection_method': 'slurm', 'num_processes': 8}),
    (SLURM | {'CUDA_VISIBLE_DEVICES': '0'},
     {'cluster_detection_method': 'slurm', 'num_processes': 8, 'local_device_ids': [0]}),
    (SLURM | {'CUDA_VISIBLE_DEVICES': '0,1,2,3', 'SLURM_STEP_NUM_TASKS': '2'},
     {'cluster_detection_method': 'slurm', 'num_processes': 2, 'local_device_ids': [0, 1, 2, 3]}),
    ({'TPU_WORKER_HOSTNAMES': 'localhost'}, None),
    ({'TPU_WORKER_HOSTNAMES': 'a,b', 'TPU_WORKER_ID': '0'}, {}),
    ({'KUBERNETES_SERVICE_HOST': '10.0.0.1'}, None),  # a notebook in a pod
    ({'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '0'}, {}),
    ({'JOB_COMPLETION_INDEX': '0'}, None),  # JAX does not detect Kubernetes without the address of its server
])
def test_a_job_is_distinguished_from_a_single_process(environment, expected, monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: name == 'kubernetes')  # no libtpu
    assert detected(environment) == expected


@pytest.mark.parametrize('arguments, message', [
    (('host:1234', 2, None), '--process_id is missing'),
    ((None, 2, 0), '--coordinator_address is missing'),
    (('host', 2, 0), 'must be HOST:PORT'),
    (('host:port', 2, 0), 'must be HOST:PORT'),
    (('2001:db8::1:1234', 2, 0), r'Write an IPv6 address as \[ADDRESS\]:PORT'),
    (('host:1234', 2, 2), '--process_id=2 must be from 0 to 1'),
])
def test_wrong_flags_are_explained(arguments, message):
    with pytest.raises(UserError, match=message):
        connect(*arguments)


def test_an_ipv6_address_has_brackets_only_for_jax(monkeypatch):
    def initialize(coordinator_address, **_):
        raise UserError(coordinator_address)  # the test does not connect to other processes

    met = []
    monkeypatch.setattr(processes, '_explain_abort', lambda: None)  # it would install a signal handler
    monkeypatch.setattr(processes, 'meet', lambda host, port, *_: met.append((host, port)))
    monkeypatch.setattr(jax.distributed, 'initialize', initialize)
    with pytest.raises(UserError, match=r'^\[2001:db8::1\]:1234$'):
        connect('[2001:db8::1]:1234', 2, 1)
    assert met == [('2001:db8::1', 1234)]
