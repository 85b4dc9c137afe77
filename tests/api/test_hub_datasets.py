"""A data set of the Hugging Face Hub becomes a list of files when a job is submitted, and those stay the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from api.jobs.path_check import problems_outside_roots
from learners.streaming import documents
from learners.streaming.documents import Reader, Unreadable
from orchestrator.checkpoints.resumption import differences
from orchestrator.errors import InvalidJobSpec, OutsideRoots
from orchestrator.specification.config import JobSpec, parse_job, read_job_document
from orchestrator.specification.data_check import data_problems, with_found_files
from orchestrator.system.roots import AllowedRoots, Place, Root, data_bytes, open_data

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


# ── the Hub ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Hub:
    """A server that speaks the few words of the Hub that atoll uses, with files of one commit for each data set."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.token = ""
        self.elsewhere = ""
        self.fails = False
        self.requests: list[tuple[str, str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, _, query = unquote(request.path).partition("?")
        self.requests.append((request.command, path, request.headers.get("Authorization", "")))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "datasets"]:
            dataset, what, rest = "/".join(parts[2:4]), parts[4], "/".join(parts[5:])
            if dataset not in self.files:
                return self.refuse(request, 401, "RepoNotFound")
            if what == "revision":
                if rest not in ("main", "refs/convert/parquet", COMMIT):
                    return self.refuse(request, 404, "RevisionNotFound")
                return self.send(request, json.dumps({"id": dataset, "sha": COMMIT}).encode())
            files, start = sorted(self.files[dataset]), int(query.partition("cursor=")[2] or 0)
            page = [{"type": "file", "path": name} for name in files[start : start + 2]]
            page.append({"type": "directory", "path": "folder"})
            following = f'<{self.elsewhere or self.url}{path}?cursor={start + 2}>; rel="next"'
            more = {"Link": following} if start + 2 < len(files) else {}
            return self.send(request, json.dumps(page).encode(), more)
        if parts[0] == "blobs" and self.fails and request.command == "GET":
            return self.refuse(request, 503, "")
        if parts[0] == "blobs":
            return self.send(request, self.files["/".join(parts[1:3])]["/".join(parts[3:])])
        dataset, name = "/".join(parts[1:3]), "/".join(parts[5:])
        if dataset in self.gated and request.headers.get("Authorization") != f"Bearer {self.token}":
            return self.refuse(request, 401, "GatedRepo")
        if parts[3:5] != ["resolve", COMMIT] or name not in self.files.get(dataset, {}):
            return self.refuse(request, 404, "EntryNotFound")
        return self.redirect(request, f"{self.elsewhere}/blobs/{dataset}/{name}?Signature=secret")

    def redirect(self, request: BaseHTTPRequestHandler, location: str) -> None:
        request.send_response(302)
        request.send_header("Location", location)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def send(self, request: BaseHTTPRequestHandler, content: bytes, headers: dict[str, str] | None = None) -> None:
        status, size = 200, len(content)
        if wanted := request.headers.get("Range"):
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            status, content = 206, content[int(start) : int(end or size) + 1]
        request.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            request.send_header(name, value)
        if status == 206:
            request.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)

    def refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("Content-Length", "0")
        request.end_headers()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    serving = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield hub
    hub.server.shutdown()
    serving.join()
    hub.server.server_close()


def roots_of(hub: Hub) -> AllowedRoots:
    return AllowedRoots.only(hub.url)


def listed(hub: Hub, section: Any = "owner/name") -> JobSpec:
    return with_found_files(parse_job(document(section)), roots_of(hub))


LINES = b"".join(b'{"text": "document %d"}\n' % number for number in range(500))


def test_a_data_set_is_listed_page_by_page_and_islands_read_its_commit_through_redirects(hub: Hub) -> None:
    names = ["train/a.jsonl", "train/b b.jsonl", "train/c.jsonl", "test/a.jsonl", "README.md", ".gitattributes"]
    hub.files["owner/name"] = dict.fromkeys(names, LINES)
    spec = listed(hub)
    (source,) = spec.data.sources
    before = f"{hub.url}/datasets/owner/name/resolve/{COMMIT}/train"
    assert source.files == (f"{before}/a.jsonl", f"{before}/b b.jsonl", f"{before}/c.jsonl")
    assert source.hub is not None
    assert source.hub.commit == COMMIT
    assert not problems_outside_roots(spec, roots_of(hub))
    assert not data_problems(spec, roots_of(hub))
    for url in source.files:
        assert data_bytes(roots_of(hub), url) == len(LINES)
    reader = Reader(roots_of(hub), "text", Unreadable(0))
    texts = [text.decode() for number in range(3) for text in reader.documents(source.files[1], number, 3)]
    assert texts == [f"document {number}" for number in range(500)]
    assert with_found_files(parse_job(spec.model_dump(mode="json")), AllowedRoots()) == spec, "no second look"


def test_a_config_of_the_readme_and_a_revision_with_a_slash(hub: Hub) -> None:
    hub.files["owner/name"] = {"README.md": CARD.encode(), "web/a.jsonl": LINES, "code/train.jsonl": LINES}
    (source,) = listed(hub, {"dataset": "owner/name", "config": "web", "revision": "refs/convert/parquet"}).data.sources
    assert [url.rsplit("/", 2)[1:] for url in source.files] == [["web", "a.jsonl"]]


