"""Made-up traffic, codec residues and figures of steps of a simulated job, whose bytes and steps are not real."""

from __future__ import annotations

from orchestrator.host.line_traffic import LineCounter, by_region
from orchestrator.status import FragmentNorms, Line, LinesStatus, StatusDocument

PAYLOAD_BYTES = 100_000
RESIDUE_RATIO = 0.25


def add_lines(status: StatusDocument) -> None:
    """Add traffic to a status: every line carried a payload each way per merge, and the state once; one fragment waits."""
    merges = status["statistics"]["merges_per_island"]
    islands = status["view"]["islands"]
    lines = {island["island"]: _line(merges.get(island["island"], 0)) for island in islands}
    regions = {island["island"]: island["region"] for island in islands}
    status["lines"] = LinesStatus(islands=lines, regions=by_region(lines, regions)).model_dump()
    status["fragment_norms"] = [
        FragmentNorms(
            fragment=p["fragment"], version=p["version"], update_norm=2.0, residue_norm=2.0 * RESIDUE_RATIO
        ).model_dump()
        for p in status["view"]["fragments"]
    ]


def add_steps(status: StatusDocument) -> None:
    """Add what a real trainer says of an island's last step."""
    for n, island in enumerate(status["view"]["islands"]):
        if island["loss"] is not None:
            island |= {"learning_rate": 1e-3, "gradient_norm": 0.5 + n / 8}
            island["mfu_ratio"] = 0.4 if island["state"] == "training" else None


def _line(merges: int) -> Line:
    counter = LineCounter()
    counter.sent("state", 4 * PAYLOAD_BYTES)
    for _ in range(merges):
        counter.received(PAYLOAD_BYTES, 0.01)
        counter.sent("update", PAYLOAD_BYTES)
        counter.delivered(0.02)
    counter.waits(1, PAYLOAD_BYTES)
    return counter.status()
