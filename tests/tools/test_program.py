"""Traffic and collectives of compiled programs: some programs are written by hand, and XLA compiled the others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tools.program import Program, axes_of, group_of

MESH = {'data': 2, 'fsdp': 2, 'tensor': 2}
HEADER = 'HloModule jit_step, is_scheduled=true\n\n'


def test_what_stays_in_the_core_moves_no_bytes():
    program = Program(HEADER + '''ENTRY %main (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %b = f32[8,128]{1,0:T(8,128)S(1)} add(%a, %a), metadata={op_name="jit(step)/layer/add"}
  ROOT %c = f32[8,128]{1,0:T(8,128)} multiply(%b, %b)
}
''', MESH)
    size = 4 * 8 * 128
    assert [(op.name, op.bytes, op.place) for op in program.ops()] == [('b', 2 * size, 'jit(step)/layer/add'),
                                                                       ('c', size, '')]
    assert program.traffic() == 3 * size


@pytest.mark.parametrize('known', [', backend_config={"known_trip_count":{"n":"7"}}', ''])
def test_a_loop_counts_each_iteration(known):
    program = Program(HEADER + f'''%body (p: (s32[], f32[10])) -> (s32[], f32[10]) {{
  %p = (s32[], f32[10]{{0}}) parameter(0)
  %x = f32[10]{{0}} get-tuple-element(%p), index=1
  %y = f32[10]{{0}} negate(%x)
  ROOT %t = (s32[], f32[10]{{0}}) tuple(%x, %y)
}}

%condition (q: (s32[], f32[10])) -> pred[] {{
  %q = (s32[], f32[10]{{0}}) parameter(0)
  %limit = s32[] constant(7)
  %i = s32[] get-tuple-element(%q), index=0
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}}

ENTRY %main (a: (s32[], f32[10])) -> (s32[], f32[10]) {{
  %a = (s32[], f32[10]{{0}}) parameter(0)
  ROOT %w = (s32[], f32[10]{{0}}) while(%a), condition=%condition, body=%body{known}
}}
''', MESH)
    assert program.traffic() == 7 * 80


def test_a_part_that_is_overwritten_or_read_counts_as_that_part():
    program = Program(HEADER + '''%fused_computation (p: f32[100,10], u: f32[1,10]) -> f32[100,10] {
  %p = f32[100,10]{1,0} parameter(0)
  %u = f32[1,10]{1,0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %dus = f32[100,10]{1,0} dynamic-update-slice(%p, %u, %zero, %zero)
}

%fused_computation.1 (p: f32[100,10], i: s32[]) -> f32[1,10] {
  %p.1 = f32[100,10]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %ds = f32[1,10]{1,0} dynamic-slice(%p.1, %i.1, %i.1), dynamic_slice_sizes={1,10}
  ROOT %n = f32[1,10]{1,0} negate(%ds)
}

ENTRY %main (a: f32[100,10], i: s32[]) -> f32[100,10] {
  %a = f32[100,10]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %read = f32[1,10]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused_computation.1
  ROOT %write = f32[100,10]{1,0} fusion(%a, %read), kind=kLoop, calls=%fused_computation
}
''', MESH)
    assert {op.name: op.bytes for op in program.ops()} == {'read': 40 + 40 + 4, 'write': 40 + 40}


def test_of_a_branch_the_dearer_way_counts():
    program = Program(HEADER + '''%cheap (p: f32[10]) -> f32[10] {
  ROOT %p = f32[10]{0} parameter(0)
}

%dear (q: f32[10]) -> f32[10] {
  %q = f32[10]{0} parameter(0)
  ROOT %n = f32[10]{0} negate(%q)
}

ENTRY %main (c: pred[], a: f32[10]) -> f32[10] {
  %c = pred[] parameter(0)
  %a = f32[10]{0} parameter(1)
  ROOT %r = f32[10]{0} conditional(%c, %a, %a), branch_computations={%cheap, %dear}
}
''', MESH)
    assert program.traffic() == 80


@pytest.mark.parametrize('text, group', [
    ('replica_groups={{0,1},{2,3}}', [0, 1]),
    ('replica_groups=[4,2]<=[8]', [0, 1]),
    ('replica_groups=[2,4]<=[4,2]T(1,0)', [0, 2, 4, 6]),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", [0, 1, 2, 3]),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", [0, 4]),
    ("replica_groups=mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}", [0, 1]),
    ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", [0, 2]),
    ('replica_groups={}', list(range(8))),
    ('source_target_pairs={{0,4},{4,0}}', [0, 4]),
])
def test_groups_in_every_notation(text, group):
    assert group_of(f'channel_id=1, {text}, use_global_device_ids=true', 8) == group


def test_axes_are_those_along_which_a_group_differs():
    ids = np.arange(8).reshape(2, 2, 2)
    assert axes_of(ids[:, 0, 0], MESH) == 'data'
    assert axes_of(ids[1, :, 1], MESH) == 'fsdp'
    assert axes_of(ids[:, :, 1].ravel(), MESH) == 'data+fsdp'
    assert axes_of(ids.ravel(), MESH) == 'data+fsdp+tensor'


def compiled(function, sharding_in, sharding_out, shape):
    mesh = jax.make_mesh((2, 2, 2), tuple(MESH), axis_types=(AxisType.Auto,) * 3)
    where = functools.partial(NamedSharding, mesh)
    argument = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where(sharding_in))
    return jax.jit(function, out_shardings=where(sharding_out)).lower(argument).compile().as_text()


def test_collectives_of_compiled_programs():
    found = Program(compiled(lambda x: x * 2, PartitionSpec('fsdp'), PartitionSpec(), (64, 32)), MESH).collectives()
    assert [(each.kind, each.axes, each.size, each.bytes, each.times) for each in found] == [
        ('all-gather', 'fsdp', 2, 4 * 64 * 32, 1)]
    rows = PartitionSpec(('data', 'fsdp'))
    found = Program(compiled(lambda x: x.sum(axis=0), rows, PartitionSpec(), (64, 32)), MESH).collectives()
    assert [(each.kind, each.axes, each.size, each.bytes) for each in found] == [('all-reduce', 'data+fsdp', 4, 128)]


def test_an_asynchronous_collective_counts_all_its_results():
    program = Program(HEADER + '''ENTRY %main (a: bf16[128,512], b: bf16[64,512]) -> bf16[512,512] {
  %a = bf16[128,512] parameter(0)
  %b = bf16[64,512] parameter(1)
  %start = ((bf16[128,512], bf16[64,512]), (bf16[512,512], bf16[256,512])) all-gather-start(%a, %b), channel_id=1, \
replica_groups={{0,1,2,3}}, dimensions={0}
  %done = (bf16[512,512], bf16[256,512]) all-gather-done(%start)
  ROOT %result = bf16[512,512] get-tuple-element(%done), index=0
}
''', MESH)
    [collective] = program.collectives()
    assert (collective.kind, collective.bytes) == ('all-gather', 2 * (512 + 256) * 512)


def test_traffic_of_a_compiled_loop_grows_with_its_iterations():
    def traffic(count):
        def many(x):
            return jax.lax.scan(lambda carry, _: (jnp.sin(carry @ carry), None), x, None, length=count)[0]
        return Program(jax.jit(many).lower(jnp.ones((128, 128))).compile().as_text(), {'data': 1}).traffic()

    one = 4 * 128 * 128
    assert 2 * one <= (traffic(40) - traffic(20)) / 20 <= 12 * one
