"""Every other task, through the command line: language models, images, series, and the recurrent translator."""

import json

import numpy as np
import pytest

import inference
from inference.options import SearchOptions
from runtime.errors import UserError
from tests.scripts import explained, script

TINY = {'model.num_layers': 1, 'model.d_model': 16, 'model.d_ff': 16, 'model.num_heads': 2, 'train.log_every': 10}


def train(recipe, workdir, cache, **changes):
    values = {'cache_dir': cache} | changes
    return script('train.py', f'--config=configs/{recipe}.py', f'--workdir={workdir}',
                  *(f'--config.{key}={value}' for key, value in values.items()))


@pytest.fixture(scope='module')
def language_run(tmp_path_factory, cache):
    """A model of characters that has read the same line over and over."""
    folder = tmp_path_factory.mktemp('language')
    (folder / 'text.txt').write_text('abc def ghi.\n' * 2000)
    done = train('shakespeare_char', folder / 'run', cache, **TINY | {
        'data.file': folder / 'text.txt', 'data.context': 16, 'model.max_length': 16, 'train.steps': 300,
        'eval.every': 150, 'checkpoint.every': 150, 'optimizer.warmup': 20, 'optimizer.peak': 1e-2})
    assert done.returncode == 0, done.stderr.decode()
    return folder / 'run'


@pytest.mark.slow
def test_a_language_model_is_scored_in_bits_per_character(language_run):
    done = script('decode.py', f'--workdir={language_run}', '--split=test', '--extra_length=20')
    assert done.returncode == 0, done.stderr.decode()
    results = json.loads((language_run / 'results' / 'test.json').read_text())
    assert results == json.loads(done.stdout)
    assert results['characters'] == 2600
    assert results['bits_per_character'] < 0.3
    nats = results['loss'] * results['n']
    assert results['bits_per_character'] == pytest.approx(nats / np.log(2) / 2600, rel=1e-4)
    assert results['bytes'] == 2600 and results['bits_per_byte'] == results['bits_per_character']
    assert results['perplexity'] == pytest.approx(np.exp(results['loss']), rel=1e-4)
    assert len(results['samples']) == 3


@pytest.mark.slow
def test_a_prompt_is_continued_beyond_the_window(language_run, tmp_path):
    done = script('decode.py', f'--workdir={language_run}', '--input=-', '--method=greedy', '--extra_length=40',
                  f'--pictures={tmp_path}', '--look=encoder:1:mean', f'--explain={tmp_path / "page.html"}',
                  stdin=b'abc d\nghi. this prompt is not short\n')
    assert done.returncode == 0, done.stderr.decode()
    first, second = done.stdout.decode().split('\n---------------\n')
    # Two windows and a half: the line goes on, with the line ends that the model wrote.
    assert ('abc d' + first).startswith('abc def ghi.\nabc def ghi.\nabc def ghi.\nabc')
    assert len(first) == 40 and len(second.removesuffix('\n')) == 40
    assert len(list(tmp_path.glob('*.png'))) == 2
    assert len(explained(tmp_path / 'page.html')) == 2


@pytest.mark.slow
def test_texts_of_several_lines_are_scored_and_continued(language_run):
    text = b'def ghi.\nabc def ghi.\n\nabc def ghi.\nabc 7'
    done = script('decode.py', f'--workdir={language_run}', '--input=-', '--documents=blank_line', '--score',
                  '--format=jsonl', stdin=text)
    assert done.returncode == 0, done.stderr.decode()
    first, second = map(json.loads, done.stdout.decode().splitlines())
    assert first['text'] == 'def ghi.\nabc def ghi.' and (first['window'], first['stride']) == (16, 8)
    assert not first.keys() & {'source', 'source_tokens', 'tokens', 'n_best'}  # a file may have a million tokens
    assert first['bits_per_byte'] == pytest.approx(-first['log_prob'] / np.log(2) / 21, rel=1e-6)
    stderr = done.stderr.decode()
    assert "the model reads it as <unk>: '7' (1). The first is character 18 of text 2" in stderr
    assert stderr.count('not in the vocabulary') == 1
    total = (first['log_prob'] + second['log_prob']) / -np.log(2) / 39
    assert f'39 bytes, 39 characters and 41 tokens (including end tokens): {total:.4f} bits per byte' in stderr
    assert 'in 1 of 2 texts, the decoded tokens differ from the text' in stderr
    done = script('decode.py', f'--workdir={language_run}', '--input=-', '--documents=file', '--score',
                  '--format=jsonl', stdin=text)
    line = json.loads(done.stdout)
    assert 'text' not in line and line['bytes'] == 41
    done = script('decode.py', f'--workdir={language_run}', '--input=-', '--documents=file', '--method=greedy',
                  '--extra_length=9', stdin=text[:22])
    assert done.stdout == b'abc def g\n'


