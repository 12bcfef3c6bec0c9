"""Prepares the peers of this project: other libraries that do the same work.

The peers use the fast settings that their documentation recommends.
"""

import functools
import importlib
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.turns import CORES, Ready
from benchmarks.workloads import (
    BETA2,
    BOS,
    EOS,
    EPSILON,
    LABEL_SMOOTHING,
    LEARNING_RATE,
    PAD,
    UNK,
    Search,
    Workload,
)


def torch_train_step(workload: Workload, compiled: bool, autocast: bool) -> Ready:
    """Returns a train step of PyTorch's nn.Transformer with the fused Adam, as a system for benchmarks.turns.

    If `compiled` is True, torch.compile compiles the model and the loss. If `autocast` is True, torch.autocast computes
    matrix products in bfloat16.
    """
    torch: Any = importlib.import_module('torch')
    torch.set_num_threads(CORES)
    model = torch_model(workload)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, (0.9, BETA2), EPSILON, fused=True)
    tokens = torch.randint(4, workload.vocab_size, (workload.batch, workload.length))
    loss = torch.compile(model) if compiled else model

    def call():
        optimizer.zero_grad()
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            value = loss(tokens, tokens, tokens)
        value.backward()
        optimizer.step()

    began = time.perf_counter()
    call()
    compile_s = {'compile_s': round(time.perf_counter() - began, 2)} if compiled else {}
    return Ready(call, {**compile_s, 'device': 'cpu', 'autocast': autocast, 'torch': torch.__version__})


def torch_model(workload: Workload) -> Any:
    """Returns a module that maps source, target and reference tokens to the loss.

    The module has dropout at the same places as the model of this project. nn.Transformer computes attention with
    scaled_dot_product_attention. The attention of nn.Transformer has biases, and the attention of this project has no
    biases.
    """
    torch: Any = importlib.import_module('torch')
    functional, length, width = torch.nn.functional, workload.length, workload.d_model

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(workload.vocab_size, width)
            torch.nn.init.normal_(self.embedding.weight, std=width ** -0.5)
            self.transformer = torch.nn.Transformer(width, workload.num_heads, workload.num_layers,
                                                    workload.num_layers, workload.d_ff, workload.dropout,
                                                    batch_first=True)
            self.transformer.encoder.norm = self.transformer.decoder.norm = None  # a post-norm stack has no final norm
            for module in self.transformer.modules():
                if isinstance(module, torch.nn.MultiheadAttention):
                    module.dropout = 0.0  # no dropout of the attention weights
                if isinstance(module, (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)):
                    module.dropout = torch.nn.Identity()  # no dropout inside the feed-forward sublayer
            self.register_buffer('positions', torch.tensor(sinusoids(length, width)))
            self.register_buffer('mask', torch.nn.Transformer.generate_square_subsequent_mask(length))

        def embed(self, tokens):
            return functional.dropout(self.embedding(tokens) * width ** 0.5 + self.positions, workload.dropout)

        def forward(self, source, target, reference):
            hidden = self.transformer(self.embed(source), self.embed(target), tgt_mask=self.mask, tgt_is_causal=True)
            logits = functional.linear(hidden, self.embedding.weight)
            return functional.cross_entropy(logits.flatten(0, 1), reference.flatten(), label_smoothing=LABEL_SMOOTHING)

    return Model()


def sinusoids(length: int, d_model: int) -> np.ndarray:
    """Returns the same sinusoids as model/positional.py, float32 [length, d_model]."""
    angles = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, d_model, 2) / d_model)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, d_model).astype(np.float32)


