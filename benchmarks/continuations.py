"""Continuation of prompts with a language model of GPT-2's size, by this project and its peers, for benchmarks.decode.

Weights and prompts are random. The logit of the end token is always 0, and another token always has a larger logit. So
each continuation has exactly `new` tokens.
"""

import functools
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.turns import CORES, Ready, fastest
from benchmarks.workloads import EOS, PAD, UNK

BATCHES = (1, 16), (1, 256), (16, 16), (16, 256)  # (number of prompts, number of tokens of each prompt)
NEW = 128  # number of new tokens of each prompt
TRIAL = 16  # number of new tokens with which the faster setting of CTranslate2 is found
FIRST_CHARACTER = 0x20000  # each token of the vocabulary is a character of Unicode's plane of rare ideographs
FIRST_TOKEN = UNK + 1  # the smaller tokens are the special tokens


def random_model(sizes: Mapping[str, Any]) -> Any:
    """Returns a language model with random parameters, as a TrainedModel.

    Args:
      sizes: fields of Hugging Face's GPT2Config. The defaults are the sizes of the smallest GPT-2.
    """
    import flax.linen as nn
    import jax

    from configs import base
    from input_pipeline.tokenizer import CharTokenizer
    from interchange import gpt2
    from model.build import build_model
    from run_directory.trained import TrainedModel

    fields, config = gpt2.Config(model_type='gpt2', **sizes), base.get_config()
    config.update_from_flattened_dict(gpt2.options(fields))
    characters = map(chr, range(FIRST_CHARACTER, FIRST_CHARACTER + fields.vocab_size - FIRST_TOKEN))
    tokenizer = CharTokenizer(json.dumps({'kind': 'char', 'characters': ''.join(characters)}).encode())
    vocabulary = {'vocab_size': len(tokenizer)}
    module = build_model(config.model, **vocabulary, pad=PAD)
    params: Any = nn.unbox(jax.jit(module.init)(jax.random.key(0), np.zeros((1, 1), np.int32)))['params']
    params['embedding']['embedding'] = params['embedding']['embedding'].at[EOS].set(0.0)
    return TrainedModel([Path()], config, module, params, [], {'text': tokenizer}, vocabulary)


def random_prompts(count: int, length: int, vocab_size: int = 50_257) -> list[list[int]]:
    """Returns prompts of random tokens."""
    return np.random.default_rng(0).integers(FIRST_TOKEN, vocab_size, (count, length)).tolist()


def ready_ours(sizes: Mapping[str, Any], precision: str, prompts: list[list[int]], new: int,
               beside_peers: bool) -> Ready:
    """Prepares this project's greedy search. `benchmarks.sentences.ready_run` explains the errors."""
    from benchmarks.measure import peak_memory
    from benchmarks.ours import where
    from inference.options import SearchOptions
    from inference.run import make_answerer
    from kernels.product import use_precision
    from runtime.resources import compile_time

    use_precision(precision)
    facts, model = where(beside_peers), random_model(sizes)
    generator: Any = make_answerer(model.config, model.module, model.params, model.tokenizers, model.sizes)
    options = SearchOptions(method='greedy', beam=1, batch_size=len(prompts), extra_length=new)

    def continuations():
        return [found[0].tokens for found in generator.find_all(prompts, range(len(prompts)), options)]

    before, answer = compile_time.seconds, continuations()
    return Ready(continuations, {'compile_s': round(compile_time.seconds - before, 2), **facts}, answer, peak_memory)


def ready_ctranslate2(folder: str, prompts: list[list[int]], new: int, compute_type: str) -> Ready:
    """Prepares greedy search by CTranslate2's Generator, with the faster number of workers.

    Args:
      folder: the exported model, in float32. CTranslate2 converts the weights to `compute_type`.
      prompts: the tokens of each prompt. All prompts have the same length, because CTranslate2 reads only the tokens up
        to the shortest length at once.
      new: the number of new tokens.
      compute_type: 'float32', 'bfloat16' or 'int8'.
    """
    ctranslate2 = importlib.import_module('ctranslate2')
    pieces = json.loads((Path(folder) / 'vocabulary.json').read_text())
    texts = [[pieces[token] for token in prompt] for prompt in prompts]

    def continuations(generator, workers, length):
        found = generator.generate_batch(texts, max_batch_size=-(-len(texts) // workers), max_length=length,
                                         min_length=length, sampling_topk=1, include_prompt_in_result=False)
        return [result.sequences_ids[0] for result in found]

    generators = {workers: ctranslate2.Generator(folder, device='cpu', compute_type=compute_type,
                                                 inter_threads=workers, intra_threads=CORES // workers)
                  for workers in {1, min(CORES, len(prompts))}}
    workers = fastest({workers: functools.partial(continuations, generator, workers, TRIAL)
                       for workers, generator in generators.items()})
    call = functools.partial(continuations, generators.pop(workers), workers, new)
    return Ready(call, {'workers': workers, 'device': 'cpu', 'ctranslate2': ctranslate2.__version__}, call())


def ready_transformers(folder: str, prompts: list[list[int]], new: int) -> Ready:
    """Prepares greedy search by GPT2LMHeadModel of transformers, in float32. All prompts have the same length."""
    torch, transformers = map(importlib.import_module, ('torch', 'transformers'))
    torch.set_num_threads(CORES)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    tokens = torch.tensor(prompts)

    def continuations():
        with torch.inference_mode():
            found = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new,
                                   min_new_tokens=new, do_sample=False, pad_token_id=0)
        return found[:, tokens.shape[1]:].tolist()

    facts = {'device': 'cpu', 'torch': torch.__version__, 'transformers': transformers.__version__}
    return Ready(continuations, facts, continuations())
