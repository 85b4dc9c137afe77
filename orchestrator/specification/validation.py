"""Turn pydantic's validation errors into our problems, and check rules between fields on the valid part. Pure.

A problem says where it is, which value was given (shortened) and what to do. None of pydantic's own sentences reaches users.
Problems that only follow from others are left out: a field that is missing because its name is misspelt, a list that is too
short because its entries are invalid.

``right_part`` returns an object for a document with some invalid values: valid values can be read, and reading an invalid
one raises ``Unknown``. The rules between fields run on it, so that all problems are reported at once, and a rule that needs
an invalid value reports nothing.

    wrong = wrong_places(error, JobSpec)      from pydantic's errors
    job, problems = right_part(JobSpec, document, wrong)
    for rule in RULES:
        problems += collected(rule(job))

Sections keep their properties and their own rules (pydantic's model validators), which pydantic skips if a field is invalid.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, SupportsIndex, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from orchestrator.errors import PROBLEMS_MAX, Problem
from orchestrator.specification.bounds import PATTERN_WORDS
from orchestrator.system.plain import brief, counted, has_secret, some_of

COMPLETE = ("duration", "bandwidth", "number", "comparison")
"""Types of errors with our own message, which includes the remedy (``simulation.spec``, ``chaos.plan``)."""
SYNONYMS = {
    "learning_rate": "lr",
    "batch": "batch_size",
    "seq_len": "sequence_length",
    "context_length": "sequence_length",
    "max_steps": "steps",
    "num_islands": "count",
    "group": "node_group",
    "gpus": "accelerators",
    "path": "files",
    "outer_lr": "lr",
    "codec": "wire",
    "h": "interval_steps",
    "b1": "beta1",
    "b2": "beta2",
    "eps": "epsilon",
    "num_fragments": "fragments",
    "gradient_accumulation": "accumulation",
    "grad_clip": "clip_norm",
    "dtype": "compute_dtype",
    "p": "fragments",
    "workers": "count",
    "replicas": "count",
    "region": "node_group",
    "max_tokens": "tokens",
    "lr_scale": "lr_ratio",
    "match": "tensors",
    "pattern": "tensors",
    "layers": "layer_count",
    "n_layers": "layer_count",
    "num_layers": "layer_count",
    "num_hidden_layers": "layer_count",
    "heads": "head_count",
    "n_heads": "head_count",
    "num_heads": "head_count",
    "num_attention_heads": "head_count",
    "kv_heads": "key_value_head_count",
    "n_kv_heads": "key_value_head_count",
    "num_key_value_heads": "key_value_head_count",
    "head_dim": "head_size",
    "vocab_size": "vocabulary_size",
    "d_model": "width",
    "n_embd": "width",
    "d_ff": "hidden_size",
    "intermediate_size": "hidden_size",
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
}
"""Names of other programs for our fields."""
ALIKE_MIN = 0.6
NAME_CHARACTERS_MAX = 60
WHOLE = "(the whole document)"
"""The path of a mistake that no single field makes."""
CHOICES_MAX = 30
MUST_BE = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a number that is not infinite",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "model_type": "a mapping of fields to values",
    "model_attributes_type": "a mapping of fields to values",
    "dict_type": "a mapping of fields to values",
    "greater_than": "above {gt:,}",
    "greater_than_equal": "at least {ge:,}",
    "less_than": "below {lt:,}",
    "less_than_equal": "at most {le:,}",
    "string_too_short": "at least {min_length:,} character long",
    "string_too_long": "at most {max_length:,} characters long",
    "too_short": "at least {min_length:,} long",
    "too_long": "at most {max_length:,} long",
}
WHOLE_MAX = 10**18
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_LISTS, _MAPPINGS = ("tuple_type", "list_type"), ("model_type", "model_attributes_type", "dict_type")

_BRANCH = re.compile(r"int|float|str|bool|constrained-\w+|(literal|dict|list|tuple)\[.*\]")
"""The names of a union's branches, which pydantic appends to the location of the value."""
_BRANCHES, _BRANCH_ERRORS = "union_branches", frozenset(MUST_BE) | {"literal_error", "string_pattern_mismatch"}

Location = tuple[int | str, ...]


