"""The mistakes that people make in specifications: each is told once, in plain words, with what was meant."""

from __future__ import annotations

import copy
import random
import re
import time
from typing import Any

import pytest
from pydantic import BaseModel

from orchestrator.chaos.plan import ChaosPlan
from orchestrator.errors import ConfigurationError, InvalidJobSpec, Problem
from orchestrator.simulation.spec import SimulationSpec
from orchestrator.specification import bounds
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.documents import read_yaml
from orchestrator.specification.validation import MUST_BE, sections_in

SMALLEST: dict[str, Any] = {"islands": [{"node_group": "us-east"}], "budget": {"steps": 10}}
RAW = re.compile(
    r"Input should|should be|should match|valid (tuple|integer|dict|string)|permitted|\^\[|Value error|pydantic|any token"
)
"""Of pydantic's sentences, and of libyaml's."""


def problems_of(document: dict[str, Any]) -> tuple[Problem, ...]:
    with pytest.raises(InvalidJobSpec) as refused:
        parse_job(document)
    assert not RAW.search(str(refused.value)), str(refused.value)
    return refused.value.problems


def inner(**fields: Any) -> dict[str, Any]:
    return {"training": {"inner_optimizer": fields}}


def islands(*entries: Any) -> dict[str, Any]:
    return {"islands": list(entries)}


