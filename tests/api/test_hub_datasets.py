"""A data set of the Hugging Face Hub becomes a list of files when a job is submitted, and those stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.jobs.path_check import problems_outside_roots
from orchestrator.checkpoints.resumption import differences
from orchestrator.errors import InvalidJobSpec
from orchestrator.specification.config import JobSpec, parse_job, read_job_document
from orchestrator.specification.data_check import data_problems, with_found_files
from orchestrator.system.roots import AllowedRoots

LINE = b'{"text": "one"}\n'
COMMIT, OTHER = "a" * 40, "b" * 40
CARD = """---
license: mit
configs:
- config_name: web
  data_files:
  - {split: train, path: "web/**/*.jsonl"}
  - {split: validation, path: [web-held-out/x.jsonl]}
- config_name: code
  data_dir: code
---
# A data set
"""


def document(hub: Any, **source: Any) -> dict[str, Any]:
    data = {"source": "streamed", "sources": [{"name": "web", "hub": hub, **source}]}
    return {"islands": [{"node_group": "us-east"}], "budget": {"steps": 10}, "data": data}


def write(folder: Path, *names: str, card: str = "") -> None:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(LINE)
    if card:
        (folder / "README.md").write_text(card)


@pytest.fixture
def found(tmp_path: Path) -> Callable[..., JobSpec]:
    def of(source: dict[str, Any] | None = None, **hub: Any) -> JobSpec:
        section = {"dataset": "owner/name", "mirror": str(tmp_path), **hub}
        return with_found_files(parse_job(document(section, **source or {})), AllowedRoots.only(tmp_path))

    return of


def names(paths: tuple[str, ...], before: Path) -> list[str]:
    return [path.removeprefix(f"{before}/") for path in paths]


@pytest.mark.parametrize(
    ("files", "hub", "train", "held_out"),
    [
        (("a.jsonl", "b.txt", "LICENSE", ".hidden.jsonl", "dataset_infos.json", "p.png"), {}, ["a.jsonl", "b.txt"], []),
        (
            (
                "data/train-00000-of-00002.parquet",
                "data/train-00001-of-00002-ab.parquet",
                "data/test-00000-of-00001.parquet",
                "raw.jsonl",
            ),
            {"held_out_split": "test"},
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002-ab.parquet"],
            ["data/test-00000-of-00001.parquet"],
        ),
        (
            ("train/a.jsonl", "dev/a.jsonl", "constraints.jsonl"),
            {"held_out_split": "validation"},
            ["train/a.jsonl"],
            ["dev/a.jsonl"],
        ),
        (
            ("my_train.jsonl.gz", "my-val.jsonl.gz"),
            {"held_out_split": "validation"},
            ["my_train.jsonl.gz"],
            ["my-val.jsonl.gz"],
        ),
        (("en/train.jsonl", "de/train.jsonl"), {"config": "de"}, ["de/train.jsonl"], []),
    ],
)
def test_names_of_folders_and_files_tell_configs_and_splits(
    tmp_path: Path,
    found: Callable[..., JobSpec],
    files: tuple[str, ...],
    hub: dict[str, str],
    train: list[str],
    held_out: list[str],
) -> None:
    write(tmp_path / "owner/name", *files)
    (source,) = found(**hub).data.sources
    assert names(source.files, tmp_path / "owner/name") == train
    assert names(source.held_out, tmp_path / "owner/name") == held_out


def test_a_readme_names_configs_splits_and_patterns(tmp_path: Path, found: Callable[..., JobSpec]) -> None:
    folder = tmp_path / "owner/name"
    write(folder, "web/a.jsonl", "web/deep/b.jsonl", "web-held-out/x.jsonl", "code/train.jsonl", "web/c.txt", card=CARD)
    (web,) = found(config="web", held_out_split="validation").data.sources
    assert names(web.files, folder) == ["web/a.jsonl", "web/deep/b.jsonl"]
    assert names(web.held_out, folder) == ["web-held-out/x.jsonl"]
    assert names(found(config="code").data.sources[0].files, folder) == ["code/train.jsonl"]


def test_a_cache_has_commits_and_its_links_are_followed_below_the_roots(
    tmp_path: Path, found: Callable[..., JobSpec]
) -> None:
    cached = tmp_path / "datasets--owner--name"
    write(cached / "blobs", "1234", "5678")
    for commit, blob in ((COMMIT, "1234"), (OTHER, "5678")):
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "snapshots" / commit / "a.jsonl").symlink_to(f"../../blobs/{blob}")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(COMMIT)
    spec = found()
    (source,) = spec.data.sources
    assert source.files == (f"{cached}/snapshots/{COMMIT}/a.jsonl",)
    assert source.hub is not None
    assert source.hub.commit == COMMIT
    roots = AllowedRoots.only(tmp_path)
    assert not problems_outside_roots(spec, roots)
    assert not data_problems(spec, roots)
    assert found(revision=OTHER).data.sources[0].files == (f"{cached}/snapshots/{OTHER}/a.jsonl",)
    (cached / "refs/main").write_text(OTHER)
    again = parse_job(spec.model_dump(mode="json"))
    assert with_found_files(again, roots) == spec, "what was found once stays, whatever main is now"


def test_found_files_of_another_section_are_refused(tmp_path: Path, found: Callable[..., JobSpec]) -> None:
    write(tmp_path / "owner/name", "train.jsonl", "test.jsonl")
    changed = found().model_dump(mode="json")
    changed["data"]["sources"][0]["hub"]["split"] = "test"
    with pytest.raises(InvalidJobSpec, match="has files of another hub section than this one; remove files"):
        parse_job(changed)


def test_a_resumption_compares_files_and_not_where_their_names_came_from(
    tmp_path: Path, found: Callable[..., JobSpec]
) -> None:
    write(tmp_path / "owner/name", "train.jsonl")
    now = found().model_dump(mode="json")
    before = {
        **now,
        "data": {**now["data"], "sources": [{k: v for k, v in now["data"]["sources"][0].items() if k != "hub"}]},
    }
    assert not differences(before, now)


@pytest.mark.parametrize(
    ("hub", "field", "message", "remedy"),
    [
        (
            {"dataset": "owner/nothing"},
            "mirror",
            "where neither owner/nothing nor datasets--",
            "hf download owner/nothing",
        ),
        ({"split": "tset"}, "split", "is tset, of which owner/name has no files", "Name one of: test, train."),
        ({"held_out_split": "dev"}, "held_out_split", "is dev, of which", "test, train"),
        ({"config": "fr"}, "config", "no folder is called so", "Name one of its folders: en"),
        ({"revision": "v1"}, "revision", "is a plain copy, which does not say its revision", "Leave revision out"),
        ({"dataset": "owner/cached", "revision": "v2"}, "revision", "is v2, which", "--revision v2"),
        (
            {"dataset": "owner/configs"},
            "config",
            "is absent, but owner/configs has 2 configs",
            "Name one of: web, code.",
        ),
        ({"dataset": "owner/configs", "config": "x"}, "config", "is x, which owner/configs does not have", "web, code"),
        ({"dataset": "owner/tables"}, "split", "which is a table by its name", "Make JSON Lines or Parquet"),
        ({"mirror": "/elsewhere"}, "mirror", "is not an allowed place for data", "atoll up --data"),
        ({"mirror": "s3://bucket/x"}, "mirror", "is not an allowed place for data", "atoll up --data"),
    ],
)
def test_what_is_not_found_is_one_problem_with_field_value_and_remedy(
    tmp_path: Path, found: Callable[..., JobSpec], hub: dict[str, str], field: str, message: str, remedy: str
) -> None:
    write(tmp_path / "owner/name", "en/train.jsonl", "en/test.jsonl")
    write(tmp_path / "owner/configs", "a.jsonl", card=CARD)
    write(tmp_path / "owner/tables", "a.csv")
    write(tmp_path / "datasets--owner--cached/snapshots" / COMMIT, "a.jsonl")
    with pytest.raises(InvalidJobSpec) as refused:
        found(**hub)
    (problem,) = refused.value.problems
    assert problem.path == f"data.sources.0.hub.{field}"
    assert message in problem.message
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"hub": {"dataset": "name", "mirror": "/m"}}, "OWNER/NAME"),
        ({"hub": {"dataset": "../name", "mirror": "/m"}}, "OWNER/NAME"),
        ({"hub": {"dataset": "owner/name", "mirror": "/m", "revision": "../x"}}, "a branch, a tag or a commit"),
        ({"hub": {"dataset": "owner/name", "mirror": "/m", "commit": COMMIT}}, "which the service fills in"),
        ({"hub": {"dataset": "owner/name", "mirror": "/m"}, "files": ["/a.jsonl"]}, "two sources"),
        (
            {"hub": {"dataset": "owner/name", "mirror": "/m", "held_out_split": "test"}, "held_out": ["/a.jsonl"]},
            "leave one of the two out",
        ),
        ({}, "has no files; list them in files, or name a data set in hub"),
    ],
)
def test_a_section_that_cannot_be_right_is_refused_before_anything_is_looked_for(
    source: dict[str, Any], message: str
) -> None:
    wrong = document(None)
    wrong["data"]["sources"] = [{"name": "web", **source}]
    with pytest.raises(InvalidJobSpec) as refused:
        parse_job(wrong)
    assert message in str(refused.value)


def test_a_mirror_may_be_relative_to_the_specification(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("data: {sources: [{name: web, hub: {dataset: owner/name, mirror: hub}}]}\n")
    hub = read_job_document(tmp_path / "job.yaml")["data"]["sources"][0]["hub"]
    assert hub["mirror"] == str(tmp_path / "hub")


def test_a_data_set_read_through_a_link_out_of_the_roots_is_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "root", tmp_path / "secret"
    inside.mkdir()
    write(outside, "a.jsonl")
    (inside / "owner").mkdir()
    (inside / "owner/name").symlink_to(outside)
    spec = parse_job(document({"dataset": "owner/name", "mirror": str(inside)}))
    with pytest.raises(InvalidJobSpec) as refused:
        with_found_files(spec, AllowedRoots.only(inside))
    assert "outside the allowed folders" in str(refused.value)
