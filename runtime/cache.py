"""The folder of cached files, and JAX's cache of compiled programs in it."""

import os
from pathlib import Path

import jax

from runtime.files import expanded


def cache_folder(cache_dir: str) -> Path:
    """Returns the folder where runs share tokenizers, token stores and compiled programs.

    This is config.cache_dir or, if that is empty, the folder allyouneed in the user's cache. By the XDG base directory
    specification, the user's cache is $XDG_CACHE_HOME or, if that is not an absolute path, ~/.cache.
    """
    if cache_dir:
        return expanded(cache_dir)
    users = Path(os.environ.get('XDG_CACHE_HOME', ''))
    return (users if users.is_absolute() else expanded('~/.cache')) / 'allyouneed'


def use_compilation_cache(cache: Path) -> None:
    """Caches compiled programs, so that a second start takes seconds; in JAX_COMPILATION_CACHE_DIR, if it is set."""
    if jax.config.values['jax_compilation_cache_dir'] is None:
        jax.config.update('jax_compilation_cache_dir', str(cache / 'xla'))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
