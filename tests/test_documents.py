"""Documents name only what there is: commands, options, files, headings, targets of make, variables; and they stay readable.

Decisions are history: they may name what was there when they were made, but their links and their width are held as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from docs import generate
from tests.documents import (
    DECISIONS,
    DOCS,
    FENCE,
    LINK,
    README,
    ROOT,
    blocks,
    documents,
    headings,
    parse,
    prompted,
    quoted,
    unknown,
)
from tests.run_files import undescribed

FOLDERS = ("api", "dashboards", "deploy", "docs", "learners", "orchestrator", "tests")
COLUMNS_MAX, README_LINES_MAX = 110, 120
ALTERNATIVES_WORDS_MIN = 10
"""The shortest comparison says what the other way was and what is wrong with it."""
ALL = documents()
PRESENT = [path for path in ALL if path.parent != DECISIONS or path.name == "README.md"]


def faults(paths: list[Path], faults_of: Callable[[Path, str], Iterator[str]]) -> list[str]:
    """What is wrong with these documents, each fault with the document's name."""
    return [f"{path.relative_to(ROOT)}: {fault}" for path in paths for fault in faults_of(path, path.read_text())]


# ── what is there ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_command_that_is_typed_is_one_that_there_is() -> None:
    def mistyped(_: Path, text: str) -> Iterator[str]:
        for words in prompted(text):
            try:
                parse(words)
            except Exception as error:
                yield f"{' '.join(words)}: {error}"

    assert faults(PRESENT, mistyped) == []


def test_what_is_quoted_of_a_command_is_known() -> None:
    def misquoted(_: Path, text: str) -> Iterator[str]:
        return (f"{words}: {unknown(words)}" for words in quoted(text) if unknown(words))

    assert faults(PRESENT, misquoted) == []


def test_a_command_that_there_is_not_would_be_found() -> None:
    for words in (["launch"], ["chaos", "heal"], ["kill", "latest", "asia", "--gently"]):
        assert unknown(words) == words[-1:]
        with pytest.raises(Exception, match=words[-1]):
            parse(words)
    for words in (["kill", "latest"], ["kill", "latest", "asia", "europe"]):  # too few, too many
        with pytest.raises(Exception, match=r"island|europe"):
            parse(words)


def test_every_link_resolves() -> None:
    @cache
    def headings_of(path: Path) -> set[str]:
        return headings(path.read_text()) if path.exists() else set()

    def broken_links(path: Path, text: str) -> Iterator[str]:
        for target, heading in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
            if "://" in target:
                continue
            place = path.parent / target if target else path
            if not place.exists() or (heading and heading not in headings_of(place)):
                yield f"{target}#{heading}"

    assert faults(ALL, broken_links) == []


