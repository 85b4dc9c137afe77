"""Copies of runs: on the head, of a synchroniser on another machine, and on a service's machine that shares no disk with it.

They are complete before a job counts as ended.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InfrastructureError
from orchestrator.runtime.run_copies import RunCopies, files_of, read_part, shared
from orchestrator.system import run_folder

JOB = "first-1"


class TwoMachines:
    """Two folders, in which the same path means another file. ``ask`` calls on the head's machine."""

    def __init__(self, folder: Path) -> None:
        self.here, self.head = folder / "here", folder / "head"
        self.before_part: Callable[[str], None] = lambda _: None

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        def there(value: Any) -> Any:
            if isinstance(value, list):
                return [there(each) for each in value]
            is_ours = isinstance(value, Path) and value.is_relative_to(self.here)
            return self.head / value.relative_to(self.here) if is_ours else value

        if function is read_part:
            self.before_part(arguments[1])
        return function(*map(there, arguments))

    def write(self, name: str, content: bytes) -> None:
        path = self.head / JOB / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def same(self, name: str) -> bool:
        return (self.here / JOB / name).read_bytes() == (self.head / JOB / name).read_bytes()


@pytest.fixture
def two(tmp_path: Path) -> TwoMachines:
    return TwoMachines(tmp_path)


@pytest.fixture
def copies(two: TwoMachines) -> RunCopies:
    made = shared(two.here, two.ask)
    assert made is not None
    (two.here / JOB).mkdir()
    (two.here / JOB / "spec.yaml").write_text("name: first")
    made.put(two.here / JOB)
    return made


def test_a_folder_that_both_machines_see_is_not_copied(two: TwoMachines) -> None:
    two.here.mkdir()
    two.head.symlink_to(two.here)
    assert shared(two.here, two.ask) is None
    assert [path.name for path in two.here.iterdir()] == [".fleet"]


def test_what_the_service_wrote_is_on_the_head_and_what_the_job_wrote_comes_back(
    two: TwoMachines, copies: RunCopies
) -> None:
    assert two.same("spec.yaml")
    assert (two.here / ".fleet").read_text() == (two.head / ".fleet").read_text()
    files = ["tape.jsonl", "tape.sealed/1.zst", "logs/islands/a-1.log", "checkpoints/000001/manifest.json"]
    of_shards = "shards/0/journal/fragment-0-1.journal"
    for name in (
        *files,
        "journal/fragment-0-1.journal",
        of_shards,
        "snapshot",
        "parameters-aa.safetensors",
        ".x.draft",
    ):
        two.write(name, name.encode() * 10)
    (two.head / JOB / "link").symlink_to("/etc/passwd")
    copies.settle(JOB)
    assert all(map(two.same, files))
    there = {str(path.relative_to(two.here / JOB)) for path in (two.here / JOB).rglob("*") if path.is_file()}
    assert there == {*files, "spec.yaml", ".copy"}, "no synchroniser on this machine continues from copies"
    copies.take(JOB, "parameters-aa.safetensors")
    assert (two.here / JOB / "parameters-aa.safetensors").exists()
    assert not (two.head / JOB / "parameters-aa.safetensors").exists()


def test_a_tape_that_grows_is_continued_and_one_in_its_place_is_copied_anew(
    two: TwoMachines, copies: RunCopies
) -> None:
    asked: list[str] = []
    two.before_part = asked.append
    two.write("tape.jsonl", b"one\n")
    copies.settle(JOB)
    inode = (two.here / JOB / "tape.jsonl").stat().st_ino
    with (two.head / JOB / "tape.jsonl").open("ab") as file:
        file.write(b"two\n")
    copies.settle(JOB)
    assert two.same("tape.jsonl")
    assert (two.here / JOB / "tape.jsonl").stat().st_ino == inode, "readers continue in the same file"
    copies.settle(JOB)
    assert asked == ["tape.jsonl", "tape.jsonl"], "what has not changed is not read"
    (two.head / JOB / "next").write_bytes(b"another and longer\n")
    (two.head / JOB / "next").replace(two.head / JOB / "tape.jsonl")
    copies.settle(JOB)
    assert two.same("tape.jsonl")


