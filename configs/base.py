"""Every option, with what it means and the paper's value (base model, section 5); recipes change what they need.

Any of them can be given on the command line: --config.model.num_layers=2. A name that does not exist is an
error, so a typo never trains the wrong model.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The paper's base Transformer on the built-in corpus."""
    config = ConfigDict()
    config.seed = 0  # of the parameters, the dropout and the order of the batches
    config.cache_dir = ''  # tokenizers, token stores and compiled programs, shared by runs; '': ~/.cache/allyouneed

    config.model = model = ConfigDict()
    model.num_layers = 6            # N, in the encoder and again in the decoder
    model.d_model = 512             # width of the stream between blocks
    model.d_ff = 2048               # width inside the feed-forward sublayer
    model.num_heads = 8
    model.d_k = 0                   # width of a head's queries and keys; 0: d_model / num_heads
    model.d_v = 0                   # width of a head's values; 0: d_model / num_heads
    model.norm = 'post'             # 'post' (the paper's) or 'pre'
    model.activation = 'relu'       # 'relu' (the paper's), 'gelu' or 'silu'
    model.position = 'sinusoidal'   # 'sinusoidal', 'learned' (Table 3, row E) or 'none'
    model.max_length = 256          # rows of a learned position table, tokens
    model.share_embeddings = 'all'  # 'all' (needs a joint vocabulary), 'target' (target and output) or 'none'
    model.dropout = 0.1             # on every sublayer's output and on the embeddings
    model.attention_dropout = 0.0   # on the attention weights
    model.feed_forward_dropout = 0.0  # after the feed-forward activation
    model.dtype = 'float32'         # of the computation, or 'bfloat16'; parameters are float32
    model.remat = False             # recompute blocks in the backward pass: less memory, a third more time

    config.data = data = ConfigDict()
    data.source = 'builtin'         # 'builtin' (made from CLDR), 'text' (files) or 'tfds'
    data.source_lang = 'en'         # file suffix, TFDS feature or CLDR locale
    data.target_lang = 'fr'
    data.dir = ''                   # text: the folder of the files; tfds: its data_dir ('': TFDS's default)
    data.name = ''                  # tfds: the dataset, such as wmt14_translate/de-en
    data.splits = ConfigDict({'train': 'train', 'validation': 'validation', 'test': 'test'})  # names on disk
    data.seed = 0                   # builtin: of the corpus
    data.max_length = 128           # tokens; longer pairs are not trained on, longer inputs are cut
    data.tokenizer = ConfigDict()
    data.tokenizer.kind = 'bpe'     # 'bpe' or 'unigram'
    data.tokenizer.vocab_size = 8000  # pieces, of which 260 are special ones and bytes
    data.tokenizer.joint = True     # one vocabulary for both languages
    data.tokenizer.split_digits = False  # each digit is a piece
    data.tokenizer.normalization = 'identity'  # 'identity' (lossless) or 'nfkc'

    config.batch = ConfigDict()
    config.batch.tokens = 4096      # target positions of a batch at most, padding included
    config.batch.buckets = 6        # padded lengths, hence compilations

    config.optimizer = optimizer = ConfigDict()
    optimizer.schedule = 'paper'    # 'paper', 'inverse_sqrt' (by its peak) or 'cosine' (to 0 at train.steps)
    optimizer.factor = 1.0          # paper: multiplies the learning rate
    optimizer.peak = 1e-3           # inverse_sqrt, cosine: the highest learning rate
    optimizer.warmup = 4000         # steps
    optimizer.beta1 = 0.9
    optimizer.beta2 = 0.98
    optimizer.eps = 1e-9
    optimizer.clip = 0.0            # largest norm of the gradient; 0: not clipped

    config.train = train = ConfigDict()
    train.steps = 100_000
    train.label_smoothing = 0.1
    train.accumulate = 1            # parts that a batch is computed in, one after the other: less memory
    train.log_every = 100           # steps

    config.eval = evaluation = ConfigDict()
    evaluation.every = 1000         # steps; the last step is always evaluated
    evaluation.metric = 'bleu'      # by which a checkpoint is best: 'bleu', 'loss', 'perplexity' or 'accuracy'
    evaluation.method = 'greedy'    # how it decodes: 'greedy' is quick, 'beam' is what decode.py will do
    evaluation.bleu_sentences = 0   # validation sentences to translate; 0: all
    evaluation.patience = 0         # stop after so many evaluations without a better metric; 0: never

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every = 1000         # steps; evaluations save too
    checkpoint.keep_last = 5        # the best one is kept besides

    config.decode = decode = ConfigDict()  # what decode.py and the evaluation do unless told otherwise
    decode.method = 'beam'          # 'beam', 'greedy' or 'sample'
    decode.beam = 4
    decode.alpha = 0.6              # length penalty ((5 + |Y|) / 6)^alpha
    decode.extra_length = 50        # outputs have at most this many tokens more than their source
    decode.batch_size = 64          # sentences at a time
    return config
