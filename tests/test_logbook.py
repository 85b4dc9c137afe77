"""What a process said is in its logbook, however it ended; real processes, real signals."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.runtime.node_agent import old_worker_logs
from orchestrator.system import logbook, run_folder
from orchestrator.system.logbook import LogAddition, Logbook, RepeatLimit, island_logbook, logbooks, service_logbook
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent


def run(book: Logbook, script: str) -> tuple[int, str, str]:
    """A process that keeps this logbook from the beginning: its exit code, what it printed elsewhere, and what it wrote."""
    begin = "import logging, os, signal, threading, time\nfrom orchestrator.system import logbook\n"
    begin += f"book = logbook.{book!r}\n"
    begin = begin.replace("PosixPath", "__import__('pathlib').Path")
    done = subprocess.run(
        [sys.executable, "-c", begin + script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    return done.returncode, done.stdout + done.stderr, book.path.read_text() if book.path.exists() else ""


def test_sigkill_loses_nothing_that_was_said(tmp_path: Path) -> None:
    script = """
logbook.keep(book)
print("a print")
logging.getLogger("learners").info("a log line")
os.write(2, b"a library's words\\n")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
print("the last words \\udcff")
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, elsewhere, written = run(island_logbook(tmp_path, "asia", 2), script)
    assert (code, elsewhere) == (-signal.SIGKILL, "")
    lines = written.splitlines()
    assert lines[0] == "a print"
    assert lines[1].endswith("INFO learners: a log line")
    assert lines[2] == "a library's words"
    assert "ZeroDivisionError: division by zero" in lines
    assert lines[-1] == "the last words \\udcff"


def test_a_process_of_several_jobs_writes_each_job_s_entries_to_its_own_logbook(tmp_path: Path) -> None:
    script = """
logging.basicConfig(level=logging.INFO)
logbook.BYTES_MAX = 5_000
books = [logbook.service_logbook(book.path.parent / job, "controller") for job in ("a", "b")]
parts = [logbook.begin_part(book) for book in books]
for (context, _), job in zip(parts, "ab"):
    thread = threading.Thread(target=context.copy().run, args=(logging.info, f"of {job}"))
    thread.start()
    thread.join()
logging.info("of the process")
parts[0][0].copy().run(lambda: [logging.info("long " * 20) for _ in range(60)])
logging.getLogger().removeHandler(parts[0][1])
logging.info("after a")
"""
    code, elsewhere, _ = run(service_logbook(tmp_path, "x"), script)
    assert code == 0, elsewhere
    a, b = (service_logbook(tmp_path / "logs" / job, "controller") for job in "ab")
    said = b.path.read_text()
    assert [line.split(": ", 1)[1] for line in said.splitlines()] == ["of b", "of the process", "after a"]
    assert a.path.stat().st_size < 5_000 < a.path.stat().st_size + a.older.stat().st_size
    assert "of b" not in a.older.read_text() + a.path.read_text()
    assert {path.stat().st_mode & 0o777 for path in (a.path, a.older, b.path)} == {0o600}


def test_a_crash_in_native_code_leaves_its_stack(tmp_path: Path) -> None:
    code, _, written = run(
        island_logbook(tmp_path, "asia", 1), "logbook.keep(book)\nos.kill(os.getpid(), signal.SIGSEGV)"
    )
    assert code == -signal.SIGSEGV
    assert "Segmentation fault" in written
    assert 'File "<string>"' in written


def test_a_second_process_of_the_same_name_writes_on(tmp_path: Path) -> None:
    book = service_logbook(tmp_path, "synchroniser")
    for word in ("first", "second"):
        _, _, written = run(book, f"logbook.keep(book)\nprint({word!r})")
    assert written == "first\nsecond\n"


