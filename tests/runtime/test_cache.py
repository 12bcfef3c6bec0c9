"""The folder of the cache, and the compiled programs in it."""

import os

import jax
import pytest

from runtime.cache import cache_folder, use_compilation_cache
from tests.mappings import drop_programs, mappings


@pytest.mark.parametrize('asked, users, expected', [
    ('', '/somewhere/cache', '/somewhere/cache/allyouneed'), ('', '', '{home}/.cache/allyouneed'),
    ('', 'not/absolute', '{home}/.cache/allyouneed'), ('', None, '{home}/.cache/allyouneed'),
    ('/mine', '/somewhere/cache', '/mine'), ('~/mine', '/somewhere/cache', '{home}/mine')])
def test_where_the_cache_is(tmp_path, monkeypatch, asked, users, expected):
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    if users is not None:
        monkeypatch.setenv('XDG_CACHE_HOME', users)
    assert str(cache_folder(asked)) == expected.format(home=tmp_path)


def test_compiled_programs_are_kept_in_the_chosen_folder_or_else_in_the_cache(tmp_path):
    chosen = jax.config.jax_compilation_cache_dir
    assert chosen == os.environ['JAX_COMPILATION_CACHE_DIR']
    use_compilation_cache(tmp_path)
    assert jax.config.jax_compilation_cache_dir == chosen
    try:
        jax.config.update('jax_compilation_cache_dir', None)
        use_compilation_cache(tmp_path)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / 'xla')
    finally:
        jax.config.update('jax_compilation_cache_dir', chosen)


@pytest.mark.skipif(not mappings(), reason='only Linux counts memory mappings')
@pytest.mark.slow
def test_dropped_programs_have_no_memory_mappings():
    programs = [jax.jit(lambda x, number=number: x * number) for number in range(10)]
    jax.jit(lambda x: x - 1)(2.0)  # the first program of a process also makes mappings that remain
    before = mappings()
    results = [program(2.0) for program in programs]
    after = mappings()
    assert after > before + len(programs)
    drop_programs(most=after + 1000)
    assert mappings() > before + len(programs)
    drop_programs(most=1)
    assert mappings() < (before + after) / 2  # the process itself also has a few more
    assert [program(2.0) for program in programs] == results
