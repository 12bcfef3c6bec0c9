"""Compiles the train step and a step of beam search ahead of time, for devices that this machine may not have."""

import copy
import dataclasses
import functools
import importlib.util
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import serialize_executable, topologies
from jax.sharding import NamedSharding
from jaxtyping import PyTree
from ml_collections import ConfigDict

from configs.tasks import IMPORTED, SUBWORDS, TASKS
from inference.search import Beam, Vocabulary
from input_pipeline.batches import ROWS as MULTIPLE
from input_pipeline.batches import Batch
from input_pipeline.data import read_sizes
from input_pipeline.tokenizer import BOS, EOS, PAD, ByteTokenizer
from model.build import build_model
from model.evaluation import forward
from run_directory.trained import vocabulary_from
from runtime.errors import UserError, first_line
from runtime.files import replaced
from tools.chips import Topology
from tools.program import Collective, Program
from training.compiled import Compiled
from training.mesh import ROWS, Devices
from training.objective import make_objective
from training.optimizer import make_optimizer, make_schedule
from training.precision import planned_precision
from training.step import TrainState, boxed_state, key_for, train_step
from training.summary import matmul_flops
from training.tuning import make_tuning

LENGTH = 64  # default number of tokens of an assumed sentence, including the end token and padding


class TooLarge(UserError):
    """Raised if a program does not fit into the memory of a device.

    Attributes:
      needed: bytes of memory that the program needs; None if the compiler did not report the size.
      available: bytes of memory that the device has; None if the compiler did not report the size.
    """

    def __init__(self, message: str, needed: float | None = None, available: float | None = None):
        super().__init__(message)
        self.needed, self.available = needed, available


@dataclasses.dataclass(frozen=True)
class Figures:
    """The cost of one step of a program, per device.

    Attributes:
      flops: floating-point operations of the matrix products, including every iteration of a loop and the operations
        that rematerialisation repeats.
      traffic: bytes that move between the device's memory and its cores (see `tools.program`).
      operands: `traffic`, plus the bytes of operands and results that stay in the cores' own memory.
      arguments: bytes of the state and the batch.
      temporaries: the largest number of bytes of activations, gradients and buffers at a time.
      peak: the largest number of bytes of the device's memory in use.
      collectives: the communication between devices.
    """
    flops: float
    traffic: float
    operands: float
    arguments: float
    temporaries: float
    peak: float
    collectives: tuple[Collective, ...]


def devices_of(topology: Topology) -> Devices:
    """Returns descriptions of a topology's devices, for a mesh and the compiler.

    Raises:
      UserError: if libtpu is missing, or does not support the topology.
    """
    name = f'{topology.chip.libtpu}:{"x".join(map(str, topology.shape))}'
    options: dict[str, Any] = {'num_slices': topology.slices} if topology.slices > 1 else {}
    if topology.chip.libtpu == 'v4':
        options['chip_config_name'] = 'megacore'  # on a real v4 machine, the two cores of a chip are one device
    try:
        description = topologies.get_topology_desc(platform='tpu', topology_name=name, **options)
    except Exception as error:  # jaxlib does not document which exceptions it raises
        reason = first_line(error)
        if not importlib.util.find_spec('libtpu'):
            raise UserError(f'--topology={topology}: compiling for a TPU needs libtpu ({reason}). Run '
                            'pip install -e ".[plan]", or use --formula') from None
        raise UserError(f'--topology={topology}: libtpu does not support it ({reason}). Use the shape of an '
                        'available slice, such as v5e:4x4') from None
    return list(description.devices)


def assumed_sizes(config: ConfigDict) -> dict[str, Any]:
    """Returns the sizes from which a plan builds the model, as in sizes.json. Reads no data.

    If the new run takes the vocabulary of another run (config.train.init_from), the result is the sizes.json of that
    run. Otherwise, a plan assumes config.data.tokenizer.vocab_size subwords. Bytes have a fixed vocabulary, and a
    vocabulary of characters is assumed to have the same size.

    `config` may get the tokenizer options of the other run (see `vocabulary_from`).

    Raises:
      UserError: if plans do not support the task, the other run cannot be read, or the tokenizer is that of an
        imported model and there is no other run.
    """
    if run := vocabulary_from(config, asked=()):
        return read_sizes(run, config.task)
    tokenizer, data = config.data.tokenizer, TASKS[config.task].data
    if tokenizer.kind in IMPORTED:
        raise UserError(f'config.data.tokenizer.kind={tokenizer.kind}: this recipe does not contain the size of the '
                        'imported vocabulary. Use --config=configs/fine_tune.py:RUN, with the imported run as RUN')
    size = tokenizer.vocab_size if tokenizer.kind in SUBWORDS else len(ByteTokenizer())
    if data == 'pairs':
        return {'source_vocab_size': size, 'target_vocab_size': size}
    if data == 'documents':
        return {'vocab_size': size}
    raise UserError(f'config.task={config.task}: must be translation or language_model for a plan')


