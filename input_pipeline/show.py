"""Shows one training batch as text: python -m input_pipeline.show --config=configs/NAME.py --step=1234

The batch of a step depends on the config alone, so this is what any run of the config saw, or will see.
stdout: a line for each sentence pair, source TAB target, as their pieces. stderr: shape and padding.
"""

import logging

from absl import flags
from ml_collections import config_flags

from configs.checks import config_from
from errors import UserError, run_script
from input_pipeline.batches import BatchPlan
from input_pipeline.sources import open_corpus
from input_pipeline.token_store import cache_folder, open_store, tokenizers_for
from input_pipeline.tokenizer import EOS, PAD

CONFIG_FLAG = config_flags.DEFINE_config_file('config', None, 'The recipe, a file of configs/.', lock_config=True)
STEP = flags.DEFINE_integer('step', 0, 'The step, from 0.')

log = logging.getLogger('allyouneed.show')


def main() -> None:
    config = config_from(CONFIG_FLAG)
    if STEP.value < 0:
        raise UserError(f'--step={STEP.value} must not be negative')
    cache = cache_folder(config.cache_dir)
    corpus = open_corpus(config.data)
    tokenizers = tokenizers_for(corpus, config.data.tokenizer, cache)
    store = open_store(corpus, 'train', tokenizers, config.data.max_length, cache)
    plan = BatchPlan(store, tokens=config.batch.tokens, num_buckets=config.batch.buckets, seed=config.seed)
    batch = plan.batch(STEP.value)
    rows, length = batch['targets'].shape
    epoch, index = divmod(STEP.value, len(plan))
    log.info('step %d (epoch %d, batch %d of %d): %d x %d positions, %d target tokens', STEP.value, epoch, index,
             len(plan), rows, length, batch['weights'].sum())
    for source, target in zip(batch['inputs']['source'], batch['targets'], strict=True):
        if target[0] != PAD:
            print(*(' '.join(tokenizers[side].pieces(token for token in tokens if token not in (PAD, EOS)))
                    for side, tokens in (('source', source), ('target', target))), sep='\t')


if __name__ == '__main__':
    run_script(main)
