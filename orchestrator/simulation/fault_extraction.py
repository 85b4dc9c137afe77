"""Extraction of a tape's faults, to be injected again: commands, notices, crashes, silences, lost publications.

An operator's command is repeated as it was given. A crash is set where its end was heard of, less the usual time until that
is heard. A silence begins where the island's own gap says (it was frozen), or where it was last heard (it was cut off).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from orchestrator.accounting.series import median
from orchestrator.core import commands
from orchestrator.core import events as e
from orchestrator.core.vocabulary import Duration, Instant, IslandId, JobPolicy, NodeGroupId
from orchestrator.simulation.observed import Observed, Silence
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan
from orchestrator.simulation.speeds import Stop

DETECT_S: Duration = 0.01
"""For a crash when no death of known time was seen: a broken connection is noticed within this."""
LONG_NOTICE_S: Duration = 600.0
"""For a notice that did not say when."""
STEPS_TO_ADOPT = 3
"""An island that took so many steps after a version should have come, and did not adopt it, never got it."""


class FaultExtraction:
    """``stops`` are those of each island, by its own reports."""

    def __init__(self, seen: Observed, stops: Mapping[IslandId, Sequence[Stop]], policy: JobPolicy) -> None:
        self._seen, self._stops, self._policy = seen, stops, policy
        self.detect_s = median(seen.detections) if seen.detections else DETECT_S

    @property
    def silence_s(self) -> Duration:
        """From when nothing got through until that was noticed."""
        seen = [silence.lost_at - self._began(silence) for silence in self._seen.silences]
        return median(seen) if seen else WorldPlan(()).silence_s

    def _stop_in(self, silence: Silence) -> Stop | None:
        since, until = silence.span(self._seen.until)
        overlapping = [stop for stop in self._stops[silence.island] if stop.since < until and since < stop.until]
        return max(overlapping, key=lambda stop: stop.until - stop.since, default=None)

    def _began(self, silence: Silence) -> Instant:
        """When the island stopped, by its own gap; without one, a little after it was last heard."""
        stop = self._stop_in(silence)
        if stop is not None and silence.restored_at is not None:
            return min(silence.lost_at, silence.restored_at - (stop.until - stop.since))
        return silence.heard_at

    def faults(self) -> tuple[Fault, ...]:
        """Commands, notices, crashes and silences, in time order."""
        silence_s = self.silence_s
        faults = [fault for command in self._seen.commands if (fault := self._commanded(command)) is not None]
        for notice in self._seen.notices:
            lasts = LONG_NOTICE_S if notice.seconds is None else max(0.0, notice.seconds)
            faults.append(Fault(notice.at, FaultKind.NOTICE, notice.island, lasts))
        for island, at, is_request_time in self._seen.crashes:
            faults.append(Fault(at if is_request_time else max(0.0, at - self.detect_s), FaultKind.CRASH, island))
        for silence in self._seen.silences:
            at = max(0.0, silence.lost_at - silence_s)
            until = silence.restored_at
            if until is None:  # never heard again: silent until well after it was given up
                until = silence.lost_at + 2.0 * self._policy.suspect_timeout_s + silence_s
            stood = silence.restored_at is None or self._stop_in(silence) is not None
            kind = FaultKind.FREEZE if stood else FaultKind.CUT
            faults.append(Fault(at, kind, silence.island, until - at))
        return tuple(sorted(faults, key=lambda fault: (fault.at, fault.island, fault.kind)))

    def _commanded(self, command: e.CommandRequested) -> Fault | None:
        """None for a command about a node group that the job has no island in, and for one that strikes nobody."""
        match command.request:
            case commands.Kill(island, restart):
                return Fault(command.at, FaultKind.KILL if restart else FaultKind.KILL_AND_KEEP_AWAY, island)
            case commands.Drain(island):
                return Fault(command.at, FaultKind.DRAIN, island)
            case commands.Readd(island):
                return Fault(command.at, FaultKind.READD, island)
            case commands.Cordon(node_group):
                return self._about_group(command.at, node_group, FaultKind.CORDON)
            case commands.Uncordon(node_group):
                return self._about_group(command.at, node_group, FaultKind.UNCORDON)
            case commands.Scale(node_group, count):
                return self._about_group(command.at, node_group, FaultKind.SCALE, count)
            case commands.Cancel():
                return Fault(command.at, FaultKind.CANCEL, self._policy.islands[0].island)
            case _:
                return None

    def _about_group(self, at: Instant, node_group: NodeGroupId, kind: FaultKind, count: int = 0) -> Fault | None:
        there = [plan.island for plan in self._policy.islands if plan.node_group == node_group]
        return Fault(at, kind, there[0], count=count) if there else None

    def publication_loss(self) -> float:
        """Of the versions that an island had time to adopt before the next came, those it did not."""
        lags = sorted(adoption.lag for adoption in self._seen.adoptions)
        usual = lags[len(lags) * 19 // 20] if lags else 0.0
        lost = adopted = 0
        for (island, _), versions in self._seen.published.items():
            followers = [at for _, at, _ in versions[1:]]
            for (_, at, taken), until in zip(versions, [*followers, inf], strict=True):
                if taken:
                    adopted += 1
                elif until - at > usual and self._could_adopt(island, at + usual, until):
                    lost += 1
        return lost / (lost + adopted) if lost else 0.0

    def _could_adopt(self, island: IslandId, at: Instant, until: Instant) -> bool:
        for (name, _), life in self._seen.lives.items():
            if (
                name == island
                and life.training_ordered_at is not None
                and life.training_ordered_at <= at < life.ended_at
            ):
                after = [report for report in life.reports if at < report.at < until]
                quiet = any(s.island == island and s.heard_at < until for s in self._seen.silences if s.lost_at > at)
                return not quiet and bool(after) and after[-1].steps_total - after[0].steps_total >= STEPS_TO_ADOPT
        return False
