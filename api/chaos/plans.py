"""The sources of chaos plans (the shipped ones by name, others by their file or text), and a plan's description in words.

Responsible for reading, and for telling a person what a plan will do before it does it. What a plan may say and whether it
is right is ``orchestrator.chaos.plan``'s.

The world that a file describes, for simulating one job: a fitted one, or a job's specification at the speed it says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from api.chaos.schemas import TEXT_CHARACTERS_MAX, ShownPlan
from api.installation.home import CONFIGS, PLANS
from orchestrator.chaos.plan import ChaosPlan, FaultSection, parse
from orchestrator.core.vocabulary import JobPolicy
from orchestrator.errors import ConfigurationError, NotFound
from orchestrator.parameters.codec.registry import codec
from orchestrator.simulation import worldfile
from orchestrator.simulation.plan import Capacity, WorldPlan
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.documents import dump, read_document
from orchestrator.specification.memory_budget import parameter_count_of, router_parameter_count_of


def world_of(file: Path) -> tuple[JobPolicy, WorldPlan]:
    """The job's policy and the world it runs in. Raises ConfigurationError where the file is neither, or is wrong."""
    document = read_document(file)
    if "world" in document:
        fitted = worldfile.parse(document["world"])
        return fitted.policy, fitted.plan
    if "islands" not in document:
        detail = f"{file} is neither a job (deploy/configs/demo.yaml) nor a world that `atoll tape fit` wrote."
        raise ConfigurationError(detail=f"{detail} Give one of the two.")
    spec = parse_job(document)
    if spec.synchroniser.adoption == "mix":
        raise ConfigurationError(detail="Simulated islands do not support adoption mix. Use rebase or replace.")
    policy, parameters, sync = spec.policy(_regions(), standbys=True), parameter_count_of(spec) or 0, spec.synchroniser
    apart = router_parameter_count_of(spec) if sync.routers_apart else 0
    plan = WorldPlan(
        step_s=(spec.synthetic.step_s,) * len(policy.islands),
        step_jitter_ratio=spec.synthetic.step_jitter_ratio,
        tokens_per_step=spec.tokens_per_step,
        adoption=spec.synchroniser.adoption,
        capacity=tuple(_batches(spec)),
        payload_bytes=codec(sync.wire.up).data_bytes(parameters - apart) // sync.schedule.shared_count,
    )
    return policy, replace(plan, parameter_count=parameters, router_parameter_count=apart) if apart else plan


def _batches(spec: JobSpec) -> Iterator[Capacity]:
    """Yield a capacity, from the beginning, for each island whose batch differs from the job's."""
    sections = {**spec.island_sections(), **spec.standby_sections()}
    for island, section in sections.items():
        if (ratio := spec.batch_size_of(section) / spec.training.batch_size) != 1.0:
            yield Capacity(0.0, island, ratio)


def _regions() -> dict[str, str]:
    """The regions of the node groups that `atoll up` starts; any other group is a region of its own."""
    groups = read_document(CONFIGS / "groups.yaml")["node_groups"]
    return {group["name"]: group["region"] for group in groups}


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
