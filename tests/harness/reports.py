"""Events by their kind, for tests that read tapes: an event's class, or the class of a report that an island made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, get_args

from orchestrator.core.events import IslandReported
from orchestrator.core.messages import CarriedReport

_REPORTS = get_args(CarriedReport)


def of_kind(events: Iterable[object], kind: type) -> list[Any]:
    """Return the events of this class, or the reports of this class, each flat as a tape has it (``flat``)."""
    if kind not in _REPORTS:
        return [event for event in events if isinstance(event, kind)]
    return [flat(event) for event in events if isinstance(event, IslandReported) and isinstance(event.report, kind)]


def flat(event: IslandReported) -> Any:
    """Return the report's fields beside the island's name, its incarnation and the instant."""
    said = {field.name: getattr(event.report, field.name) for field in fields(event.report)}
    return SimpleNamespace(at=event.at, island=event.island, incarnation=event.incarnation, **said)
