"""Plans a training run for given devices: by formula, from compiled programs, or by a search for the best options."""

import dataclasses
import logging
import os
import time
from pathlib import Path

from ml_collections import ConfigDict

from tools.ahead import Ahead, Figures, Recipe, TooLarge, assumed_sizes, devices_of, keep, vocabulary_size
from tools.chips import GPU_SHARE, Bounds, Topology, gpu_share
from tools.formula import KINDS, bounds, candidates, estimate
from training.mesh import mesh_sizes
from training.precision import planned_precision
from training.summary import duration

log = logging.getLogger('allyouneed.plan')


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cost of a training run on given devices.

    Attributes:
      config: the options of the run.
      topology: the devices.
      mesh: {axis: size} of the mesh.
      shape: (rows, length) of a batch, without padding rows.
      held: the sizes of the parameters and of the optimizer state on each device, in bytes.
      train: the cost of the train step.
      decode: the cost of a search step; None if the search step was not compiled.
      by: how the costs were found, 'compiled' or 'formula'.
    """
    config: ConfigDict
    topology: Topology
    mesh: dict[str, int]
    shape: tuple[int, int]
    held: dict[str, float]
    train: Figures
    decode: Figures | None = None
    by: str = 'compiled'

    @property
    def tokens(self) -> int:
        """The number of target positions of a train step."""
        return self.shape[0] * self.shape[1]

    @property
    def fits(self) -> bool:
        """Whether the programs of the plan fit into the memory of a device."""
        return self.train.peak <= self.topology.chip.available

    @property
    def bounds(self) -> Bounds:
        """The lower bounds of the time of a train step."""
        return bounds(self.train, self.topology, self.mesh, self.rate)

    @property
    def rate(self) -> float:
        """The peak rate of the matrix products of a train step, in operations per second."""
        return self.topology.chip.rate(self.config.model.dtype, planned_precision(self.config))

    @property
    def decode_rate(self) -> float:
        """The peak rate of the matrix products of a search step. train.matmul_precision does not apply to decoding."""
        return self.topology.chip.rate(self.config.model.dtype, 'default')

    def to_dict(self) -> dict:
        """Returns the plan as a dict for JSON."""
        config, best = self.config, self.bounds
        total = config.train.steps * best.seconds
        result = {
            'topology': str(self.topology), 'devices': self.topology.devices, 'mesh': self.mesh, 'by': self.by,
            'remat': config.model.remat, 'remat_keep': config.model.remat_keep,
            'accumulate': config.train.accumulate, 'tokens_per_step': self.tokens,
            'memory': {**self.held, 'arguments': self.train.arguments, 'temporaries': self.train.temporaries,
                       'peak': self.train.peak, 'available': self.topology.chip.available},
            'train': dataclasses.asdict(self.train),
            'bytes_per_token': self.train.traffic * self.topology.devices / self.tokens,
            'seconds': {**dataclasses.asdict(best), 'best': best.seconds}, 'limit': best.limit,
            'peak_rate': self.rate, 'share_of_peak': best.share, 'tokens_per_second': self.tokens / best.seconds,
            'days': total / 86_400, 'chip_hours': total / 3600 * self.topology.devices}
        if self.decode:
            step = bounds(self.decode, self.topology, self.mesh, self.decode_rate)
            result['decode'] = {**dataclasses.asdict(self.decode), 'seconds': step.seconds, 'limit': step.limit}
        return result


def by_formula(config: ConfigDict, topology: Topology, length: int | None = None) -> Plan:
    """Returns a plan with costs by formula, without compiling. `length` is the number of tokens of each sentence."""
    mesh = sizes_of_mesh(config, topology)
    return estimated(Recipe(config, length, mesh['data'] * mesh['fsdp']), topology, mesh)


def estimated(recipe: Recipe, topology: Topology, mesh: dict[str, int]) -> Plan:
    """Returns the plan of a recipe, with costs by formula."""
    return Plan(recipe.config, topology, mesh, _shape(recipe), {}, estimate(recipe, mesh), by='formula')


def _shape(recipe: Recipe) -> tuple[int, int]:
    return recipe.rows, recipe.batch['targets'].shape[1]


def sizes_of_mesh(config: ConfigDict, topology: Topology) -> dict[str, int]:
    """Returns the sizes of config.parallel, with -1 replaced by the remaining number of devices.

    Raises:
      UserError: if the product of the sizes is not the number of devices.
    """
    return mesh_sizes(config.parallel, topology.devices, f'{topology} has {topology.devices} devices')


def compiled(config: ConfigDict, topology: Topology, length: int | None = None, path: Path | None = None, *,
             decode: bool = True) -> Plan:
    """Compiles the programs of a training for a topology, and returns the plan with the costs of these programs.

    Args:
      config: the recipe.
      topology: the devices.
      length: the number of tokens of each sentence. A plan does not read the data.
      path: a file to which the compiled train step is written.
      decode: whether to compile a step of beam search as well.

    Raises:
      TooLarge: if a device has too little memory.
      UserError: if the mesh does not fit the devices, or libtpu is missing.
    """
    mesh = sizes_of_mesh(config, topology)
    recipe = Recipe(config, length, mesh['data'] * mesh['fsdp'])
    ahead = Ahead(recipe, config.parallel, devices_of(topology))
    log.info('compiling the train step for %s as %s; this takes minutes', topology, axes_text(mesh))
    began = time.perf_counter()
    try:
        figures = ahead.figures(ahead.train)
    except TooLarge as error:
        raise too_large(config, topology, length, error.needed, error.available) from None
    log.info('compiled in %s', duration(time.perf_counter() - began))
    if path:
        keep(ahead.train, path)
        log.info('%s: wrote the compiled train step, %.1f MiB. tools.ahead.load loads the file on devices of this '
                 'topology', path, path.stat().st_size / 2 ** 20)
    try:
        search_step = ahead.figures(ahead.decode) if decode else None
    except TooLarge as error:
        raise TooLarge(f'{_too_little(topology, "a step of beam search", error.needed, error.available)}. Use '
                       f'--nodecode, or reduce config.decode.batch_size={config.decode.batch_size} or '
                       f'config.decode.beam={config.decode.beam}', error.needed, error.available) from None
    return Plan(config, topology, mesh, _shape(recipe), ahead.held(), figures, search_step)


def too_large(config: ConfigDict, topology: Topology, length: int | None, needed: float | None,
              available: float | None = None) -> TooLarge:
    """Returns the error for a recipe that needs too much memory. The message suggests options that need less memory.

    The suggested options have the same batch as the recipe. Their memory is computed by the formula and not compiled.
    If the recipe needs more memory than the formula predicts, the other options are assumed to need more memory by the
    same factor.

    Args:
      config: the recipe that does not fit.
      topology: the devices.
      length: the number of tokens of each sentence.
      needed: bytes of memory that a step needs; None if the compiler did not report this number.
      available: bytes of a device's memory, if the compiler reported this number.
    """
    problem = _too_little(topology, 'the step', needed, available)
    if config.model.kind not in KINDS:
        return TooLarge(f'{problem}. Use more or larger chips, or reduce the model or the batch', needed, available)
    limit = by_formula(config, topology, length).train.peak  # the recipe itself does not fit
    if needed:
        limit *= (available or topology.chip.available) / needed
    for candidate in ranked(config, topology, length):
        if candidate.fits and candidate.train.peak < limit and candidate.config.batch == config.batch:
            return TooLarge(f'{problem}. By formula, these options would fit: {as_flags(candidate)}', needed, available)
    return TooLarge(f'{problem}. By formula, no mesh, remat or train.accumulate would fit. Use more or larger chips, '
                    'or reduce config.model.d_model, config.model.num_layers or the batch', needed, available)


def _too_little(topology: Topology, step: str, needed: float | None, available: float | None) -> str:
    """Returns a message that a device has too little memory for `step`. `too_large` explains the arguments."""
    share = '' if topology.chip.axes else (f' for JAX, {gpu_share(os.environ):.0%} of its memory (set {GPU_SHARE[0]} '
                                           'to change the share)')
    return (f'{topology}: a device has {gibibytes(available or topology.chip.available)}{share}, but {step} needs '
            + (f'about {gibibytes(needed)}' if needed else 'more'))


def ranked(config: ConfigDict, topology: Topology, length: int | None = None) -> list[Plan]:
    """Returns a plan for every candidate of a search, with costs by formula.

    Plans that fit into memory come before plans that do not fit. In both groups, faster plans come first. If the
    devices do not divide the rows, a plan includes the cost of padding rows, but not their tokens.
    """
    recipes, plans = {}, []
    for candidate in candidates(topology, config):
        key = (candidate.model.remat, candidate.model.remat_keep, candidate.batch.tokens, candidate.batch.rows)
        if key not in recipes:
            recipes[key] = Recipe(candidate, length)
        mesh = sizes_of_mesh(candidate, topology)
        plans.append(estimated(recipes[key].for_parts(candidate, mesh['data'] * mesh['fsdp']), topology, mesh))
    return sorted(plans, key=lambda plan: (not plan.fits, *seconds_per_token(plan)))


def seconds_per_token(plan: Plan) -> tuple[float, float]:
    """Returns two estimates of the seconds per target position. A search ranks plans by these estimates.

    The first estimate is a lower bound, rounded to three digits. It assumes that arithmetic, memory traffic and links
    overlap completely. The second estimate assumes no overlap.
    """
    best = plan.bounds
    return float(f'{best.seconds / plan.tokens:.3g}'), (best.arithmetic + best.memory + best.links) / plan.tokens


def search(config: ConfigDict, topology: Topology, length: int | None = None, count: int = 1, *,
           decode: bool = True) -> Plan:
    """Searches for the best options, and returns the best plan that fits into the memory of a device.

    Compiles the best `count` candidates. If `count` is 0, only the formula is used.

    Raises:
      TooLarge: if no plan fits.
      UserError: if the formula does not support the model, or libtpu is missing and `count` is not 0.
    """
    if count:
        devices_of(topology)  # if libtpu is missing, the error comes before the long search
    plans = ranked(config, topology, length)
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        smallest = min(plans, key=lambda plan: plan.train.peak)
        raise too_large(smallest.config, topology, length, smallest.train.peak)
    log.info('%d of %d candidates fit according to the formula. The best:', len(fitting), len(plans))
    for plan in fitting[:10]:
        best = plan.bounds
        log.info('  %s tokens/s, %.0f %% of peak (%s): %s', f'{plan.tokens / best.seconds:,.0f}', 100 * best.share,
                 best.limit, as_flags(plan))
    if not count:
        return fitting[0]
    finished = []
    for plan in fitting:
        try:
            finished.append(compiled(plan.config, topology, length, decode=decode))
        except TooLarge as error:
            log.info('the compiled program of this candidate does not fit into the memory: %s', error)
        if len(finished) == count:
            break
    if not finished:
        raise TooLarge(f'{topology}: all {len(fitting)} candidates that fit according to the formula were compiled, '
                       'and none fits. The log has the reason for each candidate. Use more or larger chips, or reduce '
                       'config.model.d_model, config.model.num_layers or the batch'
                       + ('. If only the step of beam search is too large, use --nodecode' if decode else ''))
    return min(finished, key=seconds_per_token)


def as_flags(plan: Plan) -> str:
    """Returns the options that a search chooses, with the values of `plan`, as flags: '--config.model.remat=True'.

    All these options are included, because the recipe may set any of them to another value.
    """
    config = plan.config
    batch = 'rows' if config.model.kind == 'language_model' else 'tokens'
    options = {'parallel.mode': config.parallel.mode, **{f'parallel.{axis}': size for axis, size in plan.mesh.items()},
               'model.remat': config.model.remat, 'model.remat_keep': config.model.remat_keep,
               'train.accumulate': config.train.accumulate, f'batch.{batch}': config.batch[batch]}
    return ' '.join(f'--config.{name}={value}' for name, value in options.items())


def described(plan: Plan) -> str:
    """Returns a plan as text for the terminal."""
    config, train, topology, best, figures = plan.config, plan.train, plan.topology, plan.bounds, plan.to_dict()
    rows, length = plan.shape
    lines = [
        f'{topology.devices} chips {topology}, mesh {axes_text(plan.mesh)}, '
        + ('by formula, nothing compiled' if plan.by == 'formula' else 'compiled'),
        f'assumed: every batch is full, {rows} x {length} tokens; the vocabulary has '
        f'{vocabulary_size(assumed_sizes(config)):,} tokens',
        'memory per device: ' + ', '.join(f'{name} {gibibytes(value)}' for name, value in figures['memory'].items()),
        f'arithmetic per device and step: {train.flops:.3g} operations of matrix products, at most {plan.rate:.4g} per '
        'second',
        f'traffic per device and step: {train.traffic:.3g} bytes, {figures["bytes_per_token"]:,.0f} per token'
        + (f' (with operands that stay in the cores: {train.operands:.3g})' if train.operands else ''),
        *(f'link: {collective.kind} along {collective.axes}, {collective.times} times, {collective.bytes:.3g} bytes '
          'per step' for collective in train.collectives),
        f'lower bounds of a step: arithmetic {1e3 * best.arithmetic:.2f} ms, memory {1e3 * best.memory:.2f} ms, links '
        f'{1e3 * best.links:.2f} ms; if the three overlap, {1e3 * best.seconds:.2f} ms, limited by {best.limit}',
        f'at best: {100 * best.share:.0f} % of peak, {figures["tokens_per_second"]:,.0f} target positions per second; '
        f'{config.train.steps:,} steps in {duration(config.train.steps * best.seconds)}, '
        f'{figures["chip_hours"]:,.0f} chip-hours']
    if plan.decode:
        step = bounds(plan.decode, topology, plan.mesh, plan.decode_rate)
        lines.append(f'a step of beam search, {config.decode.batch_size} x {config.decode.beam}: '
                     f'{plan.decode.traffic:.3g} bytes, {gibibytes(plan.decode.peak)}; at best '
                     f'{1e3 * step.seconds:.3f} ms, limited by {step.limit}')
    return '\n'.join(lines)


def axes_text(mesh: dict[str, int]) -> str:
    """Returns the sizes of a mesh as text, such as 'data=4, fsdp=2, tensor=2'."""
    return ', '.join(f'{axis}={size}' for axis, size in mesh.items())


def gibibytes(size: float) -> str:
    """Returns a number of bytes as text, such as '1.25 GiB'."""
    return f'{size / 2 ** 30:.2f} GiB'
