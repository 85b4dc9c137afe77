"""The merges of a job: list them, and explain one."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request

from api.http.pools import RECORDS
from api.http.routing import runs_in
from api.merges.explaining import merge_of, summary_of
from api.merges.history import MergeHistories
from api.routes.dependencies import ServiceHere
from api.schemas import Merge, Merges
from orchestrator.errors import NotFound

router = APIRouter(prefix="/v1/jobs/{job}/merges", tags=["records"], route_class=runs_in(RECORDS))

NUMBER_MAX = 2**53
Number = Annotated[int, Path(ge=0, le=NUMBER_MAX)]


async def histories_of(request: Request) -> MergeHistories:
    histories: MergeHistories = request.app.state.histories
    return histories


HistoriesHere = Annotated[MergeHistories, Depends(histories_of)]


@router.get("")
def list_merges(
    job: str,
    service: ServiceHere,
    histories: HistoriesHere,
    fragment: Annotated[int | None, Query(ge=0, le=NUMBER_MAX, description="only those of this fragment")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    cursor: Annotated[str | None, Query(max_length=40, description="`next_cursor` of the page before")] = None,
) -> Merges:
    """A job's merges, newest first, as far back as they are kept: a few thousand. The tape holds all."""
    explanations = histories.of(service.run(job)).merges()
    if cursor is not None:
        names = [f"{explanation.fragment}:{explanation.version}" for explanation in explanations]
        if cursor not in names:
            raise NotFound(detail=f"The cursor {cursor!r} is no merge that is kept.", remedy="Begin without one.")
        explanations = explanations[names.index(cursor) + 1 :]
    wanted = (explanation for explanation in explanations if fragment is None or explanation.fragment == fragment)
    page = [summary_of(explanation) for explanation in islice(wanted, limit)]
    more = next(wanted, None) is not None
    return Merges(merges=page, next_cursor=f"{page[-1].fragment}:{page[-1].version}" if more else None)


@router.get("/{fragment}/{version}")
def explain_merge(job: str, fragment: Number, version: Number, service: ServiceHere, histories: HistoriesHere) -> Merge:
    """Why one merge came out as it did: contributors, quorum and grace, why it closed when it did, who was refused."""
    run = service.run(job)
    return merge_of(histories.of(run).merge(run.job, fragment, version))
