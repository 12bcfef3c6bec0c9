"""Comparisons of runs, from run directories that the tests write, and the state that each run has."""

import csv
import dataclasses
import io
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.compare import LOGS, SWEEP, Spread, Table, load_runs, results_table
from analysis.plots import plot_curves, plot_varied
from configs import base, demo
from configs.options import flatten
from configs.sweeps import product, run_names, seeds
from runtime.errors import UserError
from tools.show_run import describe, described_data, nearest_recipe, progress_lines

SHORT = {'train.steps': 100, 'optimizer.warmup': 30}
CONFIG = flatten(demo.get_config()) | SHORT


def write_run(folder, overrides, bleu, steps=(50, 100), **results):
    """A run of the demo that was scored on validation if it came to its end."""
    (folder / 'results').mkdir(parents=True)
    config = demo.get_config()
    config.update_from_flattened_dict(SHORT | overrides)
    (folder / 'config.json').write_text(config.to_json())
    lines = [{'step': 10, 'tokens_per_second': 1.0}]
    for step in steps:
        lines += [{'step': step, 'tokens_per_second': 1000.0 + step, 'epoch': step / 50},
                  {'step': step, 'validation_bleu': bleu * step / 100, 'validation_loss': 1 - bleu / 100}]
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines) + '{"step": 1')
    if steps[-1] == 100:
        (folder / 'results' / 'validation.json').write_text(json.dumps(
            {'bleu': bleu, 'perplexity': 100 / bleu, 'parameters': 5000, 'bleu_signature': 'x', 'checkpoint': 'best',
             'checkpoint_steps': [100], **results}))


@pytest.fixture
def sweep(tmp_path):
    """The recipe, two numbers of heads, learned positions; two seeds each. One is half-way, one failed, one waits."""
    runs = product([{}, {'model.num_heads': 2, 'model.d_k': 64}, {'model.num_heads': 1, 'model.d_k': 128},
                    {'model.position': 'learned'}], seeds(2))
    names = run_names(runs, CONFIG)
    for index, (name, overrides) in enumerate(zip(names[:6], runs, strict=False)):
        write_run(tmp_path / name, overrides, 20.0 + index, steps=(50,) if index == 5 else (50, 100))
    (tmp_path / LOGS).mkdir()
    (tmp_path / LOGS / f'{names[6]}.failed').write_text('exit status 1')
    (tmp_path / SWEEP).write_text(json.dumps({'config': CONFIG, 'runs': dict(zip(names, runs, strict=True))}))
    return tmp_path


def test_a_sweep_becomes_a_table(sweep):
    runs = load_runs(sweep)
    assert [run.state for run in runs] == [*['finished'] * 5, 'at step 50 of 100', 'failed: exit status 1',
                                           'not started']
    assert runs[2].settings == {'model.num_heads': 2, 'model.d_k': 64} and runs[2].speed == 1075
    table = results_table(runs)
    assert table.columns == ['num_heads', 'd_k', 'position', 'bleu', 'perplexity', 'seeds', 'parameters', 'tokens/s',
                             'state']
    assert [[row.get(column) for column in table.columns[:4]] for row in table.rows] == [
        [4, 32, 'rotary', Spread(20.5, pytest.approx(0.5 ** 0.5))],  # the recipe, d_k as it comes to
        [2, 64, 'rotary', Spread(22.5, pytest.approx(0.5 ** 0.5))],
        [1, 128, 'rotary', Spread(24.0, None)],
        [4, 32, 'learned', None]]
    assert [row['state'] for row in table.rows] == ['finished', 'finished', '1 finished, 1 at step 50 of 100',
                                                    '1 failed: exit status 1, 1 not started']
    lines = table.markdown().splitlines()
    assert len({len(line) for line in lines}) == 1 and len(lines) == 6
    assert [line.count('**') for line in lines] == [0, 0, 0, 0, 4, 0]  # the best BLEU and the least perplexity
    assert '| 22.50 ± 0.71 |' in lines[3] and '|    **24.00** |' in lines[4]
    rows = list(csv.DictReader(io.StringIO(table.csv())))
    assert [row['bleu'] for row in rows] == ['20.5', '22.5', '24.0', '']
    assert float(rows[0]['bleu_sd']) == pytest.approx(0.5 ** 0.5) and rows[2]['bleu_sd'] == ''


