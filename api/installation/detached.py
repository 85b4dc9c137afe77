"""Processes of an installation that outlive whoever starts them: the service, and what brings it back.

Responsible for what "outlive" takes: no signal of the terminal reaches them, nothing is read from it, and what they say
goes to the service's log. It refuses to know what they are, and to wait for them.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from api.installation.home import Home


def start_detached(
    command: Sequence[str],
    home: Home,
    *,
    environment: Mapping[str, str],
    folder: Path | None = None,
    listener: socket.socket | None = None,
) -> subprocess.Popen[bytes]:
    """``command`` runs with this environment, in ``folder`` (default: ``working_folder``), and has inherited ``listener``.

    What it writes is its user's alone.
    """
    with home.log.open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder or working_folder(home),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            umask=0o077,
            start_new_session=True,  # Ctrl-C in this terminal is not meant for it
            pass_fds=() if listener is None else (listener.fileno(),),
        )


def working_folder(home: Home) -> Path:
    """The folder that a process of the installation runs in: ours, or the home where ours was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return home.path