def problems_of(
    error: ValidationError,
    *,
    unknown: str,
    missing: str = "Add it.",
    under: str = "",
    model: type[BaseModel] | None = None,
) -> list[Problem]:
    """Return the problems in the error, up to the number that is shown; ``omitted_count`` returns how many more there are.

    ``unknown`` and ``missing`` are remedies, ``under`` is the path of the document. With the document's ``model``, the
    remedy for an unknown name is the field that was probably meant.
    """
    return [
        problem_of(item, unknown=unknown, missing=missing, under=under, model=model)
        for item in _causes(error, model)[:PROBLEMS_MAX]
    ]


def omitted_count(error: ValidationError, model: type[BaseModel] | None = None) -> int:
    return max(0, len(_causes(error, model)) - PROBLEMS_MAX)


def wrong_places(error: ValidationError, model: type[BaseModel]) -> set[Location]:
    """Return the locations of invalid, missing and unknown values, and of the fields that unknown names probably mean."""
    items = _causes(error, model)
    return {item["loc"] for item in items} | _meant(items, model)


def path_of(location: Location, under: str = "") -> str:
    """Return a location as text, such as ``islands.0.count``. Keys are shortened, because they may be anything."""
    parts = [under] if under else []
    parts += [brief(part).replace("'", "") for part in location]
    return ".".join(parts) or WHOLE


def one_of(value: Any, names: Collection[str]) -> tuple[str, str]:
    """Return the message and the remedy for a value that is not one of these names."""
    listed = some_of(names, CHOICES_MAX)
    meant = closest(value, names) if isinstance(value, str) else None
    remedy = f"Did you mean {meant}?" if meant else "Use one of these." if len(names) > 1 else "Use this."
    return f"is {_given(value)}, but must be {'one of ' if len(names) > 1 else ''}{listed}.", remedy


def closest(name: str, names: Collection[str]) -> str | None:
    """Return the name that was most likely meant, or None if none is similar."""
    plain = _plain(name)
    by_plain = {_plain(each): each for each in names}
    if plain in by_plain:
        return by_plain[plain]
    matches = difflib.get_close_matches(plain, by_plain, 1, ALIKE_MIN)
    if not matches:
        matches = [each for each in by_plain if len(plain) >= 3 and (each.startswith(plain) or plain.startswith(each))][
            :1
        ]
    return by_plain[matches[0]] if matches else None


