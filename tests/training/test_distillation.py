"""Word-level distillation: the loss against its definition, and a student's run from start to end."""

import functools
import shutil
from unittest.mock import Mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inference
from benchmarks.modes import VOCABULARY, Mode, compiled, ragged_batch, train
from input_pipeline.data import Data
from model.blocks import BlockConfig
from model.ensemble import Ensemble
from model.evaluation import forward, supervised
from model.losses import cross_entropy
from model.transformer import Transformer
from run_directory import trained
from runtime.errors import UserError
from tests.jobs import Job
from tests.random_run import random_run
from tests.scripts import parameters, script, train_arguments
from tests.training.test_objective import Noisy, batch_of, log_softmax
from training.objective import distilled, r_drop, simcut

SMOOTHED = functools.partial(cross_entropy, label_smoothing=0.1)
KEY = jax.random.key(3)


class Constant(nn.Module):
    """A teacher whose logits do not depend on its input."""
    logits: tuple[float, ...]

    @nn.compact
    def __call__(self, inputs, deterministic=True):
        assert deterministic, 'a teacher has no dropout'
        return jnp.broadcast_to(jnp.array(self.logits), (len(inputs), len(self.logits)))


def made(seed):
    batch, module = batch_of(), Noisy()
    return batch, module, module.init(jax.random.key(seed), batch['inputs']['inputs'])['params']


@pytest.mark.parametrize('weight', [0.0, 0.3, 1.0])
def test_it_is_its_definition(weight):
    (batch, module, params), (_, _, teacher) = made(0), made(1)
    objective = distilled(supervised, SMOOTHED, weight, forward(module), teacher)
    sums = objective(forward(module), params, batch, KEY)
    log_p = log_softmax(module.apply({'params': params}, batch['inputs']['inputs'], deterministic=False,
                                     rngs={'dropout': KEY}))
    log_q = log_softmax(module.apply({'params': teacher}, batch['inputs']['inputs']))
    smooth = 0.9 * np.eye(5)[batch['targets']] + 0.1 / 5
    mixed = -((1 - weight) * smooth * log_p + weight * np.exp(log_q) * log_p).sum(axis=-1)
    weights = np.asarray(batch['weights'], np.float64)
    assert float(sums.loss) == pytest.approx((mixed * weights).sum(), rel=1e-5)
    apart = (np.exp(log_q) * (log_q - log_p)).sum(axis=-1)
    assert float(sums.others['teacher_divergence']) == pytest.approx((apart * weights).sum(), rel=1e-4)
    assert sums.tokens == weights.sum()


def test_a_teacher_that_is_sure_of_a_class_is_a_target():
    batch, module, params = made(0)
    batch['targets'] = jnp.full(12, 2)
    sure = forward(Constant((0.0, 0.0, 1e4, 0.0, 0.0)))
    plain = supervised(functools.partial(cross_entropy, label_smoothing=0.0))(forward(module), params, batch, KEY)
    taught = distilled(supervised, SMOOTHED, 1.0, sure, {})(forward(module), params, batch, KEY)
    assert float(taught.loss) == pytest.approx(float(plain.loss), rel=1e-6)


@pytest.mark.slow
def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it():
    batch, module, params = made(0)
    objective = distilled(supervised, SMOOTHED, 1.0, forward(Constant((1.0, 2.0, 0.0, 0.0, 3.0))), {})
    gradient = jax.grad(lambda logits: objective(lambda *_: (logits, {}), {}, batch, KEY).loss)
    found = gradient(jnp.tile(jnp.array([1.0, 2.0, 0.0, 0.0, 3.0]) + 7, (12, 1)))
    np.testing.assert_allclose(found, 0, atol=1e-6)


def test_no_gradient_goes_to_the_teacher_and_an_evaluation_has_none():
    (batch, module, params), (_, _, teacher) = made(0), made(1)
    objective = distilled(supervised, SMOOTHED, 0.5, forward(module), teacher)
    assert jax.tree.structure(jax.tree.leaves(objective)) == jax.tree.structure(jax.tree.leaves(teacher))
    for one, other in zip(*(jax.tree.leaves(each(forward(module), params, batch, None))
                            for each in (objective, supervised(SMOOTHED))), strict=True):
        assert one == other


@pytest.mark.parametrize('variant', [functools.partial(r_drop, alpha=5.0),
                                     functools.partial(simcut, alpha=3.0, word_dropout=0.4)], ids=['R-Drop', 'SimCut'])
