"""Programs of the system that tests start for real. Without one its tests are skipped visibly; in CI they fail."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest


def required(program: str) -> str:
    """Where the program is."""
    return shutil.which(program) or missing(program)


def required_file(pattern: str, program: str) -> Path:
    """Where the program is that its package keeps out of PATH: the last match of ``pattern`` below the root folder."""
    found = sorted(Path("/").glob(pattern))
    return found[-1] if found else missing(program)


def missing(program: str) -> NoReturn:
    why = f"{program} is not installed (deploy/system-packages.sh installs it)"
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)