def test_a_run_that_sets_an_option_to_the_value_in_the_recipe_is_a_seed_of_the_recipe(tmp_path):
    sweep = {'a': {'model.num_heads': 4}, 'b': {'model.num_heads': 2}, 'c': {'seed': 1}, 'd': {'seed': 2}}
    for name, overrides in sweep.items():
        write_run(tmp_path / name, overrides, 20.0)
    (tmp_path / SWEEP).write_text(json.dumps({'config': CONFIG, 'runs': sweep}))
    runs = load_runs(tmp_path)
    assert [(row['num_heads'], row['seeds']) for row in results_table(runs).rows] == [(4, 3), (2, 1)]
    [legend] = plot_curves(runs).legends
    assert [text.get_text() for text in legend.get_texts()] == ['num_heads=4', 'num_heads=2']
    [axes] = plot_varied(runs).axes
    assert '*' in [line.get_marker() for line in axes.lines], 'the recipe is a star'


def test_a_failed_run_that_was_finished_by_hand_is_finished_on_the_splits_with_results(sweep):
    first = load_runs(sweep)[0]
    (sweep / LOGS / f'{first.name}.failed').write_text('exit status 1')
    runs = load_runs(sweep)
    assert runs[0].state == 'finished'
    states = [results_table(runs, split=split).rows[0]['state'] for split in ('validation', 'test')]
    assert states == ['finished', '1 failed: exit status 1, 1 trained but not scored on test']


@pytest.mark.parametrize('metric, scored, finished', [
    ('bleu', [50], False), ('bleu', [100], True), ('bleu', [80, 100], True), ('bleu', [], True),
    ('loss', [50], True), ('loss', [100], True), ('loss', [10], False)])
def test_a_run_is_finished_if_its_best_or_last_checkpoint_was_scored(tmp_path, metric, scored, finished):
    """BLEU is best at step 100, the last step. The loss at step 50 is no worse than later, so this step is the best."""
    write_run(tmp_path / 'run', {'eval.metric': metric}, 20.0, checkpoint_steps=scored)
    [run] = load_runs(tmp_path)
    assert run.finished_on('validation') == finished and not run.finished_on('test')
    assert run.state == ('finished' if finished else f'trained but scored at step {scored[0]}')


def test_a_trained_run_without_scores_is_finished_except_in_a_sweep(sweep):
    (sweep / 'seed=0/results/validation.json').unlink()
    assert load_runs(sweep)[0].state == 'trained but not scored on validation'
    (sweep / SWEEP).unlink()
    assert load_runs(sweep / 'seed=0')[0].state == 'finished'


@pytest.mark.parametrize('runs', [[], iter(())])
def test_an_empty_list_of_runs_is_refused(runs):
    with pytest.raises(UserError, match='the list of run directories is empty. Use at least one run directory'):
        load_runs(runs)


def test_a_list_of_runs_is_compared_by_what_differs(sweep, monkeypatch):
    runs = load_runs([sweep / 'num_heads=2,d_k=64,seed=0', sweep / 'seed=1'])
    assert [run.settings for run in runs] == [{'model.d_k': 64, 'model.num_heads': 2},
                                              {'model.d_k': 0, 'model.num_heads': 4}]
    assert results_table(runs, ['model.num_heads']).columns[:2] == ['num_heads', 'bleu']
    with pytest.raises(UserError, match=r"there is no option 'num_heads': did you mean model\.num_heads\?"):
        results_table(runs, ['num_heads'])
    assert len(load_runs(runs[0].workdir)) == 1
    monkeypatch.setenv('HOME', str(sweep))
    assert len(load_runs('~')) == 8 and load_runs(['~/seed=1'])[0].workdir == sweep / 'seed=1'
    (sweep / SWEEP).unlink()
    assert len(load_runs(sweep)) == 6


def test_scores_of_models_that_were_not_trained_here_are_in_the_table(tmp_path):
    for index, name in enumerate(['exported', 'imported', 'trained']):
        write_run(tmp_path / name, {'optimizer.warmup': 10 + index}, 20.0 + index)
    for name, parameters in ('exported', 'model.safetensors'), ('imported', 'checkpoints/0'):
        (tmp_path / name / 'metrics.jsonl').unlink()
        (tmp_path / name / parameters).mkdir(parents=True)
    table = results_table(load_runs(tmp_path))
    assert [(row['bleu'].mean, row['state']) for row in table.rows] == [
        (20.0, 'not trained here'), (21.0, 'not trained here'), (22.0, 'finished')]
    (tmp_path / 'exported/model.safetensors').rmdir()  # now it looks like a run without metrics yet
    assert load_runs(tmp_path)[0].state == 'at step 0 of 100'


