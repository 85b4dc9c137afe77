"""Invariants of the core's state after every event, checked by tests, the simulator and the live driver.

Each check is a sentence about the state alone. Sentences about histories (versions rise by one, every payload is held or
released) are checked over tapes, by the accounting folds and the property tests. The invariants of an island's fields are
stated with the fields (``core.island_record``) and checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from orchestrator.core.island_record import PLACED, WITH_PROCESS, CurrentIncarnation, Island
from orchestrator.core.state import JobState
from orchestrator.core.vocabulary import Incarnation, IslandId, IslandState, JobPhase, RoundPhase
from orchestrator.errors import InternalError

_READY = frozenset({IslandState.CATCHING_UP, IslandState.TRAINING, IslandState.STANDBY, IslandState.DRAINING})
_GIVEN_UP = frozenset({IslandState.FAILED, IslandState.STOPPED})
_NEVER_PLACED = Incarnation(0)


def check(state: JobState, checked: dict[IslandId, Island] | None = None) -> None:
    """Raise InternalError with every invariant that does not hold.

    ``checked`` holds the island records that an earlier call found sound, and receives those of this one. They are not
    checked again: a record is frozen, and whatever else its invariants mention never goes back (versions, incarnations and
    serials only rise). That keeps a check after every event cheap for a job of many islands.
    """
    if broken := list(_broken(state, {} if checked is None else checked)):
        raise InternalError(detail="Invariants do not hold: " + "; ".join(broken) + ".")
    if checked is not None:
        checked.update(state.islands)


def _broken(state: JobState, checked: Mapping[IslandId, Island]) -> Iterator[str]:
    yield from _broken_rounds(state)
    for name, island in state.islands.items():
        if checked.get(name) is island:
            continue
        if name != island.id:
            yield f"the record of {island.id} is kept as that of {name}"
        for sentence in (*_broken_island(state, island), *_broken_incarnation(state, island, island.current)):
            yield f"{island.id} {sentence}"
    if state.phase is JobPhase.FINISHED and any(i.state in WITH_PROCESS for i in state.islands.values()):
        yield "an island has a process after the job has ended"


def _broken_rounds(state: JobState) -> Iterator[str]:
    for r in state.rounds:
        least = 1 if state.policy.leaving_closes else state.quorum_least  # fewer may merge when all islands leave
        if r.phase is RoundPhase.MERGING and len(r.offered) < least and not r.restoring:
            yield f"fragment {r.fragment} merges {len(r.offered)} contributions below the quorum {least}"
        for island_id, c in r.offered.items():
            if c.island != island_id or c.fragment != r.fragment:
                yield f"payload {c.payload} is in the wrong round or under the wrong island"
            if c.base_version > r.version:
                yield f"payload {c.payload} builds on version {c.base_version} of a fragment at {r.version}"
            if r.version - c.base_version > state.policy.staleness_max:
                yield f"payload {c.payload} is staler than staleness_max"
            island = state.islands[island_id]
            latest = island.current.last_offer.get(r.fragment)
            if c.incarnation == island.incarnation and c.offer != latest:
                yield f"payload {c.payload} is in a round, but the latest offer of {island_id} is {latest}"
        if state.phase is JobPhase.FINISHED and r.offered:
            yield f"fragment {r.fragment} holds payloads after the job has ended"


def _broken_island(state: JobState, island: Island) -> Iterator[str]:
    now, policy = island.state, state.policy
    if now in WITH_PROCESS and island.incarnation == _NEVER_PLACED:
        yield f"is {now} but was never placed"
    if not state.seeded and island.live:
        yield "trains before there are parameters"
    if (now is IslandState.LOST or now is IslandState.CORDONED) and not island.wanted:
        yield f"is {now}, and would be placed, but is not wanted"
    if now is IslandState.DRAINED and island.wanted:
        yield "has drained but is wanted"
    if island.incarnation <= 1 and (island.steps_before or island.tokens_before):
        yield "has totals of earlier incarnations but had none"
    if min(island.step, island.steps_before, island.tokens_before) < 0:
        yield "has a negative step or total"
    counted = island.counted
    if counted.incarnation and counted.incarnation >= island.incarnation:
        yield f"counts incarnation {counted.incarnation} among the earlier ones"
    if counted.steps > island.steps_before or counted.tokens > island.tokens_before:
        yield f"has totals of earlier incarnations without those of {counted.incarnation}"
    if now not in _GIVEN_UP:
        if island.failures > policy.restarts_max:
            yield f"is {now} after {island.failures} failures in a row"
        if island.quarantines > policy.health.quarantines_max:
            yield f"is {now} after {island.quarantines} quarantines"
    if island.incarnation and island.incarnation < island.incarnations_lost:
        yield f"is incarnation {island.incarnation}, but a lost tape has {island.incarnations_lost}"
    if island.survivor is not None and island.survivor.incarnation != max(
        island.incarnation, island.incarnations_lost + (0 if island.incarnation else 1)
    ):
        yield f"awaits incarnation {island.survivor.incarnation}, which is over"
    if island.saved and (island.incarnation > 1 or state.tokens_before is None):
        yield "counts on a checkpoint that its first incarnation used, or that the job does not continue"


def _broken_incarnation(state: JobState, island: Island, current: CurrentIncarnation) -> Iterator[str]:
    now = island.state
    if current.pid is not None and now not in PLACED:
        yield f"is {now} but has a process"
    if now in _READY and not current.ready:
        yield f"is {now} before it is ready"
    if current.left is not None and not current.ready:
        yield "was left a state before it is ready"
    if current.overdue_s and not current.ready:
        yield "hangs in a step before it is ready"
    if (current.state_before_suspect is not None) != (now is IslandState.SUSPECT):
        yield f"is {now} but was {current.state_before_suspect} before a suspicion"
    if current.timer_serial > state.latest_serial:
        yield f"waits for timer {current.timer_serial}, which was never set"
    if not current.timer_serial and (now is IslandState.SUSPECT or (now is IslandState.LOST and island.incarnation)):
        yield f"is {now}, and no timer ends that"
    if current.process is not None:
        standby, incarnation = current.process
        if island.id in state.standbys or standby not in state.standbys:
            yield f"took over the process of {standby}"
        elif state.islands[standby].incarnation <= incarnation:
            yield f"took over a process that {standby} still has"
    if len(set(current.donors)) < len(current.donors) or not current.failed_donors.isdisjoint(current.donors):
        yield f"takes a state from {', '.join(current.donors)}, of which one is named twice or has failed"
    if current.failed_donors and (now is IslandState.TRAINING or now is IslandState.STANDBY):
        yield f"is {now} but remembers donors that failed"
    if current.merged_into:
        if current.merged_into.keys() != current.merged_offer.keys():
            yield "has merged work of which the version or the offer is unknown"
        for fragment, version in current.merged_into.items():
            if version > state.rounds[fragment].version:
                yield "was merged into a version that does not exist"
            offer = current.merged_offer.get(fragment, 0)
            if isinstance(offer, int) and offer > current.last_offer.get(fragment, 0):
                yield f"has offer {offer} of fragment {fragment} merged, which was never admitted"
    for fragment, (version, _) in current.behind.items():
        if version > state.rounds[fragment].version:
            yield f"lacks version {version} of fragment {fragment}, which does not exist"
    if current.strikes:
        yield from _broken_strikes(state, island, current)


def _broken_strikes(state: JobState, island: Island, current: CurrentIncarnation) -> Iterator[str]:
    if not island.health_note:
        yield "has strikes without a note of what was wrong"
    if not current.strikes.keys() <= current.struck_offer.keys():
        yield "has strikes without the offers that were bad"
    highest = state.policy.health.strikes_max - 1 if island.state in WITH_PROCESS else None
    for fragment, count in current.strikes.items():
        if count < 1 or (highest is not None and count > highest):
            yield f"has {count} strikes for fragment {fragment} while it is {island.state}"