MISTAKES: list[tuple[dict[str, Any], dict[str, str]]] = [
    (
        {"synchroniser": {"quorum": 9}, **islands({"node_group": "A", "count": 2})},
        {"islands.0.node_group": "must be 1 to 40", "synchroniser.quorum": "the job has 2 islands"},
    ),
    (
        {"data": {"begin_token": "nothing"}},
        {"data.begin_token": "is 'nothing', but must be a whole number or tokenizer or none"},
    ),
    ({"name": "My Job"}, {"name": "is 'My Job', but must be 1 to 40 characters of a-z, 0-9 and '-'"}),
    (islands({"node_group": "US"}), {"islands.0.node_group": "is 'US', but must be 1 to 40 characters of a-z"}),
    (
        {"islands": {"node_group": "a"}},
        {"islands": "is a mapping of 1 field, but must be a list. Begin each entry with a dash"},
    ),
    ({"islands": "us-east"}, {"islands": "is 'us-east', but must be a list. Begin each entry with a dash. Its"}),
    ({"islands": []}, {"islands": "has 0 values, but must have at least 1"}),
    ({"islands": None}, {"islands": "is empty, but must be a list. Write its value."}),
    (islands("us-east"), {"islands.0": "must be a mapping of fields to values. Its fields are node_group, count"}),
    ({"budget": None}, {"budget": "is empty. Write its fields under it"}),
    ({"budget": 10}, {"budget": "is 10, but must be a mapping of fields to values. Its fields are"}),
    (
        {"budget": {"steps": "10"}},
        {"budget.steps": "is '10', but must be a whole number. Write it without quotation marks"},
    ),
    ({"budget": {"steps": 1.5}}, {"budget.steps": "is 1.5, but must be a whole number"}),
    ({"budget": {"steps": 1e5}}, {"budget.steps": "is 100000.0, but must be a whole number. Write 100000."}),
    ({"budget": "steps: 10"}, {"budget": "is 'steps: 10', but must be a mapping of fields to values. Write a colon"}),
    ({"budget.steps": 10, "budget": ...}, {"budget.steps": "Write steps on a line of its own under budget."}),
    ({"recovery": {"backoff_max_s": "30s"}}, {"recovery.backoff_max_s": "Write the number alone, without a unit."}),
    ({"synchroniser": {"overlap_steps": None}}, {"synchroniser.overlap_steps": "is empty, but must be a whole number"}),
    ({"synchroniser": {"adoption": None}}, {"synchroniser.adoption": "is empty, but must be one of replace, mix"}),
    (
        {"synchroniser": {"bogus": 1, "quorum": 9}, **islands({"node_group": "a", "bogus": 1, "accelerators": 3})},
        {
            "synchroniser.bogus": "is unknown. Remove it. synchroniser has fragments",
            "synchroniser.quorum": "is 9, but the job has 1 island",
            "islands.0.bogus": "is unknown. Remove it. islands.0 has node_group",
            "islands.0.accelerators": "is 3 with accelerator 'cpu'",
        },
    ),
    ({"budget": {"steps": 1, "tokens": 9, "bogus": 1}}, {"budget.bogus": "is unknown", "budget": "exactly one of"}),
    (
        {"model": {"decoder": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}}},
        {
            "model.decoder.layers": "Did you mean layer_count?",
            "model.decoder.heads": "Did you mean head_count?",
            "model.decoder.kv_heads": "Did you mean key_value_head_count?",
            "model.decoder.head_dim": "Did you mean head_size?",
        },
    ),
    ({"budget": {"steps": True}}, {"budget.steps": "is true, but must be a whole number. Write a number."}),
    ({"budget": {"steps": 0}}, {"budget.steps": "is 0, but must be at least 1"}),
    ({"budget": {"step": 10}}, {"budget.step": "Did you mean steps?"}),
    ({"budgte": {"steps": 1}, "budget": ...}, {"budgte": "Did you mean budget?"}),
    ({"budget": ...}, {"budget": "is missing. Add it."}),
    ({"model": {"preset": "llama3-8b"}}, {"model.preset": "Did you mean llama3.1-8b?"}),
    ({"model": {"preset": "Nano"}}, {"model.preset": "Did you mean nano?"}),
    ({"model": {"preset": "gpt2"}}, {"model.preset": "must be one of nano, micro, small,"}),
    ({"model": {"factory": "mymodel"}}, {"model.factory": "is 'mymodel', but must be package.module:function"}),
    (
        {"model": {"factory": "a.b:c", "preset": "small", "decoder": {}}},
        {
            "model.decoder.layer_count": "is missing",
            "model.decoder.head_size": "is missing",
            "model.decoder.width": "is missing",
            "model.decoder.head_count": "is missing",
            "model": "has factory and decoder",
            "model.decoder.key_value_head_count": "is missing",
        },
    ),
    (
        {"model": {"factory": "a.b:c", "vocabulary_size": 300, "remat": "all"}},
        {"model.remat": "must be one of none, dots, full", "model": "has factory and vocabulary_size"},
    ),
    ({"trainer": "mytrainer.create"}, {"trainer": "must be package.module:function"}),
    ({"evaluation": {"every_steps": 10}}, {"evaluation.every_steps": "Did you mean every_merges?"}),
    (inner(learning_rate=1e-3), {"training.inner_optimizer.learning_rate": "Did you mean lr?"}),
    ({"training": {"learning_rate": 1e-3}}, {"training.learning_rate": "Did you mean training.inner_optimizer.lr or"}),
    ({"quorum": 2}, {"quorum": "Did you mean synchroniser.quorum?"}),
    ({"synchronizer": {"quorum": 3}}, {"synchronizer": "Did you mean synchroniser?"}),
    ({"optimiser": {}}, {"optimiser": "is unknown."}),
    ({"colour": "red"}, {"colour": "Remove it. The document has name, model, data"}),
    (
        inner(lr="fast"),
        {"training.inner_optimizer.lr": "is 'fast', but must be a number. Write a number."},
    ),
    (inner(lr=-1.0), {"training.inner_optimizer.lr": "is -1.0, but must be at least 1e-12"}),
    (inner(lr=float("nan")), {"training.inner_optimizer.lr": "must be a number that is not infinite"}),
    (inner(kind="adam"), {"training.inner_optimizer.kind": "Did you mean adamw?"}),
    (inner(groups=[{}]), {"training.inner_optimizer.groups.0": "names no tensors"}),
    (
        inner(kind="muon", factory="a.b:c", beta1=1.0),
        {
            "training.inner_optimizer.beta1": "must be below 1",
            "training.inner_optimizer": "has kind muon and a factory",
        },
    ),
    (
        {"synchroniser": {"wire": "int3"}},
        {"synchroniser.wire": "is 'int3', but must be one of float32, bfloat16, int8"},
    ),
    ({"synchroniser": {"wire": {"up": "bf16"}}}, {"synchroniser.wire.up": "Did you mean bfloat16?"}),
    ({"synchroniser": {"quorum": 3}}, {"synchroniser.quorum": "is 3, but the job has 1 island. Lower it to at most 1"}),
    (
        {"synchroniser": {"quorum": 3, "interval_steps": "a", "overlap_steps": 99}},
        {"synchroniser.interval_steps": "must be a whole number", "synchroniser.quorum": "the job has 1 island"},
    ),
    (
        {"synchroniser": {"quorum": 9}, **islands({"node_group": "a", "count": "2"})},
        {"islands.0.count": "whole number"},
    ),
    (
        islands({"node_group": "A"}, {"node_group": "b", "accelerators": 2}, {"node_group": "c", "count": 0}),
        {
            "islands.0.node_group": "must be 1 to 40",
            "islands.1.accelerators": "is 2 with accelerator 'cpu'",
            "islands.2.count": "must be at least 1",
        },
    ),
    (islands({"node_group": "a", "accelerator": "gpu"}), {"islands.0.accelerators": "is 0 with accelerator 'gpu'"}),
    (
        islands({"node_group": "a", "accelerator": "cuda", "accelerators": 1}),
        {"islands.0.accelerator": "one of cpu, gpu, tpu"},
    ),
    (
        islands({"node_group": "a", "mesh": {"tensor": 3}}) | {"model": {"preset": "smal"}},
        {"model.preset": "Did you mean small?"},
    ),
    ({"training": {"batch_size": 0, "accumulation": 3}}, {"training.batch_size": "must be at least 1"}),
    ({"data": {"source": "file", "files": ["/a.txt"]}}, {"data.source": "Did you mean files?"}),
    (
        {"data": {"source": "files", "files": "/a.txt"}},
        {"data.files": "must be a list. Write it in brackets: [/a.txt]"},
    ),
    ({"data": {"source": "streamed", "sources": {"name": "a"}}}, {"data.sources": "must be a list. Begin each entry"}),
    ({"data": {"source": "streamed", "sources": [{"name": "a"}]}}, {"data.sources.0": "has no files"}),
    (
        {"data": {"files": ["/a\x07.txt"]}},
        {"data.files.0": "must be without control characters"},
    ),
    ({"data": {"files": "x" * 9_999}}, {"data.files": "…, but must be a list. Write a list."}),
    (
        islands({"node_group": ["a", "b"]}),
        {"islands.0.node_group": "is a list of 2 values, but must be text. Write one"},
    ),
    ({"transport": {"ports": "5000-6000"}}, {"transport.ports": "must be a list. Write 2 values in brackets."}),
    ({"transport": {"ports": [1]}}, {"transport.ports": "has only 1 of its values"}),
    ({"transport": {"ports": [5, 1]}}, {"transport": "ports are 5 to 1"}),
    (
        {"transport": {"ports": [5, 1], "shared_memory": "maybe"}},
        {"transport.shared_memory": "must be true or false", "transport": "ports are 5 to 1"},
    ),
    ({"training": []}, {"training": "is [], but must be a mapping of fields to values. Its fields are batch_size"}),
    ({"training": None}, {"training": "is empty."}),
    ({"seed": 2**40}, {"seed": "must be at most 2,147,483,647"}),
]


