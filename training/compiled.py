"""Compiles the train step, the eval step and the initialisation of the state for a mesh of devices."""

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Key, PyTree
from ml_collections import ConfigDict

from input_pipeline.batches import Batch, Part
from model import Params
from model.adapters import merged, without_adapters
from model.evaluation import Objective, eval_step, forward
from model.losses import Sums
from run_directory.initial import InitialValues
from runtime.agreement import exchange
from runtime.errors import UserError
from training.mesh import (
    ROWS,
    Devices,
    check_memory,
    computing_shardings_of,
    make_mesh,
    shardings_of,
    without_fsdp,
)
from training.place_statistics import tracked
from training.step import TrainState, boxed_state, train_step
from training.tuning import EVERYTHING, Tuning


class Compiled:
    """The programs of a training, compiled for a mesh: initialisation of the state, train step and eval step.

    A batch of any number of rows can be sharded over any number of devices, because padding rows are added (`part`).

    There are two ways to compile (config.parallel.mode):
    'jit': one program for the whole mesh, which XLA partitions. Dropout masks do not depend on the partitioning.
    'pmap': a program for one device, which runs on every device. Each device has its own rows, and its own dropout
      masks, because the index of the device is folded into the random key. Supports only data parallelism.

    Attributes:
      mesh: the devices.
      shapes: the shapes of a state, as jax.ShapeDtypeStructs with their shardings on the mesh.
      boxed: the shapes of the model's parameters, in Flax metadata boxes with the names of the axes.
      objective: the objective with its arrays on the devices, an argument of the train step and the eval step.
      part: the rows of every batch that this process must read, including padding rows. If the mesh axis 'tensor'
        extends over several processes, these processes read the same rows.
    """

    # There are many keyword arguments, because the compiled programs contain all parts of a training.
    def __init__(self, module: nn.Module, optimizer: optax.GradientTransformation, example: Batch, *,
                 parallel: ConfigDict | Mapping[str, Any], objective: Objective, dropout_key: Key[Array, ''],
                 accumulate: int = 1, precision: str = 'default', tuning: Tuning = EVERYTHING,
                 places: Sequence[str] = (), devices: Devices | None = None):
        """Defines the programs without compiling them. `example` can be any batch, because only its shapes are used.

        The eval step also computes the statistics of `places` (training/place_statistics.py).

        Raises:
          UserError: if the mesh does not fit the devices, or the state is larger than the memory of all devices.
        """
        self.mesh = mesh = make_mesh(parallel, devices)
        shares = mesh.shape['data'] * mesh.shape['fsdp']
        self._everywhere, self._by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, ROWS)
        self._shares, mine = shares, self._by_rows.addressable_devices_indices_map((shares,)).values()
        rows = [index[0].indices(shares) for index in mine if index]
        self.part = Part(min(first for first, *_ in rows), max(last for _, last, _ in rows), shares,
                         multiple=shares * accumulate)

        self._fresh = functools.partial(boxed_state, module, optimizer, example, tuning=tuning)
        boxed = jax.eval_shape(lambda: self._fresh(seed=0))
        self.boxed = without_adapters(boxed.params)
        check_memory(boxed, list(mesh.devices.flat))
        self._shardings = shardings_of(boxed, mesh)
        self.shapes = jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
                                   nn.unbox(boxed), self._shardings)
        training = computing_shardings_of(boxed.params, self._shardings.params, mesh)
        self._gathered = without_adapters(jax.tree.map(without_fsdp, self._shardings.params))
        # One program for all parameters, because several concurrent programs that communicate can deadlock.
        self._gather = jax.jit(merged, out_shardings=self._gathered)
        # The objective is an argument of the programs, because otherwise its arrays would be constants of the programs.
        # The arrays are first converted to NumPy, because JAX cannot copy an array from a device of this process to
        # the devices of other processes.
        self.objective = jax.device_put(jax.device_get(
            objective if isinstance(objective, jax.tree_util.Partial) else jax.tree_util.Partial(objective)),
            self._everywhere)
        self._pmap = parallel['mode'] == 'pmap'
        apply = forward(module, 1 if self._pmap else mesh.size)  # by pmap, each program has the rows of one device

        def step(state, batch, objective, **how):
            return train_step(state, batch, objective=objective, apply=apply, optimizer=optimizer,
                              dropout_key=dropout_key, accumulate=accumulate, precision=precision,
                              tuning=tuning, **how)

        def evaluation(params, batch, objective, **how):
            objective = tracked(objective, places, module) if places else objective
            return eval_step(params, batch, objective=objective, apply=apply, **how)

        self._step, self._compiled = step, set()
        if self._pmap:
            # With None in in_axes and out_axes, every device gets the same state, and pmap returns one copy. So the
            # arrays of a state have no axis for the devices. By default, pmap expects arrays with a row for each
            # device.
            across = functools.partial(jax.pmap, axis_name='data', in_axes=(None, 0, None), out_axes=None,
                                       devices=list(mesh.devices.flat))
            self._train = across(functools.partial(step, axis_name='data'), donate_argnums=0)
            self._eval = across(functools.partial(evaluation, axis_name='data'))
        else:
            # Without this constraint, XLA shards activations along d_model, like the parameters, and not along the
            # rows. Then each device computes all rows.
            place = functools.partial(jax.lax.with_sharding_constraint, shardings=training)
            self._train = jax.jit(functools.partial(step, place=place), donate_argnums=0,
                                  in_shardings=(self._shardings, self._by_rows, self._everywhere),
                                  out_shardings=(self._shardings, self._everywhere))
            self._eval = jax.jit(evaluation, in_shardings=(self._gathered, self._by_rows, self._everywhere),
                                 out_shardings=self._everywhere)

    def describe(self) -> str:
        """Returns a description of the devices and the mesh, for the log."""
        devices = self.mesh.devices.flat
        axes = ', '.join(f'{axis}={size}' for axis, size in self.mesh.shape.items())
        mesh = f' as {axes}, by {"pmap" if self._pmap else "jit"}' if len(devices) > 1 else ''
        filled = f', batches padded to multiples of {self.part.multiple} rows' if self.part.multiple > 1 else ''
        return f'{len(devices)} x {devices[0].device_kind} in {jax.process_count()} process(es){mesh}{filled}'

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Returns the train step, traced and lowered for batches of the shape of `batch`, but not compiled.

        The devices of the mesh need not exist.

        Raises:
          UserError: for mode=pmap, which compiles only for devices of this process.
        """
        if self._pmap:
            raise UserError('config.parallel.mode=pmap: programs can be compiled only for the devices of this machine. '
                            'Use jit')
        return self._train.lower(self.shapes, self._filled(batch), self.objective)

    def gathered_shapes(self) -> Params:
        """Returns the shapes of the parameters that `gather` returns."""
        shapes = without_adapters(self.shapes.params)
        return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                            shapes, self._gathered)

    def _filled(self, batch):
        return jax.tree.map(lambda array: jax.ShapeDtypeStruct(
            (self.part.filled(len(array)), *array.shape[1:]), array.dtype), batch)

    def init(self, seed: int, initial: Mapping[str, InitialValues] = MappingProxyType({})) -> TrainState:
        """Returns a fresh state. Each device initialises its own shard, so the state need not fit on one device.

        `initial` contains the initial values of some parameters. All other parameters are initialised randomly.
        """
        initial = jax.device_put(dict(initial), self._everywhere)
        return jax.jit(lambda initial: nn.unbox(self._fresh(seed=seed, initial=initial)),
                       out_shardings=self._shardings)(initial)

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """Makes one train step. `batch` has the rows of this process. Afterwards, the old `state` cannot be used."""
        state, sums = self._together(self._train, state, self._placed(batch))
        if self._pmap:
            state = jax.tree.map(self._whole, state)
        return state, sums

    def _whole(self, leaf: Array) -> Array:
        """Converts a result of pmap, which has a mesh of its own, to an array of this mesh. Nothing is copied."""
        return jax.make_array_from_single_device_arrays(
            leaf.shape, self._everywhere, [shard.data for shard in leaf.addressable_shards])

    def _together(self, program: Any, argument: PyTree, batch: Batch) -> Any:
        """Calls a program after all processes have compiled it.

        Otherwise, a collective operation in a fast process could time out while a slow process still compiles.
        """
        shapes = id(program), *(leaf.shape for leaf in jax.tree.leaves(batch))
        if jax.process_count() > 1 and shapes not in self._compiled:
            program.lower(argument, batch, self.objective).compile()
            exchange('compiling', None)
            self._compiled.add(shapes)
        return program(argument, batch, self.objective)

    def gather(self, params: Params) -> Params:
        """Returns the model's parameters for `eval` and searches, sharded only along 'tensor'.

        If the state's parameters already have this sharding, the same arrays are returned without a copy. The next
        train step then deletes the arrays.
        """
        if params.keys() != self._gathered.keys():
            return self._gather(params)
        gathered = jax.tree.map(lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim),
                                params, self._gathered)
        return params if all(jax.tree.leaves(gathered)) else self._gather(params)

    def eval(self, params: Params, batch: Batch) -> Sums:
        """Evaluates a batch. `params` comes from `gather`, and `batch` has the rows of this process."""
        return jax.block_until_ready(self._together(self._eval, params, self._placed(batch)))

    def distribute(self, arrays: PyTree) -> PyTree:
        """Pads arrays with rows of zeros, and shards the rows over the devices.

        Every process must pass the same complete arrays.
        """
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
                first, last, _ = index[0].indices(rows)  # slice(None) if the devices do not share the rows
                return array[first - begin:last - begin]

            return jax.make_array_from_callback((rows, *array.shape[1:]), self._by_rows, of_device)

        if jax.process_count() == 1:
            return jax.device_put(batch, self._by_rows)
        return jax.tree.map(place, batch)
