"""Multi30k English -> German, Transformer-Tiny (Wu et al. 2021) with rotary positions: 29,000 captions of pictures.

    python train.py --config=configs/multi30k.py --config.data.dir=DIR --workdir=runs/multi30k

DIR holds train, val and test_2016_flickr in .en and .de, plain or .gz, as in the folder data/task1/raw of the
public repository multi30k/dataset. 71 minutes on 2 cores; test 2016, beam 5: 39.1 BLEU (sacreBLEU, cased,
detokenised, 13a), 39.5 lowercased; with the paper's sinusoids, 38.8 and 39.1. Our own runs, seed 0: see the README.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(num_layers=4, d_model=128, d_ff=256, num_heads=4, norm='pre', position='rotary',
                        dropout=0.2)
    config.data.update(source='files', source_lang='en', target_lang='de', max_length=64)
    config.data.splits.update(train='train', validation='val', test='test_2016_flickr')
    config.data.tokenizer.vocab_size = 4000
    config.batch.update(tokens=2048, buckets=10)
    config.optimizer.update(schedule='cosine', peak=3e-3, warmup=800)
    config.train.steps = 9500  # 32 epochs
    config.eval.every = 1250
    config.checkpoint.update(every=200, keep_last=10)
    config.decode.update(beam=5, alpha=1.2)  # chosen on the validation split, with sinusoids
    return config