def valid_fields(model: type[BaseModel], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the top-level fields that are valid on their own, so that rules between them can be checked."""
    valid: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name not in document and field.is_required():
            continue
        try:
            annotated: Any = Annotated[field.annotation, field]
            valid[name] = TypeAdapter(annotated).validate_python(document.get(name, field.default))
        except ValidationError:
            continue
    return valid


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a field of this type may contain, also inside other types."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]


# ── causes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _causes(error: ValidationError, model: type[BaseModel] | None) -> list[Any]:
    """Return the errors without those that only follow from others."""
    items: list[Any] = error.errors(include_url=False)
    locations = {item["loc"] for item in items if item["type"] != "missing"}
    outer = {location[:length] for location in locations for length in range(len(location))}
    meant = _meant(items, model) if model is not None else set()

    def follows(item: Any) -> bool:
        return (item["type"] == "missing" and item["loc"] in meant) or (
            item["type"] == "too_short" and item["loc"] in outer
        )

    return joined(item for item in items if not follows(item))


def joined(items: Iterable[Any]) -> list[Any]:
    """Return pydantic's errors with one for each value that fits no branch of a union, instead of one for each branch."""
    by_place: dict[Location, Any] = {}
    for item in items:
        *place, last = item["loc"] or ("",)
        if item["type"] in _BRANCH_ERRORS and isinstance(last, str) and _BRANCH.fullmatch(last):
            union = by_place.setdefault(
                (*place, _BRANCHES), {**item, "type": _BRANCHES, "loc": tuple(place), "branches": []}
            )
            union["branches"].append(item)
        else:
            by_place[(*item["loc"], item["type"])] = item
    return list(by_place.values())


def _meant(items: Collection[Any], model: type[BaseModel]) -> set[Location]:
    """Return the locations of the fields that unknown names probably mean; only of as many as are shown, to save time."""
    unknown = [item["loc"] for item in items if item["type"] == "extra_forbidden"][:PROBLEMS_MAX]
    named = ((place[:-1], _field_meant(str(place[-1]), _section_at(model, place[:-1]))) for place in unknown)
    return {(*section, field) for section, field in named if field is not None}


def _section_at(model: type[BaseModel] | None, location: Location) -> type[BaseModel] | None:
    """Return the section at this location. Tags of unions and indices of entries are skipped."""
    sections = [model] if model is not None else []
    for part in location:
        named = [section.model_fields[part] for section in sections if part in section.model_fields]
        if named:
            sections = [section for field in named for section in sections_in(field.annotation)]
    return sections[0] if len(sections) == 1 else None


def _field_at(model: type[BaseModel] | None, location: Location) -> FieldInfo | None:
    """Return the field at this location; None if there is none, as for entries of a list."""
    section = _section_at(model, location[:-1])
    return section.model_fields.get(str(location[-1])) if section is not None and location else None


def _field_meant(name: str, section: type[BaseModel] | None) -> str | None:
    if section is None:
        return None
    synonym = SYNONYMS.get(_plain(name))
    return synonym if synonym in section.model_fields else closest(name, section.model_fields)


def _plain(name: str) -> str:
    return name[:NAME_CHARACTERS_MAX].lower().replace("-", "_").replace(" ", "_").strip("_")


def _elsewhere(name: str, model: type[BaseModel]) -> list[str]:
    """Return the paths of fields with this name in the whole document, those nearest to its top."""
    wanted = {_plain(name), SYNONYMS.get(_plain(name))}
    paths = [path for path, field in _all_fields(model) if field in wanted]
    depth = min((path.count(".") for path in paths), default=0)
    return [path for path in paths if path.count(".") == depth]


def _all_fields(model: type[BaseModel], under: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield f"{under}{name}", name
        for section in sections_in(field.annotation):
            yield from _all_fields(section, f"{under}{name}.")


# ── words ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def problem_of(
    item: Any,
    *,
    unknown: str = "Remove it.",
    missing: str = "Add it.",
    under: str = "",
    model: type[BaseModel] | None = None,
) -> Problem:
    """Return one of pydantic's errors as a problem."""
    path = path_of(item["loc"], under)
    match item["type"]:
        case kind if kind in COMPLETE:
            return Problem(path, item["msg"], "")
        case "value_error":  # from a section's own rule, which includes the remedy
            text = item["msg"].removeprefix("Value error, ")
            return Problem(path, text if text.endswith("?") else f"{text}.", "")
        case "missing":
            if item["loc"] and isinstance(item["loc"][-1], int):
                return Problem(path_of(item["loc"][:-1], under), f"has only {item['loc'][-1]} of its values.", missing)
            return Problem(path, "is missing.", missing)
        case "extra_forbidden":
            return Problem(path, "is unknown.", _remedy_for_name(item["loc"], unknown, model))
        case kind if kind == _BRANCHES:
            value, parts = item["input"], [_branch_words(branch) for branch in item["branches"]]
            names = [name for each in item["branches"] if each["type"] == "literal_error" for name in _choices(each)]
            meant = closest(value, names) if isinstance(value, str) else None
            remedy = f"Did you mean {meant}?" if meant else "Change it."
            return Problem(path, f"is {_given(value)}, but must be {' or '.join(dict.fromkeys(parts))}.", remedy)
        case "literal_error" | "enum":
            return Problem(path, *one_of(item["input"], _choices(item)))
        case "string_pattern_mismatch":
            return Problem(path, *_unfit_text(item["input"], item["ctx"]["pattern"]))
        case "union_tag_invalid":
            names = [name.strip(" '") for name in item["ctx"]["expected_tags"].split(",")]
            return Problem(path, *one_of(item["ctx"]["tag"], names))
        case "union_tag_not_found":
            return Problem(path, f"has no field {item['ctx']['discriminator']}, which selects its kind.", "Add it.")
    return Problem(path, *_unfit(item, _section_at(model, item["loc"]), _field_at(model, item["loc"])))


def _branch_words(item: Any) -> str:
    if item["type"] == "literal_error":
        return " or ".join(_choices(item))
    if item["type"] == "string_pattern_mismatch":
        return PATTERN_WORDS.get(item["ctx"]["pattern"], "of another form")
    return MUST_BE[item["type"]].format(**item.get("ctx", {}))


def _choices(item: Any) -> list[str]:
    """Return the values of a literal, which pydantic gives as one text: ``'a', 'b' or 'c'``."""
    return [name.strip("'") for name in item["ctx"]["expected"].replace(" or ", ", ").split(", ")]


def _remedy_for_name(location: Location, unknown: str, model: type[BaseModel] | None) -> str:
    name, section = str(location[-1]), _section_at(model, location[:-1])
    if model is None or section is None:
        return unknown
    *sections, field = name.split(".")
    if sections and field in getattr(_section_at(model, (*location[:-1], *sections)), "model_fields", ()):
        return f"Write {field} on a line of its own under {'.'.join(sections)}."
    if meant := _field_meant(name, section):
        return f"Did you mean {meant}?"
    if places := _elsewhere(name, model):
        return f"Did you mean {' or '.join(places[:3])}?"
    where = path_of(location[:-1]) if len(location) > 1 else "The document"
    return f"Remove it. {where} has {some_of(section.model_fields, CHOICES_MAX)}."


def _unfit_text(value: str, pattern: str) -> tuple[str, str]:
    words = PATTERN_WORDS.get(pattern, "of another form")
    return f"is {brief(value)}, but must be {words}.", "Change it."


def _unfit(item: Any, section: type[BaseModel] | None, field: FieldInfo | None) -> tuple[str, str]:
    kind, value = item["type"], item["input"]
    if kind in _MAPPINGS and value is None:
        return "is empty.", "Write its fields under it, or leave it out."
    if kind in ("too_short", "too_long"):
        context = {"min_length": 1, "max_length": 0, **item["ctx"]}
        limit = MUST_BE[kind].format(**context).removesuffix(" long")
        count = item["ctx"].get("actual_length") or len(value)
        return f"has {counted(count, 'value')}, but must have {limit}.", "Add or remove some."
    words = MUST_BE.get(kind)
    if words is None:
        return f"is {_given(value)}, which is not valid here.", "See its description in the reference."
    message = f"is {_given(value)}, but must be {words.format(**item.get('ctx', {}))}."
    if value is None:
        is_required = field is not None and field.is_required()
        return message, "Write its value." if is_required else "Write its value, or leave the field out."
    if kind in _LISTS:
        return message, _as_list(value, section, field)
    if kind in _MAPPINGS and section is not None:
        return message, _as_mapping(value, section)
    if kind.startswith(("int", "float", "bool")):
        return message, _as_number(kind, value)
    if kind == "string_type":
        return message, "Write one text." if isinstance(value, list | Mapping) else "Put it in quotation marks."
    return message, "Change it."


def _given(value: Any) -> str:
    """Return the value as it is written in a specification, shortened."""
    if value is None:
        return "empty"
    return str(value).lower() if isinstance(value, bool) else brief(value)


def _as_list(value: Any, section: type[BaseModel] | None, field: FieldInfo | None) -> str:
    if section is not None and not isinstance(value, Mapping):
        return f"Begin each entry with a dash. Its fields are {some_of(section.model_fields, CHOICES_MAX)}."
    if isinstance(value, Mapping):
        return "Begin each entry with a dash."
    kinds = get_args(field.annotation) if field is not None else ()
    if kinds and Ellipsis not in kinds:
        return f"Write {len(kinds)} values in brackets."
    is_short = isinstance(value, str | int) and len(brief(value)) <= NAME_CHARACTERS_MAX
    return f"Write it in brackets: [{value}]." if is_short else "Write a list."


def _as_mapping(value: Any, section: type[BaseModel]) -> str:
    name = re.split(r"[\s:=]", value[:NAME_CHARACTERS_MAX])[0] if isinstance(value, str) else ""
    if name in section.model_fields and name != value:
        return f"Write a colon and a space after {name}."
    return f"Its fields are {some_of(section.model_fields, CHOICES_MAX)}."


def _as_number(kind: str, value: Any) -> str:
    if kind.startswith("bool"):
        return "Write one of the two, without quotation marks."
    if isinstance(value, float) and value.is_integer() and abs(value) < WHOLE_MAX:
        return f"Write {int(value)}."
    if not isinstance(value, str):
        return "Write a number."
    if _NUMBER.fullmatch(value):
        return "Write it without quotation marks."
    return "Write the number alone, without a unit." if value[:1].isdigit() else "Write a number."


class Unknown(Exception):
    """A rule has read a value that is invalid in the document."""


WRONG: Any = object()


class KnownSection:
    """A section with some invalid values. Otherwise it reads as the section itself."""

    def __init__(self, model: type[BaseModel], values: Mapping[str, Any], fields_set: Collection[str]) -> None:
        self._model, self._values = model, values
        self.model_fields_set = set(fields_set)

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            return _read(self._values[name])
        own = inspect.getattr_static(self._model, name, None)
        if isinstance(own, property) and own.fget is not None:
            return own.fget(self)
        if inspect.isfunction(own) and not hasattr(BaseModel, name):
            return partial(own, self)
        raise Unknown


class KnownEntries(tuple[Any, ...]):
    """A list with some invalid entries."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return map(_read, super().__iter__())

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        return _read(super().__getitem__(index))


def right_part(
    model: type[BaseModel], document: Mapping[str, Any], wrong: Collection[Location]
) -> tuple[Any, list[Problem]]:
    """Return the document as its model reads it, without the wrong places, and the problems from the sections' own rules."""
    reading = _Reading(frozenset(wrong), frozenset(place[:length] for place in wrong for length in range(len(place))))
    return reading.section(model, document, ()), reading.problems


def collected(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems that a rule yields until it reads an invalid value."""
    so_far: list[Problem] = []
    with suppress(Unknown):
        for problem in problems:
            so_far.append(problem)  # one by one, to keep those before ``Unknown``
    return so_far


def _read(value: Any) -> Any:
    if value is WRONG:
        raise Unknown
    return value


@dataclass
class _Reading:
    """Reads one document. ``around`` are the locations that contain wrong ones."""

    wrong: frozenset[Location]
    around: frozenset[Location]
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def section(self, model: type[BaseModel], document: Any, here: Location) -> Any:
        if not isinstance(document, Mapping):
            return WRONG
        values = {name: self._field(model, name, document, here) for name in model.model_fields}
        section = KnownSection(model, values, document.keys() & model.model_fields.keys())
        self.problems += _of_own_rules(model, section, here)
        return section

    def _field(self, model: type[BaseModel], name: str, document: Mapping[str, Any], section: Location) -> Any:
        described, here = model.model_fields[name], (*section, name)
        if here in self.wrong:
            return WRONG
        if name not in document:
            return WRONG if described.is_required() else described.get_default(call_default_factory=True)
        value = document[name]
        if here not in self.around:
            return _validated(Annotated[described.annotation, described], value)
        sections = sections_in(described.annotation)
        if len(sections) != 1:
            return WRONG
        if not isinstance(value, list | tuple):
            return self.section(sections[0], value, here)
        return KnownEntries(self._entry(sections[0], entry, (*here, index)) for index, entry in enumerate(value))

    def _entry(self, model: type[BaseModel], entry: Any, here: Location) -> Any:
        if here in self.wrong:
            return WRONG
        return self.section(model, entry, here) if here in self.around else _validated(model, entry)


def _validated(kind: Any, value: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return WRONG


def _of_own_rules(model: type[BaseModel], section: KnownSection, here: Location) -> Iterator[Problem]:
    for decorator in model.__pydantic_decorators__.model_validators.values():
        if decorator.info.mode == "after":
            rule: Any = inspect.getattr_static(model, decorator.cls_var_name)
            try:
                getattr(rule, "wrapped", rule)(section)
            except Unknown:
                continue
            except ValueError as error:
                yield Problem(path_of(here), f"{error}.", "")


def secrets_in_urls(document: Any) -> tuple[Problem, ...]:
    """Return a problem, without the value, for every URL in the document that contains a password or a key.

    Specifications are stored, recorded on tapes and shown to viewers.
    """
    problems, left = [], [("", document)]
    while left:
        path, value = left.pop()
        if isinstance(value, Mapping):
            left += [(f"{path}.{name}" if path else str(name), part) for name, part in value.items()]
        elif isinstance(value, list | tuple):
            left += [(f"{path}[{index}]", part) for index, part in enumerate(value)]
        elif isinstance(value, str) and has_secret(value):
            message = "contains a password or a key in its URL, which everyone who may see the job could read."
            remedy = "Leave it out, and put credentials into the environment (such as AWS_SECRET_ACCESS_KEY)."
            problems.append(Problem(path, message, remedy))
    return tuple(sorted(problems, key=lambda problem: problem.path)[:PROBLEMS_MAX])