def test_checkpoints_that_are_removed_there_are_removed_here_but_not_what_the_service_wrote(
    two: TwoMachines, copies: RunCopies
) -> None:
    for number in (1, 2):
        two.write(f"checkpoints/00000{number}/manifest.json", b"{}")
    (two.here / JOB / "chaos-quiet.html").write_text("verdict")
    copies.settle(JOB)
    (two.head / JOB / "checkpoints/000001/manifest.json").unlink()
    (two.head / JOB / "checkpoints/000001").rmdir()
    copies.settle(JOB)
    assert [path.name for path in (two.here / JOB / "checkpoints").iterdir()] == ["000002"]
    assert (two.here / JOB / "chaos-quiet.html").exists()


def test_a_tape_whose_torn_end_was_cut_off_before_it_grew_is_copied_anew(two: TwoMachines, copies: RunCopies) -> None:
    two.write("tape.jsonl", b"one\ntor")
    copies.settle(JOB)
    with (two.head / JOB / "tape.jsonl").open("r+b") as file:
        file.truncate(4)
        file.seek(4)
        file.write(b"two\nthree\n")
    copies.settle(JOB)
    assert two.same("tape.jsonl")


def test_a_head_that_names_files_outside_the_run_changes_nothing_there(two: TwoMachines, copies: RunCopies) -> None:
    two.write("outside", b"evil")
    outside, ask = two.here / "outside", two.ask

    def hostile(function: Callable[..., Any], *arguments: Any) -> Any:
        answer = ask(function, *arguments)
        if function is not files_of:
            return answer
        names = ("../outside", str(outside), ".fleet", "spec.yaml")
        return [replace(facts, name=name) for facts in answer for name in names]

    RunCopies(two.here, hostile).settle(JOB)
    assert not outside.exists()
    assert not (two.here / JOB / ".fleet").exists()


