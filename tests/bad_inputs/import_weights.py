"""python -m tools.import_weights: missing flags, and options of a recipe that the imported model decides."""

from tests.bad_inputs.cases import Case

RECIPE = '--from={here} --workdir={new} --config={root}/configs/stdlib_lm.py '
QUICK = [
    Case('', '--from is missing. Use --from=DIR --workdir=RUN'),
    Case('--from={here}', '--workdir is missing. Use --from=DIR --workdir=RUN'),
    Case(RECIPE + '--config.model.dtype=bfloat16 --config.train.steps=300 --config.model.dropout=0.2',
         ('--config.model.dtype, --config.model.dropout: the model and its tokenizer come from --from={here}. Remove',
          'fine-tune the imported model: train.py --config=configs/fine_tune.py:{new}')),
    Case(RECIPE + '--config.data.tokenizer.vocab_size=300', '--config.data.tokenizer.vocab_size: the model and its'),
]
SLOW = []
