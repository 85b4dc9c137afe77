"""The lines of an installation's cluster, measured by a process that joins it; this one never imports Ray.

python -m orchestrator.runtime.line_probe --home HOME
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

from pydantic import BaseModel, ValidationError

from api.installation.home import Home
from orchestrator.errors import InfrastructureError
from orchestrator.system import python_process
from orchestrator.system.python_process import built

PROBE_MODULE = "orchestrator.runtime.line_probe"
HEAD = "control"
"""The node group of the head, where the synchroniser runs."""


class MeasuredLine(BaseModel):
    """A line between two node groups, or the problem with it. ``forth`` is from ``one`` to ``other``."""

    one: str
    other: str
    round_trip_s: float | None = None
    forth_bits_per_second: float | None = None
    back_bits_per_second: float | None = None
    problem: str | None = None


def measured_lines(home: Home, ports: tuple[int, int] = (0, 0)) -> Iterator[MeasuredLine]:
    """Yield each line once it is measured, on a free port of this range (0, 0: any).

    Raises InfrastructureError if there is no cluster, or joining it fails.
    """
    command = python_process.module(PROBE_MODULE, "--home", str(home.path), "--ports", *map(str, ports))
    process = subprocess.Popen(
        command,
        env=built(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                yield _parsed(line)
            complaint = process.stderr.read().strip()
            if process.wait():
                last = complaint.splitlines()[-1] if complaint else f"it ended with exit code {process.returncode}"
                raise InfrastructureError(detail=f"The lines cannot be measured: {last}")
        finally:
            process.terminate()


def _parsed(line: str) -> MeasuredLine:
    try:
        return MeasuredLine.model_validate(json.loads(line))
    except (ValueError, ValidationError) as error:
        raise InfrastructureError(
            detail=f"The line probe printed {line[:80]!r}, which is not a measurement.", remedy="Try again."
        ) from error
