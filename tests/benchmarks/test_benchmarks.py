"""Every benchmark runs on small models and reports plausible figures."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

import configs
from benchmarks import scaling
from benchmarks.operations import Op, ops_of, place_of
from benchmarks.ours import Translations, check_run, make_model
from benchmarks.sentences import ready_run
from benchmarks.trace import IDLE, costs_of, print_table
from benchmarks.turns import System, Timed, agreement, check_peers, in_turns, report_turns
from benchmarks.workloads import WORKLOADS, Search, Workload
from inference.options import SearchOptions
from kernels import rates
from kernels.rates import INSTRUCTIONS, processor, product_rate
from runtime.errors import UserError
from training.summary import matmul_flops

ROOT = pathlib.Path(__file__).parents[2]
TINY = ['--config.model.num_layers=1', '--config.model.d_model=16', '--config.model.d_ff=32',
        '--config.model.num_heads=2',
        '--config.batch.buckets=1', '--config.batch.tokens=512']
SMALL = Workload(num_layers=2, d_model=16, d_ff=24, num_heads=2, vocab_size=50, batch=3, length=7)


def command(name, *arguments, **environment):
    return subprocess.run([sys.executable, '-m', f'benchmarks.{name}', *arguments], cwd=ROOT, capture_output=True,
                          text=True, env=os.environ | environment)


def lines(name, *arguments):
    done = command(name, *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize('name, arguments, message', [
    ('train_step', ['--peers=tensorflow'], 'error: --peers=tensorflow: unknown peer. Use torch, torch.compile\n'),
    ('decode', ['--peers=torch'], 'error: --peers=torch: unknown peer. Use ctranslate2, ctranslate2.workers\n'),
    ('decode', ['--turns=0'], 'error: --turns=0'),
    ('decode', ['--checkpoint=latest'], 'error: --checkpoint does not apply to --workload=tiny. Use --workload=demo'),
    ('scaling', ['--figure=costs.foo'], 'error: --figure=costs.foo must end with .png, .pdf or .svg\n'),
    ('profile', ['--beam=2'], 'error: --beam applies only to --what=decode'),
    ('train_step', ['--dtype=bfloat16', '--matmul_precision=bfloat16'],
     'error: --matmul_precision=bfloat16 has no effect with the dtype bfloat16'),
    ('decode', ['--workdir=runs/demo'], 'error: --workdir does not apply to --workload=tiny. Use --workload=demo'),
    ('decode', ['--workload=demo', '--peers=torch'], 'error: --peers=torch: unknown peer. Use ctranslate2.float32, '),
    ('decode', ['--workload=gpt2', '--peers=torch'], 'error: --peers=torch: unknown peer. Use ctranslate2.float32, '),
    ('decode', ['--workload=gpt2', '--workdir=runs/demo'], 'error: --workdir does not apply to --workload=gpt2. Use '),
    ('decode', ['--single'], 'error: --single does not apply to --workload=tiny. Use --workload=demo or multi30k'),
    *(('decode', ['--workload=demo', f'--patience={value}'], f'error: --patience={value} must be ')
      for value in ('0', 'nan', 'inf')),
    ('decode', ['--workload=gpt2', '--patience=1'], 'error: --patience does not apply to --workload=gpt2. Use '),
    ('decode', ['--workload=gpt2', '--dtype=bfloat16'], 'error: --dtype does not apply to --workload=gpt2. Remove'),
    ('decode', ['--workload=demo', '--dtype=float32'], 'error: --dtype does not apply to --workload=demo. Remove'),
    ('checkpoints', ['--folder=~nobody_of_this_name'], 'error: ~nobody_of_this_name: '),
    ('corpus', ['--folder=/proc'], 'error: --folder=/proc exists and is not an empty folder. Use a new'),
    *(('attention', [f'--lengths={lengths}'], f'error: --lengths={lengths}: must be whole numbers of at least 1')
      for lengths in ('1k', '', '64,0')),
    ('processes', ['--cells=['], 'error: --cells=[ is not a regular expression: unterminated character set'),
])
def test_bad_command_lines(name, arguments, message):
    done = command(name, *arguments)
    assert (done.returncode, done.stdout) == (2, '') and done.stderr.startswith(message)


def test_peers_that_are_refused(monkeypatch):
    libraries = {'torch': 'torch', 'json': 'json'}
    monkeypatch.setitem(sys.modules, 'torch', None)  # as if it were not installed
    with pytest.raises(UserError, match=r"--peers=torch needs torch. Run python -m pip install -e '\.\[benchmark\]'"):
        check_peers(['torch'], libraries, 'float32')
    with pytest.raises(UserError, match='--peers contains json twice'):
        check_peers(['json', 'json'], libraries, 'float32')
    with pytest.raises(UserError, match='--dtype=bfloat16: peers compute in float32'):
        check_peers(['json'], libraries, 'bfloat16')
    check_peers([], libraries, 'bfloat16')
    check_peers(['json'], libraries, 'float32')


def test_runs_whose_sentences_cannot_be_translated_are_refused():
    workdir, recipe = pathlib.Path('runs/x'), configs.recipe('demo')
    check_run(workdir, recipe, ['ctranslate2.int8'])
    recipe.data.tokenizer.kind = 'char'
    check_run(workdir, recipe, [])
    with pytest.raises(UserError, match='--peers=ctranslate2.int8: the peers support only subwords, but runs/x has '
                                        'config.data.tokenizer.kind=char. Use --peers= to measure only this project'):
        check_run(workdir, recipe, ['ctranslate2.int8'])
    recipe.data.tokenizer.kind, recipe.train.edits = 'bpe', '[{"edit": "zero", "place": "encoder/layers_0"}]'
    check_run(workdir, recipe, [])
    with pytest.raises(UserError, match='--peers=ctranslate2.int8: the peers cannot apply edits, but runs/x was .* Use '
                                        '--peers= to measure only this project'):
        check_run(workdir, recipe, ['ctranslate2.int8'])
    with pytest.raises(UserError, match='--workdir=runs/x: task=language_model, but .* Use a run with task=transl'):
        check_run(workdir, configs.recipe('stdlib_lm'), [])


def test_a_run_on_a_gpu_is_not_compared_with_peers_on_the_cpu(monkeypatch):
    monkeypatch.setattr(jax, 'devices', lambda: [types.SimpleNamespace(platform='gpu', device_kind='H100')])
    with pytest.raises(UserError, match='--peers: the peers use the CPU, but JAX uses H100. Set JAX_PLATFORMS=cpu'):
        ready_run('runs/none', 'best', 'default', ['one'], {}, single=False, beside_peers=True)


@pytest.mark.parametrize('single, calls', [(False, [['a', 'b']]), (True, [['a'], ['b']])])
def test_single_sentences_are_separate_calls(single, calls, monkeypatch):
    found, cached = [], jax.config.values['jax_enable_compilation_cache']

    def translate(texts, options):
        found.append(texts)
        return [types.SimpleNamespace(text=text.upper()) for text in texts]

    monkeypatch.setattr('inference.run.load', lambda *_: types.SimpleNamespace(
        options=SearchOptions(), translate=translate))
    try:
        ready = ready_run('run', 'best', 'default', ['a', 'b'], {}, single, beside_peers=False)
    finally:
        jax.config.update('jax_enable_compilation_cache', cached)
    assert (found, ready.answer) == (calls, ['A', 'B'])


@pytest.mark.slow
def test_a_system_with_its_own_arenas_has_the_other_settings_of_malloc(tmp_path, monkeypatch):
    tunables = 'glibc.malloc.arena_max=1:glibc.malloc.top_pad=1000000'
    monkeypatch.setenv('GLIBC_TUNABLES', tunables)
    log, here = tmp_path / 'log', 'tests.benchmarks.systems'
    found = in_turns([System(name, f'{here}:logging_system', (str(log), name, 0.01), own_arenas=own)
                      for name, own in (('A', True), ('B', False))], 1)
    assert found['A'].facts['tunables'] == 'glibc.malloc.top_pad=1000000'
    assert found['B'].facts['tunables'] == os.environ['GLIBC_TUNABLES'] == tunables


@pytest.mark.slow
def test_turns(tmp_path):
    log, here = tmp_path / 'log', 'tests.benchmarks.systems'
    systems = [System(name, f'{here}:logging_system', (str(log), name, seconds))
               for name, seconds in (('A', 0.05), ('B', 0.15))]
    found = in_turns(systems, 3)
    turns = re.findall('A+|B+', log.read_text())
    assert [turn[0] for turn in turns] == list(3 * 'AB')
    # Calls for half a second, and one that is timed; on a busy machine they are slower, and fewer.
    assert all(2 <= len(turn) <= {'A': 11, 'B': 5}[turn[0]] for turn in turns)
    assert [len(timed.seconds) for timed in found.values()] == [3, 3]
    assert min(found['A'].seconds) >= 0.05 and min(found['B'].seconds) >= 0.15
    assert len({os.getpid(), *(timed.facts['process'] for timed in found.values())}) == 3
    assert all(0 < timed.peak_memory_gb < 4 for timed in found.values())
    with pytest.raises(UserError, match='this cannot be'):
        in_turns([*systems, System('C', f'{here}:impossible_system')], 1)
    with pytest.raises(RuntimeError, match='the process of D has ended unexpectedly'):
        in_turns([System('D', f'{here}:dying_system')], 1)


def test_ratios_are_of_turns(capsys):
    found = {'a': Timed([1.0, 2.0, 4.0], {'device': 'cpu'}, [[5, 6], [8, 9]], 1.5),
             'b': Timed([3.0, 4.0, 2.0], {}, [[5, 6], [8, 3]], 0.5)}
    report_turns(found, 100, {'benchmark': 'x'})
    a, b, ratio = map(json.loads, capsys.readouterr().out.splitlines())
    assert (a['median_s'], a['best_s'], a['worst_s'], a['tokens_per_second'], a['device']) == (2, 1, 4, 50, 'cpu')
    assert (b['system'], b['peak_memory_gb'], b['turns']) == ('b', 0.5, 3)
    assert ratio == {'benchmark': 'x', 'ratio': 2.0, 'of': 'a to b', 'quartiles': [1.25, 2.5], 'turns': 3,
                     'same_tokens': 0.75}


@pytest.mark.slow
@pytest.mark.interchange
@pytest.mark.parametrize('arguments', [['--patience=2'], ['--single', '--matmul_precision=bfloat16']])
def test_real_sentences(run, arguments):
    pytest.importorskip('ctranslate2', reason='needs the benchmark extra')
    machine, *found = lines('decode', '--workload=demo', f'--workdir={run[0]}', '--turns=1', '--peers=ctranslate2.int8',
                            *arguments)
    assert machine['gflops'].keys() == {'float32', 'bfloat16'}
    assert [line.get('system') for line in found] == 2 * ['allyouneed', 'ctranslate2.int8', None]
    assert [line.get('patience') for line in found] == [None] * 3 + [2.0 if '--patience=2' in arguments else None] * 3
    for ours, theirs, ratio in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert min(ours['bleu'], theirs['bleu'], ratio['same_translations']) >= 0 and ratio['ratio'] > 0


def test_ratios_of_texts_count_equal_translations():
    assert agreement(['a b', 'c'], ['a b', 'd']) == {'same_translations': 0.5}


def test_processor_and_rates_of_products():
    described = processor()
    assert described['processor'] and set(described['instructions']) <= set(INSTRUCTIONS)
    assert 0.01 < product_rate([(64, 64, 64), (8, 64, 128)], 'float32') < 1e5


def test_a_rate_is_the_operations_of_all_products_divided_by_their_time(monkeypatch):
    seconds = {(1000, 1000, 1000): 0.5, (1000, 1000, 500): 0.25}
    monkeypatch.setattr(rates, 'product_seconds', lambda size, dtype: seconds[size])
    assert product_rate(iter(seconds), 'float32') == pytest.approx(2 * 1.5 / 0.75)  # GFLOP/s


@pytest.mark.slow
@pytest.mark.parametrize('name, arguments', [
    ('train_step', ['--turns=1']), ('train_step', ['--turns=1', '--matmul_precision=bfloat16']),
    ('decode', ['--turns=1', '--matmul_precision=bfloat16']), ('attention', ['--lengths=64', '--runs=1'])])
def test_speeds(name, arguments):
    found = lines(name, *arguments)
    precision = 'bfloat16' if '--matmul_precision=bfloat16' in arguments else 'default'
    assert {line.get('matmul_precision', 'default') for line in found} == {precision}
    assert all(line['tokens_per_second'] > 0 and line['median_s'] > 0 and line['peak_memory_gb'] > 0 for line in found)


@pytest.mark.interchange
def test_products_in_bfloat16_are_not_compared_with_a_search_in_float32():
    pytest.importorskip('ctranslate2', reason='needs the benchmark extra')
    done = command('decode', '--peers=ctranslate2', '--matmul_precision=bfloat16')
    assert done.returncode == 2 and done.stderr.startswith(
        'error: --matmul_precision=bfloat16: the peers of --workload=tiny compute in float32')


@pytest.mark.slow
@pytest.mark.interchange
@pytest.mark.parametrize('name, peer', [('train_step', 'torch'), ('decode', 'ctranslate2')])
def test_peers(name, peer):
    pytest.importorskip(peer, reason='needs the benchmark extra')
    found = lines(name, '--turns=1', f'--peers={peer}')
    systems = ['allyouneed', peer, None] * len(found[::3])
    assert [line.get('system') for line in found] == systems
    for ours, theirs, ratio in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert ratio['ratio'] == pytest.approx(theirs['median_s'] / ours['median_s'], rel=0.01)
        assert ratio.get('same_tokens', 1) > 0.99


@pytest.mark.interchange
@pytest.mark.parametrize('beam', [1, 3])
def test_ctranslate2_decodes_what_we_decode(beam, tmp_path):
    pytest.importorskip('ctranslate2', reason='needs the benchmark extra')
    from benchmarks.peers import ctranslate2_decode

    search, model = Search(beam=beam, sentences=8, batch=4, source=5, target=9), str(tmp_path / 'model.npz')
    translations = Translations(SMALL, 'float32', search)
    translations.save(model)
    ours, theirs = translations(), ctranslate2_decode(SMALL, search, model).answer
    assert all(len(tokens) == 8 for tokens in (*ours, *theirs))
    same = np.mean([one == other for one, other in zip(ours, theirs, strict=True)])
    assert same == 1 if beam == 1 else same >= 0.5  # our last token is the end token, so the best of several may differ


@pytest.mark.interchange
def test_peers_continue_prompts_as_we_do(tmp_path):
    pytest.importorskip('ctranslate2', reason='needs the benchmark extra')
    pytest.importorskip('transformers', reason='needs the test-interchange extra')
    from benchmarks import continuations
    from interchange.huggingface import write_huggingface
    from interchange.to_ctranslate2 import write_ctranslate2

    sizes = {'n_layer': 2, 'n_embd': 64, 'n_head': 4, 'vocab_size': 500, 'n_positions': 64}
    model, prompts = continuations.random_model(sizes), continuations.random_prompts(3, 17, sizes['vocab_size'])
    write_ctranslate2(model, tmp_path)
    theirs = [continuations.ready_ctranslate2(str(tmp_path), prompts, 20, 'float32').answer]
    (tmp_path / 'config.json').unlink()
    write_huggingface(model, tmp_path)
    theirs.append(continuations.ready_transformers(str(tmp_path), prompts, 20).answer)
    ours = continuations.ready_ours(sizes, 'default', prompts, 20, beside_peers=True).answer
    assert all(len(tokens) == 20 for tokens in ours) and len({*map(tuple, ours)}) == 3
    assert theirs == [ours, ours]


@pytest.mark.interchange
def test_torch_trains_a_model_of_our_size():
    torch = pytest.importorskip('torch', reason='needs the benchmark extra')
    from benchmarks.peers import torch_model

    module = make_model(SMALL, 'float32')
    tokens = jnp.ones((1, 2), jnp.int32)
    params = jax.eval_shape(module.init, jax.random.key(0), tokens, tokens)['params']
    biases = SMALL.num_layers * 3 * 4 * SMALL.d_model  # of attention, which only nn.Transformer has
    model = torch_model(SMALL)
    assert sum(each.numel() for each in model.parameters()) == biases + sum(
        leaf.size for leaf in jax.tree.leaves(params))
    dropped = [each.p for each in model.modules() if isinstance(each, torch.nn.Dropout) and each.p]
    assert dropped == [SMALL.dropout] * 5 * SMALL.num_layers


def test_the_operations_of_a_program():
    def function(rows, weights, table, batched):
        with jax.named_scope('layers_3'):
            hidden = jnp.tanh(rows @ weights)

        def body(_, x):
            return jnp.sin(x @ weights @ weights.T)
        return jax.lax.fori_loop(0, 3, body, rows).sum(), hidden @ table, jnp.einsum('bij,bkj->bik', batched, batched)

    shapes = [(64, 32), (32, 48), (48, 1000), (7, 40, 24)]
    text = jax.jit(function).lower(*map(jnp.zeros, shapes)).compile().as_text()
    found = ops_of(text, vocab_size=1000)
    flops = sorted((op.kind, op.flops) for op in found.values() if op.flops and op.kind.startswith('products'))
    small = 2 * 64 * 32 * 48
    assert sorted(set(flops)) == [('products', small), ('products, batched', 2 * 7 * 40 * 40 * 24),
                                  ('products, vocabulary', 2 * 64 * 48 * 1000)]
    assert 'layers/tanh' in {op.place for op in found.values()}
    assert 'loops' in {op.kind for op in found.values()}


@pytest.mark.slow
def test_the_products_of_a_gradient():
    workload = dataclasses.replace(SMALL, num_layers=1)
    module, tokens = make_model(workload, 'float32'), jnp.ones((workload.batch, workload.length), jnp.int32)
    params = module.init(jax.random.key(0), tokens, tokens)

    def loss(params):
        return jax.nn.logsumexp(module.apply(params, tokens, tokens)).sum()

    found = ops_of(jax.jit(jax.grad(loss)).lower(params).compile().as_text(), workload.vocab_size).values()
    # A product has its own line, and is also part of the line of its fusion.
    assert sum(op.flops for op in found if not op.fused) == pytest.approx(
        matmul_flops(jax.grad(loss), params), rel=0.05)
    assert {op.kind for op in found} > {'products', 'products, vocabulary', 'norm'}


@pytest.mark.parametrize('op_name, place', [
    ('jit(train_step)/jvp(Transformer)/Transformer.encode/encoder/layers_0/layers_0.prefill/norm/add',
     'encoder/layers/norm/add'),
    ('jit(f)/transpose(jvp(Transformer))/decoder/layers_11/key/dot_general',
     'decoder/layers/key/dot_general (backward)'),
    ('jit(decode)/while/body/closed_call/top_k', 'top_k'), ('', '')])
def test_places(op_name, place):
    assert place_of(op_name) == place


STATS = ['hlo_op', 'hlo_module', '_p', '_c']
KINDS = ['op', *(f'ThreadpoolListener::{name}' for name in ('StartRegion', 'StopRegion', 'Record'))]


def event(kind, begin, duration=0, **stats):
    """Returns an event of a profile as text. Times are in microseconds."""
    statistics = ''.join(
        f'stats {{ metadata_id: {STATS.index(name) + 1} '
        f'{"str_value" if isinstance(value, str) else "int64_value"}: {json.dumps(value)} }} '
        for name, value in stats.items())
    return (f'events {{ metadata_id: {KINDS.index(kind) + 1} offset_ps: {begin * 10**6} '
            f'duration_ps: {duration * 10**6} {statistics} }}')


def traced(*threads):
    """Returns the costs of a profile with the events of each thread, {operation: cost}."""
    proto = 'planes { name: "/host:CPU" ' + ''.join(
        f'lines {{ id: {number} name: "thread {number}" {" ".join(events)} }} '
        for number, events in enumerate(threads)) + ''.join(
        f'{what} {{ key: {number} value {{ id: {number} name: "{name}" }} }} '
        for what, names in (('event_metadata', KINDS), ('stat_metadata', STATS))
        for number, name in enumerate(names, 1)) + '}'
    return costs_of(ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(proto)).planes)


def test_costs_of_a_trace():
    """Thread 1 runs 'a' (0 to 40 us) with 'b' inside (10 to 20); its task works on thread 2 from 30 to 60."""
    costs = traced([event('op', 0, 40, hlo_op='a', hlo_module='m'), event('op', 10, 10, hlo_op='b', hlo_module='m'),
                    event(KINDS[3], 25, _p=9), event('op', 80, 20, hlo_op='b', hlo_module='m')],
                   [event(KINDS[1], 30, _c=9), event(KINDS[2], 60)])
    rounded = {name[1]: (cost.count, round(cost.seconds * 1e6), round(cost.thread_seconds * 1e6))
               for name, cost in costs.items()}
    assert rounded == {'a': (1, 50, 60), 'b': (2, 30, 30), IDLE[1]: (0, 20, 0)}


def test_threads_and_speed_of_an_operation_do_not_depend_on_other_operations(capsys):
    costs = traced(*([event('op', 0, 40, hlo_op=name, hlo_module='m')] for name in 'ab'))
    assert [round(cost.seconds * 1e6) for cost in costs.values()] == [20, 20]
    ops = {('m', name): Op(name, 'products', name, '', 40_000) for name in 'ab'}  # in 40 us
    print_table(costs, ops, by=lambda op: (op.place,), top=2)
    rates = [line.split()[3:5] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rates == [['1.00', '1'], ['1.00', '1'], ['2.00', '2']]  # 'a', 'b' and the total


@pytest.mark.slow
@pytest.mark.parametrize('what', ['train_step', 'decode'])
def test_a_profile(what, tmp_path):
    done = command('profile', f'--what={what}', '--runs=1', '--top=5', f'--hlo={tmp_path}')
    assert done.returncode == 0, done.stderr
    assert any('train_step' in path.name or 'go_on' in path.name for path in tmp_path.iterdir())
    operations, kinds = done.stdout.split('\n\n')
    assert len(operations.splitlines()) == 1 + 1 + 5 + 1
    shares = {line.split('  ')[-1]: float(line.split()[2].rstrip('%')) for line in kinds.splitlines()[1:]}
    assert shares.pop('total') == 100 and sum(shares.values()) == pytest.approx(100, abs=1)
    assert shares['products'] > 3 and shares.get('not found', 0) < 1


def test_exponents():
    values = 2.0 ** np.arange(5)
    quadratic = [scaling.Point(value, 3 * value ** 2, 0.5) for value in values]
    assert scaling.exponent(quadratic, 'ms') == pytest.approx(2)
    assert scaling.exponent(quadratic, 'gb') == pytest.approx(0, abs=1e-9)
    bent = [scaling.Point(value, value if value > 3 else 4, 1) for value in values]
    assert scaling.exponent(bent[::-1], 'ms') == pytest.approx(1)  # the flat beginning does not count


@pytest.mark.slow
def test_scaling(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(scaling, 'BASE', dataclasses.replace(SMALL, num_layers=1, d_model=32))
    monkeypatch.setattr(scaling, 'SIZES', {'vocabulary': [512, 4096]})
    for flag, value in (('RUNS', 1), ('FIGURE', str(tmp_path / 'deep' / 'scaling.png'))):
        monkeypatch.setattr(scaling, flag, type('Flag', (), {'value': value}))
    scaling.main()
    *points, fit = map(json.loads, capsys.readouterr().out.splitlines())
    assert [point['value'] for point in points] == [512, 4096]
    assert points[1]['memory_gb'] > points[0]['memory_gb'] > 0
    assert 0.3 < fit['exponent_of_gb'] < 1.1 and fit['size'] == 'vocabulary'
    assert (tmp_path / 'deep' / 'scaling.png').read_bytes().startswith(b'\x89PNG')


def test_workloads_are_fixed():
    assert WORKLOADS['tiny'].batch * WORKLOADS['tiny'].length == 4096
    assert WORKLOADS['base'].batch * WORKLOADS['base'].length == 1024


@pytest.mark.slow
def test_the_cost_of_checkpoints(tmp_path):
    arguments = ['--config=configs/demo.py', '--every=3', '--pairs=2', *TINY, f'--config.cache_dir={tmp_path}']
    [found] = lines('checkpoints', *arguments, '--config.train.matmul_precision=auto')
    assert found['matmul_precision'] in ('default', 'bfloat16')
    done = command('checkpoints', *arguments, '--config.train.frozen=nothing')  # the frozen parameters are read
    assert done.returncode == 2 and "config.train.frozen: 'nothing' matches no parameter" in done.stderr
    assert found['ratio'] > 0 and found['held_s'] > 0 and found['every'] == 3 and len(found['ratios']) == 2


@pytest.mark.slow
def test_the_memory_of_a_corpus():
    *phases, summary = lines('corpus', '--pairs=20000', '--batches=2')
    assert [each['phase'] for each in phases] == [
        'start', 'write text', 'tokenizer', 'stage: read', 'stage: tokenise', 'stage: write', 'token store', 'plan',
        'first batch', 'batches', 'batches, one of 64 hosts', 'next epoch']
    assert all(each['own_mb'] <= each['peak_mb'] for each in phases)
    assert summary['batches_taken'] == 2 and summary['batches_of_an_epoch'] > 2
    for line, name in (phases[9], 'tokens_per_second'), (phases[10], 'tokens_per_second_of_a_host'):
        assert summary[name] == pytest.approx(line['tokens_per_second'], rel=0.1)
