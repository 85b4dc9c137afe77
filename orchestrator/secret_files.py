"""Files that hold a secret: read only where nobody else of this machine can read them.

A file that root gives to a group on purpose is one, too: Kubernetes and systemd give secrets so. Refuses to know what they
hold.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from orchestrator.errors import ConfigurationError


def refuse_unfit(path: Path, what: str, remedy: str) -> None:
    """Raises ConfigurationError for what cannot be read, is empty, or can be read by others.

    ``what`` is who names it (``--token-file``), ``remedy`` is how such a file comes there.
    """
    try:
        about = path.stat()
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise ConfigurationError(detail=f"{what} {path}: {error.strerror}. {remedy}") from error
    if not stat.S_ISREG(about.st_mode) or is_empty:
        raise ConfigurationError(detail=f"{what} {path} is empty, or no file. {remedy}")
    given_by_root = about.st_uid == 0 != os.geteuid()
    readable = stat.S_IRWXO | (stat.S_IWGRP if given_by_root else stat.S_IRWXG)
    if about.st_mode & readable:
        mode = stat.S_IMODE(about.st_mode)
        raise ConfigurationError(
            detail=f"{what} {path} has the mode {mode:04o}: others may read it. Make it 0600 (chmod 600 {path})."
        )
