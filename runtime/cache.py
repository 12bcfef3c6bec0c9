"""The folder of cached files, which also contains JAX's cache of compiled programs."""

import logging
import os
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler  # JAX has no public interface to these modules

from runtime.files import expanded

log = logging.getLogger('allyouneed.train')


def cache_folder(cache_dir: str) -> Path:
    """Returns the folder where runs share tokenizers, token stores and compiled programs.

    Returns `cache_dir` (config.cache_dir), or the folder allyouneed in the user's cache if `cache_dir` is empty. The
    user's cache is $XDG_CACHE_HOME if this is an absolute path, and otherwise ~/.cache (XDG base directory
    specification).
    """
    if cache_dir:
        return expanded(cache_dir)
    users = Path(os.environ.get('XDG_CACHE_HOME', ''))
    return (users if users.is_absolute() else expanded('~/.cache')) / 'allyouneed'


def use_compilation_cache(cache: Path) -> None:
    """Makes JAX cache compiled programs in the folder `cache`, so that a second start takes only seconds.

    JAX_COMPILATION_CACHE_DIR overrides the folder.
    """
    if jax.config.values['jax_compilation_cache_dir'] is None:
        jax.config.update('jax_compilation_cache_dir', str(cache / 'xla'))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
    if jax.process_count() > 1 and jax.process_index() and jax.default_backend() == 'cpu':
        # In JAX, only process 0 writes to the cache. But on CPUs, the cache key of a program is different in every
        # process. So the other processes never find an entry of process 0, and would compile at every start.
        compiler._cache_write = _write_to_cache


def _write_to_cache(key: str, seconds: float, name: str, backend: Any, program: Any, callbacks: Any) -> None:
    """Writes a compiled program to JAX's persistent cache. This function replaces a private function of JAX."""
    if not callbacks:
        try:
            compilation_cache.put_executable_and_time(key, name, program, backend, int(seconds))
        except Exception as error:  # training does not depend on the cache
            log.warning('the compiled program %s cannot be written to the compilation cache: %s', name, error)
