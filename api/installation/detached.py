"""Processes of an installation that outlive whoever starts them: the service, and what brings it back.

They are detached from the terminal: no signals, no input, and their output goes to the service's log. Nothing waits for
them.
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
    """Start ``command`` in ``folder`` (default: ``working_folder``) with this environment and the inherited ``listener``.

    Only its user can read the files that it creates.
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
            start_new_session=True,  # Ctrl-C in this terminal must not reach it
            pass_fds=() if listener is None else (listener.fileno(),),
        )


def working_folder(home: Home) -> Path:
    """Return the folder for processes of the installation: the working folder, or the home if that was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return home.path