def ctranslate2_decode(workload: Workload, search: Search, model: str, workers: int = 1) -> Ready:
    """Returns CTranslate2's Translator in float32, as a system for benchmarks.turns.

    The weights and the sources are read from the file `model`. With one worker, all cores work on the whole batch. With
    more workers, each worker has a part of the batch and a part of the cores.
    """
    ctranslate2: Any = importlib.import_module('ctranslate2')
    with tempfile.TemporaryDirectory() as folder, np.load(model) as arrays:
        specification(workload, search.source + search.target, arrays).save(folder)
        sources = [list(map(str, source)) for source in arrays['sources']]
        began = time.perf_counter()
        translator = ctranslate2.Translator(folder, device='cpu', compute_type='float32', inter_threads=workers,
                                            intra_threads=CORES // workers)
        load_s = time.perf_counter() - began
    translate = functools.partial(
        translator.translate_batch, sources, max_batch_size=-(-search.batch // workers), beam_size=search.beam,
        max_decoding_length=search.target, min_decoding_length=search.target,
        suppress_sequences=[[str(token)] for token in (PAD, BOS, UNK)])
    # At the length limit, CTranslate2 writes any token, and this project writes the end token. So the last token is
    # not compared.
    answer = [list(map(int, result.hypotheses[0][:-1])) for result in translate()]
    return Ready(translate, {'load_s': round(load_s, 2), 'device': 'cpu', 'ctranslate2': ctranslate2.__version__},
                 answer)


def specification(workload: Workload, positions: int, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns the model as CTranslate2's TransformerSpec. `arrays` contains the weights by name."""
    specs: Any = importlib.import_module('ctranslate2.specs.transformer_spec')
    layers, heads, width = workload.num_layers, workload.num_heads, workload.d_model
    encoder = specs.TransformerEncoderSpec(layers, heads, pre_norm=False)
    decoder = specs.TransformerDecoderSpec(layers, heads, pre_norm=False)

    def norm(spec, name):
        spec.gamma, spec.beta = arrays[f'{name}_residual/norm/scale'], arrays[f'{name}_residual/norm/bias']

    def projection(*names):
        """Returns the matrices of several projections of the same input as one matrix, [out, in]."""
        return np.concatenate([arrays[f'{name}/kernel'].reshape(width, -1).T for name in names])

    def attention(spec, name, *groups):
        norm(spec.layer_norm, name)
        for linear, group in zip(spec.linear, groups, strict=False):
            linear.weight = projection(*(f'{name}/{part}' for part in group))
        spec.linear[-1].weight = np.ascontiguousarray(arrays[f'{name}/output/kernel'].reshape(-1, width).T)

    def feed_forward(spec, name):
        norm(spec.layer_norm, name)
        for linear, part in (spec.linear_0, 'inner'), (spec.linear_1, 'outer'):
            linear.weight = np.ascontiguousarray(arrays[f'{name}/{part}/kernel'].T)
            linear.bias = arrays[f'{name}/{part}/bias']

    for spec, stack in (encoder, 'encoder'), (decoder, 'decoder'):
        # CTranslate2's own sinusoids begin at position 1 and have other frequencies.
        spec.position_encodings.encodings = sinusoids(positions, width)
        for number, layer in enumerate(spec.layer):
            name = f'{stack}/layers_{number}'
            attention(layer.self_attention, f'{name}/self_attention', ('query', 'key', 'value'))
            if spec is decoder:
                attention(layer.attention, f'{name}/cross_attention', ('query',), ('key', 'value'))
            feed_forward(layer.ffn, f'{name}/feed_forward')
    table = arrays['target_embedding/embedding']
    encoder.embeddings[0].weight = decoder.embeddings.weight = decoder.projection.weight = table
    transformer = specs.TransformerSpec(encoder, decoder)
    transformer.config.layer_norm_epsilon = 1e-6
    transformer.config.unk_token, transformer.config.bos_token, transformer.config.eos_token = map(str, (UNK, BOS, EOS))
    transformer.config.decoder_start_token = str(BOS)
    pieces = list(map(str, range(workload.vocab_size)))
    transformer.register_source_vocabulary(pieces)
    transformer.register_target_vocabulary(pieces)
    transformer.validate()
    transformer.optimize()
    return transformer
