"""The table of options: name, default, meaning, allowed values, and the models and tasks that use an option.

The defaults (`configs/base.py`), the checks (`configs/checks.py`), the help of the commands and the page
docs/options.md (python -m tools.options_page) are made from this table. The defaults of the model, the optimizer and
the search are the values of the paper's base model (sections 3, 5 and 6.1), if the paper gives a value. The batch and
the vocabulary are smaller than in the paper: `configs/wmt14_base.py` has the paper's values.

Some options have an effect only for some models or tasks, or only with some values of other options. The field `only`
of an option lists these models, tasks and values. In all other cases, it is an error to set the option. Two options are
ignored if they have no effect, because one recipe or sweep may use several sources or position schemes: data.name
(files and built-in text have no names), and model.max_length of a Transformer or a language model whose positions are
not learned. In `only`, 'task.data', 'task.objective' and 'task.answerer' are the parts of a task (`configs/tasks.py`).
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from configs.allowed import Allowed, Between, Fraction, OneOf, Switch, Text
from configs.tasks import IMPORTED, SUBWORDS, TASKS, TOKENIZERS

Value = bool | int | float | str
Users = Mapping[str, tuple[Value, ...]]  # {deciding option: its values for which an option is used}


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of the config.

    Attributes:
      name: the dotted name: 'model.d_model' is config.model.d_model.
      default: the value in configs/base.py; its type is the option's type.
      meaning: what the option does, with the unit and the meaning of special values.
      allowed: the allowed values.
      only: {other option: the values for which this option is used}. It is empty if this option is always used.
      resume: None if a run cannot resume with a new value of this option. Otherwise, a text that describes the effect
        of a new value, or '' if there is nothing to describe. A text also means that the new value does not change the
        parameters at any step. If a new value changes the scores that choose the best checkpoint, the
        text states this.
    """
    name: str
    default: Value
    meaning: str
    allowed: Allowed
    only: Users = dataclasses.field(default_factory=dict)
    resume: str | None = None


SECTIONS = {  # headings of docs/options.md
    '': 'Run', 'model': 'Model', 'model.recurrent': 'Model: rnnsearch', 'model.patches': 'Model: patches',
    'data': 'Data', 'data.splits': 'Data: names of the splits', 'data.tokenizer': 'Data: tokenizer', 'batch': 'Batches',
    'optimizer': 'Optimizer', 'train': 'Training', 'parallel': 'Devices: the product of the sizes is the device count',
    'eval': 'Evaluation', 'checkpoint': 'Checkpoints', 'track': 'Trackers of experiments',
    'decode': 'Decoding, by decode.py and the evaluation',
}
MOST_STEPS = 10 ** 9
MOST_TOKENS = 100_000_000  # maximum number of tokens in a batch
SEED, COUNT, SOME = Between(0, 2 ** 32 - 1), Between(0, MOST_STEPS), Between(1, MOST_STEPS)
FRACTION, SHARE, TEXT, FILE, SWITCH = Fraction(), Between(0, 1), Text(), Text(file=True), Switch()
NAMES = Text(file=True, names=True)
BEAM_METHODS = 'beam', 'mbr'  # the search methods that use beam search
METHODS = OneOf((*BEAM_METHODS, 'greedy', 'sample'))
AXIS = Between(-1, 1_000_000)
AXES = ('data', 'fsdp', 'tensor')  # the axes of the mesh, as in config.parallel
DROPOUTS = ('model.dropout', 'model.attention_dropout', 'model.feed_forward_dropout', 'model.word_dropout',
            'model.layer_dropout')  # the options that make two forward passes of a training step differ
ELSEWHERE = ('builtin', 'tfds')  # data sources that do not read the user's files

