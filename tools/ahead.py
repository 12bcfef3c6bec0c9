"""The real train step and search step, compiled ahead of time for devices that need not be here."""

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

from configs.tasks import TASKS
from inference.search import Beam, Vocabulary
from input_pipeline.batches import ROWS as MULTIPLE
from input_pipeline.batches import Batch
from input_pipeline.tokenizer import BOS, EOS, PAD
from model.build import build_model
from model.evaluation import forward
from runtime.errors import UserError
from tools.chips import Topology
from tools.program import Collective, Program
from training.compiled import Compiled
from training.mesh import ROWS, Devices
from training.objective import make_objective
from training.optimizer import make_optimizer, make_schedule
from training.step import TrainState, boxed_state, key_for, train_step
from training.summary import matmul_flops
from training.tuning import make_tuning

LENGTH = 64  # tokens of an assumed sentence, its end token and padding included


class TooLarge(UserError):
    """A program that does not fit the memory of a device. `needed` and `there` are in bytes; None: not known."""

    def __init__(self, message: str, needed: float | None = None, there: float | None = None):
        super().__init__(message)
        self.needed, self.there = needed, there


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a program costs each device. Bytes, and floating-point operations, of a step.

    Attributes:
      flops: of the matrix products, each iteration of a loop counted, what rematerialisation repeats too.
      traffic: bytes between the device's memory and its cores (see `tools.program`).
      operands: bytes of all operands and results, those too that stay in the cores' own memory; loops counted.
      arguments: bytes of what the step is given: the state and the batch.
      temporaries: bytes of activations, gradients and buffers, at most at a time.
      peak: bytes of the device's memory in use, at most.
      collectives: the communications.
    """
    flops: float
    traffic: float
    operands: float
    arguments: float
    temporaries: float
    peak: float
    collectives: tuple[Collective, ...]


def devices_of(topology: Topology) -> Devices:
    """The devices of a topology that is not here, which a mesh and the compiler accept.

    Raises:
      UserError: if libtpu is missing, or knows no such topology.
    """
    name = f'{topology.chip.libtpu}:{"x".join(map(str, topology.shape))}'
    options: dict[str, Any] = {'num_slices': topology.slices} if topology.slices > 1 else {}
    if topology.chip.libtpu == 'v4':
        options['chip_config_name'] = 'megacore'  # its two cores are one device, as on the machines that there are
    try:
        described = topologies.get_topology_desc(platform='tpu', topology_name=name, **options)
    except Exception as error:  # jaxlib's own, of no class that is documented
        reason = str(error).splitlines()[0][:300]
        if not importlib.util.find_spec('libtpu'):
            raise UserError('compiling for a TPU needs libtpu: pip install -e ".[plan]", or plan with --formula '
                            f'({reason})') from None
        raise UserError(f'--topology={topology}: libtpu has no such devices ({reason}): take the shape of a slice that '
                        'is sold, as v5e:4x4') from None
    return list(described.devices)


def assumed_sizes(config: ConfigDict) -> dict[str, int]:
    """The sizes of the vocabularies that the tokenizers of the recipe are to have."""
    size, data = config.data.tokenizer.vocab_size, TASKS[config.task].data
    if data == 'pairs':
        return {'source_vocab_size': size, 'target_vocab_size': size}
    if data == 'documents':
        return {'vocab_size': size}
    raise UserError(f'config.task={config.task}: plans are made for text, that is translation and language_model')


def assumed_batch(config: ConfigDict, length: int | None, multiple: int = 1) -> tuple[Batch, int]:
    """Returns a full batch of a recipe's shapes, without its data: sentences of one `length`, or windows.

    As in training, rows of padding are added up to a `multiple`. Also returns the number of rows without them.
    """
    pairs = TASKS[config.task].data == 'pairs'
    usual: int = min(LENGTH, config.data.max_length) if pairs else config.data.context
    length = length or usual
    rows = config.batch.tokens // length // MULTIPLE * MULTIPLE if pairs else config.batch.rows
    if not rows:
        raise UserError(f'config.batch.tokens={config.batch.tokens} holds no {MULTIPLE} sentences of {length} tokens: '
                        f'raise it to at least {MULTIPLE * length}, or lower --length')
    tokens = np.broadcast_to(np.int32(EOS), (-(-rows // multiple) * multiple, length))
    inputs = {'source': tokens, 'target': tokens} if pairs else {
        'tokens': tokens, 'segments': tokens, 'positions': tokens}
    return {'inputs': inputs, 'targets': tokens, 'weights': np.broadcast_to(np.float32(1), tokens.shape)}, rows


class Recipe:
    """A recipe's parts without its data.

    Attributes:
      config: of the recipe.
      batch: of assumed text.
      rows: of the batch, without the padding.
      module: the model.
      parts: what the project's compiled steps are made of.
    """

    def __init__(self, config: ConfigDict, length: int | None = None, shares: int = 1):
        """Builds the parts; `length` is that of a sentence, `shares` are the shares of the rows on the devices.

        Raises:
          UserError: if the recipe needs what a plan does not have.
        """
        if config.train.teacher:
            raise UserError(f'config.train.teacher={config.train.teacher}: a plan knows no teacher; leave it out')
        self.config = config
        self.batch, self.rows = assumed_batch(config, length, shares * config.train.accumulate)
        self.module = build_model(config.model, **assumed_sizes(config), pad=PAD)
        tuning = make_tuning(config.train)
        schedule = make_schedule(config.optimizer, d_model=config.model.d_model, steps=config.train.steps)
        self.parts: dict[str, Any] = {
            'objective': make_objective(config, None), 'dropout_key': key_for('dropout', config.seed),
            'accumulate': config.train.accumulate, 'precision': config.train.matmul_precision, 'tuning': tuning}
        self.optimizer = make_optimizer(config.optimizer, schedule, tuning)

    @functools.cached_property
    def boxed(self) -> TrainState:
        """The shapes of a state, boxed with the names of their axes."""
        return jax.eval_shape(lambda: boxed_state(self.module, self.optimizer, self.batch, 0, self.parts['tuning']))

    @functools.cached_property
    def flops(self) -> int:
        """Floating-point operations of the matrix products of a step, over all devices."""
        step = functools.partial(train_step, apply=forward(self.module), optimizer=self.optimizer, **self.parts)
        return matmul_flops(step, nn.unbox(self.boxed), self.batch)

    def for_parts(self, config: ConfigDict) -> 'Recipe':
        """The same recipe with other options of config.parallel and config.train.accumulate."""
        assert self.flops  # and the shapes: known once for all copies
        other = copy.copy(self)
        other.config, other.parts = config, self.parts | {'accumulate': config.train.accumulate}
        return other

    @property
    def tokens(self) -> int:
        """Target positions of a step, without the padding."""
        return self.rows * self.batch['targets'].shape[1]


class Ahead:
    """The programs of a recipe for a mesh of devices that need not be here.

    Attributes:
      steps: the project's own compiled steps.
      mesh: the sizes of its axes.
    """

    def __init__(self, recipe: Recipe, parallel: Mapping[str, Any], devices: Devices):
        """Compiles nothing yet.

        Raises:
          UserError: if the mesh does not fit the devices.
        """
        self.recipe, self.batch = recipe, recipe.batch
        self.steps = Compiled(recipe.module, recipe.optimizer, recipe.batch, parallel=parallel, devices=devices,
                              **recipe.parts)
        self.mesh = dict(self.steps.mesh.shape)

    def held(self) -> dict[str, float]:
        """Bytes that each device holds of the parameters and of the optimizer's state."""
        return {'parameters': _shards(self.steps.shapes.params), 'optimizer': _shards(self.steps.shapes.opt_state)}

    @functools.cached_property
    def train(self) -> jax.stages.Compiled:
        """The train step, compiled.

        Raises:
          TooLarge: if a device has not the memory.
        """
        return _compiled(self.steps.lower(self.batch))

    @functools.cached_property
    def decode(self) -> jax.stages.Compiled:
        """A step of beam search, compiled: `config.decode.batch_size` sentences, config.decode.beam hypotheses each."""
        config, steps, module = self.recipe.config, self.steps, self.recipe.module
        source = next(iter(self.batch['inputs'].values()))
        shares = self.mesh['data'] * self.mesh['fsdp']
        rows = -(-config.decode.batch_size // shares) * shares
        most = source.shape[1] + config.decode.extra_length
        beam = Beam(Vocabulary(PAD, BOS, EOS), most, config.decode.beam, config.decode.alpha)

        def begin(params, tokens):
            cache: Any = module.apply({'params': params}, method=lambda module: module.init_cache(
                module.encode(tokens), config.decode.beam, most))
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
        """What a compiled program of this mesh costs."""
        memory, text = compiled.memory_analysis(), compiled.as_text() or ''
        program, everything = Program(text, self.mesh), Program(text, self.mesh, cores=True)
        assert memory is not None
        counted: Any = compiled.cost_analysis() or {}
        arguments, flops = memory.argument_size_in_bytes, 0.0
        if compiled is self.__dict__.get('train'):
            flops = self.recipe.flops / math.prod(self.mesh.values())
        return Figures(flops or counted.get('flops', 0.0),
                       program.traffic(), everything.traffic(), arguments, memory.temp_size_in_bytes,
                       arguments + memory.output_size_in_bytes - memory.alias_size_in_bytes
                       + memory.temp_size_in_bytes, tuple(program.collectives()))


def keep(compiled: jax.stages.Compiled, path: Path) -> None:
    """Writes a compiled program to a file, for `load` on a machine of these devices and this version of JAX."""
    path.write_bytes(serialize_executable.serialize(compiled)[0])


def load(path: Path, lowered: jax.stages.Lowered, devices: Devices | None = None) -> jax.stages.Compiled:
    """Loads a program that `keep` wrote, for `devices`, by default all that are here.

    `lowered` is the same step, lowered here: it knows the structure of arguments and results, which a file cannot hold.
    JAX reads the file as a pickle, which may run anything: open files of your own only.
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
        raise TooLarge(str(error).splitlines()[0][:300], *sizes) from None


def _shards(shapes: PyTree) -> float:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
               for leaf in jax.tree.leaves(shapes))
