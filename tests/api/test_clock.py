"""A wrong clock is noticed: one that nobody keeps, one that is behind our own files, one that a service contradicts."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.installation.doctor import DATE_AGE_MAX_S, State, offset, own_clock, service_clock, synchronised
from orchestrator.certificates import folders
from tests.api.clocks import a_service

TIME_ERROR = 5


@pytest.mark.parametrize(("ahead_s", "told"), [(-3600, "behind this machine"), (-30, "behind"), (30, "ahead of this")])
def test_a_service_with_another_time_is_a_warning_with_the_remedy(ahead_s: float, told: str) -> None:
    with a_service(ahead_s) as url:
        finding = service_clock(url, None)
    assert finding.state is State.WARNING
    assert told in finding.detail
    assert url in finding.detail
    assert "chrony" in finding.remedy


def test_the_offset_told_is_never_more_than_it_is() -> None:
    with a_service(-30) as url:
        found = service_clock(url, None).detail
    (seconds,) = [int(word) for word in found.split() if word.isdigit()]
    assert 30 - DATE_AGE_MAX_S - 1 <= seconds <= 30


def test_a_service_with_the_same_time_is_in_order() -> None:
    with a_service(0) as url:
        finding = service_clock(url, None)
    assert (finding.state, finding.remedy) == (State.OK, "")


def test_a_service_with_a_machines_certificate_is_known_and_with_spoilt_files_it_is_said_which(tmp_path: Path) -> None:
    authority, machine = tmp_path / "authority", tmp_path / "machine"
    folders.make_authority(authority, "fleet")
    folders.issue(authority, machine, ["machine.example"])
    with a_service(0, machine) as url:
        assert service_clock(url, machine / folders.CERTIFICATE).state is State.OK
        (machine / folders.AUTHORITY_CERTIFICATE).write_text("no certificate")
        finding = service_clock(url, machine / folders.CERTIFICATE)
    assert finding.state is State.WARNING
    assert str(machine / folders.AUTHORITY_CERTIFICATE) in finding.remedy


def test_a_service_that_tells_no_time_or_does_not_answer_is_a_warning() -> None:
    with a_service(None) as url:
        assert "does not send its time" in service_clock(url, None).detail
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        finding = service_clock(f"http://127.0.0.1:{taken.getsockname()[1]}", None)
    assert finding.state is State.WARNING
    assert "does not answer" in finding.detail


@given(st.floats(1e9, 2e9), st.floats(-100, 100), st.floats(0, 10), st.floats(0, 1), st.floats(0, DATE_AGE_MAX_S))
def test_an_offset_has_the_sign_of_the_true_one_and_is_no_larger(
    asked_at: float, true: float, took: float, when: float, age: float
) -> None:
    """The date was written at some moment of the request, from a clock of that offset, and was so old by then."""
    date = asked_at + when * took + true - age
    found = offset(date, asked_at, asked_at + took)
    slack = 1e-5  # of floats around 1e9
    assert min(0.0, true) - slack <= found <= max(0.0, true) + slack
    assert abs(true - found) <= took + DATE_AGE_MAX_S + slack


def test_a_clock_that_nobody_keeps_is_a_warning(tmp_path: Path) -> None:
    finding = own_clock(False, tmp_path / "none", 0.0)
    assert finding.state is State.WARNING
    assert "not synchronised" in finding.detail
    assert "systemd-timesyncd" in finding.remedy
    assert own_clock(True, tmp_path / "none", 0.0).detail == "1970-01-01 00:00:00 UTC, synchronised"
    assert own_clock(None, tmp_path / "none", 0.0).state is State.OK, "a kernel that cannot be asked says nothing"


def test_a_clock_behind_our_own_files_is_wrong(tmp_path: Path) -> None:
    older = tmp_path / "requirements.lock"
    older.touch()
    now = time.time()
    os.utime(older, (now + 3600, now + 3600))
    finding = own_clock(True, older, now)
    assert finding.state is State.WRONG
    assert "3600 s" in finding.detail
    os.utime(older, (now - 3600, now - 3600))
    assert own_clock(True, older, now).state is State.OK


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another system's kernel is not asked")
def test_the_kernel_is_understood_as_the_c_library_understands_it() -> None:
    libc = ctypes.CDLL(None)
    answered = libc.ntp_gettime(ctypes.create_string_buffer(256))
    expected = None if answered < 0 else answered != TIME_ERROR
    assert synchronised() is expected
