"""Errors as text: whatever carries them, what is told is what went wrong, in one line without commands to a terminal."""

from __future__ import annotations

import ast
import traceback
from pathlib import Path

import pytest

from orchestrator.errors import ConfigurationError, Conflict, InvalidJobSpec, Problem, first_line, in_words, origin

ROOT = Path(__file__).parent.parent
REFUSAL = ConfigurationError(detail="model.factory 'a:b' raises ValueError: no. Try it outside of a job first.")


class Unsendable(Exception):
    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.work = lambda: said


def carried(cause: Exception) -> Exception:
    """As ``ray.get`` raises what an actor raised, with Ray's colours."""
    from ray.exceptions import RayTaskError

    story = f"\x1b[36mray::Evaluator.outline()\x1b[39m (pid=7)\n  File ...\n{type(cause).__name__}: {cause}"
    error: Exception = RayTaskError("outline", story, cause, "ray::Evaluator", 7, "127.0.0.1").as_instanceof_cause()
    return error


@pytest.mark.parametrize(
    ("detail", "remedy", "told"),
    [
        ("vm is the last node", "Cordon the group.", "vm is the last node. Cordon the group."),
        ("It is full (0 bytes)", "Free some.", "It is full (0 bytes). Free some."),
        ("It is full.", "Free some.", "It is full. Free some."),
        ("It is full", "", "It is full"),
        ("It is full,", "free some.", "It is full, free some."),
    ],
)
def test_a_detail_and_its_remedy_are_two_sentences(detail: str, remedy: str, told: str) -> None:
    assert str(Conflict(detail=detail, remedy=remedy)) == told


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (REFUSAL, str(REFUSAL)),
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (SystemExit(3), "SystemExit: 3"),
        (ValueError("x" * 100_000), f"ValueError: {'x' * 1_000}…"),
        (RuntimeError("\x1b[31mred\x1b[0m\x07"), "RuntimeError: red"),
        (
            InvalidJobSpec(detail="it does not fit", problems=(Problem("model", "is large.", "Take less."),)),
            "it does not fit (1 problem): - model: is large. Take less.",
        ),
    ],
)
def test_an_error_says_the_same_whether_ray_carries_it_or_not(error: Exception, told: str) -> None:
    assert in_words(error) == told
    if isinstance(error, Exception):
        assert origin(carried(error)) is error
        assert in_words(carried(error)) == in_words(carried(carried(error))) == told


def test_an_error_that_cannot_be_sent_is_told_by_the_last_line_of_its_story() -> None:
    assert in_words(carried(Unsendable("ragged"))) == "Unsendable: ragged"


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ConfigurationError(detail="The folder is no place for that."), "The folder is no place for that."),
        (ValueError("a shape"), "ValueError: a shape"),
    ],
)
def test_an_actor_that_failed_to_begin_is_told_by_what_it_raised(raised: Exception, told: str) -> None:
    """Ray quotes a traceback and carries no error."""
    from ray.exceptions import ActorDiedError, RayTaskError

    story = "".join(traceback.format_exception(raised))
    error = ActorDiedError(RayTaskError("__init__", story, raised, "ray::Synchroniser", 7, "127.0.0.1"))
    assert in_words(error) == first_line(error) == told


def test_the_death_of_an_actor_is_told_in_its_first_line() -> None:
    from ray.exceptions import ActorDiedError

    assert first_line(ActorDiedError()) == "The actor died unexpectedly before finishing this task."


def test_no_error_that_ray_may_carry_becomes_text_by_another_way() -> None:
    """In every file that catches Ray's errors: an error is put into a text by ``in_words`` or ``first_line``."""
    found = []
    for path in sorted([*ROOT.glob("orchestrator/runtime/*.py"), *ROOT.glob("learners/**/*.py")]):
        tree = ast.parse(path.read_text())
        for handler in ast.walk(tree):
            if isinstance(handler, ast.ExceptHandler) and handler.name and "Ray" in ast.dump(handler.type or handler):
                found += [f"{path.name}:{each.lineno}" for each in ast.walk(handler) if _is_text_of(each, handler.name)]
    assert found == []


def _is_text_of(node: ast.AST, name: str) -> bool:
    """Whether the node makes text of the variable itself, as a part of an f-string or of a line in the log."""
    if isinstance(node, ast.FormattedValue):
        return isinstance(node.value, ast.Name) and node.value.id == name
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        into_text = called in ("str", "debug", "info", "warning", "error", "critical")
        return into_text and any(isinstance(each, ast.Name) and each.id == name for each in node.args)
    return False


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Interrupting(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class NotText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Mute(), "Mute"),
        (Mute("the layers do not fit", 3), "Mute: the layers do not fit"),
        (Interrupting(), "Interrupting"),
        (NotText(), "NotText"),
        (ValueError("no file \udcff\udcfe here"), "ValueError: no file \ufffd\ufffd here"),
        (ValueError(b"\xff\x00"), r"ValueError: b'\xff\x00'"),
        (ValueError("\x9b31mred\x9b0m\x90\x84"), "ValueError: red"),
        (ValueError("one\x85two"), "ValueError: one"),
    ],
)
def test_whatever_the_class_of_an_error_does_its_text_can_be_sent_and_kept(error: Exception, told: str) -> None:
    assert in_words(error) == told
    assert told.partition(": ")[2] in (first_line(error), "")
    in_words(error).encode()
