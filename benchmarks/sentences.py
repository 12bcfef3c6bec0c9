"""Translation of a run's test set from text to text, by this project and by CTranslate2, for benchmarks.decode."""

import dataclasses
import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.turns import CORES, Ready, Timed, fastest

LARGEST_BATCHES = 32, 64  # batch sizes of CTranslate2, in sentences; the faster one is timed
TRIAL = 200  # number of sentences with which the faster setting of CTranslate2 is found


def ready_run(workdir: str, checkpoint: str, precision: str, sources: Sequence[str], search: Mapping[str, Any],
              single: bool, beside_peers: bool) -> Ready:
    """Prepares the translation by this project. `search` overrides options of the run's config.decode.

    If `single` is True, each sentence is translated on its own.

    Raises:
      UserError: if `beside_peers` is True and JAX does not use the CPU, because the peers use the CPU.
    """
    import jax

    from benchmarks.measure import peak_memory
    from benchmarks.ours import where
    from inference.run import load
    from kernels.product import use_precision
    from runtime.resources import compile_time

    use_precision(precision)
    facts = where(beside_peers)
    run = load(workdir, checkpoint)
    jax.config.update('jax_enable_compilation_cache', False)  # so that compile_s is the time of a first start
    options = dataclasses.replace(run.options, **search)

    def translate():
        parts = ([source] for source in sources) if single else [sources]
        return [output for part in parts for output in run.translate(part, options)]

    before = compile_time.seconds
    outputs = translate()
    compile_s = round(compile_time.seconds - before, 2)
    return Ready(translate, {'compile_s': compile_s, **facts}, [output.text for output in outputs], peak_memory)


def ready_ctranslate2(folder: str, sources: list[str], search: Mapping[str, Any], single: bool,
                      compute_type: str) -> Ready:
    """Prepares the translation by CTranslate2 with an exported model.

    Translates TRIAL sentences with several numbers of workers and batch sizes, and chooses the fastest setting. If
    `single` is True, there is one worker, and the settings differ in its number of threads.

    Args:
      folder: the exported model, in float32. CTranslate2 converts the weights to `compute_type`.
      sources: the sentences.
      search: the beam and the length penalty.
      single: whether each sentence is translated on its own.
      compute_type: 'float32', 'bfloat16' or 'int8'.
    """
    ctranslate2, sentencepiece = map(importlib.import_module, ('ctranslate2', 'sentencepiece'))
    encoder, decoder = (sentencepiece.SentencePieceProcessor(str(Path(folder) / f'{side}.spm'))
                        for side in ('source', 'target'))

    def translate(translator, batch, texts):
        parts = ([text] for text in texts) if single else [texts]
        found = [result for part in parts for result in translator.translate_batch(
            encoder.encode(part, out_type=str), max_batch_size=batch, beam_size=search['beam'],
            length_penalty=search['alpha'], patience=search.get('patience', 1), min_decoding_length=0,
            disable_unk=True)]
        return [decoder.decode(result.hypotheses[0]) for result in found]

    translators = {(workers, threads): ctranslate2.Translator(
        folder, device='cpu', compute_type=compute_type, inter_threads=workers, intra_threads=threads)
        for workers, threads in ({(1, 1), (1, CORES)} if single else {(1, CORES), (CORES, 1)})}
    workers, threads, batch = fastest({
        (workers, threads, batch): functools.partial(translate, translator, batch, sources[:TRIAL])
        for (workers, threads), translator in translators.items() for batch in ([1] if single else LARGEST_BATCHES)})
    call = functools.partial(translate, translators.pop((workers, threads)), batch, sources)
    facts = {'workers': workers, 'threads': threads, 'batch': batch, 'device': 'cpu',
             'ctranslate2': ctranslate2.__version__}
    return Ready(call, facts, call())


def with_bleu(timed: Timed, references: Sequence[str], language: str) -> Timed:
    """Returns the results of a system. Adds the cased, detokenised BLEU of its translations to the facts."""
    from inference.scores import corpus_scores

    bleu = corpus_scores(timed.answer, references, language)['bleu']
    return timed._replace(facts={'bleu': round(bleu, 2), **timed.facts})