STACKS: Users = {'model.kind': ('transformer', 'language_model', 'patches', 'forecaster')}
ROTARY: Users = STACKS | {'model.position': ('rotary',)}
TABLES: Users = {'model.kind': ('transformer', 'language_model')}
TOKENS: Users = {'model.kind': ('transformer', 'rnnsearch', 'language_model')}
RECURRENT: Users = {'model.kind': ('rnnsearch',)}
PATCHES: Users = {'model.kind': ('patches', 'forecaster')}
POOLED: Users = {'model.kind': ('patches',)}
PAIRS: Users = {'task.data': ('pairs',)}
DOCUMENTS: Users = {'task.data': ('documents',)}
TEXTS: Users = {'task.data': ('pairs', 'documents')}
EXAMPLES: Users = {'task.data': ('classes', 'values')}
SERIES: Users = {'task.data': ('series',)}
SPLIT_FILES: Users = {'data.source': ('files', 'tfds'), 'task.data': ('pairs', 'documents', 'classes', 'values')}
SPLIT_NAMES: Users = SPLIT_FILES | {'data.file': ('',)}  # a data.file contains all splits
CLASSES: Users = {'task.objective': ('cross_entropy',)}
SEARCH: Users = {'task.answerer': ('translator', 'generator')}
TRANSLATOR: Users = {'task.answerer': ('translator',)}
LEARNED: Users = TEXTS | {'data.tokenizer.kind': SUBWORDS}  # tokenizers that are learned by sentencepiece
KIND_NAMES = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text'}
OTHER_SUMS = ('the batches are the same, but sums are computed in another order, so results agree up to rounding; with '
              'pmap and dropout, results differ more, because each device draws its own dropout masks')
SAME_DATA = 'the data is the same'
OTHER_SEARCH = 'if eval.method uses this option, the scores of evaluations are not comparable with earlier scores'

