"""Advice on the settings of a running job: H, K, the grace window and standbys, each with its simulated effect.

    tape ──fit──▶ world ──now──▶ seeds × (settings as they are, one setting changed) ──▶ the best change, measured again

The job's latest stretch is simulated in a world fitted to its tape, with the settings that it has now and with one setting
changed, under the same seeds. Each seed shifts the recorded faults a little, so that a change is not judged by the accident
of when an island died. The best change, first of those that may be made, is measured again with seeds that did not choose
it. It is advice only if its gain is above ``gain_min`` and above twice its standard error.

The objective is merged tokens a second and machine, discounted for drift:

    useful = merged/(s · machines) · min(1, (h/h')^DRIFT)      h = steps trained · fragments / contributions merged

h is how many steps an island trains between two merges of a fragment that it takes part in, of the fragments that share H;
h' is that with the change.
Merged tokens alone would never count what rare merges cost the model. Rarer merges must therefore gain more than they cost,
and more frequent ones are credited with nothing. A change that lets fewer islands meet in a merge, or loads a line or the
synchroniser above half of the time, is not advised. A setting moves by at most a factor of two, or by one, at a time.

No advice is given on a tape whose own figures the fitted world does not give back: what was not understood is not improved.
They are compared from the latest change of a setting on, because the world has the settings of now all the time.

A change that it has made is judged by the tape alone: if the job merges fewer tokens a second with it than it did before, it
is undone, and neither its value nor one beyond is advised again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import fsum, inf, sqrt
from random import Random
from typing import Any, Literal

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.series import policy_after
from orchestrator.accounting.statistics import Statistics
from orchestrator.core import commands
from orchestrator.core import events as e
from orchestrator.core.vocabulary import Duration, Instant, IslandId, JobPolicy
from orchestrator.simulation.distributions import Empirical
from orchestrator.simulation.fit import FittedWorld, fit, job_header
from orchestrator.simulation.plan import ENDLESS_TOKENS, Fault, FaultKind, IncarnationStart, Latency, Pace, WorldPlan
from orchestrator.simulation.world import World
from orchestrator.system.plain import percent
from orchestrator.tape.schema import Tape, job_steps

AUTOPILOT = "autopilot"
"""The caller of its commands on the tape."""
Setting = Literal["interval_steps", "quorum", "grace", "standbys"]
SETTINGS: tuple[Setting, ...] = ("interval_steps", "quorum", "grace", "standbys")
DRIFT = 0.1
"""Merging half as often costs 7 % of the tokens. Measured (docs/results.md): 0.7 % with Muon, 10 % with AdamW."""
GAIN_MIN = 0.01
SEEDS_TO_CHOOSE, SEEDS_TO_MEASURE = 3, 5
ERRORS_MIN = 2.0
"""A gain must be this many of its standard errors."""
INTERVALS_MIN = 12
"""A job is looked at once the islands trained for so many H."""
ISLAND_STEPS_MAX = 8_000
"""The length of the stretch that is simulated, in inner steps of all islands together."""
FIT_ERROR_MAX = 0.1
"""The fitted world must give the tape's merged tokens this well."""
CONTRIBUTORS_MIN = 0.95
"""Islands in a merge must not become fewer than this part of what they are."""
BUSY_MAX, BUSY_QUANTILE = 0.5, 0.9
"""Of the time that a fragment takes: the slowest of ten islands must keep up, too."""
UNDO_LOSS_MIN = 0.01
"""A change with which the job merges this much less is undone. Chance undoes a small gain now and then, which costs no more
than that."""
INTERVAL_FACTORS, GRACE_FACTORS = (0.5, 0.75, 1.5, 2.0), (0.5, 2.0)
CAUSE_MIN = 0.003
"""A cause of badput whose part of the time changes by less is not named as the reason."""
_ENDS = frozenset({FaultKind.CANCEL, FaultKind.FINISH, FaultKind.PAUSE, FaultKind.CONTINUE})


@dataclass(frozen=True, slots=True)
class Limits:
    """The least and the most of each setting. The autopilot only advises on a setting that is absent."""

    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def of(self, setting: Setting) -> tuple[float, float]:
        return self.ranges.get(setting, (0.0, inf))


