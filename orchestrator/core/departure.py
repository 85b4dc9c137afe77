"""The handlers of a notice: an island's node is about to go, as spot machines, queues of clusters and maintenance have it.

    TRAINING ──notice──▶ DRAINING ──all its work is merged, or its node goes in a moment──▶ LOST ──▶ PLACING, elsewhere
    placing, starting, catching up, standing by ──notice──▶ LOST ──▶ PLACING, elsewhere        (nothing to give)

As in a drain, the island ends its step, offers what it has, and ends when versions hold it. It stays wanted, though, so that
its next incarnation is placed as soon as the drain is over, as the process of a standby where there is one. No failure is
counted, and no back-off waited for: the machine goes, nothing is wrong with the island. Nobody asks whether a quorum is
left, for the node goes in any case.

Where the notice is shorter than a round, the island's time ends before a version holds its work. What it has offered is
held by the synchroniser by then, and is merged when its round closes. Refuses to know which nodes there are: who places
the next incarnation keeps it off those that go.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import island_record
from orchestrator.core.effects import DrainIsland, Effect, SetTimer
from orchestrator.core.events import NoticeReceived
from orchestrator.core.fragment_life import advance_all
from orchestrator.core.island_record import Island
from orchestrator.core.state import JobState
from orchestrator.core.vocabulary import Instant, IslandState, JobPhase

MARGIN_S = 2.0
"""Its process is ended so long before the node goes, at the latest: its next incarnation need not wait for a loss."""
SHARE_MAX = 0.5
"""Of a notice, which the margin may take: one of a second still leaves half of that to give the work in."""


def noticed(state: JobState, island: Island, event: NoticeReceived) -> list[Effect]:
    """Have the island give its work and go; at once where it has none. Said again, it changes nothing."""
    if state.phase is not JobPhase.RUNNING:
        return []  # it gives what it has in any case, and is not placed again
    suspect = island.state is IslandState.SUSPECT
    answering = island.state_before_suspect if suspect else island.state
    reason = event.cause if event.seconds is None else f"{event.cause}: its node goes in {event.seconds:.0f} s"
    if answering is IslandState.DRAINING:
        return []
    if answering is not IslandState.TRAINING or island.flushed:
        return depart(state, island, reason, event.at)
    if suspect:  # it drains as soon as it answers
        state.islands[island.id] = replace(island, state_before_suspect=IslandState.DRAINING)
        return []
    serial = state.next_serial()
    state.islands[island.id] = island_record.handing_over(island, f"{reason}; its work is to be merged", serial)
    timer = (
        [SetTimer(island_record.departure_timer(island), serial, _ends_at(event))] if event.seconds is not None else []
    )
    return [DrainIsland(island.id, island.incarnation), *timer, *advance_all(state, event.at)]


def time_is_up(state: JobState, island: Island, now: Instant) -> list[Effect]:
    """The node goes in a moment, and versions do not hold all the work yet."""
    if island.state is not IslandState.DRAINING or not island.wanted:
        return []
    return depart(state, island, "its node goes before all its work is merged", now)


def depart(state: JobState, island: Island, reason: str, now: Instant) -> list[Effect]:
    """End the incarnation; the next one is placed by a timer of no length, or at once by a standby."""
    after, effects = island_record.depart(island, reason, now, state.next_serial())
    state.islands[island.id] = after
    return [*effects, *advance_all(state, now)]


def _ends_at(event: NoticeReceived) -> Instant:
    seconds = max(0.0, event.seconds or 0.0)
    return event.at + seconds - min(MARGIN_S, SHARE_MAX * seconds)
