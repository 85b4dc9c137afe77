"""Traffic between islands and synchroniser, and its outcome: payloads each way, admissions, states handed over.

    up     the bytes of a contribution, held on the synchroniser's side
    down   a published fragment for one recipient, or one fragment of a whole state taken from the synchroniser

Counts payloads by fragment. How large those are is not on the tape: the shell knows (``orchestrator.status``), and
whoever exports bytes multiplies. A state that comes from a peer passes the synchroniser by and is counted as a catch-up
only. Refuses to know: rounds (``merges``), time, and how often what was asked for arrived (a publication may be overtaken).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from orchestrator.accounting.series import Histogram
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import CarriedReport, CatchUpFailure, CaughtUp
from orchestrator.core.vocabulary import IslandId, JobPolicy

STALENESS_BOUNDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
PEER, SYNCHRONISER = "peer", "synchroniser"


class Traffic:
    """The fold."""

    _up: list[int]
    _down: list[int]
    _admitted: Counter[IslandId]
    _refused: Counter[IslandId]
    _staleness: Histogram
    _catch_ups: Counter[str]
    _catch_up_failures: int
    _placement_failures: int
    _merge_failures: int
    _quarantines: Counter[IslandId]

    def __init__(self, policy: JobPolicy) -> None:
        self._up = [0] * policy.fragment_count
        self._down = [0] * policy.fragment_count
        self._admitted = Counter()
        self._refused = Counter()
        self._staleness = Histogram(STALENESS_BOUNDS)
        self._catch_ups = Counter({PEER: 0, SYNCHRONISER: 0})
        self._catch_up_failures = 0
        self._placement_failures = 0
        self._merge_failures = 0
        self._quarantines = Counter()

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if isinstance(event, (e.ContributionArrived, e.ContributionUnusable)):
            if 0 <= event.contribution.fragment < len(self._up):
                self._up[event.contribution.fragment] += 1
        elif isinstance(event, e.IslandReported):
            self._reported(event.report)
        elif isinstance(event, e.PlacementFailed):
            self._placement_failures += 1
        elif isinstance(event, e.MergeFailed):
            self._merge_failures += 1
        for effect in effects:
            if isinstance(effect, f.AdmitContribution):
                self._admitted[effect.contribution.island] += 1
                self._staleness.observe(effect.version - 1 - effect.contribution.base_version)
            elif isinstance(effect, f.RefuseContribution):
                self._refused[effect.contribution.island] += 1
            elif isinstance(effect, f.QuarantineIsland):
                self._quarantines[effect.island] += 1
            elif isinstance(effect, f.PublishFragment):
                self._down[effect.fragment] += len(effect.recipients)

    def _reported(self, report: CarriedReport) -> None:
        if isinstance(report, CaughtUp):
            self._catch_ups[PEER if report.donor is not None else SYNCHRONISER] += 1
            if report.donor is None:
                self._down = [count + 1 for count in self._down]
        elif isinstance(report, CatchUpFailure):
            self._catch_up_failures += 1

    def summary(self) -> dict[str, Any]:
        """Return the figures as plain data. ``staleness`` is in versions by which admitted bases were behind."""
        return {
            "payloads_up": list(self._up),
            "payloads_down": list(self._down),
            "admitted": dict(sorted(self._admitted.items())),
            "refused": dict(sorted(self._refused.items())),
            "staleness": self._staleness.summary(),
            "catch_ups": dict(sorted(self._catch_ups.items())),
            "catch_up_failures": self._catch_up_failures,
            "placement_failures": self._placement_failures,
            "merge_failures": self._merge_failures,
            "quarantines": dict(sorted(self._quarantines.items())),
        }