@dataclass(frozen=True, slots=True)
class Effect:
    """The figures of one setting, as means over seeds. ``spread`` is the standard deviation of tokens over seeds.

    ``drift_steps`` is h. ``badput`` is parts of the island time by cause.
    """

    tokens_per_second: float
    spread: float
    goodput_ratio: float
    contributors: float
    drift_steps: float
    badput: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Advice:
    """One change and its simulated effect. ``gain_ratio`` is that of the objective, ``error_ratio`` its standard error.

    Of a change that undoes another, ``now`` and ``then`` are recorded, not simulated: with that change, and before it.

    ``held_by`` says why the autopilot may not make the change: no command changes the setting of a running job, the user set
    no bounds for it, or an operator has changed it. It is empty if it may.
    """

    setting: Setting
    before: float
    after: float
    gain_ratio: float
    error_ratio: float
    now: Effect
    then: Effect
    reason: str
    held_by: str


def command_for(setting: str, value: float, reason: str) -> commands.Set | None:
    """Return the command that gives a setting this value; None if there is none for it."""
    match setting:
        case "interval_steps":
            return commands.Set(sync_interval_steps=round(value), reason=reason)
        case "quorum":
            return commands.Set(quorum=round(value), reason=reason)
        case "grace":
            return commands.Set(grace_cap_steps=value, reason=reason)
        case _:
            return None


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one look at a tape. ``outcome`` is the advice in words, or why there is none.

    ``record`` is the number of the tape's last record, and ``at`` its instant. ``looked_at`` changes were simulated.
    """

    record: int
    at: Instant
    settings: Mapping[str, float | None]
    fit_error_ratio: float | None
    looked_at: int
    outcome: str
    advice: Advice | None = None


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The policy and the plan that are simulated from 0 to ``until``, and measured from ``since`` on.

    The tape was made with these settings from ``as_set_since`` on, which is not earlier.
    """

    policy: JobPolicy
    plan: WorldPlan
    since: Instant
    as_set_since: Instant
    until: Instant


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of one setting on the tape, by this caller."""

    at: Instant
    setting: Setting
    before: float
    after: float
    caller: str


@dataclass(frozen=True, slots=True)
class _Run:
    """The figures of one simulated stretch. ``tokens_as_set`` are merged in a second from ``as_set_since`` on."""

    tokens_per_second: float
    tokens_as_set: float
    goodput_ratio: float
    contributors: float
    drift_steps: float
    badput: Mapping[str, float]


class Pilot:
    """Looks at one tape. ``look`` returns the report."""

    def __init__(self, tape: Tape, limits: Limits | None = None, gain_min: float = GAIN_MIN, seed: int = 0) -> None:
        """Raises DataError if no world fits the tape."""
        self._limits, self._gain_min, self._seed = limits or Limits(), gain_min, seed
        self._fitted = fit(tape)
        self._policy, self._changes = _as_set(tape)
        self._changers = {change.setting: change.caller for change in self._changes}
        self._changed_at = self._changes[-1].at if self._changes else 0.0
        self._record = tape.records[-1].n if tape.records else 0
        self._at = max((event.at for event, _ in job_steps(tape)), default=0.0)
        usual = sorted(self._fitted.plan.step_s)[len(self._fitted.plan.step_s) // 2]
        self._interval_s = self._policy.sync_interval_steps * usual
        self._span = _span(self._fitted, self._at, self._interval_s, usual)
        self._tape = tape

    def look(self) -> Report:
        """Simulate, and return the advice or why there is none."""
        begins, since = self._span
        wanted_s = INTERVALS_MIN * self._interval_s
        if self._at - (self._fitted.plan.seed_s or 0.0) < wanted_s:
            return self._report(
                f"the job has trained for less than {INTERVALS_MIN} intervals of H; more of it is needed"
            )
        as_set_since = max(since, self._changed_at + self._interval_s) if self._changed_at else since
        if self._changed_at and self._at - self._changed_at < wanted_s:
            return self._report(
                f"the job has trained for less than {INTERVALS_MIN} intervals of H since a setting was changed; more of "
                "it is needed"
            )
        if (undo := self._undo()) is not None:
            return undo
        happened = _recorded(self._tape, as_set_since, self._at).tokens_per_second
        plan = _recent(self._fitted.plan, begins)
        stretch = _Stretch(self._policy, plan, since - begins, as_set_since - begins, self._at - begins)
        chosen_on = range(self._seed, self._seed + SEEDS_TO_CHOOSE)
        now = [_simulated(stretch, seed) for seed in chosen_on]
        simulated = _mean([run.tokens_as_set for run in now])
        error = abs(simulated / happened - 1.0) if happened else inf
        if error > FIT_ERROR_MAX:
            return self._report(
                f"the fitted world merges {simulated:,.0f} tokens a second where the job merged {happened:,.0f}, so "
                "nothing that it shows can be relied on",
                error,
            )
        tried: list[tuple[float, Setting, float]] = []
        for setting, value in self._candidates(stretch):
            tried.append((self._tried(stretch, setting, value, now), setting, value))
        if not tried:
            return self._report("no other value is within the bounds", error)
        best, setting, value = max(tried, key=lambda one: (one[0] >= self._gain_min and not self._held(one[1]), one))
        if best <= 0.0:
            return self._report(
                f"the settings are kept: none of {len(tried)} changes gains anything", error, len(tried)
            )
        return self._measured(stretch, setting, value, error, len(tried))

    def _tried(self, stretch: _Stretch, setting: Setting, value: float, now: list[_Run]) -> float:
        """Return the mean gain of a change. A change that gains next to nothing with the first seed gets no others."""
        changed, gains, islands = _with(stretch, setting, value), [], []
        for seed, run in enumerate(now, self._seed):
            then = _simulated(changed, seed)
            gains.append(self._gain(run, then, setting, value))
            islands.append(then.contributors)
            if gains[0] < self._gain_min / 2.0:
                break
        usual = _mean([run.contributors for run in now])
        return _mean(gains) if _mean(islands) >= CONTRIBUTORS_MIN * usual else -1.0

    def _measured(self, stretch: _Stretch, setting: Setting, value: float, error: float, tried: int) -> Report:
        """Measure the best change with seeds of its own, and return it if it gains enough."""
        first = self._seed + SEEDS_TO_CHOOSE
        seeds = range(first, first + SEEDS_TO_MEASURE)
        now = [_simulated(stretch, seed) for seed in seeds]
        then = [_simulated(_with(stretch, setting, value), seed) for seed in seeds]
        gains = [self._gain(a, b, setting, value) for a, b in zip(now, then, strict=True)]
        gain, deviation = _mean(gains), _deviation(gains)
        deviation /= sqrt(len(gains))
        before = _value_of(self._policy, setting)
        words = f"{setting} {_short(before)} to {_short(value)}"
        if gain < self._gain_min or gain < ERRORS_MIN * deviation:
            return self._report(
                f"the settings are kept: the best of {tried} changes ({words}) gains {percent(gain)} ± "
                f"{percent(deviation)}, but {percent(self._gain_min)} and {ERRORS_MIN:g} errors are needed",
                error,
                tried,
            )
        effects = _effect(now), _effect(then)
        reason = _reason(words, gain, deviation, *effects)
        advice = Advice(setting, before, value, gain, deviation, *effects, reason, self._held(setting))
        return self._report(reason, error, tried, advice)

    def _undo(self) -> Report | None:
        """Return advice to take the autopilot's latest change back, if the job merges less with it."""
        latest = self._changes[-1] if self._changes else None
        if latest is None or latest.caller != AUTOPILOT or latest.before == inf:
            return None
        (least, most), setting = self._limits.of(latest.setting), latest.setting
        value = min(max(latest.before, least), most)
        longest = max(latest.before, latest.after) / latest.after if setting == "interval_steps" else 1.0
        settles = 2.0 * longest * self._interval_s
        earlier = max((change.at for change in self._changes if change.at < latest.at), default=0.0)
        since = (earlier or _longest(self._fitted.plan)) + settles
        if value == latest.after or self._is_undone(setting, value) or latest.at - since < settles:
            return None
        now, then = _recorded(self._tape, latest.at + settles, self._at), _recorded(self._tape, since, latest.at)
        if not 0.0 < now.tokens_per_second < (1.0 - UNDO_LOSS_MIN) * then.tokens_per_second:
            return None
        reason = (
            f"{setting} {_short(latest.after)} back to {_short(value)}: the job merged {now.tokens_per_second:,.0f} tokens "
            f"a second since the change, and {then.tokens_per_second:,.0f} before it"
        )
        gain, effects = then.tokens_per_second / now.tokens_per_second - 1.0, (_effect([now]), _effect([then]))
        advice = Advice(setting, latest.after, value, gain, 0.0, *effects, reason, self._held(setting))
        return self._report(reason, advice=advice)

    def _is_undone(self, setting: Setting, value: float) -> bool:
        """Return whether the autopilot has taken back a change to this value, or to one that is less far away."""
        own = [change for change in self._changes if change.setting == setting and change.caller == AUTOPILOT]
        turns = [a for a, b in pairwise(own) if (a.after - a.before) * (b.after - b.before) < 0.0]
        return any((a.after - a.before) * (value - a.after) >= 0.0 for a in turns)

    def _held(self, setting: Setting) -> str:
        if setting == "standbys":
            return "no command changes the standbys of a running job: give `standby` in the next specification"
        if setting not in self._limits.ranges:
            return f"autopilot.bounds has no range for {setting}"
        who = self._changers.get(setting, AUTOPILOT)
        return "" if who == AUTOPILOT else f"{who} has set {setting}, and the autopilot leaves that alone"

    def _report(self, outcome: str, error: float | None = None, tried: int = 0, advice: Advice | None = None) -> Report:
        values = ((setting, _value_of(self._policy, setting)) for setting in SETTINGS)
        settings: dict[str, float | None] = {name: None if value == inf else value for name, value in values}
        return Report(self._record, self._at, settings, error, tried, outcome, advice)

    def _gain(self, now: _Run, then: _Run, setting: Setting, value: float) -> float:
        """Return the gain of the objective as a ratio."""
        if not now.tokens_per_second or not then.drift_steps:
            return 0.0
        drift: float = min(1.0, (now.drift_steps / then.drift_steps) ** DRIFT)
        machines = len(self._policy.islands) + len(self._policy.standbys)
        more = machines + (value - _value_of(self._policy, setting) if setting == "standbys" else 0.0)
        more_tokens = then.tokens_per_second / now.tokens_per_second
        return more_tokens * drift * machines / more - 1.0

    def _candidates(self, stretch: _Stretch) -> Iterator[tuple[Setting, float]]:
        """Yield the values to try: one setting at a time, by at most a factor of two or by one, within the bounds."""
        policy = self._policy
        busy = _busy(stretch, self._interval_s)
        for setting in SETTINGS:
            before = _value_of(policy, setting)
            least, most = self._limits.of(setting)
            if setting == "interval_steps":
                values = [float(round(before * factor)) for factor in INTERVAL_FACTORS]
                least = max(least, (policy.router_interval_steps or policy.overlap_steps) + 1)
            elif setting == "grace":
                new = {inf: [3.0], 0.0: [1.0]}  # no factor leads away from these
                values = new.get(before) or [before * factor for factor in GRACE_FACTORS]
                least = max(least, policy.grace_floor_steps)
            elif setting == "quorum":
                values = [before - 1.0, before + 1.0]
                least, most = max(least, 1.0), min(most, float(len(policy.islands)))
            else:
                values = [before + 1.0]
            for value in sorted({min(max(value, least), most) for value in values}):
                heavier = setting == "interval_steps" and value < before and busy * before / value > BUSY_MAX
                if value == before or self._is_undone(setting, value):
                    continue
                if not heavier and _is_small(setting, before, value):
                    yield setting, value