def test_models_of_other_libraries_in_a_folder_of_runs_are_ignored(tmp_path):
    write_run(tmp_path / 'run', {}, 20.0)
    for name, config in ('ctranslate2', {'bos_token': '<s>'}), ('huggingface', {'model_type': 'llama'}):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'config.json').write_text(json.dumps(config))
        with pytest.raises(UserError, match=f'{name}/config.json'):
            load_runs([tmp_path / 'run', tmp_path / name])
    assert [run.name for run in load_runs(tmp_path)] == ['run']


@pytest.mark.parametrize('infinite', [None, math.inf])  # JSON has no infinity, but earlier files have
def test_an_infinite_score_of_a_seed_has_no_deviation(tmp_path, infinite):
    for name, options, perplexity in ('a', {'seed': 0}, infinite), ('b', {'seed': 1}, 5.0), ('c', {
            'model.norm': 'pre'}, 5.0):
        write_run(tmp_path / name, options, 20.0, perplexity=perplexity)
    runs = load_runs(tmp_path)
    text = results_table(runs).markdown()
    assert ' inf ± nan |' in text and ' **5.000** |' in text
    figure = plot_varied(runs, 'perplexity')
    figure.canvas.draw()
    [axes] = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ['post', 'pre']


def test_text_of_a_table_stays_in_its_cell():
    table = Table(['x|y', 'bleu'], [{'x|y': 'a|b\nc', 'bleu': Spread(1.0, None)}])
    assert table.markdown().splitlines() == [r'| x\|y   |  bleu |', '| ------ | ----: |', r'| a\|b c | 1.000 |']


@pytest.mark.parametrize('spread, text', [
    (Spread(999.94, 1.0), '999.9 ± 1.0'), (Spread(999.95, 1.0), '1,000 ± 1'), (Spread(-999.97, None), '-1,000')])
def test_a_mean_that_is_rounded_to_1000_has_no_decimal_point(spread, text):
    assert str(spread) == text


def test_no_runs_are_an_error(tmp_path):
    with pytest.raises(UserError, match='has no runs. Use'):
        load_runs(tmp_path)
    with pytest.raises(UserError, match='not a run directory'):
        load_runs([tmp_path])


