"""Outlines of jobs: what the queue and the lists need of a specification, computed once, because it never changes.

Parsing a specification takes about a millisecond, and longer with many islands; outlines make a queue of a thousand jobs
cheap to look through. The least recently used outlines are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from api.jobs.queue import Wants, wants_of
from orchestrator.specification.config import JobSpec

JOBS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Outline:
    """``wants``: what the job asks for when it starts; ``wants_at_most``: with all slots that an operator may fill."""

    island_count: int
    token_budget: int
    wants: Wants
    wants_at_most: Wants


class Outlines:
    def __init__(self) -> None:
        self._outlines: OrderedDict[str, Outline] = OrderedDict()
        self._changing = Lock()

    def of(self, job: str, read_spec: Callable[[], Mapping[str, Any]]) -> Outline:
        """Return the job's outline. Raises pydantic's ValueError if its specification is invalid, and as ``read_spec``."""
        with self._changing:
            if outline := self._outlines.get(job):
                self._outlines.move_to_end(job)
                return outline
        outline = outline_of(read_spec())
        with self._changing:
            self._outlines[job] = outline
            while len(self._outlines) > JOBS_MAX:
                self._outlines.popitem(last=False)
        return outline


def outline_of(document: Mapping[str, Any]) -> Outline:
    spec = JobSpec.model_validate(document)
    standbys = spec.standby_sections().values()
    return Outline(
        island_count=len(spec.policy().islands),
        token_budget=spec.token_budget,
        wants=wants_of([*spec.island_sections().values(), *standbys]),
        wants_at_most=wants_of([*spec.island_sections(slots=True).values(), *standbys]),
    )