# ── simulating ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _simulated(stretch: _Stretch, seed: int) -> _Run:
    """Run the stretch in a world whose faults are shifted by this seed."""
    interval_s = stretch.policy.sync_interval_steps * max(stretch.plan.step_s)
    plan = replace(stretch.plan, faults=_shifted(stretch.plan.faults, interval_s, Random(f"{seed} faults")))
    world = World(replace(stretch.policy, token_budget=ENDLESS_TOKENS), plan, seed, checked=False)
    world.run(stretch.since)
    before, counts_before = world.goodput.summary(stretch.since), world.statistics.summary()
    if stretch.as_set_since > stretch.since:
        world.resume(stretch.as_set_since)
    merged_before: float = world.goodput.summary(stretch.as_set_since)["tokens"]["merged"]
    world.resume(stretch.until)
    after, counts_after = world.goodput.summary(stretch.until), world.statistics.summary()
    merged = after["tokens"]["merged"] - merged_before
    as_set = merged / (stretch.until - stretch.as_set_since)
    return _between(before, counts_before, after, counts_after, as_set, plan.tokens_per_step, stretch)


def _between(
    before: Mapping[str, Any],
    counts_before: Mapping[str, Any],
    after: Mapping[str, Any],
    counts_after: Mapping[str, Any],
    tokens_as_set: float,
    tokens_per_step: int,
    stretch: _Stretch,
) -> _Run:
    merges = counts_after["merges"] - counts_before["merges"]
    contributions = (
        counts_after["contributors_mean"] * counts_after["merges"]
        - counts_before["contributors_mean"] * counts_before["merges"]
    )
    shared = stretch.policy.schedule.shared_count
    to_shared = _contributions(counts_after, shared) - _contributions(counts_before, shared)
    trained = after["tokens"]["trained"] - before["tokens"]["trained"]
    total = after["island_seconds"]["total"] - before["island_seconds"]["total"]
    productive = after["island_seconds"]["productive"] - before["island_seconds"]["productive"]
    causes = after["badput_seconds"]
    lost = {name: causes[name] - before["badput_seconds"].get(name, 0.0) for name in causes}
    return _Run(
        tokens_per_second=(after["tokens"]["merged"] - before["tokens"]["merged"]) / (stretch.until - stretch.since),
        tokens_as_set=tokens_as_set,
        goodput_ratio=productive / total if total else 0.0,
        contributors=contributions / merges if merges else 0.0,
        drift_steps=trained / tokens_per_step * shared / to_shared if to_shared else 0.0,
        badput={name: spent / total for name, spent in lost.items()} if total else {},
    )


