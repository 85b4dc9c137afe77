"""Runs a fleet: months of failures, stalls and returns, in virtual time, under one system.

    world = FleetWorld(plan, seed);  for done in world.batches(): …;  world.outcome()        or        simulate(plan, seed)

Responsible for: when things happen (``elastic.jobs`` decides what then follows), and for chip-seconds by what they were
spent on, batch by batch. What ``outcome`` says is always about whole batches, so a run may be broken off at any time.
Refuses to know: steps and merges; how systems in lock-step wait is ``lock_step``'s.

The failure trace has its own chance (``seed`` alone decides it), so all systems see the same one; the length of stalls is
drawn from another. At one instant: slices' returns and ends of stalls before the next failure, in the order they were asked
for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from random import Random

from orchestrator.core.vocabulary import Instant
from orchestrator.elastic.jobs import AWAIT, GROW, RESTART, SHRINK, ElasticJobs
from orchestrator.simulation.fleet import LOCK_STEP, Cause, FleetOutcome, FleetPlan, System
from orchestrator.simulation.fleet_account import FleetAccount
from orchestrator.simulation.fleet_tape import FleetTape
from orchestrator.simulation.lock_step import GONE, LockStep
from orchestrator.simulation.outages import Outage, draw_outages

BATCHES = 64
"""Parts of equal length whose means give the standard error: enough for it to be known to about 9 %."""

_RETURN, _END, _ARRIVE, _LEAVE = range(4)
_NEVER = float("inf")
_STALL = SHRINK | GROW | RESTART


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
        """Simulate one batch after the other; yields which part of the plan's duration is done."""
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
        """Everything before ``end``: slice-seconds by cause (None: productive) and seconds with somebody running.

        The loop is flat, and integrates only when the totals change: this is where a simulation's time goes.
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
                        continue  # begun anew meanwhile, or its learner has left
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
        """Scavenged capacity's comings and goings are known beforehand."""
        self._scheduled_count += 1
        heappush(self._heap, (at, self._scheduled_count, kind, index))

    def _visit(self, at: Instant, kind: int, block: int) -> tuple[int, int]:
        """Scavenged slices arrive or leave: what was decided, and for which learner."""
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
        """Slice-seconds of capacity that this system cannot use."""
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
        """About the whole batches so far."""
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


def simulate(plan: FleetPlan, seed: int, *, keep_capacity: bool = False) -> FleetOutcome:
    """The whole of the plan, without a tape."""
    world = FleetWorld(plan, seed, keep_capacity=keep_capacity)
    for _ in world.batches():
        pass
    return world.outcome()
