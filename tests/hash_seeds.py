"""What a process of its own says under a given PYTHONHASHSEED: sets of strings iterate in another order under each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent


def said_under(hash_seed: str, *arguments: str) -> str:
    """What ``python ARGUMENTS`` prints; it must succeed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    ).stdout
