"""The train step and the search of this project, for benchmarks. A workload sets their sizes."""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict
from typing_extensions import override

from benchmarks.measure import peak_memory
from benchmarks.turns import Ready
from benchmarks.workloads import EOS, Search, Workload
from configs import base
from configs.tasks import TASKS
from inference.options import SearchOptions
from inference.translate import Translator
from input_pipeline.batches import Batch
from input_pipeline.tokenizer import ByteTokenizer
from kernels.product import use_precision, used_precision
from model.blocks import BlockConfig
from model.evaluation import forward, supervised
from model.losses import cross_entropy
from model.transformer import Transformer
from runtime.errors import UserError
from runtime.resources import compile_time
from training.optimizer import make_optimizer, make_schedule
from training.step import init_state, train_step


class Program(NamedTuple):
    """A compiled program.

    Attributes:
      call: runs the program once, and returns arrays for jax.block_until_ready.
      compile_s: the seconds of the compilation.
      gigabytes: the peak memory that XLA reports, in GiB: arguments, results and temporaries.
    """
    call: Callable[[], Any]
    compile_s: float
    gigabytes: float


def make_model(workload: Workload, dtype: str) -> Transformer:
    """Returns the paper's Transformer with tied embeddings and the sizes of `workload`."""
    config = BlockConfig(d_model=workload.d_model, d_ff=workload.d_ff, num_heads=workload.num_heads,
                         dropout=workload.dropout, dtype=dtype)
    return Transformer(config, workload.num_layers, workload.vocab_size, workload.vocab_size)


def train_program(workload: Workload, dtype: str) -> Program:
    """Returns the train step of configs/base.py, compiled for one device as in training/compiled.py.

    Each call continues from the state of the previous call.
    """
    config, module = base.get_config(), make_model(workload, dtype)
    tokens = jax.random.randint(jax.random.key(0), (workload.batch, workload.length), 4, workload.vocab_size)
    batch: Batch = {'inputs': {'source': tokens, 'target': tokens}, 'targets': tokens,
                    'weights': jnp.ones(tokens.shape)}
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, d_model=workload.d_model, steps=1000))
    state = init_state(module, optimizer, batch, seed=0)
    objective = supervised(functools.partial(cross_entropy, label_smoothing=config.train.label_smoothing))
    step = jax.jit(functools.partial(train_step, objective=objective, apply=forward(module), optimizer=optimizer,
                                     dropout_key=jax.random.key(1)), donate_argnums=0)
    began = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    compile_s, memory = time.perf_counter() - began, compiled.memory_analysis()
    assert memory is not None, 'XLA reports the memory on all devices that this benchmark supports'
    held = (memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes)

    def call():
        nonlocal state
        state, sums = compiled(state, batch)
        return sums

    return Program(call, compile_s, held / 2 ** 30)


class Translations:
    """A search for the best outputs of random sources.

    Attributes:
      params: random parameters. The logit of the end token is always 0, and another token always has a larger logit.
        Therefore no output ends early.
      sources: the tokens of the sources, [sentences, source].
    """

    def __init__(self, workload: Workload, dtype: str, search: Search):
        module = make_model(workload, dtype)
        self.search, self.sources = search, np.random.default_rng(0).integers(
            4, workload.vocab_size, (search.sentences, search.source))
        params: Any = nn.unbox(jax.jit(module.init)(jax.random.key(1), self.sources[:1], self.sources[:1]))['params']
        table = params['target_embedding']['embedding']
        params['target_embedding']['embedding'] = table.at[EOS].set(0.0)
        self.params = params
        self._options = SearchOptions(method=search.method, beam=search.beam, batch_size=search.batch,
                                      extra_length=search.target - 1 - search.source)
        self._translator = Translator(module, params, {'source': Numbers(), 'target': Numbers()}, search.source)

    def __call__(self) -> list[list[int]]:
        """Decodes the sources. Returns the tokens of each output, without the forced end token."""
        outputs = self._translator.find_all(self.sources.tolist(), range(self.search.sentences), self._options)
        return [hypotheses[0].tokens for hypotheses in outputs]

    def save(self, path: str) -> None:
        """Writes the weights and the sources to an .npz file for other libraries."""
        params: Any = flatten_dict(jax.device_get(self.params), sep='/')
        sources = np.pad(self.sources, ((0, 0), (0, 1)), constant_values=EOS)  # as in the translator
        np.savez(path, sources=sources, **params)


class Numbers(ByteTokenizer):
    """A tokenizer that decodes tokens to a text of their indices, such as '17 4 29', for models with random weights."""

    @override
    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        return ' '.join(map(str, tokens))


def ready_train_step(workload: Workload, dtype: str, precision: str, beside_peers: bool) -> Ready:
    """Compiles the train step of this project, and returns it as a system for benchmarks.turns."""
    use_precision(precision)
    program = train_program(workload, dtype)
    facts = {'compile_s': round(program.compile_s, 2), 'program_gb': round(program.gigabytes, 3), **where(beside_peers)}
    return Ready(lambda: jax.block_until_ready(program.call()), facts, None, peak_memory)


def ready_decode(workload: Workload, dtype: str, precision: str, search: Search, model: str,
                 beside_peers: bool) -> Ready:
    """Compiles the search of this project, and returns it as a system for benchmarks.turns.

    Writes the weights to the file `model`, which the peers read.
    """
    use_precision(precision)
    translations = Translations(workload, dtype, search)
    if beside_peers:
        translations.save(model)
    compiled_before, answer = compile_time.seconds, translations()
    lengths = {len(tokens) for tokens in answer}
    assert lengths == {search.target - 1}, lengths
    facts = {'compile_s': round(compile_time.seconds - compiled_before, 2), **where(beside_peers)}
    return Ready(translations, facts, answer, peak_memory)


def check_run(workdir: Path, config: ConfigDict, peers: Sequence[str]) -> None:
    """Checks that the run `workdir` translates, and that it has subwords and no edits if there are peers.

    Raises:
      UserError: if a system cannot translate the run's test set.
    """
    if TASKS[config.task].answerer != 'translator':
        raise UserError(f'--workdir={workdir}: task={config.task}, but this benchmark measures translations. Use a run '
                        'with task=translation')
    if peers and config.data.tokenizer.kind in ('char', 'byte'):
        raise UserError(f'--peers={",".join(peers)}: the peers support only subwords, but {workdir} has '
                        f'config.data.tokenizer.kind={config.data.tokenizer.kind}. Use --peers= to measure only this '
                        'project')
    if peers and config.train.edits:
        raise UserError(f'--peers={",".join(peers)}: the peers cannot apply edits, but {workdir} was trained with '
                        'config.train.edits. Use --peers= to measure only this project')


def where(beside_peers: bool) -> dict[str, str]:
    """Returns the device, the precision of products, and the versions of JAX and Flax, for the JSON lines.

    Raises:
      UserError: if `beside_peers` is True and JAX does not use the CPU, because the peers use the CPU.
    """
    device = jax.devices()[0]
    if beside_peers and device.platform != 'cpu':
        raise UserError(f'--peers: the peers use the CPU, but JAX uses {device.device_kind}. Set JAX_PLATFORMS=cpu')
    return {'device': device.device_kind, 'matmul_precision': used_precision(), 'jax': jax.__version__,
            'flax': flax.__version__}