def test_a_logbook_is_kept_short_and_its_newest_lines_are_whole(tmp_path: Path) -> None:
    book = island_logbook(tmp_path, "asia", 1)
    script = """
logbook.BYTES_MAX, logbook.CHECK_S = 20_000, 0.02
logbook.keep(book)
for number in range(20_000):
    print(f"line {number:06}")
    if number % 200 == 0:
        time.sleep(0.01)
time.sleep(0.2)
print("the end")
"""
    code, _, written = run(book, script)
    assert code == 0
    lines = (book.older.read_text() + written).splitlines()
    assert lines.pop() == "the end"
    numbers = [int(line.removeprefix("line ")) for line in lines]
    assert numbers == list(range(numbers[0], 20_000)), "no line is missing, torn or doubled"
    assert numbers[0] > 0
    # twice the bound, and what 0.02 s and a busy machine let through beyond it
    assert len(written) + book.older.stat().st_size < 120_000 < 20_000 * len("line 000000\n")


def test_of_an_island_that_fails_again_and_again_the_newest_logbooks_stay(tmp_path: Path) -> None:
    others = [
        island_logbook(tmp_path, "asia-2", 1),
        island_logbook(tmp_path, "asi", 1),
        island_logbook(tmp_path, "a*", 1),
    ]
    for book in [*(island_logbook(tmp_path, "asia", number) for number in range(1, 31)), *others]:
        book.path.parent.mkdir(parents=True, exist_ok=True)
        book.path.write_text("said")
        book.older.write_text("said before")
    run(island_logbook(tmp_path, "asia", 31), "logbook.keep(book)")
    books = logbooks(tmp_path)
    assert [book.number for book in books if book.source == "asia"] == list(range(22, 32))
    assert {book.source for book in books} == {"asia", *(book.source for book in others)}
    assert len(list((tmp_path / "logs" / "islands").glob("*.older"))) == 9 + len(others)


def test_a_process_that_may_not_write_there_goes_on_and_says_so_where_it_did(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    code, elsewhere, _ = run(service_logbook(tmp_path, "controller"), "logbook.keep(book)\nprint('goes on')")
    assert code == 0
    assert "cannot be written" in elsewhere
    assert "goes on" in elsewhere


@pytest.mark.parametrize("name", ["asia-12", "synchroniser", "9"])
def test_logbooks_are_found_by_what_they_are_called(tmp_path: Path, name: str) -> None:
    books = [
        island_logbook(tmp_path, name, 2),
        island_logbook(tmp_path, name, 10),
        service_logbook(tmp_path, "synchroniser"),
    ]
    for book in books:
        book.path.parent.mkdir(parents=True, exist_ok=True)
        book.path.touch()
        book.older.touch()
    (tmp_path / "logs" / "islands" / "notes.txt").touch()
    (tmp_path / "logs" / "a-b.log").touch()
    assert logbooks(tmp_path) == books
    assert logbooks(tmp_path / "nothing") == []
    assert os.listdir(tmp_path / "logs" / "islands")


def test_a_process_whose_output_goes_to_a_file_keeps_that_short(tmp_path: Path) -> None:
    path = tmp_path / "service.log"
    script = f"""
import sys, time
from pathlib import Path
from orchestrator.system import logbook
logbook.BYTES_MAX, logbook.CHECK_S = 20_000, 0.02
logbook.keep_output_short(Path({str(path)!r}))
for number in range(5_000):
    print(f"line {{number:06}}", flush=True)
    if number % 200 == 0:
        time.sleep(0.03)
time.sleep(0.2)
print("the end")
"""
    with path.open("ab") as file:
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=file, check=True, timeout=PATIENCE_S)
    older = path.with_name("service.log.older")
    assert (older.read_text() + path.read_text()).endswith("the end\n")
    assert path.stat().st_size + older.stat().st_size < 5_000 * len("line 000000\n")


def record_at(created: float, line: int, message: str) -> logging.LogRecord:
    record = logging.LogRecord("asyncio", logging.ERROR, "events.py", line, message, None, None)
    record.created = created
    return record


