"""The one table that says where each field of the core's policy comes from. Everything else about a policy is derived.

    JobSpec.policy              the policy of a job's specification
    simulation.worldfile        the section ``policy`` of a world file, with the bounds of the specification
    simulation.whatif           what `--set` may change, with the same bounds

A path is a field of ``JobPolicy``, or of a policy within it: ``quorum``, ``step_limits.ratio``. A new field of the policy
needs no line here if the specification has a field of the same name: in ``synchroniser`` or ``recovery``, or, for a policy
within the policy, in the section of that policy's name. ``tests/test_policy.py`` names a field that comes from nowhere.

``section_of`` and ``instance_of`` derive the sections of documents from frozen dataclasses, so that fields are written
once:

    Part = section_of(JobPolicy, bounds, omit=("islands",))        a pydantic model with the same fields and defaults
    policy = instance_of(JobPolicy, part, islands=…)               back again

``schedule_problems`` is the rule between several fields that all three documents have; ``router_problems`` is that of a
specification, whose model may lack routers.

A field's range comes from ``bounds``, by its path (``step_limits.ratio``). Without one it follows from its type: numbers
are finite and not negative.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from functools import reduce
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Field, StrictBool, create_model
from pydantic.fields import FieldInfo

from orchestrator.core.vocabulary import UNWRITTEN_DEFAULT, JobPolicy, Schedule, is_router
from orchestrator.errors import InternalError, Problem
from orchestrator.specification.bounds import DURATION_MAX_S, Section, WordOrNone
from orchestrator.specification.validation import sections_in

Filled = TypeVar("Filled")

PLACES = ("islands", "standbys")
"""Fields of the policy that are made of the entries of ``islands``, with the regions of their node groups."""
SECTIONS = ("synchroniser", "recovery")
"""The sections in which a field of the policy is looked for by its own name."""
RENAMED: Mapping[str, str] = {
    "fragment_count": "synchroniser.fragments",
    "sync_interval_steps": "synchroniser.interval_steps",
    "evaluation_every_merges": "evaluation.every_merges",
    "step_limits.limit_s": "recovery.step_limit_s",
    "step_limits.ratio": "recovery.step_limit_ratio",
    "step_limits.first_s": "recovery.first_step_limit_s",
    "outer_rate.warmup_merges": "synchroniser.outer_optimizer.warmup_merges",
    "outer_rate.final_ratio": "synchroniser.outer_optimizer.lr_final_ratio",
}
"""Fields of the specification, by the fields of the policy that have another name."""
DEFAULTED: Mapping[str, Callable[[Any], Any]] = {
    "quorum_ratio": lambda job: job.synchroniser.quorum_ratio_of(job.islands_max),
    "grace_floor_steps": lambda job: job.synchroniser.grace_floor_steps_of(job.islands_max),
}
"""Fields of the policy whose default depends on the job: the specification may leave them None, the policy may not."""
COMPUTED: Mapping[str, Callable[[Any], Any]] = {
    **DEFAULTED,
    "token_budget": lambda job: job.token_budget,
    "moving_average_decay": lambda job: 0.9,
    "evaluation.time_ratio_max": lambda job: job.evaluation.time_ratio,
    "evaluation.on_islands": lambda job: job.evaluation.on == "islands",
    "evaluation.at_start": lambda job: True,
    "leaving_closes": lambda job: True,
}
"""Fields of the policy that are no plain copy of a field of the specification, as functions of the ``JobSpec``."""


def paths(policy: type[Any] = JobPolicy, under: str = "") -> Iterator[str]:
    """Yield the paths of all settings of a policy, those of the policies within it included, and no places."""
    for field in fields(policy):
        if is_dataclass(field.default):
            yield from paths(type(field.default), f"{under}{field.name}.")
        elif field.name not in PLACES:
            yield f"{under}{field.name}"


def source_of(path: str, spec: type[BaseModel]) -> str | None:
    """Return the field of the specification that this field of the policy comes from, as ``recovery.restarts_max``."""
    candidates = [RENAMED[path]] if path in RENAMED else [path] if "." in path else [f"{s}.{path}" for s in SECTIONS]
    return next((candidate for candidate in candidates if field_at(candidate, spec) is not None), None)


def field_at(path: str, spec: type[BaseModel]) -> FieldInfo | None:
    """Return the specification's field at this path; None if there is none."""
    *sections, name = path.split(".")
    for section in sections:
        models = sections_in(spec.model_fields[section].annotation) if section in spec.model_fields else []
        if len(models) != 1:
            return None
        (spec,) = models
    return spec.model_fields.get(name)


def bounds_of(path: str, spec: type[BaseModel]) -> Any:
    """Return the annotated type of a setting of the policy, with the bounds of the specification; None if it has none.

    None is no value of a setting whose default depends on the job.
    """
    source = source_of(path, spec)
    described = None if source is None else field_at(source, spec)
    if described is None:
        return None
    kind: Any = described.annotation
    if path in DEFAULTED:
        kind = Union[tuple(option for option in get_args(kind) if option is not type(None)) or (kind,)]  # noqa: UP007
    return Annotated[kind, *described.metadata] if described.metadata else kind