def test_what_runs_left_is_read_without_libraries_that_compute_or_draw():
    heavy = {'jax', 'flax', 'optax', 'orbax', 'grain', 'tensorboardX', 'matplotlib'}
    code = f'import sys, analysis.compare; print(*sorted({heavy} & sys.modules.keys()))'
    done = subprocess.run([sys.executable, '-c', code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ''), done.stderr


def test_a_run_is_at_its_end_when_patience_is(tmp_path):
    write_run(tmp_path / 'run', {'eval.patience': 2, 'eval.metric': 'loss'}, 20.0, steps=(20, 40))
    [run] = load_runs(tmp_path)
    assert run.state == 'at step 40 of 100'
    with open(tmp_path / 'run/metrics.jsonl', 'a') as file:
        file.write('\n{"step": 60, "validation_loss": 0.9}\n')
    assert load_runs(tmp_path)[0].state == 'finished'  # the best at 20, then twice no better


def test_the_plots_show_every_setting_and_every_option(sweep):
    runs = load_runs(sweep)
    curves = plot_curves(runs)
    [legend] = curves.legends
    assert [text.get_text() for text in legend.get_texts()] == ['num_heads=1,d_k=128', 'num_heads=2,d_k=64', 'base']
    [axes] = curves.axes
    assert list(axes.lines[0].get_xydata()[-1]) == [100, 24]  # its other seed is not there yet
    assert legend.get_title().get_text() == 'sorted by the last value, best first'
    assert axes.get_ylabel() == 'BLEU' and axes.get_title() == 'BLEU in training: greedy, 200 sentences of validation'
    varied = plot_varied(runs)
    assert varied.get_suptitle() == 'BLEU of decode.py: beam 4, all of validation'
    [axes] = varied.axes  # learned positions have no result yet
    assert axes.get_ylabel() == 'BLEU'
    assert axes.get_xlabel() == 'num_heads (with d_k)'
    assert [label.get_text() for label in axes.get_xticklabels()] == ['4', '2', '1']
    assert [list(point) for point in axes.lines[0].get_xydata()] == [[1, 24], [2, 22.5], [4, 20.5]]
    assert plot_varied(runs, 'chrf').axes[0].get_title() == 'no results with chrf on validation yet'


@pytest.mark.parametrize('curve, order, first', [
    ('train_alignment_loss', [3, 1, 2], 'best'), ('validation_perplexity', [3, 1, 2], 'best'),
    ('validation_accuracy', [1, 3, 2], 'best'), ('learning_rate', [1, 3, 2], 'largest')])
def test_the_legend_is_sorted_from_the_best_value_to_nan(tmp_path, curve, order, first):
    for warmup, value in (1, 2.0), (2, math.nan), (3, 1.0):
        write_run(tmp_path / str(warmup), {'optimizer.warmup': warmup}, 20.0)
        with open(tmp_path / str(warmup) / 'metrics.jsonl', 'a') as file:
            file.write(f'\n{json.dumps({"step": 100, curve: value})}\n')
    [legend] = plot_curves(load_runs(tmp_path), curve).legends
    assert [text.get_text() for text in legend.get_texts()] == [f'warmup={warmup}' for warmup in order]
    assert legend.get_title().get_text() == f'sorted by the last value, {first} first'


def test_an_unknown_curve_is_refused_if_runs_were_evaluated(tmp_path):
    write_run(tmp_path / 'run', {}, 20.0)
    with pytest.raises(UserError, match="^metric='blue': no run has this curve. Did you mean bleu"):
        plot_curves(load_runs(tmp_path), 'blue')
    (tmp_path / 'run' / 'metrics.jsonl').write_text('{"step": 10, "tokens_per_second": 1.0}\n')
    assert plot_curves(load_runs(tmp_path), 'bleu').axes[0].get_title() == 'no evaluation yet'


@pytest.mark.parametrize('make', [results_table, plot_curves, plot_varied])
def test_a_table_or_a_plot_without_runs_is_refused(make):
    with pytest.raises(UserError, match=r'^runs=\[\]: at least one run is required. Use the result of load_runs$'):
        make([])


def test_the_plot_of_runs_that_differ_only_in_the_seed_has_their_mean(tmp_path):
    for seed in 0, 1:
        write_run(tmp_path / str(seed), {'seed': seed}, 20.0 + seed)
    varied = plot_varied(load_runs(tmp_path))
    assert varied.get_suptitle() == 'BLEU of decode.py: beam 4, all of validation'
    assert [axes.get_title() for axes in varied.axes] == ['no option varies: BLEU 20.50 ± 0.71']


def test_the_table_shows_the_derived_value_of_a_width(tmp_path):
    """One narrower key, one more head, a narrower model: d_model 128 of 4 heads is 32 numbers a head."""
    runs = {'a': {'model.d_k': 16}, 'b': {'model.num_heads': 8}, 'c': {'model.d_model': 64}, 'd': {'model.norm': 'pre'}}
    (tmp_path / SWEEP).write_text(json.dumps({'config': {'model.d_model': 128, 'model.num_heads': 4}, 'runs': runs}))
    table = results_table(load_runs(tmp_path))  # the config of an earlier version, which had few options
    assert table.columns[:4] == ['d_k', 'num_heads', 'd_model', 'norm']
    assert [[row[column] for column in table.columns[:4]] for row in table.rows] == [
        [16, 4, 128, 'post'], [16, 8, 128, 'post'], [16, 4, 64, 'post'], [32, 4, 128, 'pre']]
    for name, overrides in runs.items():
        write_run(tmp_path / name, overrides, 20.0)
    (tmp_path / SWEEP).unlink()
    assert results_table(load_runs(tmp_path), ['model.d_k']).rows[1]['d_k'] == 16  # run directories, without a sweep


@pytest.mark.parametrize('overrides, results, metric, in_training, of_decode', [
    ({'eval.bleu_sentences': 20}, {'n': 1000}, 'bleu', 'BLEU in training: greedy, 20 sentences of validation',
     'BLEU of decode.py: beam 4, all of validation'),
    ({'eval.bleu_sentences': 0, 'eval.method': 'beam', 'decode.beam': 6}, {}, 'bleu',
     'BLEU in training: beam 6, all of validation', 'BLEU of decode.py: beam 6, all of validation'),
    ({'eval.bleu_sentences': 2000}, {'n': 1000, 'exact_match': 0.5}, 'exact_match',  # there are no 2,000
     'exact match in training: greedy, all of validation', 'exact match of decode.py: beam 4, all of validation'),
    ({}, {'chrf++': 40.0}, 'chrf++', 'chrf++ in training: greedy, 200 sentences of validation',
     'chrf++ of decode.py: beam 4, all of validation'),
    ({}, {'decoding': {'method': 'greedy', 'beam': 4}}, 'bleu',  # the options of decode.py
     'BLEU in training: greedy, 200 sentences of validation', 'BLEU of decode.py: greedy, all of validation'),
    ({}, {'perplexity': 5.0}, 'perplexity', 'perplexity in training: teacher forcing, validation',
     'perplexity of decode.py: teacher forcing, all of validation'),
    ({'train.label_smoothing': 0.2}, {'loss': 1.0}, 'loss',
     'loss in training: label smoothing 0.2, validation', 'loss of decode.py: no label smoothing, all of validation'),
])
def test_the_titles_of_plots_describe_the_measured_metric(tmp_path, overrides, results, metric, in_training, of_decode):
    for norm in ('pre', 'post'):
        write_run(tmp_path / norm, overrides | {'model.norm': norm}, 20.0, **results)
        with open(tmp_path / norm / 'metrics.jsonl', 'a') as file:
            file.write(f'\n{{"step": 100, "validation_{metric}": 1.0}}\n')
    runs = load_runs(tmp_path)
    curves, varied = plot_curves(runs, metric), plot_varied(runs, metric)
    assert [text.get_text() for text in (curves.axes[0].title, varied._suptitle)] == [in_training, of_decode]
    for figure, text in (curves, curves.axes[0].title), (varied, varied._suptitle):
        figure.canvas.draw()
        assert figure.bbox.x0 <= text.get_window_extent().x0 and text.get_window_extent().x1 <= figure.bbox.x1


def test_the_titles_of_plots_mention_that_runs_were_measured_differently(tmp_path):
    for beam, sentences in (1, 20), (8, 40):
        write_run(tmp_path / str(beam), {'decode.beam': beam, 'eval.bleu_sentences': sentences}, 20.0, exact_match=0.5)
    runs = load_runs(tmp_path)
    varied = plot_varied(runs, 'exact_match')
    assert varied.get_suptitle() == 'exact match of decode.py: measured differently per run, all of validation'
    varied.canvas.draw()
    title = varied._suptitle.get_window_extent()
    assert varied.bbox.x0 <= title.x0 and title.x1 <= varied.bbox.x1 and title.y0 >= varied.axes[0].bbox.y1
    assert plot_curves(runs).axes[0].get_title() == 'BLEU in training: greedy, different parts of validation'
    assert plot_curves(runs, 'tokens_per_second').axes[0].get_title() == ''


def test_the_plots_describe_only_the_runs_that_they_show(tmp_path):
    write_run(tmp_path / 'scored', {}, 20.0, decoding={'method': 'greedy', 'beam': 4})
    write_run(tmp_path / 'unscored', {'seed': 1}, 20.0, steps=(50,))
    write_run(tmp_path / 'begun', {'eval.method': 'beam', 'eval.bleu_sentences': 20}, 20.0, steps=(50,))
    (tmp_path / 'begun' / 'metrics.jsonl').unlink()
    runs = load_runs(tmp_path)
    assert plot_varied(runs).get_suptitle() == 'BLEU of decode.py: greedy, all of validation'
    assert plot_curves(runs).axes[0].get_title() == 'BLEU in training: greedy, 200 sentences of validation'


@pytest.mark.parametrize('rates, rotation', [
    ((1e-4, 1.2e-4, 1.5e-4, 1e-3), 90), ((1e-4, 1.2e-4, 1.5e-4), 0), ((0.001, 0.00105, 0.002), 90)])
def test_labels_of_neighbouring_numbers_do_not_overlap(tmp_path, rates, rotation):
    for rate in rates:
        write_run(tmp_path / str(rate), {'optimizer.final': rate}, 20.0)
    [axes] = plot_varied(load_runs(tmp_path)).axes
    axes.figure.canvas.draw()
    labels = sorted(axes.get_xticklabels(), key=lambda label: label.get_position()[0])
    assert {label.get_rotation() for label in labels} == {rotation}
    extents = [label.get_window_extent() for label in labels]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(extents))


