"""python -m tools.distil: a corpus whose targets are a teacher's translations."""

import json
import logging
import random
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

import inference
from configs import demo
from inference.options import search_options
from input_pipeline.sources import open_corpus
from runtime.errors import UserError
from tests.scripts import ROOT, WORDS
from tools.student_corpus import file_name, read_whole, write_corpus, write_pairs

pytestmark = pytest.mark.slow


def distil(*arguments):
    return subprocess.run([sys.executable, '-m', 'tools.distil', *map(str, arguments)], cwd=ROOT, capture_output=True,
                          text=True, timeout=300)


def lines_of(folder, name):
    return (folder / name).read_text().split('\n')


class Echo:
    """A teacher that gives back what it gets, of up to 100 characters."""

    max_length = 101

    def reads_whole(self, source):
        return len(source) <= 100

    def respond_all(self, sources, options):
        yield [SimpleNamespace(source=source, text=source) for source in sources]


@pytest.fixture(scope='module')
def corpus(run, tmp_path_factory):
    """The folder that it wrote."""
    folder = tmp_path_factory.mktemp('distilled') / 'new'
    done = distil(f'--workdir={run[0]}', f'--output={folder}', '--beam=2', '--batch_size=10', '--checkpoint=18')
    assert done.returncode == 0, done.stderr
    assert 'translated 320 of 401 sentences' in done.stderr  # 32 batches at a time
    assert 'translated 401 of 401 sentences' in done.stderr
    assert 'skipped 1 of 402 training sources: they have more than 23 tokens' in done.stderr
    return folder


def test_the_training_targets_are_the_teachers_and_all_else_is_as_it_was(corpus, run, data):
    assert {path.name for path in corpus.iterdir()} == {
        f'{split}.{side}' for split in ('train', 'validation', 'test') for side in ('en', 'xx')}
    for name in ('validation.en', 'validation.xx', 'test.en', 'test.xx'):
        assert (corpus / name).read_bytes() == (data / name).read_bytes(), name
    assert lines_of(corpus, 'train.en') == [line for line in lines_of(data, 'train.en') if len(line) < 200]
    sources, found = ((corpus / f'train.{side}').read_text().split('\n') for side in ('en', 'xx'))
    assert sources[400] == found[400] == '' and len(found) == len(sources) == 402
    teacher, best = inference.load(run[0], '18'), inference.load(run[0])
    options = search_options(teacher.config, method='beam', beam=2)
    assert found[:40] == [output.line for output in teacher.translate(sources[:40], options)]
    assert found[:40] != [output.line for output in best.translate(sources[:40], options)]
    assert len(set(found)) > 1


def test_a_student_can_read_it(corpus):
    config = demo.get_config()
    config.data.update(source='files', dir=str(corpus), target_lang='xx')
    pairs = list(open_corpus(config.data).pairs('train'))
    assert len(pairs) == 401 and pairs[0] == tuple(
        (corpus / f'train.{side}').read_text().split('\n')[0] for side in ('en', 'xx'))


def test_the_pairs_stay_as_they_are_if_asked(run, data, tmp_path):
    done = distil(f'--workdir={run[0]}', f'--output={tmp_path}/both', '--pairs', '--sentences=3', '--beam=1')
    assert done.returncode == 0, done.stderr
    for side in 'en', 'xx':
        assert (tmp_path / f'both/train.{side}').read_bytes() == (data / f'train.{side}').read_bytes()
    assert lines_of(tmp_path / 'both', 'distilled.en') == [*lines_of(data, 'train.en')[:3], '']
    assert len(lines_of(tmp_path / 'both', 'distilled.xx')) == 4


