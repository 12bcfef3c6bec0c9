"""Measures the speed of matrix products, and reads the name and the instructions of this machine's processor."""

import platform
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

INSTRUCTIONS = 'avx2', 'avx512f', 'avx512_vnni', 'avx512_bf16', 'amx_bf16', 'amx_int8', 'asimd', 'bf16', 'sve'
RUNS = 5  # the fastest of these runs is used

Sizes = tuple[int, int, int]  # (n, d, f) of a product [n, d] x [d, f]


def product_seconds(sizes: Sizes, dtype: DTypeLike) -> float:
    """Returns the time in seconds of a product of two float32 matrices, which are first rounded to `dtype`.

    The sums are in float32. The time includes the rounding, as in kernels/product.py.
    """
    rows, inner, columns = sizes
    product = jax.jit(lambda left, right: jnp.dot(left.astype(dtype), right.astype(dtype),
                                                  preferred_element_type=jnp.float32))
    left, right = jnp.ones((rows, inner)), jnp.ones((inner, columns))
    jax.block_until_ready(product(left, right))  # compiles
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        jax.block_until_ready(product(left, right))
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def product_rate(sizes: Iterable[Sizes], dtype: DTypeLike) -> float:
    """Returns the rate in GFLOP/s at which products of these sizes are computed one after the other."""
    sizes = list(sizes)
    return 2e-9 * sum(n * d * f for n, d, f in sizes) / sum(product_seconds(size, dtype) for size in sizes)


def processor() -> dict[str, Any]:
    """Returns the name of the processor and its instructions for vectors and matrices, as far as Linux reports them."""
    path = Path('/proc/cpuinfo')
    text = path.read_text() if path.exists() else ''
    name = re.search(r'model name\s*:\s*(.+)', text)
    features = re.search(r'(?:flags|Features)\s*:(.+)', text)
    present = features[1].split() if features else []
    return {'processor': name[1] if name else platform.processor() or platform.machine(),
            'instructions': [feature for feature in INSTRUCTIONS if feature in present]}
