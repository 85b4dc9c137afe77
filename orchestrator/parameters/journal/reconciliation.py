"""The reconciliation of tape and journal: the tape has what was decided, the journal what was made of it.

The order in which both are written leaves few stories: a merge is on the tape as decided before it is made, in the journal
before it is on the tape as made. So a fragment's newest entry is the version where the tape has it (then what was under
way is lost), or the next one, and then the tape has decided on it, unless its end was damaged and cut off just there: that
merge is dropped. Anything else means files of two jobs, or files that somebody or a loss of power has cut, and nobody may go
on from there in silence.

Refuses to know: files, tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.core.fragment_round import FragmentRound
from orchestrator.core.vocabulary import FragmentId, RoundPhase, Version
from orchestrator.errors import DataError


def undecided_merges(
    rounds: Sequence[FragmentRound], newest: Callable[[FragmentId], Version | None]
) -> tuple[FragmentId, ...]:
    """The fragments whose newest merge the tape never decided on, for its end was cut off: the decision was its last record.

    Such a merge was never announced, since its announcement comes later on the tape.
    """
    ahead = (r.fragment for r in rounds if newest(r.fragment) == r.version + 1 and r.phase is not RoundPhase.MERGING)
    return tuple(ahead)


def lost_merges(
    rounds: Sequence[FragmentRound], newest: Callable[[FragmentId], Version | None]
) -> tuple[FragmentId, ...]:
    """The fragments whose last version the journal has no more, and the one before it has: damage, if any was found."""
    return tuple(r.fragment for r in rounds if newest(r.fragment) == r.version - 1)


def unrecorded_merges(
    rounds: Sequence[FragmentRound], newest: Callable[[FragmentId], Version | None], *, over: bool
) -> tuple[FragmentId, ...]:
    """The fragments whose journalled merge is not on the tape as made yet.

    A job that is ``over`` (cancelled while it merged) gets none. Raises DataError when the two cannot be of one job.
    """
    unheard = []
    for current in rounds:
        held = newest(current.fragment)
        if held is None or held < current.version:
            raise DataError(
                detail=f"The tape has fragment {current.fragment} at version {current.version}, the journal "
                f"{'nothing of it' if held is None else f'only up to version {held}'}: merges that islands already "
                "hold are lost. With durability async a loss of power can do that; sync prevents it."
            )
        if held == current.version or over:
            continue
        if held > current.version + 1 or current.phase is not RoundPhase.MERGING:
            raise DataError(
                detail=f"The journal has version {held} of fragment {current.fragment}, which the tape, at version "
                f"{current.version}, never decided on: they are not of the same job, or the tape was cut."
            )
        unheard.append(current.fragment)
    return tuple(unheard)
