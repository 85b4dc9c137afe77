"""The sources of chaos plans (the shipped ones by name, others by their file or text), and a plan's description in words.

Responsible for reading, and for telling a person what a plan will do before it does it. What a plan may say and whether it
is right is ``orchestrator.chaos.plan``'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from api.chaos.schemas import TEXT_CHARACTERS_MAX, ShownPlan
from api.installation.shipped import PLANS
from orchestrator.chaos.plan import ChaosPlan, FaultSection, parse
from orchestrator.config import read_document
from orchestrator.documents import dump
from orchestrator.errors import ConfigurationError, NotFound


def shipped() -> list[tuple[Path, ChaosPlan]]:
    """The plans that come with atoll, by name."""
    return [(path, load(path)) for path in sorted(PLANS.glob("*.yaml"))]


def plan_file(named: str) -> Path:
    """The file of a plan given by its path, or by the name of a shipped one. Raises ConfigurationError."""
    for path in (Path(named), PLANS / f"{named}.yaml"):
        if path.is_file():
            return path
    names = ", ".join(path.stem for path in sorted(PLANS.glob("*.yaml")))
    raise ConfigurationError(detail=f"There is no plan {named!r}. Give a file, or one of {names}.")


def load(path: Path) -> ChaosPlan:
    """The plan of a file. Raises InvalidJobSpec with every problem."""
    return parse(read_document(path))


def plan_text(name: str) -> str:
    """A shipped plan as it is written. Raises NotFound."""
    for path, plan in shipped():
        if plan.name == name:
            return path.read_text(encoding="utf-8")
    names = ", ".join(plan.name for _, plan in shipped()) or "none at all"
    raise NotFound(detail=f"No plan {name!r} comes with atoll.", remedy=f"There are {names}.")


def text_of(plan: Mapping[str, Any]) -> str:
    """A plan that came as data, as text. Raises ConfigurationError where that is longer than a plan's text may be."""
    if (count := len(json.dumps(plan, ensure_ascii=False))) > TEXT_CHARACTERS_MAX:
        raise ConfigurationError(
            detail=f"The plan has {count:,} characters, and may have {TEXT_CHARACTERS_MAX:,}. Make it shorter."
        )
    return dump(plan, allow_unicode=True)


def shown() -> list[ShownPlan]:
    """The shipped plans with what each does, in words."""
    return [
        ShownPlan(
            name=plan.name,
            about=_about(text := path.read_text(encoding="utf-8")),
            faults=[described(fault) for fault in plan.faults],
            keeps=plan.blast_radius.keep,
            objectives=[objective.text for objective in plan.objectives],
            text=text,
        )
        for path, plan in shipped()
    ]


def described(fault: FaultSection) -> str:
    """One entry of a plan in words: "stop asia for 6 s, every 30 s from 15 s on"."""
    if fault.at:
        when = f"at {', '.join(f'{at:g}' for at in fault.at)} s"
    else:
        how = f"every {fault.every:g} s" if fault.every else f"at random, every {fault.period_s:g} s on average"
        until = "" if fault.until is None else f" until {fault.until:g} s"
        when = f"{how}{f' from {fault.start:g} s on' if fault.start else ''}{until}"
    return f"{fault.description()}, {when}"


def _about(text: str) -> str:
    """The first sentence of the comment that a file begins with, without the command that it names."""
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines)
    first, stop, _ = (comment.partition(": ")[2] or comment).partition(". ")
    return first + stop.rstrip()