@pytest.mark.parametrize(("changes", "expected"), MISTAKES, ids=lambda value: next(iter(value), "") if value else "")
def test_a_mistake_is_told_once_with_what_was_meant(changes: dict[str, Any], expected: dict[str, str]) -> None:
    document = {name: value for name, value in {**copy.deepcopy(SMALLEST), **changes}.items() if value is not ...}
    problems = problems_of(document)
    assert sorted(problem.path for problem in problems) == sorted(expected)
    for problem in problems:
        assert expected[problem.path] in f"{problem.message} {problem.remedy}"


def test_mistakes_of_every_section_are_told_at_once() -> None:
    """Those of the table that are of different sections, in one document."""
    document, expected = copy.deepcopy(SMALLEST), set[str]()
    for changes, problems in MISTAKES:
        is_of_one_section = all(path.partition(".")[0] in JobSpec.model_fields for path in problems)
        if is_of_one_section and not changes.keys() & document.keys():
            document |= copy.deepcopy(changes)
            expected |= problems.keys()
    assert len(expected) > 8
    assert {problem.path for problem in problems_of(document)} == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a:\n\tb: 1", "line 2, column 1: there is a tab"),
        ("a: @x", "column 4: a text may not begin with '@'. Put it in quotation marks"),
        ("a: b: c", "a colon is not allowed here"),
        ("a: [1, 2", "a list in brackets .* is not closed"),
        ("a: {b: 1", "a mapping in braces .* is not closed"),
        ("a: 'x", "a quotation mark is not closed"),
        ("a:\n  - x\n y: 1", "line 3, column 2: the line does not fit those above. Correct its indentation"),
        (" a: 1\nb: 2", "the document ends before this line"),
        ("- a\nb: 1", "has no dash"),
        ("a: - b", "a list cannot begin here"),
        ('a: "\\q"', "unknown escape sequence in double quotation marks"),
    ],
)
def test_what_is_no_yaml_is_told_in_plain_words(text: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as refused:
        read_yaml(text)
    assert not re.search("token|while|expected|context", str(refused.value))


def told_of(document: dict[str, Any]) -> tuple[Problem, ...]:
    try:
        parse_job(document)
    except InvalidJobSpec as error:
        return error.problems
    return ()


@pytest.mark.parametrize("model", [JobSpec, ChaosPlan, SimulationSpec])
def test_every_pattern_of_a_field_has_words(model: type[BaseModel]) -> None:
    schema = str(model.model_json_schema())
    patterns = set(re.findall(r"'pattern': '([^']*)'", schema))
    assert {pattern.encode().decode("unicode_escape") for pattern in patterns} <= bounds.PATTERN_WORDS.keys()


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    3,
    10**7,
    2.5,
    float("inf"),
    "",
    "x",
    "A b",
    "cpu",
    "int4",
    [],
    [1],
    ["x"],
    {},
    {"x": 1},
    [{}],
]


