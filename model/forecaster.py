"""Forecasting of time series: a decoder-only Transformer over patches of a series.

The model reads a series in patches, as in `model/patches.py`. The mask is causal: each patch sees itself and the
previous patches, and predicts the next patch. Das et al. 2024 (TimesFM, arXiv:2310.10688) use this architecture.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kernels.dense import Dense
from model.blocks import BlockConfig, SelfAttentionStack
from model.dropout import Dropout
from model.patches import patches, positions
from model.places import place
from model.relation import Relation

SMALLEST_VARIANCE = 1e-5  # added to variances, because a constant context has variance 0


class Forecaster(nn.Module):
    """A causal Transformer that predicts the steps of a series after a context.

    The series is normalised with the mean and the variance of each channel of the context. In the predictions, the
    normalisation is reversed (Kim et al. 2022, reversible instance normalization). The outputs of the network are
    differences from the last value of the previous patch. So if all outputs are zero, the prediction is the naive
    forecast.

    Attributes:
      config, num_layers: options of config.model (configs/options.py).
      patch: the number of steps in a patch.
    """
    config: BlockConfig
    num_layers: int
    patch: int

    @nn.compact
    def __call__(self, inputs: Float[Array, 'batch context channels'],
                 following: Float[Array, 'batch horizon channels'],
                 deterministic: bool = True) -> Float[Array, 'batch values']:
        """Returns the predictions for the steps after the context, flattened: [batch, horizon * channels].

        The prediction of a patch depends on the context and on the patches of `following` before this patch (teacher
        forcing). `patch` must divide the lengths of the context and of `following`.
        """
        config, patch, (batch, horizon, channels) = self.config, self.patch, following.shape
        mean, variance = inputs.mean(axis=1, keepdims=True), inputs.var(axis=1, keepdims=True)
        scale = jnp.sqrt(variance + SMALLEST_VARIANCE)
        series = (jnp.concatenate([inputs, following[:, :-patch]], axis=1) - mean) / scale
        x = Dense(config.d_model, ('patch', 'embed'), dtype=config.dtype, name='embedding')(patches(series, patch))
        x = place(self, 'embedding', x)
        x = x + positions(self, config, x.shape[1], x.shape[1:2]).astype(x.dtype)
        x = Dropout(config.dropout)(x, deterministic)
        relation = Relation.within(np.arange(x.shape[1])[None], causal=True)
        # Like the stack of a language model, this stack has the name 'encoder', because it has no cross-attention.
        x = SelfAttentionStack(config, self.num_layers, name='encoder')(x, relation, deterministic)
        first = inputs.shape[1] // patch - 1  # the last patch of the context predicts the first patch after it
        head = Dense(patch * channels, ('embed', 'vocab'), kernel_init=nn.initializers.lecun_normal(),
                     bias_axes=('vocab',), name='head')
        outputs = place(self, 'head', head(x[:, first:]).reshape(batch, horizon * channels))
        changes = outputs.reshape(batch, horizon // patch, patch, channels)
        last = series[:, patch - 1::patch][:, first:, None]
        return ((changes + last).reshape(following.shape) * scale + mean).reshape(batch, horizon * channels)
