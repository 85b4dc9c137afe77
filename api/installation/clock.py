"""Checks of this machine's clock: what the kernel believes of it, and how far it is from a service's.

Responsible for the checks and their remedies; never sets a clock. No time server is asked, because nothing here may need
the internet. The kernel knows whether somebody keeps its clock (adjtimex(2), asked without changing anything); an answer of
a service names the second in which it was written, so what is known of the offset is an interval, and its end nearer to
zero is what is told.

The result of one check of `atoll doctor`: the check, its state, the detail, and the remedy.
"""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from pathlib import Path

from api.installation.binding import trusting
from orchestrator.errors import ConfigurationError


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class CheckResult:
    check: str
    state: State
    detail: str
    remedy: str = ""


AHEAD_MAX_S = 5.0
OFFSET_MAX_S = 2.0
DATE_AGE_MAX_S = 2.0
"""A Date is cut to whole seconds, and servers write it anew about once a second."""
ANSWER_TIMEOUT_S = 5.0
STA_UNSYNC = 0x0040
KEEP = "Keep it set: systemctl enable --now systemd-timesyncd, or chrony; in a container, on its host."


class _Timex(ctypes.Structure):
    """The beginning of adjtimex(2)'s structure, and room for the rest. No modes: it is read, not set."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    )


def synchronised() -> bool | None:
    """Whether the kernel believes that somebody keeps its clock; None where it cannot be asked."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    timex = _Timex()
    if adjtimex(ctypes.byref(timex)) < 0:  # some sandboxes forbid the call
        return None
    return not timex.status & STA_UNSYNC


def own_clock(is_synchronised: bool | None, older: Path, now: float) -> CheckResult:
    """Nothing of ours comes from the future, and somebody keeps the clock. ``older`` is a file that was there before."""
    utc = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    ahead = older.stat().st_mtime - now if older.is_file() else 0.0
    if ahead > AHEAD_MAX_S:
        return CheckResult(
            "clock", State.WRONG, f"{utc}: {older.name} is {ahead:.0f} s younger than that", f"Set it. {KEEP}"
        )
    if is_synchronised is False:
        return CheckResult("clock", State.WARNING, f"{utc}: the kernel says that nothing synchronises it", KEEP)
    return CheckResult("clock", State.OK, utc + (", synchronised" if is_synchronised else ""))


def service_clock(url: str, certificate: Path | None) -> CheckResult:
    """This machine's clock against that of the service at ``url``, by the date of an answer."""
    import httpx

    check = "service's clock"
    try:
        verify = trusting(certificate) if certificate else True
        with httpx.Client(verify=verify, timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            asked_at = time.time()
            date = client.get(f"{url.rstrip('/')}/healthz").headers["date"]
            offset_s = offset(parsedate_to_datetime(date).timestamp(), asked_at, time.time())
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return CheckResult(
            check, State.WARNING, f"{url} does not answer: {error}", "Is it there? `atoll jobs` says more."
        )
    except ConfigurationError as error:
        return CheckResult(check, State.WARNING, f"{url} cannot be known here", error.detail)
    except (KeyError, ValueError):
        return CheckResult(check, State.WARNING, f"{url} does not say its time", "Is that address a service of atoll?")
    if abs(offset_s) > OFFSET_MAX_S:
        detail = f"{url} is at least {abs(offset_s):.0f} s {'ahead of' if offset_s > 0 else 'behind'} this machine"
        return CheckResult(
            check, State.WARNING, detail, f"One of the two is wrong; on that one: {KEEP[0].lower()}{KEEP[1:]}"
        )
    return CheckResult(check, State.OK, f"that of {url} is not seen to differ")


def offset(date: float, asked_at: float, answered_at: float) -> float:
    """By how many seconds the clock that wrote ``date`` is ahead at least; negative if it is behind; 0 if that may be.

    It wrote the date between ``asked_at`` and ``answered_at`` of ours, and it was then between ``date`` and
    DATE_AGE_MAX_S later.
    """
    if date > answered_at:
        return date - answered_at
    return min(0.0, date + DATE_AGE_MAX_S - asked_at)
