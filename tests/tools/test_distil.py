"""python -m tools.distil: a corpus whose targets are a teacher's translations."""

import logging
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

import inference
from configs import demo
from input_pipeline.sources import open_corpus
from tests.scripts import ROOT, cache, data, run  # noqa: F401 (fixtures)
from tools.distil import write_corpus


def distil(*arguments):
    return subprocess.run([sys.executable, '-m', 'tools.distil', *map(str, arguments)], cwd=ROOT, capture_output=True,
                          text=True, timeout=300)


def lines_of(folder, name):
    return (folder / name).read_text().split('\n')


class Echo:
    """A teacher that gives back what it gets."""

    def respond_all(self, sources, options):
        yield [SimpleNamespace(source=source, text=source) for source in sources]


@pytest.fixture(scope='module')
def corpus(run, tmp_path_factory):
    """The folder that it wrote."""
    folder = tmp_path_factory.mktemp('distilled') / 'new'
    done = distil(f'--workdir={run[0]}', f'--output={folder}', '--beam=2')
    assert done.returncode == 0, done.stderr
    assert '402 of 402 sentences' in done.stderr
    return folder


def test_the_training_targets_are_the_teachers_and_all_else_is_as_it_was(corpus, run, data):
    assert {path.name for path in corpus.iterdir()} == {
        f'{split}.{side}' for split in ('train', 'validation', 'test') for side in ('en', 'xx')}
    for name in ('train.en', 'validation.en', 'validation.xx', 'test.en', 'test.xx'):
        assert (corpus / name).read_bytes() == (data / name).read_bytes(), name
    sources, found = ((corpus / f'train.{side}').read_text().split('\n') for side in ('en', 'xx'))
    assert sources[400] == found[400] == '' and len(found) == len(sources) == 403
    teacher = inference.load(run[0])
    options = inference.text.search_options(teacher.config, method='beam', beam=2)
    assert found[:40] == [output.line for output in teacher.translate(sources[:40], options)]
    assert len(set(found)) > 1


def test_a_student_can_read_it(corpus):
    config = demo.get_config()
    config.data.update(source='files', dir=str(corpus), target_lang='xx')
    pairs = list(open_corpus(config.data).pairs('train'))
    assert len(pairs) == 402 and pairs[0] == tuple(
        (corpus / f'train.{side}').read_text().split('\n')[0] for side in ('en', 'xx'))


def test_the_pairs_stay_as_they_are_if_asked(run, data, tmp_path):
    done = distil(f'--workdir={run[0]}', f'--output={tmp_path}/both', '--pairs', '--sentences=3', '--beam=1')
    assert done.returncode == 0, done.stderr
    for side in 'en', 'xx':
        assert (tmp_path / f'both/train.{side}').read_bytes() == (data / f'train.{side}').read_bytes()
    assert lines_of(tmp_path / 'both', 'distilled.en') == [*lines_of(data, 'train.en')[:3], '']
    assert len(lines_of(tmp_path / 'both', 'distilled.xx')) == 4


def test_held_out_splits_keep_their_names(run, data, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    teacher = inference.load(run[0])
    for old, new in (('train', 'train'), ('validation', 'dev'), ('test', 'test_1'), ('validation', 'test_2')):
        for side in 'en', 'xx':
            shutil.copy(data / f'{old}.{side}', tmp_path / f'{new}.{side}')
    with teacher.config.unlocked():
        teacher.config.data.update(dir=str(tmp_path))
        teacher.config.data.splits.update(validation='de[v]', test='test_1,test_2,test_3')
    options = inference.text.search_options(teacher.config, method='beam', beam=1)
    new = tmp_path / 'new'
    write_corpus(teacher, Echo(), new, options)
    assert {path.name for path in new.iterdir()} == {
        f'{split}.{side}' for split in ('train', 'de-v', 'test_1', 'test_2') for side in ('en', 'xx')}
    assert (new / 'test_2.xx').read_bytes() == (data / 'validation.xx').read_bytes()
    assert (new / 'train.xx').read_bytes() == (data / 'train.en').read_bytes()
    assert 'test_3 is not written' in caplog.text
    flags = re.search('train.py (.*)', caplog.text)[1].split()
    assert flags == [f'--config.data.{option}' for option in (
        'source=files', f'dir={new}', 'splits.train=train', 'splits.validation=de-v', 'splits.test=test_1,test_2')]


@pytest.mark.slow
def test_it_can_be_tried_on_a_few_sentences(run, data, tmp_path):
    done = distil(f'--workdir={run[0]},{run[0]}', f'--output={tmp_path}/few', '--sentences=3')
    assert done.returncode == 0, done.stderr
    lines = lines_of(data, 'train.en')
    assert (tmp_path / 'few' / 'train.en').read_text().split('\n') == [*lines[:3], '']
    assert (tmp_path / 'few' / 'train.xx').read_text().count('\n') == 3


def test_mistakes_are_told(corpus, run, tmp_path):
    for arguments, message in (([f'--workdir={run[0]}'], '--output=DIR are needed'),
                               ([f'--workdir={run[0]}', f'--output={corpus}'], 'is not empty'),
                               ([f'--workdir={run[0]}', f'--output={tmp_path}/x', '--beam=0'], 'beam=0 must be'),
                               ([f'--workdir={run[0]}', f'--output={tmp_path}/x', '--sentences=-1'], '--sentences=-1'),
                               ([f'--workdir={tmp_path}/none', f'--output={tmp_path}/x'], 'is not a run directory')):
        done = distil(*arguments)
        assert done.returncode == 2 and message in done.stderr and 'Traceback' not in done.stderr, done.stderr
