"""A command that a signal ends: when the exception comes, what ignores it, and the exit code that a shell sees."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from orchestrator.system import signals
from tests.waiting import PATIENCE_S, wait_until


def ran(code: str, *numbers: signal.Signals, ignoring: signal.Signals | None = None) -> tuple[int, str]:
    """Exit code and output of a Python that gets these signals once it has printed a line."""

    def begin() -> None:
        for each in signals.ENDING:  # the shell that runs the tests may ignore one
            signal.signal(each, signal.SIG_IGN if each == ignoring else signal.SIG_DFL)

    program = f"import os, signal, sys, time; from orchestrator.system import signals\n{code}"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, preexec_fn=begin
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    for number in numbers:
        process.send_signal(number)
    rest, _ = process.communicate("\n", timeout=PATIENCE_S)
    return process.returncode, first + rest


TIDIES = """
with signals.as_exceptions():
    try:
        print("begun", flush=True)
        while True:
            time.sleep(0.01)
    except BaseException:
        for each in signals.ENDING:
            os.kill(os.getpid(), each)
        print("tidied", flush=True)
        raise
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -2), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_is_an_exception_and_those_that_follow_do_not_interrupt_the_tidying_up(number, code):
    assert ran(TIDIES, number) == (code, "begun\ntidied\n")


def test_a_signal_between_a_process_and_its_name_waits_until_it_has_one():
    code = """
name = None
with signals.as_exceptions():
    try:
        with signals.held():
            print("begun", flush=True)
            sys.stdin.readline()
            os.kill(os.getpid(), signal.SIGTERM)
            name = "named"
        print("not reached")
    finally:
        print(name, flush=True)
"""
    assert ran(code) == (143, "begun\nnamed\n")


def test_a_signal_in_a_held_block_that_fails_is_not_forgotten_by_who_tries_again():
    code = """
from contextlib import suppress
with signals.as_exceptions():
    while True:
        with suppress(ValueError), signals.held():
            print("begun", flush=True)
            os.kill(os.getpid(), signal.SIGHUP)
            raise ValueError
"""
    assert ran(code) == (129, "begun\n")


def test_a_signal_that_was_ignored_before_stays_ignored():
    code = """
with signals.as_exceptions():
    print("begun", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGHUP)
    print("goes on", flush=True)
"""
    assert ran(code, ignoring=signal.SIGHUP) == (0, "begun\ngoes on\n")


def test_what_is_behind_the_block_has_the_handlers_of_before():
    before = [signal.getsignal(number) for number in signals.ENDING]
    with signals.as_exceptions(), signals.ignored():
        assert all(signal.getsignal(number) is signal.SIG_IGN for number in signals.ENDING)
    assert [signal.getsignal(number) for number in signals.ENDING] == before


STARTS_A_CHILD = """
import subprocess
grandchild = "import subprocess, sys; print('ready', flush=True); subprocess.run(['cat'], check=True)"
child = subprocess.Popen(
    [sys.executable, "-c", grandchild], stdin=subprocess.PIPE, preexec_fn=signals.block, process_group=0
)
sys.stdin.readline()
for number in signals.ENDING:
    os.killpg(child.pid, number)
child.communicate(b"7")
print(child.returncode)
"""


def test_processes_that_block_the_ending_signals_outlive_all_of_them_and_so_do_their_children() -> None:
    assert ran(STARTS_A_CHILD) == (0, "ready\n70\n")


IS_KILLED = """
import subprocess
child = subprocess.Popen(["sleep", "1000"], preexec_fn=signals.end_with_parent)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_ends_with_its_parent_does_so_where_the_parent_is_killed() -> None:
    code, said = ran(IS_KILLED)
    assert code == -signal.SIGKILL
    child = int(said)
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


LISTENS = """
folder = sys.argv[1]
def leave():
    print("asked", flush=True)
    if "hangs" in sys.argv:
        sys.stdin.read()
signals.Listener(pathlib.Path(folder), leave)
print("listens", flush=True)
sys.stdin.read()
"""


def test_a_node_is_labelled_with_the_states_that_are_on_its_machine(tmp_path: Path) -> None:
    for name in ("job.one.3", "job.two.1", ".draft"):
        (tmp_path / name).mkdir()
    (tmp_path / "17.listens").touch()
    assert signals.left_labels(tmp_path) == {signals.left_label(f"job.{name}"): "1" for name in ("one", "two")}


def test_processes_that_listen_are_waited_for_until_they_have_left_their_states_or_ended(tmp_path: Path) -> None:
    program = f"import pathlib, sys; from orchestrator.system import signals\n{LISTENS}"
    with ExitStack() as stack:
        listening = []
        for extra in ((), ("hangs",), ()):
            command = [sys.executable, "-c", program, str(tmp_path), *extra]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
            listening.append(process)
        leaves, hangs, dies = listening
        dies.kill()
        dies.wait()
        assert signals.ask_to_leave(tmp_path, 1.0) == [hangs.pid]
        assert leaves.stdout is not None
        assert leaves.stdout.readline() == "asked\n"
    assert list(tmp_path.iterdir()) == []
    assert signals.ask_to_leave(tmp_path, PATIENCE_S) == []
    assert signals.ask_to_leave(tmp_path / "gone", PATIENCE_S) == []
