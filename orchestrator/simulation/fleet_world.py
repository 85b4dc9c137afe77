"""Runs a fleet in virtual time: months of failures, stalls and returns under one system.

    world = FleetWorld(plan, seed);  for done in world.batches(): …;  world.outcome()        or        simulate(plan, seed)

``FleetWorld`` decides when things happen and adds up chip-seconds by cause, batch by batch; ``orchestrator.elastic`` decides
what follows from each event. ``outcome`` always covers whole batches, so a run may be interrupted at any time. At one
instant, returns of slices and ends of stalls come before the next failure, in the order in which they were scheduled. Steps
and merges exist only at protocol level.

**The failure trace** (``draw_outages``) says which slice an interruption hits, when, and when the slice returns. It depends
on the hardware and the seed alone, so all systems see the same failures and differ by more than luck. The length of stalls
is drawn from another generator. Chips fail independently, each after an exponential time of mean MTBI, so the interruptions
of the fleet are a Poisson process of rate chips/MTBI, each hitting any slice with equal probability. An outage of a slice
that is already out of use has no effect. Interruptions are memoryless, so the rest of the trace is distributed as if that
outage had never been drawn.

**Waiting in lock-step** (``LockStep``) lays DiLoCo and Streaming DiLoCo over learners that stall on their own:

    position p_m    inner steps that learner m has done     synchronisation points at k·s, s = H (diloco) or H/P (streaming)
    gate k          at k·s + τ; no learner passes it before all have reached k·s

A learner may therefore run up to the first closed gate, (⌊min p / s⌋ + 1)·s + τ. With τ = 0 and s = H this is DiLoCo's
barrier. While all run and no learner is more than τ ahead, no gate stops anyone, and the time until the next stall is one
step of the computation, which makes months affordable. A learner that waits fails and stalls like one that computes. With
unequal speeds all go at the pace of the slowest and wait for the rest of each step. The spread of single steps is left to
the protocol level. Positions and instants are whole microseconds, so that "has reached" needs no tolerance.
Sources: arXiv:2311.08105 (outer step every H); arXiv:2501.18512 (fragments, overlap τ).

**The tape** (``FleetTape``) is written fast enough for the flat loop: exactly what ``tape.schema.encode_record`` would write
for the same event and effects, without creating them. A test and every replay compare the two. A record has about 120
bytes, and creating and encoding the messages would cost several times as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple, Protocol

from orchestrator.core.vocabulary import Duration, Instant
from orchestrator.elastic import AWAIT, GROW, NOTHING, RESTART, SHRINK, STALLS, ElasticJobs
from orchestrator.simulation.distributions import Distribution
from orchestrator.simulation.fleet import LOCK_STEP, Badput, Cause, FleetOutcome, FleetPlan, System
from orchestrator.tape.schema import FleetHeader

BATCHES = 64
"""Parts of equal length whose means give the standard error, with a relative error of about 9 %."""
_BLOCK_MASK = 8192 - 1
"""Records per block, less one; a power of two, less one."""
_STALL = SHRINK | GROW | RESTART
GONE = -1
"""Stands for the number of slices of a learner that has left. No learner waits for it until it has slices again."""
_RETURN, _END, _ARRIVE, _LEAVE = range(4)
_NEVER = float("inf")


class Outage(NamedTuple):
    """An interruption of a chip of ``slice`` at ``at``. The slice is usable again from ``back_at``."""

    at: Instant
    slice: int
    back_at: Instant


def simulate(plan: FleetPlan, seed: int, *, keep_capacity: bool = False) -> FleetOutcome:
    """Run the whole plan without a tape."""
    world = FleetWorld(plan, seed, keep_capacity=keep_capacity)
    for _ in world.batches():
        pass
    return world.outcome()


class FleetWorld:
    """One plan under one seed."""

    def __init__(
        self, plan: FleetPlan, seed: int, *, tape: FleetTape | None = None, keep_capacity: bool = False
    ) -> None:
        self.plan, self.seed = plan, seed
        self.now: Instant = 0.0
        self.events = self.outages = self.stalls = 0
        self.jobs = ElasticJobs(plan.policy())
        self._tape = tape
        self._random = Random(f"{seed}/stalls/{plan.system}")
        self._trace = draw_outages(
            plan.trace_slices, plan.chips_seen, plan.mtbi_chip, plan.return_time, Random(f"{seed}/outages")
        )
        self._next: Outage = next(self._trace)
        self._heap: list[tuple[Instant, int, int, int]] = []
        self._scheduled_count = 0
        self._stall_end = [_NEVER] * self.jobs.policy.learner_count
        self._lock_step = (
            LockStep(plan, [count or GONE for count in self.jobs.serving]) if plan.system in LOCK_STEP else None
        )
        self._nominal = [0] * self.jobs.policy.learner_count
        for block in self.jobs.policy.blocks:
            if block.resident or not self._nominal[block.learner]:
                self._nominal[block.learner] += block.slice_count
        self._capacity: list[list[tuple[Instant, float]]] = [
            [(0.0, serving / nominal)] for serving, nominal in zip(self.jobs.serving, self._nominal, strict=True)
        ]
        self._keeps_capacity = keep_capacity
        self._changes: list[tuple[Instant, int, int]] | None = [] if keep_capacity or self._lock_step else None
        self._account = FleetAccount()
        self._counted = (0, 0, 0)
        if plan.system is not System.DATA_PARALLEL:
            for number, (_, extra) in enumerate(plan.blocks()):
                if extra is not None:
                    self._schedule(extra.since, _ARRIVE, number)
                    self._schedule(extra.until, _LEAVE, number)

    # ── running ───────────────────────────────────────────────────────────────────────────────────────────────

    def batches(self) -> Iterator[float]:
        """Simulate one batch after the other. Yields the part of the plan's duration that is done."""
        for number in range(self._account.batch_count + 1, BATCHES + 1):
            began = self.now
            spent, up = self._run(self.plan.duration * number / BATCHES)
            if self._lock_step is not None and self._changes is not None:
                waited, up = self._lock_step.advance(self._changes, self.now)
                spent[None] -= waited
                spent[Cause.WAITING] = waited
            spent[Cause.UNUSED] = self._unused(began, self.now)
            if self._changes is not None:
                self._file(self._changes)
            if self._tape is not None:
                self._tape.flush()
            self._account.add(spent, up, self.now - began)
            self._counted = (self.outages, self.stalls, self.events)
            yield number / BATCHES

    def _run(self, end: Instant) -> tuple[dict[Cause | None, float], float]:
        """Run up to ``end``. Return slice-seconds by cause (None: productive) and the seconds in which a learner ran.

        The loop is flat and integrates only when the totals change, because the time of a simulation is spent here.
        """
        jobs, heap, tape, trace, changes = self.jobs, self._heap, self._tape, self._trace, self._changes
        outage, stall_end, random = self._next, self._stall_end, self._random
        fail, give_back, resume = jobs.slice_failed, jobs.slice_returned, jobs.stall_ended
        draws = {SHRINK: self.plan.stall_down, GROW: self.plan.stall_up, RESTART: self.plan.restart}
        learner_of, stall_of, serving = jobs.learner_of, jobs.stall, jobs.serving
        scheduled_count, events, outages, stalls = self._scheduled_count, self.events, self.outages, self.stalls
        stalled = jobs.stalled
        last, productive, shrinking, growing, restarting, away_seconds, up = self.now, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        training, away, live = jobs.training, jobs.away, jobs.live > 0
        to_shrink, to_grow, to_restart = stalled[SHRINK], stalled[GROW], stalled[RESTART]
        while True:
            if heap and heap[0][0] <= outage.at:
                at = heap[0][0]
                if at >= end:
                    break
                _, _, kind, index = heappop(heap)
                if kind == _RETURN:
                    decided = give_back(index)
                    learner = learner_of[index]
                    if tape is not None:
                        tape.returned(at, index, decided, learner)
                elif kind == _END:
                    if stall_end[index] != at:
                        continue  # the stall began anew meanwhile, or its learner has left
                    stall_end[index] = _NEVER
                    decided = resume(index)
                    learner = index
                    if tape is not None:
                        tape.ended(at, index)
                else:
                    decided, learner = self._visit(at, kind, index)
            else:
                at, index, back_at = outage
                if at >= end:
                    break
                outage = next(trace)
                outages += 1
                decided = fail(index)
                learner = learner_of[index]
                if tape is not None:
                    tape.failed(at, index, decided, learner)
                if decided & AWAIT:
                    scheduled_count += 1
                    heappush(heap, (back_at, scheduled_count, _RETURN, index))
            events += 1
            if not decided:
                continue
            code = decided & _STALL
            if code:
                stalls += 1
                scheduled_count += 1
                until = stall_end[learner] = at + draws[code].draw(random)
                heappush(heap, (until, scheduled_count, _END, learner))
            passed = at - last
            last = at
            productive += training * passed
            shrinking += to_shrink * passed
            growing += to_grow * passed
            restarting += to_restart * passed
            away_seconds += away * passed
            if live:
                up += passed
            training, away, live = jobs.training, jobs.away, jobs.live > 0
            to_shrink, to_grow, to_restart = stalled[SHRINK], stalled[GROW], stalled[RESTART]
            if changes is not None:
                changes.append((at, learner, 0 if stall_of[learner] else serving[learner]))
        passed = end - last
        self.now, self._next, self._scheduled_count = end, outage, scheduled_count
        self.events, self.outages, self.stalls = events, outages, stalls
        spent: dict[Cause | None, float] = {
            None: productive + training * passed,
            Cause.SHRINKING: shrinking + to_shrink * passed,
            Cause.GROWING: growing + to_grow * passed,
            Cause.RESTARTING: restarting + to_restart * passed,
            Cause.AWAY: away_seconds + away * passed,
            Cause.WAITING: 0.0,
        }
        return spent, up + live * passed

    def _schedule(self, at: Instant, kind: int, index: int) -> None:
        """Schedule an arrival or departure of scavenged capacity."""
        self._scheduled_count += 1
        heappush(self._heap, (at, self._scheduled_count, kind, index))

    def _visit(self, at: Instant, kind: int, block: int) -> tuple[int, int]:
        """Let scavenged slices arrive or leave. Return the decision and the learner that it is about."""
        learner = self.jobs.policy.blocks[block].learner
        if kind == _ARRIVE:
            decided = self.jobs.block_arrived(block)
        else:
            decided = self.jobs.block_left(block)
            if not self.jobs.stall[learner]:
                self._stall_end[learner] = _NEVER
            if self._changes is not None and learner >= self.plan.learner_count:
                self._changes.append((at, learner, GONE))
        if self._tape is not None:
            self._tape.visited(at, block, decided, learner, arrived=kind == _ARRIVE)
        return decided, learner

    def _unused(self, since: Instant, until: Instant) -> float:
        """Return the slice-seconds of capacity that this system cannot use."""
        if self.plan.system is not System.DATA_PARALLEL:
            return 0.0
        return math.fsum(
            block.slice_count * max(0.0, min(until, extra.until) - max(since, extra.since))
            for block, extra in self.plan.blocks()
            if extra is not None
        )

    def _file(self, changes: list[tuple[Instant, int, int]]) -> None:
        if self._keeps_capacity:
            for at, learner, serving in changes:
                ratio = max(0, serving) / self._nominal[learner]
                if ratio != self._capacity[learner][-1][1]:
                    self._capacity[learner].append((at, ratio))
        changes.clear()

    def outcome(self) -> FleetOutcome:
        """Return the outcome of the whole batches so far."""
        account, plan = self._account, self.plan
        outages, stalls, events = self._counted
        return FleetOutcome(
            system=plan.system,
            learners=plan.learner_count,
            chips=plan.chips,
            duration=account.duration,
            goodput=account.goodput,
            stderr=account.stderr,
            uptime=account.uptime,
            badput=account.badput(plan.chips_per_slice),
            outages=outages,
            stalls=stalls,
            events=events,
            capacity=tuple(map(tuple, self._capacity)) if self._keeps_capacity else (),
            batches=account.batches,
        )


