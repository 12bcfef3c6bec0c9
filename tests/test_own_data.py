"""A table of the user: all mistakes are reported at once; then a run trains on it, resumes and is scored."""

import random
import shutil

import pytest

from configs import demo
from inference.scores import read_table
from input_pipeline.data import open_data
from run_directory.records import read_config
from run_directory.workdir import RunDirectory
from runtime.errors import UserError
from tests.scripts import STEPS, WORDS, script, train_arguments
from training.objective import make_objective


@pytest.fixture(scope='module')
def table(tmp_path_factory):
    """One TSV file of 300 pairs and nothing else. The target is the source backwards."""
    folder, rng = tmp_path_factory.mktemp('table'), random.Random(0)
    lines = [rng.choices(WORDS, k=rng.randint(1, 5)) for _ in range(300)]
    (folder / 'train.tsv').write_text(''.join(f'{" ".join(line)}\t{" ".join(line[::-1])}\n' for line in lines))
    return folder


def test_problems_of_the_config_and_the_data_are_reported_together(table, cache, tmp_path):
    (tmp_path / 'data').mkdir()
    shutil.copy(table / 'train.tsv', tmp_path / 'data')
    (tmp_path / 'data' / 'validation.en').touch()
    result = script(*train_arguments(tmp_path / 'run', tmp_path / 'data', cache, optimizer__warmup=STEPS,
                                     data__tokenizer__vocab_size=9000))
    stderr = result.stderr.decode()
    assert result.returncode == 2 and 'Traceback' not in stderr
    for part in ('config.optimizer.warmup=24: must be below', 'validation.xx (or validation.xx.gz) does not exist',
                 'vocab_size=9000: too large for this text. Use at most'):
        assert stderr.count(part) == 1, stderr
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('kind', ['bpe', 'unigram'])
def test_a_vocabulary_that_the_text_does_not_allow_is_lowered_and_stays_so(table, cache, tmp_path, kind, caplog):
    def config():
        config = demo.get_config()
        config.update_from_flattened_dict({'cache_dir': str(cache), 'data.source': 'files', 'data.dir': str(table),
                                           'data.tokenizer.kind': kind})
        return config

    with pytest.raises(UserError, match='vocab_size=1200: too large for this text. Use at most ') as refused:
        open_data(config(), asked=['data.tokenizer.vocab_size'])
    most = int(str(refused.value).split()[-1])
    caplog.set_level('INFO', logger='allyouneed')
    with RunDirectory(str(tmp_path / 'run'), lowered := config()) as directory:
        data = open_data(lowered, asked=directory.asked)
        directory.claim(lowered, data, make_objective(lowered, data))
    assert len(data.tokenizers['source']) == lowered.data.tokenizer.vocab_size == most
    assert f'config.data.tokenizer.vocab_size={most} instead of 1200, because' in caplog.text
    assert read_config(tmp_path / 'run').data.tokenizer.vocab_size == most
    with RunDirectory(str(tmp_path / 'run'), again := config()) as directory:
        assert directory.resumed and again == lowered
    for changes, asked in ({}, ['data.tokenizer.vocab_size']), ({'vocab_size': 1300}, []):
        again = config()
        again.data.tokenizer.update(changes)
        with pytest.raises(UserError, match=f'data.tokenizer.vocab_size: {most} in the run, 1[23]00 now'):
            RunDirectory(str(tmp_path / 'run'), again, asked=asked)


@pytest.mark.parametrize('kind, size', [('char', 4 + len(set(' '.join(WORDS)))), ('byte', 260)])
def test_pairs_are_read_as_characters_and_bytes(table, cache, kind, size):
    config = demo.get_config()
    config.update_from_flattened_dict({'cache_dir': str(cache), 'data.source': 'files', 'data.dir': str(table),
                                       'data.tokenizer.kind': kind})
    data = open_data(config)
    assert data.sizes == {'source_vocab_size': size, 'target_vocab_size': size}
    plan, pairs = data.plan('train'), set(data.pairs('train'))
    for step in range(len(plan)):
        batch = plan.batch(step)
        read = [[data.tokenizers['source'].decode(row) for row in rows] for rows in (
            batch['inputs']['source'], batch['targets'])]
        assert {pair for pair in zip(*read, strict=True) if any(pair)} <= pairs


@pytest.mark.slow
def test_a_table_of_one_s_own_is_trained_on_as_characters_resumed_and_scored(table, cache, tmp_path):
    def train(steps):
        return script(*train_arguments(
            tmp_path / 'run', table, cache, train__steps=steps, optimizer__schedule='inverse_sqrt', data__max_length=40,
            data__tokenizer__kind='char', data__tokenizer__vocab_size=8000, data__tokenizer__split_digits=False))

    for steps in (12, 18):
        done = train(steps)
        assert done.returncode == 0, done.stderr.decode()
        assert b'validation and test: held out from the training data, because there are no files' in done.stderr
    assert b'resuming from step 12' in done.stderr
    done = script('decode.py', f'--workdir={tmp_path / "run"}', '--split=test')
    assert done.returncode == 0, done.stderr.decode()
    asked = {source for source, *_ in read_table(tmp_path / 'run' / 'results' / 'test.tsv')}
    sources = {line.partition('\t')[0] for line in (table / 'train.tsv').read_text().splitlines()}
    assert len(asked) == round(len(sources) / 10) and asked < sources
    with open(table / 'train.tsv', 'a') as file:
        file.write('one more\tmore one\n')
    changed = train(24)
    assert changed.returncode == 2 and b'the data has changed since' in changed.stderr
    assert b'train.tsv' in changed.stderr
