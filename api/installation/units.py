"""Install systemd units for head, service and join: ``atoll install-units head -- --address 10.0.0.7``.

The units are ``deploy/systemd`` of a checkout or a wheel. Installing one writes it with the path of this installation's
``atoll``, its options to ``/etc/atoll/UNIT.env``, creates the system user that runs it, gives that user the secrets in
``/etc/atoll``, and starts it now and at every boot. It may be run again, for example with other options. Leaves the meaning
of the options to the commands.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from api.installation.home import FOLDER
from orchestrator.errors import ConfigurationError, InfrastructureError, disk_remedy
from orchestrator.system import python_process

UNITS = {"head": "head", "service": "serve", "join": "join"}
"""The command that each unit runs."""
USER = "atoll"
PROGRAM = "/usr/local/bin/atoll"
"""In the units as shipped."""
SETTINGS, FOLDER_OF_UNITS, STATE = "etc/atoll", "etc/systemd/system", "/var/lib/atoll"
CERTIFICATES = "certificates"
SECRETS = ("token", CERTIFICATES)
STAYS_S = 4.0
"""A command that refuses its options or its certificates has ended by then."""
INSECURE = "--insecure"
RUNNING = Path("/run/systemd/system")
"""Exists where systemd runs this machine."""

Say = Callable[[str], None]


def install(unit: str, options: Sequence[str], root: Path, say: Say, *, start: bool) -> None:
    """Install and start one unit. ``root`` is where the files are written, ``/`` for this machine.

    Raises ConfigurationError for options that a unit cannot pass on, or without the rights; InfrastructureError if
    systemctl fails.
    """
    _refuse_unfit(options, root, start=start)
    name = f"atoll-{unit}.service"
    text = (FOLDER / "systemd" / name).read_text().replace(PROGRAM, str(program()))
    settings = root / SETTINGS
    try:
        settings.mkdir(mode=0o755, parents=True, exist_ok=True)
        _write(settings / f"{unit}.env", settings_of(options, with_certificates=(settings / CERTIFICATES).is_dir()))
        _write(root / FOLDER_OF_UNITS / name, text)
    except OSError as error:
        raise InfrastructureError(
            detail=f"--root {root}: {error.filename} cannot be written: {error.strerror}.",
            remedy=f"{disk_remedy(error)}, or give another folder.",
        ) from error
    say(f"wrote {root / FOLDER_OF_UNITS / name}, and its options to {settings / f'{unit}.env'}")
    if root != Path("/"):
        return
    user = _user(say)
    for path in (each for secret in SECRETS for each in (settings / secret, *(settings / secret).glob("*"))):
        if path.exists():
            os.chown(path, user.pw_uid, user.pw_gid)
    if start:
        for command in (["daemon-reload"], ["enable", name], ["restart", name]):
            _systemctl(*command)
        _refuse_ended(name)
        say(f"{name} runs, and starts with the machine. `journalctl -u {name}` shows what it says")


def settings_of(options: Sequence[str], *, with_certificates: bool) -> str:
    """Return the content of ``UNIT.env``. ``with_certificates`` if this machine's folder of them is there."""
    lines = [f'ATOLL_OPTIONS="{" ".join(options)}"']
    if with_certificates and INSECURE not in options and "--certificates" not in options:
        lines.append("ATOLL_CERTIFICATES=/etc/atoll/certificates")
    return "\n".join(lines) + "\n"


def program() -> Path:
    """Return the path of this installation's ``atoll``. Raises ConfigurationError if it has none."""
    path = Path(sys.prefix, "bin", "atoll")
    if not path.exists():
        raise ConfigurationError(detail=f"{path} does not exist. Install atoll with pip, and run its own `atoll`.")
    return path


def _refuse_unfit(options: Sequence[str], root: Path, *, start: bool) -> None:
    if odd := [word for word in options if not word or any(c.isspace() or c in "\"'\\$%" for c in word)]:
        raise ConfigurationError(
            detail=f"The option {odd[0]!r} has a space or one of \"'\\$%, which a unit cannot pass on. Write it into the "
            "unit's ExecStart with `systemctl edit` instead."
        )
    if root != Path("/"):
        return
    if os.geteuid() != 0:
        raise ConfigurationError(
            detail="Units are installed by root. Run this with sudo, or write them with --root FOLDER."
        )
    if start and not RUNNING.is_dir():
        raise ConfigurationError(
            detail="systemd does not run this machine. Run `atoll head`, `atoll serve` and `atoll join` under another "
            "supervisor, or only write the units with --no-start."
        )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o644)


def _user(say: Say) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(USER)
    except KeyError:
        command = [
            shutil.which("useradd") or "useradd",
            "--system",
            "--home-dir",
            STATE,
            "--shell",
            "/usr/sbin/nologin",
        ]
        group = ["--gid", USER] if _has_group() else ["--user-group"]
        done = _run(*command, *group, USER)
        if done.returncode:
            raise InfrastructureError(
                detail=f"The user {USER} cannot be created: {done.stderr.strip()}.",
                remedy=f"Create it: useradd -r {USER}.",
            ) from None
        say(f"created the system user {USER}")
        return pwd.getpwnam(USER)


def _has_group() -> bool:
    try:
        return bool(grp.getgrnam(USER))
    except KeyError:
        return False


def _refuse_ended(name: str) -> None:
    """Raise InfrastructureError if the unit's command ends at once."""
    deadline = time.monotonic() + STAYS_S
    while time.monotonic() < deadline:
        time.sleep(0.2)
        state = _run("systemctl", "is-active", name).stdout.strip()
        if state != "active":
            shown = _run("journalctl", "-u", name, "-n", "3", "-o", "cat").stdout
            words = " ".join(line for line in shown.splitlines() if line.startswith("atoll: "))
            raise InfrastructureError(
                detail=f"{name} does not stay up (it is {state}). {words or f'`journalctl -u {name}` says why.'}",
                remedy="Correct that, and run this again.",
            )


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=python_process.cleaned(os.environ))


def _systemctl(*arguments: str) -> None:
    done = _run("systemctl", *arguments)
    if done.returncode:
        raise InfrastructureError(
            detail=f"`systemctl {' '.join(arguments)}` failed: {done.stderr.strip()}.",
            remedy="`journalctl -xe` may say more.",
        )
