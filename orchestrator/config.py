"""The job specification: what a user writes, validated once, frozen, every problem reported together.

YAML or JSON, the same schema. Every field has a unit in its name or its description, a default and a reason. What the
core may know of it is handed down as a ``JobPolicy``; islands receive the whole as plain data (``model_dump``). No
environment variable outranks the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from orchestrator.core.vocabulary import CheckpointPolicy, HealthPolicy, IslandId, IslandPlan, JobPolicy, NodeGroupId
from orchestrator.errors import ConfigurationError, InvalidJobSpec, Problem
from orchestrator.sections import (
    BudgetSection,
    CheckpointsSection,
    DataSection,
    EvaluationSection,
    HealthSection,
    IslandsSection,
    ModelSection,
    Name,
    RecoverySection,
    ResumeSection,
    Section,
    SynchroniserSection,
    SyntheticSection,
    TrainingSection,
)
from orchestrator.validation import problem_of, valid_fields

UNKNOWN = "Remove it, or correct its spelling; deploy/configs/ holds complete examples."


class JobSpec(Section):
    name: Name = "job"
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    synchroniser: SynchroniserSection = SynchroniserSection()
    islands: Annotated[tuple[IslandsSection, ...], Field(min_length=1)]
    budget: BudgetSection
    evaluation: EvaluationSection = EvaluationSection()
    recovery: RecoverySection = RecoverySection()
    health: HealthSection = HealthSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    resume: ResumeSection | None = None
    synthetic: SyntheticSection = SyntheticSection()
    trainer: Literal["learners.jax_trainer:create", "learners.synthetic:create"] = "learners.jax_trainer:create"
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens one island trains on in one inner step."""
        return self.training.batch_size * self.data.sequence_length

    @property
    def tokens_per_schedule_step(self) -> int:
        """Tokens of one inner step of every island that the job begins with."""
        return self.island_count * self.tokens_per_step

    @property
    def island_count(self) -> int:
        return sum(section.count for section in self.islands)

    @property
    def token_budget(self) -> int:
        if self.budget.tokens is not None:
            return self.budget.tokens
        return (self.budget.steps or 0) * self.tokens_per_schedule_step

    @property
    def horizon_steps(self) -> int:
        """How many inner steps each island takes if all are equally fast: the learning-rate schedule's length."""
        return max(1, self.token_budget // self.tokens_per_schedule_step)

    def island_sections(self, *, spares: bool = False) -> dict[IslandId, IslandsSection]:
        """Every island by name, in the order of the specification; with those that are not wanted at first, if asked."""
        named = ((section, section.island_names(spares=spares)) for section in self.islands)
        return {IslandId(name): section for section, names in named for name in names}

    def standby_sections(self) -> dict[IslandId, IslandsSection]:
        """Every standby by name, with the entry whose islands it may become."""
        return {IslandId(name): section for section in self.islands for name in section.standby_names()}

    def wanted_counts(self) -> dict[NodeGroupId, int]:
        """How many islands are wanted at first, of each node group with spares."""
        return {NodeGroupId(section.node_group): section.count for section in self.islands if section.has_spares}

    def policy(
        self, regions: Mapping[str, str] | None = None, *, spares: bool = False, standbys: bool = False
    ) -> JobPolicy:
        """What the core may know. ``regions`` maps node groups to regions (a node group's own name if absent)."""
        sync, recovery = self.synchroniser, self.recovery

        def plans(sections: Mapping[IslandId, IslandsSection]) -> tuple[IslandPlan, ...]:
            return tuple(
                IslandPlan(
                    island=island,
                    node_group=NodeGroupId(section.node_group),
                    region=(regions or {}).get(section.node_group, section.node_group),
                    accelerator_count=max(1, section.accelerators),
                )
                for island, section in sections.items()
            )

        return JobPolicy(
            islands=plans(self.island_sections(spares=spares)),
            fragment_count=sync.fragments,
            sync_interval_steps=sync.interval_steps,
            overlap_steps=sync.overlap_steps,
            quorum=sync.quorum,
            grace_margin=sync.grace_margin,
            grace_cap_steps=sync.grace_cap_steps,
            staleness_max=sync.staleness_max,
            token_budget=self.token_budget,
            evaluation_every_merges=self.evaluation.every_merges,
            suspect_timeout_s=recovery.suspect_timeout_s,
            backoff_first_s=recovery.backoff_first_s,
            backoff_max_s=recovery.backoff_max_s,
            restarts_max=recovery.restarts_max,
            flush_timeout_s=recovery.flush_timeout_s,
            moving_average_decay=0.9,
            health=HealthPolicy(**self.health.model_dump()),
            cut_off_timeout_s=recovery.cut_off_timeout_s,
            standbys=plans(self.standby_sections()) if standbys else (),
            donors_max=recovery.donors_max,
            checkpoints=CheckpointPolicy(**self.checkpoints.model_dump(exclude={"folder"})),
        )


def read_document(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file holding one mapping.

    Raises ConfigurationError when the file is missing, unreadable, or something else than a mapping.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigurationError(detail=f"{path} cannot be read: {error.strerror}. Check the path.") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(detail=f"{path} is not valid YAML or JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigurationError(detail=f"{path} holds no mapping of fields; see deploy/configs/demo.yaml.")
    return document


def read_job_document(path: Path) -> dict[str, Any]:
    """Read a job specification; the text files it names are relative to it, and absolute in what is returned."""
    document = read_document(path)
    data = document.get("data")
    if isinstance(data, dict) and isinstance(data.get("files"), list):
        folder = path.resolve().parent
        data["files"] = [
            os.path.abspath(folder / name) if isinstance(name, str) and "\0" not in name else name
            for name in data["files"]
        ]
    return document


def parse_job(document: Mapping[str, Any]) -> JobSpec:
    """Validate a whole specification. Raises InvalidJobSpec with every problem at once, each with its remedy."""
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        problems = [problem_of(item, unknown=UNKNOWN) for item in error.errors()]
        raise InvalidJobSpec(problems=(*problems, *_cross_problems(valid_fields(JobSpec, document)))) from error
    if problems := tuple(_cross_problems({name: getattr(spec, name) for name in JobSpec.model_fields})):
        raise InvalidJobSpec(problems=problems)
    return spec


def _cross_problems(sections: Mapping[str, Any]) -> Iterable[Problem]:
    """The rules that need more than one field."""
    budget = sections.get("budget")
    if budget and (budget.tokens is None) == (budget.steps is None):
        yield Problem("budget", "needs exactly one of tokens and steps.", "Give one of the two.")
    data = sections.get("data")
    if data and (data.source == "files") != bool(data.files):
        yield Problem("data.files", "goes with source: files, and only with it.", "Set data.source or list the files.")
    islands, sync = sections.get("islands"), sections.get("synchroniser")
    if islands:
        count = sum(section.count for section in islands)
        names = [n for section in islands for n in (*section.island_names(spares=True), *section.standby_names())]
        groups = [section.node_group for section in islands]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Problem("islands", f"the name {name!r} is used twice.", "Give each entry its own name.")
        if sync and sync.quorum > count:
            remedy = f"Lower it to at most {count}, or add islands."
            yield Problem("synchroniser.quorum", f"is {sync.quorum}, but the job has {count} islands.", remedy)
        for index, section in enumerate(islands):
            where, most = f"islands.{index}.count_max", section.count_max
            if most is not None and most < section.count:
                yield Problem(where, f"is {most}, below count {section.count}.", "Raise it, or leave it out.")
            if section.has_spares and groups.count(section.node_group) > 1:
                detail = f"is set, but other entries are on {section.node_group!r} too: which of them is scaled?"
                yield Problem(where, detail, "Use one entry for each node group that may be scaled.")
            if (section.accelerator == "cpu") != (section.accelerators == 0):
                yield Problem(
                    f"islands.{index}.accelerators",
                    f"is {section.accelerators} with accelerator {section.accelerator!r}.",
                    "Use 0 for cpu and at least 1 for gpu or tpu.",
                )
    if sync and sync.adoption == "rebase" and sync.staleness_max:
        yield Problem(
            "synchroniser.staleness_max",
            f"is {sync.staleness_max} with adoption rebase, by which an island keeps and offers again what was late.",
            "Set it to 0: work would be counted twice.",
        )
    if sync and sync.overlap_steps >= sync.interval_steps:
        yield Problem(
            "synchroniser.overlap_steps",
            f"is {sync.overlap_steps}, not below interval_steps {sync.interval_steps}.",
            "A fragment must come back before it is due again: lower overlap_steps.",
        )
