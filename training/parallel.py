"""Many devices and many processes: who reads what, what lies where, and the steps compiled for it.

The devices form a mesh of three axes. A batch's rows are spread over 'data' and 'fsdp'; parameters and optimizer state
over 'fsdp' (whose devices each keep a share, and gather the parameters for the length of a step: ZeRO, Rajbhandari et
al. 2020, arXiv:1910.02054) and 'tensor' (whose devices each compute a share of every matrix product: Shoeybi et al. 2019,
arXiv:1909.08053). XLA puts in the communication. What is computed is the same on every mesh but for rounding.
"""

import contextlib
import functools
import glob
import importlib.util
import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key
from ml_collections import ConfigDict
from orbax.checkpoint import multihost

from errors import UserError
from input_pipeline.batches import Batch, Part
from training.loss import Sums
from training.objective import Objective, forward
from training.step import TrainState, boxed_state, eval_step, train_step
from training.summary import matmul_flops

MODES = ('jit', 'pmap')
PATIENCE = 300  # seconds that processes wait for each other at the start; JAX's own
AXES = ('data', 'fsdp', 'tensor')
ROWS = PartitionSpec(('data', 'fsdp'))  # of a batch
RULES = (  # the names that modules give to the axes of their matrices -> the axis of the mesh; earlier ones first
    ('vocab', 'tensor'),     # pieces of a vocabulary, classes
    ('heads', 'tensor'),     # attention heads
    ('mlp', 'tensor'),       # width inside a feed-forward or alignment network
    ('gates', 'tensor'),     # what a recurrent cell computes from its input and its state
    ('embed', 'fsdp'),       # width of the stream between blocks
    ('state', 'fsdp'),       # width of a recurrent state
    ('kv', None),            # width of a head
    ('position', None),      # rows of a table of positions
    ('patch', None),         # numbers in a patch
)

log = logging.getLogger('allyouneed.train')


def connect(address: str | None = None, count: int | None = None, number: int | None = None) -> None:
    """Joins this process to the others of its job, if there are any. Call it before anything touches a device.

    Given nothing, a job is found where `srun` started several tasks (Slurm), on TPU pods and GKE, and in an indexed
    Kubernetes Job if the package `kubernetes` is installed (jax[k8s]), by JAX's own detection. Any other process,
    one inside of an interactive allocation included, is on its own.

    Args:
      address: HOST:PORT of process 0, where all others can reach it.
      count: processes in all.
      number: this one's, from 0.

    Raises:
      UserError: if some but not all are given, one is impossible, or the others cannot be reached.
    """
    given = {'--coordinator_address': address, '--num_processes': count, '--process_id': number}
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == len(given):
        options = detected(os.environ)
        if options is None:
            return check_devices()
    elif missing:
        raise UserError(f'{", ".join(missing)} is missing: of {", ".join(given)} give all, to each process its own id, '
                        'or none')
    else:
        host, _, port = address.rpartition(':')
        if not host or not re.fullmatch(r'[0-9]{1,5}', port) or not 0 < int(port) < 65536:
            raise UserError(f'--coordinator_address={address} must be HOST:PORT of process 0')
        if not 0 <= number < count:
            raise UserError(f'--process_id={number} must be from 0 to {count - 1}, as --num_processes={count}')
        options = {'coordinator_address': address, 'num_processes': count, 'process_id': number,
                   'cluster_detection_method': 'deactivate'}
        log.info('process %d of %d: all meet at %s', number, count, address)
        if number:
            wait_for(host, int(port))
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        raise UserError(f'the processes of this job cannot find each other: {str(error).splitlines()[0]}') from None
    check_devices()
    if not is_leader():
        logging.getLogger('allyouneed').setLevel(logging.ERROR)  # one of them tells what happens


def check_devices() -> None:
    """Raises UserError if JAX finds no device of the kind that it is told to use."""
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # the first without a word, of a platform's plugin that is not there
        reason = str(error).partition('\n')[0] or 'JAX cannot use it here'
        raise UserError(f'JAX_PLATFORMS={os.environ.get("JAX_PLATFORMS", "")}: {reason}. Set it to cpu, '
                        'or leave it out') from None