def test_a_grid_is_a_panel_for_each_option(tmp_path):
    for norm in ('pre', 'post'):
        for warmup in (1, 10, 20):
            write_run(tmp_path / f'{norm}{warmup}', {'model.norm': norm, 'optimizer.warmup': warmup}, 10.0 + warmup)
    norm, warmup = plot_varied(load_runs(tmp_path)).axes
    assert norm.get_xlabel() == 'norm' and [label.get_text() for label in norm.get_xticklabels()] == ['post', 'pre']
    assert warmup.get_xscale() == 'log'
    assert [text.get_text() for text in warmup.get_legend().get_texts()] == ['norm=post', 'norm=pre']
    warmup.figure.canvas.draw()
    assert warmup.get_legend().get_window_extent().y0 >= warmup.bbox.y1  # above the axes, not on the tick labels


def test_the_summary_of_show_run_fits_on_one_screen(tmp_path):
    write_run(tmp_path / 'run', {'model.norm': 'pre'}, 20.0)
    (tmp_path / 'run/pictures').mkdir()
    (tmp_path / 'run/pictures/000001.png').write_bytes(b'')
    [run] = load_runs(tmp_path)
    summary = dict(describe(run))
    assert len(sum(summary.values(), [])) < 24
    assert summary['run'] == [f'{tmp_path}/run: finished']
    assert summary['task'] == ['translation, en -> fr, the built-in data']
    assert summary['model'] == ['transformer, 2 layers, d_model 128, d_ff 512, 4 heads, pre-norm, rotary positions']
    assert summary['config'] == ['configs/demo.py', '  model.norm=pre', '  optimizer.warmup=30', '  train.steps=100']
    assert summary['progress'] == ['step 100 of 100, epoch 2.0, 1,075 tokens per second',
                                   'validation at step 100: bleu 20, loss 0.8', 'best bleu: 20 at step 100']
    assert summary['validation scores'] == ['bleu 20, perplexity 5 (checkpoint best, step 100)']
    assert summary['pictures'] == [f'{tmp_path}/run/pictures: 1']
    # A source that it does not know by name has its files in a folder.
    assert described_data(CONFIG | {'data.source': 'tables', 'data.dir': 'corpus'}) == 'en -> fr, corpus'
    assert nearest_recipe(flatten(base.get_config()))[0].startswith('configs/wmt14_base')