OPTIONS = (
    Option('seed', 0, 'seed of the parameters, the dropout and the order of the batches', SEED),
    Option('cache_dir', '', "folder of the tokenizers, token stores and compiled programs that runs share; '': "
           "folder allyouneed in $XDG_CACHE_HOME or in ~/.cache", FILE, resume=''),
    Option('task', 'translation', 'what the model is trained to do', OneOf(tuple(TASKS))),

    Option('model.kind', 'transformer', "the architecture; 'patches' is for images and time series, 'forecaster' "
           'forecasts time series',
           OneOf(('transformer', 'rnnsearch', 'language_model', 'patches', 'forecaster'))),
    Option('model.num_layers', 6, 'layers of the encoder and of the decoder (N in the paper)', Between(1, 256), STACKS),
    Option('model.num_decoder_layers', 0, 'layers of the decoder; 0: num_layers', Between(0, 256),
           {'model.kind': ('transformer',)}),
    Option('model.d_model', 512, 'width of the embeddings and of the residual stream', Between(1, 100_000)),
    Option('model.d_ff', 2048, 'width inside the feed-forward sublayer', Between(1, 1_000_000), STACKS),
    Option('model.num_heads', 8, 'attention heads', Between(1, 10_000), STACKS),
    Option('model.d_k', 0, "width of a head's queries and keys; 0: d_model / num_heads", Between(0, 10_000), STACKS),
    Option('model.d_v', 0, "width of a head's values; 0: d_model / num_heads", Between(0, 10_000), STACKS),
    Option('model.num_key_value_heads', 0, 'heads of keys and values, shared by groups of attention heads; 1: '
           'multi-query attention; 0: num_heads', Between(0, 10_000), STACKS),
    Option('model.attention_bias', 'none', "projections in attention that have a bias; 'none': no projection, as in "
           "the paper; 'qkv': queries, keys and values; 'all': also the output", OneOf(('none', 'qkv', 'all')), STACKS),
    Option('model.norm', 'post', "place of the layer norms; 'post': after each residual connection, as in the paper; "
           "'pre': before each sublayer", OneOf(('post', 'pre')), STACKS),
    Option('model.norm_function', 'layer_norm', "function of the layer norms; the paper uses 'layer_norm'",
           OneOf(('layer_norm', 'rms_norm')), STACKS),
    Option('model.norm_epsilon', 1e-6, 'number that is added to the variance (layer_norm) or mean square (rms_norm)',
           Between(1e-30, 1), STACKS),
    Option('model.feed_forward', 'plain', "form of the feed-forward sublayer; the paper uses 'plain'; 'gated' has a "
           'third matrix', OneOf(('plain', 'gated')), STACKS),
    Option('model.feed_forward_bias', True, 'whether the feed-forward sublayer has biases', SWITCH, STACKS),
    Option('model.activation', 'relu', "activation of the feed-forward sublayer; the paper uses 'relu'; 'gelu' is the "
           "tanh approximation of 'gelu_exact'", OneOf(('relu', 'gelu', 'gelu_exact', 'silu')), STACKS),
    Option('model.score', 'scaled_dot', "attention's score function; the paper uses 'scaled_dot'",
           OneOf(('scaled_dot', 'dot', 'general', 'additive')), STACKS),
    Option('model.position', 'sinusoidal',
           "encoding of positions; the paper uses 'sinusoidal', and 'learned' in Table 3, row E; T5 uses 'relative'",
           OneOf(('sinusoidal', 'learned', 'rotary', 'relative', 'alibi', 'none')), STACKS),
    Option('model.rotary_base', 10000.0, 'rotary: the slowest pairs turn by about 1 / base radians per position',
           Between(1, 1e12), ROTARY),
    Option('model.rotary_scaling', 'none', "rotary: adaptation to longer texts; 'linear': all pairs turn more slowly, "
           "'llama3': only the slow pairs turn more slowly", OneOf(('none', 'linear', 'llama3')), ROTARY),
    Option('model.rotary_factor', 1.0, 'rotary: factor by which pairs turn more slowly', Between(1, 1_000_000),
           ROTARY | {'model.rotary_scaling': ('linear', 'llama3')}),
    Option('model.rotary_original_length', 8192, 'rotary: length in tokens of the training texts before the scaling',
           Between(1, 1_000_000_000), ROTARY | {'model.rotary_scaling': ('llama3',)}),
    Option('model.window', 0, 'self-attention sees only positions at a distance below this number: earlier positions, '
           'and in an encoder also later positions; 1: only the position itself; 0: all', Between(0, 1_000_000),
           STACKS),
    Option('model.max_length', 256, 'number of positions in a learned table', Between(1, 1_000_000),
           {'model.kind': ('transformer', 'language_model')}),
    Option('model.share_embeddings', 'all',
           "embeddings that share a table; 'all': source, target and output, which needs a joint vocabulary; 'target': "
           "target and output; 'none': no sharing",
           OneOf(('all', 'target', 'none')), {'model.kind': ('transformer', 'rnnsearch')}),
    Option('model.tie_embeddings', True, 'use the transposed embedding table as the output projection', SWITCH,
           {'model.kind': ('language_model',)}),
    Option('model.scale_embeddings', True, 'multiply the embeddings by sqrt(d_model), as the paper does', SWITCH,
           TABLES),
    Option('model.output_bias', False, 'add a bias to the logits', SWITCH, TABLES),
    Option('model.dropout', 0.1, "dropout rate on every sublayer's output and on the embeddings", FRACTION),
    Option('model.attention_dropout', 0.0, 'dropout rate on the attention weights', FRACTION, STACKS),
    Option('model.feed_forward_dropout', 0.0, 'dropout rate after the feed-forward activation', FRACTION, STACKS),
    Option('model.word_dropout', 0.0, 'rate at which whole input tokens are dropped: their embeddings become zero',
           FRACTION, TOKENS),
    Option('model.layer_dropout', 0.0, 'rate at which whole sublayers are skipped, for all examples of a forward pass',
           FRACTION, STACKS),
    Option('model.attention_kernel', 'auto',
           "how attention is computed; 'chunked' takes O(n) memory; 'fused' is cuDNN's kernel on NVIDIA GPUs with "
           "dtype=bfloat16, and elsewhere XLA's attention with O(n^2) memory; 'auto' chooses by length",
           OneOf(('auto', 'plain', 'chunked', 'fused')), STACKS),
    Option('model.dtype', 'float32', 'dtype of the computation; parameters are float32',
           OneOf(('float32', 'bfloat16'))),
    Option('model.remat', False, 'recompute blocks in the backward pass: less memory, up to a third more time', SWITCH,
           STACKS),
    Option('model.remat_keep', 'nothing', "values that remat does not recompute; 'products': products of activations "
           'with weights, which are most of the arithmetic; products inside attention are recomputed',
           OneOf(('nothing', 'products')), STACKS | {'model.remat': (True,)}),
    Option('model.recurrent.d_hidden', 1000,
           "width of the states in each direction; Bahdanau et al. 2015 use 1000", Between(1, 100_000),
           RECURRENT),
    Option('model.recurrent.d_align', 0, 'width of the alignment network; 0: d_hidden', Between(0, 100_000),
           RECURRENT | {'model.recurrent.attention': (True,)}),
    Option('model.recurrent.readout', 'maxout', "layer before the output layer; Bahdanau et al. 2015 use 'maxout'",
           OneOf(('maxout', 'linear')), RECURRENT),
    Option('model.recurrent.attention', True, 'use attention; False: one fixed context vector for the whole sentence',
           SWITCH, RECURRENT),
    Option('model.patches.patch', 4, 'size of a patch along each axis, in pixels or time steps', Between(1, 100_000),
           PATCHES),
    Option('model.patches.pooling', 'class_token', 'input of the output layer: the class token, or the mean over the '
           'patches', OneOf(('class_token', 'mean')), POOLED),
    Option('model.patches.stem', 'linear', "embedding of the patches; 'linear': one matrix, as in the vision "
           "Transformer; 'convolutions': convolutions of 3 x 3 pixels, for images only (Xiao et al. 2021)",
           OneOf(('linear', 'convolutions')), POOLED),

    Option('data.source', 'builtin', "where the data comes from; 'builtin' needs no download",
           OneOf(('builtin', 'files', 'tfds'))),
    Option('data.dir', '', "files: the folder of the files; tfds: the data_dir of TFDS ('': TFDS's default)", FILE,
           SPLIT_FILES, resume=SAME_DATA),
    Option('data.name', '',
           'tfds: the dataset, such as wmt14_translate/de-en; builtin: the data set: digits or dynamics '
           'for classification, pendulum for regression, co2 for forecasting', TEXT),
    Option('data.splits.train', 'train', 'name of the split on disk; for text files also several names separated by '
           "commas, and patterns such as 'train-*'; all these files are concatenated", NAMES,
           SPLIT_NAMES),
    Option('data.splits.validation', 'validation', 'name of the split on disk', NAMES, SPLIT_NAMES),
    Option('data.splits.test', 'test', 'name of the split on disk; several names, separated by commas, are separate '
           'test sets', NAMES, SPLIT_NAMES, resume=''),
    Option('data.seed', 0, 'seed of the generated data, and of the splits of digits', SEED,
           {'data.source': ('builtin',), 'task.data': ('pairs', 'classes', 'values')}),
    Option('data.plain_spaces', 0.5, 'share of the sources with no-break spaces that get plain spaces instead, '
           'because people type plain spaces', SHARE, PAIRS | {'data.source': ('builtin',)}),
    Option('data.source_lang', 'en', 'file suffix, TFDS feature or CLDR locale', TEXT, PAIRS),
    Option('data.target_lang', 'fr', 'file suffix, TFDS feature or CLDR locale; also determines the tokenizer of '
           'BLEU', TEXT, PAIRS),
    Option('data.max_length', 128, 'maximum length of a sentence in tokens, including the end token; longer pairs are '
           'not used for training; longer inputs are truncated', Between(1, 1_000_000), PAIRS),
    Option('data.file', '', 'one file for all splits: a text (instead of data.dir), or a table of series to forecast',
           FILE, {'task.data': ('documents', 'series'), 'data.source': ('files',)}, resume=SAME_DATA),
    Option('data.documents', 'file', "the text of a document: a 'file', a 'line', all lines up to a 'blank_line', or "
           "the text in a line of JSON ('jsonl')",
           OneOf(('file', 'line', 'blank_line', 'jsonl')), DOCUMENTS | {'data.source': ('files',)}),
    Option('data.feature', 'text', 'name of the feature with the text', TEXT, DOCUMENTS | {'data.source': ('tfds',)}),
    Option('data.context', 256, 'number of tokens in a window; forecasting: number of steps on which a forecast is '
           'based', Between(2, 1_000_000), {'task.data': ('documents', 'series')}),
    Option('data.horizon', 12, 'number of steps to forecast', Between(1, 100_000), SERIES),
    Option('data.season', 1, 'number of steps in a season, for the seasonal-naive baseline and the scaled error; 1: no '
           'season', Between(1, 1_000_000), SERIES),
    Option('data.packing', 'contiguous',
           "how windows are filled; 'contiguous': with parts of the token stream; 'packed': with whole documents",
           OneOf(('contiguous', 'packed')), DOCUMENTS),
    Option('data.validation_share', 0.1,
           'share of the training data that is held out for validation if there is no validation split; the same share '
           'is held out for the test if there is no test split either, but not from IDX files; a text in data.file: '
           'its last part is held out for validation, and is also the test split; forecasting of a table: the last '
           'steps are held out for the test, and the steps before them for validation',
           FRACTION, {'data.source': ('files',)}),
    Option('data.image_size', 0, 'folders of images: images are scaled and cropped to squares of this many pixels; 0: '
           'all images have the same size', Between(0, 10_000), EXAMPLES | {'data.source': ('files',)}),
    Option('data.missing', 'error', "series: missing values (NaN, or empty cells) are an 'error', or get the 'mean' of "
           'the channel; patches without any value are hidden from the model', OneOf(('error', 'mean')),
           EXAMPLES | {'data.source': ('files',)}),
    Option('data.mixup', 0.0, 'in training, mix each example and its class with a random example of the batch (Zhang '
           'et al. 2018); the shares are drawn from Beta(mixup, mixup), such as Beta(0.2, 0.2); 0: none',
           Between(0, 100), {'task.data': ('classes',)}),
    Option('data.crop', 0, 'in training, shift images by up to this many pixels; must be below the height and the '
           'width of the images', Between(0, 10_000), EXAMPLES),
    Option('data.flip', False, 'in training, mirror images with probability 1/2', SWITCH, EXAMPLES),
    Option('data.tokenizer.kind', 'bpe', 'kind of the tokens: subwords (bpe, unigram), characters or UTF-8 bytes; an '
           'imported model has its own kind', OneOf(TOKENIZERS, IMPORTED), TEXTS),
    Option('data.tokenizer.vocab_size', 8000, 'number of subwords, including 260 special tokens and bytes; a number '
           'that is not set on the command line is lowered if the text is too small', Between(1, 1_000_000), LEARNED),
    Option('data.tokenizer.joint', True, 'one vocabulary for both languages', SWITCH, PAIRS),
    Option('data.tokenizer.dropout', 0.0, 'BPE-dropout: probability of skipping a merge, such as 0.1, so that training '
           'segments the words differently in every epoch; 0: none', Between(0, 1),
           PAIRS | {'data.tokenizer.kind': ('bpe',)}),
    Option('data.tokenizer.split_digits', False, 'each digit is a separate subword', SWITCH, LEARNED),
    Option('data.tokenizer.normalization', 'identity', "Unicode normalization; 'identity' is lossless, 'nfkc_cf' also "
           'folds case', OneOf(('identity', 'nfkc', 'nfkc_cf')), LEARNED),

    Option('batch.tokens', 4096, 'maximum number of target positions in a batch, padding included',
           Between(1, MOST_TOKENS), PAIRS),
    Option('batch.buckets', 6, 'maximum number of padded lengths; the program is compiled for each length',
           Between(1, 1000), PAIRS),
    Option('batch.rows', 64, 'number of windows, images or series in a batch', Between(1, 1_000_000),
           {'task.data': ('documents', 'classes', 'values', 'series')}),

    Option('optimizer.schedule', 'paper',
           "learning-rate schedule; 'inverse_sqrt': 'paper' with a given peak; 'cosine': decays until train.steps",
           OneOf(('paper', 'inverse_sqrt', 'cosine'))),
    Option('optimizer.factor', 1.0, 'factor that multiplies the learning rate', Between(0, 1000),
           {'optimizer.schedule': ('paper',)}),
    Option('optimizer.peak', 1e-3, 'the highest learning rate', Between(0, 1000),
           {'optimizer.schedule': ('inverse_sqrt', 'cosine')}),
    Option('optimizer.final', 0.0, 'the learning rate after the last step, as a share of the peak', SHARE,
           {'optimizer.schedule': ('cosine',)}),
    Option('optimizer.warmup', 4000, 'steps of warm-up; cosine: a warm-up that is not shorter than train.steps is '
           'an error if the command line of a new run sets it. Otherwise, it becomes a tenth of train.steps, with a '
           'warning', SOME),
    Option('optimizer.beta1', 0.9, "decay of Adam's first moment", FRACTION),
    Option('optimizer.beta2', 0.98, "decay of Adam's second moment", FRACTION),
    Option('optimizer.eps', 1e-9, "number that is added to the root of Adam's second moment", Between(1e-18, 1)),
    Option('optimizer.clip', 0.0, 'maximum norm of the gradient; 0: no clipping', Between(0, 1e9)),
    Option('optimizer.weight_decay', 0.0,
           "AdamW's weight decay, for parameters with at least two axes, except biases; 0: Adam", Between(0, 1000)),
    Option('optimizer.ema', 0.0, 'decay of an exponential moving average of the parameters, such as 0.999: evaluation '
           'and `decode.py` use the average; 0: none', Between(0, 0.9999)),  # above, float32 loses small changes

    Option('train.steps', 100_000, 'number of steps of the whole training', SOME, resume=''),
    Option('train.label_smoothing', 0.1, 'label smoothing over classes or tokens; `validation_loss` includes '
           'it, the loss of decode.py does not', FRACTION, CLASSES),
    Option('train.r_drop', 0.0, 'weight of the divergence between two passes with different dropout (R-Drop); 0: one '
           'pass', Between(0, 1000), CLASSES),
    Option('train.simcut', 0.0, 'weight of the divergence from a second pass with some tokens removed (SimCut), such '
           'as 3; 0: one pass', Between(0, 1000), CLASSES | TOKENS),
    Option('train.cutoff', 0.05, 'SimCut: rate at which tokens of source and target are removed', FRACTION,
           CLASSES | TOKENS),
    Option('train.teacher', '', 'run directory of a teacher; several, separated by commas, form an ensemble; the '
           "student uses the teacher's vocabulary; '': none", FILE, TEXTS, resume='the teacher has equal parameters'),
    Option('train.teacher_checkpoint', 'best', 'checkpoint of the teacher, in the syntax of decode.py --checkpoint',
           TEXT, TEXTS, resume='the teacher has equal parameters'),
    Option('train.teacher_weight', 0.5, "share of the loss that uses the teacher's distributions; the rest of the loss "
           'uses the targets', Between(0, 1), TEXTS),
    Option('train.guided_alignment', 0.0, 'weight of the cross-entropy between gold word alignments and the weights of '
           'cross-attention (guided alignment), such as 0.05; files: the gold alignments are in DIR/SPLIT.align '
           '(docs/inside.md); 0: none', Between(0, 1000), PAIRS | {'data.source': ('builtin', 'files')}),
    Option('train.guided_head', '', "guided alignment: the head of cross-attention; 'cross:2:1': layer 2, head 1, "
           "counted from 1; 'cross:2': the mean of the heads of layer 2; '': the mean of the heads of the "
           'second-to-last layer', TEXT, PAIRS),
    Option('train.edits', '', 'edits of the values inside the model, in training and afterwards: a JSON list, such as '
           '[{"edit": "freeze", "place": "encoder/layers_0/self_attention/weights", "by": "uniform"}] (docs/inside.md)',
           TEXT),
    Option('train.init_from', '', "initial parameters of a new run: a run directory, or RUN:CHECKPOINT in the "
           "syntax of decode.py --checkpoint; '': random parameters", FILE),
    Option('train.init_vocabulary', True, 'use the vocabulary of train.init_from; False: learn a vocabulary from the '
           'data, and keep the embeddings of the tokens that are in both vocabularies', SWITCH, TEXTS),
    Option('train.frozen', '', "patterns of the names of parameters that are not trained, such as "
           "'encoder,*embedding'; '': none", TEXT),
    Option('train.lora_rank', 0, 'rank of low-rank adapters (LoRA), such as 8; only the adapters are trained; 0: none',
           Between(0, 10_000)),
    Option('train.lora_alpha', 16.0, 'the adapters are multiplied by lora_alpha / lora_rank', Between(0, 10_000)),
    Option('train.lora_parts', '*attention/query,*attention/value', 'patterns of the names of matrices that get an '
           'adapter', TEXT),
    Option('train.accumulate', 1, 'number of parts of a batch that are computed one after the other, to save memory',
           Between(1, 10_000)),
    Option('train.matmul_precision', 'default',
           "precision of products of float32 activations; 'bfloat16': factors are rounded to bfloat16, sums are in "
           "float32, and products inside attention are as with 'default'; 'default': bfloat16 on TPUs, "
           "tensorfloat32 on NVIDIA GPUs, float32 on CPUs; 'auto': on CPUs, the faster of 'bfloat16' and "
           "'default', measured when the run begins and then kept; elsewhere, 'default'",
           OneOf(('default', 'bfloat16', 'float32', 'auto')),
           STACKS | {'model.dtype': ('float32',)}),
    Option('train.log_every', 100, 'steps between lines of the log', SOME, resume=''),
    Option('train.skip_nonfinite', 0, 'maximum number of steps of a run that are skipped because the loss or the '
           'gradient is not finite', COUNT, resume=''),

    Option('parallel.mode', 'jit', "'jit' for any mesh, 'pmap' for data parallelism only", OneOf(('jit', 'pmap')),
           resume=OTHER_SUMS),
    Option('parallel.data', -1, "number of devices that share the rows of a batch; -1, in one of the three "
           'options: all remaining devices', AXIS, resume=OTHER_SUMS),
    Option('parallel.fsdp', 1, 'number of devices that share the rows, the parameters and the optimizer state', AXIS,
           resume=OTHER_SUMS),
    Option('parallel.tensor', 1, 'number of devices that share every matrix product: heads, feed-forward width, '
           'vocabulary', AXIS, resume=OTHER_SUMS),

    Option('eval.every', 1000, 'steps between evaluations; the last step is always evaluated', SOME, resume=''),
    Option('eval.metric', 'bleu', "metric that decides which checkpoint is best; 'loss', or another metric of the task",
           TEXT),
    Option('eval.method', 'greedy', "how the evaluation decodes; 'greedy' is fast, 'beam' is decode.py's default",
           METHODS, TRANSLATOR),
    Option('eval.bleu_sentences', 0, 'validation sentences to translate; 0: all', COUNT, TRANSLATOR),
    Option('eval.patience', 0, 'stop after this many evaluations without a better metric; 0: never', COUNT, resume=''),

    Option('checkpoint.every', 1000, 'steps between checkpoints; evaluations save checkpoints, too', SOME, resume=''),
    Option('checkpoint.every_minutes', 0.0, 'also save after this many minutes without a checkpoint; 0: off',
           Between(0, 1_000_000), resume=''),
    Option('checkpoint.keep_last', 5, 'number of latest checkpoints to keep', SOME, resume=''),
    Option('checkpoint.keep_best', 1, 'number of checkpoints with the best eval.metric that are also kept', SOME,
           resume=''),

    Option('track.places', '', 'places inside the model whose statistics evaluations log: names or patterns, separated '
           "by commas, such as '*/weights,decoder/layers_*' (docs/inside.md); '': none", TEXT, resume=''),
    Option('track.wandb', '', "project in Weights & Biases that also gets the metrics; '': none", TEXT, resume=''),
    Option('track.mlflow', '', "experiment in MLflow that also gets the metrics; '': none", TEXT, resume=''),

    # Defaults of decode.py and of the evaluation.
    Option('decode.method', 'beam', "search method; 'mbr' (minimum Bayes risk) returns the hypothesis of a beam search "
           'that has the best expected chrF', METHODS, SEARCH, resume=''),
    Option('decode.beam', 4, 'number of hypotheses per sentence', Between(1, 1000), SEARCH, resume=OTHER_SEARCH),
    Option('decode.alpha', 0.6, 'exponent of the length penalty ((5 + |Y|) / 6)^alpha', Between(-10, 10), SEARCH,
           resume=OTHER_SEARCH),
    Option('decode.patience', 0.0, 'beam, mbr: stop at round(beam x patience) ended hypotheses; 0: stop when no '
           'unfinished hypothesis can win', Between(0, 1000), SEARCH, resume=OTHER_SEARCH),
    Option('decode.extra_length', 50, 'translation: maximum number of tokens beyond the length of the source; '
           'language_model: number of tokens to generate', Between(0, 100_000), SEARCH, resume=OTHER_SEARCH),
    Option('decode.batch_size', 128, 'number of sentences or examples in a batch', Between(1, 100_000), resume=''),
    Option('decode.temperature', 1.0, 'sample: below 1 sharpens the distribution, above 1 flattens it',
           Between(0.01, 100), SEARCH, resume=OTHER_SEARCH),
    Option('decode.top_k', 0, 'sample: draw from the k most probable tokens; 0: all', Between(0, 1_000_000), SEARCH,
           resume=OTHER_SEARCH),
    Option('decode.top_p', 1.0, 'sample: draw from the fewest tokens whose total probability is at least this number',
           Between(1e-6, 1), SEARCH, resume=OTHER_SEARCH),
)
# The numeric options of a search: the options of config.decode, and two more flags of decode.py.
SEARCH_NUMBERS: Mapping[str, Between] = {
    option.name.removeprefix('decode.'): option.allowed for option in OPTIONS
    if option.name.startswith('decode.') and isinstance(option.allowed, Between)
} | {'n_best': Between(1, 1000), 'seed': SEED}
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
DEFAULTS: Mapping[str, Value] = {option.name: option.default for option in OPTIONS}


