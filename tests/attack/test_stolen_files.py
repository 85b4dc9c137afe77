"""Findings 1 to 3 against a real service: an operator reads and writes no file of the host that no root holds.

A server on this machine stands for the attacker's. It must not hear of anything.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.installation.service_restart import kill_and_start_again
from api.run.archive import unpack
from orchestrator.checkpoints.manifest import seal
from orchestrator.errors import DataError
from orchestrator.specification.config import read_job_document
from orchestrator.system.plain import has_secret
from tests.api.installation import CONTROL, Installation
from tests.checkpoints.making import make
from tests.waiting import wait_until


class Attackers(ThreadingHTTPServer):
    """Counts what reaches it."""

    heard: list[str]

    def finish_request(self, request: Any, client_address: Any) -> None:
        self.heard.append(str(client_address))
        super().finish_request(request, client_address)


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.references)  # type: ignore[attr-defined]

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def attackers() -> Iterator[Attackers]:
    with Attackers(("127.0.0.1", 0), Answer) as server:
        server.heard = []
        server.references = b"{}"  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """As in a user's project: the home and the runs lie in the working folder, and a root is given beside it."""
    folder = tmp_path_factory.mktemp("project")
    installation = Installation(folder)
    installation.roots = ("--checkpoints", str(folder), "--data", str(folder))
    installation.up()
    yield installation
    installation.atoll("down")


@pytest.fixture
def operator(installed: Installation) -> Iterator[httpx.Client]:
    with installed.http(token(installed, "operator")) as client:
        yield client


@pytest.fixture
def viewer(installed: Installation) -> Iterator[httpx.Client]:
    with installed.http(token(installed, "viewer")) as client:
        yield client


def token(installed: Installation, role: str) -> str:
    with installed.client() as admin:
        return admin.create_token(f"{role}-{time.time_ns()}", role).token


def problems(answer: httpx.Response) -> dict[str, str]:
    """Where they are, and all that is said of each."""
    assert answer.status_code == 422, answer.text
    return {one["path"]: json.dumps(one) for one in answer.json()["problems"]}


def hostile(installed: Installation, attackers: Attackers) -> list[str]:
    """Folders of checkpoints that an operator has no business in."""
    port, home = attackers.server_address[1], installed.home.path
    return [
        f"reference::http://127.0.0.1:{port}/refs.json",
        f"http://127.0.0.1:{port}/",
        f"simplecache::http://127.0.0.1:{port}/x",
        f"zip::http://127.0.0.1:{port}/x.zip",
        f"webhdfs://127.0.0.1:{port}/x",
        f"github://a:b@127.0.0.1:{port}/",
        f"sftp://127.0.0.1:{port}/x",
        f"ftp://127.0.0.1:{port}/x",
        f"file://{home}",
        f"{home}/../home",
        f"file://{installed.folder}/%2e%2e/x",
        str(home),
        f"{home}/token",
        f"{home}/clockwork",
        "memory://x",
        "reference://x",
        "dir://x",
        "data:text/plain,abc://",
        "jupyter://x",
        "generic://x",
        "async_wrapper://x",
        "/etc",
        "/proc/self",
        f"{installed.folder}/a\0b",
        f"{installed.folder}/a\\b",
        f"{installed.folder.parent}/elsewhere",
    ]


def test_no_folder_of_checkpoints_outside_the_roots_is_taken_and_nobody_is_asked_for_it(
    installed: Installation, operator: httpx.Client, attackers: Attackers
) -> None:
    """CheckResult 1, and the protocols and paths beside it, written as a folder and gone on from."""
    loot = {"/000001/manifest.json": "x", "/000001/loot": [f"file://{installed.home.path}/token"]}
    attackers.references = json.dumps(loot).encode()  # type: ignore[attr-defined]
    for url in hostile(installed, attackers):
        if "\0" in url:  # refused as text already
            refused = operator.post("/v1/jobs", json=installed.spec(checkpoints={"folder": url}))
            assert refused.status_code == 422, refused.text
            continue
        folder = problems(operator.post("/v1/jobs", json=installed.spec(checkpoints={"folder": url})))
        assert list(folder) == ["checkpoints.folder"], url
        resume = problems(operator.post("/v1/jobs", json=installed.spec(resume={"checkpoint": url})))
        assert list(resume) == ["resume.checkpoint"], url
        for told in (folder["checkpoints.folder"], resume["resume.checkpoint"]):
            if has_secret(url):
                assert "contains a password" in told, url
                assert url not in told
                continue
            assert ("atoll up --checkpoints ROOT" in told) or "is not a job of this service" in told
            assert str(installed.folder) in told or "is not a job of this service" in told
    assert attackers.heard == []
    assert operator.get("/v1/jobs").json()["jobs"] == []


