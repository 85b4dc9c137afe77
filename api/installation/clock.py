"""Checks of this machine's clock: is it synchronised, and how far is it from a service's? And what a check results in.

Clocks are never set. No time server is contacted, because nothing here may need the internet. The kernel knows whether its
clock is synchronised (adjtimex(2), read only). A service's answer names the second in which it was written, so the offset is
known as an interval, and its end nearer to zero is reported.
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
"""A Date header is truncated to seconds, and servers renew it about once a second."""
ANSWER_TIMEOUT_S = 5.0
STA_UNSYNC = 0x0040
KEEP = "Synchronise it: systemctl enable --now systemd-timesyncd, or chrony; for a container, on its host."


class _Timex(ctypes.Structure):
    """The beginning of adjtimex(2)'s structure, and room for the rest. Without modes it only reads."""

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
    """Return whether the kernel considers its clock synchronised; None if it cannot tell."""
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
    """Check that the clock is synchronised, and not behind the time of ``older``, an existing file."""
    utc = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    ahead = older.stat().st_mtime - now if older.is_file() else 0.0
    if ahead > AHEAD_MAX_S:
        return CheckResult(
            "clock", State.WRONG, f"{utc}, but {older.name} was written {ahead:.0f} s later", f"Set the clock. {KEEP}"
        )
    if is_synchronised is False:
        return CheckResult("clock", State.WARNING, f"{utc}, not synchronised", KEEP)
    return CheckResult("clock", State.OK, utc + (", synchronised" if is_synchronised else ""))


def service_clock(url: str, certificate: Path | None) -> CheckResult:
    """Compare this machine's clock with that of the service at ``url``, by the date of an answer."""
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
            check, State.WARNING, f"{url} does not answer: {error}", "Check that it runs; `atoll jobs` says more."
        )
    except ConfigurationError as error:
        return CheckResult(check, State.WARNING, f"{url} is not trusted here", error.detail)
    except (KeyError, ValueError):
        return CheckResult(
            check, State.WARNING, f"{url} does not send its time", "Check that an atoll service has that address."
        )
    if abs(offset_s) > OFFSET_MAX_S:
        detail = f"{url} is at least {abs(offset_s):.0f} s {'ahead of' if offset_s > 0 else 'behind'} this machine"
        return CheckResult(
            check, State.WARNING, detail, f"One of the two is wrong. On that machine: {KEEP[0].lower()}{KEEP[1:]}"
        )
    return CheckResult(check, State.OK, f"no difference to {url}")


def offset(date: float, asked_at: float, answered_at: float) -> float:
    """Return by how many seconds the clock that wrote ``date`` is at least ahead; negative if behind, 0 if it may agree.

    The date was written between ``asked_at`` and ``answered_at`` on our clock. The other clock then showed between ``date``
    and DATE_AGE_MAX_S later.
    """
    if date > answered_at:
        return date - answered_at
    return min(0.0, date + DATE_AGE_MAX_S - asked_at)