def test_every_file_target_of_make_module_and_variable_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    program = "\n".join(path.read_text() for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    variables = set(re.findall(r'"(ATOLL_[A-Z_]+)"', program))

    def missing(_: Path, text: str) -> Iterator[str]:
        named = set(re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", text))
        yield from (name for name in sorted(named) if not any((ROOT / f"{name}{end}").exists() for end in ("", ".py")))
        yield from (
            f"make {target}" for target in re.findall(r"(?:`|\$ )make ([a-z-]+)", text) if target not in targets
        )
        for module in set(re.findall(r"python -m ([\w.]+\w)", text)) - {"pytest"}:
            place = ROOT.joinpath(*module.split("."))
            if not (place / "__main__.py").exists() and not place.with_suffix(".py").exists():
                yield f"python -m {module}"
        for part in re.findall(r"python -m tests\.bench ([\w-]+)", text):
            module = ROOT / "tests" / "bench" / f"{part.replace('-', '_')}.py"
            if not module.exists() and f'"{part}": ' not in (ROOT / "tests" / "bench" / "__main__.py").read_text():
                yield f"python -m tests.bench {part}"
        yield from sorted(set(re.findall(r"\bATOLL_[A-Z_]+", text)) - variables)

    assert faults(PRESENT, missing) == []


def test_every_loss_names_a_test_or_says_that_it_is_not_survived() -> None:
    text = (DOCS / "guide" / "durability-and-recovery.md").read_text()
    section = text.partition("\n## What is lost when what is lost\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for lost, consequence, evidence in rows:
        files = re.findall(r"`(tests/[\w/]+\.py)`", evidence)
        assert consequence.strip(), lost
        assert files or evidence.strip() == "none: it is not survived", lost
        for file in files:
            assert re.search(r"^def test_", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no test"


def test_python_in_a_document_is_python() -> None:
    def no_python(_: Path, text: str) -> Iterator[str]:
        for block in blocks(text):
            if block.kind == "python":
                try:
                    ast.parse(block.text)
                except SyntaxError as error:
                    yield str(error)

    assert faults(PRESENT, no_python) == []


# ── what is said once ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_generated_reference_is_what_the_code_says() -> None:
    stale = [path.name for path, text in generate.rendered().items() if path.read_text() != text]
    assert stale == [], "run `make reference`"


def test_every_field_command_and_message_is_in_its_reference() -> None:
    """Of the generator: what it would leave out by mistake nobody would miss."""
    pages = {path.name: text for path, text in generate.rendered().items()}
    for wanted in ("`grace_margin`: a number from 0 to below 1, default `0.8`", "## `synchroniser.durability`"):
        assert wanted in pages["config.md"]
    for wanted in ("## `atoll chaos verdict`", "## `atoll tape fit`", "`--stay-down`"):
        assert wanted in pages["cli.md"]
    for wanted in ("### MergeFragment", "- `inputs`: `tuple[WeightedPayload, ...]`", "### RefusalReason"):
        assert wanted in pages["events-and-effects.md"]


def test_a_file_of_a_run_that_nobody_described_is_found(tmp_path: Path) -> None:
    """Live jobs are asked for it, at their end."""
    for name in ("tape.jsonl", "logs/islands/asia-2.log.older", "checkpoints/000001/fragment-0001.residue", "notes"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert undescribed(tmp_path) == ["notes"]


PAGES = sorted(path for path in DECISIONS.glob("*.md") if path.name != "README.md")


def test_every_decision_is_in_the_index_once_and_has_a_status() -> None:
    index = (DECISIONS / "README.md").read_text()
    indexed = [target for target, _ in LINK.findall(index) if "/" not in target]
    assert sorted(indexed) == [path.name for path in PAGES]
    assert [path.name for path in PAGES if not re.search(r"^- Status: \w", path.read_text(), re.MULTILINE)] == []
    numbers = [path.name[:4] for path in PAGES]
    assert len(set(numbers)) == len(numbers)  # gaps are decisions that compared nothing


def test_a_decision_compares_alternatives() -> None:
    """Otherwise it is a commit body, a line of the changelog or a sentence of a docstring, and no page."""

    def lacking(page: Path, text: str) -> Iterator[str]:
        if not text.startswith(f"# {page.name[:4]}. "):
            yield "its title does not begin with its number"
        sections = dict(re.findall(r"^## ([^\n]+)\n+(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
        yield from ({"Choice", "Alternatives"} - sections.keys())
        if len(sections.get("Alternatives", "").split()) < ALTERNATIVES_WORDS_MIN:
            yield "no alternative is compared"
        if re.search(r"\bnone is recorded\b", text, re.IGNORECASE):
            yield "none is recorded"

    assert faults(PAGES, lacking) == []


def test_the_glossary_is_sorted_and_short() -> None:
    _, glossary = (DOCS / "concepts.md").read_text().split("## Glossary")
    words = [line.split("|")[1].strip().lower() for line in glossary.splitlines() if line.startswith("| ")][1:]
    assert words == sorted(words)
    assert 30 <= len(words) <= 50


MEASURED = re.compile(r"20\d\d-\d\d-\d\d[^.]*?\b[0-9a-f]{7}\b", re.DOTALL)
RUN = re.compile(r"`(?:ATOLL_\w+=\S+ )?(?:make|python|atoll)\s|^\$ ", re.MULTILINE)


def figures(page: str) -> list[str]:
    """What the page of results has of figures: each item of a list, and each section with a table."""
    sections = re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]
    items = [item for section in sections for item in re.split(r"^- ", section, flags=re.MULTILINE)[1:]]
    return items + [section for section in sections if "\n|" in section]


def test_a_figure_has_a_command_a_date_and_a_commit() -> None:
    results = figures((DOCS / "results.md").read_text())
    assert results
    assert [figure for figure in results if not (RUN.search(figure) and MEASURED.search(figure))] == []


# ── what can be read ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_pages_state_one_order_of_upgrade() -> None:
    """Service, head, nodes: a service may be newer than its cluster, and a node joins only a head of its wire number."""

    def order(page: str, heading: str) -> list[str]:
        section = (ROOT / "docs" / "guide" / page).read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
        return re.findall(r"^\d\. (?:The )?\*\*(?:The )?(\w+)\*\*", section, re.MULTILINE)

    assert order("upgrade.md", "Several machines") == ["service", "jobs", "head", "nodes"]
    assert order("kubernetes.md", "Upgrade") == ["service", "head", "workers"]


def test_readme_fits_a_screen_or_three() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= README_LINES_MAX
    assert [line for line in lines if len(line) > COLUMNS_MAX] == []


def test_no_line_of_prose_is_wider_than_an_editor() -> None:
    """A table's row cannot be broken, nor can a single word, such as a test's name or a link."""

    def wide(_: Path, text: str) -> Iterator[str]:
        lines = FENCE.sub("", text).splitlines()
        long = (line for line in lines if len(line) > COLUMNS_MAX and not line.startswith("|"))
        return (line for line in long if len(line.strip().removeprefix("- ").split()) > 1)

    assert faults(ALL, wide) == []


MARKER = re.compile(r"\s{0,3}(?:[-+*]|1[.)]|>|#+) ")
IN_PLACE = re.compile(r"\s*(?:[-+*]|\d+\.) |\s+\S|>|#|\||<!--")
"""What a list's item, a quote, a heading or a table may follow without an empty line."""


def broken(text: str) -> list[str]:
    """Lines of prose that are something else than prose by how their text happened to be broken, or a row without a cell."""
    lines = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text).splitlines()
    interrupting = [
        line for before, line in pairwise(lines) if before.strip() and MARKER.match(line) and not IN_PLACE.match(before)
    ]
    quotes = [line for line in lines if re.match(r">.* > ", line)]
    rows = [row for before, row in pairwise(lines) if {before[:1], row[:1]} == {"|"} and cells(before) != cells(row)]
    return interrupting + quotes + rows


def cells(row: str) -> int:
    return re.sub(r"`[^`]*`|\\\|", "", row).count("|")


def test_no_text_turns_into_a_list_a_quote_or_another_table_where_its_lines_are_broken() -> None:
    assert faults(ALL, lambda _, text: iter(broken(text))) == []


def test_what_breaks_would_be_found() -> None:
    for text in ("trained = merged\n+ discarded", "> one, > two", "| a | b |\n| 1 |", "a share of\n- 1 per cent"):
        assert broken(text)
    for text in ("- one\n- two", "> one\n> two", "1. one\n   two\n2. three", "## one\n- two"):
        assert broken(text) == []
