"""The trace of steps in PyTorch, for `atoll profile`: each step is marked, and nothing else is needed to open it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from learners.profiling import STEP, TorchTrace

torch = pytest.importorskip("torch", reason="needs torch: make torch-test has it")


def test_a_trace_marks_each_step_with_its_operations_within(tmp_path: Path) -> None:
    trace = TorchTrace()
    trace.start(tmp_path)
    for number in range(3):
        trace.step(number)
        torch.ones(64, 64) @ torch.ones(64, 64)
    trace.stop(tmp_path / "trace")
    (file,) = (tmp_path / "trace").iterdir()
    with gzip.open(file, "rt") as text:
        events = json.load(text)["traceEvents"]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("name") == STEP]
    products = [event["ts"] for event in events if event.get("name") == "aten::matmul"]
    assert len(spans) == len(products) == 3
    assert all(start <= at <= end for (start, end), at in zip(sorted(spans), sorted(products), strict=True))
