"""Images and series in notebooks and through decode.py: objects, formats, results, pictures, and mistakes."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

import inference
from analysis.answering import as_text, decode
from analysis.pictures import answer_figure, confusion_figure, save_figure
from analysis.request import Request
from runtime.errors import UserError
from tests.tiny_run import whole  # noqa: F401 (fixture)


@pytest.fixture(scope='module')
def run(whole):  # noqa: F811
    return inference.load(whole)


@pytest.fixture(scope='module')
def images(run):
    return run.data().arrays.inputs('test')[:3]


def asked(run, **flags):
    search = {name: flags.pop(name, None) for name in ('n_best', 'seed', 'batch_size', 'beam')}
    decode(Request(workdir=str(run.workdir), search=search, **flags))


def test_predictions_have_labels_probabilities_and_attention(run, images):
    predictions = run.predict(images)
    log_probs = run.model.predict(images)
    assert predictions.labels == [str(index) for index in log_probs.argmax(axis=1)]
    np.testing.assert_allclose(predictions.probabilities, np.exp(log_probs))
    np.testing.assert_allclose(predictions.probabilities.sum(axis=1), 1, rtol=1e-5)
    assert predictions.classes == tuple('0123456789') and len(predictions) == 3
    first, *_ = predictions
    assert first.label == predictions.labels[0] and first.best(10)[0] == (first.label, first.probability)
    assert [label for label, _ in first.best(10)] == [str(index) for index in np.argsort(-log_probs[0])]
    assert first.probability == pytest.approx(log_probs[0].max().item() and np.exp(log_probs[0].max()), rel=1e-6)
    weights = run.model.attention(first)['encoder']
    np.testing.assert_array_equal(weights, run.model.attention(images[0])['encoder'])
    assert len(answer_figure(run.model, predictions[1], 'encoder:1:1').axes) == 2
    assert [each.label for each in predictions[1:]] == predictions.labels[1:] and '3 predictions' in repr(predictions)
    assert run.predict(images[:0]).labels == []


def test_what_a_model_does_not_predict_is_said(run, images):
    predictions = run.predict(images)
    for read in (lambda: predictions.values, lambda: predictions[0].values):
        with pytest.raises(UserError, match='predicts classes, not values. Use .label'):
            read()
    for ask in (run.translate, run.generate, run.forced):
        with pytest.raises(UserError, match='task=classification does not support'):
            ask(['one'])


@pytest.mark.parametrize('change, message', [
    (lambda images: images[0], 'A single example needs an axis of examples'),
    (lambda images: images[..., 0], 'Greyscale images need an axis of channels'),
    (lambda images: images[:, :4], r'the model reads \[n, 8, 8, 1\]'),
    (lambda images: images.astype(str), 'inputs must be finite numbers'),
    (lambda images: [images[0], 'cat.png'], 'inputs are not an array'),
    (lambda images: 'cat.png', r'inputs have the shape \(\)'),
    (lambda images: [], r'inputs have the shape \(0,\)'),
    (lambda images: images - 300.0, 'inputs'),
])
def test_other_inputs_of_a_notebook_are_refused(run, images, change, message):
    with pytest.raises(UserError, match=message):
        run.predict(change(images))


@pytest.fixture(scope='module')
def folder(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp('images')
    np.savez(folder / 'in.npz', inputs=images)
    (folder / 'png').mkdir()
    for index, image in enumerate(images):
        Image.fromarray(np.uint8(image[..., 0])).save(folder / 'png' / f'{index}.png')
    return folder


def test_answers_are_text_json_lines_or_a_table(run, images, folder, tmp_path):
    predictions, out = run.predict(images), tmp_path / 'out'
    texts = [f'{each.label}\t{each.probability:.4f}' for each in predictions]
    asked(run, input=f'{folder}/in.npz', output=str(out))
    assert out.read_text().splitlines() == texts
    asked(run, input=f'{folder}/in.npz', output=str(out), format='tsv')
    rows = [f'{index}\t{text}' for index, text in enumerate(texts)]
    assert out.read_text().splitlines() == ['name\tclass\tprobability', *rows]
    asked(run, input=f'{folder}/in.npz', output=str(out), format='jsonl', n_best=10, attention=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    for index, (line, prediction) in enumerate(zip(lines, predictions, strict=True)):
        assert (line['name'], line['class'], line['probability']) == (str(index), prediction.label,
                                                                      pytest.approx(prediction.probability))
        assert [each['class'] for each in line['n_best']] == [label for label, _ in prediction.best(10)]
        assert sum(each['probability'] for each in line['n_best']) == pytest.approx(1)
        np.testing.assert_allclose(line['attention'], run.model.attention(prediction)['encoder'])
    asked(run, input=f'{folder}/in.npz', output=str(out), format='jsonl')
    assert len(json.loads(out.read_text().splitlines()[0])['n_best']) == 1


@pytest.mark.parametrize('flags, message', [
    ({'n_best': 3}, '--n_best can be used only with --format=jsonl'),
    ({'n_best': 3, 'format': 'tsv'}, '--n_best can be used only with --format=jsonl'),
    ({'n_best': 11, 'format': 'jsonl'}, '--n_best=11 must be from 1 to 10, the number of classes'),
    ({'n_best': 0, 'format': 'jsonl'}, '--n_best=0 must be from 1 to 10'),
    ({'seed': 1}, '--seed can be used only for text'),
    ({'documents': 'file'}, '--documents=file can be used only for a language model'),
    ({'attention': True}, '--attention can be used only with --format=jsonl'),
])
def test_flags_that_do_not_apply_are_refused(run, folder, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        asked(run, input=f'{folder}/in.npz', output=f'{tmp_path}/out', **flags)
    assert not (tmp_path / 'out').exists()


def test_results_of_a_classification_have_a_sparse_matrix_and_no_search(run, tmp_path, capsys):
    asked(run, split='test', pictures=str(tmp_path), picture_count=1)
    results = json.loads((run.workdir / 'results' / 'test.json').read_text())
    assert json.loads(capsys.readouterr().out) == results
    assert 'decoding' not in results
    with open(run.workdir / 'results' / 'test.tsv') as file:
        rows = list(csv.DictReader(file, delimiter='\t'))
    dense = np.zeros((10, 10), int)
    for row in rows:
        dense[int(row['target']), int(row['class'])] += 1
    sparse, matrix = np.zeros((10, 10), int), results['confusion_matrix']
    sparse[matrix['target'], matrix['predicted']] = matrix['count']
    np.testing.assert_array_equal(sparse, dense)
    assert min(matrix['count']) > 0 and results['accuracy'] == pytest.approx(np.trace(dense) / dense.sum())
    worst = results['most_confused'][0]
    errors = dense - np.diag(np.diag(dense))
    assert worst['count'] == errors.max() == errors[int(worst['target']), int(worst['predicted'])]
    assert worst['share_of_target'] == pytest.approx(errors.max() / dense[int(worst['target'])].sum(), abs=1e-4)
    assert {path.name for path in tmp_path.iterdir()} == {'000001.png', 'confusion_matrix.png'}


def test_json_keeps_lists_of_numbers_in_one_line():
    results = {'a': 1, 'b': [1, 2], 'c': [{'d': [3]}, {'e': 'f'}], 'g': {'h': [], 'i': {}, 'j': ['k\n']}}
    assert json.loads(as_text(results)) == results
    assert as_text(results) == ('{\n  "a": 1,\n  "b": [1, 2],\n  "c": [\n    {"d": [3]},\n    {"e": "f"}\n  ],\n'
                                '  "g": {\n    "h": [],\n    "i": {},\n    "j": ["k\\n"]\n  }\n}')


def test_a_matrix_of_many_classes_is_drawn(tmp_path):
    scores = {'classes': [f'class {index}' for index in range(1200)],
              'confusion_matrix': {'target': [0, 7, 1100], 'predicted': [0, 1199, 1], 'count': [3, 1, 2]}}
    figure = confusion_figure(scores, 'test')
    assert figure.axes[0].get_title() == 'test (without the last 200 classes)'
    save_figure(figure, tmp_path / 'matrix.png')
    few = confusion_figure({'classes': ['a$', 'b'], 'confusion_matrix': {
        'target': [0, 1], 'predicted': [1, 1], 'count': [3, 9]}}, 'test')
    assert [text.get_text() for text in few.axes[0].texts] == ['3', '9']