@pytest.mark.parametrize('task, unit', [('classification', 'examples'), ('forecasting', 'windows')])
def test_the_speed_of_a_run_has_the_unit_of_the_task(tmp_path, task, unit):
    write_run(tmp_path / 'run', {}, 20.0)
    runs = [dataclasses.replace(run, config={**run.config, 'task': task}) for run in load_runs(tmp_path)]
    assert f', 1,075 {unit} per second' in next(progress_lines(runs[0]))
    assert results_table(runs).rows[0][f'{unit}/s'] == 1075 and f'{unit}/s' in results_table(runs).columns


@pytest.mark.parametrize('values, speed', [('NaN', None), ('Infinity', None), ('NaN 5.0', 5.0)])
def test_speeds_that_are_not_finite_are_ignored(tmp_path, values, speed):
    write_run(tmp_path / 'run', {}, 20.0)
    (tmp_path / 'run/metrics.jsonl').write_text(''.join(
        f'{{"step": {step}, "tokens_per_second": {value}}}\n' for step, value in enumerate(['1.0', *values.split()])))
    runs = load_runs(tmp_path)
    assert runs[0].speed == speed and results_table(runs).rows[0].get('tokens/s') == speed


def test_show_run_reports_damaged_lines_of_the_metrics(tmp_path):
    write_run(tmp_path / 'run', {}, 20.0)
    path = tmp_path / 'run/metrics.jsonl'
    path.write_bytes(b'\xff\n[]\n' + path.read_bytes() + b'}\n{"step": "x"}\n{"step": 3, "lo')
    [run] = load_runs(tmp_path)
    assert dict(describe(run))['damaged'] == ['metrics.jsonl: 3 damaged lines are ignored: 1, 2, 9']


@pytest.mark.parametrize('installed, advice', [
    ([], 'tensorboard --logdir={} (after pip install tensorboard)'),
    (['tensorboard'], 'tensorboard --logdir={}'),
])
def test_what_is_advised_for_the_curves_works(tmp_path, monkeypatch, installed, advice):
    for name in installed:
        (tmp_path / 'packages' / name).mkdir(parents=True)
        (tmp_path / 'packages' / name / '__init__.py').touch()
    write_run(tmp_path / 'run', {}, 20.0)
    (tmp_path / 'run/tensorboard').mkdir()
    [run] = load_runs(tmp_path / 'run')
    summary = describe(run)
    monkeypatch.setattr('sys.path', [str(tmp_path / 'packages')])  # whatever this machine has
    assert dict(summary)['curves'] == [
        f'{tmp_path}/run/metrics.jsonl, or ' + advice.format(f'{tmp_path}/run/tensorboard')]