def choices(name: str) -> tuple[str, ...]:
    """Returns the names that are allowed as values of an option."""
    allowed = BY_NAME[name].allowed
    assert isinstance(allowed, OneOf), name
    return allowed.choices


def kind_problem(name: str, value: Any) -> str:
    """Returns an error message if the type of a value differs from the type of the option's default, otherwise ''.

    An integer is also accepted as the value of a float option, unless it is too large for a float.
    """
    kind = type(DEFAULTS[name])
    if type(value) is kind:
        return ''
    if kind is float and type(value) is int:
        return '' if abs(value) <= sys.float_info.max else f'must be at most {sys.float_info.max:.2g}'
    return f'must be {KIND_NAMES[kind]}'


def decisive(name: str, values: Mapping[str, Any]) -> str | None:
    """Returns the deciding option: the option whose value is the reason why the option `name` has no effect.

    Returns None if the option `name` has an effect. `values` are all options of a config, {'model.d_model': 512, ...}.
    The task and the kind of model in `values` must exist. A deciding option that has no effect counts as its default.
    """
    parts = TASKS[values['task']]._asdict()
    for deciding, used_with in BY_NAME[name].only.items():
        part = deciding.removeprefix('task.')
        if part != deciding:
            if parts[part] not in used_with:
                return 'task'
        elif (values if is_used(deciding, values) else DEFAULTS)[deciding] not in used_with:
            return deciding
    return None


def is_used(name: str, values: Mapping[str, Any]) -> bool:
    """Returns whether the option `name` has an effect. `values` are all options of a config."""
    return decisive(name, values) is None


def plain(value: Any) -> Any:
    """Returns a number of NumPy or JAX as a number of Python, and a config as a copy with such numbers converted.

    References in a config are resolved. Other values are returned unchanged.
    """
    if isinstance(value, ConfigDict):
        return ConfigDict({name: plain(part) for name, part in value.items()})
    return value.item() if getattr(value, 'ndim', None) == 0 else value  # this module does not import NumPy


def flatten(config: ConfigDict, prefix: str = '') -> dict[str, Any]:
    """Returns the options of a config as {'model.d_model': 512, ...}. An empty section counts as an option."""
    flat = {}
    for key, value in config.items():
        flat |= isinstance(value, ConfigDict) and flatten(value, f'{prefix}{key}.') or {f'{prefix}{key}': value}
    return flat