def schedule_problems(schedule: Schedule, overlap_steps: int, section: str) -> Iterator[Problem]:
    """Yield what does not go together in a schedule with this overlap. The fields are those of ``section``."""
    count, interval, of_routers = schedule
    if overlap_steps >= interval:
        message = f"is {overlap_steps}, but must be below interval_steps ({interval})."
        yield Problem(f"{section}overlap_steps", message, "Lower it: a fragment must come back before it is due again.")
    if of_routers is None:
        return
    field, otherwise = f"{section}router_interval_steps", "or leave it out: routers are merged with the rest then."
    if not overlap_steps < of_routers < interval:
        message = f"is {of_routers}, but must be above overlap_steps ({overlap_steps}) and below interval_steps "
        yield Problem(field, f"{message}({interval}).", f"Choose one between, {otherwise}")
    if count < 2:
        message = f"is {of_routers}, but there is only one fragment: the routers need one, and so does the rest."
        yield Problem(field, message, f"Raise fragments to 2, {otherwise}")


def router_problems(interval_steps: int | None, tensors: Collection[str] | None, section: str) -> Iterator[Problem]:
    """Yield the problem with a period of its own for the routers among the trained tensors. None: they are not known yet."""
    if interval_steps is None or tensors is None or {is_router(tensor) for tensor in tensors} == {True, False}:
        return
    trains = (
        "nothing but routers" if tensors and is_router(next(iter(tensors))) else "no routers, which only mixtures have"
    )
    message = f"is {interval_steps}, but the job trains {trains}."
    yield Problem(f"{section}router_interval_steps", message, "Leave it out, or train a mixture with its routers.")


def filled(policy: type[Filled], job: BaseModel, under: str = "", **places: Any) -> Filled:
    """Return the policy of a job. Raises InternalError for a field that comes from nowhere."""
    values = dict(places)
    for field in fields(policy):  # type: ignore[arg-type]
        path = f"{under}{field.name}"
        if field.name in PLACES:
            continue
        if is_dataclass(field.default):
            values[field.name] = filled(type(field.default), job, f"{path}.")
        elif path in COMPUTED:
            values[field.name] = COMPUTED[path](job)
        elif (source := source_of(path, type(job))) is not None:
            values[field.name] = reduce(getattr, source.split("."), job)
        else:
            raise InternalError(
                detail=f"JobPolicy.{path} comes from no field of the specification. Give {' or '.join(SECTIONS)} a field "
                f"of that name, or name its source in {__name__}."
            )
    return policy(**values)


def continued(policy: JobPolicy, recorded: JobPolicy) -> JobPolicy:
    """Return the policy with which this release continues a job whose tape has the policy ``recorded``.

    A setting that the release which began the tape did not know is absent there, and reads as the default of the field,
    which means what that release did. It keeps that value, whatever this release would choose for a new job.
    """
    unknown = [field for field in fields(JobPolicy) if field.metadata == UNWRITTEN_DEFAULT]
    defaults: dict[str, Any] = {f.name: f.default for f in unknown if getattr(recorded, f.name) == f.default}
    return replace(policy, **defaults)


# ── sections derived from dataclasses ────────────────────────────────────────────────────────────────────────────────────

Instance = TypeVar("Instance")
Bounds = Callable[[str], Any]
"""The annotated type of the field at a path; None where its type says enough."""
ENTRIES_MAX = 10_000
COUNT_MAX = 2**63 - 1

_BY_TYPE: dict[Any, Any] = {
    bool: StrictBool,
    int: Annotated[int, Field(strict=True, ge=0, le=COUNT_MAX)],
    float: Annotated[float, Field(strict=True, ge=0, le=DURATION_MAX_S, allow_inf_nan=False)],
    str: WordOrNone,
}


def section_of(
    kind: type[Any], bounds: Bounds, /, omit: Collection[str] = (), under: str = "", **others: Any
) -> type[Section]:
    """Return the section with the dataclass's name, fields and defaults, without ``omit``.

    ``others`` are further fields, as pairs of type and default, such as the discriminator of a union.
    """
    hints = get_type_hints(kind)
    wanted = [field for field in fields(kind) if field.name not in omit]
    described: dict[str, Any] = dict(others)
    for field in wanted:
        path = f"{under}{field.name}"
        annotation = bounds(path) or _annotation(hints[field.name], bounds, path)
        default = ... if field.default is MISSING else field.default
        if is_dataclass(default):
            default = annotation()
        described[field.name] = (annotation, default)
    return create_model(kind.__name__, __base__=Section, __doc__=kind.__doc__, **described)


def instance_of(kind: type[Instance], section: Section, **others: Any) -> Instance:
    """Return the dataclass that a section derived from it holds; ``others`` are the fields that were omitted."""
    values = {name: _value(getattr(section, name), kind, name) for name in type(section).model_fields}
    return kind(**values, **others)


def _annotation(hint: Any, bounds: Bounds, path: str) -> Any:
    hint = getattr(hint, "__supertype__", hint)  # NewType
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        choices = [None if choice is NoneType else _annotation(choice, bounds, path) for choice in arguments]
        return Union[tuple(choices)]  # noqa: UP007
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return Annotated[tuple[_annotation(arguments[0], bounds, path), ...], Field(max_length=ENTRIES_MAX)]  # type: ignore[misc]
    if isinstance(hint, type) and is_dataclass(hint):
        return section_of(hint, bounds, under=f"{path}.")
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    return _BY_TYPE[hint]


def _value(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, Section):
        return value
    return instance_of(get_type_hints(kind)[name], value)
