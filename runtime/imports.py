"""Imports of libraries without the large libraries that they do not need."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without(module: str) -> Iterator[None]:
    """Makes an import of `module` raise ImportError, as if it were not installed, unless it is already imported."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # pyright: ignore[reportArgumentType] (the documented value for this purpose)
    try:
        yield
    finally:
        del sys.modules[module]
