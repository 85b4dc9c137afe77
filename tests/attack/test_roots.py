"""Where jobs may read and write: hostile paths, URLs, names, links and manifests, against the functions that decide."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from api.installation.home import roots_of
from learners import checkpointing, corpus
from orchestrator.checkpoints import manifest as manifests
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import File, decode, decode_part, encode, seal
from orchestrator.checkpoints.reading import listed, manifest_of, newest_sound, verified
from orchestrator.checkpoints.resumption import begun, stored
from orchestrator.errors import AtollError, ConfigurationError, DataError, InfrastructureError, OutsideRoots
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import AllowedRoots, Place, Root, defaults, name_parts, open_data, place_of, shown
from tests.checkpoints.making import make

HOSTILE_URLS = (
    "reference::http://127.0.0.1:9/refs.json",
    "reference://x", "dir://x", "zip://x", "zip::file:///ck/x.zip", "tar://x", "simplecache::s3://bucket/ck/x",
    "filecache::file:///etc/passwd", "blockcache::/etc", "cached://x", "async_wrapper://x", "generic://x", "jupyter://x",
    "data:text/plain,abc://", "http://127.0.0.1:9/ck", "https://127.0.0.1:9/ck", "ftp://127.0.0.1/ck", "github://a:b@c/",
    "webhdfs://127.0.0.1:9/ck", "memory://ck", "memory:///ck", "memory:ck", "local:///ck", "git:///ck", "libarchive://x",
    "smb://127.0.0.1/ck", "sftp://127.0.0.1/ck", "hdfs://127.0.0.1:9/ck", "no-such-protocol://x/ck",
    "file://ck", "file:ck", "file:/ck", "file:////ck", "file://localhost/ck", "FILE:///ck/x", "file:///ck/../etc",
    "file:///ck/%2e%2e/etc", "file:///ck/x?y", "file:///ck/x#y", "file:///ck/*", "file:///ck::file:///etc",
    "file:///etc", "/etc/passwd", "/", "//", "//ck/x", "/ck//x", "/ck/./x", "/ck/../etc", "/ck/x/..", "/ckx", "/ck2/x", "/c",
    "/ck/..", "/ck/x\0", "\0", "/ck/x\n", "/ck/\x1b[31m", "/ck/\x7f", "/ck/\u0085", "/ck/\u2028", "/ck/\ud800", "/ck\\..",
    "/ck\\..\\etc", "\\\\host\\share", "C:\\x", "ck/x",
    "./ck", "../ck", "~/ck", "~root/ck", "$HOME/ck", "", " ", " /ck/x", "/ck" * 2000,
    "/ck/" + "x" * 256,
    "s3://bucket", "s3://bucket/", "s3://bucket2/ck/x", "s3://bucket/ckx", "s3://bucket/c", "s3://bucket/ck/../x",
    "s3://bucket/ck/..", "s3://bucket/ck//x", "s3://bucket/ck/./x", "s3://bucket/ck/%2e%2e/x", "s3://bucket/ck/x?versionId=1",
    "s3://bucket/ck/x#y", "s3://bucket/ck/*", "s3://bucket/ck/[a]", "s3://user:secret@bucket/ck/x", "s3://@bucket/ck/x",
    "s3://bucket:80/ck/x", "S3://bucket/ck/x", "s3:///ck", "s3://", "s3:/bucket/ck", "s3:bucket/ck", "s3a://bucket/ck/x",
    "s3://bucket/ck/x::file:///etc", "s3://bucket/ck/x\\..\\y", "s3://bucket/ck/\0", "s3://BUCKET/ck/x", "s3://../bucket/ck",
    "s3://-bucket/ck/x", "s3://buc ket/ck/x", "gs://bucket/ck/x",
    "/ck/home/token", "/ck/home", "/ck/home/service.sqlite", "/ck/home/clockwork/x", "file:///ck/home/token",
)  # fmt: skip
ALLOWED = ("/ck", "/ck/", "/ck/x", "/ck/a b/ü", "/ck/.hidden/x", "/ck/100%", "/ck/...", "file:///ck/x", "s3://bucket/ck", "s3://bucket/ck/",
           "s3://bucket/ck/a b/x", "/ck/homework/x", "/ck/home/checkpoints/x")  # fmt: skip
ROOTS = AllowedRoots(
    tuple(Root(place_of(url)) for url in ("/ck", "s3://bucket/ck", "/ck/home/checkpoints")), (), (place_of("/ck/home"),)
)
HOSTILE_NAMES = (
    "", ".", "..", "/", "/etc/passwd", "//x", "a//b", "a/", "../x", "a/../../x", "a/..", "./x", "a/./b", "\0", "a\0b",
    "a\nb", "\x1b[0m", "..\\x", "a\\b", "C:\\x", "\ud800", "a" * 256, "a/" * 600, "/../../../../../../tmp/written", "\u2028",
    None, 3, True, 1.5, ["a"], {"a": 1}, b"a",
)  # fmt: skip


class Untouched:
    """What reaches it is told."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"fsspec was asked for {name}")