def test_a_viewer_downloads_nothing_of_the_home_through_a_checkpoint(
    installed: Installation, operator: httpx.Client, viewer: httpx.Client
) -> None:
    """CheckResult 3: names of a manifest that lead up, and links, in a folder that a job may use."""
    secret = (installed.home.path / "token").read_text().strip()
    job = operator.post("/v1/jobs", json=installed.spec()).json()["job"]
    root = installed.runs / job / "checkpoints"
    make(root, 1, job=job)
    sound = json.loads((root / "000001" / "manifest.json").read_bytes())["document"]
    up = "../../../../home/token"
    for number, name in enumerate((up, str(installed.home.path / "token"), "linked", "folder/token"), start=2):
        folder = make(root, number, job=job)
        if name == "linked":
            (root / f"{number:06d}" / "linked").symlink_to(installed.home.path / "token")
        if name == "folder/token":
            (root / f"{number:06d}" / "folder").symlink_to(installed.home.path, target_is_directory=True)
        document = sound | {
            "number": number,
            "files": [*sound["files"], {"name": name, "size": len(secret) + 1, "digest": "0" * 32}],
        }
        folder.write("manifest.json", seal(document))
    listed = [one["number"] for one in viewer.get(f"/v1/jobs/{job}/checkpoints").json()["checkpoints"]]
    assert listed == [1, 4, 5]  # with the names of two nobody would list them; two have links in them
    for number in range(1, 6):
        answer = viewer.get(f"/v1/jobs/{job}/checkpoints/{number}")
        assert secret.encode() not in answer.content
        assert answer.status_code == (200 if number == 1 else 404), (number, answer.text[:500])
    for number in range(2, 6):
        told = problems(operator.post("/v1/jobs", json=installed.spec(resume={"checkpoint": f"{root}/{number:06d}"})))
        assert "digest" not in told["resume.checkpoint"].replace("its digest does not match", "")
    operator.post(f"/v1/jobs/{job}/cancel")


def test_no_text_outside_the_roots_is_trained_on_and_the_answer_is_the_same_whatever_is_there(
    installed: Installation, operator: httpx.Client
) -> None:
    """CheckResult 3, by reading: `data.files` of HOME/token, whose model memorises it."""
    home, folder = installed.home.path, installed.folder
    (folder / "text.txt").write_text("text")
    (folder / "link.txt").symlink_to(home / "token")
    (folder / "dangling.txt").symlink_to(home / "nothing")
    files = [
        f"{home}/token", f"{home}/nothing", f"{home}/service.sqlite", f"{folder}/link.txt", f"{folder}/dangling.txt",
        "/etc/passwd", "/etc/nothing", f"{folder}/../x", "text.txt", f"file://{home}/token",
        "/proc/self/environ", "/dev/zero",
    ]  # fmt: skip
    told = problems(
        operator.post(
            "/v1/jobs", json=installed.spec(data={"source": "files", "files": [f"{folder}/text.txt", *files]})
        )
    )
    assert list(told) == [f"data.files.{number}" for number in range(1, len(files) + 1)]
    for number, name in enumerate(files, start=1):
        assert "atoll up --data ROOT" in told[f"data.files.{number}"], name

    def without(number: int) -> str:
        return told[f"data.files.{number}"].replace(f"data.files.{number}", "").replace(files[number - 1], "NAME")

    assert without(1) == without(2)
    assert without(4) == without(5)
    assert without(6) == without(7)
    job = operator.post("/v1/jobs", json=installed.spec(data={"source": "files", "files": [f"{folder}/text.txt"]}))
    assert job.status_code == 201, job.text
    operator.post(f"/v1/jobs/{job.json()['job']}/cancel")


