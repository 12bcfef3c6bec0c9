"""WMT14 English to German, the paper's base model (section 5, Table 2: BLEU 27.3 on newstest2014, 8 GPUs, 12 hours).

    python train.py --config=configs/wmt14_base.py --workdir=runs/wmt14_base
    python decode.py --workdir=runs/wmt14_base --split=test --checkpoint=average:5

The data (1.6 GB) must be prepared once, on this or on another machine. Only this preparation needs TensorFlow:

    pip install tensorflow && tfds build wmt14_translate/de-en --file_format=array_record

We have not trained this recipe. The paper's 27.3 is BLEU of tokenised text; sacreBLEU gives a slightly lower number.
For English to French: --config.data.name=wmt14_translate/fr-en --config.data.target_lang=fr.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()  # the paper's base model and optimizer
    config.data.update(source='tfds', name='wmt14_translate/de-en', source_lang='en', target_lang='de', max_length=256)
    config.data.tokenizer.vocab_size = 37_000
    config.batch.update(tokens=25_000, buckets=8)  # "approximately 25000 source tokens and 25000 target tokens"
    config.model.dtype = 'bfloat16'
    config.train.steps = 100_000
    config.eval.update(every=5000, bleu_sentences=1000)
    # The paper averages its last 5 checkpoints, which were written every 10 minutes, or 1,500 steps. 1,250 divides the
    # steps of training and of evaluation. An evaluation also saves a checkpoint, so the last 5 are 1,250 steps apart.
    config.checkpoint.update(every=1250, keep_last=5)
    return config
