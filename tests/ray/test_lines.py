"""`atoll doctor --lines` on a live cluster: every line of its node groups is measured, and nothing of it stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.runtime.control_port import RayControlPort
from tests.api.installation import environment
from tests.waiting import PATIENCE_S

GROUPS = ["asia", "europe", "us-east", "us-west"]


@pytest.mark.ray
def test_every_line_between_the_head_and_groups_is_measured_each_way(home: Path, port: RayControlPort) -> None:
    command = [sys.executable, "-m", "orchestrator.runtime.line_probe", "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment())
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    names = ["control", *GROUPS]
    assert [(line["one"], line["other"]) for line in lines] == [
        (one, other) for n, one in enumerate(names) for other in names[n + 1 :]
    ]
    for line in lines:
        assert "problem" not in line, line
        assert line["round_trip_s"] > 0
        assert line["forth_bits_per_second"] > 0
        assert line["back_bits_per_second"] > 0
    assert all(group["cpus_free"] == group["cpus"] for group in port.node_groups())
