"""Writes a trained model in the format of CTranslate2 (Klein et al. 2020; https://opennmt.net/CTranslate2).

The code fills the specification classes of the package ctranslate2: TransformerSpec for an encoder-decoder, and
TransformerDecoderModelSpec for a language model. In CTranslate2, weights are [out, in], and the weights of queries,
keys and values of a self-attention layer are one array.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Float
from ml_collections import ConfigDict

from input_pipeline.tokenizer import BOS, EOS, SPECIAL, UNK
from interchange.equal_models import head_widths
from interchange.tokenizer_files import unique_pieces, write_tokenizers
from model.embedding import with_absent
from model.positional import MAX_DISTANCE, sinusoids
from run_directory.trained import TrainedModel
from runtime.errors import UserError

QUANTIZATIONS = ('float32', 'int8', 'float16')
ACTIVATIONS = {'relu': 'RELU', 'gelu': 'GELUTanh', 'gelu_exact': 'GELU', 'silu': 'SWISH'}
SUPPORTED = {  # {option of config.model: the values that CTranslate2 can compute}. All other values are refused.
    'attention_bias': ('none', 'qkv', 'all'), 'norm': ('post', 'pre'), 'norm_function': ('layer_norm', 'rms_norm'),
    'feed_forward': ('plain', 'gated'), 'activation': tuple(ACTIVATIONS), 'score': ('scaled_dot', 'dot', 'general'),
    'position': ('sinusoidal', 'learned', 'rotary', 'relative', 'alibi', 'none'), 'rotary_scaling': ('none', 'linear'),
    'share_embeddings': ('all', 'target', 'none')}
LEAST_POSITIONS = 1024  # the smallest number of rows of a table of sinusoids; CTranslate2 needs a row for each position


def refusals(config: ConfigDict) -> list[str]:
    """Returns a message for each option in `config` that CTranslate2 does not support."""
    model = config.model
    if model.kind not in ('transformer', 'language_model'):
        return [f'model.kind={model.kind}: only transformer and language_model can be exported to this format. Use the '
                'format safetensors']
    d_k, d_v = head_widths(model)
    possible = {
        **{f'model.{name}={model[name]}': model[name] in values for name, values in SUPPORTED.items()},
        f'model.score={model.score} together with model.position=rotary':
            model.score != 'general' or model.position != 'rotary',
        f'model.d_v={d_v} and model.d_k={d_k}: the two must be equal': d_k == d_v,
        'model.position=alibi: CTranslate2 supports this bias only in language models, not in an encoder':
            model.position != 'alibi' or model.kind == 'language_model',
        f'model.window={model.window}: CTranslate2 uses a window for generation but not for scoring':
            not model.window or model.kind == 'language_model' and model.window >= config.data.context,
    }
    return [option for option, holds in possible.items() if not holds]


def write_ctranslate2(trained: TrainedModel, folder: Path, quantization: str = 'float32') -> None:
    """Writes model.bin, config.json and the vocabulary of a trained model into an existing folder.

    Args:
      trained: a Transformer or a language model.
      folder: the folder for the files.
      quantization: the type of the weights, one of QUANTIZATIONS.

    Raises:
      UserError: if CTranslate2 is not installed, or does not support the model.
    """
    if importlib.util.find_spec('ctranslate2') is None:
        raise UserError("CTranslate2 is not installed. Run pip install -e '.[interchange]'")
    if refused := refusals(trained.config):
        raise UserError('CTranslate2 does not support these options of the model: '
                        + '; '.join(f'config.{option}' for option in refused))
    spec = _Writer(trained).specification()
    spec.validate()
    spec.optimize(quantization=None if quantization == 'float32' else quantization)
    spec.save(str(folder))
    write_tokenizers(trained.tokenizers, folder)


class _Writer:
    """A writer that fills CTranslate2's specifications with the parameters of a model."""

    def __init__(self, trained: TrainedModel):
        self.specs: Any = importlib.import_module('ctranslate2.specs')
        self.config, self.tokenizers, self.sizes = trained.config, trained.tokenizers, trained.sizes
        self.model = trained.config.model
        self.arrays: Mapping[str, np.ndarray] = {  # copies, because CTranslate2 quantises the arrays in place
            name: np.array(leaf, np.float32) for name, leaf in flatten_dict(trained.params, sep='/').items()}

    def specification(self) -> Any:
        """Returns the specification of the whole model: layers, vocabularies, and start and end tokens."""
        spec = self._translator() if self.model.kind == 'transformer' else self._generator()
        spec.config.layer_norm_epsilon = self.model.norm_epsilon
        spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = (SPECIAL[each] for each in
                                                                               (BOS, EOS, UNK))
        return spec

    def _translator(self):
        encoder = self.specs.TransformerEncoderSpec(self.model.num_layers, self.model.num_heads, **self._options())
        decoder = self.specs.TransformerDecoderSpec(
            self.model.num_decoder_layers or self.model.num_layers, self.model.num_heads, **self._options())
        source = 'target' if self.model.share_embeddings == 'all' else 'source'
        self._stack(encoder, encoder.embeddings[0], 'encoder', source)
        self._stack(decoder, decoder.embeddings, 'decoder', 'target')
        self._positions(encoder, 'source_position')
        self._positions(decoder, 'target_position')
        self._project(decoder, 'target_embedding/embedding', tied=self.model.share_embeddings != 'none')
        spec = self.specs.TransformerSpec(encoder, decoder)
        spec.register_source_vocabulary(unique_pieces(self.tokenizers['source']))
        spec.register_target_vocabulary(unique_pieces(self.tokenizers['target']))
        spec.config.decoder_start_token, spec.config.add_source_eos = SPECIAL[BOS], True
        return spec

    def _generator(self):
        decoder = self.specs.TransformerDecoderSpec(
            self.model.num_layers, self.model.num_heads, with_encoder_attention=False,
            alibi=self.model.position == 'alibi', **self._options())
        self._stack(decoder, decoder.embeddings, 'encoder', '')
        self._positions(decoder, 'position')
        self._project(decoder, 'embedding/embedding', tied=self.model.tie_embeddings)
        spec = self.specs.TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(unique_pieces(self.tokenizers['text']))
        return spec

    def _options(self) -> dict[str, Any]:
        activation = getattr(importlib.import_module('ctranslate2.specs.common_spec').Activation,
                             ACTIVATIONS[self.model.activation])
        options = {'pre_norm': self.model.norm == 'pre', 'activation': activation,
                   'head_dim': head_widths(self.model)[0], 'rms_norm': self.model.norm_function == 'rms_norm',
                   'ffn_glu': self.model.feed_forward == 'gated'}
        if self.model.num_key_value_heads not in (0, self.model.num_heads):
            options |= {'num_heads_kv': self.model.num_key_value_heads}
        if self.model.position == 'rotary':
            options |= {'rotary_dim': 0, 'rotary_interleave': True,  # 0: all d_k elements are rotated
                        'rotary_base': self.model.rotary_base}
        if self.model.rotary_scaling == 'linear':
            options |= {'rotary_scaling_type': self.specs.RotaryScalingType.Linear,
                        'rotary_scaling_factor': self.model.rotary_factor}
        if self.model.position == 'relative':
            options |= {'relative_attention_bias': True}
        return options

    def _positions(self, spec, name):
        """Sets the table of positions explicitly.

        Without the table, CTranslate2 would compute sinusoids that begin at position 1 and have other frequencies.
        """
        if not hasattr(spec, 'position_encodings'):
            return
        data = self.config.data
        longest = data.max_length if self.model.kind == 'transformer' else data.context
        count = max(LEAST_POSITIONS, 2 * (longest + self.config.decode.extra_length))
        if self.model.position == 'learned':
            table = self.arrays[f'{name}/table']
        elif self.model.position == 'sinusoidal':
            table = np.asarray(sinusoids(jnp.arange(count), self.model.d_model), np.float32)
        else:
            table = np.zeros((count, self.model.d_model), np.float32)
        spec.position_encodings.encodings = table

    def _project(self, spec, embedding, tied):
        if tied:
            spec.projection.weight = self.arrays[embedding]
        else:
            spec.projection.weight = _transposed(self.arrays['output/kernel'])
        learned, absent = self.arrays.get('logits_bias'), self.sizes.get('absent', ())
        if learned is not None or absent:
            bias = None if learned is None else jnp.asarray(learned)
            spec.projection.bias = np.asarray(with_absent(bias, absent, len(spec.projection.weight)))

    def _stack(self, spec, embeddings, stack, side):
        spec.scale_embeddings = self.model.scale_embeddings
        embeddings.weight = self.arrays[f'{side}_embedding/embedding'.lstrip('_')]
        for number, layer in enumerate(spec.layer):
            name = f'{stack}/layers_{number}'
            self._attention(layer.self_attention, f'{name}/self_attention', ('query', 'key', 'value'))
            if self.model.position == 'relative':
                # In CTranslate2, each layer has its own table. In this project, the layers of a stack share one table.
                layer.self_attention.relative_attention_bias = self.arrays[f'{stack}/relative/table']
                layer.self_attention.relative_attention_max_distance = np.dtype('int32').type(MAX_DISTANCE)
            if hasattr(layer, 'attention'):
                self._attention(layer.attention, f'{name}/cross_attention', ('query',), ('key', 'value'))
            self._feed_forward(layer.ffn, f'{name}/feed_forward')
        if self.model.norm == 'pre':
            self._norm(spec.layer_norm, f'{stack}/final_norm')

    def _attention(self, spec, name, *groups):
        self._norm(spec.layer_norm, f'{name}_residual/norm')
        for linear, group in zip(spec.linear, groups, strict=False):
            linear.weight = np.concatenate([self._projection(name, each) for each in group])
            if self.model.attention_bias != 'none':
                linear.bias = np.concatenate([self._bias(name, each) for each in group])
        output = self.arrays[f'{name}/output/kernel']
        spec.linear[-1].weight = _transposed(output.reshape(-1, output.shape[-1]))
        if self.model.attention_bias == 'all':
            spec.linear[-1].bias = self.arrays[f'{name}/output/bias']
        if self.model.score != 'scaled_dot':
            spec.queries_scale = np.dtype('float32').type(1)

    def _projection(self, name: str, part: str) -> Float[np.ndarray, 'out d_model']:
        kernel = self.arrays[f'{name}/{part}/kernel']
        if part == 'query' and self.model.score == 'general':  # score = q' W k: W is multiplied into q
            kernel = np.einsum('dhq,hqk->dhk', kernel, self.arrays[f'{name}/score_weight'])
        return _transposed(kernel.reshape(kernel.shape[0], -1))

    def _bias(self, name: str, part: str) -> Float[np.ndarray, ' out']:
        bias = self.arrays[f'{name}/{part}/bias']
        if part == 'query' and self.model.score == 'general':
            bias = np.einsum('hq,hqk->hk', bias, self.arrays[f'{name}/score_weight'])
        return bias.reshape(-1)

    def _feed_forward(self, spec, name):
        self._norm(spec.layer_norm, f'{name}_residual/norm')
        gated = self.model.feed_forward == 'gated'
        parts = {'linear_0': 'gate', 'linear_0_noact': 'inner'} if gated else {'linear_0': 'inner'}
        for attribute, part in {**parts, 'linear_1': 'outer'}.items():
            linear = getattr(spec, attribute)
            linear.weight = _transposed(self.arrays[f'{name}/{part}/kernel'])
            if self.model.feed_forward_bias:
                linear.bias = self.arrays[f'{name}/{part}/bias']

    def _norm(self, spec, name):
        spec.gamma = self.arrays[f'{name}/scale']
        if self.model.norm_function == 'layer_norm':
            spec.beta = self.arrays[f'{name}/bias']


def _transposed(kernel: Float[np.ndarray, 'inputs outputs']) -> Float[np.ndarray, 'outputs inputs']:
    return np.ascontiguousarray(kernel.T)
