"""The faults that a plan can have, what each entry must say, and a fault in words. Derived from ``core.faults``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields

from orchestrator.core.faults import CLASSES, FLAT_NAMES, Fault, Kind, flat

PLANNED = tuple(kind for kind in Kind if kind is not Kind.CONTINUE)
"""Every kind that a plan can have. What lasts ends by its duration, so a plan needs no continue."""


def _needs(fault: type[Fault], *, required: bool) -> tuple[str, ...]:
    """Return the fields of an entry of this kind, by the plan's names; only those without a default if asked."""
    own = [field for field in fields(fault) if field.name != "island"]
    return tuple(FLAT_NAMES.get(f.name, f.name) for f in own if not required or f.default is MISSING)


NEEDS: Mapping[Kind, tuple[str, ...]] = {kind: _needs(CLASSES[kind], required=True) for kind in PLANNED}
"""The fields of an entry without which its kind means nothing."""
TAKES: Mapping[Kind, tuple[str, ...]] = {kind: _needs(CLASSES[kind], required=False) for kind in PLANNED}
"""The fields that an entry of this kind may have."""
ISLANDLESS = frozenset(
    kind for kind, fault in CLASSES.items() if not any(field.name == "island" for field in fields(fault))
)
"""The kinds that affect no island directly."""


def describe(fault: Fault, target: str) -> str:
    """Return a fault in words: ``stop asia for 6 s``. ``target`` is empty for a kind that affects no island."""
    form = flat(fault)
    how = "by" if form.kind is Kind.DELAY else "for"
    duration = f" {how} {form.duration:g} s" if form.duration else ""
    size = f", {form.payloads} payloads" if form.payloads else ""
    host = f", host {form.host}" if form.host is not None else ""
    rate = f", {form.bytes_per_second:g} bytes/s" if form.bytes_per_second else ""
    return f"{form.kind}{f' {target}' if target else ''}{duration}{size}{rate}{host}"