@pytest.mark.parametrize("url", HOSTILE_URLS, ids=lambda url: ascii(url)[:60])
def test_what_lies_below_no_root_is_refused_before_anything_is_touched(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", Untouched())  # type: ignore[arg-type]
    monkeypatch.setattr(os, "lstat", Untouched())
    with pytest.raises(OutsideRoots) as refused:
        Folder.within(ROOTS, url)
    assert "Allowed are places below: /ck, s3://bucket/ck, /ck/home/checkpoints" in str(refused.value)
    assert "`atoll up --checkpoints ROOT`" in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 2000
    with pytest.raises(OutsideRoots, match="Allowed are places below: nothing"):
        AllowedRoots().checkpoint_folder(url)


@pytest.mark.parametrize("url", ALLOWED)
def test_what_lies_below_a_root_is_allowed(url: str) -> None:
    assert ROOTS.checkpoint_folder(url).place == place_of(url)


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: ascii(name)[:30])
def test_a_name_that_leads_elsewhere_is_refused_by_everything_that_takes_one(name: Any, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    folder = Folder.own(tmp_path / "here")
    for use in (
        lambda: name_parts(name),
        lambda: folder.sub(name),
        lambda: folder.write(name, b"x"),
        lambda: folder.write_all(name, [b"x"]),
        lambda: folder.read(name, 9),
        lambda: folder.size(name),
        lambda: folder.fingerprint(name),
        lambda: list(folder.chunks(name)),
        lambda: folder.remove(name),
        lambda: folder.download(tmp_path / "there", [name]),
    ):
        with pytest.raises(DataError):
            use()
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


paths = st.lists(
    st.sampled_from(
        ["..", ".", "", "ck", "x", "home", "token", "checkpoints", ".git", "%2e%2e", "\0", "\\", "~", "*", "::", "é", "s3:"]
    )
    | st.text(max_size=4),
    max_size=7,
).map("/".join)  # fmt: skip
urls = st.tuples(st.sampled_from(["", "/", "file://", "s3://", "s3://bucket/", "/ck/", "reference::", "file:"]), paths)


@given(urls.map("".join))
def test_whatever_is_accepted_lies_below_its_root(url: str) -> None:
    try:
        place = ROOTS.checkpoint_folder(url).place
    except OutsideRoots:
        return
    assert place.protocol in ("file", "s3")
    path = os.path.normpath(str(place)) if place.protocol == "file" else str(place)
    assert path == str(place), "what is compared is what is used"
    assert any(path == root or path.startswith(f"{root}/") for root in ("/ck", "s3://bucket/ck"))
    private = path == "/ck/home" or path.startswith("/ck/home/")
    assert not private or path == "/ck/home/checkpoints" or path.startswith("/ck/home/checkpoints/")


@given(paths)
def test_whatever_name_is_accepted_lies_below_its_folder(name: str) -> None:
    try:
        parts = name_parts(name)
    except DataError:
        return
    assert "/".join(parts) == name
    assert os.path.normpath(f"/some/folder/{name}") == f"/some/folder/{name}"


# ── what there is by default ──────────────────────────────────────────────────────────────────────────────────────


def given_by(
    folder: Path, checkpoints: tuple[str, ...] = (), data: tuple[str, ...] = (), *private: Path
) -> AllowedRoots:
    return defaults(folder / ".atoll", folder / "runs", checkpoints, data, folder, private)


def test_by_default_the_working_folder_is_a_root_without_what_is_hidden_or_private(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    roots = given_by(tmp_path, (), (), key)
    inside = ("text.txt", "runs/job-1/checkpoints/000001", ".atoll/checkpoints/x", "fetched/000001")
    hidden = (".atoll/token", ".atoll", ".atoll/service.sqlite", ".atoll/data/x", ".ssh/id", ".env", "a/.git/config")
    for name in inside:
        roots.checkpoint_folder(f"{tmp_path}/{name}").real()
    for name in (*hidden, "key.pem", "../x"):
        with pytest.raises(OutsideRoots):
            roots.checkpoint_folder(f"{tmp_path}/{name}")
    roots.data_file(f"{tmp_path}/.atoll/data/text.txt").real()
    for name in (".atoll/token", ".atoll/checkpoints/x", ".aws/credentials", "key.pem"):
        with pytest.raises(OutsideRoots):
            roots.data_file(f"{tmp_path}/{name}")


def test_a_root_that_is_given_takes_the_place_of_the_working_folder_and_never_opens_the_home(tmp_path: Path) -> None:
    roots = given_by(tmp_path, (str(tmp_path), "s3://bucket/x"), (f"{tmp_path}/texts",))
    for name in (".hidden/x", "any"):  # a root that is given is taken as it is
        assert roots.checkpoint_folder(f"{tmp_path}/{name}")
    for name in (".atoll/token", ".atoll"):
        with pytest.raises(OutsideRoots):
            roots.checkpoint_folder(f"{tmp_path}/{name}")
    with pytest.raises(OutsideRoots):
        roots.data_file(f"{tmp_path}/other/text.txt")
    everything = given_by(tmp_path, ("/",), ("/",))
    for path in ("/proc/self/environ", "/dev/zero", "/sys/x", "/etc/shadow", f"{tmp_path}/.atoll/token"):
        with pytest.raises(OutsideRoots):
            everything.data_file(path)


@pytest.mark.parametrize("folder", ["/", "/etc", "/etc/atoll", "/tmp", "/home", "/var", "/proc/1", "/usr"])
def test_a_working_folder_of_the_system_is_no_root(folder: str) -> None:
    roots = defaults(Path("/srv/home"), Path("/srv/runs"), (), (), Path(folder), ())
    for path in ("/etc/passwd", f"{folder.rstrip('/')}/x"):
        with pytest.raises(OutsideRoots):
            roots.data_file(path)


NO_ROOTS = ("reference::http://x/y", "http://x/y", "zip:///x", "s3://u:p@b/x", "s3://b/../x", "dir://x", "", "a\0b")


@pytest.mark.parametrize("root", [*NO_ROOTS, "memory:x"])
def test_a_root_that_can_be_none_is_refused(root: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a valid root"):
        given_by(tmp_path, (root,))


def test_data_may_lie_in_a_store_below_a_root_that_was_named_and_nowhere_else_there(tmp_path: Path) -> None:
    roots = given_by(tmp_path, (), ("s3://bucket/texts",))
    assert not roots.data_file("s3://bucket/texts/a.jsonl").local
    for url in ("s3://bucket/text", "s3://other/texts/a", "gs://bucket/texts/a", "s3://bucket/texts/../a"):
        with pytest.raises(OutsideRoots):
            roots.data_file(url)


def test_the_home_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / ".atoll", target_is_directory=True)
    for root in (".atoll", ".atoll/clockwork", ".atoll/token", "link"):
        with pytest.raises(ConfigurationError, match="is in the home folder"):
            given_by(tmp_path, (f"{tmp_path}/{root}",))


# ── links and special files ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[tuple[Path, AllowedRoots]]:
    """A root with links and special files in it, and something beside it that nobody may read."""
    root, secret = tmp_path / "root", tmp_path / "secret"
    root.mkdir()
    secret.mkdir()
    (secret / "token").write_text("the token")
    (root / "text.txt").write_text("text")
    (root / "within").symlink_to(root / "text.txt")
    (root / "link").symlink_to(secret / "token")
    (root / "dangling").symlink_to(secret / "nothing")
    (root / "folder").symlink_to(secret, target_is_directory=True)
    (root / "loop").symlink_to(root / "loop")
    (root / "inside").mkdir()
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        before = os.getcwd()
        os.chdir(root)  # a socket's path is short
        try:
            listening.bind("socket")
        finally:
            os.chdir(before)
        yield root, AllowedRoots.only(root)


LINKS = {"link": "secret/token", "dangling": "secret/nothing", "folder/token": "secret", "folder/nothing": "secret"}
"""What the first part of each name leads to."""


@pytest.mark.parametrize(("name", "target"), LINKS.items())
def test_a_data_file_behind_a_link_that_leads_out_is_refused_and_the_answer_does_not_tell_what_is_there(
    beside: tuple[Path, AllowedRoots], name: str, target: str
) -> None:
    """It names the link that leaves and what that link says, which lies within the root, and nothing beyond."""
    root, roots = beside
    link = name.partition("/")[0]
    for use in (lambda: open_data(roots, f"{root}/{name}"), lambda: list(documents(roots, root / name))):
        with pytest.raises(OutsideRoots) as refused:
            use()
        said = f" ('{root}/{link}' is a link to '{root.parent}/{target}', outside the allowed folders)"
        assert str(refused.value).count(said) == 1
        there = outside(roots, "/elsewhere").replace("/elsewhere", f"{root}/{name}")
        assert str(refused.value).replace(said, "") == there


def test_a_refusal_follows_links_within_the_root_to_the_text_that_leads_out_and_reads_none_beyond(
    beside: tuple[Path, AllowedRoots],
) -> None:
    root, roots = beside
    (root.parent / "secret" / "onward").symlink_to("/nobody/may/know")
    (root / "second").symlink_to("../secret")
    (root / "first").symlink_to("second")
    (root / "through").symlink_to("first/onward")
    (root / "up").symlink_to("..")
    for number in range(20):
        (root / f"chain-{number}").symlink_to(f"chain-{number - 1}" if number else "/nowhere/else")
    for name, leads in (
        ("first/token", f"'{root}/first' is a link to '{root}/second', a link to '{root.parent}/secret', outside"),
        ("up/secret/token", f"'{root}/up' is a link to '{root.parent}', outside"),
        (
            "chain-19/x",
            f"'{root}/chain-19' is a link to '{root}/chain-18', and over 18 more links to '/nowhere/else', outside",
        ),
        ("through", f"'{root}/through' is a link to '{root}/first/onward', outside"),
    ):
        with pytest.raises(OutsideRoots) as refused:
            open_data(roots, f"{root}/{name}")
        assert f"({leads} the allowed folders)" in str(refused.value)
        assert "nobody" not in str(refused.value)


def test_a_link_above_the_root_is_not_the_one_that_leads_out(beside: tuple[Path, AllowedRoots]) -> None:
    root, _ = beside
    above = root.parent / "above"
    above.symlink_to(root.parent, target_is_directory=True)
    with pytest.raises(OutsideRoots, match=f"'{above}/root/link' is a link to '{root.parent}/secret/token'"):
        open_data(AllowedRoots.only(above / "root"), f"{above}/root/link")


def test_a_refused_path_is_shown_in_its_own_script_and_without_what_moves_a_cursor() -> None:
    assert "'/данные/été/東京.txt' is not an allowed place" in outside(AllowedRoots(), "/данные/été/東京.txt")
    assert "\x1b" not in outside(AllowedRoots(), "/a\x1b[31m/b")
    assert shown("it's") == "'it\\'s'"


@pytest.mark.parametrize("name", ["pipe", "socket", "inside", "loop"])
def test_a_data_file_that_is_no_file_is_refused_and_nobody_waits_for_it(
    beside: tuple[Path, AllowedRoots], name: str
) -> None:
    root, roots = beside
    with pytest.raises(ConfigurationError, match=r"not a regular file|cannot be read"):
        list(documents(roots, root / name))


def test_a_data_file_is_read_also_through_a_link_within_its_root(beside: tuple[Path, AllowedRoots]) -> None:
    root, roots = beside
    assert list(documents(roots, root / "within")) == list(documents(roots, root / "text.txt")) == [b"text"]
    with pytest.raises(OutsideRoots):
        list(corpus.file_documents(DataSection(files=[str(root / "text.txt")], text_field="text"), AllowedRoots()))


def documents(roots: AllowedRoots, path: Path) -> Iterator[bytes]:
    return corpus.file_documents(DataSection(files=[str(path)], text_field="text"), roots)


def outside(roots: AllowedRoots, path: str) -> str:
    with pytest.raises(OutsideRoots) as refused:
        open_data(roots, path)
    return str(refused.value)


@pytest.mark.parametrize("name", ["link", "within", "dangling", "folder/token", "loop", "pipe", "socket", "inside"])
def test_a_checkpoints_file_that_is_a_link_or_no_file_is_neither_read_nor_written_through(
    beside: tuple[Path, AllowedRoots], name: str
) -> None:
    root, roots = beside
    folder = Folder.within(roots, str(root))
    reading = (lambda name: folder.read(name, 99), lambda name: list(folder.chunks(name)))
    for use in (folder.size, folder.fingerprint, *reading):
        with pytest.raises((DataError, FileNotFoundError)):
            use(name)
    with pytest.raises(DataError, match="link"):
        folder.names()
    with suppress(DataError, OSError):  # the name is refused, or becomes that of a new file
        folder.write(name, b"overwritten")
    assert (root.parent / "secret" / "token").read_text() == "the token"
    assert (root / "text.txt").read_text() == "text"
    assert not (root.parent / "secret" / "nothing").exists()


def test_a_folder_behind_a_link_that_leads_out_is_refused(beside: tuple[Path, AllowedRoots]) -> None:
    root, roots = beside
    folder = Folder.within(roots, f"{root}/folder")
    plain = (folder.names, folder.folders, folder.sync, folder.remove_all)
    for use in (*plain, lambda: folder.read("token", 99), lambda: folder.local):
        with pytest.raises(AtollError) as refused:
            use()
        assert "the token" not in str(refused.value)
    with pytest.raises(AtollError):
        folder.write("x", b"x")
    assert sorted(path.name for path in (root.parent / "secret").iterdir()) == ["token"]


def test_a_folder_in_the_working_folder_gives_nothing_of_the_home_by_its_files_names(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "token").write_text("the token")
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id").write_text("the key")
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    roots = defaults(tmp_path / "state", tmp_path / "runs", (), (), tmp_path, ())
    for url in (str(tmp_path), f"{tmp_path}/link"):
        folder = Folder.within(roots, url)
        for name in ("state/token", ".ssh/id", "link/state/token"):
            with pytest.raises(DataError):
                folder.read(name, 99)
            with pytest.raises(DataError):
                folder.write(name, b"x")
    assert (tmp_path / "state" / "token").read_text() == "the token"


@pytest.mark.parametrize("replaced", ["run/checkpoints", "run"])
def test_a_run_folder_that_a_job_has_put_a_link_in_place_of_gives_nothing(tmp_path: Path, replaced: str) -> None:
    """Jobs may write into the runs folder: in containers, all of it."""
    secret = make(tmp_path / "secret" / "checkpoints", 1)
    (tmp_path / "runs" / replaced).parent.mkdir(parents=True)
    (tmp_path / "runs" / replaced).symlink_to(tmp_path / "secret" / Path(replaced).relative_to("run"))
    for roots in (AllowedRoots(), defaults(tmp_path / "home", tmp_path / "runs", ("/nowhere",), (), tmp_path, ())):
        folder = Folder.within(roots.with_run(tmp_path / "runs" / "run"), f"{tmp_path}/runs/run/checkpoints")
        for use in (folder.folders, partial(folder.write, "x", b"x"), partial(listed, folder)):
            with pytest.raises((OutsideRoots, DataError)):
                use()
    assert manifest_of(secret).number == 1


def test_the_database_and_its_journal_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (f"sqlite:///{tmp_path}/it.db", "sqlite:///it.db", "sqlite+pysqlite:///it.db?timeout=9"):
        roots = roots_of(tmp_path / "home", tmp_path / "runs", (), (), url, Path("key.pem"))
        for name in ("it.db", "it.db-wal", "it.db-journal", "key.pem"):
            with pytest.raises(OutsideRoots):
                open_data(roots, f"{tmp_path}/{name}")
        with pytest.raises(FileNotFoundError):
            open_data(roots, f"{tmp_path}/text.txt")


# ── manifests and listings ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A manifest as plain data."""
    folder = make(tmp_path_factory.mktemp("sound"), 1)
    plain: dict[str, Any] = json.loads(encode(manifest_of(folder)))["document"]
    return plain


WRONG_SCALARS: tuple[Any, ...] = (None, True, -1, 1.5, 10**30, "x\0", "../../x", "\ud800", "")
WRONG: tuple[Any, ...] = (*WRONG_SCALARS, [], {}, [None], [[[]]], [True], {"a": 1}, [10**30])


def places(document: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a manifest; of its specification only the whole."""
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in inner:
        yield (*way, key)
        if (*way, key) != ("spec",):
            yield from places(value, (*way, key))


def changed(document: Any, way: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    made = json.loads(json.dumps(document))
    there = made
    for key in way[:-1]:
        there = there[key]
    change(there, way[-1])
    return made


def test_of_a_manifest_with_any_field_wrong_nothing_comes_but_dataerror(sound: dict[str, Any]) -> None:
    assert asdict(decode(seal(sound), "it")) == asdict(manifests.from_document(sound, "it"))
    accepted, refused = [], 0

    def put(value: Any) -> Callable[[Any, Any], None]:
        return lambda there, key: there.__setitem__(key, value)

    for way in places(sound):
        for value in WRONG:
            try:
                decode(seal(changed(sound, way, put(value))), "it")
            except DataError as error:
                refused += len(str(error)) < 1000
            else:
                accepted.append((way, value))
        not_of_old = way[-1] in ("roles", "granules", "batch_sizes", "changed")  # older builds wrote none
        needed = isinstance(way[-1], str) and way != ("spec",) and not not_of_old
        with pytest.raises(DataError) if needed else suppress(DataError):
            decode(seal(changed(sound, way, lambda there, key: there.pop(key))), "it")
    assert refused > 500
    harmless = {(name,) for name in ("job", "spec", "at", "taken_at", "legs", "granules", "parts")}
    harmless |= {(section, i, name) for section, name in (("fragments", "roles"), ("parts", "files")) for i in (0, 1)}
    settings = ("lr_ratio", "quorum", "grace_cap_steps", "sync_interval_steps", "cost_max")
    harmless |= {("changed", name) for name in settings}
    assert {way for way, _ in accepted} <= harmless
    unchanged = [way for way, value in accepted if way[0] == "changed" and value is None]
    assert len(unchanged) == len(settings)
    accepted = [(way, value) for way, value in accepted if way not in unchanged or value is not None]
    assert not [
        value for way, value in accepted if way != ("job",) and (value is True or value not in (1.5, [], {}, {"a": 1}))
    ]


@pytest.mark.parametrize(
    "name", [name for name in HOSTILE_NAMES if isinstance(name, str)], ids=lambda name: ascii(name)[:30]
)
def test_a_manifest_or_part_that_lists_a_hostile_name_is_refused(sound: dict[str, Any], name: str) -> None:
    for document in (
        {**sound, "files": [*sound["files"], {"name": name, "size": 1, "digest": "0" * 32}]},
        {**sound, "parts": [{**sound["parts"][0], "island": name}, sound["parts"][1]]},
        {**sound, "parts": [{**sound["parts"][0], "files": [{"name": name, "size": 1, "digest": "0" * 32}]}]},
    ):
        with pytest.raises(DataError, match="it is not a document of this build"):
            decode(seal(document), "it")
    for part in (
        {**sound["parts"][0], "island": name},
        {**sound["parts"][0], "files": [{"name": name, "size": 1, "digest": "0" * 32}]},
    ):
        with pytest.raises(DataError, match="it is not a document of this build"):
            decode_part(seal(part), "it")


@pytest.mark.parametrize("content", [
    b"", b"{}", b"[]", b"null", b"1", b'{"digest":"x"}', b"[" * 100_000, b'{"digest":' + b"9" * 5000 + b"}", b"\xff\xfe",
    b'"\\ud800"',
    seal({}), seal({"schema": []}), seal({"schema": "atoll-checkpoint/1"}), seal({"schema": "atoll-checkpoint/2"}),
    b'{"digest":"00","document":{"at":NaN}}\n', b'{"digest":"00","document":{"at":1e999}}\n',
], ids=range(16))  # fmt: skip
def test_of_bytes_that_are_no_manifest_nothing_comes_but_dataerror(content: bytes, tmp_path: Path) -> None:
    for read in (decode, decode_part):
        with pytest.raises(DataError):
            read(content, "it")
    (tmp_path / "000001").mkdir()
    (tmp_path / "000001" / "manifest.json").write_bytes(content)
    (tmp_path / "resumed.json").write_bytes(content)
    roots = AllowedRoots.only(tmp_path)
    assert listed(Folder.own(tmp_path)) == []
    with pytest.raises(DataError):
        newest_sound(roots, str(tmp_path))
    with pytest.raises(DataError):
        stored(tmp_path)


def test_a_document_is_not_read_beyond_its_bound(tmp_path: Path) -> None:
    (tmp_path / "000001").mkdir()
    with (tmp_path / "000001" / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match="more than"):
        manifest_of(Folder.own(tmp_path / "000001"))


def test_what_a_job_went_on_from_is_looked_at_again_only_below_a_root(tmp_path: Path) -> None:
    made = make(tmp_path / "elsewhere", 1)
    spec = {**dict(manifest_of(made).spec), "resume": {"checkpoint": made.url, "refused": []}}
    (tmp_path / "run").mkdir()
    with pytest.raises(OutsideRoots):
        begun(AllowedRoots.only(tmp_path / "run"), tmp_path / "run", spec)
    there = begun(AllowedRoots.only(tmp_path), tmp_path / "run", spec)
    assert there is not None
    with pytest.raises(OutsideRoots):
        there.folder(AllowedRoots.only(tmp_path / "run"))


def test_digests_and_sizes_of_files_outside_are_told_to_nobody(tmp_path: Path, sound: dict[str, Any]) -> None:
    """CheckResult 3: a manifest with a name that leads up was answered with that file's size and digest."""
    folder = make(tmp_path / "root", 1)
    (tmp_path / "secret").write_text("secret")
    names = ("../../secret", str(tmp_path / "secret"))
    for name in names:
        document = {**sound, "files": [*sound["files"], {"name": name, "size": 6, "digest": "0" * 32}]}
        (tmp_path / "root" / "000001" / "manifest.json").write_bytes(seal(document))
        with pytest.raises(DataError) as refused:
            verified(folder)
        assert "not a document of this build" in str(refused.value)


class Hostile(MemoryFileSystem):  # type: ignore[misc]
    """A store whose listing leads out, as fsspec's reference files can."""

    protocol = "memory"
    extra = "/../../../../../..{}"
    outside = ""

    def find(self, path: str, *arguments: Any, **more: Any) -> Any:
        return [*super().find(path, *arguments, **more), f"{path}{self.extra.format(self.outside)}"]

    def cat_file(self, path: str, *arguments: Any, **more: Any) -> Any:
        return b"the attacker's" if ".." in path else super().cat_file(path, *arguments, **more)


def test_a_listing_of_a_store_that_leads_out_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CheckResult 2: an island that restored an Orbax part wrote what the store listed, wherever that was."""
    url = f"memory://{tmp_path.name}/ck"
    folder = make(url, 1, ("a",), orbax=True)
    part = manifest_of(folder).parts[0]
    monkeypatch.setattr(Hostile, "outside", str(tmp_path / "written"))
    monkeypatch.setattr(Hostile, "store", MemoryFileSystem.store)
    hostile = Folder.within(AllowedRoots.only(url), folder.url)
    hostile._store = Hostile(skip_instance_cache=True)
    monkeypatch.setattr(
        Folder, "sub", lambda self, name: _of_store(Folder(self._allowed.sub(name_parts(name))), hostile._store)
    )
    with pytest.raises(DataError, match=r"not a valid file name|does not lie in it"):
        hostile.names()
    checkpointing.read(hostile, part)  # only what the part lists, and what was verified, is brought here
    with pytest.raises(DataError):
        hostile.download(tmp_path / "here", ["/../../../../../.." + str(tmp_path / "written")])
    lying = replace(part, files=(*part.files, File(f"/../../../../../..{tmp_path}/written", 14, "0" * 32)))
    with pytest.raises(DataError):
        checkpointing.read(hostile, lying)
    assert not (tmp_path / "written").exists()


def _of_store(folder: Folder, store: Any) -> Folder:
    folder._store = store
    return folder


def test_what_a_store_raises_is_told_as_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{tmp_path.name}/broken"
    folder = Folder.within(AllowedRoots.only(url), url)

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("webhdfs answered something else")

    for name in ("open", "find", "ls", "rm", "rm_file", "pipe_file", "size", "invalidate_cache"):
        monkeypatch.setattr(MemoryFileSystem, name, broken)
    named = (partial(method, "x") for method in (folder.size, folder.fingerprint, folder.remove))
    contents = (lambda: folder.read("x", 9), lambda: folder.write("x", b""), lambda: listed(folder))
    for use in (folder.names, folder.folders, folder.remove_all, *named, *contents):
        with pytest.raises(InfrastructureError, match="KeyError: 'webhdfs answered something else'"):
            use()


def test_a_root_whose_package_is_missing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"s3://bucket/x cannot be reached: ImportError.*'atoll\[stores\]'"):
        roots_of(tmp_path / "home", tmp_path / "runs", ("s3://bucket/x",), ())


def test_a_part_of_which_more_would_be_read_than_is_listed_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, 1, ("a",), orbax=True)
    part = manifest_of(folder).parts[0]
    assert any(isinstance(array, np.ndarray) for array in checkpointing.read(folder, part).values())
    (tmp_path / "000001" / "a" / "arrays" / "more").write_text("x")
    with pytest.raises(DataError, match="more is not a file of the checkpoint"):
        checkpointing.read(folder, part)


def test_places_of_one_kind_are_compared_by_components() -> None:
    assert place_of("/data/a/x").below(place_of("/data/a"))
    assert not place_of("/data/ab").below(place_of("/data/a"))
    assert not Place("s3", ("data", "a")).below(place_of("/data/a"))
