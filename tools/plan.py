"""Plans a training on machines that are not here: python -m tools.plan --config=configs/NAME.py --topology=v5e:4x4

Compiles the real train step and a step of the search ahead of time for the devices, and tells for each of them memory,
arithmetic, traffic and communication, and the speed that these allow at best. TPUs (v4, v5e, v5p, v6e) need libtpu, as
`pip install -e ".[plan]"` installs it, and no TPU; GPUs (a100:8, h100:16) are planned by formula. Options are set
as for train.py, as --config.parallel.fsdp=4. With --search meshes, remat and batches are tried, by formula first; the
best are compiled, and the best of those is named. The data need not be there: a batch is full of sentences of --length
tokens. stdout has the plan, as text or, with --json, as JSON.
"""
# ruff: noqa: E402 (flags come before the imports that take seconds)

import dataclasses
import json
import logging
import os
import time
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from command_line import flag_files_explained, read_command_line, run_script

with flag_files_explained():
    CONFIG_FLAG = config_flags.DEFINE_config_file('config', None, 'The recipe, a file of configs/.', lock_config=True)
TOPOLOGY = flags.DEFINE_string('topology', None, 'The devices: v4:2x2x1, v5e:4x4, v5p:2x2x2, v6e:4x4, a100:8, h100:16.')
SLICES = flags.DEFINE_integer('slices', 1, 'How many such slices, data parallel across them.')
LENGTH = flags.DEFINE_integer('length', None, 'Tokens of an assumed sentence, padding included; default 64, or a '
                              'window.')
SEARCH = flags.DEFINE_bool('search', False, 'Try meshes, remat, batch sizes and parts of a batch; name the best that '
                           'fits.')
COMPILE = flags.DEFINE_integer('compile', 1, 'With --search, how many of the best by formula are compiled; 0: none.')
FORMULA = flags.DEFINE_bool('formula', False, 'By formula alone: compile nothing.')
DECODE = flags.DEFINE_bool('decode', True, 'Compile a step of beam search too.')
KEEP = flags.DEFINE_string('keep', None, 'A file for the compiled train step, to be loaded on the machine itself.')
JSON = flags.DEFINE_bool('json', False, 'Print JSON.')

if __name__ == '__main__':
    read_command_line()  # before the imports that take seconds
    # Nothing is asked of a TPU or of its metadata server; libtpu's own log is for its makers.
    os.environ.update(JAX_PLATFORMS='cpu', TPU_SKIP_MDS_QUERY='1', ALLOW_MULTIPLE_LIBTPU_LOAD='1')
    for name in ('TPU_MIN_LOG_LEVEL', 'TPU_STDERR_LOG_LEVEL'):
        os.environ.setdefault(name, '3')

from configs.checks import config_from
from configs.options import AXES
from runtime.errors import UserError
from tools.ahead import Ahead, Figures, Recipe, TooLarge, devices_of, keep
from tools.chips import Topology, parse_topology
from tools.formula import bounds, candidates, estimate
from training.summary import duration

MOST = 1_000_000  # of a flag: far beyond any use, it catches mistakes