@pytest.mark.slow
def test_generating_in_a_notebook(language_run):
    run = inference.load(language_run)
    greedy = SearchOptions(method='greedy', extra_length=6)
    one, two = run.generate(['abc', ''], greedy)
    assert one.text == ' def g'
    assert len(two.text) == 6
    drawn = run.generate(['abc'] * 2, SearchOptions(method='sample', temperature=5.0, extra_length=12, seed=3))
    assert drawn[0].text != drawn[1].text
    again = run.model.generate(['abc'], SearchOptions(method='sample', temperature=5.0, extra_length=12, seed=3),
                               first=1)
    assert again[0].text == drawn[1].text
    weights = run.model.attention(one)['encoder']
    assert weights.shape == (1, 2, 9, 9)
    beam, = run.generate(['abc'], SearchOptions(method='beam', beam=3, n_best=2, extra_length=4))
    assert beam.text == ' def' and len(beam.hypotheses) == 2
    with pytest.raises(UserError, match='extra_length=40: must be at most 16, because'):
        run.generate(['abc'], SearchOptions(method='beam', extra_length=40))
    with pytest.raises(UserError, match='does not support translation'):
        run.translate(['abc'])


@pytest.mark.slow
def test_images_are_classified(tmp_path, cache):
    done = train('digits_vit', tmp_path / 'run', cache, **TINY | {
        'model.d_model': 32, 'train.steps': 300, 'eval.every': 150, 'checkpoint.every': 150, 'optimizer.warmup': 20,
        'optimizer.peak': 1e-2})
    assert done.returncode == 0, done.stderr.decode()
    done = script('decode.py', f'--workdir={tmp_path / "run"}', '--split=test', f'--pictures={tmp_path / "pictures"}',
                  '--picture_count=2', f'--explain={tmp_path / "page.html"}', '--explain_count=3')
    assert done.returncode == 0, done.stderr.decode()
    results = json.loads((tmp_path / 'run' / 'results' / 'test.json').read_text())
    assert results['decoding'] == {'batch_size': 128}
    confusion = np.array([[results['confusion_matrix'].get(true, {}).get(predicted, 0)
                           for predicted in results['classes']] for true in results['classes']])
    assert results['accuracy'] == pytest.approx(np.trace(confusion) / confusion.sum()) and results['accuracy'] > 0.3
    assert confusion.shape == (10, 10) and confusion.sum() == results['n'] == 300
    assert {path.name for path in (tmp_path / 'pictures').iterdir()} == {'000001.png', '000002.png',
                                                                        'confusion_test.png'}
    assert len(explained(tmp_path / 'page.html')) == 3

    images = inference.load(tmp_path / 'run').data().arrays.inputs('test')[:3]
    np.savez(tmp_path / 'images.npz', inputs=images)
    done = script('decode.py', f'--workdir={tmp_path / "run"}', f'--input={tmp_path / "images.npz"}')
    table = (tmp_path / 'run' / 'results' / 'test.tsv').read_text().splitlines()[1:4]
    answers = [f'{index}\t{answer}' for index, answer in enumerate('\t'.join(row.split('\t')[1:3]) for row in table)]
    assert done.stdout.decode().splitlines() == answers
    np.savez(tmp_path / 'none.npz', inputs=images[:0])
    np.savez(tmp_path / 'small.npz', inputs=images[:, :4])
    for name, status, part in ('nothing', 2, b'nothing.npz'), ('none', 0, b''), ('small', 2, b'model reads [n, 8, 8'):
        done = script('decode.py', f'--workdir={tmp_path / "run"}', f'--input={tmp_path / name}.npz')
        assert done.returncode == status and part in done.stderr and b'Traceback' not in done.stderr
        assert done.stdout == b''


