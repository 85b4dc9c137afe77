"""Builds: which may work in one cluster, and that a change of what processes send each other raises the wire number."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import fields, is_dataclass

import pytest

from orchestrator import actors
from orchestrator.core import commands, messages
from orchestrator.parameters import wire_format
from orchestrator.system import release
from orchestrator.system.release import Build

RECORDED = {1: "0ba1778695504dc3", 2: "5f1739e67c433593", 3: "1f690ef8ada0923c"}
"""The digest of what travels, by wire number. Raise ``release.WIRE`` for a new one, and add a line."""


def _described(module: object) -> list[str]:
    lines = []
    for name, kind in sorted(vars(module).items()):
        if not inspect.isclass(kind) or kind.__module__ != getattr(module, "__name__", ""):
            continue
        if is_dataclass(kind):
            lines += [f"{name}.{field.name}: {field.type}" for field in fields(kind)]
        if getattr(kind, "_is_protocol", False):
            methods = {method: value for method, value in vars(kind).items() if inspect.isfunction(value)}
            lines += [f"{name}.{method}{inspect.signature(methods[method])}" for method in sorted(methods)]
    return lines


def _digest() -> str:
    described = [line for module in (actors, commands, messages) for line in _described(module)]
    return hashlib.sha256("\n".join([*described, wire_format._MAGIC.decode()]).encode()).hexdigest()[:16]


def test_a_change_of_what_travels_raises_the_wire_number() -> None:
    assert RECORDED.get(release.WIRE) == _digest()


@pytest.mark.parametrize(
    ("node", "head", "words"),
    [
        (Build("0.4.2", 3), Build("0.4.2", 3), None),
        (Build("0.4.2", 3), Build("0.4.9", 3), None),
        (Build("0.4.2", 3), Build("0.5.0", 3), None),
        (Build("0.5.2", 3), Build("0.4.0", 3), None),
        (Build("0.4.2", 3), Build("0.6.0", 3), "at most one minor release apart. Install atoll 0.6.0 here."),
        (Build("0.9.0", 3), Build("1.0.0", 3), "at most one minor release apart"),
        (Build("0.4.2", 3), Build("0.4.2", 4), "do not understand each other. Install atoll 0.4.2 here."),
    ],
)
def test_builds_join_by_the_rule(node: Build, head: Build, words: str | None) -> None:
    reason = release.refusal(node, head)
    assert reason is None if words is None else reason is not None and words in reason


def test_a_label_names_a_build_and_nothing_else_does() -> None:
    assert Build.parse(str(release.own())) == release.own()
    assert [Build.parse(text) for text in ("", "unknown", "0.1", "0.1_w", "_w1", "0.1_w1;", "0.1_w1\n")] == [None] * 7


@pytest.mark.parametrize(
    ("job", "places", "words"),
    [
        ("0.4.2_w3", [("the head", "0.4.2_w3"), ("node group asia", "0.5.0_w3")], None),
        ("0.4.9_w3", [("the head", "0.4.9_w3")], None),
        ("0.5.0_w3", [], "it runs as 0.5.0_w3 already"),
        ("0.5.1_w3", [], "it runs as 0.5.1_w3, and this service is 0.5.0_w3, which is not newer"),
        ("1.0.0_w3", [], "which is not newer"),
        ("", [], "does not name its release. Restart head and nodes with atoll 0.5.0"),
        ("0.4.2_w2", [("the head", "0.4.2_w2")], "the head has 0.4.2_w2, which does not understand 0.5.0_w3"),
        ("0.4.2_w3", [("node group asia", "0.3.0_w3")], "more than one minor release from 0.5.0_w3"),
        ("0.4.2_w3", [("node group asia", "unknown")], "node group asia does not name its release"),
    ],
)
def test_a_job_is_upgraded_by_the_rule_of_a_join(job: str, places: list[tuple[str, str]], words: str | None) -> None:
    reason = release.upgrade_refusal(job, Build("0.5.0", 3), places)
    assert reason is None if words is None else reason is not None and words in reason
