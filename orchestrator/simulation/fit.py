"""A world fitted to a tape: the same speeds, faults, latencies and losses, so that another policy can be tried in it.

    fitted = fit(tape);  World(fitted.policy, fitted.plan, seed).run(fitted.until)

What is taken over as recorded: speeds over time, each incarnation's start, operators' commands, crashes and silences.
What is drawn from the durations that were seen: pulls, reports, deliveries, merges, evaluations, detection, and the start of
incarnations that the tape does not have. What is only estimated, because no event shows it: when a delivery reached its
mailbox (an island adopts at its next boundary: half a step is taken off), and when a silence began. Where something was
never seen, the plan's default stands and ``FittedWorld.notes`` says so. Not fitted: reordered arrivals, which no link makes.

Source: arXiv:2604.21428, "event tapes"; what-if as simulation in a fitted world is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from orchestrator.accounting.series import median
from orchestrator.core.vocabulary import Duration, Incarnation, Instant, IslandId, JobPolicy
from orchestrator.errors import DataError
from orchestrator.simulation import speeds
from orchestrator.simulation.distributions import Constant, Empirical, Uniform
from orchestrator.simulation.observed import DETECT_S, DatedProgress, FaultExtraction, Observed, ObservedIncarnation
from orchestrator.simulation.plan import Capacity, IncarnationStart, Latency, WorldPlan
from orchestrator.simulation.speeds import DIGITS
from orchestrator.tape.schema import Header, Tape, job_steps

SAMPLES_MAX = 50
STEP_TIMES_KEPT = 64
"""As in ``learners.loop``, which this package may not import."""
REPORTS_MIN = 5


@dataclass(frozen=True, slots=True)
class FittedWorld:
    """``until`` is when to stop a job that the tape shows unfinished; infinite when it shows the end."""

    job: str
    policy: JobPolicy
    plan: WorldPlan
    until: Instant = inf
    notes: tuple[str, ...] = ()


def fit(tape: Tape) -> FittedWorld:
    """The world of this tape. Raises DataError if nobody trains on it, or it is a fleet's and has no islands."""
    return _Fit(job_header(tape), observe(tape)).world()