@pytest.mark.slow
@pytest.mark.parametrize('recipe, expected', [('dynamics', 'accuracy'), ('pendulum', 'r_squared')])
def test_series_are_classified_and_measured(tmp_path, cache, recipe, expected):
    done = train(recipe, tmp_path / 'run', cache, **TINY | {
        'train.steps': 20, 'eval.every': 20, 'checkpoint.every': 20, 'optimizer.warmup': 5})
    assert done.returncode == 0, done.stderr.decode()
    done = script('decode.py', f'--workdir={tmp_path / "run"}', '--split=validation', '--look=encoder:1:2',
                  f'--pictures={tmp_path / "pictures"}', '--picture_count=1', f'--explain={tmp_path / "page.html"}')
    assert done.returncode == 0, done.stderr.decode()
    assert expected in json.loads(done.stdout)
    assert len(list((tmp_path / 'pictures').glob('0*.png'))) == 1
    assert len(explained(tmp_path / 'page.html')) == 200


@pytest.mark.slow
@pytest.mark.parametrize('attention', [True, False])
def test_the_recurrent_translator_trains_and_decodes(tmp_path, cache, attention):
    words = ['one', 'two', 'three', 'four', 'five', 'six', 'seven']
    for split in ('train', 'validation', 'test'):
        lines = [' '.join(np.random.default_rng(row).choice(words, 1 + row % 5)) for row in range(200)]
        (tmp_path / f'{split}.tsv').write_text(''.join(f'{line}\t{line.upper()}\n' for line in lines))
    done = train('rnnsearch_demo', tmp_path / 'run', cache, **{
        'data.source': 'files', 'data.dir': tmp_path, 'data.max_length': 16, 'data.tokenizer.vocab_size': 290,
        'batch.tokens': 256, 'batch.buckets': 1,
        'model.d_model': 8, 'model.recurrent.d_hidden': 8,
        'model.recurrent.attention': attention, 'train.steps': 4, 'train.log_every': 2, 'eval.every': 4,
        'checkpoint.every': 4, 'optimizer.warmup': 2, 'eval.bleu_sentences': 8})
    assert done.returncode == 0, done.stderr.decode()
    run = inference.load(tmp_path / 'run')
    output, = run.translate(['one two'], SearchOptions(beam=2, extra_length=2))
    weights = run.model.attention(output)
    assert set(weights) == ({'cross'} if attention else set())
    done = script('decode.py', f'--workdir={tmp_path / "run"}', '--input=-', f'--pictures={tmp_path / "pictures"}',
                  '--extra_length=2', f'--explain={tmp_path / "page.html"}', stdin=b'one two\n')
    assert (done.returncode == 0) == attention, done.stderr.decode()
    assert (tmp_path / 'page.html').exists() == attention
    if not attention:
        assert b'this model has no attention weights' in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize('changes, message', [
    ({'model.recurrent.d_hidden': 5}, 'config.model.recurrent.d_hidden=5: has no effect with'),
    ({'data.source_lang': 'de'}, "config.data.source_lang='de': has no effect with task=language_model"),
    ({'eval.metric': 'bleu'}, "config.eval.metric='bleu': must be one of loss, perplexity"),
    ({'model.kind': 'transformer'}, "config.task='language_model': must be translation for model.kind=transformer"),
    ({'data.file': '/nowhere.txt'}, '/nowhere.txt'),
])
def test_an_option_without_a_meaning_is_refused(tmp_path, cache, changes, message):
    done = train('shakespeare_char', tmp_path / 'run', cache, **{'data.file': 'x.txt'} | changes)
    assert done.returncode == 2 and message in done.stderr.decode() and 'Traceback' not in done.stderr.decode()
    assert not (tmp_path / 'run').exists()
