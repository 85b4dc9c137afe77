"""The job specification of a user: validated once, frozen, with all problems reported together.

YAML or JSON (``documents``), with the same schema. Every field has a unit in its name or description, a default with its
reason, and bounds (``bounds``). The core gets its part as a ``JobPolicy``; islands get the whole as plain data
(``model_dump``). No environment variable overrides the file.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from orchestrator.core.vocabulary import NO_RAMP, BatchRamp, IslandId, IslandPlan, JobPolicy, NodeGroupId, quorum_of
from orchestrator.errors import InvalidJobSpec, Problem
from orchestrator.specification import device_mesh, documents, policy_source, training_sections
from orchestrator.specification.bounds import BUDGET_TOKENS_MAX, BYTE_COUNT, BYTES, ISLANDS_MAX, Name, Seed
from orchestrator.specification.sections import (
    AutopilotSection,
    BudgetSection,
    CheckpointsSection,
    EvaluationSection,
    HealthSection,
    IslandsSection,
    RecoverySection,
    ResumeSection,
    Section,
    SynchroniserSection,
    SyntheticSection,
    TransportSection,
    document_end_problems,
)
from orchestrator.specification.training_sections import DataSection, ModelSection, TrainableSection, TrainingSection
from orchestrator.specification.validation import collected, omitted_count, problems_of, right_part, wrong_places
from orchestrator.system.plain import counted
from orchestrator.text import token_files
from orchestrator.text.file_kinds import Format, kind_of, refusal
from orchestrator.text.tokenizer_file import AS_TOKENIZER

UNKNOWN = "Remove it, or correct its spelling; deploy/configs/ holds complete examples."


class JobSpec(Section):
    name: Name = "job"
    model: ModelSection = ModelSection.model_construct()
    data: DataSection = DataSection.model_construct()
    training: TrainingSection = TrainingSection.model_construct()
    trainable: TrainableSection | None = Field(
        None, description="the part of the model that is trained; if absent, all"
    )
    synchroniser: SynchroniserSection = SynchroniserSection.model_construct()
    islands: Annotated[tuple[IslandsSection, ...], Field(min_length=1, max_length=ISLANDS_MAX)]
    budget: BudgetSection
    autopilot: AutopilotSection = AutopilotSection.model_construct()
    evaluation: EvaluationSection = EvaluationSection.model_construct()
    recovery: RecoverySection = RecoverySection.model_construct()
    transport: TransportSection = TransportSection.model_construct()
    health: HealthSection = HealthSection.model_construct()
    checkpoints: CheckpointsSection = CheckpointsSection.model_construct()
    resume: ResumeSection | None = None
    synthetic: SyntheticSection = SyntheticSection.model_construct()
    trainer: training_sections.TrainerSection = training_sections.TrainerSection.model_construct()
    seed: Seed = 0

    @model_validator(mode="after")
    def _shares_out_tokens_per_step(self) -> Self:
        """Give every island its share of ``training.tokens_per_step`` as its batch."""
        training = self.training
        if training.tokens_per_step is not None and "batch_size" not in training.model_fields_set:
            unit = self.data.sequence_length * self.island_count
            update = {"batch_size": max(1, training.tokens_per_step // unit)}
            object.__setattr__(self, "training", training.model_copy(update=update))
        return self

    @model_validator(mode="after")
    def _measures_on_islands(self) -> Self:
        """Have islands measure Θ if several shards share it, because no other process should hold all of it (0225)."""
        most, is_given = max(each.process_count for each in self.islands), "on" in self.evaluation.model_fields_set
        several = self.synchroniser.shards > 1 and self.synchroniser.adoption == "rebase"
        if several and most == 1 and not is_given and self.evaluation.node_group is None:
            object.__setattr__(self, "evaluation", self.evaluation.model_copy(update={"on": "islands"}))
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens one island trains on in one inner step."""
        return self.training.batch_size * self.data.sequence_length

    @property
    def tokens_per_schedule_step(self) -> int:
        """Tokens of one inner step of every island that the job begins with."""
        batches = sum(section.count * self.batch_size_of(section) for section in self.islands)
        return batches * self.data.sequence_length

    @property
    def island_count(self) -> int:
        return sum(section.count for section in self.islands)

    @property
    def islands_max(self) -> int:
        """Return the number of islands that the job may be scaled up to."""
        return sum(max(section.count, section.count_max or 0) for section in self.islands)

    @property
    def quorum(self) -> int:
        """Return K while all islands train."""
        sync = self.synchroniser
        return quorum_of(sync.quorum, sync.quorum_ratio_of(self.islands_max), self.island_count)

    @property
    def token_budget(self) -> int:
        if self.budget.tokens is not None:
            return self.budget.tokens
        return (self.budget.steps or 0) * self.tokens_per_schedule_step

    @property
    def horizon_steps(self) -> int:
        """Return the inner steps of each island if all are equally fast: the length of the learning-rate schedule."""
        return max(1, self.token_budget // self.tokens_per_schedule_step)

    @property
    def batch_ramp(self) -> BatchRamp:
        """Return how the islands' batches grow, in steps of the schedule."""
        own = self.training.batch_ramp
        return NO_RAMP if own is None else BatchRamp(own.parts, max(1, -(-own.tokens // self.tokens_per_schedule_step)))

    @property
    def trained_shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """Return names and shapes of what is trained; None if only the package of model or trainer knows."""
        network = self.model.network if self.trainer.is_built_in else None
        if network is None:
            return None
        return network.shapes if self.trainable is None else self.trainable.trained_shapes(network)

    @property
    def vocabulary_size(self) -> int | None:
        """Return the model's number of tokens; None if only its package or folder knows."""
        network = None if self.trainer.kind == "torch" else self.model.network
        return None if network is None else network.vocabulary_size

    def island_sections(self, *, slots: bool = False) -> dict[IslandId, IslandsSection]:
        """Return every island by name, in the order of the specification; with ``slots``, scale-up slots too."""
        named = ((section, section.island_names(slots=slots)) for section in self.islands)
        return {IslandId(name): section for section, names in named for name in names}

    def batch_size_of(self, section: IslandsSection) -> int:
        """Return the sequences that one island of this entry trains on in one inner step."""
        return section.batch_size or self.training.batch_size

    def accumulation_of(self, section: IslandsSection) -> int:
        """Return the number of microbatches in an inner step of one island of this entry."""
        return section.accumulation or self.training.accumulation

    def island_document(self, section: IslandsSection) -> dict[str, Any]:
        """Return the specification as plain data for an island of this entry, with its own settings under ``island``."""
        own = section.model_dump(mode="json")
        own |= {"batch_size": self.batch_size_of(section), "accumulation": self.accumulation_of(section)}
        return {**self.model_dump(mode="json"), "island": own}

    def standby_sections(self) -> dict[IslandId, IslandsSection]:
        """Return every standby by name, with the entry whose islands it may replace."""
        return {IslandId(name): section for section in self.islands for name in section.standby_names()}

    def wanted_counts(self) -> dict[NodeGroupId, int]:
        """Return the initial number of islands on each node group with scale-up slots."""
        return {NodeGroupId(section.node_group): section.count for section in self.islands if section.has_slots}

    def policy(
        self, regions: Mapping[str, str] | None = None, *, slots: bool = False, standbys: bool = False
    ) -> JobPolicy:
        """Return the policy of the core. ``regions`` maps node groups to regions (a node group's own name if absent)."""

        def plans(sections: Mapping[IslandId, IslandsSection]) -> tuple[IslandPlan, ...]:
            return tuple(
                IslandPlan(
                    island=island,
                    node_group=NodeGroupId(section.node_group),
                    region=(regions or {}).get(section.node_group, section.node_group),
                    accelerator_count=max(section.processes_per_host, section.accelerators) * section.hosts,
                    price=section.island_price,
                )
                for island, section in sections.items()
            )

        islands = plans(self.island_sections(slots=slots))
        return policy_source.filled(
            JobPolicy, self, islands=islands, standbys=plans(self.standby_sections()) if standbys else ()
        )


def read_job_document(path: Path) -> dict[str, Any]:
    """Read a job specification. Data files that it names relative to itself are absolute in the result."""
    document = documents.read_document(path)
    if isinstance(data := document.get("data"), dict):
        folder, sources = path.resolve().parent, data.get("sources")
        for named in (data, *(sources if isinstance(sources, list) else ())):
            for field in ("files", "held_out"):
                if isinstance(named, dict) and isinstance(named.get(field), list):
                    named[field] = [_absolute(folder, name) for name in named[field]]
            if isinstance(named, dict) and isinstance(hub := named.get("hub"), dict) and "mirror" in hub:
                hub["mirror"] = _absolute(folder, hub["mirror"])
        for field, not_a_path in (("tokenizer", BYTES), ("template", AS_TOKENIZER), ("index", None)):
            if data.get(field, not_a_path) != not_a_path:
                data[field] = _absolute(folder, data[field])
    if isinstance(model := document.get("model"), dict) and "initial_weights" in model:
        model["initial_weights"] = _absolute(path.resolve().parent, model["initial_weights"])
    if isinstance(trainer := document.get("trainer"), dict) and training_sections.is_folder(trainer.get("model")):
        trainer["model"] = _absolute(path.resolve().parent, trainer["model"])
    return document


def _absolute(folder: Path, name: Any) -> Any:
    """Return a path that is relative to ``folder`` as an absolute one; URLs and other values unchanged."""
    if not isinstance(name, str) or "\0" in name or "://" in name:
        return name
    return os.path.abspath(folder / name)


def parse_job(document: Mapping[str, Any]) -> JobSpec:
    """Validate a whole specification. Raises InvalidJobSpec with every problem at once, each with its remedy.

    If it has too many entries to validate each, that is the only problem.
    """
    if crowd := too_many_entries(document):
        raise InvalidJobSpec(problems=(crowd,))
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        problems = problems_of(error, unknown=UNKNOWN, model=JobSpec)
        job, of_sections = right_part(JobSpec, document, wrong_places(error, JobSpec))
        problems += (*of_sections, *_cross_problems(job))
        raise InvalidJobSpec(problems=tuple(problems), omitted_count=omitted_count(error, JobSpec)) from error
    if between := tuple(_cross_problems(spec)):
        raise InvalidJobSpec(problems=between)
    return spec


def right_sections(document: Mapping[str, Any], problems: Iterable[Problem]) -> JobSpec | None:
    """Return the specification with defaults in place of the sections that have a problem; None if that is invalid too.

    For checks that need only one section.
    """
    wrong = {problem.path.partition(".")[0] for problem in problems}
    sections = {name: value for name, value in document.items() if name in JobSpec.model_fields and name not in wrong}
    try:
        return JobSpec.model_validate({"islands": [{"node_group": "any"}], "budget": {"steps": 1}, **sections})
    except ValidationError:
        return None


def too_many_entries(document: Mapping[str, Any]) -> Problem | None:
    """Return a problem if the document has more entries of islands than a job may have, before any entry is read."""
    islands = document.get("islands")
    if not isinstance(islands, list | tuple) or len(islands) <= ISLANDS_MAX:
        return None
    message = f"has {len(islands):,} entries, but a job may have at most {ISLANDS_MAX:,} islands."
    return Problem("islands", message, "Use `count` for equal islands, or start several jobs.")


def _cross_problems(job: JobSpec) -> list[Problem]:
    """Return the problems from rules between fields. With invalid values, each rule reports what it can without them."""
    return [
        *(problem for rule in RULES for problem in collected(rule(job))),
        *collected(_entry_problems(job)),
    ]


def _entry_problems(job: JobSpec) -> Iterable[Problem]:
    for index in range(len(job.islands)):
        for rule in ENTRY_RULES:
            yield from collected(rule(job, index))


def _trainable_problems(job: JobSpec) -> Iterable[Problem]:
    yield from training_sections.objective_problems(job.training, job.data, job.trainer)
    if job.trainable is not None:
        yield from job.trainable.problems_of(job.trainer.factory, job.model.network)


def _data_problems(job: JobSpec) -> Iterable[Problem]:
    data = job.data
    if (data.source == "files") != bool(data.files):
        yield Problem("data.files", "goes with source: files, and only with it.", "Set data.source or list the files.")


def _source_problems(job: JobSpec) -> Iterable[Problem]:
    data = job.data
    if (data.source in ("streamed", "tokens")) != bool(data.sources):
        message = "go with source: streamed or source: tokens, and only with these."
        yield Problem("data.sources", message, "Set data.source or list the sources.")
    if data.samples is not None and data.source != "tokens":
        message = f"is {data.samples:,}, but data.source is {data.source}: only tokens have an order of samples."
        yield Problem("data.samples", message, "Leave it out, or set data.source to tokens.")


def _own_source_problems(job: JobSpec) -> Iterable[Problem]:
    data = job.data
    if data.settings and not data.is_own:
        message = f"are given, but data.source is {data.source}, which takes none."
        yield Problem("data.settings", message, "Leave them out, or name package.module:function in data.source.")


def _source_name_problems(job: JobSpec) -> Iterable[Problem]:
    if twice := [name for name, uses in Counter(one.name for one in job.data.sources).items() if uses > 1]:
        yield Problem("data.sources", f"has the name {twice[0]!r} twice.", "Give each source its own name.")


def _index_problems(job: JobSpec) -> Iterable[Problem]:
    data = job.data
    if data.index is not None and data.source != "streamed":
        message = f"is {data.index}, but data.source is {data.source}: only streamed text has an index."
        yield Problem("data.index", message, "Leave it out, or set data.source to streamed.")


def _separator_problems(job: JobSpec) -> Iterable[Problem]:
    if (data := job.data).has_tokens and data.intra_document_masking:
        yield from document_end_problems(data.source, data.separator, job.vocabulary_size)
    elif data.tokenizer == BYTES and (data.separator or 0) >= BYTE_COUNT:
        message = f"is {data.separator:,}, but bytes have no token above {BYTE_COUNT - 1}."
        yield Problem("data.separator", message, "Leave it out, for a newline, or name another tokenizer.")
    elif data.tokenizer == BYTES and data.intra_document_masking:
        message = "is true, but data.tokenizer is bytes: a text may contain any byte, so none can end a document."
        yield Problem("data.intra_document_masking", message, "Name a tokenizer.json with a token that ends a text.")


def _begin_token_problems(job: JobSpec) -> Iterable[Problem]:
    begin_token = job.data.begin_token if job.data.tokenizer == BYTES else None
    if isinstance(begin_token, int) and begin_token >= BYTE_COUNT:
        message = f"is {begin_token:,}, but bytes have no token above {BYTE_COUNT - 1}."
        yield Problem("data.begin_token", message, "Leave it out, or name another tokenizer.")


def _measuring_island_problems(job: JobSpec) -> Iterable[Problem]:
    if job.evaluation.on == "islands" and any(section.process_count > 1 for section in job.islands):
        yield Problem(
            "evaluation.on",
            "is islands, but an island of several processes cannot measure.",
            "Have the head or a node group measure.",
        )


def _text_file_problems(job: JobSpec) -> Iterable[Problem]:
    """Yield a problem for each file whose name says that it cannot be read."""
    data = job.data
    named = [(f"data.files.{number}", name) for number, name in enumerate(data.files)]
    for index, source in enumerate(data.sources):
        for field, names in (("files", source.files), ("held_out", source.held_out)):
            named += [(f"data.sources.{index}.{field}.{number}", name) for number, name in enumerate(names)]
    for path, name in named:
        if refused := token_files.refusal(name) if data.source == "tokens" else refusal(name):
            yield Problem(path, f"is {name}, but it {refused.message}.", refused.remedy)
        elif data.has_conversations and kind_of(name).format is Format.TEXT:
            message = f"is {name}, plain text by its name, but data.format is {data.format}."
            yield Problem(path, message, "Name a .jsonl file.")


def _island_problems(job: JobSpec) -> Iterable[Problem]:
    islands = job.islands
    processes = sum(max(section.count, section.count_max or 0) + section.standby for section in islands)
    if processes > ISLANDS_MAX:  # reported before they are all named
        message = f"have {processes:,} islands, spares and standbys in all, but a job may have at most {ISLANDS_MAX:,}."
        yield Problem("islands", message, "Lower count, count_max or standby, or start several jobs.")
        return
    names = Counter(
        name for section in islands for name in (*section.island_names(slots=True), *section.standby_names())
    )
    for name in sorted(name for name, uses in names.items() if uses > 1):
        yield Problem("islands", f"use the name {name!r} twice.", "Give each entry its own name.")


def _quorum_problems(job: JobSpec) -> Iterable[Problem]:
    count = sum(section.count for section in job.islands)
    if job.synchroniser.quorum > count:
        remedy = f"Lower it to at most {count}, or add islands."
        yield Problem(
            "synchroniser.quorum", f"is {job.synchroniser.quorum}, but the job has {counted(count, 'island')}.", remedy
        )
    floor, cap = job.synchroniser.grace_floor_steps, job.synchroniser.grace_cap_steps
    if floor is not None and cap is not None and floor > cap:
        yield Problem(
            "synchroniser.grace_floor_steps",
            f"is {floor:g}, above grace_cap_steps ({cap:g}).",
            "The shortest grace window must not be above the longest: lower grace_floor_steps, or raise grace_cap_steps.",
        )


def _slot_problems(job: JobSpec) -> Iterable[Problem]:
    groups = Counter(section.node_group for section in job.islands)
    for index, section in enumerate(job.islands):
        if section.has_slots and groups[section.node_group] > 1:
            detail = (
                f"is set, but several entries are on {section.node_group!r}, so it is unclear which of them to scale."
            )
            remedy = "Use a single entry for each node group that may be scaled."
            yield Problem(f"islands.{index}.count_max", detail, remedy)


def _count_problems(job: JobSpec, index: int) -> Iterable[Problem]:
    section = job.islands[index]
    where, most = f"islands.{index}.count_max", section.count_max
    if most is not None and most < section.count:
        yield Problem(where, f"is {most}, but must not be below count ({section.count}).", "Raise it, or leave it out.")


def _accelerator_problems(job: JobSpec, index: int) -> Iterable[Problem]:
    section = job.islands[index]
    if (section.accelerator == "cpu") != (section.accelerators == 0):
        yield Problem(
            f"islands.{index}.accelerators",
            f"is {section.accelerators} with accelerator {section.accelerator!r}.",
            "Use 0 for cpu and at least 1 for gpu or tpu.",
        )


def _mesh_problems(job: JobSpec, index: int) -> Iterable[Problem]:
    """Yield the problems of an entry's mesh. The number of devices of an island on CPU is unknown here."""
    section = job.islands[index]
    entry, mesh = f"islands.{index}", section.mesh.model_dump()
    device_count = section.accelerators * section.hosts or None
    if section.accelerator != "cpu" and device_count is None:
        return  # there are none: that is the problem
    accumulation = job.accumulation_of(section)
    of_batch = list(device_mesh.mesh_problems(entry, mesh, device_count, job.batch_size_of(section), accumulation))
    yield from of_batch
    of_tensors = collected(_tensor_problems(job, index))
    yield from of_tensors
    if (
        not of_batch and not of_tensors and section.accelerator == "gpu"
    ):  # a TPU's devices are in the order of its interconnect
        yield from device_mesh.host_problems(entry, mesh, section.hosts, section.accelerators)


def _tensor_problems(job: JobSpec, index: int) -> Iterable[Problem]:
    """Yield the problems of the mesh with the tensors of a built-in model; those of a package's model are unknown here."""
    mesh = job.islands[index].mesh.model_dump()
    network = job.model.network if job.trainer.is_built_in else None
    if network and not device_mesh.is_plain(mesh):
        lengths = device_mesh.parameter_axes(mesh)
        yield from device_mesh.tensor_problems(f"islands.{index}", lengths, network.shapes, network.dimensions)


def _accumulation_problems(job: JobSpec) -> Iterable[Problem]:
    """Yield a problem if the batch cannot be cut into its microbatches."""
    yield from device_mesh.cut_problems("training.accumulation", job.training.batch_size, job.training.accumulation)


def _entry_accumulation_problems(job: JobSpec, index: int) -> Iterable[Problem]:
    """Yield a problem if the batch of an entry with its own values cannot be cut into its microbatches."""
    section = job.islands[index]
    if section.batch_size or section.accumulation:
        own = job.batch_size_of(section), job.accumulation_of(section)
        yield from device_mesh.cut_problems(f"islands.{index}.accumulation", *own)


def _evaluating_group_problems(job: JobSpec) -> Iterable[Problem]:
    evaluation = job.evaluation
    if (evaluation.on == "node_group") != (evaluation.node_group is not None):
        message = "goes with on: node_group, and only with it."
        yield Problem("evaluation.node_group", message, "Name the node group that measures, or leave it out.")


def _evaluating_accelerator_problems(job: JobSpec) -> Iterable[Problem]:
    evaluation = job.evaluation
    if evaluation.on != "node_group" and (evaluation.accelerators or evaluation.accelerator != "cpu"):
        message = (
            f"is {evaluation.accelerators} {evaluation.accelerator}, but nothing is reserved with on: {evaluation.on}."
        )
        yield Problem("evaluation.accelerators", message, "Set on: node_group, or leave them out.")
    elif (evaluation.accelerator == "cpu") != (evaluation.accelerators == 0):
        message = f"is {evaluation.accelerators} with accelerator {evaluation.accelerator!r}."
        yield Problem("evaluation.accelerators", message, "Use 0 for cpu and at least 1 for gpu or tpu.")


def _evaluating_adoption_problems(job: JobSpec) -> Iterable[Problem]:
    adoption = job.synchroniser.adoption
    if job.evaluation.on == "islands" and adoption != "rebase":
        message = f"is islands, but with adoption {adoption!r} an island keeps no copy of what was published."
        yield Problem("evaluation.on", message, "Use adoption rebase, or have the head or a node group measure.")


def _tokens_per_step_problems(job: JobSpec) -> Iterable[Problem]:
    training = job.training
    if training.tokens_per_step is not None:
        own = [(f"islands.{index}.", each.batch_size) for index, each in enumerate(job.islands) if each.batch_size]
        batches = dict([("", training.batch_size), *own])
        yield from device_mesh.share_problems(
            training.tokens_per_step, job.data.sequence_length, job.island_count, batches
        )


def _batch_ramp_problems(job: JobSpec) -> Iterable[Problem]:
    ramp, trainer = job.training.batch_ramp, job.trainer
    if ramp is not None and ramp.tokens > job.token_budget:
        message = f"is {ramp.tokens:,}, but the job ends after {job.token_budget:,} tokens, before its batch is whole."
        yield Problem("training.batch_ramp.tokens", message, "Lower it, or raise the budget.")
    if ramp is not None and not (trainer.is_built_in or trainer.is_synthetic):
        message = f"is set, but the trainer {trainer.factory} always trains whole batches."
        yield Problem("training.batch_ramp", message, "Leave it out, or use the built-in trainer.")


def _entry_batch_ramp_problems(job: JobSpec, index: int) -> Iterable[Problem]:
    ramp, section = job.training.batch_ramp, job.islands[index]
    if ramp is not None:
        batch = job.batch_size_of(section), job.accumulation_of(section)
        yield from device_mesh.ramp_problems(f"islands.{index}", section.mesh.model_dump(), ramp.parts, *batch)


def _batch_size_problems(job: JobSpec) -> Iterable[Problem]:
    yield from device_mesh.step_problems(
        job.data.sequence_length, "training.batch_size", job.training.batch_size, "a step of one island"
    )


def _step_problems(job: JobSpec, path: str, sequences: int, what: str) -> Iterable[Problem]:
    return device_mesh.step_problems(job.data.sequence_length, path, sequences, what)


def _held_out_problems(job: JobSpec) -> Iterable[Problem]:
    yield from device_mesh.step_problems(
        job.data.sequence_length, "evaluation.sequences", job.evaluation.sequences, "what is held out"
    )


def _entry_batch_size_problems(job: JobSpec, index: int) -> Iterable[Problem]:
    batch_size = job.islands[index].batch_size
    yield from device_mesh.step_problems(
        job.data.sequence_length, f"islands.{index}.batch_size", batch_size or 0, "a step of one island"
    )


def _budget_problems(job: JobSpec) -> Iterable[Problem]:
    yield from job.budget.problems()
    steps = job.budget.steps or 0
    if steps * job.tokens_per_schedule_step > BUDGET_TOKENS_MAX:
        message = (
            f"is {steps:,} steps of {job.island_count:,} islands: more than {BUDGET_TOKENS_MAX:.0e} tokens in all."
        )
        yield Problem("budget.steps", message, "Lower it.")


def _synchroniser_problems(job: JobSpec) -> Iterable[Problem]:
    sync = job.synchroniser
    yield from policy_source.schedule_problems(sync.schedule, sync.overlap_steps, "synchroniser.")
    for rule in ("staleness_problems", "shard_problems", "shard_group_problems"):
        yield from collected(getattr(sync, rule)())
    tensors = {} if job.trainer.is_synthetic else job.trained_shapes
    yield from policy_source.router_problems(sync.router_interval_steps, tensors, "synchroniser.")


def _trainer_problems(job: JobSpec) -> Iterable[Problem]:
    yield from device_mesh.framework_problems(job.trainer, job.model, job.training, job.islands, job.trainable)
    fragments, parameters = job.synchroniser.fragments, job.synthetic.parameters
    if job.trainer.is_synthetic and parameters < fragments:
        message = f"is {fragments:,}, more than the {parameters:,} parameters of the model."
        yield Problem("synchroniser.fragments", message, "Lower it, or raise synthetic.parameters.")


RULES: tuple[Callable[[JobSpec], Iterable[Problem]], ...] = (
    _trainable_problems,
    _data_problems,
    _own_source_problems,
    _source_problems,
    _source_name_problems,
    _text_file_problems,
    _index_problems,
    _separator_problems,
    _begin_token_problems,
    _island_problems,
    _quorum_problems,
    _slot_problems,
    _accumulation_problems,
    _batch_size_problems,
    _tokens_per_step_problems,
    _batch_ramp_problems,
    _held_out_problems,
    _budget_problems,
    _trainer_problems,
    _evaluating_group_problems,
    _evaluating_accelerator_problems,
    _evaluating_adoption_problems,
    _measuring_island_problems,
    _synchroniser_problems,
)
"""Each reads what it needs, and reports nothing if that is invalid."""
ENTRY_RULES: tuple[Callable[[JobSpec, int], Iterable[Problem]], ...] = (
    _count_problems,
    _accelerator_problems,
    _mesh_problems,
    _entry_accumulation_problems,
    _entry_batch_size_problems,
    _entry_batch_ramp_problems,
)
"""Rules for one entry of ``islands``."""
