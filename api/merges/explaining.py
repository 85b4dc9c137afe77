"""A merge's explanation as the API answers it, and in plain words. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from api.schemas import Absence, Contributor, Merge, MergeSummary, Refusal
from orchestrator.accounting.explanation import Explanation
from orchestrator.report.words import seconds


def merge_of(explanation: Explanation) -> Merge:
    """Return the whole explanation."""
    facts = _renamed(
        asdict(explanation), opened_at="opened_after_s", quorum_at="quorum_after_s", merge_seconds="merge_s"
    )
    facts |= summary_of(explanation).model_dump()
    return Merge.model_validate(
        facts
        | {
            "grace_window_s": None
            if explanation.grace_until is None
            else explanation.grace_until - explanation.quorum_at,
            "grace_used_s": explanation.closed_at - explanation.quorum_at,
            "contributors": [
                Contributor.model_validate(_renamed(asdict(item), arrived_at="arrived_after_s"))
                for item in explanation.contributors
            ],
            "absent": [Absence(island=island, state=state) for island, state in explanation.absent],
            "refusals": [Refusal.model_validate(_renamed(asdict(item), at="after_s")) for item in explanation.refusals],
        }
    )


def summary_of(explanation: Explanation) -> MergeSummary:
    return MergeSummary(
        fragment=explanation.fragment,
        version=explanation.version,
        islands=[item.island for item in explanation.contributors],
        reason=explanation.reason,
        because=because(explanation),
        closed_after_s=explanation.closed_at,
        merged_after_s=explanation.merged_at,
    )


def because(explanation: Explanation) -> str:
    """Return one sentence: why the round closed when it did, and why islands are missing from it."""
    waited = f"after {seconds(explanation.closed_at - explanation.quorum_at)} of grace"
    parts = [f"closed because {explanation.reason.words}, {waited}"]
    latest = {refusal.island: refusal for refusal in explanation.refusals}
    parts += [f"{r.island} refused: {r.reason.replace('_', ' ')}, {r.detail}" for r in latest.values()]
    absent = [f"{island} ({state.replace('_', ' ')})" for island, state in explanation.absent if island not in latest]
    return "; ".join([*parts, f"without {', '.join(absent)}"] if absent else parts)


def _renamed(facts: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in facts.items()}
