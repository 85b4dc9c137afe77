"""Fits a world to a tape: the same speeds, faults, latencies and losses, so that another policy can be tried in it.

    fitted = fit(tape);  World(fitted.policy, fitted.plan, seed).run(fitted.until)

    copied as recorded    speeds over time, the start of each incarnation, operators' commands, crashes and silences
    drawn from samples    pulls, reports, deliveries, merges, evaluations, detection, starts that the tape does not have
    estimated             no event shows when a delivery reached its mailbox (islands adopt at their next boundary, so
                          half a step is subtracted), or when a silence began
    not fitted            reordered arrivals, which no real link causes

Where something was never observed, the plan keeps its default and ``FittedWorld.notes`` says so.

The speed of an island is read from its reports:

    reports    |--|---|--|-------------|--|---|--|        at, steps, stepping seconds
    stops                 ^^^^^^^^^^^^                    a gap between two steps that is too long to be a step
    paces      |—————————|             |—————————|        means over at least WINDOW_S and STEPS_MIN steps

A pace is a mean over several steps because the simulation looks it up by time: single steps would favour the long ones,
during which more time passes.

Source: arXiv:2604.21428, "event tapes". What-if questions as simulations in a fitted world are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import fsum, inf, sqrt

from orchestrator.accounting.island_time import FREEZE_MIN_S, FREEZE_RATIO
from orchestrator.accounting.series import median
from orchestrator.core import commands
from orchestrator.core import events as e
from orchestrator.core.messages import Progress
from orchestrator.core.vocabulary import Duration, Incarnation, Instant, IslandId, JobPolicy, NodeGroupId
from orchestrator.errors import DataError
from orchestrator.simulation.distributions import Constant, Empirical, Uniform
from orchestrator.simulation.observed import DatedProgress, Observed, ObservedIncarnation, Silence
from orchestrator.simulation.plan import Capacity, Fault, FaultKind, IncarnationStart, Latency, Pace, WorldPlan
from orchestrator.tape.schema import Header, Tape, job_steps

SAMPLES_MAX = 50
"""A latency is described by at most this many samples: evenly spaced quantiles of what was observed."""
STEP_TIMES_KEPT = 64
"""Equals the constant of ``learners.loop``, which this package may not import."""
REPORTS_MIN = 5
"""With fewer gaps between reports, the default reporting interval stands."""
WINDOW_S: Duration = 2.0
STEPS_MIN = 4
PACES_MAX = 1000
"""Per island. Windows grow with the tape, so that the world of a month is as small as that of an hour."""
BURST_S: Duration = 1.0
"""For this long after a silence, reports that were held back still arrive."""
CAPACITY_CHANGE = 0.005
"""A change of the tokens per step by at least this part is a change of capacity."""
DIGITS = 6
"""Microseconds: finer than anything that is measured, and short to write."""
DETECT_S: Duration = 0.01
"""The detection time of crashes if the tape shows none: a broken connection is noticed within this time."""
LONG_NOTICE_S: Duration = 600.0
"""The length of a notice that does not say how much time it leaves."""
STEPS_TO_ADOPT = 3
"""A version counts as lost if the island took this many steps after it should have arrived and did not adopt it."""


@dataclass(frozen=True, slots=True)
class FittedWorld:
    """A policy and a plan that repeat a tape. ``until`` is when an unfinished job's tape stops, else infinity."""

    job: str
    policy: JobPolicy
    plan: WorldPlan
    until: Instant = inf
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """A time during which an island stood still. Its precision depends on how often the island reported."""

    since: Instant
    until: Instant


@dataclass(slots=True)
class Speeds:
    """The speed of one island. ``spread`` are relative deviations from its paces, scaled to those of a single step."""

    paces: list[Pace] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    tokens: list[tuple[Instant, float]] = field(default_factory=list)
    """(Instant, tokens per step from then on)."""
    steps: int = 0
    stepping: Duration = 0.0
    pausing: Duration = 0.0
    owed: Duration = 0.0
    spread: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> Duration | None:
        return self.stepping / self.steps if self.steps else None

    @property
    def pause_s(self) -> Duration:
        return self.pausing / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class _Segment:
    """The steps between two reports."""

    since: Instant
    until: Instant
    steps: int
    stepping: Duration