def test_a_copy_for_which_the_disk_has_no_room_leaves_nothing_of_it(two: TwoMachines, copies: RunCopies) -> None:
    two.write("merged.safetensors", b"parameters")

    def full(name: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    two.before_part = full
    with pytest.raises(InfrastructureError, match=r"not copied yet: .*No space left"):
        copies.settle(JOB)
    assert sorted(path.name for path in (two.here / JOB).iterdir()) == [".copy", "spec.yaml"]
    two.before_part = lambda _: None
    copies.settle(JOB)
    assert two.same("merged.safetensors")


def test_logs_of_islands_on_the_machine_of_the_service_stay(two: TwoMachines, copies: RunCopies) -> None:
    two.write("logs/islands/there-1.log", b"copied")
    copies.settle(JOB)
    own = two.here / JOB / "logs/islands/here-1.log"
    own.write_text("of an island here, not yet on the head")
    (two.head / JOB / "logs/islands/there-1.log").unlink()
    copies.settle(JOB)
    assert [path.name for path in own.parent.iterdir()] == ["here-1.log"]


def test_copies_outlive_the_disk_of_the_head(two: TwoMachines, copies: RunCopies) -> None:
    two.write("checkpoints/000001/manifest.json", b"{}")
    copies.settle(JOB)
    shutil.rmtree(two.head / JOB)
    copies.settle(JOB)
    assert (two.here / JOB / "checkpoints/000001/manifest.json").read_bytes() == b"{}"


def test_the_final_status_comes_last_and_a_job_whose_end_is_not_copied_is_not_gone(
    two: TwoMachines, copies: RunCopies
) -> None:
    two.write("status.json", b"{}")
    two.write("merged.safetensors", b"parameters")

    def vanish(name: str) -> None:
        if name == "merged.safetensors":
            two.write("replacement", b"others")
            (two.head / JOB / "replacement").replace(two.head / JOB / name)

    two.before_part = vanish
    with pytest.raises(InfrastructureError, match="not copied yet"):
        copies.settle(JOB)
    assert not (two.here / JOB / "status.json").exists()
    two.before_part = lambda _: None
    copies.settle(JOB)
    assert two.same("status.json")
    assert two.same("merged.safetensors")


def test_deleted_jobs_are_removed_from_the_head_and_folders_of_others_stay(two: TwoMachines, copies: RunCopies) -> None:
    (two.head / "of-another").mkdir()
    (two.head / "of-another" / "tape.jsonl").touch()
    copies.sweep(lambda job: True)
    assert two.same("spec.yaml")
    copies.sweep(lambda job: False)
    assert sorted(path.name for path in two.head.iterdir()) == [".fleet", "of-another"]
    assert not (two.here / JOB).exists()


def test_a_name_leads_to_nothing_outside_the_runs_folder(tmp_path: Path) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret"
    run.mkdir()
    secret.write_text("secret")
    (run / "link").symlink_to(secret)
    inode = secret.stat().st_ino
    assert files_of(run) == []
    assert read_part(run, "../secret", inode, 0, 100) == read_part(run, "link", inode, 0, 100) == b""


# ── on the head, of a synchroniser elsewhere ──────────────────────────────────────────────────────────────────────


def header(epoch: int) -> bytes:
    return json.dumps({"schema": "atoll-tape/1", "job": JOB, "epoch": epoch}).encode() + b"\n"


class Head:
    """A head, and machines of nodes, each with a disk of its own. ``at`` has the synchroniser."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.at = folder, "east"
        self.run = folder / "here" / JOB
        self.run.mkdir(parents=True)
        (self.run / "spec.yaml").write_text("name: first")
        self.machines: dict[str, TwoMachines] = {}
        self.again()

    def again(self) -> None:
        """The controllers' process dies, and the next one opens the job."""
        from orchestrator.runtime.head_copies import HeadCopy

        self.copy = HeadCopy(self.run, lambda: self.at, lambda node: self.machine(node).ask)

    def machine(self, node: str) -> TwoMachines:
        if node not in self.machines:
            self.machines[node] = TwoMachines(self.folder)
            self.machines[node].head = self.folder / node
        return self.machines[node]

    def write(self, **files: bytes) -> None:
        for name, content in files.items():
            self.machine(self.at).write(NAMES[name], content)

    def names(self) -> set[str]:
        return {str(path.relative_to(self.run)) for path in self.run.rglob("*") if path.is_file()}


NAMES = {
    "tape": "tape.jsonl",
    "log": "logs/synchroniser-1.log",
    "island": "logs/islands/a-1.log",
    "first": "checkpoints/000001/manifest.json",
    "second": "checkpoints/000002/manifest.json",
    "parameters": "merged.safetensors",
    "status": "status.json",
    "dump": "parameters-aa.safetensors",
    "journal": "journal/fragment-0-1.journal",
}


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    made = Head(tmp_path)
    yield made
    made.copy.close()


def test_the_head_has_what_a_synchroniser_on_another_machine_writes_and_nothing_stays_there(head: Head) -> None:
    (head.run / "logs/islands").mkdir(parents=True)
    (head.run / NAMES["island"]).write_bytes(b"what the controller has copied")
    head.write(tape=header(1), log=b"begins", island=b"the whole log", first=b"{}", journal=b"only a job reads it")
    head.copy.look()
    head.write(tape=header(1) + b"more\n", dump=b"parameters")
    head.copy.take(NAMES["dump"])
    assert (head.run / NAMES["dump"]).read_bytes() == b"parameters"
    head.copy.begin()
    head.write(parameters=b"merged", status=b"{}")
    assert head.copy.finish(60.0) == ""
    assert (head.run / NAMES["tape"]).read_bytes() == header(1) + b"more\n"
    assert (head.run / NAMES["island"]).read_bytes() == b"what the controller has copied"
    assert head.names() == {"spec.yaml", ".copy"} | set(NAMES.values()) - {NAMES["second"], NAMES["journal"]}
    head.copy.clear()
    assert not (head.folder / "east" / JOB).exists()


def test_a_folder_that_the_synchroniser_shares_with_the_head_is_not_copied(head: Head) -> None:
    (head.folder / "east").symlink_to(head.folder / "here")
    (head.run / "tape.jsonl").write_bytes(header(1))
    head.copy.look()
    assert (head.copy.copies, head.copy.statuses(), head.names()) == (False, [], {"spec.yaml", "tape.jsonl"})
    head.copy.begin()
    assert head.copy.finish(60.0) == ""
    head.copy.clear()
    assert (head.run / "tape.jsonl").exists()


def test_a_job_that_moves_leaves_its_former_tape_aside_and_its_checkpoints_until_it_has_new_ones(head: Head) -> None:
    head.write(tape=header(1) + b"former\n", log=b"former", first=b"{}")
    head.copy.look()
    head.at = "west"
    head.copy.look()
    assert (head.run / NAMES["tape"]).read_bytes() == header(1) + b"former\n", "it begins just now"
    head.write(tape=header(3), log=b"new")
    head.copy.look()
    head.again()
    head.copy.look()
    assert (head.run / "earlier/1/tape.jsonl").read_bytes() == header(1) + b"former\n"
    assert (head.run / "earlier/1/logs/synchroniser-1.log").read_bytes() == b"former"
    assert (head.run / NAMES["log"]).read_bytes() == b"new"
    assert NAMES["first"] in head.names()
    head.write(second=b"{}")
    head.copy.look()
    assert NAMES["second"] in head.names()
    assert NAMES["first"] not in head.names()

    head.at = "east"  # it is back, with the files that the job left there
    head.copy.look()
    assert (head.run / NAMES["tape"]).read_bytes() == header(3)
    head.write(tape=header(4))
    head.copy.look()
    assert (head.run / "earlier/3/tape.jsonl").read_bytes() == header(3)
    assert (head.run / NAMES["tape"]).read_bytes() == header(4)


def test_a_head_without_room_says_so_and_the_job_ends_once_there_is_room(head: Head) -> None:
    head.write(tape=header(1), parameters=b"merged", status=b"{}")

    def full(name: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    head.machine("east").before_part = full
    head.copy.begin()
    assert "No space left" in head.copy.finish(60.0)
    (status,) = head.copy.statuses()
    assert (status.condition, "No space left" in status.reason) == ("silent", True)
    assert NAMES["status"] not in head.names()
    head.machine("east").before_part = lambda _: None
    assert head.copy.finish(60.0) == ""
    assert NAMES["status"] in head.names()
    assert head.copy.statuses()[0].condition == "running"


def test_a_file_that_changes_is_no_trouble_and_one_that_is_being_written_is_not_copied(head: Head) -> None:
    head.write(tape=header(1), parameters=b"merged")
    head.machine("east").write("checkpoints/000001/a/arrays.safetensors.draft", b"half")

    def change(name: str) -> None:
        assert not name.endswith(".draft")
        if name == NAMES["parameters"]:
            head.machine("east").write(".next", b"others")
            (head.folder / "east" / JOB / ".next").replace(head.folder / "east" / JOB / name)

    head.machine("east").before_part = change
    head.copy.begin()
    assert head.copy.finish(60.0) == "it is still being copied to the head"
    assert head.copy.statuses()[0].condition == "running"


def test_a_job_that_was_deleted_is_not_copied_again(head: Head) -> None:
    head.write(tape=header(1))
    head.copy.look()
    shutil.rmtree(head.run)
    head.copy.look()
    assert not head.run.exists()


def test_a_source_goes_with_its_job_and_a_service_on_the_same_machine_leaves_it_alone(head: Head) -> None:
    head.write(tape=header(2) + b"the original\n", first=b"{}")
    head.copy.look()
    east = head.folder / "east"
    fleet = run_folder.fleet_of(head.folder / "here")
    assert run_folder.claimed(east, fleet) == [JOB]
    assert run_folder.own_history_of(east / JOB) == 2
    assert run_folder.own_history_of(head.run) == 0

    service = TwoMachines(head.folder)
    service.here, service.head = east, head.folder / "here"
    (east / JOB / "spec.yaml").write_text("name: first")
    assert run_folder.claimed(east, fleet) == [], "a service keeps it"
    (head.run / "tape.jsonl").write_bytes(header(2) + b"behind\n")
    copies = RunCopies(east, service.ask)
    copies.settle(JOB)
    assert (east / JOB / "tape.jsonl").read_bytes() == header(2) + b"the original\n"
    (head.run / "tape.jsonl").write_bytes(header(3) + b"moved on\n")
    copies.settle(JOB)
    assert (east / JOB / "tape.jsonl").read_bytes() == header(3) + b"moved on\n"