def _contributions(counts: Mapping[str, Any], shared_count: int) -> int:
    """Return the contributions merged into the fragments that share H, which are the first ones."""
    counters = counts["contributors_per_fragment"][:shared_count]
    return sum(int(islands) * merges for counter in counters for islands, merges in counter.items())


def _with(stretch: _Stretch, setting: Setting, value: float) -> _Stretch:
    """Return the stretch with one setting changed."""
    policy = stretch.policy
    if setting == "interval_steps":
        return replace(stretch, policy=replace(policy, sync_interval_steps=round(value)))
    if setting == "quorum":
        return replace(stretch, policy=replace(policy, quorum=round(value)))
    if setting == "grace":
        return replace(stretch, policy=replace(policy, grace_cap_steps=value))
    count = round(value) - len(policy.standbys)
    more = (replace(policy.islands[0], island=IslandId(f"a-standby-more-{n}")) for n in range(count))
    return replace(stretch, policy=replace(policy, standbys=(*policy.standbys, *more)))


def _shifted(faults: tuple[Fault, ...], by_at_most: Duration, random: Random) -> tuple[Fault, ...]:
    """Return the faults, all of an island shifted by the same time, so that their order stays."""
    shifts: dict[IslandId, Duration] = {}
    for fault in sorted(faults, key=lambda fault: fault.island):
        if fault.island not in shifts:
            shifts[fault.island] = random.uniform(-by_at_most, by_at_most)
    moved = (replace(fault, at=max(0.0, fault.at + shifts[fault.island])) for fault in faults)
    return tuple(sorted(moved, key=lambda fault: (fault.at, fault.island, fault.kind)))


