"""WMT14 English to German, the paper's big model (section 6.1, Table 2: BLEU 28.4 on newstest2014, 8 GPUs, 3.5 days).

    python train.py --config=configs/wmt14_big.py --workdir=runs/wmt14_big
    python decode.py --workdir=runs/wmt14_big --split=test --checkpoint=average:20

We have not trained this recipe. 28.4 is the paper's BLEU. For French the paper uses dropout 0.1 and reports 41.8 BLEU:
--config.data.name=wmt14_translate/fr-en --config.data.target_lang=fr --config.model.dropout=0.1.
"""

from ml_collections import ConfigDict

from configs import wmt14_base


def get_config() -> ConfigDict:
    config = wmt14_base.get_config()
    config.model.update(d_model=1024, d_ff=4096, num_heads=16, dropout=0.3)
    config.train.steps = 300_000
    config.checkpoint.keep_last = 20
    return config
