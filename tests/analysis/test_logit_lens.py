"""The logit lens: after layer n, the predictions of the model with only n layers."""

import numpy as np
import pytest

from analysis.logit_lens import logit_lens
from model.embedding import ABSENT
from runtime.errors import UserError
from tests.random_run import random_run

MODERN = {'feed_forward': 'gated', 'norm_function': 'rms_norm', 'position': 'rotary', 'tie_embeddings': False,
          'remat': True}


def log_probs(run, given, **attributes):
    """The log-probabilities of the target by a model with other attributes, and its most probable pieces."""
    model = run.model
    model = type(model)(model.module.clone(**attributes), model.params, model.tokenizers, 99) if (
        run.config.task == 'translation') else type(model)(
            model.module.clone(**attributes), model.params, model.tokenizers['target'], 64, True)
    output, = model.forced_all([given])
    found = model.token_probabilities(output)
    return [np.log(each.probability) for each in found]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize('kind, options', [
    ('language_model', MODERN),
    ('transformer', {}), ('transformer', {'norm': 'pre', 'share_embeddings': 'none'}),
    ('language_model', {'norm': 'pre'})])
def test_after_a_layer_the_lens_shows_the_predictions_of_a_model_with_fewer_layers(kind, options):
    run = random_run(kind, **options)
    given = ('a source', 'text') if kind == 'transformer' else 'some text'
    found = logit_lens(run, given)
    fewer = {'num_decoder_layers': 1} if kind == 'transformer' else {'num_layers': 1}
    assert found.places[0].endswith('/input') and len(found.places) == len(found.log_probs) == len(found.best) == 3
    shown = slice(0, 5 if kind == 'transformer' else 9)
    np.testing.assert_allclose(found.log_probs[1], log_probs(run, given, **fewer)[shown], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.log_probs[2], log_probs(run, given)[shown], rtol=1e-4, atol=1e-5)
    assert found.best[1] != found.best[2] and ABSENT < found.log_probs.min() < found.log_probs.max() < 0
    assert len(str(found).splitlines()) == 1 + len(found.target)


def test_a_recurrent_model_has_no_residual_stream():
    with pytest.raises(UserError, match='the logit lens needs a residual stream, but this model has none'):
        logit_lens(random_run('rnnsearch'), ('a', 'b'))
