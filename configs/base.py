"""Every option, with what it means and the paper's value (base model, section 5); recipes change what they need.

Any of them can be given on the command line: --config.model.num_layers=2. A name that does not exist is an
error, so a typo never trains the wrong model; so is a value for an option that the model, the task, the source or the
kind of tokenizer does not use.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The paper's base Transformer on the built-in corpus."""
    config = ConfigDict()
    config.seed = 0  # of the parameters, the dropout and the order of the batches
    config.cache_dir = ''  # tokenizers, token stores and compiled programs, shared by runs; '': allyouneed in
    #                        $XDG_CACHE_HOME, else in ~/.cache
    config.task = 'translation'  # or 'language_model', 'classification', 'regression'

    config.model = model = ConfigDict()
    model.kind = 'transformer'      # or 'rnnsearch', 'language_model', 'patches' (vision, time series)
    model.num_layers = 6            # N, in the encoder and again in the decoder
    model.d_model = 512             # width of the stream between blocks
    model.d_ff = 2048               # width inside the feed-forward sublayer
    model.num_heads = 8
    model.d_k = 0                   # width of a head's queries and keys; 0: d_model / num_heads
    model.d_v = 0                   # width of a head's values; 0: d_model / num_heads
    model.norm = 'post'             # 'post' (the paper's) or 'pre'
    model.activation = 'relu'       # 'relu' (the paper's), 'gelu' or 'silu'
    model.score = 'scaled_dot'      # 'scaled_dot' (the paper's), 'dot', 'general' or 'additive'
    model.position = 'sinusoidal'   # or 'learned' (Table 3, row E), 'rotary', 'relative' (T5's), 'alibi', 'none'
    model.max_length = 256          # rows of a learned position table, tokens
    model.share_embeddings = 'all'  # 'all' (needs a joint vocabulary), 'target' (target and output) or 'none'
    model.tie_embeddings = True     # language model: the output projection is the embedding, transposed
    model.dropout = 0.1             # on every sublayer's output and on the embeddings
    model.attention_dropout = 0.0   # on the attention weights
    model.feed_forward_dropout = 0.0  # after the feed-forward activation
    model.attention_kernel = 'auto'  # 'plain', 'chunked' (O(n) memory), 'fused' (the accelerator's); 'auto' by length
    model.dtype = 'float32'         # of the computation, or 'bfloat16'; parameters are float32
    model.remat = False             # recompute blocks in the backward pass: less memory, a third more time
    model.recurrent = ConfigDict()  # rnnsearch
    model.recurrent.d_hidden = 1000  # width of the states, in each direction; the paper's (Bahdanau et al. 2015)
    model.recurrent.d_align = 0     # width of the alignment network; 0: d_hidden
    model.recurrent.readout = 'maxout'  # 'maxout' (the paper's) or 'linear'
    model.recurrent.attention = True  # False: one fixed context vector for the whole sentence
    model.patches = ConfigDict()    # patches
    model.patches.patch = 4         # pixels or time steps along each axis
    model.patches.pooling = 'class_token'  # or 'mean'

    config.data = data = ConfigDict()
    data.source = 'builtin'         # 'builtin' (no download), 'files' or 'tfds'
    data.dir = ''                   # files: their folder; tfds: its data_dir ('': TFDS's default)
    data.name = ''                  # tfds: the dataset, such as wmt14_translate/de-en; builtin arrays: which
    data.splits = ConfigDict({'train': 'train', 'validation': 'validation', 'test': 'test'})  # names on disk
    data.seed = 0                   # builtin: of the data
    data.plain_spaces = 0.5         # builtin translation: of the sources with no-break spaces, how many are as typed
    data.source_lang = 'en'         # translation: file suffix, TFDS feature or CLDR locale
    data.target_lang = 'fr'
    data.max_length = 128           # translation, tokens; longer pairs are not trained on, longer inputs are cut
    data.file = ''                  # language_model: one file for all splits, instead of dir
    data.documents = 'file'         # language_model: a document is a 'file', a 'line' or ends at a 'blank_line'
    data.feature = 'text'           # language_model, tfds: the feature that holds the text
    data.context = 256              # language_model, tokens of a window
    data.packing = 'contiguous'     # language_model: windows of the stream, or 'packed' whole documents
    data.validation_share = 0.1     # files: cut off the training data where there is no validation split; as much for
    #                                 test, if there is none either
    data.crop = 0                   # images: shifted by up to so many pixels in training
    data.flip = False               # images: mirrored in training, every other time
    data.tokenizer = ConfigDict()
    data.tokenizer.kind = 'bpe'     # 'bpe' or 'unigram'; language_model also: 'char' or 'byte'
    data.tokenizer.vocab_size = 8000  # pieces, of which 260 are special ones and bytes
    data.tokenizer.joint = True     # translation: one vocabulary for both languages
    data.tokenizer.split_digits = False  # each digit is a piece
    data.tokenizer.normalization = 'identity'  # 'identity' (lossless) or 'nfkc'

    config.batch = ConfigDict()
    config.batch.tokens = 4096      # translation: target positions of a batch at most, padding included
    config.batch.buckets = 6        # translation: padded lengths, hence compilations
    config.batch.rows = 64          # other tasks: windows, images or series of a batch

    config.optimizer = optimizer = ConfigDict()
    optimizer.schedule = 'paper'    # 'paper', 'inverse_sqrt' (by its peak) or 'cosine' (falls until train.steps)
    optimizer.factor = 1.0          # paper: multiplies the learning rate
    optimizer.peak = 1e-3           # inverse_sqrt, cosine: the highest learning rate
    optimizer.final = 0.0           # cosine: the last learning rate, as a share of the peak
    optimizer.warmup = 4000         # steps
    optimizer.beta1 = 0.9
    optimizer.beta2 = 0.98
    optimizer.eps = 1e-9
    optimizer.clip = 0.0            # largest norm of the gradient; 0: not clipped
    optimizer.weight_decay = 0.0    # AdamW's, of matrices; 0: Adam

    config.train = train = ConfigDict()
    train.steps = 100_000
    train.label_smoothing = 0.1     # of the classes or tokens; none in a regression
    train.r_drop = 0.0              # weight of the divergence between two passes with other dropout (R-Drop); 0: one pass
    train.accumulate = 1            # parts that a batch is computed in, one after the other: less memory
    train.log_every = 100           # steps
    train.skip_nonfinite = 0        # steps in the whole run that may be left out since loss or gradient is not finite

    config.parallel = parallel = ConfigDict()  # the mesh; its sizes multiply to the number of devices
    parallel.mode = 'jit'           # 'jit' (any mesh) or 'pmap' (data parallelism only)
    parallel.data = -1              # devices that share a batch's rows; -1 (of one of the three): all that are left
    parallel.fsdp = 1               # that share the rows, and the parameters and optimizer state too
    parallel.tensor = 1             # that share every matrix product: heads, feed-forward width, vocabulary

    config.eval = evaluation = ConfigDict()
    evaluation.every = 1000         # steps; the last step is always evaluated
    evaluation.metric = 'bleu'      # by which a checkpoint is best; 'loss' has every task, 'accuracy' and 'perplexity'
    #                                 all but regression ('absolute_error'), 'bleu' and 'exact_match' translation
    evaluation.method = 'greedy'    # how it decodes: translation: 'greedy' is quick, 'beam' is what decode.py will do
    evaluation.bleu_sentences = 0   # translation: validation sentences to translate; 0: all
    evaluation.patience = 0         # stop after so many evaluations without a better metric; 0: never

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every = 1000         # steps; evaluations save too
    checkpoint.every_minutes = 0.0  # also at the first step after so many minutes without a checkpoint; 0: off
    checkpoint.keep_last = 5
    checkpoint.keep_best = 1        # besides the last ones, so many with the best eval.metric

    config.decode = decode = ConfigDict()  # what decode.py and the evaluation do unless told otherwise
    decode.method = 'beam'          # 'beam', 'greedy' or 'sample'
    decode.beam = 4
    decode.alpha = 0.6              # length penalty ((5 + |Y|) / 6)^alpha
    decode.extra_length = 50        # translation: tokens more than the source at most; language_model: to add
    decode.batch_size = 64          # sentences at a time
    decode.temperature = 1.0        # sample: below 1 is bolder, above 1 more varied
    decode.top_k = 0                # sample: draw from the k most probable tokens; 0: all
    decode.top_p = 1.0              # sample: draw from the fewest tokens whose probability reaches this
    return config
