"""Whether what lies in a run's folder is in the reference: a file that nobody has described is somebody's surprise."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.system.run_folder import FILES

LIKEWISE = {".momentum": ".parameters", ".residue": ".parameters", ".log.older": ".log"}
"""Endings of files that a row of the reference names beside its own."""


def undescribed(run_dir: Path) -> list[str]:
    """The files that no row of ``FILES`` is about, by their paths from the folder."""
    patterns = [pattern_of(file.path) for file in FILES]
    names = [str(path.relative_to(run_dir)) for path in sorted(run_dir.rglob("*")) if not path.is_dir()]
    return [name for name in names if not any(pattern.fullmatch(plain(name)) for pattern in patterns)]


def plain(name: str) -> str:
    for ending, other in LIKEWISE.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + other
    return name


def pattern_of(path: str) -> re.Pattern[str]:
    """What is in capitals differs from file to file, and so does what an ellipsis stands for."""
    return re.compile(re.sub(r"[A-Z]{3,}", "[^/]+", re.escape(path)).replace("…", "[^/]*(?:/[^/]*)?"))