def test_of_the_logs_of_rays_workers_those_that_live_and_the_newest_stay(tmp_path: Path) -> None:
    ended = 4_194_303  # the largest id, which no process here has
    names = [f"worker-{n:056x}-01000000-{ended}.{end}" for n in range(10) for end in ("out", "err")]
    names += [f"python-core-worker-{n:056x}_{ended}.log" for n in range(10)]
    for age, name in enumerate(names):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))
    living = [f"worker-{'f' * 56}-01000000-{os.getpid()}.out", f"python-core-worker-{'f' * 56}_{os.getpid()}.log"]
    for name in [*living, "raylet.out", "worker-notes.txt", f"worker-{'e' * 56}-01000000-{ended}.out.1"]:
        (tmp_path / name).touch()
    old = {path.name for path in old_worker_logs(tmp_path, keep=5)}
    assert old == set(names[:-4])  # the fifth newest is the rotated one


def test_what_one_line_of_code_logs_again_and_again_is_left_out_and_counted() -> None:
    limit = RepeatLimit(records_max=3, window_s=60.0)
    records = [record_at(float(n), 7, f"socket {n} was reset") for n in range(10)]
    assert [limit.filter(record) for record in records] == [True] * 3 + [False] * 7
    assert limit.filter(record_at(5.0, 8, "another line"))
    later = record_at(61.0, 7, "socket 11 was reset")
    assert limit.filter(later)
    assert later.getMessage() == "socket 11 was reset (7 similar records before it were omitted)"


def test_a_clock_that_was_set_back_does_not_silence_a_log() -> None:
    limit = RepeatLimit(records_max=1, window_s=60.0)
    assert limit.filter(record_at(1000.0, 7, "now"))
    assert not limit.filter(record_at(1001.0, 7, "again"))
    assert limit.filter(record_at(10.0, 7, "after the clock was set back"))


def test_what_was_added_to_a_log_is_read_across_a_rotation_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "east-1.log"
    assert logbook.addition(path, 0) is None
    path.write_bytes(b"one\n")
    assert logbook.addition(path, 0) == LogAddition(0, 4, b"one\n")
    assert logbook.addition(path, 4) == LogAddition(4, 4, b"")
    with path.open("ab") as file:
        file.write(b"two\n")
    path.rename(tmp_path / "east-1.log.older")
    path.write_bytes(b"new\n")
    assert logbook.addition(path, 5) == LogAddition(5, 0, b"wo\n"), "the rest of the older half comes first"
    assert logbook.addition(path, 0) == LogAddition(0, 4, b"new\n")
    path.write_bytes(b"x" * (3 * logbook.COPY_BYTES))
    most = logbook.addition(path, 7)
    assert most is not None
    assert (most.start, most.end, len(most.content)) == (
        2 * logbook.COPY_BYTES,
        3 * logbook.COPY_BYTES,
        logbook.COPY_BYTES,
    )


def test_only_claimed_run_folders_of_this_installation_are_removed(tmp_path: Path) -> None:
    fleet = run_folder.fleet_of(tmp_path)
    assert run_folder.fleet_of(tmp_path) == fleet, "it is drawn once"
    run_folder.claim(tmp_path / "mine", fleet)
    (tmp_path / "mine" / "logs").mkdir()
    run_folder.claim(tmp_path / "theirs", "another fleet")
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / run_folder.TAPE).touch()
    run_folder.claim(tmp_path / "served", fleet)
    (tmp_path / "unclaimed").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "mine")
    assert run_folder.claimed(tmp_path, fleet) == ["mine"]
    run_folder.remove_claimed(tmp_path, ["mine", "theirs", "served", "unclaimed", "linked", "../mine", "none"], fleet)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["served", "theirs", "unclaimed"]
    assert run_folder.claimed(tmp_path / "none", fleet) == []


def test_a_run_folder_is_removed_although_something_still_writes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls, remove = tmp_path / "run", list[Path](), shutil.rmtree
    (folder / "logs").mkdir(parents=True)

    def disturbed(path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        if len(calls) == 2:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", disturbed)
    run_folder.remove_tree(folder)
    assert not folder.exists()
    monkeypatch.setattr(shutil, "rmtree", lambda path: os.listdir("/proc/self/no-such-entry"))
    run_folder.remove_tree(folder)
    (tmp_path / "kept").mkdir()

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refused)
    with pytest.raises(PermissionError):
        run_folder.remove_tree(tmp_path / "kept")
