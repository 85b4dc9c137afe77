"""Closed forms of goodput: a second opinion on the simulator, and what the calibration fits.

    λ = N/(M·MTBI)      interruptions per second of one learner (N chips, M learners)
    R, D, U             mean restart, stall to shrink, stall to grow
    x = c·T/MTBI        c chips per slice, T mean return time: the part of slices that would be away if nothing absorbed
    u                   the part of time in which a learner runs; goodput is u less what is away

    no elasticity       absorbed: u = 1/(1 + λR)         restarts: u = e^(−λR)
    elastic, absorbed   u = 1/(1 + λ(D + uU)),            goodput u·(1 − u·x)

All are renewal arguments. A learner that runs is interrupted at rate λ. Absorbed: a stall lasts D whatever happens in it,
and slices are lost at rate λu only; each returns once, finds the learner running with probability u, and then costs U. Hence
(1 − u)/u = λ(D + uU), and u·x of the slices are away.

They apply within 0.5 pp where tests/simulation/test_oracles.py says so. They leave out, and do not apply where it matters:

* slices that are away cannot fail, so the true rate is λ(1 − u·x): less than 0.2 pp at x = 0.015, but 1 pp at x = 0.1;
* a return's instant is taken as independent of the learner's state. A return time as short as a stall is not (at T < D every
  slice returns during the stall it caused, and costs no U), so T ≫ D + U is needed;
* a learner of very few slices, whose capacity may reach 0;
* waiting: DiLoCo's goodput is that of a maximum of M sums of stalls and has no simple form. Its limits have: without any
  slack (τ = 0, s → 0) all must run at once, u^M·(1 − u·x); with unlimited slack it is decoupled's.

The form of u with restarts in ``elastic_running`` counts the time since the last failure and the last return as two
independent ages, one exact (failures strike always), one nearly.
"""

from __future__ import annotations

import math

from orchestrator.core.vocabulary import Duration
from orchestrator.elastic.jobs import DuringStall
from orchestrator.simulation.fleet import FleetPlan, System

_ROUNDS = 60
"""Halvings of an interval of length 1: well below a float's last bit."""


def no_elasticity(rate: float, restart: Duration, during: DuringStall = DuringStall.ABSORBED) -> float:
    """Goodput of a job that any failure stalls for ``restart``. Absorbed and joining are one when no slice is given up."""
    return math.exp(-rate * restart) if during is DuringStall.RESTARTS else 1.0 / (1.0 + rate * restart)


def elastic_running(
    rate: float,
    down: Duration,
    up: Duration,
    during: DuringStall = DuringStall.ABSORBED,
    returns_join: bool = True,
) -> float:
    """u: the part of time in which an elastic learner runs. It falls in u on the right-hand side, so u is found by halving.

    With a = losses per second (λu absorbed, else λ), which in the long run are also the returns per second, and s, g the
    mean length of a stall that a failure or a return begins: (1 − u)/u = λ·s + a·g.
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
    """Mean lengths of stalls begun by a failure and by a return, when what arrives during one may begin it anew.

    f and r are the rates at which failures and returns begin it anew (0 where they do not). A stall of d seconds is passed
    undisturbed with probability e^(−(f+r)d); otherwise it goes on as one of the two, so with h = (1 − e^(−(f+r)d))/(f+r):
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
    """Goodput of an elastic learner; ``away`` is x."""
    u = elastic_running(rate, down, up, during, returns_join)
    lost = u * away if during is DuringStall.ABSORBED else away
    return u * (1.0 - lost)


def rate_of(plan: FleetPlan) -> float:
    """λ of one of the plan's learners."""
    return plan.chips / plan.learner_count / plan.mtbi_chip


def goodput(plan: FleetPlan) -> float:
    """What the closed form says of a plan without scavenged capacity; in lock-step, the bound without waits."""
    rate = rate_of(plan)
    if plan.system is System.DATA_PARALLEL:
        return no_elasticity(rate, plan.restart.mean, plan.during_stall)
    away = plan.chips_per_slice * plan.return_time.mean / plan.mtbi_chip
    return elastic(rate, plan.stall_down.mean, plan.stall_up.mean, away, plan.during_stall, plan.returns_join)


def running(plan: FleetPlan) -> float:
    """u of one of the plan's learners."""
    if plan.system is System.DATA_PARALLEL:
        return goodput(plan)
    return elastic_running(
        rate_of(plan), plan.stall_down.mean, plan.stall_up.mean, plan.during_stall, plan.returns_join
    )


def duration_for(plan: FleetPlan, stderr: float) -> Duration:
    """How long to simulate so that goodput's standard error is about ``stderr``.

    An alternating renewal process with exponential running times and fixed stalls has, after n cycles, a relative running
    time with standard error u(1 − u)/√n; n counts the stalls of all learners, at least those of failures: λMu a second.
    """
    u = running(plan)
    cycles = (u * (1.0 - u) / stderr) ** 2
    return cycles / (rate_of(plan) * plan.learner_count * u)