def test_each_pass_of_a_variant_has_the_teacher(variant):
    """The divergence of the passes is what it is without a teacher; each cross-entropy is a mixture."""
    (batch, module, params), (_, _, teacher) = made(0), made(1)

    def loss(weight):
        return distilled(variant, SMOOTHED, weight, forward(module), teacher)(forward(module), params, batch, KEY)

    plain = variant(SMOOTHED)(forward(module), params, batch, KEY)
    assert float(loss(0.0).loss) == pytest.approx(float(plain.loss), rel=1e-6)
    assert float(loss(0.5).loss) == pytest.approx((float(loss(0.0).loss) + float(loss(1.0).loss)) / 2, rel=1e-6)
    for name in ('divergence', 'nll', 'accuracy'):
        assert float(loss(0.5).others[name]) == pytest.approx(float(plain.others[name]), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('mode', [Mode(data=2, fsdp=2, tensor=2), Mode(accumulate=2), Mode(data=4, mode='pmap')],
                         ids=str)
def test_a_mesh_learns_what_one_device_learns(mode):
    blocks = BlockConfig(d_model=24, d_ff=16, num_heads=2)
    teachers = [Transformer(blocks, 1, VOCABULARY, VOCABULARY) for _ in range(2)]
    inputs = ragged_batch(0)['inputs']
    params = {f'members_{seed}': nn.unbox(jax.jit(each.init)(jax.random.key(seed), **inputs))['params']
              for seed, each in enumerate(teachers)}
    objective = distilled(supervised, SMOOTHED, 0.7, forward(Ensemble(tuple(teachers))), params)
    (one, losses), (state, found) = (train(compiled(each, objective=objective)) for each in (Mode(), mode))
    np.testing.assert_allclose(found, losses, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, one.params)
    assert abs(losses[0] - train(compiled(Mode()))[1][0]) > 1e-3


def test_a_teacher_with_edits_is_refused(monkeypatch):
    teacher = random_run('language_model')._trained
    teacher.config.train.update({'teacher': 'random', 'edits': '[{"edit": "zero", "place": "encoder/layers_0"}]'})
    monkeypatch.setattr(trained, 'read_model', lambda path, checkpoint: teacher)
    with pytest.raises(UserError, match='random was trained with config.train.edits. A teacher cannot apply these'):
        trained.read_teacher(teacher.config, Mock(Data, tokenizers=teacher.tokenizers))


# Runs

def student(workdir, teacher, data, cache, **changes):
    return train_arguments(workdir, data, cache, **{
        'model__d_model': 8, 'model__d_ff': 8, 'train__teacher': teacher, 'train__teacher_weight': 0.8,
        'seed': 3, **changes})


@pytest.fixture(scope='module')
def taught(run, data, cache, tmp_path_factory):
    """A student of two teachers, with other sentences than theirs: the vocabulary is theirs all the same."""
    folder = tmp_path_factory.mktemp('students')
    shutil.copytree(data, folder / 'data')
    for side in ('en', 'xx'):
        lines = (data / f'train.{side}').read_text().splitlines()[:120]
        (folder / 'data' / f'train.{side}').write_text('\n'.join(lines) + '\n')
    shutil.copytree(run[0], folder / 'again,seed=1')
    arguments = student(folder / 'student', f'{run[0]},{folder}/again,seed=1', folder / 'data', cache)
    done = script(*arguments)
    assert done.returncode == 0, done.stderr.decode()
    return folder, arguments


@pytest.mark.slow
def test_a_student_has_the_vocabulary_of_its_teacher(taught, run):
    folder, _ = taught
    for name in ('source.model', 'target.model', 'sizes.json'):
        assert (folder / 'student' / 'data' / name).read_bytes() == (run[0] / 'data' / name).read_bytes()
    lines = (folder / 'student' / 'metrics.jsonl').read_text()
    assert 'train_teacher_divergence' in lines and 'validation_teacher_divergence' not in lines
    assert inference.load([folder / 'student', run[0]]).translate(['one two'])  # of one vocabulary


@pytest.mark.slow
def test_it_resumes_bit_for_bit_and_decodes_without_its_teacher(taught, run):
    folder, arguments = taught
    whole = parameters(folder / 'student')
    for step in ('18', '24'):
        shutil.rmtree(folder / 'student' / 'checkpoints' / step)
    resumed = script(*arguments)
    assert resumed.returncode == 0 and b'resuming from step 12' in resumed.stderr, resumed.stderr.decode()
    for one, other in zip(whole, parameters(folder / 'student'), strict=True):
        np.testing.assert_array_equal(one, other)
    shutil.rmtree(folder / 'again,seed=1')
    done = script('decode.py', f'--workdir={folder}/student', '--split=test')
    assert done.returncode == 0, done.stderr.decode()
    shutil.rmtree(folder / 'student' / 'checkpoints' / '24')
    other = script(*arguments, f'--config.train.teacher={run[0]}')
    assert other.returncode == 2 and b'the parameters of the teacher have changed since' in other.stderr
    again = script(*arguments)
    assert again.returncode == 2 and b'again,seed=1 is not a run directory' in again.stderr


@pytest.mark.slow
def test_two_processes_learn_what_one_does(run, data, cache, tmp_path):
    """Each reads the teacher and has it whole."""
    short = {'teacher': run[0], 'data': data, 'cache': cache, 'optimizer__warmup': 1, 'train__steps': 3,
             'eval__every': 3, 'eval__bleu_sentences': 2}
    with Job(2, student(tmp_path / 'two', **short), tmp_path / 'logs') as job:
        assert job.end() == [0, 0], job.output(0) + job.output(1)
    alone = script(*student(tmp_path / 'one', **short))
    assert alone.returncode == 0, alone.stderr.decode()
    for one, other in zip(parameters(tmp_path / 'one'), parameters(tmp_path / 'two'), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
def test_an_impossible_teacher_is_reported(run, data, cache, tmp_path):
    for changes, message in (
            ({'train__teacher': tmp_path / 'none'}, 'none is not a run directory'),
            ({'data__tokenizer__vocab_size': 290}, 'config.data.tokenizer.vocab_size=290: must be 285, as in the run'),
            ({'train__teacher_checkpoint': 'bset'}, "checkpoint='bset' does not exist"),
            ({'train__teacher': '', 'train__teacher_weight': 0.8}, 'train.teacher_weight=0.8: has no effect without')):
        done = script(*student(tmp_path / 'run', **{'teacher': run[0], 'data': data, 'cache': cache, **changes}))
        assert done.returncode == 2 and message in done.stderr.decode(), done.stderr.decode()
        assert 'Traceback' not in done.stderr.decode() and not (tmp_path / 'run' / 'config.json').exists()
