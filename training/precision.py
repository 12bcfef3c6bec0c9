"""Chooses the precision of matrix products that is faster on this processor (config.train.matmul_precision=auto)."""

import logging

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from kernels import rates
from runtime.agreement import from_leader

AUTO = 'auto'
ROWS = 2048  # maximum number of rows of the measured products, so that the measurement takes less than a second
log = logging.getLogger('allyouneed.train')


def resolve_precision(config: ConfigDict, tokens: int) -> None:
    """Replaces config.train.matmul_precision=auto by 'bfloat16' or 'default', the same on all processes.

    On CPUs, the function measures float32 and bfloat16 products and logs their rates. Accelerators get 'default',
    because this is their fast precision. `tokens` is the number of tokens or pixels in a batch. A new run saves the
    choice in its config.json, so a resumed run keeps this choice (`RunDirectory`).
    """
    if config.train.matmul_precision == AUTO:
        config.train.matmul_precision = from_leader('the precision of products', lambda: _faster(config, tokens))


def planned_precision(config: ConfigDict) -> str:
    """Returns config.train.matmul_precision, but 'default' instead of 'auto', because a plan measures no products."""
    precision = config.train.matmul_precision
    return 'default' if precision == AUTO else precision


def product_sizes(config: ConfigDict, tokens: int) -> list[rates.Sizes]:
    """Returns the sizes of three products of a feed-forward sublayer: two forward products and a matrix gradient."""
    rows, width, hidden = min(tokens, ROWS), config.model.d_model, config.model.d_ff
    return [(rows, width, hidden), (rows, hidden, width), (width, rows, hidden)]


def _faster(config, tokens):
    if jax.default_backend() != 'cpu':
        return 'default'
    sizes = product_sizes(config, tokens)
    single, half = (rates.product_rate(sizes, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    chosen = 'bfloat16' if half > single else 'default'
    log.info('train.matmul_precision=auto: products run at %.0f GFLOP/s in float32 and at %.0f GFLOP/s in bfloat16. '
             'This run uses %s', single, half, chosen)
    return chosen
