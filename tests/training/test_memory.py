"""The arrays that each device holds during train.py: one state, and in an evaluation also the gathered parameters."""

import collections
import gc
import hashlib
import json

import jax
import pytest

import inference
from run_directory import checkpoints, damage
from tests.tiny_run import start, tiny_config
from training import loop

MESHES = {'data and fsdp': {'parallel__data': 2, 'parallel__fsdp': 4},
          'tensor': {'parallel__data': 1, 'parallel__tensor': 8},
          'pmap': {'parallel__data': 8, 'parallel__mode': 'pmap'}}


def held(arrays):
    """Bytes on the device that has the most; what several arrays share, as a state and its shards do, counts once."""
    shards = {(shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
              for array in arrays for shard in array.addressable_shards}
    found = collections.Counter()
    for (device, _), size in shards.items():
        found[device] += size
    return max(found.values(), default=0)


def config_of(cache, **changes):
    """Matrices large beside all else: 0.6 MB of state."""
    return tiny_config(cache, model__d_model=64, model__d_ff=256, batch__rows=16, train__steps=4, eval__every=2,
                       checkpoint__every=3, **changes)


@pytest.fixture
def watch(monkeypatch):
    """watch(owner, name): what the device with the most holds whenever owner.name is called, of arrays made since."""
    gc.collect()
    others = jax.live_arrays()  # of other tests; held, so that their ids are used for nothing else
    known = {id(array) for array in others}

    def watch(owner, name):
        function, found = getattr(owner, name), []

        def measured(*arguments, **options):
            gc.collect()
            found.append(held(array for array in jax.live_arrays() if id(array) not in known))
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, measured)
        return found

    # Orbax holds copies of shards until they are written, which is not what is measured here.
    save = loop.Checkpoints.save
    monkeypatch.setattr(loop.Checkpoints, 'save', lambda self, *rest, **named: (
        save(self, *rest, **named), self.wait()))
    return watch


@pytest.fixture
def state_bytes(monkeypatch):
    """A list, of the bytes that the state of each training of this test has on the device with the most."""
    sizes, train_steps = [], loop.train_steps
    monkeypatch.setattr(loop, 'train_steps', lambda parts, state, *rest: (
        sizes.append(held(jax.tree.leaves(state))), train_steps(parts, state, *rest)))
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize('mesh', MESHES)
def test_no_device_holds_more_than_its_share_of_one_state(mesh, tmp_path, watch, state_bytes, monkeypatch):
    in_steps, when_saved, when_read, evaluating = (
        watch(loop.Compiled, 'train'), watch(checkpoints, 'checksums'), watch(damage, 'checksums'),
        watch(loop, 'evaluate'))
    config, models, make = config_of(tmp_path / 'cache', **MESHES[mesh]), [], loop.make_answerer
    monkeypatch.setattr(loop, 'make_answerer', lambda *arguments: models.append(make(*arguments)) or models[-1])

    # 4 steps, evaluated after every other one.
    start(tmp_path / 'run', config)
    size, = state_bytes
    assert len(in_steps) == 4 and max(in_steps) < 1.05 * size
    assert max(when_saved) < 1.05 * size  # of a state that is about to be saved
    gathered = held(jax.tree.leaves(inference.load(tmp_path / 'run', 'latest').model.params))
    assert len(evaluating) == 2 and max(evaluating) < 1.05 * size + gathered * ('fsdp' in mesh)

    # A start that resumes, and meets a damaged checkpoint first; its evaluation fails.
    config.train.steps = 5  # so that the run is not finished
    altered(tmp_path / 'run' / 'checkpoints' / '4')
    for found in (in_steps, when_read, state_bytes):
        found.clear()
    monkeypatch.setattr(loop, 'evaluate', failing)
    with pytest.raises(RuntimeError, match='this evaluation fails'):
        start(tmp_path / 'run', config)
    assert len(in_steps) == 1 and state_bytes == [size]
    assert when_read[0] < 1.05 * size and when_read[1] < 1.05 * size  # of steps 4 and 3
    assert max(in_steps) < 1.05 * size
    assert len(models) == 2 and [model.params for model in models] == [{}, {}]


def altered(checkpoint):
    """One array does not match its checksum any more, and all else is as it should be."""
    path = checkpoint / 'progress' / 'metadata'
    content = json.loads(path.read_text())
    del content['sha256']
    content['leaves']['params/head/kernel'][0] ^= 1
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content | {'sha256': digest}))


def failing(*_):
    raise RuntimeError('this evaluation fails')