def job_header(tape: Tape) -> Header:
    """The header of a job's tape. Raises DataError if the tape is a fleet's."""
    if not isinstance(tape.header, Header):
        raise DataError(
            detail=f"the tape of {tape.header.job!r} tells of slices of chips, not of islands that train. "
            "Take the tape of a job: a live one, or one simulated at level protocol."
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
        self._speeds = {island: speeds.of(_reports(seen, island), silent[island]) for island in self._islands}
        step_times = [island_speeds.step_s for island_speeds in self._speeds.values() if island_speeds.step_s]
        if not step_times:
            raise DataError(
                detail=f"no island trains on the tape of {header.job!r}, so there is no world to fit. "
                "Take the tape of a job that ran for a while."
            )
        self._usual_step_s = median(step_times)
        self._report_delay_s = median(seen.report_delays) if seen.report_delays else 0.0
        self._wrong = FaultExtraction(
            seen, {island: island_speeds.stops for island, island_speeds in self._speeds.items()}, header.policy
        )

    def world(self) -> FittedWorld:
        seen, fastest = self._seen, self._tokens_per_step()
        defaults = WorldPlan(())
        first, again = self._starts(False), self._starts(True)
        chosen = again if any(again.values()) else first
        plan = WorldPlan(
            step_s=tuple(self._step_s(island) for island in self._islands),
            step_jitter_ratio=round(speeds.jitter(self._speeds.values()), 4),
            tokens_per_step=fastest,
            adoption="rebase" if seen.keeps_work else "replace",
            faults=self._wrong.faults(),
            place_s=self._latency("placing an island", chosen["place"], defaults.place_s),
            start_s=self._latency("starting an island", chosen["start"], defaults.start_s),
            transfer_s=self._latency("taking over a state", chosen["transfer"], defaults.transfer_s),
            letter_s=self._latency("carrying a letter", seen.report_delays, defaults.letter_s),
            pull_s=self._latency("pulling a payload", seen.pulls, defaults.pull_s),
            delivery_s=self._delivery_s(defaults.delivery_s),
            merge_s=self._latency("merging", seen.merges, defaults.merge_s),
            evaluate_s=self._latency("evaluating", seen.evaluations or seen.evaluations_alone, defaults.evaluate_s),
            evaluate_alone_s=_alone(seen.evaluations_alone),
            kill_s=self._latency("killing an island", seen.kills, defaults.kill_s),
            detect_s=self._latency("hearing of a death", seen.detections, Constant(DETECT_S)),
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
            begin_s=self._latency("beginning the first step", chosen["begin"], defaults.begin_s),
            median_over=self._median_over(),
            seed_s=defaults.seed_s if seen.seeded_at is None else round(seen.seeded_at, DIGITS),
        )
        until = inf if seen.finished else seen.until
        return FittedWorld(self._header.job, self._header.policy, plan, until, tuple(self._notes))

    # ── speeds ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _step_s(self, island: IslandId) -> Duration:
        step_s = self._speeds[island].step_s
        if step_s is None:
            self._notes.append(
                f"{island} never trained: its step time is the others' median, {self._usual_step_s:.3g} s"
            )
        return round(step_s or self._usual_step_s, DIGITS)

    def _tokens_per_step(self) -> int:
        return round(max(tokens for island_speeds in self._speeds.values() for _, tokens in island_speeds.tokens))

    def _capacity(self, tokens_per_step: int) -> tuple[Capacity, ...]:
        """Fewer tokens a step, and stops during which the island was not missed: it stood still, and answered."""
        changes: list[Capacity] = []
        for island, island_speeds in self._speeds.items():
            ratio = 1.0
            for n, (at, tokens) in enumerate(island_speeds.tokens):
                ratio = tokens / tokens_per_step
                if abs(ratio - 1.0) > speeds.CAPACITY_CHANGE or n:
                    changes.append(Capacity(at if n else 0.0, island, round(ratio, 4)))
            missed = [silence.span(self._seen.until) for silence in self._seen.silences if silence.island == island]
            for stop in island_speeds.stops:
                if not any(since < stop.until and stop.since < until for since, until in missed):
                    changes += [Capacity(stop.since, island, 0.0), Capacity(stop.until, island, ratio)]
        return tuple(sorted(changes, key=lambda change: (change.at, change.island)))

    def _median_over(self) -> int:
        """1 if reports tell the last step's time, as simulated islands' do; STEP_TIMES_KEPT if a median, as live ones'."""
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
        """Each part of the starts that the tape shows, of first incarnations or of all later ones."""
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
        """The middle lag from publication to adoption, less half a step of waiting for the boundary and the two reports."""
        waits = {i: ((s.step_s or 0.0) + s.pause_s) / 2.0 for i, s in self._speeds.items()}
        lags = [a.lag - waits[a.island] - 2.0 * self._report_delay_s for a in self._seen.adoptions if a.island in waits]
        if not lags:
            return self._latency("delivering a version", [], default)
        middle = max(0.0, median(lags))
        return Uniform(round(middle / 2.0, DIGITS), round(middle * 1.5, DIGITS))

    def _report_every_s(self, default: Duration) -> Duration:
        """Reports that nothing but time asked for are that far apart, or up to a step more: half a step, in the middle."""
        gaps = self._seen.report_gaps
        if len(gaps) < REPORTS_MIN:
            return default
        return round(max(0.0, median(gaps) - self._usual_step_s / 2.0), DIGITS)

    def _latency(self, what: str, samples: Sequence[Duration], default: Latency) -> Latency:
        """Evenly spaced quantiles of what was seen."""
        if not samples:
            self._notes.append(f"{what} was never seen: {_in_seconds(default)} is assumed")
            return _distribution(default)
        ordered = sorted(max(0.0, seconds) for seconds in samples)
        if len(ordered) > SAMPLES_MAX:
            ordered = [ordered[(2 * n + 1) * len(ordered) // (2 * SAMPLES_MAX)] for n in range(SAMPLES_MAX)]
        return Empirical(tuple(round(seconds, DIGITS) for seconds in ordered))


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
    """The same as a file can say it."""
    if not isinstance(latency, tuple):
        return latency
    return Uniform(*latency) if latency[1] > 0.0 else Constant(0.0)
