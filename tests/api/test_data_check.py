"""What is wrong with the files of a job is told when it is submitted, all at once, and never where they cannot be seen."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.jobs.path_check import problems_outside_roots, unseen_problems
from orchestrator.errors import InvalidJobSpec, Problem
from orchestrator.specification import data_check
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.data_check import data_problems, with_found_files, with_stored_bytes
from orchestrator.status import UnseenFile
from orchestrator.system.roots import EVERYTHING, AllowedRoots, Root, place_of
from orchestrator.text import parquet_bytes

LINES = b'{"text": "one", "id": 1}\n{"text": null, "id": 2}\n'
ROOTS = AllowedRoots(data=(*EVERYTHING.data, Root(place_of("memory://checked"))))
Check = Callable[..., dict[str, Problem]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    def checked(*files: str, source: str = "streamed", held_out: Sequence[str] = (), on: str = "head", **more: object):
        paths = [name if "://" in name else str(tmp_path / name) for name in files]
        data: dict[str, object] = {"source": source, "unreadable_max": more.pop("unreadable_max", 0)}
        if source == "files":
            data |= {"files": paths, **more}
        else:
            data["sources"] = [{"name": "a", "files": paths, "held_out": [str(tmp_path / n) for n in held_out], **more}]
        evaluation = {"on": on} | ({"node_group": "g"} if on == "node_group" else {})
        document = {"islands": [{"node_group": "g"}], "budget": {"steps": 1}, "data": data, "evaluation": evaluation}
        return {problem.path: problem for problem in data_problems(parse_job(document), ROOTS)}

    (tmp_path / "good.jsonl").write_bytes(LINES)
    (tmp_path / "good.json.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "other.jsonl").write_bytes(LINES.replace(b"text", b"body"))
    (tmp_path / "some.jsonl").write_bytes(LINES + b'{"text": 5}\n{"id": 3}\n')
    (tmp_path / "zipped.txt").write_bytes(gzip.compress(LINES))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(LINES * 99)[:-20])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    for name, column in (("good.parquet", "text"), ("other.parquet", "body")):
        pyarrow.parquet.write_table(pa.table({"id": [1], column: ["a"]}), tmp_path / name)
    pyarrow.parquet.write_table(pa.table({"text": [1]}), tmp_path / "numbers.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "good.parquet").read_bytes()[:-9])
    return checked


def test_files_that_are_what_they_should_be_have_no_problem(check: Check) -> None:
    for source in ("files", "streamed"):
        assert check("good.jsonl", "good.json.gz", "good.parquet", "empty.jsonl", source=source) == {}
    assert check("good.jsonl", held_out=["good.json.gz"]) == {}


@pytest.mark.parametrize(
    ("name", "field", "said"),
    [
        ("gone.jsonl", "files.0", "which does not exist here. Correct the path"),
        ("folder", "files.0", "is not a regular file. Name the files of a folder"),
        (
            "other.jsonl",
            "text_field",
            "its first 2 lines has no field 'text' (text_field); it has 'body', 'id'. Set it to",
        ),
        ("other.parquet", "text_field", "has no such column; it has 'id', 'body'. Set it to"),
        ("numbers.parquet", "text_field", "has int64 in that column, not text"),
        ("zipped.txt", "files.0", "is compressed by gzip, but its name says text. Add .gz"),
        (
            "some.jsonl",
            "files.0",
            "2 of the first records cannot be read, but data.unreadable_max is 0: the line at",
        ),
        ("cut.jsonl.gz", "files.0", "it cannot be read: Compressed file ended before the end-of-stream marker"),
        ("cut.parquet", "files.0", "its end is not that of a Parquet file; it is truncated"),
        ("empty.jsonl", "files", "has only empty files"),
    ],
)
def test_what_an_island_would_end_by_is_told_at_submission_of_either_source(
    check: Check, name: str, field: str, said: str
) -> None:
    streamed, whole = check(name), check(name, source="files")
    assert list(streamed) == [f"data.sources.0.{field}"]
    assert list(whole) == [f"data.{field}"]
    for problem in (*streamed.values(), *whole.values()):
        assert said in str(problem), problem


def test_records_that_the_job_passes_over_are_no_problem(check: Check) -> None:
    assert check("some.jsonl", unreadable_max=2) == {}
    assert list(check("some.jsonl", unreadable_max=1)) == ["data.sources.0.files.0"]
    assert check("cut.jsonl.gz", unreadable_max=1) == {}
    assert list(check("zipped.txt", unreadable_max=999)) == ["data.sources.0.files.0"], (
        "compressed bytes are never text"
    )


def test_all_problems_are_told_at_once_and_missing_files_together(check: Check) -> None:
    problems = check("gone-1.jsonl", "good.jsonl", "gone-2.jsonl", "zipped.txt", held_out=["other.jsonl"])
    assert list(problems) == ["data.sources.0.files", "data.sources.0.files.3", "data.sources.0.text_field"]
    assert "names 2 files that are not here, of 4: '" in problems["data.sources.0.files"].message


@pytest.mark.parametrize("on", ["islands", "node_group"])
def test_files_that_only_nodes_have_are_theirs_unless_the_head_reads_them_or_has_some(check: Check, on: str) -> None:
    assert list(check("gone.jsonl")) == ["data.sources.0.files.0"]
    assert check("gone.jsonl", on=on) == {}
    assert list(check("gone.jsonl", "good.jsonl", on=on)) == ["data.sources.0.files.0"]


def test_thousands_of_files_are_looked_for_and_a_few_looked_into(check: Check, tmp_path: Path, monkeypatch) -> None:
    for number in range(1_000):
        (tmp_path / f"{number:04d}.jsonl").write_bytes(LINES)
    looked_into: list[str] = []
    look = data_check.file_kinds.look

    def counted(path: str, *arguments: object) -> object:
        looked_into.append(path)
        return look(path, *arguments)

    monkeypatch.setattr(data_check.file_kinds, "look", counted)
    assert check(*(f"{number:04d}.jsonl" for number in range(1_000))) == {}
    assert len(looked_into) == data_check.LOOKED_INTO_MAX
    assert {looked_into[0][-10:], looked_into[-1][-10:]} == {"0000.jsonl", "0999.jsonl"}
    (tmp_path / "0501.jsonl").unlink()
    assert list(check(*(f"{number:04d}.jsonl" for number in range(1_000)))) == ["data.sources.0.files.501"]


def test_a_store_is_asked_and_one_that_does_not_answer_says_nothing(check: Check, monkeypatch) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/checked/a.jsonl", LINES)
    store.pipe_file("/checked/b.jsonl", LINES.replace(b"text", b"body"))
    assert check("memory://checked/a.jsonl") == {}
    assert list(check("memory://checked/b.jsonl")) == ["data.sources.0.text_field"]
    assert "which does not exist. Correct the URL" in str(check("memory://checked/c.jsonl")["data.sources.0.files.0"])

    def unreachable(*_: object) -> None:
        raise PermissionError("no credentials here")

    monkeypatch.setattr(data_check, "data_bytes", unreachable)
    assert check("memory://checked/c.jsonl") == {}


@given(st.binary(max_size=300), st.integers(0, 200))
def test_a_damaged_parquet_file_has_columns_or_is_refused(junk: bytes, at: int) -> None:
    content = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"id": [1], "text": ["a"]}), content)
    whole = content.getvalue()
    damaged = whole[: len(whole) - 8 - at] + junk + whole[-8:]
    for each in (damaged, junk, junk + whole[-8:]):
        try:
            parquet_bytes.columns(io.BytesIO(each))
            list(parquet_bytes.pages(io.BytesIO(each), 4, len(each)))
        except ValueError:
            pass


def test_columns_are_those_that_pyarrow_finds_and_those_with_text_are_known() -> None:
    texts = pa.array(["a", None])
    table = pa.table(
        {
            "text": texts,
            "large": texts.cast(pa.large_string()),
            "bytes": texts.cast(pa.binary()),
            "dictionary": texts.dictionary_encode(),
            "nothing": pa.nulls(2),
            "id": [1, 2],
            "list": [["a"], ["b"]],
            "struct": [{"text": "a", "deep": [{"x": "y"}]}] * 2,
            "decimal": pa.array([1, 2], pa.decimal128(5, 1)),
        }
    )
    content = io.BytesIO()
    pyarrow.parquet.write_table(table, content)
    columns = parquet_bytes.columns(content)
    assert [column.name for column in columns] == table.column_names
    assert [column.name for column in columns if column.is_text] == ["text", "large", "bytes", "dictionary", "nothing"]


def test_the_sizes_of_sources_are_filled_in_for_advice_unless_there_is_an_index(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"four")
    (tmp_path / "b.txt").write_bytes(b"eleven more")
    files = [[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], [str(tmp_path / "missing.txt"), "memory://checked/c"]]
    sources = [{"name": f"source-{number}", "files": names} for number, names in enumerate(files)]
    document = {"islands": [{"node_group": "g"}], "budget": {"steps": 1}}
    spec = parse_job({**document, "data": {"source": "streamed", "sources": sources, "stored_bytes": [9]}})
    assert with_stored_bytes(spec, ROOTS).data.stored_bytes == (15, 0)
    indexed = spec.model_copy(update={"data": spec.data.model_copy(update={"index": "/index"})})
    assert with_stored_bytes(indexed, ROOTS).data.stored_bytes == ()


# ── patterns, and files that nodes do not see ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def settle(tmp_path: Path) -> Callable[..., JobSpec]:
    for name in ("web-10.jsonl", "web-9.jsonl", "code.jsonl", "held[1].jsonl", ".hidden.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "folder.jsonl").mkdir()

    def settled(*files: str, held_out: tuple[str, ...] = ()) -> JobSpec:
        source = {
            "name": "web",
            "files": [str(tmp_path / name) for name in files],
            "held_out": [str(tmp_path / name) for name in held_out],
        }
        document = {
            "islands": [{"node_group": "us-east"}],
            "budget": {"steps": 10},
            "data": {"source": "streamed", "sources": [source]},
        }
        return with_found_files(parse_job(document), AllowedRoots.only(tmp_path))

    return settled


def names(paths: tuple[str, ...]) -> list[str]:
    return [Path(path).name for path in paths]


def test_a_pattern_is_the_files_that_fit_it_in_the_order_of_their_names(settle: Callable[..., JobSpec]) -> None:
    (source,) = settle("web-*.jsonl", held_out=("co?e.jsonl",)).data.sources
    assert names(source.files) == ["web-10.jsonl", "web-9.jsonl"]
    assert names(source.held_out) == ["code.jsonl"]
    assert names(settle("*.jsonl").data.sources[0].files) == [
        "code.jsonl",
        "held[1].jsonl",
        "web-10.jsonl",
        "web-9.jsonl",
    ]


def test_a_file_with_such_a_name_is_that_file_and_one_without_pattern_may_be_on_the_nodes_only(
    settle: Callable[..., JobSpec],
) -> None:
    assert names(settle("held[1].jsonl", "elsewhere.jsonl").data.sources[0].files) == [
        "held[1].jsonl",
        "elsewhere.jsonl",
    ]


@pytest.mark.parametrize(
    ("files", "held_out", "field", "message"),
    [
        (("nothing-*.jsonl",), (), "data.sources.0.files.0", "which matches no file here"),
        (("web-9.jsonl", "no/such/*.jsonl"), (), "data.sources.0.files.1", "whose folder cannot be read"),
        (("*/web.jsonl",), (), "data.sources.0.files.0", "only a file name may be a pattern"),
        (("code.jsonl",), ("nothing-*",), "data.sources.0.held_out.0", "which matches no file here"),
        (("web-*.jsonl",), ("web-9.jsonl",), "data.sources.0.held_out", "has files on which islands train"),
    ],
)
def test_what_fits_nothing_or_is_on_both_sides_is_refused(
    settle: Callable[..., JobSpec], files: tuple[str, ...], held_out: tuple[str, ...], field: str, message: str
) -> None:
    with pytest.raises(InvalidJobSpec) as refused:
        settle(*files, held_out=held_out)
    (problem,) = refused.value.problems
    assert (problem.path, message in problem.message) == (field, True), problem
    assert problem.remedy


def test_a_link_that_leads_in_a_circle_is_named_and_keeps_no_other_file_from_being_found(
    settle: Callable[..., JobSpec], tmp_path: Path
) -> None:
    loop = tmp_path / "web-loop.jsonl"
    loop.symlink_to(loop.name)
    found = names(settle("web-*.jsonl").data.sources[0].files)
    assert found == ["web-10.jsonl", "web-9.jsonl", loop.name]


def test_of_what_is_outside_the_roots_nothing_is_said_but_that(settle: Callable[..., JobSpec], tmp_path: Path) -> None:
    (tmp_path / "way-out").symlink_to("/etc")
    for pattern in ("/etc/host*", "/no/such/folder/*", str(tmp_path / "way-out" / "host*")):
        spec = settle(pattern)
        (path,) = spec.data.sources[0].files
        assert path.endswith(Path(pattern).name)
        assert [p.path for p in problems_outside_roots(spec, AllowedRoots.only(tmp_path))] == ["data.sources.0.files.0"]


def test_files_that_machines_of_the_islands_do_not_see_are_named_with_the_machines(
    settle: Callable[..., JobSpec], tmp_path: Path
) -> None:
    spec, asked = settle("code.jsonl", "elsewhere.jsonl"), dict[str, int | None]()

    def unseen_files(groups: Collection[str], sizes: Mapping[str, int | None]) -> list[UnseenFile]:
        assert list(groups) == ["us-east"]
        asked.update(sizes)
        path = str(tmp_path / "code.jsonl")
        return [UnseenFile(path, f"node-{n}", "us-east", "No such file or directory") for n in range(7)]

    (problem,) = unseen_problems(spec, AllowedRoots.only(tmp_path), unseen_files)
    assert asked == {str(tmp_path / "code.jsonl"): 3, str(tmp_path / "elsewhere.jsonl"): None}
    assert problem.path == "data.sources.0.files.0"
    assert "is not seen by node-0 of us-east (No such file or directory), node-1" in problem.message
    assert problem.message.endswith("and 2 more.")
    assert "Copy the files to the same path on each machine" in problem.remedy


def test_an_initial_checkpoint_is_tried_where_the_evaluator_reads_it(tmp_path: Path) -> None:
    document = {
        "islands": [{"node_group": "us-east"}],
        "budget": {"steps": 10},
        "model": {"preset": "qwen3-20m", "initial_weights": "/models/one"},
        "evaluation": {"on": "node_group", "node_group": "measuring"},
    }
    asked: list[tuple[list[str], list[str]]] = []

    def unseen_files(groups: Collection[str], sizes: Mapping[str, int | None]) -> list[UnseenFile]:
        asked.append((list(groups), list(sizes)))
        return [UnseenFile(path, "node", "measuring", "No such file or directory") for path in sizes]

    (problem,) = unseen_problems(parse_job(document), AllowedRoots.only(tmp_path), unseen_files)
    assert asked == [(["measuring"], ["/models/one/config.json"])]
    assert problem.path == "model.initial_weights"