def _span(fitted: FittedWorld, at: Instant, interval_s: Duration, step_s: Duration) -> tuple[Instant, Instant]:
    """Return where the stretch begins, and from when on it is measured."""
    length = max(ISLAND_STEPS_MAX / max(1, len(fitted.policy.islands)) * step_s, 4 * INTERVALS_MIN * interval_s)
    begins = max(0.0, at - length)
    settles = 2.0 * interval_s + (_longest(fitted.plan) if begins == 0.0 else 0.0)
    return begins, min(begins + settles, (begins + at) / 2.0)


def _longest(plan: WorldPlan) -> Duration:
    """Return the longest recorded start of a first incarnation."""
    firsts = (life for life in plan.lives if life.incarnation == 1)
    return plan.seed_s + max((_start_s(life) for life in firsts), default=0.0)


def _start_s(life: IncarnationStart) -> Duration:
    return fsum(part or 0.0 for part in (life.place_s, life.start_s, life.transfer_s, life.begin_s))


def _recent(plan: WorldPlan, begins: Instant) -> WorldPlan:
    """Return the plan of what happened from ``begins`` on, without commands that end or pause the job."""
    faults = tuple(fault for fault in plan.faults if fault.kind not in _ENDS)
    if begins <= 0.0:
        return replace(plan, faults=faults)

    def moved(pace: Pace) -> Pace:
        return replace(pace, since=max(0.0, pace.since - begins), until=pace.until - begins)

    capacity = [replace(change, at=max(0.0, change.at - begins)) for change in plan.capacity]
    return replace(
        plan,
        faults=tuple(replace(fault, at=fault.at - begins) for fault in faults if fault.at >= begins),
        paces=tuple(tuple(moved(pace) for pace in paces if pace.until > begins) for paces in plan.paces),
        capacity=tuple(capacity),
        lives=(),
    )


