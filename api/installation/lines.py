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
"""The node group of the synchroniser's place."""


class MeasuredLine(BaseModel):
    """Between a node of one group and a node of another; ``forth`` is from ``one`` to ``other``. Or what was in its way."""

    one: str
    other: str
    round_trip_s: float | None = None
    forth_bits_per_second: float | None = None
    back_bits_per_second: float | None = None
    problem: str | None = None


def measured_lines(home: Home, ports: tuple[int, int] = (0, 0)) -> Iterator[MeasuredLine]:
    """Each line once it is measured, by way of a free one of these ports (0, 0: any).

    Raises InfrastructureError where there is no cluster, or it cannot be joined.
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
        raise InfrastructureError(detail=f"The probe of lines said {line[:80]!r}.", remedy="Try again.") from error
