"""Published figures, and the times that they bound: worked values."""

import pytest

from runtime.errors import UserError
from tools.chips import CHIPS, Bounds, gpu_share, link_seconds, parse_topology
from tools.program import Collective


def test_topologies_are_read():
    found = parse_topology('v5p:2x2x4')
    assert (found.chip.name, found.shape, found.devices, str(found)) == ('v5p', (2, 2, 4), 16, 'v5p:2x2x4')
    assert parse_topology('v5e:16x16', slices=2).devices == 512
    assert parse_topology('h100:16').devices == 16


@pytest.mark.parametrize('text', ['', 'v5e', 'v5e:', 'v5e:4', 'v5e:4x4x4', 'v5e:4x', 'v5e:0x4', 'v5e:-1x4', 'v99:4x4',
                                  'h100:2x8', 'h100:x', 'v5e:4X4', 'v5e:4x4\n', 'v5e: 4x4', 'v5e:٤x٤'])
def test_others_are_refused(text):
    with pytest.raises(UserError, match='--topology='):
        parse_topology(text)


@pytest.mark.parametrize('text', ['x', '0', '-1', '1.5', 'nan', '75%'])
def test_a_share_of_the_memory_that_jax_cannot_use_is_refused(text):
    with pytest.raises(UserError, match=f'^XLA_CLIENT_MEM_FRACTION={text}: must be a number above 0 and up to 1'):
        gpu_share({'XLA_CLIENT_MEM_FRACTION': text})
    assert gpu_share({}) == 0.75 and gpu_share({'XLA_CLIENT_MEM_FRACTION': '0.9'}) == 0.9


def test_an_all_reduce_of_a_ring():
    # 1.8 GB over 4 chips of v5e along one axis of the torus each way: 2 * 3/4 of it, at 2 axes x 90 GB/s.
    topology = parse_topology('v5e:2x2')
    one = Collective('all-reduce', 'data', 4, 1.8e9, 1)
    mesh = {'data': 4, 'fsdp': 1, 'tensor': 1}
    assert link_seconds([one], topology, mesh) == pytest.approx(2 * 0.75 * 1.8e9 / 1.8e11)
    gather = Collective('all-gather', 'data', 2, 1.8e9, 1)
    assert link_seconds([gather], topology, mesh | {'data': 2}) == pytest.approx(0.5 * 1.8e9 / 9e10)
    assert link_seconds([one], parse_topology('v5e:1x4'), mesh) == pytest.approx(2 * 0.75 * 1.8e9 / 9e10)
    permute = Collective('collective-permute', 'data', 4, 1.8e9, 1)  # one axis of 90 GB/s, in one of two directions
    assert link_seconds([permute], topology, mesh) == pytest.approx(1.8e9 / 4.5e10)


def test_between_slices_the_network_counts():
    topology = parse_topology('v5e:2x2', slices=2)
    mesh = {'data': 2, 'fsdp': 4, 'tensor': 1}
    one = Collective('all-reduce', 'data+fsdp', 8, 8e9, 1)
    within, between = 0.75 * 8e9 / 1.8e11, 8e9 / 4 * 0.5 / 3.125e9
    assert link_seconds([one], topology, mesh) == pytest.approx(2 * (within + between))
    # With only fsdp, no bytes leave a slice. With only data, all bytes leave the slice.
    assert link_seconds([Collective('all-gather', 'fsdp', 4, 8e9, 1)], topology, mesh) == pytest.approx(within)
    assert link_seconds([Collective('all-reduce', 'data', 2, 8e9, 1)], topology, mesh) == pytest.approx(
        2 * 8e9 * 0.5 / 3.125e9)


@pytest.mark.parametrize('name, slices, within, between', [
    ('a100:4', 2, 1e9 * 3 / 4 / 3e11, 1e9 / 4 / 2 / 2.5e10), ('a100:8', 1, 1e9 * 7 / 8 / 3e11, 0),
    ('a100:16', 1, 1e9 * 7 / 8 / 3e11, 1e9 / 8 / 2 / 2.5e10), ('a100:8', 2, 1e9 * 7 / 8 / 3e11, 1e9 / 8 / 2 / 2.5e10)])
def test_gpus_of_several_machines_use_the_network(name, slices, within, between):
    topology = parse_topology(name, slices)
    gradients = Collective('all-reduce', 'data', topology.devices, 1e9, 1)
    assert link_seconds([gradients], topology, {'data': topology.devices, 'fsdp': 1, 'tensor': 1}) == pytest.approx(
        2 * (within + between))


def test_what_bounds_a_step():
    bounds = Bounds(arithmetic=0.5, memory=2.0, links=1.0)
    assert (bounds.seconds, bounds.limit, bounds.share) == (2.0, 'memory', 0.25)


def test_figures_are_of_one_order():
    for chip in CHIPS.values():
        assert 1e14 < chip.flops < 1e15 and 1e10 < chip.memory < 2e11 and 5e11 < chip.bandwidth < 1e13
        assert chip.network < chip.link < chip.bandwidth and 100 < chip.flops / chip.bandwidth < 700
