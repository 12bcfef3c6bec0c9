"""Imports libraries without their large optional dependencies."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without(module: str) -> Iterator[None]:
    """Makes an import of `module` raise ImportError in the body. Has no effect if `module` is already imported."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # pyright: ignore[reportArgumentType] (the documented value for this purpose)
    try:
        yield
    finally:
        del sys.modules[module]