def _recorded(tape: Tape, since: Instant, until: Instant) -> _Run:
    """Return the figures that the tape itself has of this time."""
    header = job_header(tape)
    goodput, statistics = Goodput(header.policy), Statistics(header.policy)
    before: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
    for event, effects in job_steps(tape):
        if before is None and event.at >= since:
            before = goodput.summary(since), statistics.summary()
        if event.at > until:
            break
        goodput.apply(event, effects)
        statistics.apply(event, effects)
    after = goodput.summary(until), statistics.summary()
    stretch = _Stretch(header.policy, WorldPlan(()), since, since, until)
    return _between(*(before or after), *after, 0.0, 1, stretch)


def _as_set(tape: Tape) -> tuple[JobPolicy, tuple[_Change, ...]]:
    """Return the policy with the settings that the job has now, and all changes of them."""
    policy, changes = job_header(tape).policy, list[_Change]()
    for event, effects in job_steps(tape):
        after = policy_after(policy, event, effects)
        if after is policy or not isinstance(event, e.CommandRequested):
            continue
        request = event.request
        assert isinstance(request, commands.Set)
        named: dict[Setting, float | None] = {
            "interval_steps": request.sync_interval_steps,
            "quorum": request.quorum,
            "grace": request.grace_cap_steps,
        }
        for setting, value in named.items():
            if value is not None:
                own = _value_of(policy, setting), _value_of(after, setting)
                changes.append(_Change(event.at, setting, *own, event.caller))
        policy = after
    return policy, tuple(changes)


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _value_of(policy: JobPolicy, setting: Setting) -> float:
    match setting:
        case "interval_steps":
            return float(policy.sync_interval_steps)
        case "quorum":
            return float(policy.quorum)
        case "grace":
            return inf if policy.grace_cap_steps is None else policy.grace_cap_steps
        case _:
            return float(len(policy.standbys))


def _is_small(setting: Setting, before: float, after: float) -> bool:
    """Return whether one look may make this change: a bound may be further away."""
    if setting in ("quorum", "standbys"):
        return abs(after - before) <= 1.0
    return before in (0.0, inf) or 0.4 <= after / before <= 2.0


def _busy(stretch: _Stretch, interval_s: Duration) -> float:
    """Return the part of the time that a line, or the synchroniser, is busy with this job's fragments."""
    schedule = stretch.policy.schedule
    slot_s = interval_s / (schedule.shared_count + schedule.interval_steps / (schedule.router_interval_steps or inf))
    return max(_usual(stretch.plan.merge_s), _slow(stretch.plan.pull_s)) / slot_s if slot_s else inf


def _usual(latency: Latency) -> Duration:
    return fsum(latency) / 2.0 if isinstance(latency, tuple) else latency.mean


def _slow(latency: Latency) -> Duration:
    """Return a time that few exceed: the islands' lines differ, and one distribution has the times of all."""
    if isinstance(latency, Empirical):
        return sorted(latency.samples)[int(BUSY_QUANTILE * len(latency.samples))]
    return max(latency) if isinstance(latency, tuple) else latency.mean


def _mean(values: list[float]) -> float:
    return fsum(values) / len(values)


def _deviation(values: list[float]) -> float:
    mean = _mean(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))


def _effect(runs: list[_Run]) -> Effect:
    causes = sorted({name for run in runs for name in run.badput})
    return Effect(
        tokens_per_second=_mean([run.tokens_per_second for run in runs]),
        spread=_deviation([run.tokens_per_second for run in runs]),
        goodput_ratio=_mean([run.goodput_ratio for run in runs]),
        contributors=_mean([run.contributors for run in runs]),
        drift_steps=_mean([run.drift_steps for run in runs]),
        badput={name: _mean([run.badput.get(name, 0.0) for run in runs]) for name in causes},
    )


def _reason(words: str, gain: float, error: float, now: Effect, then: Effect) -> str:
    """Return one sentence: the change, its effect, and the cause of badput that it changes most."""
    effect = (
        f"{words}: merged tokens {now.tokens_per_second:,.0f} to {then.tokens_per_second:,.0f} a second, "
        f"{percent(gain)} ± {percent(error)} more"
    )
    saved = {name: part - then.badput.get(name, 0.0) for name, part in now.badput.items()}
    cause = max(saved, key=lambda name: (saved[name], name), default="")
    if not cause or saved[cause] < CAUSE_MIN:
        return effect
    parts = f"{percent(now.badput[cause])} to {percent(then.badput.get(cause, 0.0))}"
    return f"{effect}, because time {cause} falls from {parts}"


def _short(value: float) -> str:
    return "unlimited" if value == inf else f"{value:g}"
