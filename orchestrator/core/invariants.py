"""Invariants of the core's state after every event, checked by tests, the simulator and, cheaply, the live driver.

Each check is a sentence about the state alone; sentences about histories (versions rise by one, every payload is held or
released) are checked over tapes, by the accounting folds and the property tests.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.core.island_record import WITH_PROCESS
from orchestrator.core.state import JobState
from orchestrator.core.vocabulary import JobPhase, RoundPhase
from orchestrator.errors import InternalError


def check(state: JobState) -> None:
    """Raise InternalError with every sentence that does not hold."""
    if broken := list(_broken(state)):
        raise InternalError(detail="Invariants do not hold: " + "; ".join(broken) + ".")


def _broken(state: JobState) -> Iterator[str]:
    for r in state.rounds:
        if r.phase is RoundPhase.MERGING and len(r.offered) < state.policy.quorum and not r.restoring:
            yield f"fragment {r.fragment} merges {len(r.offered)} contributions below the quorum {state.policy.quorum}"
        for island_id, c in r.offered.items():
            if c.island != island_id or c.fragment != r.fragment:
                yield f"payload {c.payload} lies in the wrong round or under the wrong island"
            if c.base_version > r.version:
                yield f"payload {c.payload} builds on version {c.base_version} of a fragment at {r.version}"
            if r.version - c.base_version > state.policy.staleness_max:
                yield f"payload {c.payload} is staler than staleness_max"
        if state.phase is JobPhase.FINISHED and r.offered:
            yield f"fragment {r.fragment} holds payloads after the job has ended"
    for island in state.islands.values():
        if (island.pid is not None) and island.state not in WITH_PROCESS:
            yield f"{island.id} is {island.state} but has a process"
        if not state.seeded and island.live:
            yield f"{island.id} trains before there are parameters"
        if any(v > state.rounds[p].version for p, v in island.merged_into.items()):
            yield f"{island.id} was merged into a version that does not exist"
    if state.phase is JobPhase.FINISHED and any(i.state in WITH_PROCESS for i in state.islands.values()):
        yield "an island has a process after the job has ended"
