"""The train step, the eval step and a fresh state, compiled for a mesh."""

import functools
from collections.abc import Mapping
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
from training.loss import Sums
from training.mesh import ROWS, Devices, check_memory, make_mesh, shardings_of
from training.objective import Objective, forward
from training.step import TrainState, boxed_state, eval_step, train_step
from training.summary import matmul_flops


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

    # Many keywords: a training is put together here, and each is a part of it.
    def __init__(self, module: nn.Module, optimizer: optax.GradientTransformation, example: Batch, *,
                 parallel: ConfigDict | Mapping[str, Any], objective: Objective, dropout_key: Key[Array, ''],
                 accumulate: int = 1, devices: Devices | None = None):
        """`example` is any batch, of which only the shapes count.

        Raises:
          UserError: if the mesh does not fit the devices, or the state is larger than the memory of all of them.
        """
        self.mesh = mesh = make_mesh(parallel, devices)
        shares = mesh.shape['data'] * mesh.shape['fsdp']
        self._everywhere, self._by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, ROWS)
        self._shares, mine = shares, self._by_rows.addressable_devices_indices_map((shares,)).values()
        rows = [index[0].indices(shares) for index in mine if index]
        self.part = Part(min(first for first, *_ in rows), max(last for _, last, _ in rows), shares,
                         multiple=shares * accumulate)

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
        # An argument of the programs: arrays that an objective holds would be constants in them otherwise.
        self._objective = jax.device_put(
            objective if isinstance(objective, jax.tree_util.Partial) else jax.tree_util.Partial(objective),
            self._everywhere)
        apply = forward(module)

        def step(state, batch, objective, **how):
            return train_step(state, batch, objective=objective, apply=apply, optimizer=optimizer,
                              dropout_key=dropout_key, accumulate=accumulate, **how)

        def evaluation(params, batch, objective, **how):
            return eval_step(params, batch, objective=objective, apply=apply, **how)

        self._step = step
        self._pmap = parallel['mode'] == 'pmap'
        if self._pmap:
            # A state has no axis of devices: `None` gives each device the same one, and returns it once. By default,
            # pmap wants an array with a row for each device.
            across = functools.partial(jax.pmap, axis_name='data', in_axes=(None, 0, None), out_axes=None,
                                       devices=devices)
            self._train = across(functools.partial(step, axis_name='data'), donate_argnums=0)
            self._eval = across(functools.partial(evaluation, axis_name='data'))
        else:
            # Without this, XLA splits activations along d_model, as the parameters are split, and not along the rows:
            # each device then computes all rows.
            place = functools.partial(jax.lax.with_sharding_constraint, shardings=self._gathered)
            self._train = jax.jit(functools.partial(step, place=place), donate_argnums=0,
                                  in_shardings=(self._shardings, self._by_rows, self._everywhere),
                                  out_shardings=(self._shardings, self._everywhere))
            self._eval = jax.jit(evaluation, in_shardings=(self._gathered, self._by_rows, self._everywhere),
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

        return matmul_flops(self._step, self.shapes, jax.tree.map(filled, batch), self._objective)

    def init(self, seed: int) -> TrainState:
        """A fresh state, each device making its own share: the whole need not fit on one."""
        return jax.jit(lambda: nn.unbox(self._fresh(seed=seed)), out_shardings=self._shardings)()

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """train_step on this process's rows of a batch. The old state is gone."""
        return self._train(state, self._placed(batch), self._objective)

    def gather(self, params: Params) -> Params:
        """Parameters of a state as `eval` and searches use them: whole on each device, but for the 'tensor' axis.

        Where they lie so already, they are the state's own and no copy: the next train step deletes them.
        """
        there = jax.tree.map(lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim),
                             params, self._gathered)
        return params if all(jax.tree.leaves(there)) else self._gather(params)

    def eval(self, params: Params, batch: Batch) -> Sums:
        """eval_step on gathered parameters and this process's rows of a batch."""
        return jax.block_until_ready(self._eval(params, self._placed(batch), self._objective))

    def distribute(self, arrays: PyTree) -> PyTree:
        """Puts arrays that every process has whole on the devices, each with its rows; rows of zeros fill them up."""
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
