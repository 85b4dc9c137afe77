"""Injection of planned faults into the simulated world."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from orchestrator.core import commands, faults
from orchestrator.core import events as e
from orchestrator.core.effects import FinishJob
from orchestrator.core.faults import LinkFault, fault_of
from orchestrator.core.messages import Overdue
from orchestrator.core.vocabulary import CommandId, Duration, Instant, IslandId, JobPolicy, NodeGroupId
from orchestrator.simulation.island import Clock, Host, Listener, Processes
from orchestrator.simulation.links import Links
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan

_OPERATOR = "operator"
_SERVICE = "service"
REPORTED_AT = (0.25, 0.5, 1.0, 2.0)
"""Of its limit a step has passed when it is reported."""


class FaultInjectionWorld(Clock, Listener, Processes, Protocol):
    """The part of a simulated world that faults are injected into."""

    policy: JobPolicy
    plan: WorldPlan
    finished: FinishJob | None

    @property
    def links(self) -> Links: ...


def inject(world: FaultInjectionWorld, fault: Fault) -> None:
    """Inject a fault into the newest process of its island."""
    if world.finished is not None:
        return
    command = CommandId(f"{fault.kind}-{fault.island}-{fault.at!r}")
    host = world.latest(fault.island)
    match fault.kind:
        case FaultKind.KILL:
            world.tell(e.CommandRequested(world.now, command, _OPERATOR, commands.Kill(fault.island, True)))
        case FaultKind.KILL_AND_KEEP_AWAY:
            world.tell(e.CommandRequested(world.now, command, _OPERATOR, commands.Kill(fault.island, False)))
        case FaultKind.DRAIN:
            world.tell(e.CommandRequested(world.now, command, _OPERATOR, commands.Drain(fault.island)))
        case FaultKind.CORDON:
            world.tell(e.CommandRequested(world.now, command, _OPERATOR, commands.Cordon(_node_group(world, fault))))
        case FaultKind.UNCORDON:
            world.tell(e.CommandRequested(world.now, command, _OPERATOR, commands.Uncordon(_node_group(world, fault))))
        case FaultKind.SCALE:
            group = _node_group(world, fault)
            world.tell(e.CommandRequested(world.now, command, _OPERATOR, commands.Scale(group, fault.count)))
        case FaultKind.READD:
            world.tell(e.CommandRequested(world.now, command, _OPERATOR, commands.Readd(fault.island)))
        case FaultKind.CANCEL:
            world.tell(e.CommandRequested(world.now, command, _OPERATOR, commands.Cancel()))
        case FaultKind.FINISH:
            world.tell(e.CommandRequested(world.now, command, _OPERATOR, commands.Finish()))
        case FaultKind.PAUSE:
            world.tell(e.CommandRequested(world.now, command, _SERVICE, commands.Pause("the job has cost its limit")))
        case FaultKind.CONTINUE:
            world.tell(e.CommandRequested(world.now, command, _SERVICE, commands.Continue("the limit is raised")))
        case FaultKind.CRASH:
            if host is not None and host.placed:
                world.die(host, "the process crashed", announced=True)
        case FaultKind.DIVERGE | FaultKind.EXPLODE:
            if host is not None and host.alive:
                host.process.diverged |= fault.kind is FaultKind.DIVERGE
                host.process.exploded |= fault.kind is FaultKind.EXPLODE
        case FaultKind.HANG:
            if host is not None and host.alive and host.placed:
                _hang(world, host, fault)
        case FaultKind.NOTICE:
            if host is not None and host.alive and host.placed:
                _give_notice(world, host, fault)
        case FaultKind.FREEZE | FaultKind.CUT:
            if host is not None and host.alive and host.placed:
                _silence(world, host, fault)
        case FaultKind.SLOW | FaultKind.CORRUPT | FaultKind.DELAY | FaultKind.DROP:
            if host is not None:
                host.impairment.inject(_link_fault(fault), world.now)


def simulated_fault(at: Instant, island: IslandId, fault: faults.Fault) -> Fault:
    """Return how the simulated world does a fault of chaos. Raises ValueError for one that is of no island."""
    match fault:
        case faults.Kill():
            return Fault(at, FaultKind.KILL, island)
        case faults.Stop():
            return Fault(at, FaultKind.FREEZE, island, fault.duration_s)
        case faults.KillNode() | faults.KillHost():
            return Fault(at, FaultKind.CRASH, island)
        case faults.Cut() | faults.Slow() | faults.Corrupt() | faults.Delay() | faults.Drop():
            form = faults.flat(fault)
            return Fault(at, FaultKind(form.kind), island, form.duration, form.payloads, form.bytes_per_second)
        case faults.Continue() | faults.KillSynchroniser() | faults.KillApi():
            raise ValueError(f"a simulated world does not know {fault.kind}")


def _link_fault(fault: Fault) -> LinkFault:
    injected = fault_of(fault.kind, fault.island, fault.duration, fault.bytes_per_second, fault.count)
    assert isinstance(injected, LinkFault)
    return injected


def _node_group(world: FaultInjectionWorld, fault: Fault) -> NodeGroupId:
    return next(plan.node_group for plan in world.policy.islands if plan.island == fault.island)


def _give_notice(world: FaultInjectionWorld, host: Host, fault: Fault) -> None:
    """The process hears nothing of it, the synchroniser does; what is left of it then dies with its node."""
    process = host.process
    cause = "its machine is taken back"
    world.tell(e.NoticeReceived(world.now, process.island, process.incarnation, cause, fault.duration))
    world.later(fault.duration, lambda: world.die(host, "its node is gone", announced=True))


def _hang(world: FaultInjectionWorld, host: Host, fault: Fault) -> None:
    """Its step does not end, and its watch reports that as a live one's does (``learners.step_watch``)."""
    until = host.hung_until = max(host.hung_until, world.now + fault.duration)
    usual_s = host.step_s
    if (limit_s := world.policy.step_limits.limit(usual_s)) is None:
        return

    def report(seconds: Duration) -> None:
        if host.alive and host.process.stepping and host.hung_until == until and world.now < until:
            host.post([Overdue(seconds, usual_s)])
            world.links.carry(host)

    for ratio in REPORTED_AT:
        world.later(ratio * limit_s, partial(report, ratio * limit_s))


def _silence(world: FaultInjectionWorld, host: Host, fault: Fault) -> None:
    """Nothing gets through for a while; after ``silence_s`` of that the connection counts as lost."""
    until = world.now + fault.duration
    if fault.kind is FaultKind.FREEZE:
        host.frozen_until = max(host.frozen_until, until)
    else:
        host.cut_until = max(host.cut_until, until)
    process = host.process

    def suspect() -> None:
        if host.alive and host.silent(world.now) and not host.suspected:
            host.suspected = True
            world.tell(e.ConnectionLost(world.now, process.island, process.incarnation, False, f"{fault.kind}"))

    def back() -> None:
        if host.silent(world.now):
            return  # a longer silence began meanwhile, and ends later
        if host.suspected and host.alive:
            host.suspected = False
            world.tell(e.ConnectionRestored(world.now, process.island, process.incarnation))
        calls, host.waiting = host.waiting, []
        for call in calls:
            if host.alive:
                call()
        world.links.carry(host)

    world.while_alive(world.plan.silence_s, suspect)
    world.later(fault.duration, back)