log = logging.getLogger('allyouneed.plan')


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training planned for some devices.

    Attributes:
      config: its options.
      topology: the devices.
      mesh: the sizes of its axes.
      tokens: target positions of a step, padding included.
      held: bytes of parameters and of the optimizer's state on each device.
      train: the figures of the train step.
      decode: those of a step of the search; None where it was not compiled.
      by: 'compiled' or 'formula'.
    """
    config: ConfigDict
    topology: Topology
    mesh: dict[str, int]
    tokens: int
    held: dict[str, float]
    train: Figures
    decode: Figures | None = None
    by: str = 'compiled'

    @property
    def fits(self) -> bool:
        """Whether the devices have the memory."""
        return self.train.peak <= self.topology.chip.memory

    def to_dict(self) -> dict:
        """The plan as JSON."""
        config, best = self.config, bounds(self.train, self.topology, self.mesh)
        total = config.train.steps * best.seconds
        found = {
            'topology': str(self.topology), 'devices': self.topology.devices, 'mesh': self.mesh, 'by': self.by,
            'remat': config.model.remat, 'remat_keep': config.model.remat_keep,
            'accumulate': config.train.accumulate, 'tokens_per_step': self.tokens,
            'memory': {**self.held, 'arguments': self.train.arguments, 'temporaries': self.train.temporaries,
                       'peak': self.train.peak, 'there': self.topology.chip.memory},
            'train': dataclasses.asdict(self.train),
            'bytes_per_token': self.train.traffic * self.topology.devices / self.tokens,
            'seconds': {**dataclasses.asdict(best), 'best': best.seconds}, 'limit': best.limit,
            'share_of_peak': best.share, 'tokens_per_second': self.tokens / best.seconds,
            'days': total / 86_400, 'chip_hours': total / 3600 * self.topology.devices}
        if self.decode:
            step = bounds(self.decode, self.topology, self.mesh)
            found['decode'] = {**dataclasses.asdict(self.decode), 'seconds': step.seconds, 'limit': step.limit}
        return found


def main() -> None:
    """Prints the plan that the flags ask for."""
    config = config_from(CONFIG_FLAG)
    topology = asked_topology()
    if SEARCH.value:
        plan = search(config, topology)
    elif FORMULA.value or not topology.chip.libtpu:
        plan = by_formula(config, topology)
    else:
        plan = compiled(config, topology, Path(KEEP.value) if KEEP.value else None)
    if not plan.fits:
        raise too_large(plan, TooLarge('by formula', plan.train.peak, topology.chip.memory))
    print(json.dumps(plan.to_dict(), indent=2) if JSON.value else described(plan))


def asked_topology() -> Topology:
    """The devices that the flags name.

    Raises:
      UserError: if they are none, or another flag does not go with them.
    """
    if not TOPOLOGY.value:
        raise UserError('--topology is missing: give the devices, for example --topology=v5e:4x4')
    for flag, least in (SLICES, 1), (LENGTH, 1), (COMPILE, 0):
        if flag.value is not None and not least <= flag.value <= MOST:
            raise UserError(f'--{flag.name}={flag.value}: must be from {least} to {MOST:,}')
    topology = parse_topology(TOPOLOGY.value, SLICES.value)
    if KEEP.value and (SEARCH.value or FORMULA.value or not topology.chip.libtpu):
        raise UserError(f'--keep={KEEP.value}: a plan by formula, or a search, has no program to keep')
    return topology


def by_formula(config: ConfigDict, topology: Topology, recipe: Recipe | None = None) -> Plan:
    """The plan without compiling anything."""
    mesh = sizes_of_mesh(config, topology)
    recipe = recipe or Recipe(config, LENGTH.value, mesh['data'] * mesh['fsdp'])
    figures = estimate(recipe, mesh)
    return Plan(config, topology, mesh, recipe.tokens, {}, figures, by='formula')


def sizes_of_mesh(config: ConfigDict, topology: Topology) -> dict[str, int]:
    """The sizes of config.parallel, -1 filled in."""
    sizes = {axis: config.parallel[axis] for axis in AXES}
    known = 1
    for size in sizes.values():
        known *= size if size != -1 else 1
    sizes = {axis: topology.devices // known if size == -1 else size for axis, size in sizes.items()}
    if sizes['data'] * sizes['fsdp'] * sizes['tensor'] != topology.devices:
        asked = ', '.join(f'{axis}={config.parallel[axis]}' for axis in AXES)
        raise UserError(f'config.parallel: {asked} do not multiply to the {topology.devices} devices of {topology}: '
                        '-1 fills up what the others leave')
    return sizes


def compiled(config: ConfigDict, topology: Topology, path: Path | None = None) -> Plan:
    """The plan from the compiled programs.

    Raises:
      UserError: if the mesh does not fit the devices, or a device has not the memory; then with what would do.
    """
    mesh = sizes_of_mesh(config, topology)
    recipe = Recipe(config, LENGTH.value, mesh['data'] * mesh['fsdp'])
    ahead = Ahead(recipe, config.parallel, devices_of(topology))
    log.info('compiling the train step for %s as %s; this takes minutes', topology, axes_text(mesh))
    began = time.perf_counter()
    try:
        figures = ahead.figures(ahead.train)
    except TooLarge as error:
        raise too_large(by_formula(config, topology, recipe), error) from None
    log.info('compiled in %s', duration(time.perf_counter() - began))
    if path:
        keep(ahead.train, path)
        log.info('%s: the train step, %.1f MB; tools.ahead.load reads it on such devices', path,
                 path.stat().st_size / 2 ** 20)
    return Plan(config, topology, mesh, recipe.tokens, ahead.held(), figures,
                ahead.figures(ahead.decode) if DECODE.value else None)


def too_large(plan: Plan, error: TooLarge) -> UserError:
    """What to tell who plans what does not fit: what would."""
    needed, there = error.needed or plan.train.peak, error.there or plan.topology.chip.memory
    for other in ranked(plan.config, plan.topology):
        if other.fits and same_batch(plan.config, other.config):
            return UserError(f'{plan.topology}: a device has {gigabytes(there)}, but the step needs about '
                             f'{gigabytes(needed)}. By formula this would fit: {as_flags(other)}')
    return UserError(f'{plan.topology}: a device has {gigabytes(there)}, but the step needs about {gigabytes(needed)}, '
                     'and by formula no mesh, remat or parts of a batch would fit: take more or larger chips, or lower '
                     'config.model.d_model, num_layers or the batch')


def ranked(config: ConfigDict, topology: Topology) -> list[Plan]:
    """All candidates by formula: those that fit first, then by tokens a second."""
    recipes, plans = {}, []
    for candidate in candidates(topology, config):
        recipe_of = (candidate.model.remat, candidate.model.remat_keep, candidate.batch.tokens, candidate.batch.rows)
        if recipe_of not in recipes:
            recipes[recipe_of] = Recipe(candidate, LENGTH.value)
        recipe = recipes[recipe_of]
        mesh = sizes_of_mesh(candidate, topology)
        rows = len(recipe.batch['targets'])
        if rows % (mesh['data'] * mesh['fsdp'] * candidate.train.accumulate):
            continue  # padding rows would be computed
        parts = recipe.for_parts(candidate)
        plans.append(Plan(candidate, topology, mesh, recipe.tokens, {}, estimate(parts, mesh), by='formula'))
    return sorted(plans, key=lambda plan: (not plan.fits, *seconds_a_token(plan)))


def seconds_a_token(plan: Plan) -> tuple[float, float]:
    """The least seconds that a target position takes, to three digits; and if nothing overlaps."""
    found = bounds(plan.train, plan.topology, plan.mesh)
    return float(f'{found.seconds / plan.tokens:.3g}'), (found.arithmetic + found.memory + found.links) / plan.tokens


def search(config: ConfigDict, topology: Topology) -> Plan:
    """The best plan that fits; the best by formula are compiled, one after the other.

    Raises:
      UserError: if nothing fits.
    """
    plans = ranked(config, topology)
    if not plans:
        recipe = Recipe(config, LENGTH.value)
        raise UserError(f'{topology}: a batch has {recipe.rows} rows, which no mesh of the search divides into equal '
                        f'shares. Use a batch of {topology.devices} rows, for example, or fewer devices')
    if not plans[0].fits:
        raise too_large(min(plans, key=lambda plan: plan.train.peak), TooLarge('nothing fits'))
    fitting = [plan for plan in plans if plan.fits]
    log.info('%d of %d candidates fit by formula; the best:', len(fitting), len(plans))
    for plan in fitting[:10]:
        best = bounds(plan.train, topology, plan.mesh)
        log.info('  %s tokens/s, %.0f %% of peak (%s): %s', f'{plan.tokens / best.seconds:,.0f}', 100 * best.share,
                 best.limit, as_flags(plan))
    if not COMPILE.value or not topology.chip.libtpu:
        return fitting[0]
    done = []
    for plan in fitting:
        try:
            done.append(compiled(plan.config, topology))
        except UserError as error:
            log.info('does not fit after all: %s', error)
        if len(done) == COMPILE.value:
            break
    if not done:
        raise too_large(fitting[0], TooLarge('nothing fits'))
    return min(done, key=seconds_a_token)


def same_batch(one: ConfigDict, other: ConfigDict) -> bool:
    """Whether two trainings have batches of one size."""
    return (one.batch.tokens, one.batch.rows) == (other.batch.tokens, other.batch.rows)


def as_flags(plan: Plan) -> str:
    """The options of a plan that a search chose, as flags."""
    config = plan.config
    batch = 'rows' if config.model.kind == 'language_model' else 'tokens'
    flags_ = {**{f'parallel.{axis}': size for axis, size in plan.mesh.items()}, 'model.remat': config.model.remat,
              **({'model.remat_keep': config.model.remat_keep} if config.model.remat else {}),
              'train.accumulate': config.train.accumulate, f'batch.{batch}': config.batch[batch]}
    return ' '.join(f'--config.{name}={value}' for name, value in flags_.items())


def described(plan: Plan) -> str:
    """The plan as text."""
    config, train, topology = plan.config, plan.train, plan.topology
    best, found = bounds(train, topology, plan.mesh), plan.to_dict()
    recipe = Recipe(config, LENGTH.value)
    rows, length = recipe.rows, recipe.batch['targets'].shape[1]
    lines = [
        f'{topology.devices} chips {topology}, mesh {axes_text(plan.mesh)}, '
        + ('by formula, compiled nothing' if plan.by == 'formula' else 'compiled'),
        f'assumed: every batch is {rows} x {length} tokens, full; a vocabulary of {config.data.tokenizer.vocab_size:,}',
        'memory a device: ' + ', '.join(f'{name} {gigabytes(value)}' for name, value in found['memory'].items()),
        f'arithmetic a device and step: {train.flops:.3g} operations of matrix products',
        f'traffic a device and step: {train.traffic:.3g} bytes, {found["bytes_per_token"]:,.0f} a token'
        + (f' (of all operands, those too that stay in the cores: {train.operands:.3g})' if train.operands else ''),
        *(f'link: {each.kind} along {each.axes}, {each.times} times, {each.bytes:.3g} bytes a step'
          for each in train.collectives),
        f'bounds of a step: arithmetic {1e3 * best.arithmetic:.2f} ms, memory {1e3 * best.memory:.2f} ms, links '
        f'{1e3 * best.links:.2f} ms; side by side {1e3 * best.seconds:.2f} ms, bound by {best.limit}',
        f'at best: {100 * best.share:.0f} % of peak, {found["tokens_per_second"]:,.0f} target positions a second; '
        f'{config.train.steps:,} steps in {duration(config.train.steps * best.seconds)}, '
        f'{found["chip_hours"]:,.0f} chip-hours']
    if plan.decode:
        step = bounds(plan.decode, topology, plan.mesh)
        lines.append(f'a step of beam search, {config.decode.batch_size} x {config.decode.beam}: '
                     f'{plan.decode.traffic:.3g} bytes, {gigabytes(plan.decode.peak)}; at best '
                     f'{1e3 * step.seconds:.3f} ms, bound by {step.limit}')
    if SEARCH.value:
        lines.append(f'best: {as_flags(plan)}')
    return '\n'.join(lines)


def axes_text(mesh: dict[str, int]) -> str:
    """'data=4, fsdp=2, tensor=2'."""
    return ', '.join(f'{axis}={size}' for axis, size in mesh.items())


def gigabytes(size: float) -> str:
    """'1.25 GB', of 2^30 bytes."""
    return f'{size / 2 ** 30:.2f} GB'


if __name__ == '__main__':
    run_script(main)
