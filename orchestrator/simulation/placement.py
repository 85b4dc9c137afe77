"""Placement of islands in the simulated world: a process is made for each, or taken from a standby, and ended."""

from __future__ import annotations

from typing import Protocol

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Ready
from orchestrator.core.vocabulary import Incarnation, IslandId, JobPolicy
from orchestrator.simulation.island import Clock, Host, Listener, Odds, Processes, SimulatedIsland
from orchestrator.simulation.links import Links


class PlacementWorld(Clock, Odds, Listener, Processes, Protocol):
    """Where processes are made and ended."""

    policy: JobPolicy
    tokens_per_step: dict[IslandId, int]

    @property
    def links(self) -> Links: ...

    def host_of(self, process: SimulatedIsland) -> Host: ...

    def answer(self, host: Host, event: e.Event) -> None:
        """Tell the synchroniser what came of placing."""


def place(world: PlacementWorld, effect: f.PlaceIsland) -> None:
    """A process is made, after a while, or there is no room for it; or a standby's is taken."""
    if effect.standby is not None:
        _take(world, effect, effect.standby)
        return
    tokens_per_step = world.tokens_per_step[effect.island]
    process = SimulatedIsland(
        effect.island,
        effect.incarnation,
        world.policy,
        tokens_per_step,
        world.plan.adoption,
        median_over=world.plan.median_over,
    )
    host = world.hosts[effect.island, effect.incarnation] = world.host_of(process)
    life = world.life(host)
    fails = world.chance(world.plan.placement_failure) or life.placement_fails

    def answer() -> None:
        if not host.alive:
            return
        if fails:
            host.alive = False
            reason = f"{effect.node_group} has no room"
            world.answer(host, e.PlacementFailed(world.now, effect.island, effect.incarnation, reason))
            return
        host.placed = True
        pid = 1000 + len(world.hosts)
        world.answer(host, e.IslandPlaced(world.now, effect.island, effect.incarnation, effect.node_group, pid))
        world.links.make_ready(host)

    world.later(world.draw(world.plan.place_s) if life.place_s is None else life.place_s, answer)


def _take(world: PlacementWorld, effect: f.PlaceIsland, standby: tuple[IslandId, Incarnation]) -> None:
    """The process has its new name at once, and answers to it once it can be reached; what the standby wrote is lost."""
    host = world.hosts[effect.island, effect.incarnation] = world.hosts.pop(standby)
    host.process.island, host.process.incarnation = effect.island, effect.incarnation
    host.process.tokens_per_step = world.tokens_per_step[effect.island]
    host.outbox.clear()
    host.suspected = False
    alive = host.alive

    def answer() -> None:
        pid = 1000 + len(world.hosts)
        world.unless_over(e.IslandPlaced(world.now, effect.island, effect.incarnation, effect.node_group, pid))
        host.post([Ready(1, 0.0)])
        world.links.carry(host)

    def gone() -> None:
        reason = f"the standby {standby[0]} is gone"
        world.unless_over(e.PlacementFailed(world.now, effect.island, effect.incarnation, reason))

    takes = world.draw(world.plan.letter_s)
    world.later(takes, (lambda: world.reach(host, answer)) if alive else gone)


def end(world: PlacementWorld, effect: f.KillIsland | f.StopIsland) -> None:
    """The process is ended once it can be reached; only of one that was killed is its end heard."""
    host = world.hosts.get((effect.island, effect.incarnation))
    if host is None:
        return
    if isinstance(effect, f.StopIsland):
        world.reach(host, lambda: world.die(host, effect.reason, announced=False))
    elif (takes := world.draw(world.plan.kill_s)) > 0.0:
        world.later(takes, lambda: world.reach(host, lambda: world.die(host, effect.reason, announced=True)))
    else:
        world.reach(host, lambda: world.die(host, effect.reason, announced=True))
