"""Warnings about a specification: settings that are valid but probably not what the author wants. Pure.

Nothing here refuses a job (``config`` does that). Each warning is a ``Problem`` with the field, its value, what will happen
and what to change. A rule that needs a fact which the specification and the given lines do not contain gives no warning:
the speed of a line that is neither measured nor capped, or the size of a model that only the user's package knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from orchestrator.errors import Problem
from orchestrator.simulation.line_advice import (
    UTILISATION_MIN,
    Demand,
    Line,
    SyncSettings,
    advised,
    bits_of,
    meeting,
    travel_steps_max,
    utilisation_on,
)
from orchestrator.specification.bounds import SECTION_BYTES
from orchestrator.specification.config import JobSpec
from orchestrator.specification.memory_budget import parameter_count_of, router_parameter_count_of

ROUNDS_MIN = 4
"""With fewer merges of each fragment, islands hardly learn from each other."""
WARMUP_RATIO_MAX = 0.5
"""A warm-up longer than this part of the budget leaves the schedule no time."""
WARMUP_RATIO, ROUNDS = 0.1, 10
"""What the remedies suggest: a warm-up of a tenth of the budget, and ten merges of each fragment."""
TRAVEL_STEPS_MIN = 0.1
"""In steps, each way. Windows that leave a fragment less time to travel only suit islands on one machine."""
WIDE_OVERLAP_STEPS, WIDE_CAP_STEPS = 4, 3
"""Windows with which all islands contribute to a merge even if a publication travels for a step (docs/results.md)."""
ADAM_LR_MAX = 0.1
"""Beyond this an outer step of Adam is longer than the weights of a new model."""
HEAVY_MOMENTUM, HEAVY_LR, ROUNDS_MEASURED = 0.9, 0.4, 256
"""An outer rate of 0.7 with momentum 0.9 was far behind in all measured runs, of 4 to 256 rounds (docs/results.md)."""
FLOPS_PER_PARAMETER_AND_TOKEN = 6
CPU_FLOPS, ACCELERATOR_FLOPS = 1e10, 5e13
"""Per second, for one processor and one accelerator: about a tenth of the usual speed. Steps are therefore estimated too
long rather than too short, so no line is called too slow that is fast enough."""


def advice(spec: JobSpec, lines: Sequence[Line] = ()) -> tuple[Problem, ...]:
    """Return all warnings, in the order of the specification's sections.

    ``lines`` are the measured lines to node groups. ``transport.bytes_per_s`` counts as a line to every node group.
    """
    return (
        *_epochs(spec),
        *_warmup(spec),
        *_interval(spec),
        *_windows(spec),
        *_outer(spec),
        *_lines(spec, lines),
        *_saving(spec),
    )


def _epochs(spec: JobSpec) -> Iterator[Problem]:
    """Warn if an island reads so much of a source that it cannot count it on the fly (``learners.streaming.order``)."""
    large = [
        (source.name, stored_bytes / spec.island_count)
        for source, stored_bytes in zip(spec.data.sources, spec.data.stored_bytes, strict=False)
        if stored_bytes > SECTION_BYTES * spec.island_count
    ]
    if spec.data.index is not None or not large:
        return
    name, part_bytes = max(large, key=lambda pair: pair[1])
    message = f"is not set, and each island reads {part_bytes / 2**30:.1f} GiB of source {name!r}. Above "
    message += (
        f"{SECTION_BYTES >> 30} GiB the length of an epoch is estimated, so an epoch may repeat or omit sequences."
    )
    yield Problem("data.index", message, "Create an index with `atoll data index`.")


def _warmup(spec: JobSpec) -> Iterator[Problem]:
    optimizer, steps = spec.training.inner_optimizer, spec.horizon_steps
    warmup, field = optimizer.warmup_steps, "training.inner_optimizer"
    if not spec.trainer.reads_text or not warmup:
        return
    if warmup > WARMUP_RATIO_MAX * steps:
        highest = optimizer.lr * min(1.0, steps / warmup)
        if warmup >= steps:
            effect = f"the learning rate never reaches lr {optimizer.lr:g}, only {highest:.2g}."
        else:
            effect = f"the learning rate still rises for {warmup / steps:.0%} of the job."
        message = f"is {warmup:,}, and {_budget(spec)}: {effect}"
        remedy = f"Set it to {round(WARMUP_RATIO * steps):,}, or raise the budget."
        yield Problem(f"{field}.warmup_steps", message, remedy)
    elif optimizer.schedule == "wsd" and warmup > (1.0 - optimizer.decay_ratio) * steps:
        message = f"is {optimizer.decay_ratio:g} with warmup_steps {warmup:,}, and {_budget(spec)}: "
        message += "the learning rate begins to fall before the warm-up ends."
        yield Problem(f"{field}.decay_ratio", message, "Lower decay_ratio or warmup_steps.")


def _interval(spec: JobSpec) -> Iterator[Problem]:
    """Warn if H leaves so few merges within the budget that islands hardly learn from each other."""
    rounds, steps, sync = _rounds(spec), spec.horizon_steps, spec.synchroniser
    if spec.island_count == 1 or rounds >= ROUNDS_MIN:
        return
    message = f"is {sync.interval_steps:,}, and {_budget(spec)}: {_merged(rounds)} before the job ends."
    shorter = max(sync.overlap_steps + 1, steps // ROUNDS)
    remedy = f"Set it to {shorter:,}, or raise the budget." if steps // shorter >= ROUNDS_MIN else "Raise the budget."
    yield Problem("synchroniser.interval_steps", message, remedy)


def _windows(spec: JobSpec) -> Iterator[Problem]:
    """Warn about windows in which merges wait for no other island, or only for islands whose fragments travel in no time.

    Source: docs/decisions/0163-a-short-grace-window-excludes-islands-on-slow-lines.md.
    """
    sync = spec.synchroniser
    cap, overlap = sync.grace_cap_steps, sync.overlap_steps
    if cap is None or spec.quorum >= spec.island_count:
        return
    floor = sync.grace_floor_steps_of(spec.island_count)
    of_slack = (("overlap_steps", overlap), ("grace_margin", sync.grace_margin)) if floor == 0 else ()
    for name, value in (*of_slack, ("grace_cap_steps", cap)):
        if value == 0:
            message = (
                f"is 0 with quorum {spec.quorum} of {spec.island_count} islands: no merge waits for the other islands."
            )
            yield Problem(f"synchroniser.{name}", message, "Raise it, or raise the quorum.")
            return
    window = min(cap, max(sync.grace_margin * overlap, floor))
    travel_steps = travel_steps_max(window, overlap)
    if travel_steps >= TRAVEL_STEPS_MIN or len({section.node_group for section in spec.islands}) == 1:
        return
    effect = f"an island misses most merges if its fragments travel for more than {max(0.0, travel_steps):.2g} of a "
    effect += "step each way."
    if travel_steps_max(cap, overlap) >= TRAVEL_STEPS_MIN:
        message = (
            f"is {sync.grace_margin:g} with overlap_steps {overlap}, a window of {window:.2g} steps at most: {effect}"
        )
        yield Problem("synchroniser.grace_margin", message, "Leave it out, or raise it.")
        return
    message = f"is {cap:g} with overlap_steps {overlap}: {effect}"
    remedy = f"Set overlap_steps {WIDE_OVERLAP_STEPS} and grace_cap_steps {WIDE_CAP_STEPS}"
    if sync.interval_steps <= WIDE_OVERLAP_STEPS:
        remedy += f", and interval_steps above {WIDE_OVERLAP_STEPS}"
    remedy += ". `atoll doctor --lines --config FILE` measures the travel time."
    yield Problem("synchroniser.grace_cap_steps", message, remedy)


def _outer(spec: JobSpec) -> Iterator[Problem]:
    outer, rounds = spec.synchroniser.outer_optimizer, _rounds(spec)
    if outer.warmup_merges > rounds:
        message = f"is {outer.warmup_merges:,}, and {_merged(rounds)}: the outer rate never reaches lr {outer.lr:g}."
        remedy = f"Set it to {rounds // ROUNDS:,}, or raise the budget."
        yield Problem("synchroniser.outer_optimizer.warmup_merges", message, remedy)
    if outer.kind == "adam" and outer.lr > ADAM_LR_MAX:
        message = f"is {outer.lr:g} with kind adam, which moves each parameter by up to {outer.lr:g} at every merge."
        remedy = "Leave it out, or set it to about what a parameter moves in interval_steps, such as 0.005."
        yield Problem("synchroniser.outer_optimizer.lr", message, remedy)
    is_heavy = outer.kind == "nesterov" and outer.momentum >= HEAVY_MOMENTUM and outer.lr >= HEAVY_LR
    if is_heavy and spec.island_count > 1 and rounds <= ROUNDS_MEASURED and spec.trainer.reads_text:
        message = (
            f"is {outer.momentum:g} with lr {outer.lr:g}, and {_merged(rounds)}. With this much momentum, jobs of up "
        )
        message += f"to {ROUNDS_MEASURED} rounds made no progress or diverged."
        remedy = "Leave out both settings, or set momentum 0.3 and lr 0.5."
        yield Problem("synchroniser.outer_optimizer.momentum", message, remedy)


def _saving(spec: JobSpec) -> Iterator[Problem]:
    """Warn if the first checkpoint would be due after the end of the job."""
    checkpoints, schedule = spec.checkpoints, spec.synchroniser.schedule
    own = schedule.router_interval_steps
    merges = _rounds(spec) * schedule.shared_count + (spec.horizon_steps // own if own else 0)
    due: list[tuple[str, float, float, str]] = [("every_merges", checkpoints.every_merges, merges, "merges")]
    if spec.trainer.is_synthetic:
        due.append(("every_s", checkpoints.every_s, spec.horizon_steps * spec.synthetic.step_s, "s of steps"))
    for name, every, most, unit in due:
        if every > most:
            message = f"is {every:,g}, but the budget is only {most:,g} {unit}: no checkpoint is taken automatically."
            remedy = f"Set it to {max(1, int(most // ROUNDS)):,}, or raise the budget."
            yield Problem(f"checkpoints.{name}", message, remedy)


def _lines(spec: JobSpec, measured: Sequence[Line]) -> Iterator[Problem]:
    """Warn about the worst line that is too slow for the codec or takes too long for the windows."""
    cap = spec.transport.bytes_per_s
    parameters = None if cap is None and not measured else parameter_count_of(spec)
    if parameters is None:
        return
    groups = Counter[str]()
    for section in spec.islands:
        groups[section.node_group] += section.count
    step_s = _step_s(spec, parameters)
    of_lines = [(line, Demand(parameters, step_s, groups), f"the line to {line.name}") for line in measured]
    if cap is not None:  # a limit for each island's connection, whatever the others send
        of_lines.append((Line("", 0.0, 8.0 * cap), Demand(parameters, step_s, {}), "transport.bytes_per_s"))
    settings = SyncSettings.of(spec.synchroniser, router_parameter_count_of(spec))
    problems = [
        (utilisation_on(line, demand, settings), problem)
        for line, demand, where in of_lines
        if line.name in ("", *groups)
        for problem in (*_thin(line, demand, settings, where), *_slow(spec, line, demand, settings, where))
    ]
    if problems:
        yield min(problems, key=lambda pair: pair[0])[1]


def _thin(line: Line, demand: Demand, settings: SyncSettings, where: str) -> Iterator[Problem]:
    if utilisation_on(line, demand, settings) >= UTILISATION_MIN:
        return
    bits = settings.fragment_parameters(demand.parameters) * bits_of(settings.codec)
    due_steps = settings.interval_steps / settings.schedule.shared_count
    takes_s = bits / line.bits_per_second * max(1, demand.islands.get(line.name, 1))
    better = advised([line], demand, settings)
    message = (
        f"is {settings.codec}: over {where} a fragment of {bits / 8e6:,.3g} MB takes {takes_s:.3g} s, and one is due "
    )
    message += (
        f"every {due_steps:.3g} steps, at most {demand.step_s * due_steps:.3g} s. Fragments arrive late, and the "
    )
    message += "islands drift apart."
    if changes := ", ".join(f"{name} {value}" for name, value in better.changes(settings).items()):
        yield Problem("synchroniser.wire", message, f"Set {changes}, or use a faster line.")
    else:
        needed = f"{better.needed_bits_per_second / 1e6:,.3g} Mbit/s"
        yield Problem("synchroniser.wire", message, f"Use a smaller model, or a line of {needed}.")


def _slow(spec: JobSpec, line: Line, demand: Demand, settings: SyncSettings, where: str) -> Iterator[Problem]:
    sync, meets = spec.synchroniser, meeting(line, demand, settings)
    cap = sync.grace_cap_steps
    if meets is None or cap is None or spec.quorum >= spec.island_count or meets.way_steps < TRAVEL_STEPS_MIN:
        return
    if meets.grace_cap_steps > cap or meets.overlap_steps > sync.overlap_steps:
        message = f"is {cap:g} with overlap_steps {sync.overlap_steps}: over {where} a fragment travels for "
        message += f"{meets.way_steps:.2g} of a step each way, so islands miss merges."
        remedy = f"Set at least grace_cap_steps {meets.grace_cap_steps} and overlap_steps {meets.overlap_steps}."
        yield Problem("synchroniser.grace_cap_steps", message, remedy)


def _step_s(spec: JobSpec, parameters: int) -> float:
    """Return an upper estimate of the inner step time of the slowest island."""
    if spec.trainer.is_synthetic:
        return spec.synthetic.step_s
    seconds = []
    for section in spec.islands:
        tokens = spec.batch_size_of(section) * spec.data.sequence_length
        rate = section.accelerators * ACCELERATOR_FLOPS or max(1.0, section.cpus) * CPU_FLOPS
        seconds.append(FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens / (rate * section.hosts))
    return max(seconds)


def _rounds(spec: JobSpec) -> int:
    """Return how often each fragment is merged within the budget."""
    return spec.horizon_steps // spec.synchroniser.interval_steps


def _budget(spec: JobSpec) -> str:
    return f"the budget is {spec.horizon_steps:,} steps per island"


def _merged(rounds: int) -> str:
    """Return a clause that says how often each fragment is merged."""
    if rounds == 0:
        return "no fragment is merged"
    return f"each fragment is merged {'once' if rounds == 1 else f'{rounds:,} times'}"