def fit(tape: Tape) -> FittedWorld:
    """Return the world of this tape. Raises DataError if no island trains on it, or if it is the tape of a fleet."""
    return _Fit(job_header(tape), observe(tape)).world()


def job_header(tape: Tape) -> Header:
    """Return the header of a job's tape. Raises DataError if it is the tape of a fleet."""
    if not isinstance(tape.header, Header):
        raise DataError(
            detail=f"the tape of {tape.header.job!r} records slices of chips, not islands that train. "
            "Use the tape of a job: a live one, or one simulated at level protocol."
        )
    return tape.header


def observe(tape: Tape) -> Observed:
    seen = Observed()
    for event, effects in job_steps(tape):
        seen.apply(event, effects)
    return seen


class _Fit:
    def __init__(self, header: Header, seen: Observed) -> None:
        self._header, self._seen = header, seen
        self._islands = [plan.island for plan in header.policy.islands]
        self._notes: list[str] = []
        silent = {island: [s.span(seen.until) for s in seen.silences if s.island == island] for island in self._islands}
        self._speeds = {island: speeds_of(_reports(seen, island), silent[island]) for island in self._islands}
        step_times = [island_speeds.step_s for island_speeds in self._speeds.values() if island_speeds.step_s]
        if not step_times:
            raise DataError(
                detail=f"no island trains on the tape of {header.job!r}, so there is no world to fit. "
                "Use the tape of a job that ran for a while."
            )
        self._usual_step_s = median(step_times)
        self._report_delay_s = median(seen.report_delays) if seen.report_delays else 0.0
        self._wrong = FaultExtraction(
            seen, {island: island_speeds.stops for island, island_speeds in self._speeds.items()}, header.policy
        )

    def world(self) -> FittedWorld:
        seen, fastest, of_routers = self._seen, self._tokens_per_step(), self._seen.router_parameter_count
        defaults = WorldPlan(())
        first, again = self._starts(False), self._starts(True)
        chosen = again if any(again.values()) else first
        plan = WorldPlan(
            step_s=tuple(self._step_s(island) for island in self._islands),
            step_jitter_ratio=round(jitter(self._speeds.values()), 4),
            tokens_per_step=fastest,
            adoption="rebase" if seen.keeps_work else "replace",
            faults=self._wrong.faults(),
            place_s=self._latency("placing an island", chosen["place"], defaults.place_s),
            start_s=self._latency("starting an island", chosen["start"], defaults.start_s),
            transfer_s=self._latency("transferring a state", chosen["transfer"], defaults.transfer_s),
            letter_s=self._latency("delivering a report", seen.report_delays, defaults.letter_s),
            pull_s=self._latency("pulling a payload", seen.pulls, defaults.pull_s),
            delivery_s=self._delivery_s(defaults.delivery_s),
            merge_s=self._latency("merging", seen.merges, defaults.merge_s),
            evaluate_s=self._latency("evaluating", seen.evaluations or seen.evaluations_alone, defaults.evaluate_s),
            evaluate_alone_s=_alone(seen.evaluations_alone),
            kill_s=self._latency("killing an island", seen.kills, defaults.kill_s),
            detect_s=self._latency("detecting a death", seen.detections, Constant(DETECT_S)),
            silence_s=round(self._wrong.silence_s, DIGITS),
            report_every_s=self._report_every_s(defaults.report_every_s),
            corrupt=_ratio(seen.unusable, seen.arrived + seen.unusable),
            duplicate=_ratio(seen.repeated, seen.arrived + seen.unusable),
            catch_up_failure=_ratio(seen.catch_ups_failed, seen.catch_ups),
            publication_loss=self._wrong.publication_loss(),
            capacity=self._capacity(fastest),
            paces=tuple(tuple(self._speeds[island].paces) for island in self._islands),
            pause_s=tuple(round(self._speeds[island].pause_s, DIGITS) for island in self._islands),
            lives=self._lives(),
            begin_s=self._latency("starting the first step", chosen["begin"], defaults.begin_s),
            median_over=self._median_over(),
            seed_s=defaults.seed_s if seen.seeded_at is None else round(seen.seeded_at, DIGITS),
            parameter_count=(seen.parameter_count if of_routers else None) or defaults.parameter_count,
            router_parameter_count=of_routers,
        )
        until = inf if seen.finished else seen.until
        return FittedWorld(self._header.job, self._header.policy, plan, until, tuple(self._notes))

    # ── speeds ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _step_s(self, island: IslandId) -> Duration:
        step_s = self._speeds[island].step_s
        if step_s is None:
            self._notes.append(
                f"{island} never trained, so its step time is the median of the others, {self._usual_step_s:.3g} s"
            )
        return round(step_s or self._usual_step_s, DIGITS)

    def _tokens_per_step(self) -> int:
        return round(max(tokens for island_speeds in self._speeds.values() for _, tokens in island_speeds.tokens))

    def _capacity(self, tokens_per_step: int) -> tuple[Capacity, ...]:
        """Return the changes in tokens per step, and the stops during which the island still answered."""
        changes: list[Capacity] = []
        for island, island_speeds in self._speeds.items():
            ratio = 1.0
            for n, (at, tokens) in enumerate(island_speeds.tokens):
                ratio = tokens / tokens_per_step
                if abs(ratio - 1.0) > CAPACITY_CHANGE or n:
                    changes.append(Capacity(at if n else 0.0, island, round(ratio, 4)))
            missed = [silence.span(self._seen.until) for silence in self._seen.silences if silence.island == island]
            for stop in island_speeds.stops:
                if not any(since < stop.until and stop.since < until for since, until in missed):
                    changes += [Capacity(stop.since, island, 0.0), Capacity(stop.until, island, ratio)]
        return tuple(sorted(changes, key=lambda change: (change.at, change.island)))

    def _median_over(self) -> int:
        """Return how many steps a reported step time covers: 1 on simulated tapes, STEP_TIMES_KEPT on live ones."""
        pairs = [
            (after.stepping_seconds - before.stepping_seconds, after.step_seconds_median)
            for life in self._seen.lives.values()
            for (_, before), (_, after) in pairwise(life.reports)
            if after.steps_total == before.steps_total + 1
        ]
        if any(abs(took - reported) > 1e-6 * took for took, reported in pairs):
            return STEP_TIMES_KEPT
        return 1 if pairs or self._header.started_at == 0.0 else STEP_TIMES_KEPT

    # ── latencies ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _starts(self, again: bool) -> dict[str, list[Duration]]:
        """Return the durations of each part of the recorded starts: of first incarnations, or of all later ones."""
        durations: dict[str, list[Duration]] = {"place": [], "start": [], "transfer": [], "begin": []}
        for life in self._lives():
            if (life.incarnation > 1) == again:
                for part in durations:
                    if (seconds := getattr(life, f"{part}_s")) is not None:
                        durations[part].append(seconds)
        return durations

    def _lives(self) -> tuple[IncarnationStart, ...]:
        return tuple(self._life(island, incarnation, life) for (island, incarnation), life in self._seen.lives.items())

    def _life(self, island: IslandId, incarnation: Incarnation, life: ObservedIncarnation) -> IncarnationStart:
        begin_s = None
        if life.training_ordered_at is not None and life.reports:
            at, first = life.reports[0]
            pauses = self._speeds[island].pause_s * first.steps_total
            begin_s = at - self._report_delay_s - first.stepping_seconds - pauses - life.training_ordered_at
        placed_at = life.refused_at if life.placed_at is None else life.placed_at
        return IncarnationStart(
            island,
            incarnation,
            place_s=_between(life.asked_at, placed_at),
            placement_fails=life.placed_at is None and life.refused_at is not None,
            start_s=_between(life.placed_at, life.ready_at, self._report_delay_s),
            transfer_s=_between(life.state_asked_at, life.caught_up_at, self._report_delay_s),
            begin_s=None if begin_s is None else max(0.0, round(begin_s, DIGITS)),
        )

    def _delivery_s(self, default: Latency) -> Latency:
        """Return the median lag from publication to adoption, less half a step (the wait for a boundary) and two reports."""
        waits = {i: ((s.step_s or 0.0) + s.pause_s) / 2.0 for i, s in self._speeds.items()}
        lags = [a.lag - waits[a.island] - 2.0 * self._report_delay_s for a in self._seen.adoptions if a.island in waits]
        if not lags:
            return self._latency("delivering a version", [], default)
        middle = max(0.0, median(lags))
        return Uniform(round(middle / 2.0, DIGITS), round(middle * 1.5, DIGITS))

    def _report_every_s(self, default: Duration) -> Duration:
        """Return the interval of periodic reports: their median gap, less half a step, the mean wait for a boundary."""
        gaps = self._seen.report_gaps
        if len(gaps) < REPORTS_MIN:
            return default
        return round(max(0.0, median(gaps) - self._usual_step_s / 2.0), DIGITS)

    def _latency(self, what: str, samples: Sequence[Duration], default: Latency) -> Latency:
        """Return evenly spaced quantiles of the samples, or the default and a note if there are none."""
        if not samples:
            self._notes.append(f"{what} was never observed; {_in_seconds(default)} is assumed")
            return _distribution(default)
        ordered = sorted(max(0.0, seconds) for seconds in samples)
        if len(ordered) > SAMPLES_MAX:
            ordered = [ordered[(2 * n + 1) * len(ordered) // (2 * SAMPLES_MAX)] for n in range(SAMPLES_MAX)]
        return Empirical(tuple(round(seconds, DIGITS) for seconds in ordered))


class FaultExtraction:
    """The faults on a tape, to be injected again. ``stops`` are those of each island, from its own reports.

    An operator's command is repeated as given. A crash is injected at the time it was noticed, less the usual time until
    that. A silence begins where the island's own gap says (it was frozen), or where it was last heard (it was cut off).
    """

    def __init__(self, seen: Observed, stops: Mapping[IslandId, Sequence[Stop]], policy: JobPolicy) -> None:
        self._seen, self._stops, self._policy = seen, stops, policy
        self.detect_s = median(seen.detections) if seen.detections else DETECT_S

    @property
    def silence_s(self) -> Duration:
        """Return the median time from the start of a silence until it was noticed."""
        seen = [silence.lost_at - self._began(silence) for silence in self._seen.silences]
        return median(seen) if seen else WorldPlan(()).silence_s

    def _stop_in(self, silence: Silence) -> Stop | None:
        since, until = silence.span(self._seen.until)
        overlapping = [stop for stop in self._stops[silence.island] if stop.since < until and since < stop.until]
        return max(overlapping, key=lambda stop: stop.until - stop.since, default=None)

    def _began(self, silence: Silence) -> Instant:
        """Return when the silence began: where the island's own gap says, else when it was last heard."""
        stop = self._stop_in(silence)
        if stop is not None and silence.restored_at is not None:
            return min(silence.lost_at, silence.restored_at - (stop.until - stop.since))
        return silence.heard_at

    def faults(self) -> tuple[Fault, ...]:
        """Return commands, notices, crashes and silences, in time order."""
        silence_s = self.silence_s
        faults = [fault for command in self._seen.commands if (fault := self._commanded(command)) is not None]
        for notice in self._seen.notices:
            lasts = LONG_NOTICE_S if notice.seconds is None else max(0.0, notice.seconds)
            faults.append(Fault(notice.at, FaultKind.NOTICE, notice.island, lasts))
        for island, at, is_request_time in self._seen.crashes:
            faults.append(Fault(at if is_request_time else max(0.0, at - self.detect_s), FaultKind.CRASH, island))
        for silence in self._seen.silences:
            at = max(0.0, silence.lost_at - silence_s)
            until = silence.restored_at
            if until is None:  # never heard again: silent until well after the core gave it up
                until = silence.lost_at + 2.0 * self._policy.suspect_timeout_s + silence_s
            stood = silence.restored_at is None or self._stop_in(silence) is not None
            kind = FaultKind.FREEZE if stood else FaultKind.CUT
            faults.append(Fault(at, kind, silence.island, until - at))
        return tuple(sorted(faults, key=lambda fault: (fault.at, fault.island, fault.kind)))

    def _commanded(self, command: e.CommandRequested) -> Fault | None:
        """Return the fault of a command, or None if it harms no island of the job."""
        match command.request:
            case commands.Kill(island, restart):
                return Fault(command.at, FaultKind.KILL if restart else FaultKind.KILL_AND_KEEP_AWAY, island)
            case commands.Drain(island):
                return Fault(command.at, FaultKind.DRAIN, island)
            case commands.Readd(island):
                return Fault(command.at, FaultKind.READD, island)
            case commands.Cordon(node_group):
                return self._about_group(command.at, node_group, FaultKind.CORDON)
            case commands.Uncordon(node_group):
                return self._about_group(command.at, node_group, FaultKind.UNCORDON)
            case commands.Scale(node_group, count):
                return self._about_group(command.at, node_group, FaultKind.SCALE, count)
            case commands.Cancel():
                return Fault(command.at, FaultKind.CANCEL, self._policy.islands[0].island)
            case commands.Finish():
                return Fault(command.at, FaultKind.FINISH, self._policy.islands[0].island)
            case commands.Pause():
                return Fault(command.at, FaultKind.PAUSE, self._policy.islands[0].island)
            case commands.Continue():
                return Fault(command.at, FaultKind.CONTINUE, self._policy.islands[0].island)
            case _:
                return None

    def _about_group(self, at: Instant, node_group: NodeGroupId, kind: FaultKind, count: int = 0) -> Fault | None:
        there = [plan.island for plan in self._policy.islands if plan.node_group == node_group]
        return Fault(at, kind, there[0], count=count) if there else None

    def publication_loss(self) -> float:
        """Return the part of publications that islands did not adopt although they had time to, before the next came."""
        lags = sorted(adoption.lag for adoption in self._seen.adoptions)
        usual = lags[len(lags) * 19 // 20] if lags else 0.0
        lost = adopted = 0
        for (island, _), versions in self._seen.published.items():
            followers = [at for _, at, _ in versions[1:]]
            for (_, at, taken), until in zip(versions, [*followers, inf], strict=True):
                if taken:
                    adopted += 1
                elif until - at > usual and self._could_adopt(island, at + usual, until):
                    lost += 1
        return lost / (lost + adopted) if lost else 0.0

    def _could_adopt(self, island: IslandId, at: Instant, until: Instant) -> bool:
        for (name, _), life in self._seen.lives.items():
            if (
                name == island
                and life.training_ordered_at is not None
                and life.training_ordered_at <= at < life.ended_at
            ):
                after = [report for heard_at, report in life.reports if at < heard_at < until]
                quiet = any(s.island == island and s.heard_at < until for s in self._seen.silences if s.lost_at > at)
                return not quiet and bool(after) and after[-1].steps_total - after[0].steps_total >= STEPS_TO_ADOPT
        return False


# ── the speed of an island ────────────────────────────────────────────────────────────────────────────────────────────


def speeds_of(lives: Iterable[Sequence[DatedProgress]], unreachable: Sequence[tuple[Instant, Instant]]) -> Speeds:
    """Return the speed of one island, from the reports of all its incarnations."""
    speeds = Speeds()
    reports = [list(life) for life in lives if life]
    length = max((life[-1][0] for life in reports), default=0.0) - min((life[0][0] for life in reports), default=0.0)
    window = max(WINDOW_S, length / PACES_MAX)
    for life in reports:
        at, first = life[0]
        if first.steps_total:
            _note_tokens(speeds, at, first.tokens_total / first.steps_total)
        pending: list[_Segment] = []
        for (since, before), (until, after) in pairwise(life):
            steps = after.steps_total - before.steps_total
            stepping = after.stepping_seconds - before.stepping_seconds
            _note_tokens(speeds, since, (after.tokens_total - before.tokens_total) / steps)
            stop = _stop(since, until, after, steps, stepping)
            if stop is None:
                pending.append(_Segment(since, until, steps, stepping))
            else:
                speeds.stops.append(stop)
                excess = max(0.0, stepping - steps * after.step_seconds_median)
                stepping -= min(stop.until - stop.since, excess)
                stood = stop.until - stop.since
                pending.append(_Segment(since, until - stood, steps, stepping))
            if _wide(pending, window) and not _within(until, unreachable):
                _close(speeds, pending)
                pending = []
        _close(speeds, pending)
        speeds.owed = 0.0
    return speeds


def jitter(all_spreads: Iterable[Speeds]) -> float:
    """Return the half-width, as a ratio, of a uniform distribution with the steps' variance. Below 1: steps take time."""
    squares = [x * x for speeds in all_spreads for x in speeds.spread]
    return min(0.95, sqrt(3.0 * fsum(squares) / len(squares))) if squares else 0.0


def _stop(since: Instant, until: Instant, after: Progress, steps: int, stepping: Duration) -> Stop | None:
    """Return the stop between two reports, if there was one: a gap of many steps, as in ``accounting.island_time``.

    It ended with a step, just before the report. If several steps were reported at once it may be any of them. The last is
    as good a guess as another.
    """
    usual = after.step_seconds_median
    gap = after.gap_max_seconds
    if gap <= max(FREEZE_MIN_S, FREEZE_RATIO * usual):
        return None
    later = max(0.0, (stepping - min(stepping, gap)) / 2.0) if steps > 1 else 0.0
    ended = until - min(later, max(0.0, until - since - gap))
    return Stop(ended - gap + usual / 2.0, ended - usual / 2.0)


def _wide(pending: list[_Segment], window: Duration) -> bool:
    wide = fsum(segment.until - segment.since for segment in pending) >= window
    return wide and sum(segment.steps for segment in pending) >= STEPS_MIN


def _within(at: Instant, spans: Sequence[tuple[Instant, Instant]]) -> bool:
    return any(since <= at <= until + BURST_S for since, until in spans)


def _close(speeds: Speeds, segments: list[_Segment]) -> None:
    steps = sum(segment.steps for segment in segments)
    if not steps:
        return
    stepping = fsum(segment.stepping for segment in segments)
    # a delayed report makes its window too wide and the next too narrow, so the difference is carried over
    left = fsum(segment.until - segment.since for segment in segments) - stepping - speeds.owed
    pausing, speeds.owed = max(0.0, left), max(0.0, -left)
    step_s = stepping / steps
    span = (round(segments[0].since, DIGITS), round(segments[-1].until, DIGITS))
    speeds.paces.append(Pace(*span, round(step_s, DIGITS), round(pausing / steps, DIGITS)))
    speeds.steps += steps
    speeds.stepping += stepping
    speeds.pausing += pausing
    if len(segments) > 1 and step_s > 0.0:
        speeds.spread += [(s.stepping / s.steps / step_s - 1.0) * sqrt(s.steps) for s in segments]


def _note_tokens(speeds: Speeds, at: Instant, tokens: float) -> None:
    if not speeds.tokens or abs(tokens - speeds.tokens[-1][1]) > CAPACITY_CHANGE * max(tokens, speeds.tokens[-1][1]):
        speeds.tokens.append((at, tokens))


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _reports(seen: Observed, island: IslandId) -> list[list[DatedProgress]]:
    return [life.reports for (name, _), life in seen.lives.items() if name == island]


def _between(since: Instant | None, until: Instant | None, less: Duration = 0.0) -> Duration | None:
    return None if since is None or until is None else max(0.0, round(until - since - less, DIGITS))


def _alone(samples: Sequence[Duration]) -> Latency | None:
    return Empirical(tuple(round(seconds, DIGITS) for seconds in samples)) if samples else None


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _in_seconds(latency: Latency) -> str:
    return f"{latency[0]:g} to {latency[1]:g} s" if isinstance(latency, tuple) else f"{latency.mean:g} s"


def _distribution(latency: Latency) -> Latency:
    """Return the same latency as a distribution, which a file can hold."""
    if not isinstance(latency, tuple):
        return latency
    return Uniform(*latency) if latency[1] > 0.0 else Constant(0.0)
