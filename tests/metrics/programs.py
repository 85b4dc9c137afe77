"""Programs of the system that tests start for real. Without one its tests are skipped visibly; in CI they fail."""

from __future__ import annotations

import os
import shutil

import pytest


def required(program: str) -> str:
    """Where the program is."""
    if path := shutil.which(program):
        return path
    missing = f"{program} is not installed (deploy/system-packages.sh installs it)"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)
