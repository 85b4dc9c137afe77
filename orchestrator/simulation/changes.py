"""``--set quorum=2 --set H=48``: settings of the synchroniser by name or by the paper's symbol, checked all at once.

Responsible for: from (policy, adoption) and what a user wrote to (policy, adoption), or every problem with its remedy. Only
what changes when and with whom fragments merge can be changed: the rest changes the model, which no simulation shows.

Source of the symbols: arXiv:2604.21428.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from orchestrator.core.vocabulary import JobPolicy
from orchestrator.documents import read_yaml
from orchestrator.errors import ConfigurationError, InvalidJobSpec, Problem
from orchestrator.replica.work import AdoptionRule
from orchestrator.sections import RecoverySection, Section, SynchroniserSection

SYMBOLS: Mapping[str, str] = {
    "K": "quorum",
    "H": "interval_steps",
    "P": "fragments",
    "tau": "overlap_steps",
    "τ": "overlap_steps",
    "gamma": "grace_margin",
    "γ": "grace_margin",
}
POLICY_NAMES: Mapping[str, str] = {"interval_steps": "sync_interval_steps", "fragments": "fragment_count"}
"""Where the policy's name is not the section's."""
MODEL_ONLY = ("averaging", "outer_optimizer", "mix_alpha", "wire")
ADOPTIONS = ("replace", "rebase")


@dataclass(frozen=True, slots=True)
class Settings:
    """What may be changed: the core's policy, and what islands do when they adopt."""

    policy: JobPolicy
    adoption: AdoptionRule


def apply(before: Settings, changes: Mapping[str, str]) -> Settings:
    """The settings with these changes. Raises InvalidJobSpec with every problem at once, each with its remedy."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, text in changes.items():
        field = SYMBOLS.get(name, name)
        if field in written:
            problems.append(Problem(name, f"and {written[field]} are the same setting.", "Give one of the two."))
            continue
        written[field] = name
        try:
            values[field] = _value(name, field, text, len(before.policy.islands))
        except _Unusable as error:
            problems.append(error.problem)
    after = _changed(before, values)
    problems += _together(after, values, written)
    if problems:
        raise InvalidJobSpec(detail="this cannot be tried", problems=tuple(problems))
    return after


class _Unusable(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def _value(name: str, field: str, text: str, island_count: int) -> Any:
    if field in ("M", "islands"):
        remedy = "Simulate a specification with that many learners: `atoll simulate`."
        raise _Unusable(
            Problem(name, f"cannot be changed: the tape knows {island_count} islands and no others.", remedy)
        )
    if field.split(".")[0] in MODEL_ONLY:
        message = "changes the model, not when and with whom fragments merge; a simulation shows no difference."
        raise _Unusable(Problem(name, message, "Measure it in real training: `atoll train-tape`, or `atoll compare`."))
    kind = _kind(field)
    if kind is None:
        raise _Unusable(Problem(name, "is no setting that can be tried.", f"Give one of {', '.join(names())}."))
    value = _parsed(text)
    if field == "adoption" and value not in ADOPTIONS:
        message = f"cannot be {text!r}: simulated islands know {' and '.join(ADOPTIONS)}."
        raise _Unusable(Problem(name, message, f"Give one of {', '.join(ADOPTIONS)}."))
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        (first, *_) = error.errors()
        message = f"cannot be {text!r}: {first['msg']}."
        raise _Unusable(Problem(name, message, "Change the value accordingly.")) from error


def names() -> list[str]:
    """Everything that can be changed, symbols last."""
    fields = [*SynchroniserSection.model_fields, *RecoverySection.model_fields]
    return [*(name for name in fields if name not in MODEL_ONLY), *SYMBOLS]


def _kind(field: str) -> TypeAdapter[Any] | None:
    sections: tuple[type[Section], ...] = (SynchroniserSection, RecoverySection)
    for section in sections:
        if (field_info := section.model_fields.get(field)) is not None:
            annotated: Any = Annotated[field_info.annotation, field_info]
            return TypeAdapter(annotated)
    return None


def _parsed(text: str) -> Any:
    """As YAML reads it, and ``none`` as nothing."""
    try:
        return None if text.strip().lower() == "none" else read_yaml(text)
    except ConfigurationError:
        return text


def _changed(before: Settings, values: Mapping[str, Any]) -> Settings:
    of_policy = {POLICY_NAMES.get(name, name): value for name, value in values.items() if name != "adoption"}
    return Settings(replace(before.policy, **of_policy), values.get("adoption", before.adoption))


def _together(after: Settings, values: Mapping[str, Any], written: Mapping[str, str]) -> Iterator[Problem]:
    """The rules between settings, where at least one of them was changed."""
    policy = after.policy
    islands = len(policy.islands)
    if "quorum" in values and policy.quorum > islands:
        message = f"is {policy.quorum}, but the job has {islands} islands: no fragment could ever merge."
        yield Problem(written["quorum"], message, f"Lower it to at most {islands}.")
    if values.keys() & {"overlap_steps", "interval_steps"} and policy.overlap_steps >= policy.sync_interval_steps:
        name = written.get("overlap_steps") or written["interval_steps"]
        message = f"gives overlap_steps {policy.overlap_steps}, not below interval_steps {policy.sync_interval_steps}."
        yield Problem(name, message, "A fragment must come back before it is due again: lower tau, or raise H.")
    if values.keys() & {"adoption", "staleness_max"} and after.adoption == "rebase" and policy.staleness_max:
        name = written.get("staleness_max") or written["adoption"]
        message = f"gives staleness_max {policy.staleness_max} with adoption rebase: work would be counted twice."
        yield Problem(name, message, "Set staleness_max to 0, or adoption to replace.")