def test_held_out_splits_keep_their_names_and_equal_names_are_numbered(run, data, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    teacher = inference.load(run[0])
    for old, new in (('train', 'train'), ('validation', 'dev'), ('test', 'test_1'), ('validation', 'test_2'),
                     ('test', 'de-v')):
        for side in 'en', 'xx':
            shutil.copy(data / f'{old}.{side}', tmp_path / f'{new}.{side}')
    with teacher.config.unlocked():
        teacher.config.data.update(dir=str(tmp_path))
        teacher.config.data.splits.update(validation='de[v]', test='test_1,test_2,test_3,de-v')
    options = search_options(teacher.config, method='beam', beam=1)
    new = tmp_path / 'a student'
    write_corpus(teacher, Echo(), new, options)
    assert {path.name for path in new.iterdir()} == {
        f'{split}.{side}' for split in ('train', 'de-v', 'test_1', 'test_2', 'de-v-2') for side in ('en', 'xx')}
    for name, split in (('de-v', 'validation'), ('test_2', 'validation'), ('de-v-2', 'test')):
        assert (new / f'{name}.xx').read_bytes() == (data / f'{split}.xx').read_bytes()
    assert lines_of(new, 'train.xx') == [line for line in lines_of(data, 'train.en') if len(line) <= 100]
    assert 'test_3 is not written' in caplog.text
    flags = shlex.split(re.search('train.py (.*)', caplog.text)[1])
    assert flags == [f'--config.data.{option}' for option in (
        'source=files', f'dir={new}', 'source_lang=en', 'target_lang=xx', 'splits.train=train',
        'splits.validation=de-v', 'splits.test=test_1,test_2,de-v-2')]


def test_a_split_of_all_files_is_named_after_its_role():
    assert file_name('*', 'validation', {'train'}) == 'validation'
    assert file_name('**', 'test', {'train', 'test'}) == 'test-2'


def test_pairs_within_a_language_are_written_as_tables(tmp_path):
    config = demo.get_config()
    config.data.update(source='files', dir=str(tmp_path), target_lang='en', validation_share=0.0)
    write_pairs(SimpleNamespace(config=config), tmp_path, 'train', [('one\ttwo', 'three\nfour'), ('', 'five')])
    assert list(open_corpus(config.data).pairs('train')) == [('one two', 'three four'), ('', 'five')]


def test_only_training_sources_that_are_read_whole_are_translated(run, data, tmp_path):
    """Each source is there with its translation and with an empty side; validation and test are held out by a hash."""
    folder, workdir, new = tmp_path / 'data', tmp_path / 'run', tmp_path / 'new'
    shutil.copytree(run[0], workdir)
    folder.mkdir()
    sources = [' '.join(random.Random(number).sample(WORDS, 4)) for number in range(50)]
    longest = ' '.join(WORDS * 3)
    pairs = [*((source, 'ten nine') for source in sources), *((source, '') for source in sources), (longest, 'one')]
    (folder / 'train.tsv').write_text(''.join(f'{source}\t{target}\n' for source, target in pairs))
    config = json.loads((workdir / 'config.json').read_text())
    config['data'] |= {'dir': str(folder), 'validation_share': 0.1}
    (workdir / 'config.json').write_text(json.dumps(config))
    done = distil(f'--workdir={workdir}', f'--output={new}', '--beam=1')
    assert done.returncode == 0, done.stderr
    translated, validation, test = (lines_of(new, f'{split}.en')[:-1] for split in ('train', 'validation', 'test'))
    assert len(validation) == len(test) == 5 and len({*validation, *test}) == 10
    assert longest not in {*validation, *test}
    assert sorted(translated) == sorted(2 * [source for source in sources if source not in {*validation, *test}])
    assert 'skipped 1 of 81 training sources: they have more than 23 tokens' in done.stderr
    teacher = inference.load(run[0])
    options = search_options(teacher.config, method='beam', beam=1)
    found = dict(zip(translated, lines_of(new, 'train.xx'), strict=False))
    assert [found[source] for source in translated[:8]] == [
        output.line for output in teacher.translate(translated[:8], options)]


def test_a_corpus_of_long_sources_only_is_refused(run, data, tmp_path):
    teacher = inference.load(run[0])
    teacher.model.max_length = 1
    options = search_options(teacher.config, method='beam', beam=1)
    with pytest.raises(UserError, match=r'blank: 1; more than 0 tokens \(config.data.max_length=1\): \d+\. '):
        write_corpus(teacher, teacher.model, tmp_path / 'new', options)


@pytest.mark.parametrize('sentences, reason', [
    *((chosen, r'blank: 2; more than 100 tokens .*: 2\. Use a teacher that')
      for chosen in (0, 4)),
    (2, r'blank: 1; more than 100 tokens .*: 1\. Use a larger --sentences or a teacher that'),
    (1, r'blank: 1\. Use a larger --sentences$')])
def test_the_advice_for_blank_and_long_sources_depends_on_the_number_of_chosen_sources(sentences, reason):
    sources = ['', 'x' * 101, ' ', 'x' * 200]
    with pytest.raises(UserError, match=reason):
        read_whole(Echo(), sources, sentences)
    with pytest.raises(UserError, match=r'blank: 2\. Use training data whose sources contain text$'):
        read_whole(Echo(), ['', ' '], 0)
    assert read_whole(Echo(), [*sources, 'x'], 0) == ['', ' ', 'x']


def test_an_ensemble_translates_the_first_sentences_with_a_length_penalty(run, data, tmp_path):
    done = distil(f'--workdir={run[0]},{run[0]}', f'--output={tmp_path}/few', '--sentences=3', '--beam=99', '--alpha=3',
                  '--batch_size=3')
    assert done.returncode == 0, done.stderr
    sources = lines_of(data, 'train.en')[:3]
    assert lines_of(tmp_path / 'few', 'train.en') == [*sources, '']
    teacher = inference.load([run[0], run[0]])
    found, default = ([output.line for output in teacher.translate(sources, search_options(
        teacher.config, method='beam', beam=99, alpha=alpha, batch_size=3))] for alpha in (3.0, None))
    assert lines_of(tmp_path / 'few', 'train.xx') == [*found, ''] and found != default


def test_mistakes_are_reported(corpus, run, tmp_path):
    for arguments, message in (([f'--workdir={run[0]}'], '--output is missing'),
                               ([f'--workdir={run[0]}', f'--output={corpus}'], 'is not an empty folder'),
                               ([f'--workdir={run[0]}', f'--output={tmp_path}/x', '--beam=0'], 'beam=0 must be'),
                               ([f'--workdir={run[0]}', f'--output={tmp_path}/x', '--sentences=-1'], '--sentences=-1'),
                               ([f'--workdir={tmp_path}/none', f'--output={tmp_path}/x'], 'is not a run directory')):
        done = distil(*arguments)
        assert done.returncode == 2 and message in done.stderr and 'Traceback' not in done.stderr, done.stderr