def test_the_service_has_its_roots_in_its_second_life_and_a_job_of_other_roots_is_refused_by_itself(
    tmp_path: Path,
) -> None:
    """The rows of before are answered, of each job by itself; and what cannot be started again says why."""
    installation = Installation(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    installation.roots = ("--checkpoints", str(elsewhere))
    installation.up()
    try:
        with installation.http() as http:
            saving = installation.spec(checkpoints={"folder": str(elsewhere)})
            outside = http.post("/v1/jobs", json=saving).json()["job"]
            plain = http.post("/v1/jobs", json=installation.spec()).json()["job"]
            assert http.get(f"/v1/jobs/{outside}/checkpoints").json() == {"checkpoints": []}
        kill_and_start_again(installation.home)
        wait_until(lambda: answers(installation))
        with installation.http() as http:
            taken = http.post("/v1/jobs", json=saving)
            assert taken.status_code == 201, taken.text
            http.post(f"/v1/jobs/{taken.json()['job']}/cancel")
            for job in (outside, plain):  # what has a tape is started again
                http.get(f"/v1/jobs/{job}")
                assert (installation.runs / job / "tape.jsonl").exists()
        installation.atoll("down")
        (installation.home.path / "taken-down").unlink(missing_ok=True)
        for job in (outside, plain):
            (installation.home.path / "clockwork" / f"{job}.json").unlink()  # as with its cluster
        installation.roots = ("--checkpoints", str(tmp_path / "other"))
        installation.up()
        with installation.http() as http:
            answer = http.get(f"/v1/jobs/{outside}/checkpoints")
            assert answer.status_code == 409, answer.text
            assert "atoll up --checkpoints ROOT" in answer.text
            assert http.get(f"/v1/jobs/{plain}/checkpoints").json() == {"checkpoints": []}
            failed = wait_until(lambda: (told := http.get(f"/v1/jobs/{outside}").json())["state"] == "failed" and told)
            assert "checkpoints.folder" in failed["reason"]
            assert "atoll up --checkpoints ROOT" in failed["reason"]
            assert wait_until(lambda: http.get(f"/v1/jobs/{plain}").json()["state"] == "running")
    finally:
        installation.atoll("down")


def answers(installation: Installation) -> bool:
    try:
        with installation.http() as http:
            return http.get("/readyz").status_code == 200
    except (httpx.HTTPError, AssertionError):
        return False


@pytest.mark.parametrize(
    "root", ["reference::http://127.0.0.1:9/x", "http://127.0.0.1:9/x", "az://no-package-for-it/x", "HOME"]
)
def test_up_refuses_a_root_that_can_be_none_and_starts_nothing(tmp_path: Path, root: str) -> None:
    installation = Installation(tmp_path)
    installation.roots = ("--checkpoints", str(installation.home.path) if root == "HOME" else root)
    said = installation.atoll("up", "--runs", str(installation.runs), "--control", CONTROL, *installation.roots, code=2)
    assert "--checkpoints" in said or "cannot be reached" in said
    assert not installation.home.running()


def test_an_archive_is_unpacked_within_its_folder_only(tmp_path: Path) -> None:
    def packed(name: str, **about: Any) -> bytes:
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as tar:
            member = tarfile.TarInfo(name)
            for key, value in about.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(b"x" * member.size))
            if about.get("linkname"):
                inner = tarfile.TarInfo(f"{name}/token")
                inner.size = 1
                tar.addfile(inner, io.BytesIO(b"x"))
        return made.getvalue()

    outside = tmp_path / "outside"
    outside.mkdir()
    bombs = {
        "up": packed("../outside/x", size=1),
        "absolute": packed(str(outside / "x"), size=1),
        "link": packed("a", type=tarfile.SYMTYPE, linkname=str(outside)),
        "hard link": packed("a", type=tarfile.LNKTYPE, linkname=str(outside)),
        "device": packed("a", type=tarfile.CHRTYPE),
        "pipe": packed("a", type=tarfile.FIFOTYPE),
        "folder": packed("a", type=tarfile.DIRTYPE),
        "nul": packed("a\\b", size=1),
        "twice": packed("a", size=1)[:1024] + packed("a", size=1),
        "gzip": gzip.compress(packed("a", size=1)),
    }
    for name, content in bombs.items():
        archive = tmp_path / "it.tar"
        archive.write_bytes(content)
        with pytest.raises(DataError, match=r"it\.tar is not an archive of a sound checkpoint"):
            unpack(archive, tmp_path / "into" / name)
    assert list(outside.iterdir()) == []
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]


def test_files_of_a_specification_are_absolute_without_going_up_once_it_is_read(tmp_path: Path) -> None:
    """For the service refuses `..`, wherever it leads."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text("data: {source: files, files: [../texts/a.txt, b.txt]}")
    assert read_job_document(tmp_path / "jobs" / "job.yaml")["data"]["files"] == [
        f"{tmp_path}/texts/a.txt",
        f"{tmp_path}/jobs/b.txt",
    ]