def vocabulary_size(sizes: Mapping[str, Any]) -> int:
    """Returns the number of tokens that a model predicts. `sizes` are the result of `assumed_sizes`."""
    return sizes['target_vocab_size' if 'target_vocab_size' in sizes else 'vocab_size']


def assumed_batch(config: ConfigDict, length: int | None, multiple: int = 1) -> tuple[Batch, int]:
    """Returns a full batch with the shapes of a recipe, and its number of rows without padding rows. Reads no data.

    All sentences or windows have the same `length`. As in training, padding rows are added until the number of rows is
    a multiple of `multiple`.
    """
    pairs = TASKS[config.task].data == 'pairs'
    default: int = min(LENGTH, config.data.max_length) if pairs else config.data.context
    length = length or default
    rows = config.batch.tokens // length // MULTIPLE * MULTIPLE if pairs else config.batch.rows
    if not rows:
        raise UserError(f'config.batch.tokens={config.batch.tokens} is too small: a batch must hold {MULTIPLE} '
                        f'sentences of {length} tokens. Use at least {MULTIPLE * length}, or reduce --length')
    tokens = np.broadcast_to(np.int32(EOS), (-(-rows // multiple) * multiple, length))
    inputs = {'source': tokens, 'target': tokens} if pairs else {
        'tokens': tokens, 'segments': tokens, 'positions': tokens}
    return {'inputs': inputs, 'targets': tokens, 'weights': np.broadcast_to(np.float32(1), tokens.shape)}, rows


class Recipe:
    """The parts of a training run that a recipe defines, except the data.

    Attributes:
      config: the recipe's options.
      batch: the result of `assumed_batch`.
      rows: the number of rows of the batch, without padding rows.
      sizes: the result of `assumed_sizes`.
      module: the model.
      parts: the arguments of `training.compiled.Compiled`.
    """

    def __init__(self, config: ConfigDict, length: int | None = None, shares: int = 1):
        """Builds the parts, for sentences of `length` tokens. The rows of a batch are divided among `shares` devices.

        Raises:
          UserError: if plans do not support the recipe, or the model has too few learned positions for the sentences.
        """
        if config.train.teacher:
            raise UserError(f'config.train.teacher={config.train.teacher}: plans do not support a teacher. Remove the '
                            'option')
        self.config = config
        self.batch, self.rows = assumed_batch(config, length, shares * config.train.accumulate)
        self.sizes = assumed_sizes(config)
        self.module = build_model(config.model, **self.sizes, pad=PAD)
        length, limit = self.batch['targets'].shape[1], self.module.length_limit
        if limit and length > limit:
            raise UserError(f'--length={length}: config.model.position=learned supports at most '
                            f'config.model.max_length={limit} tokens. Reduce --length, or increase '
                            'config.model.max_length')
        tuning = make_tuning(config.train)
        schedule = make_schedule(config.optimizer, d_model=config.model.d_model, steps=config.train.steps)
        self.parts: dict[str, Any] = {
            'objective': make_objective(config, None), 'dropout_key': key_for('dropout', config.seed),
            'accumulate': config.train.accumulate, 'precision': planned_precision(config), 'tuning': tuning}
        self.optimizer = make_optimizer(config.optimizer, schedule, tuning)

    @functools.cached_property
    def boxed(self) -> TrainState:
        """The shapes of a train state. The leaves are Flax metadata boxes with the names of the axes."""
        return jax.eval_shape(lambda: boxed_state(self.module, self.optimizer, self.batch, 0, self.parts['tuning']))

    @functools.cached_property
    def flops(self) -> int:
        """The floating-point operations of all matrix products of a step, summed over all devices."""
        step = functools.partial(train_step, apply=forward(self.module), optimizer=self.optimizer, **self.parts)
        return matmul_flops(step, nn.unbox(self.boxed), self.batch)

    def for_parts(self, config: ConfigDict, shares: int) -> 'Recipe':
        """Returns a copy of the recipe for `config`, with the padding rows that `shares` devices need.

        Only parallel and train.accumulate may differ. The copy is not traced again: its operations are proportional to
        the number of rows.
        """
        assert self.flops and self.boxed  # cached here, so that the copies share them
        recipe, (rows, length) = copy.copy(self), self.batch['targets'].shape
        recipe.config, recipe.parts = config, self.parts | {'accumulate': config.train.accumulate}
        recipe.batch, recipe.rows = assumed_batch(config, length, shares * config.train.accumulate)
        recipe.flops = self.flops * len(recipe.batch['targets']) // rows
        return recipe

    @property
    def tokens(self) -> int:
        """The number of target positions of a train step, without padding rows."""
        return self.rows * self.batch['targets'].shape[1]


class Ahead:
    """The programs of a recipe, compiled for a mesh of devices that this machine may not have.

    Attributes:
      steps: the train step and the eval step, as `training.compiled.Compiled`.
      mesh: the sizes of the mesh's axes.
    """

    def __init__(self, recipe: Recipe, parallel: Mapping[str, Any], devices: Devices):
        """Prepares the programs, without compiling them.

        Raises:
          UserError: if the mesh does not fit the devices.
        """
        self.recipe, self.batch = recipe, recipe.batch
        self.steps = Compiled(recipe.module, recipe.optimizer, recipe.batch, parallel=parallel, devices=devices,
                              **recipe.parts)
        self.mesh = dict(self.steps.mesh.shape)

    def held(self) -> dict[str, float]:
        """Returns the bytes of the parameters and of the optimizer state on each device."""
        return {'parameters': _shards(self.steps.shapes.params), 'optimizer': _shards(self.steps.shapes.opt_state)}

    @functools.cached_property
    def train(self) -> jax.stages.Compiled:
        """The compiled train step.

        Raises:
          TooLarge: if the program needs more memory than a device has.
        """
        return _compiled(self.steps.lower(self.batch))

    @functools.cached_property
    def decode(self) -> jax.stages.Compiled:
        """The compiled step of a beam search for config.decode.batch_size sentences.

        Raises:
          TooLarge: if the program needs more memory than a device has.
        """
        config, steps, module = self.recipe.config, self.steps, self.recipe.module
        source = next(iter(self.batch['inputs'].values()))
        shares = self.mesh['data'] * self.mesh['fsdp']
        rows = -(-config.decode.batch_size // shares) * shares
        max_length = source.shape[1] + config.decode.extra_length
        beam = Beam(Vocabulary(PAD, BOS, EOS), max_length, config.decode.beam, config.decode.alpha)

        def begin(params, tokens):
            cache: Any = module.apply({'params': params}, method=lambda module: module.init_cache(
                module.encode(tokens), config.decode.beam, max_length))
            return beam.begin(cache, tokens[:, 0], tokens[:, 0])

        def step(params, state):
            def decode_step(tokens, cache) -> Any:
                return module.apply({'params': params}, tokens, cache, method='decode_step')
            return beam.step(decode_step, state)

        params = steps.gathered_shapes()
        state = jax.eval_shape(begin, params, jax.ShapeDtypeStruct((rows, source.shape[1]), np.int32))
        by_rows, everywhere = (NamedSharding(steps.mesh, spec) for spec in (ROWS, jax.sharding.PartitionSpec()))
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=by_rows if leaf.shape[:1] == (rows,) else everywhere), state)
        return _compiled(jax.jit(step, donate_argnums=1).lower(params, state))

    def figures(self, compiled: jax.stages.Compiled) -> Figures:
        """Returns the cost of `compiled`, a program for this mesh."""
        memory, text = compiled.memory_analysis(), compiled.as_text() or ''
        program, with_cores = Program(text, self.mesh), Program(text, self.mesh, cores=True)
        assert memory is not None
        cost: Any = compiled.cost_analysis() or {}
        arguments, flops = memory.argument_size_in_bytes, 0.0
        if compiled is self.__dict__.get('train'):
            flops = self.recipe.flops / math.prod(self.mesh.values())
        return Figures(flops or cost.get('flops', 0.0),
                       program.traffic(), with_cores.traffic(), arguments, memory.temp_size_in_bytes,
                       arguments + memory.output_size_in_bytes - memory.alias_size_in_bytes
                       + memory.temp_size_in_bytes, tuple(program.collectives()))


def keep(compiled: jax.stages.Compiled, path: Path) -> None:
    """Writes a compiled program to a file. To `load` the file, use the same kind of devices and version of JAX.

    An old file is replaced only when the new file is complete.

    Raises:
      UserError: if the file cannot be written, for example because the disk is full.
    """
    content = serialize_executable.serialize(compiled)[0]
    with replaced(path) as partial:
        partial.write_bytes(content)


def load(path: Path, lowered: jax.stages.Lowered, devices: Devices | None = None) -> jax.stages.Compiled:
    """Loads a compiled program that `keep` has written. The default of `devices` is all devices of this machine.

    `lowered` is the same step, lowered on this machine. It supplies the structure of the arguments and results, which
    the file does not contain. JAX reads the file as a pickle, and a pickle can run any code. Load only files that you
    trust.
    """
    devices = devices or jax.devices()
    return serialize_executable.deserialize_and_load(path.read_bytes(), lowered.in_tree, lowered.out_tree,
                                                     backend=devices[0].client, execution_devices=devices)


def _compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        used = re.search(r'Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT])', str(error))
        sizes = [float(number) * 1024 ** ('KMGT'.index(unit) + 1) for number, unit in
                 zip(used.groups()[::2], used.groups()[1::2], strict=True)] if used else [None, None]
        raise TooLarge(first_line(error), *sizes) from None


def _shards(shapes: PyTree) -> float:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
               for leaf in jax.tree.leaves(shapes))
