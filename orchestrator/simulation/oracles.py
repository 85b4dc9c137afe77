"""Closed forms of goodput: an independent check of the simulator, and the model that the calibration fits.

    λ = N/(M·MTBI)      interruptions per second of one learner (N chips, M learners)
    R, D, U             mean restart, stall to shrink, stall to grow
    x = c·T/MTBI        c chips per slice, T mean return time: the part of slices that would be away if stalls absorbed none
    u                   the part of the time in which a learner runs; goodput is u less the slices that are away

    no elasticity       absorbed: u = 1/(1 + λR)         restarts: u = e^(−λR)
    elastic, absorbed   u = 1/(1 + λ(D + uU)),            goodput u·(1 − u·x)

All are renewal arguments. A running learner is interrupted at rate λ. If failures are absorbed, a stall lasts D whatever
happens in it, and slices are lost only at rate λu. Each returns once, finds the learner running with probability u, and then
costs U. Hence (1 − u)/u = λ(D + uU), and u·x of the slices are away.

They hold within 0.5 pp where tests/simulation/test_oracles.py says so. They leave out the following, and do not apply where
it matters:

* Slices that are away cannot fail, so the true rate is λ(1 − u·x): less than 0.2 pp at x = 0.015, but 1 pp at x = 0.1.
* The instant of a return is assumed independent of the learner's state. That fails if the return time is as short as a stall
  (at T < D every slice returns during the stall that it caused, and costs no U), so T ≫ D + U is needed.
* The capacity of a learner with very few slices may reach 0.
* Waiting: DiLoCo's goodput is that of a maximum of M sums of stalls and has no simple form. Its limits have: without any
  slack (τ = 0, s → 0) all must run at once, u^M·(1 − u·x); with unlimited slack it equals decoupled's.

The form of u with restarts in ``elastic_running`` treats the times since the last failure and the last return as two
independent ages. The first is exact (failures always occur), the second nearly.
"""

from __future__ import annotations

import math

from orchestrator.core.vocabulary import Duration
from orchestrator.elastic import DuringStall
from orchestrator.simulation.fleet import FleetPlan, System

_ROUNDS = 60
"""The number of bisections of an interval of length 1: enough for the last bit of a float."""


def no_elasticity(rate: float, restart: Duration, during: DuringStall = DuringStall.ABSORBED) -> float:
    """Return the goodput of a job that any failure stalls for ``restart``. Absorbing and joining do not differ here."""
    return math.exp(-rate * restart) if during is DuringStall.RESTARTS else 1.0 / (1.0 + rate * restart)


def elastic_running(
    rate: float,
    down: Duration,
    up: Duration,
    during: DuringStall = DuringStall.ABSORBED,
    returns_join: bool = True,
) -> float:
    """Return u, the part of the time in which an elastic learner runs, by bisection.

    With a = losses per second (λu if absorbed, else λ), which in the long run equal the returns per second, and s, g the
    mean length of a stall begun by a failure or a return: (1 − u)/u = λ·s + a·g. The right-hand side depends on u.
    """
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        u = (low + high) / 2.0
        losses = rate * u if during is DuringStall.ABSORBED else rate
        shrinking, growing = _stall_lengths(rate, losses, down, up, during, returns_join)
        low, high = (u, high) if u * (1.0 + rate * shrinking + losses * growing) < 1.0 else (low, u)
    return low


def _stall_lengths(
    rate: float, losses: float, down: Duration, up: Duration, during: DuringStall, returns_join: bool
) -> tuple[Duration, Duration]:
    """Return the mean lengths of stalls begun by a failure and by a return, if further events may begin a stall anew.

    f and r are the rates at which failures and returns begin it anew (0 if they do not). A stall of d seconds passes
    undisturbed with probability e^(−(f+r)d) and otherwise continues as one of the two. With h = (1 − e^(−(f+r)d))/(f+r):
    S = h_D·(1 + f·S + r·G) and G = h_U·(1 + f·S + r·G).
    """
    f = rate if during is DuringStall.RESTARTS else 0.0
    r = 0.0 if returns_join else losses
    if f + r == 0.0:
        return down, up
    undisturbed_down, undisturbed_up = (-math.expm1(-(f + r) * length) / (f + r) for length in (down, up))
    whole = 1.0 / (1.0 - f * undisturbed_down - r * undisturbed_up)  # 1 + f·S + r·G
    return undisturbed_down * whole, undisturbed_up * whole


def elastic(
    rate: float,
    down: Duration,
    up: Duration,
    away: float,
    during: DuringStall = DuringStall.ABSORBED,
    returns_join: bool = True,
) -> float:
    """Return the goodput of an elastic learner. ``away`` is x."""
    u = elastic_running(rate, down, up, during, returns_join)
    lost = u * away if during is DuringStall.ABSORBED else away
    return u * (1.0 - lost)


def rate_of(plan: FleetPlan) -> float:
    """Return λ of one of the plan's learners."""
    return plan.chips / plan.learner_count / plan.mtbi_chip


def goodput(plan: FleetPlan) -> float:
    """Return the closed-form goodput of a plan without scavenged capacity. In lock-step it is a bound without waits."""
    rate = rate_of(plan)
    if plan.system is System.DATA_PARALLEL:
        return no_elasticity(rate, plan.restart.mean, plan.during_stall)
    away = plan.chips_per_slice * plan.return_time.mean / plan.mtbi_chip
    return elastic(rate, plan.stall_down.mean, plan.stall_up.mean, away, plan.during_stall, plan.returns_join)


def running(plan: FleetPlan) -> float:
    """Return u of one of the plan's learners."""
    if plan.system is System.DATA_PARALLEL:
        return goodput(plan)
    return elastic_running(
        rate_of(plan), plan.stall_down.mean, plan.stall_up.mean, plan.during_stall, plan.returns_join
    )


def duration_for(plan: FleetPlan, stderr: float) -> Duration:
    """Return how long to simulate for a standard error of goodput of about ``stderr``.

    After n cycles of an alternating renewal process with exponential running times and fixed stalls, the relative running
    time has the standard error u(1 − u)/√n. n counts the stalls of all learners, at least those of failures: λMu per second.
    """
    u = running(plan)
    cycles = (u * (1.0 - u) / stderr) ** 2
    return cycles / (rate_of(plan) * plan.learner_count * u)
