"""The product's own train step and search at the size of a workload, ready to be called."""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from typing_extensions import override

from benchmarks.measure import peak_memory
from benchmarks.turns import Ready
from benchmarks.workloads import EOS, Search, Workload
from configs import base
from inference.text import SearchOptions
from inference.translate import Translator
from input_pipeline.batches import Batch
from input_pipeline.tokenizer import ByteTokenizer
from model.blocks import BlockConfig
from model.evaluation import forward, supervised
from model.losses import cross_entropy
from model.transformer import Transformer
from runtime.errors import UserError
from runtime.resources import compile_time
from training.optimizer import make_optimizer, make_schedule
from training.step import init_state, train_step


class Program(NamedTuple):
    """A function that XLA has compiled.

    Attributes:
      call: runs it once, on what it was made for; what comes back can be waited for.
      compile_s: seconds that compiling took.
      gigabytes: what it holds at its peak by XLA's account: arguments, results and temporaries.
    """
    call: Callable[[], Any]
    compile_s: float
    gigabytes: float


def make_model(workload: Workload, dtype: str) -> Transformer:
    """The Transformer of the paper, embeddings tied."""
    config = BlockConfig(d_model=workload.d_model, d_ff=workload.d_ff, num_heads=workload.num_heads,
                         dropout=workload.dropout, dtype=dtype)
    return Transformer(config, workload.num_layers, workload.vocab_size, workload.vocab_size)


def train_program(workload: Workload, dtype: str) -> Program:
    """The train step of configs/base.py, the program that training/compiled.py has for one device.

    Each call goes on from the state that the last one left.
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
    assert memory is not None, 'XLA tells it on every device that this runs on'
    held = (memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes)

    def call():
        nonlocal state
        state, sums = compiled(state, batch)
        return sums

    return Program(call, compile_s, held / 2 ** 30)


class Translations:
    """The search of a translator for the best output of each of `search.sentences` sources, random ones.

    Attributes:
      params: random, but such that no output ends early: the end token has a logit of 0, and some other more.
      sources: [sentences, source].
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
        """The tokens of each output but for the end token, which the limit forces."""
        found = self._translator.find_all(self.sources.tolist(), range(self.search.sentences), self._options)
        return [hypotheses[0].tokens for hypotheses in found]

    def save(self, path: str) -> None:
        """Writes weights and sources (.npz), so that another library can do the same."""
        params: Any = flatten_dict(jax.device_get(self.params), sep='/')
        read = np.pad(self.sources, ((0, 0), (0, 1)), constant_values=EOS)  # the translator appends the end token
        np.savez(path, sources=read, **params)


class Numbers(ByteTokenizer):
    """A tokenizer that writes any tokens, as numbers."""

    @override
    def decode(self, tokens: Iterable[int | np.integer]) -> str:
        return ' '.join(map(str, tokens))


def ready_train_step(workload: Workload, dtype: str, beside_peers: bool) -> Ready:
    """For benchmarks.turns."""
    program = train_program(workload, dtype)
    told = {'compile_s': round(program.compile_s, 2), 'program_gb': round(program.gigabytes, 3), **where(beside_peers)}
    return Ready(lambda: jax.block_until_ready(program.call()), told, None, peak_memory)


def ready_decode(workload: Workload, dtype: str, search: Search, model: str, beside_peers: bool) -> Ready:
    """For benchmarks.turns; the answer is the best output of each sentence. Writes the `model` for the peers."""
    translations = Translations(workload, dtype, search)
    if beside_peers:
        translations.save(model)
    compiled_before, answer = compile_time.seconds, translations()
    lengths = {len(tokens) for tokens in answer}
    assert lengths == {search.target - 1}, lengths
    told = {'compile_s': round(compile_time.seconds - compiled_before, 2), **where(beside_peers)}
    return Ready(translations, told, answer, peak_memory)


def where(beside_peers: bool) -> dict[str, str]:
    """The device and the versions.

    Raises:
      UserError: if that is not the CPU, and peers run there.
    """
    device = jax.devices()[0]
    if beside_peers and device.platform != 'cpu':
        raise UserError(f'--peers run on the CPU, and JAX on {device.device_kind}: set JAX_PLATFORMS=cpu')
    return {'device': device.device_kind, 'jax': jax.__version__, 'flax': flax.__version__}
