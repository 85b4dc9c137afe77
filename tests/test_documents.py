"""README and the runbook name only what there is: commands, options, files, headings, targets of make, variables."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.documents import README, ROOT, RUNBOOK, blocks, parse, prompted, quoted, unknown

DOCUMENTS = (README, RUNBOOK)
BY_NAME = [path.name for path in DOCUMENTS]
FOLDERS = ("api", "dashboards", "deploy", "learners", "orchestrator", "tests")
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
COMMANDS = [(path, words) for path in DOCUMENTS for words in prompted(path.read_text())]


@pytest.mark.parametrize(
    ("path", "words"), COMMANDS, ids=[f"{path.name}: {' '.join(words)}" for path, words in COMMANDS]
)
def test_a_command_that_is_typed_is_one_that_there_is(path: Path, words: list[str]) -> None:
    parse(words)


@pytest.mark.parametrize("path", DOCUMENTS, ids=BY_NAME)
def test_what_is_quoted_of_a_command_is_known(path: Path) -> None:
    text = path.read_text()
    assert prompted(text)
    assert quoted(text)
    assert [(words, unknown(words)) for words in quoted(text) if unknown(words)] == []


def test_a_command_that_there_is_not_would_be_found() -> None:
    for words in (["launch"], ["chaos", "heal"], ["kill", "latest", "asia", "--gently"]):
        assert unknown(words) == words[-1:]
        with pytest.raises(Exception, match=words[-1]):
            parse(words)
    for words in (["kill", "latest"], ["kill", "latest", "asia", "europe"]):  # too few, too many
        with pytest.raises(Exception, match=r"island|europe"):
            parse(words)


@pytest.mark.parametrize("path", DOCUMENTS, ids=BY_NAME)
def test_every_file_and_folder_that_is_named_exists(path: Path) -> None:
    text = path.read_text()
    linked = {target for target, _ in LINK.findall(text) if target and "://" not in target}
    named = set(re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", text))
    assert linked
    assert [name for name in sorted(linked) if not (path.parent / name).exists()] == []
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=BY_NAME)
def test_every_heading_that_is_linked_exists(path: Path) -> None:
    for target, heading in LINK.findall(path.read_text()):
        if heading:
            assert heading in headings((path.parent / target if target else path).read_text()), f"{target}#{heading}"


def test_every_target_of_make_module_and_variable_that_readme_names_exists() -> None:
    text, makefile = README.read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|\$ )make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for module in re.findall(r"python -m ([\w.]+)", text):
        place = ROOT.joinpath(*module.split("."))
        assert module == "pytest" or (place / "__main__.py").exists() or place.with_suffix(".py").exists(), module
    for part in re.findall(r"python -m tests\.bench (\w+)", text):
        assert (ROOT / "tests" / "bench" / f"{part}.py").exists(), part
    code = "\n".join(path.read_text() for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    for variable in set(re.findall(r"\bATOLL_\w+", text)):
        assert f'"{variable}"' in code, variable


def test_python_in_readme_is_python() -> None:
    found = [block.text for block in blocks(README.read_text()) if block.kind == "python"]
    assert found
    for text in found:
        ast.parse(text)


def headings(text: str) -> set[str]:
    """The headings of a document, as links name them."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