def test_whatever_stands_in_any_field_is_told_in_our_words() -> None:
    """Each field of each section gets values of all kinds, alone and with others; nothing else is raised."""
    chance, seen = random.Random(7), set[str]()
    for _ in range(1_500):
        document = copy.deepcopy(SMALLEST)
        for _ in range(chance.choice((1, 1, 2, 4))):
            place: dict[str, Any] = document
            section: type[BaseModel] = JobSpec
            while True:
                name = chance.choice(list(section.model_fields))
                inside = sections_in(section.model_fields[name].annotation)
                if not inside or chance.random() < 0.2:
                    place[name] = copy.deepcopy(chance.choice(VALUES))
                    break
                section, below = inside[0], place.get(name)
                if isinstance(below, list) and below and isinstance(below[0], dict):
                    place = below[0]
                elif isinstance(below, dict):
                    place = below
                else:
                    place[name] = {}
                    place = place[name]
        told = told_of(document)
        text = " ".join(map(str, told))
        assert not RAW.search(text), (document, text)
        assert "is not valid here" not in text, (document, text)
        seen |= {problem.path for problem in told}
    assert len(seen) > 100


def test_a_document_with_thousands_of_mistakes_costs_no_more_than_it_must() -> None:
    wrong = [{"node_group": "A", "nmae": number, "mesh": {"tnesor": 2}, "count": 0} for number in range(5_000)]
    unknown = {f"field-{number}-{'x' * 1_000}": 1 for number in range(2_000)}
    began = time.process_time()
    problems = problems_of({"islands": wrong, "budget": {"steps": 1}, **unknown})
    assert len(problems) == 50
    assert time.process_time() - began < 20, "of processor time, several times what it takes"


def test_all_that_must_be_is_said_of_a_kind_that_pydantic_knows() -> None:
    from pydantic_core import PydanticKnownError

    context = {
        "gt": 1,
        "ge": 1,
        "lt": 1,
        "le": 1,
        "min_length": 1,
        "max_length": 1,
        "field_type": "Tuple",
        "actual_length": 1,
    }
    for kind in MUST_BE:
        assert PydanticKnownError(kind, {**context, "class_name": "x", "error": "x"}).type == kind  # type: ignore[arg-type]
