"""Images and series in notebooks and through decode.py: objects, formats, results, pictures, and mistakes."""

import collections
import csv
import json
import os
import re

import numpy as np
import pytest
from PIL import Image

import inference
from analysis.answering import decode
from analysis.pictures import answer_figure
from analysis.request import Request
from inference.scores import read_table
from runtime.errors import UserError


@pytest.fixture(scope='module')
def run(whole):
    return inference.load(whole)


@pytest.fixture(scope='module')
def images(run):
    return run.data().arrays.inputs('test')[:3]


def asked(run, **flags):
    search = {name: flags.pop(name, None) for name in ('n_best', 'seed', 'batch_size', 'beam')}
    decode(Request(workdir=str(run.workdir), search=search, **flags))


def test_predictions_have_labels_probabilities_and_attention(run, images):
    predictions = run.predict(images)
    log_probs = run.model.predict(images).outputs
    assert predictions.labels == [str(index) for index in log_probs.argmax(axis=1)]
    np.testing.assert_allclose(predictions.probabilities, np.exp(log_probs))
    np.testing.assert_allclose(predictions.probabilities.sum(axis=1), 1, rtol=1e-5)
    assert predictions.classes == tuple('0123456789') and len(predictions) == 3
    first, *_ = predictions
    assert first.label == predictions.labels[0] and first.best(10)[0] == (first.label, first.probability)
    assert [label for label, _ in first.best(10)] == [str(index) for index in np.argsort(-log_probs[0])]
    assert first.probability == pytest.approx(log_probs[0].max().item() and np.exp(log_probs[0].max()), rel=1e-6)
    weights = run.model.attention(first)['encoder']
    for image in images[0], images[0] / 255:
        np.testing.assert_array_equal(weights, run.model.attention(image)['encoder'])
    assert len(answer_figure(run.model, predictions[1], 'encoder:1:1').axes) == 2
    assert [each.label for each in predictions[1:]] == predictions.labels[1:] and '3 predictions' in repr(predictions)
    assert run.predict(images[:0]).labels == []


def test_a_notebook_predicts_for_files(run, images, folder):
    predictions = run.predict(folder / 'png')
    assert [each.name for each in predictions] == ['0.png', '1.png', '2.png']
    assert predictions.labels == run.predict(images).labels == run.predict(f'{folder}/in.npz').labels


def test_calls_that_the_task_does_not_support_are_reported(run, images):
    predictions = run.predict(images)
    for read in (lambda: predictions.values, lambda: predictions[0].values):
        with pytest.raises(UserError, match='predicts classes, not values. Use .label'):
            read()
    for ask in (run.translate, run.generate, run.forced):
        with pytest.raises(UserError, match='task=classification does not support .*. Use run.predict'):
            ask(['one'])


@pytest.mark.parametrize('change, message', [
    (lambda images: images[0], 'A single example needs an axis of examples'),
    (lambda images: images[..., 0], 'Greyscale images need an axis of channels'),
    (lambda images: images[:, :4], r'the model reads \[n, 8, 8, 1\]'),
    (lambda images: images.astype(str), 'inputs must be finite numbers'),
    (lambda images: [images[0], 'cat.png'], 'inputs are not an array'),
    (lambda images: 'cat.png', 'cat.png'),
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


def test_answers_are_text_json_lines_or_a_table(run, images, folder, tmp_path, capsys):
    predictions, out = run.predict(images), tmp_path / 'out'
    texts = [f'{each.label}\t{each.probability:.4f}' for each in predictions]
    rows = [f'{index}\t{text}' for index, text in enumerate(texts)]
    asked(run, input=f'{folder}/in.npz', output=str(out))
    assert out.read_text().splitlines() == rows
    asked(run, input=f'{folder}/in.npz', output=str(out), format='tsv')
    assert out.read_text().splitlines() == ['name\tclass\tprobability', *rows]
    asked(run, input=f'{folder}/in.npz', output=str(out), format='jsonl', n_best=10, attention=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    for index, (line, prediction) in enumerate(zip(lines, predictions, strict=True)):
        assert (line['name'], line['class'], line['probability']) == (str(index), prediction.label,
                                                                      pytest.approx(prediction.probability))
        assert [each['class'] for each in line['n_best']] == [label for label, _ in prediction.best(10)]
        assert sum(each['probability'] for each in line['n_best']) == pytest.approx(1)
        np.testing.assert_allclose(line['attention'], run.model.attention(prediction)['encoder'])
    asked(run, input=f'{folder}/png', output=str(out))
    assert out.read_text().splitlines() == [f'{index}.png\t{text}' for index, text in enumerate(texts)]
    asked(run, input=f'{folder}/png/1.png', output=str(out))
    assert out.read_text() == f'{folder}/png/1.png\t{texts[1]}\n'
    name = os.fsdecode(b'\xff.png')  # not UTF-8
    (tmp_path / 'png').mkdir()
    (tmp_path / 'png' / name).write_bytes((folder / 'png' / '1.png').read_bytes())
    for output in str(out), None:  # a file and stdout
        asked(run, input=f'{tmp_path}/png', output=output)
        asked(run, input=f'{tmp_path}/png', output=output and f'{output}.jsonl', format='jsonl')
    table, line = out.read_text(), (tmp_path / 'out.jsonl').read_text()
    assert read_table(out)[0][0] == json.loads(line)['name'] == name
    assert capsys.readouterr().out == table + line
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


def test_the_matrix_and_the_most_confused_classes_are_those_of_the_table_of_answers(run, tmp_path, capsys):
    asked(run, split='test', pictures=str(tmp_path), picture_count=1)
    results = json.loads((run.workdir / 'results' / 'test.json').read_text())
    printed = json.loads(capsys.readouterr().out)
    assert printed == {name: value for name, value in results.items() if name not in ('classes', 'confusion_matrix')}
    with open(run.workdir / 'results' / 'test.tsv') as file:
        table = list(csv.DictReader(file, delimiter='\t'))
    rows = collections.Counter((row['target'], row['class']) for row in table)
    assert list(table[0]) == ['target', 'class', 'probability', 'name']
    assert [row['name'] for row in table] == list(map(str, range(results['n'])))
    assert {(true, predicted): count for true, row in results['confusion_matrix'].items()
            for predicted, count in row.items()} == rows
    worst = max(count for (true, predicted), count in rows.items() if true != predicted)
    assert re.fullmatch(rf'\d as \d: {worst} of \d+', results['most_confused'][0])
    assert {path.name for path in tmp_path.iterdir()} == {'000001.png', 'confusion_test.png'}