def test_a_gated_data_set_is_read_with_the_token_which_only_the_endpoint_gets(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["owner/name"], hub.token = {"a.jsonl": LINES}, "hf_of_the_test"
    hub.gated.add("owner/name")
    assert refusal_of(hub)[1:] == (
        "is owner/name, which is gated, and no HF_TOKEN is set (401).",
        "Accept its conditions on its page, set HF_TOKEN for the service, and add `--pass-environment HF_TOKEN`.",
    )
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    assert "HF_TOKEN has no access" in refusal_of(hub)[1]
    assert "hf_of_another" not in str(refusal_of(hub))
    monkeypatch.setenv("HF_TOKEN", hub.token)
    spec = listed(hub)
    assert hub.token not in str(spec)
    with open_data(roots_of(hub), spec.data.sources[0].files[0]) as file:
        assert file.read() == LINES
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PermissionError, match="wants a token"):
        data_bytes(AllowedRoots.only(f"{hub.url}/datasets"), spec.data.sources[0].files[0])


def refusal_of(hub: Hub, section: Any = "owner/name", roots: AllowedRoots | None = None) -> tuple[str, str, str]:
    with pytest.raises(InvalidJobSpec) as refused:
        with_found_files(parse_job(document(section)), roots or roots_of(hub))
    (problem,) = refused.value.problems
    return problem.path.removeprefix("data.sources.0.hub."), problem.message, problem.remedy


def test_what_the_hub_does_not_have_is_one_problem(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["owner/name"] = {"train.jsonl": LINES, "test.jsonl": LINES}
    hub.files["owner/odd"] = {"a?b.jsonl": LINES}
    field, message, remedy = refusal_of(hub, "owner/nothing")
    assert (field, "does not have or does not show, and no HF_TOKEN is set (401)" in message) == ("dataset", True)
    assert remedy.startswith("Correct the name.")
    field, message, _ = refusal_of(hub, {"dataset": "owner/name", "revision": "v9"})
    assert (field, message) == ("revision", "is v9, which owner/name does not have.")
    field, message, remedy = refusal_of(hub, {"dataset": "owner/name", "split": "dev"})
    assert (field, remedy) == ("split", "Name one of: test, train.")
    assert "cannot be read by its URL" in refusal_of(hub, "owner/odd")[1]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    field, message, remedy = refusal_of(hub, roots=AllowedRoots.only("http://127.0.0.1:9"))
    assert (field, "does not answer" in message) == ("dataset", True)
    assert remedy == "Check the network, or set mirror to a folder with a copy."


def test_nothing_is_requested_outside_the_roots(hub: Hub, tmp_path: Path) -> None:
    hub.files["owner/name"] = {"a.jsonl": LINES}
    other = AllowedRoots(data=(Root(Place("https", ("huggingface.co",))), Root(Place("http", ("127.0.0.1:9",)))))
    for roots in (AllowedRoots.only(tmp_path), other, AllowedRoots.only(f"{hub.url}/datasets/another")):
        field, message, remedy = refusal_of(hub, roots=roots)
        assert (field, "is not an allowed place for data" in message) == ("dataset", True)
        assert remedy == f"Set mirror to a folder with a copy, or restart the service with `atoll up --data {hub.url}`."
    assert hub.requests == []


def test_a_server_cannot_send_readers_to_other_servers_within(hub: Hub) -> None:
    hub.files["owner/name"] = {f"{number}.jsonl": LINES for number in range(4)}
    url = listed(hub).data.sources[0].files[0]
    for elsewhere in ("http://127.0.0.1:9", "https://127.0.0.1:9", "https://169.254.169.254", "http://example.org"):
        hub.elsewhere = elsewhere
        with pytest.raises(OutsideRoots, match="redirects to"):
            data_bytes(roots_of(hub), url)
        assert "refers to another server" in refusal_of(hub)[1], "the next page of the list"
    within = AllowedRoots(data=(*roots_of(hub).data, Root(Place("http", ("127.0.0.1:9",)))))
    hub.elsewhere = "http://127.0.0.1:9"
    with pytest.raises(OSError, match="no answer"):
        data_bytes(within, url)


def test_what_is_gone_and_what_does_not_answer_are_different_things(hub: Hub) -> None:
    hub.files["owner/name"] = {"a.jsonl": LINES, "empty.jsonl": b""}
    before = f"{hub.url}/datasets/owner/name/resolve/{COMMIT}"
    with pytest.raises(FileNotFoundError):
        data_bytes(roots_of(hub), f"{before}/gone.jsonl")
    with open_data(roots_of(hub), f"{before}/empty.jsonl") as file:
        assert file.read() == b""
    with pytest.raises(OSError, match="no answer") as failed:
        data_bytes(AllowedRoots.only("http://127.0.0.1:9"), "http://127.0.0.1:9/a.jsonl")
    assert not isinstance(failed.value, FileNotFoundError)


def test_a_signed_address_is_not_quoted_when_a_server_fails(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PAUSE_S", 0.0)
    hub.files["owner/name"] = {"a.jsonl": LINES}
    url = listed(hub).data.sources[0].files[0]
    hub.fails = True
    with open_data(roots_of(hub), url) as file, pytest.raises(OSError, match="the server answers 503") as failed:
        file.read(10)
    assert "secret" not in str(failed.value)
    patient = Reader(roots_of(hub), "text", Unreadable(1))
    patient.documents(url, 0, 1)
    (reason,) = patient.unreadable.reasons.values()
    assert "the server answers 503" in reason
    assert "secret" not in reason
