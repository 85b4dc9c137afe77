"""Patterns in the place of files: what they stand for is settled when a job is submitted, or refused with what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest

from api.jobs.path_check import problems_outside_roots, unseen_problems
from orchestrator.errors import InvalidJobSpec
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.data_check import with_found_files
from orchestrator.status import UnseenFile
from orchestrator.system.roots import AllowedRoots


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
