"""Speed of the train step: python -m benchmarks.train_step [--workload=tiny|base] [--dtype=bfloat16] [--peer=torch]

One JSON line a system. With --peer=torch, PyTorch's nn.Transformer of the same size (eager) is timed in the same
run, where torch is installed. Run it on a quiet machine; compare figures of one run only.
"""

from command_line import run_script, use_huge_pages

if __name__ == '__main__':
    use_huge_pages()

import functools
import time

import jax
import jax.numpy as jnp
import optax
from absl import flags

from benchmarks.measure import report, times
from benchmarks.workloads import WORKLOADS, Workload
from errors import UserError
from input_pipeline.batches import Batch
from training.loss import cross_entropy
from training.objective import forward, supervised
from training.step import init_state, train_step

WORKLOAD = flags.DEFINE_enum('workload', 'tiny', list(WORKLOADS), 'Which sizes.')
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Of the computation.')
RUNS = flags.DEFINE_integer('runs', 15, 'Timed steps.', lower_bound=1)
PEER = flags.DEFINE_enum('peer', None, ['torch'], 'Also time this library.')


def main() -> None:
    workload = WORKLOADS[WORKLOAD.value]
    what = {'benchmark': 'train_step', 'workload': WORKLOAD.value, 'dtype': DTYPE.value}
    if PEER.value:
        report(torch_times(workload, RUNS.value), workload.batch * workload.length, what | {'system': 'torch eager'})
    module = workload.module(DTYPE.value)
    tokens = jax.random.randint(jax.random.key(0), (workload.batch, workload.length), 4, workload.vocab_size)
    batch: Batch = {'inputs': {'source': tokens, 'target': tokens}, 'targets': tokens,
                    'weights': jnp.ones(tokens.shape)}
    optimizer = optax.adam(1e-3, b2=0.98, eps=1e-9)
    state = init_state(module, optimizer, batch, seed=0)
    objective = supervised(functools.partial(cross_entropy, label_smoothing=0.1))
    step = jax.jit(functools.partial(train_step, objective=objective, apply=forward(module), optimizer=optimizer,
                                     dropout_key=jax.random.key(1)), donate_argnums=0)
    began = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    compile_s = time.perf_counter() - began

    def run():
        nonlocal state
        state, sums = compiled(state, batch)
        return sums

    times(run, 3)  # warm up
    report(times(run, RUNS.value), tokens.size, what | {'system': 'allyouneed', 'compile_s': round(compile_s, 2)})


def torch_times(workload: Workload, runs: int) -> list[float]:
    """Seconds a step of PyTorch's nn.Transformer with tied embeddings, in eager mode."""
    try:
        import torch  # pyright: ignore[reportMissingImports] (an extra of this benchmark)
    except ModuleNotFoundError:
        raise UserError("--peer=torch needs PyTorch: python -m pip install -e '.[benchmark]'") from None

    class Peer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(workload.vocab_size, workload.d_model)
            self.transformer = torch.nn.Transformer(
                workload.d_model, workload.num_heads, workload.num_layers, workload.num_layers, workload.d_ff,
                workload.dropout, batch_first=True)

        def forward(self, source, target):
            mask = torch.nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            hidden = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
            return hidden @ self.embedding.weight.T

    model = Peer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens = torch.randint(4, workload.vocab_size, (workload.batch, workload.length))

    def run():
        optimizer.zero_grad()
        logits = model(tokens, tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), label_smoothing=0.1).backward()
        optimizer.step()

    times(run, 3)  # warm up
    return times(run, runs)


if __name__ == '__main__':
    run_script(main)
