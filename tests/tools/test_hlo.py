"""The text of compiled programs is read line by line."""

from tools.hlo import arrays_of, computations_of


def test_shapes_arguments_and_attributes_are_distinguished():
    computations, entry = computations_of('''HloModule jit_step, is_scheduled=true

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %add = f32[] add(%x, f32[]{:T(128)} %x)
}

ENTRY %main (a: (s32[], (f32[8], f32[2,3]))) -> f32[] {
  %a = (s32[], (f32[8]{0:T(8)S(1)}, /*index=2*/f32[2,3]{1,0:T(8,128)})) parameter(0)
  ROOT %call = f32[] call(%a, %a.1), to_apply=%sum, metadata={op_name="jit(step)/layer/add"}
}
''')
    assert entry == 'main' and {name: list(each) for name, each in computations.items()} == {
        'sum': ['x', 'add'], 'main': ['a', 'call']}
    add, a, call = computations['sum']['add'], computations['main']['a'], computations['main']['call']
    assert (add.opcode, add.operands, add.attributes, add.place, add.called('to_apply')) == (
        'add', ('x', 'x'), '', '', '')
    assert (a.opcode, a.arguments) == ('parameter', '0')
    assert arrays_of(a.shape) == [('s32', [], ''), ('f32', [8], '{0:T(8)S(1)}'), ('f32', [2, 3], '{1,0:T(8,128)}')]
    assert (call.operands, call.place, call.called('to_apply')) == (('a', 'a.1'), 'jit(step)/layer/add', 'sum')
