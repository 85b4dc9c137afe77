"""The cost of waiting for each other: DiLoCo and Streaming DiLoCo laid over learners that stall on their own.

    position p_m    inner steps learner m has done          synchronisation points at k·s, s = H (diloco) or H/P (streaming)
    gate k          stands at k·s + τ; nobody passes it before everybody has reached k·s

so a learner may run as far as the first gate that is still closed, (⌊min p / s⌋ + 1)·s + τ. With τ = 0 and s = H this is
DiLoCo's barrier. While all run and nobody is more than τ ahead, no gate ever stops anybody, and the time until the next
stall is taken in one step; that makes months affordable.

Responsible for: slice-seconds spent waiting, and the seconds in which somebody trained. Refuses to know: why a learner
stands still. One that waits fails and stalls like one that computes. Steps' own spread is left to the protocol level. With
unequal speeds everybody goes at the slowest learner's pace, and waits for the rest of each step.

Positions and instants are whole microseconds, so that "has reached" needs no tolerance.

Source: DiLoCo, arXiv:2311.08105 (outer step every H); Streaming DiLoCo, arXiv:2501.18512 (fragments, overlap τ).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.core.vocabulary import Instant
from orchestrator.simulation.fleet import FleetPlan, System

GONE = -1
"""In place of a number of slices: nobody waits for this learner until it has slices that run again."""


class LockStep:
    """``serving``: at the beginning, slices of each learner, or GONE."""

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
        """Go on to ``until``. ``changes`` are (at, learner, slices that run or GONE) in time order.

        Returns slice-seconds spent waiting and seconds in which at least one learner trained, both since the last call.
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
        """A newcomer takes the state of whoever is furthest behind, so that nobody waits for what it never did."""
        there = [p for p, slices in zip(self._position, self._serving, strict=True) if slices != GONE]
        self._position[learner] = min(there, default=self._position[learner])

    def _flow(self, until: int) -> None:
        """Let everybody run, or wait at a closed gate, with the slices they have now.

        Takes the longest step in which nobody meets a gate that is closed then. Runners within τ of the last of them are
        stopped only by the gate in front of whoever stands still.
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
            if not movers:  # whoever is behind stands still, and the gate stays closed
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
        """The first gate that is closed while somebody is at ``behind``."""
        return (behind // self._spacing + 1) * self._spacing + self._overlap