# ── the failure trace ─────────────────────────────────────────────────────────────────────────────────────────────────


def draw_outages(
    slice_count: int, chips: int, mtbi_chip: Duration, return_time: Distribution, random: Random
) -> Iterator[Outage]:
    """Yield outages in time order, without end. A longer run begins with the same outages.

    Instants are whole microseconds, for the reason that ``distributions`` gives. Each outage draws the gap, then the slice,
    then the return time.
    """
    gap_mean_us = mtbi_chip / chips * 1e6
    chance, log, draw = random.random, math.log, return_time.draw
    now_us = 0
    while True:
        now_us += int(-log(1.0 - chance()) * gap_mean_us) + 1
        at = now_us / 1e6
        yield Outage(at, int(chance() * slice_count), at + draw(random))


# ── waiting in lock-step ──────────────────────────────────────────────────────────────────────────────────────────────


class LockStep:
    """Learners that wait for each other. ``serving`` is the number of slices of each at the start, or GONE."""

    def __init__(self, plan: FleetPlan, serving: Sequence[int]) -> None:
        factors = (*(plan.step_factors or (1.0,) * plan.learner_count), *(1.0,) * (len(serving) - plan.learner_count))
        slowest = max(factors)
        step_us = plan.step_s * slowest * 1e6
        streaming = plan.system is System.STREAMING_DILOCO
        fragments, overlap = (plan.fragments, plan.overlap_steps) if streaming else (1, 0)
        self._spacing = max(1, round(plan.interval_steps / fragments * step_us))
        self._overlap = round(overlap * step_us)
        self._pace = [factor / slowest for factor in factors]
        self._serving = list(serving)
        self._position = [0] * len(serving)
        self._now = 0
        self._waited = 0.0
        self._trained = 0

    def advance(self, changes: Iterable[tuple[Instant, int, int]], until: Instant) -> tuple[float, float]:
        """Advance to ``until``. ``changes`` are (at, learner, running slices or GONE) in time order.

        Returns the slice-seconds spent waiting and the seconds in which at least one learner trained, since the last call.
        """
        self._waited, self._trained = 0.0, 0
        for at, learner, slices in changes:
            self._flow(round(at * 1e6))
            if self._serving[learner] == GONE:
                if slices <= 0:
                    continue
                self._join(learner)
            self._serving[learner] = slices
        self._flow(round(until * 1e6))
        return self._waited / 1e6, self._trained / 1e6

    def _join(self, learner: int) -> None:
        """Start a new learner at the position of the furthest behind, so that none waits for steps it never did."""
        there = [p for p, slices in zip(self._position, self._serving, strict=True) if slices != GONE]
        self._position[learner] = min(there, default=self._position[learner])

    def _flow(self, until: int) -> None:
        """Let the learners run, or wait at a closed gate, with the slices that they have now.

        Each iteration takes the longest step in which no learner meets a closed gate. Running learners within τ of the last
        of them are stopped only by the gate in front of a stalled learner.
        """
        position, serving, pace = self._position, self._serving, self._pace
        runners = [learner for learner, slices in enumerate(serving) if slices > 0]
        standing = min((position[learner] for learner, slices in enumerate(serving) if slices == 0), default=None)
        last_gate = None if standing is None else self._gate(standing)
        full = sum([serving[learner] for learner in runners])
        while self._now < until and runners:
            places = [position[learner] for learner in runners]
            last = min(places)
            behind = last if standing is None else min(last, standing)
            gate = self._gate(behind)
            movers = [learner for learner in runners if position[learner] < gate]
            seconds = until - self._now
            if not movers:  # the learner furthest behind is stalled, so the gate stays closed
                self._waited += full * seconds
                break
            if max(places) - last > self._overlap:
                seconds = min(seconds, gate - self._overlap - behind, gate - max([position[m] for m in movers]))
            elif last_gate is not None:
                seconds = min(seconds, last_gate - max([position[m] for m in movers]))
            self._waited += (full - sum([serving[m] * pace[m] for m in movers])) * seconds
            self._trained += seconds
            for learner in movers:
                position[learner] += seconds
            self._now += seconds
        self._now = until

    def _gate(self, behind: int) -> int:
        """Return the first gate that is closed while a learner is at ``behind``."""
        return (behind // self._spacing + 1) * self._spacing + self._overlap


# ── the account ───────────────────────────────────────────────────────────────────────────────────────────────────────


class FleetAccount:
    """The time of a fleet by cause, in batches. The cause None is productive time."""

    def __init__(self) -> None:
        self._spent: list[Mapping[Cause | None, float]] = []
        self._up: list[Duration] = []
        self._seconds: list[Duration] = []

    def add(self, spent: Mapping[Cause | None, float], up: Duration, seconds: Duration) -> None:
        """Add a batch of ``seconds``: slice-seconds by cause, and the seconds in which a learner trained."""
        self._spent.append(spent)
        self._up.append(up)
        self._seconds.append(seconds)

    @property
    def batch_count(self) -> int:
        return len(self._spent)

    @property
    def duration(self) -> Duration:
        return math.fsum(self._seconds)

    @property
    def uptime(self) -> float:
        return math.fsum(self._up) / self.duration if self._seconds else math.nan

    @property
    def goodput(self) -> float:
        return self._of(None) / self._total if self._spent else math.nan

    @property
    def batches(self) -> tuple[float, ...]:
        """Goodput of each batch, 0 for a batch without any capacity."""
        return tuple((spent[None] / total if (total := math.fsum(spent.values())) else 0.0) for spent in self._spent)

    @property
    def stderr(self) -> float:
        """Standard error of the mean of equal batches, s/√n; NaN with fewer than two."""
        means = self.batches
        if len(means) < 2:
            return math.nan
        middle = math.fsum(means) / len(means)
        return math.sqrt(math.fsum((x - middle) ** 2 for x in means) / (len(means) - 1) / len(means))

    def badput(self, chips_per_slice: int) -> tuple[Badput, ...]:
        """Return every cause, including those that cost nothing."""
        return tuple(
            Badput(cause, self._of(cause) * chips_per_slice, self._of(cause) / self._total if self._spent else math.nan)
            for cause in Cause
        )

    @property
    def _total(self) -> float:
        return math.fsum(value for spent in self._spent for value in spent.values())

    def _of(self, cause: Cause | None) -> float:
        return math.fsum(spent.get(cause, 0.0) for spent in self._spent)


# ── the tape ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class LineSink(Protocol):
    """A receiver of blocks of encoded lines. ``count`` is the number of the last record in a block."""

    def append_lines(self, lines: bytes, count: int) -> None: ...


def fleet_header(plan: FleetPlan, seed: int) -> FleetHeader:
    return FleetHeader(f"fleet-{plan.system}-{seed}", plan.policy(), plan.plain(), seed)


class FleetTape:
    """Collects records and passes them on in blocks. Call ``flush`` at the end."""

    def __init__(self, plan: FleetPlan, sink: LineSink) -> None:
        learner_count = plan.policy().learner_count
        self.count = 0
        self._sink = sink
        self._lines: list[str] = []
        self._after_await = _stalls(learner_count, ",")
        self._alone = _stalls(learner_count, "")

    def failed(self, at: Instant, index: int, decided: int, learner: int) -> None:
        self.count = n = self.count + 1
        begin = f'{{"n":{n},"event":{{"type":"SliceFailed","at":{at!r},"slice":{index}}},"effects":['
        if decided & AWAIT:
            stall = self._after_await[decided & _STALL][learner]
            self._lines.append(f'{begin}{{"type":"AwaitSlice","slice":{index}}}{stall}]}}\n')
        else:
            self._lines.append(f"{begin}{self._alone[decided & _STALL][learner]}]}}\n")
        if not n & _BLOCK_MASK:
            self.flush()

    def returned(self, at: Instant, index: int, decided: int, learner: int) -> None:
        self.count = n = self.count + 1
        stall = self._alone[decided & _STALL][learner]
        self._lines.append(
            f'{{"n":{n},"event":{{"type":"SliceReturned","at":{at!r},"slice":{index}}},"effects":[{stall}]}}\n'
        )
        if not n & _BLOCK_MASK:
            self.flush()

    def ended(self, at: Instant, learner: int) -> None:
        self.count = n = self.count + 1
        self._lines.append(
            f'{{"n":{n},"event":{{"type":"StallEnded","at":{at!r},"learner":{learner}}},"effects":[]}}\n'
        )
        if not n & _BLOCK_MASK:
            self.flush()

    def visited(self, at: Instant, block: int, decided: int, learner: int, *, arrived: bool) -> None:
        kind = "BlockArrived" if arrived else "BlockLeft"
        stall = self._alone[decided & _STALL][learner]
        self.count += 1
        self._lines.append(
            f'{{"n":{self.count},"event":{{"type":"{kind}","at":{at!r},"block":{block}}},"effects":[{stall}]}}\n'
        )

    def flush(self) -> None:
        """Pass on the collected records. Safe to call at any time."""
        if self._lines:
            self._sink.append_lines("".join(self._lines).encode(), self.count)
            self._lines.clear()


def _stalls(learner_count: int, separator: str) -> dict[int, list[str]]:
    """Return the effect that begins a stall, by code and learner, and an empty text for no stall."""
    begun = {
        code: [f'{separator}{{"type":"BeginStall","learner":{n},"stall":"{stall}"}}' for n in range(learner_count)]
        for code, stall in STALLS.items()
    }
    return {NOTHING: [""] * learner_count, **begun}
