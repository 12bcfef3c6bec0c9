r"""The variations (A) to (E) of Table 3 of "Attention Is All You Need", scaled to the size of the recipe.

    python sweep.py --config=configs/demo.py --config.model.position=sinusoidal --sweep=configs/sweeps/table3.py \
                    --workdir=sweeps/table3

The paper varies its base model (6 layers, d_model 512, d_ff 2048, 8 heads of 64). Here each value of the paper's table
is multiplied by the ratio of the recipe's value to the base model's value. Dropout and label smoothing in (D) are not
scaled. Some runs are omitted: label smoothing if the recipe has no classes or tokens to smooth, and some numbers of
heads. A number of heads must divide the total width of the recipe's queries (d_k times its number of heads) and the
total width of its values (d_v times its number of heads). It must also be a multiple of model.num_key_value_heads.
"""

from configs.options import flatten, is_used
from configs.sweeps import over, zipped
from configs.sweeps.positions import learned


def get_sweep(config):
    model = config.model
    d_k = model.d_k or model.d_model // model.num_heads
    d_v = model.d_v or model.d_model // model.num_heads

    heads = [h for h in shares(model.num_heads, 1 / 8, 1 / 2, 2, 4)
             if d_k * model.num_heads % h == d_v * model.num_heads % h == h % (model.num_key_value_heads or 1) == 0]
    a = zipped(over('model.num_heads', heads),  # the same computation with fewer and wider, or more and narrower heads
               over('model.d_k', [d_k * model.num_heads // h for h in heads]),
               over('model.d_v', [d_v * model.num_heads // h for h in heads]))
    b = over('model.d_k', shares(d_k, 1 / 4, 1 / 2))  # narrow keys, which make it harder to match queries with keys
    c = (over('model.num_layers', shares(model.num_layers, 1 / 3, 2 / 3, 4 / 3))
         + zipped(over('model.d_model', [model.d_model // 2, model.d_model * 2]),
                  over('model.d_k', [max(1, d_k // 2), d_k * 2]), over('model.d_v', [max(1, d_v // 2), d_v * 2]))
         + over('model.d_ff', shares(model.d_ff, 1 / 2, 2)))  # larger models are better in the paper
    d = over('model.dropout', sorted({0.0, 0.2} - {model.dropout}))
    if is_used('train.label_smoothing', flatten(config)):
        d += over('train.label_smoothing', sorted({0.0, 0.2} - {config.train.label_smoothing}))
    e = [learned(config)] if model.position != 'learned' else []
    return [{}] + a + b + c + d + e


def shares(value, *shares):
    """Returns the products of `value` and each share, rounded to whole numbers, without `value` itself."""
    return sorted({max(1, round(value * share)) for share in shares} - {value})
