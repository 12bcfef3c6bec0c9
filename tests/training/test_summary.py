import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from configs import demo
from model import parameter_count
from model.build import build_model
from training.summary import duration, matmul_flops, parameter_table


def test_flops_of_products_loops_and_gradients():
    a, b = jnp.ones((3, 5)), jnp.ones((5, 7))
    one = 2 * 3 * 5 * 7
    assert matmul_flops(lambda a, b: a @ b, a, b) == one
    assert matmul_flops(jax.jit(jax.grad(lambda a, b: (a @ b).sum(), argnums=(0, 1))), a, b) == 3 * one
    batched = jnp.ones((4, 3, 5)), jnp.ones((4, 5, 7))
    assert matmul_flops(lambda a, b: jnp.einsum('bij,bjk->bik', a, b), *batched) == 4 * one

    # Rows sorted by which of the matrices each meets; its gradient is twice as much, in products of other shapes.
    ragged, counts = jnp.ones((4, 5, 7)), jnp.array([1, 0, 2, 0])
    assert matmul_flops(lambda a, b: jax.lax.ragged_dot(a, b, counts), a, ragged) == one
    gradient = jax.grad(lambda a, b: jax.lax.ragged_dot(a, b, counts).sum(), argnums=(0, 1))
    assert matmul_flops(gradient, a, ragged) == 3 * one

    def loop(a, b):
        return jax.lax.scan(lambda total, _: (total + a @ b, None), jnp.zeros((3, 7)), length=6)[0]
    assert matmul_flops(loop, a, b) == 6 * one


def test_shapes_are_enough_to_count():
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert matmul_flops(jnp.matmul, shape, shape) == 2 * 8 ** 3


@pytest.fixture(scope='module')
def params():
    config = demo.get_config()
    config.model.update(num_layers=3, d_model=16, d_ff=32, num_heads=2)
    module = build_model(config.model, source_vocab_size=50, target_vocab_size=50)
    tokens = jnp.ones((1, 2), int)
    return nn.unbox(jax.eval_shape(module.init, jax.random.key(0), source=tokens, target=tokens))['params']


def test_the_table_counts_every_parameter_once(params):
    table = parameter_table(params).splitlines()
    assert table[-1].split() == ['all', f'{parameter_count(params):,}']
    tops = [line for line in table[1:-1] if not line.startswith(' ')]
    assert sum(int(line.split()[1].replace(',', '')) for line in tops) == parameter_count(params)
    assert sum('each of 3 layers' in line for line in table) == 2
    assert any('query.kernel 16x2x8' in line for line in table)


def test_the_rows_of_the_table_have_the_order_of_the_parameters():
    names = [f'norm_{index}' for index in range(8)]
    stack = {'layers_0': {'kernel': jnp.zeros(2)}} | {name: jnp.zeros(2) for name in names}
    table = parameter_table({'encoder': stack})
    assert [line.split()[0] for line in table.splitlines() if 'norm' in line] == names


def test_durations_are_readable():
    assert [duration(s) for s in (40.0, 720.0, 12_600.0, 260_000.0)] == ['40 s', '12 min', '3.5 h', '3.0 days']


def test_a_parameter_beside_the_parts_has_a_line_of_its_own():
    table = parameter_table({'class_token': jnp.zeros((1, 1, 8)), 'head': {'kernel': jnp.zeros((8, 2))}}).splitlines()
    assert [line.split() for line in table[1:]] == [
        ['class_token', '8', '1x1x8'], ['head', '16', 'kernel', '8x2'], ['all', '24']]