def wait_for(host: str, port: int) -> None:
    """Returns when somebody listens there: JAX would end this process without a word that helps.

    Raises:
      UserError: if nobody does for so many seconds as PATIENCE says.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f'--coordinator_address={host}:{port}: process 0 does not answer there ({error}). Start '
                                'it, at an address that it has and the others can reach') from None
            time.sleep(0.5)


def detected(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Arguments of jax.distributed.initialize for the job that this process belongs to, or None if it is alone.

    JAX could be asked at once, but counts the tasks of an allocation, not those that were started, and in a pod of
    Kubernetes it insists on a Job.
    """
    tasks = int(environment.get('SLURM_STEP_NUM_TASKS', 0))
    if tasks:
        # JAX gives each task the one GPU of its number on the node: wrong for a task that is alone on its node and
        # has all of them, and for one that Slurm already gave its own.
        visible = environment.get('CUDA_VISIBLE_DEVICES', '')
        alone = tasks == int(environment.get('SLURM_STEP_NUM_NODES', 0))
        all_mine = visible and (alone or ',' not in visible)
        devices = {'local_device_ids': list(range(visible.count(',') + 1))} if all_mine else {}
        return {'cluster_detection_method': 'slurm', 'num_processes': tasks, **devices} if tasks > 1 else None
    hosts = environment.get('TPU_PROCESS_ADDRESSES', environment.get('TPU_WORKER_HOSTNAMES', ''))
    if ',' in hosts or int(environment.get('MEGASCALE_NUM_SLICES', 1)) > 1:
        return {}
    if 'JOB_COMPLETION_INDEX' in environment and importlib.util.find_spec('kubernetes'):
        return {'cluster_detection_method': 'k8s'}
    on_tpu_machine = importlib.util.find_spec('libtpu') and (glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*'))
    if on_tpu_machine and not hosts and 'TPU_SKIP_MDS_QUERY' not in environment:
        return {'cluster_detection_method': 'gcetpu'}  # asks the machine's metadata for the others
    return None


def is_leader() -> bool:
    """Whether this process is the one that writes metrics and logs."""
    return jax.process_index() == 0


def anywhere(flag: bool, step: int) -> bool:
    """Whether `flag` holds in any process. Several compare theirs after every tenth step, and in between agree on no."""
    if jax.process_count() == 1:
        return flag
    return step % 10 == 0 and bool(process_allgather(np.array(flag)).any())


@contextlib.contextmanager
def leader_first(what: str) -> Iterator[None]:
    """The body runs in the leader, and when it is through with it, or has failed, in all others.

    What the leader puts into a shared cache is thus made once.
    """
    def wait():
        if jax.process_count() > 1:
            multihost.sync_global_processes(what, processes=set(range(jax.process_count())), timeout=24 * 3600)

    if not is_leader():
        wait()
    try:
        yield
    finally:
        if is_leader():
            wait()


def make_mesh(config: ConfigDict | Mapping[str, Any], devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of `config.parallel` on all devices of all processes, or on those given.

    Raises:
      UserError: if the sizes do not multiply to the number of devices.
    """
    devices = devices or jax.devices()
    sizes = [config[axis] for axis in AXES]
    known = math.prod(size for size in sizes if size != -1)
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        asked = ', '.join(f'{axis}={config[axis]}' for axis in AXES)
        raise UserError(f'config.parallel: {asked} do not multiply to the {len(devices)} devices that there are '
                        f'({devices[0].device_kind} x {len(devices)}): -1 fills up what the others leave')
    # The trap here: Explicit axes, jax's default, are nothing that nn.Embed accepts.
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def shardings_of(boxed: Any, mesh: Mesh) -> Any:
    """Where each leaf of a state lies, by RULES; `boxed` has its shapes, in boxes that hold the names of the axes.

    What has no names, such as a bias, is on every device. So is an axis that the mesh does not divide; it is logged.
    """
    whole = set()

    def fitting(shape, sharding):
        spec = []
        for size, axis in zip(shape.shape, sharding.spec):
            if axis and size % mesh.shape[axis]:
                whole.add(f'{size} over {axis}={mesh.shape[axis]}')
                axis = None
            spec.append(axis)
        return NamedSharding(mesh, PartitionSpec(*spec))

    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)
    fitted = jax.tree.map(fitting, nn.unbox(boxed), shardings)
    if whole:
        log.info('not divided, hence whole on each device: axes of %s', ', '.join(sorted(whole)))
    return fitted


def check_memory(state: Any, devices: list[jax.Device]) -> None:
    """Raises UserError if a state of these shapes, alone, is larger than the memory of all devices."""
    mine = [device for device in devices if device in jax.local_devices()]  # the only ones that tell
    if not mine:
        return
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    limits = [(device.memory_stats() or {}).get('bytes_limit') for device in mine]
    # Devices that do not tell are CPUs, and share what the machine has. Other processes' have as much each.
    here = sum(limits) if None not in limits else os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    there = here * len(devices) / len(mine)
    if needed > there:
        raise UserError(f'the parameters of this model and the state of its optimizer take {needed / 2 ** 30:,.0f} GB, '
                        f'but there are {there / 2 ** 30:,.0f} GB of memory: lower config.model.d_model, num_layers, d_ff or '
                        'data.tokenizer.vocab_size')


class Compiled:
    """Fresh state, train step and eval step for a mesh, compiled in one of two ways.

    Any number of devices shares a batch of any number of rows: `part` says how many rows fill it up.

    'jit': one program for the mesh, cut up by XLA. Dropout does not depend on how it is cut.
    'pmap': the program of one device, run on each with its rows and its own dropout masks (the device's number is
      folded into the key); data parallelism only.

    Attributes:
      mesh: the devices.
      shapes: of a state, as jax.ShapeDtypeStructs with the shardings that it has on the mesh.
      part: the rows of every batch that this process must read, those that fill it up included. Processes have rows
        in common only where a 'tensor' axis joins them.
    """

    def __init__(self, module: nn.Module, optimizer: optax.GradientTransformation, example: Batch, *,
                 parallel: ConfigDict | Mapping[str, Any], objective: Objective, dropout_key: Key[Array, ''],
                 accumulate: int = 1, devices: list[jax.Device] | None = None):
        """`example` is any batch, of which only the shapes count.

        Raises:
          UserError: if the mesh does not fit the devices, or the state is larger than the memory of all of them.
        """
        self.mesh = mesh = make_mesh(parallel, devices)
        shares = mesh.shape['data'] * mesh.shape['fsdp']
        self._everywhere, self._by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, ROWS)
        self._shares, mine = shares, self._by_rows.addressable_devices_indices_map((shares,)).values()
        first, last = zip(*(index[0].indices(shares)[:2] for index in mine), strict=True)
        self.part = Part(min(first), max(last), shares, multiple=shares * accumulate)

        def without_fsdp(sharding):
            return NamedSharding(mesh, PartitionSpec(*(None if axis == 'fsdp' else axis for axis in sharding.spec)))

        self._fresh = functools.partial(boxed_state, module, optimizer, example)
        boxed = jax.eval_shape(lambda: self._fresh(seed=0))
        check_memory(boxed, list(mesh.devices.flat))
        self._shardings = shardings_of(boxed, mesh)
        self.shapes = jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
                                   nn.unbox(boxed), self._shardings)
        self._gathered = jax.tree.map(without_fsdp, self._shardings.params)
        # One program: several at once, each communicating, can wait for each other without end.
        self._gather = jax.jit(lambda params: params, out_shardings=self._gathered)
        apply = forward(module)
        step = functools.partial(train_step, objective=objective, apply=apply, optimizer=optimizer,
                                 dropout_key=dropout_key, accumulate=accumulate)
        evaluation = functools.partial(eval_step, objective=objective, apply=apply)
        self._step = step
        self._pmap = parallel['mode'] == 'pmap'
        if self._pmap:
            # The trap here: without these axes, the state is to be replicated and unreplicated by hand.
            across = functools.partial(jax.pmap, axis_name='data', in_axes=(None, 0), out_axes=None, devices=devices)
            self._train = across(functools.partial(step, axis_name='data'), donate_argnums=0)
            self._eval = across(functools.partial(evaluation, axis_name='data'))
        else:
            # Left to itself, XLA spreads the stream's width as the parameters' is, and has each device compute all rows.
            place = functools.partial(jax.lax.with_sharding_constraint, shardings=self._gathered)
            self._train = jax.jit(functools.partial(step, place=place), in_shardings=(self._shardings, self._by_rows),
                                  out_shardings=(self._shardings, self._everywhere), donate_argnums=0)
            self._eval = jax.jit(evaluation, in_shardings=(self._gathered, self._by_rows),
                                 out_shardings=self._everywhere)

    def describe(self) -> str:
        """A line for the log."""
        devices = self.mesh.devices.flat
        axes = ', '.join(f'{axis}={size}' for axis, size in self.mesh.shape.items())
        mesh = f' as {axes}, by {"pmap" if self._pmap else "jit"}' if len(devices) > 1 else ''
        filled = f', batches filled up to multiples of {self.part.multiple} rows' if self.part.multiple > 1 else ''
        return f'{len(devices)} x {devices[0].device_kind} in {jax.process_count()} process(es){mesh}{filled}'

    def flops(self, batch: Batch) -> int:
        """Floating-point operations of the matrix products of one step on a whole `batch`, all devices together."""
        def filled(array):
            return jax.ShapeDtypeStruct((self.part.filled(len(array)), *array.shape[1:]), array.dtype)

        return matmul_flops(self._step, self.shapes, jax.tree.map(filled, batch))

    def init(self, seed: int) -> TrainState:
        """A fresh state, each device making its own share: the whole need not fit on one."""
        return jax.jit(lambda: nn.unbox(self._fresh(seed=seed)), out_shardings=self._shardings)()

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """train_step on this process's rows of a batch. The old state is gone."""
        return self._train(state, self._placed(batch))

    def gather(self, params: Any) -> Any:
        """Parameters of a state as `eval` and searches use them: whole on each device, but for the 'tensor' axis.

        Where they lie so already, they are the state's own and no copy: the next train step deletes them.
        """
        there = jax.tree.map(lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim),
                             params, self._gathered)
        return params if all(jax.tree.leaves(there)) else self._gather(params)

    def eval(self, params: Any, batch: Batch) -> Sums:
        """eval_step on gathered parameters and this process's rows of a batch."""
        return jax.block_until_ready(self._eval(params, self._placed(batch)))

    def spread(self, arrays: Any) -> Any:
        """Arrays that every process has whole, their rows spread over the devices; rows of zeros fill them up."""
        def place(array):
            filled = np.pad(array, [(0, -len(array) % self._shares), *[(0, 0)] * (array.ndim - 1)])
            return jax.make_array_from_callback(filled.shape, self._by_rows, lambda index: filled[index])

        return jax.tree.map(place, arrays)

    def _placed(self, batch: Batch) -> Batch:
        if self._pmap:
            count = len(self.mesh.local_devices)
            return jax.tree.map(lambda array: array.reshape(count, -1, *array.shape[1:]), batch)

        def place(array):
            rows = len(array) * self.part.of // (self.part.last - self.part.first)
            begin = self.part.rows(rows).start

            def of_device(index):
                return array[index[0].start - begin:index[0].stop - begin]

            return jax.make_array_from_callback((rows, *array.shape[1:]), self._by_rows, of_device)

        if jax.process_count() == 1:
            return jax.device_put(batch, self._by_rows)
        return jax.tree.map(place, batch)
