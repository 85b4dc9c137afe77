"""The diagnosis of a job: the one cause that cost most island time, or ended the job, with the records that show it.

Island time comes from ``goodput``: each second of badput has a class and an island. The fold here puts it to causes.

Failures        belong to a node if it fails islands that live elsewhere; to the job's code if several islands die of the
                same error; else to what ended the incarnations: a full disk, unusable work, a hung step, a crash loop, a
                lost connection. Failures without any of this have no culprit.
Late work       belongs to a thin line if the island's contributions, or the versions for it, travel much longer than those
                of others; and to slow merges if merges take more than half of H for a good part of the time.
Unmerged work   of a running job is no badput. It is counted where it is much more than that of the others.
Slow steps      are no badput either. A straggler costs the time in which it trained less than its accelerators could. The
                mean of its steps counts, because an island that is slow in bursts has a usual median.

An island stands out if its figure is at least ``Z_MIN`` spreads above the median of the others. The spread is the median
absolute deviation, scaled to a standard deviation, and at least a tenth of the median, so that two islands suffice.

``causes`` has the causes, and the rules by which failures are put down to one. What a failure is, and which node is bad, is
defined in ``failures``: the service cordons nodes by the same rule.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from orchestrator.accounting.causes import (
    USUAL,
    Cause,
    Culprits,
    Diagnosis,
    Finding,
    IslandFigures,
    culprit,
    evidence,
    shared_error,
)
from orchestrator.accounting.failures import Failures, Origin, failure_counts
from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.island_evidence import LATE_REASONS, RECORDS_SHOWN, UNUSABLE_REASONS, IslandEvidence
from orchestrator.accounting.island_time import (
    AWAY,
    DRAINING,
    ENDING,
    EVALUATING,
    HELD,
    NO_NODE,
    NOT_STEPPING,
    SILENT,
    Change,
)
from orchestrator.accounting.ledger import (
    LOST_WITH_ISLAND,
    NOT_TAKEN_UP,
    OVERWRITTEN,
    QUARANTINED,
    ROLLED_BACK,
    SUPERSEDED,
    UNFINISHED,
    refused,
)
from orchestrator.accounting.merges import LastWork, MergeTimes
from orchestrator.accounting.series import Series, Travels, distances, median
from orchestrator.accounting.statistics import Pulls
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.faults import Kind as FaultKind
from orchestrator.core.messages import Adopted
from orchestrator.core.saving import FragmentRestored, JobSalvaged
from orchestrator.core.vocabulary import (
    Duration,
    Instant,
    IslandId,
    IslandState,
    JobOutcome,
    JobPolicy,
)
from orchestrator.system.plain import counted, percent, seconds, some_of

SHARE_MIN = 0.02
"""A cause below this share of all island time is no reason to act."""
Z_MIN, RATIO_MIN = 3.0, 1.25
WAITING_SPREAD_MIN = 0.1
PULL_SPREAD_MIN_S, DELIVERY_SPREAD_MIN_S = 0.5, 0.1
"""The least spreads of the times that payloads travel. Progress, from which a pull is measured, is reported twice a second;
adoptions wait for the end of a step, so their spread is also at least the longest step."""
LONG_MERGE_RATIO = 0.5
"""A merge is long if it takes this part of the time in which an island trains H steps."""
UNMERGED_INTERVALS_MIN = 3.0
"""Unmerged work of an island is remarkable from so many H on: each fragment is offered once in H."""
LAST_WAIT_MIN_S = 1.0
"""Islands that wait for each other's last work for less than this are at the end of the job."""
_HOLDING_UP = Cause.STRAGGLER, Cause.HUNG_STEP, Cause.HELD_UP, Cause.LINK, Cause.CRASH_LOOP, Cause.UNUSABLE_WORK
STALL_MIN_S, STALL_INTERVALS = 30.0, 10.0
Figures = Mapping[str, Any]
"""Figures of ``Goodput.summary``, of the job or of an island in it."""

_LATE = frozenset({SUPERSEDED, *map(refused, LATE_REASONS)})
_NOT_IN_TIME = _LATE | {OVERWRITTEN, UNFINISHED}
_OF_THE_END = frozenset({ENDING, DRAINING, UNFINISHED})
_UNUSABLE = frozenset({QUARANTINED, *map(refused, UNUSABLE_REASONS)})
_PLAIN_CAUSES = {
    OVERWRITTEN: Cause.OVERWRITTEN,
    NO_NODE: Cause.NO_NODE,
    HELD: Cause.CORDONED,
    EVALUATING: Cause.EVALUATION,
    ENDING: Cause.ENDING,
    DRAINING: Cause.ENDING,
    UNFINISHED: Cause.ENDING,
    ROLLED_BACK: Cause.UNDONE,
    NOT_TAKEN_UP: Cause.UNDONE,
}


@dataclass(frozen=True, slots=True)
class _Look:
    """The facts that one diagnosis is made from. ``total`` is all island time, ``interval_s`` how long H steps usually take.

    ``long_merges`` is empty unless they took a good part of the time.
    """

    summary: Figures
    figures: Mapping[IslandId, IslandFigures]
    culprits: Culprits
    total: Duration
    span_s: Duration
    interval_s: Duration
    long_merges: Sequence[tuple[Duration, Duration]]

    def unmerged_s(self, island: str) -> Duration:
        """Return how long this island stepped for work that is in no merge."""
        own = self.summary["islands"][island]
        return float(own["seconds"]["in_flight"] + own["badput_seconds"].get(UNFINISHED, 0.0))

    def beside(self, island: str, figure: str) -> tuple[str, str]:
        """Return this figure of an island and the median of the others', in words."""
        own = getattr(self.figures[IslandId(island)], figure)
        values = (getattr(one, figure) for one in self.figures.values() if one.island != island)
        in_words = percent if figure.endswith("_ratio") else seconds
        return in_words(own), in_words(median([value for value in values if value is not None]))


class Diagnostician:
    """The fold. ``apply`` every record in order, then ask for a ``diagnosis``."""

    def __init__(self, policy: JobPolicy) -> None:
        self._policy = policy
        self._groups = {plan.island: str(plan.node_group) for plan in policy.islands}
        self._goodput = Goodput(policy)
        self._failures = Failures(plan.island for plan in policy.islands)
        self._islands = {plan.island: IslandEvidence() for plan in policy.islands}
        self._merged_at: Instant | None = None
        self._intervals: Series[Duration] = Series(256)
        self._merges, self._pulls, self._last_work = MergeTimes(), Pulls(), LastWork()
        self._is_short, self._short_s = False, 0.0
        """Whether fewer islands train than the quorum, and how long, after the first merge and before the last work."""
        self._shortages: deque[int] = deque(maxlen=RECORDS_SHOWN)
        self._longest: list[tuple[Duration, int]] = []
        """The records of the merges that took longest, with how long each took."""
        self._last_record = 0
        self._end: tuple[int, str, str] | None = None

    def apply(self, number: int, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if self._end is not None:
            return
        self._last_record = number
        if self._is_short:
            self._short_s += event.at - self._goodput.at
        self._hear(number, event)
        for effect in effects:
            if isinstance(effect, f.RefuseContribution) and effect.contribution.island in self._islands:
                self._islands[effect.contribution.island].refused(number, event.at, effect.reason)
            elif isinstance(effect, f.MergeFragment):
                self._merges.ordered[effect.fragment, effect.version] = event.at
            elif isinstance(effect, f.FinishJob):
                self._end = (number, effect.outcome.value, effect.reason)
        for change in self._failures.apply(number, event, effects):
            self._changed(number, change)
        self._goodput.apply(event, effects)
        self._last_work.apply(event, effects)
        was_short, self._is_short = self._is_short, self._lacks_quorum()
        if self._is_short and not was_short:
            self._shortages.append(number)

    # ── taking in ─────────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, number: int, event: e.Event) -> None:
        if isinstance(event, e.MergeCompleted):
            if self._merged_at is not None:
                self._intervals.add(event.at - self._merged_at)
            self._merged_at = event.at
            self._merges.completed(event)
            if self._merges.seconds.last is not None:
                self._longest = sorted([*self._longest, (self._merges.seconds.last[0], number)])[-RECORDS_SHOWN:]
        elif isinstance(event, e.MergeFailed):
            self._merges.ordered.pop((event.fragment, event.version), None)
        elif isinstance(event, (e.SynchroniserRestarted, FragmentRestored)):
            self._merges.ordered.clear()  # merges under way are lost with the process, or given up
        elif isinstance(event, JobSalvaged):
            for one in event.islands:
                self._islands[one.island].counted = one.incarnation, one.steps_total, one.stepping_seconds
        elif isinstance(event, (e.ContributionArrived, e.ContributionUnusable)):
            own = self._islands.get(event.contribution.island)
            if own is not None and self._pulls.had_bytes(event):
                own.arrived.append((event.at, number))
                when = next((at for step, at in own.reached if step >= event.contribution.step), event.at)
                own.pulls.add(max(0.0, event.at - when))
        elif isinstance(event, (e.IslandReported, e.FaultInjected, e.ConnectionLost, e.ConnectionRestored)):
            if (own := self._islands.get(event.island)) is None:
                return
            if isinstance(event, e.IslandReported):
                adopted = (event.report.fragment, event.report.version) if isinstance(event.report, Adopted) else None
                own.reported(number, event, self._merges.completed_at.get(adopted) if adopted else None)
            elif isinstance(event, (e.ConnectionLost, e.ConnectionRestored)):
                own.connected(event)
            elif event.kind == FaultKind.STOP.value:
                own.stops.append(number)

    def _changed(self, number: int, change: Change) -> None:
        own = self._islands[change.island]
        own.states.setdefault(change.after, deque(maxlen=RECORDS_SHOWN)).append(number)
        if change.after == IslandState.STARTING.value and not own.first_start:
            own.first_start = number
        if change.after == IslandState.PLACING.value:
            own.reached.clear()

    # ── judging ───────────────────────────────────────────────────────────────────────────────────────────────

    def diagnosis(self) -> Diagnosis:
        """Return the diagnosis as of the last record."""
        look = self._look()
        costs = self._costs(look)
        findings = [self._finding(look, *name, spent) for name, spent in costs.items() if spent > 0.0]
        findings.sort(key=lambda one: (-one.island_seconds, one.cause.name, one.subject))
        ending = self._ending(findings, look)
        dear = [one for one in findings if one.share >= SHARE_MIN]
        leading = ending or next(iter(dear), None)
        if leading is not None and leading.cause is Cause.STARTING and self._end is None:  # its share falls by itself
            leading = next((one for one in dear if one.cause not in USUAL), leading)
        return Diagnosis(
            outcome=self._end[1] if self._end else None,
            reason=self._end[2] if self._end else "",
            goodput_ratio=look.summary["goodput_ratio"],
            cause=leading,
            others=tuple(one for one in findings if leading is None or _name(one) != _name(leading)),
            islands=tuple(look.figures.values()),
            node_failures=failure_counts(self._failures.all, self._goodput.at),
        )

    def _look(self) -> _Look:
        summary = self._goodput.summary()
        figures = {one.island: one for one in self._figures(summary)}
        steps = [one.step_s for one in figures.values() if one.step_s]
        interval_s = self._goodput.policy.sync_interval_steps * median(steps) if steps else 0.0
        long_merges, busy_s = self._merges.long(LONG_MERGE_RATIO * interval_s, self._goodput.at)
        span_s = self._goodput.at - self._goodput.started_at
        return _Look(
            summary,
            figures,
            culprits={
                i: culprit(self._failures, i, self._groups[i], self._goodput.at, stood_still=bool(own.stops))
                for i, own in self._islands.items()
            },
            total=summary["island_seconds"]["total"],
            span_s=span_s,
            interval_s=interval_s,
            long_merges=long_merges if busy_s >= SHARE_MIN * self._policy.fragment_count * span_s else (),
        )

    def _figures(self, summary: Figures) -> tuple[IslandFigures, ...]:
        placed = {i: self._islands[i] for i, nodes in self._failures.nodes().items() if nodes}
        steps = {i: _stepping(summary["islands"][i]) / own.step_count for i, own in placed.items() if own.step_count}
        waits = {i: _waiting_ratio(summary["islands"][i]) for i in placed}
        step_z, waiting_z = distances(steps), distances(waits, WAITING_SPREAD_MIN)
        pulls, pull_z = _travelled({i: own.pulls for i, own in placed.items()}, {}, PULL_SPREAD_MIN_S)
        longest_s = max(DELIVERY_SPREAD_MIN_S, *steps.values(), 0.0)
        deliveries, delivery_z = _travelled({i: own.deliveries for i, own in placed.items()}, steps, longest_s)
        failures = Counter(one.island for one in self._failures.all)
        return tuple(
            IslandFigures(
                *(i, self._failures.node_of(i), steps.get(i), step_z.get(i), pulls.get(i), pull_z.get(i)),
                *(deliveries.get(i), delivery_z.get(i), waits[i], waiting_z.get(i), failures[i]),
            )
            for i in placed
        )

    def _costs(self, look: _Look) -> dict[tuple[Cause, str], Duration]:
        costs: dict[tuple[Cause, str], list[Duration]] = {}
        thin = [one for one in look.figures.values() if _stands_out(one.line_z)]
        thinnest = max(thin, key=lambda one: one.line_z or 0.0, default=None)
        unmerged = self._unmerged(look)
        for island, own in look.summary["islands"].items():
            for label, spent in own["badput_seconds"].items():
                key = self._key(island, label, look)
                if label in _OF_THE_END and self._short_s >= SHARE_MIN * look.span_s:
                    key = Cause.NO_QUORUM, ""
                elif label == UNFINISHED and island in unmerged:
                    key = unmerged[island][0]
                elif label in _OF_THE_END and thinnest is not None:  # islands wait for the work that travels longest
                    key = Cause.THIN_LINE, thinnest.island
                elif look.long_merges and (label in _OF_THE_END or key[0] is Cause.LATE_WORK):
                    key = Cause.SLOW_MERGES, ""
                elif label == NOT_STEPPING and key[0] is not Cause.HUNG_STEP:
                    facts = self._islands[island]
                    silent = own["badput_seconds"].get(SILENT, 0.0)
                    hung = min(spent, max(0.0, facts.frozen_s - silent))
                    held = min(spent - hung, facts.held_s)
                    costs.setdefault((Cause.HUNG_STEP, island), []).append(hung)
                    costs.setdefault((Cause.CHECKPOINTS, ""), []).append(held)
                    spent -= hung + held
                costs.setdefault(key, []).append(spent)
        for island, spent in self._lost_to_slowness(look).items():
            costs.setdefault((Cause.STRAGGLER, island), []).append(spent)
        for key, spent in unmerged.values():
            costs.setdefault(key, []).append(spent)
        result = {key: fsum(spent) for key, spent in costs.items()}
        for key, spent in self._last_waits(result):
            moved = min(spent, result[Cause.ENDING, ""])
            result[Cause.ENDING, ""] -= moved
            result[key] = result.get(key, 0.0) + moved
        return result

    def _last_waits(self, costs: Mapping[tuple[Cause, str], Duration]) -> list[tuple[tuple[Cause, str], Duration]]:
        """Return what islands waited for when they had offered all their work, beside the end itself: another island's
        last steps, if something is known to be wrong with it, its last bytes, or the last merges.
        """
        if (Cause.ENDING, "") not in costs:
            return []
        (last, stepping_s), (slowest, travel_s), merging_s = self._last_work.waits()
        wrong = {key: spent for key, spent in costs.items() if key[1] == last and key[0] in _HOLDING_UP}
        reason = max(wrong, key=lambda key: wrong[key], default=(Cause.ENDING, ""))
        waits = (reason, stepping_s), ((Cause.THIN_LINE, slowest), travel_s), ((Cause.SLOW_MERGES, ""), merging_s)
        span_s = self._goodput.at - self._goodput.started_at
        least_s = len(self._last_work.offered) * max(LAST_WAIT_MIN_S, SHARE_MIN * span_s)
        return [(key, spent) for key, spent in waits if spent >= least_s and key[0] is not Cause.ENDING]

    def _unmerged(self, look: _Look) -> dict[IslandId, tuple[tuple[Cause, str], Duration]]:
        """Return why much of the work of these islands is in no merge, and for how long more of it is open than usual.

        If merges are slow, that is why. Else an island must have more of it than the others, and since that work began a
        slow line, or half as many versions that reached it, or contributions that arrived, as the others. Or most of its
        contributions since then were refused as late: it keeps that work, and offers it again.
        """
        islands = {i: own for i, own in look.summary["islands"].items() if i in look.figures and _stepping(own) > 0.0}
        opened = {i: own["seconds"]["in_flight"] for i, own in islands.items()}
        unmerged = {i: look.unmerged_s(i) for i in islands}
        much = {i for i, spent in unmerged.items() if spent > UNMERGED_INTERVALS_MIN * look.interval_s > 0.0}
        if look.long_merges:
            return {i: ((Cause.SLOW_MERGES, ""), max(0.0, opened[i] - look.interval_s)) for i in much}
        usual, result = median([0.0, *opened.values()]), {}
        for island, z in distances(unmerged, look.interval_s).items():
            if island not in much:
                continue
            if self._is_refused(look, island):
                result[island] = (Cause.LATE_WORK, ""), max(0.0, opened[island] - look.interval_s)
            if not _stands_out(z):
                continue
            thin = _stands_out(look.figures[island].line_z) or self._few(look, island, "adopted")
            if thin or self._few(look, island, "arrived"):
                key = Cause.THIN_LINE if thin else Cause.NOT_ARRIVING, island
                result[island] = key, max(0.0, opened[island] - usual)
        return result

    def _since(self, look: _Look, island: str, what: str) -> tuple[int, float]:
        """Return how many payloads of this kind came since the island's unmerged work began, and of the others' median."""
        since = self._goodput.at - look.unmerged_s(island)
        counts = {i: sum(at > since for at, _ in getattr(self._islands[IslandId(i)], what)) for i in look.figures}
        return counts[IslandId(island)], median([count for other, count in counts.items() if other != island])

    def _is_refused(self, look: _Look, island: IslandId) -> bool:
        """Return whether most contributions since the island's unmerged work began were refused as late."""
        own, since = self._islands[island], self._goodput.at - look.unmerged_s(island)
        arrived, late = (sum(at > since for at, _ in times) for times in (own.arrived, own.late))
        return 2 * late > arrived and late >= UNMERGED_INTERVALS_MIN

    def _few(self, look: _Look, island: str, what: str) -> bool:
        own, others = self._since(look, island, what)
        return 2 * own < others

    def _key(self, island: IslandId, label: str, look: _Look) -> tuple[Cause, str]:
        own, seen = look.figures.get(island), self._islands[island]
        if label in _UNUSABLE:
            return Cause.UNUSABLE_WORK, island
        if label.startswith("recovering: ") or label in (AWAY, LOST_WITH_ISLAND):
            without = Cause.ENDING if label == LOST_WITH_ISLAND else Cause.DEPARTURES
            return look.culprits[island] or (without, "")
        if label.startswith("starting: "):
            return Cause.STARTING, ""
        if label in _NOT_IN_TIME and own is not None and _stands_out(own.line_z):
            return Cause.THIN_LINE, island
        if label == SILENT:
            return Cause.HUNG_STEP if seen.stops else Cause.LINK, island
        if label == NOT_STEPPING:
            if seen.overdue or (seen.stops and not seen.frozen_s):
                return Cause.HUNG_STEP, island
            if own is None or not _stands_out(own.waiting_z):
                return Cause.WAITING, ""
            waited_s = look.summary["islands"][island]["badput_seconds"][NOT_STEPPING]
            return (Cause.HELD_UP if waited_s < 2.0 * seen.gaps_s else Cause.THIN_LINE), island  # its reports come late
        late = label in _LATE or label.startswith("refused: ")
        cause = Cause.LATE_WORK if late else _PLAIN_CAUSES.get(label, Cause.OTHER)
        return cause, self._groups[island] if cause in (Cause.NO_NODE, Cause.CORDONED) else ""

    def _lost_to_slowness(self, look: _Look) -> dict[IslandId, float]:
        """Return what each straggler's stepping lacks of the others' tokens a second and accelerator, in seconds."""
        accelerators = {plan.island: plan.accelerator_count for plan in self._policy.islands}
        stepping = {i: spent for i, own in look.summary["islands"].items() if (spent := _stepping(own)) > 0.0}
        trained = {i: own["tokens"]["trained"] for i, own in look.summary["islands"].items()}
        rates = {i: trained[i] / (spent * accelerators[i]) for i, spent in stepping.items()}
        lost = {}
        for island, own in look.figures.items():
            others = [rate for other, rate in rates.items() if other != island]
            if not others or island not in rates or not _stands_out(own.step_z):
                continue
            usual = median(others)
            if rates[island] * RATIO_MIN < usual:
                lost[island] = stepping[island] * (1.0 - rates[island] / usual)
        return lost

    def _ending(self, findings: Iterable[Finding], look: _Look) -> Finding | None:
        """Return the cause of a job that failed, or that merges no more."""
        if self._end is not None:
            record, outcome, reason = self._end
            if outcome != JobOutcome.FAILED.value:
                return None
            cause, subject, records = self._killer(reason, look.culprits)
            records = (*(n for n in records if n != record), record)[-RECORDS_SHOWN:]
            return Finding(cause, subject, look.total, 1.0, f"the job failed: {reason}", cause.remedy, records)
        if self._merged_at is None or not self._intervals.count:
            return None
        since = self._goodput.at - self._merged_at
        if since < max(STALL_MIN_S, STALL_INTERVALS * median(self._intervals.all())):
            return None
        training = self._failures.lifecycle.training_count
        quorum = self._policy.quorum_of(training)
        if training < quorum:
            placed = (island for island, nodes in self._failures.nodes().items() if nodes)
            away = [i for i in placed if self._state(i) != IslandState.TRAINING.value]
            text = f"no merge for {seconds(since)}: {training} of {quorum} islands train, without {some_of(away, 8)}"
            records = tuple(sorted(own.states[self._state(i)][-1] for i, own in self._islands.items() if i in away))
            cause = Cause.NO_QUORUM
        elif any(ordered_at <= self._merged_at for ordered_at in self._merges.ordered.values()):
            text = f"no merge for {seconds(since)}: {counted(len(self._merges.ordered), 'merge')} ordered and not done"
            cause, records = Cause.SLOW_MERGES, (self._last_record,)
        else:
            text = f"no merge for {seconds(since)}, though {training} islands train and the quorum is {quorum}"
            cause, records = Cause.STALL, (self._last_record,)
        worst = max(findings, key=lambda one: one.island_seconds, default=None)
        spent = worst.island_seconds if worst is not None else 0.0
        if cause is Cause.NO_QUORUM and worst is not None and worst.island_seconds > 0.0:
            text = f"{text}; most time is lost by {worst.cause}{f': {worst.subject}' if worst.subject else ''}"
        return Finding(
            cause, "", spent, spent / look.total if look.total else 0.0, text, cause.remedy, records[-RECORDS_SHOWN:]
        )

    def _lacks_quorum(self) -> bool:
        training = self._failures.lifecycle.training_count
        is_under_way = self._merged_at is not None and not self._last_work.is_due
        return is_under_way and training < self._goodput.policy.quorum_of(training)

    def _state(self, island: IslandId) -> str:
        return self._failures.lifecycle.lives[island].state

    def _killer(self, reason: str, culprits: Culprits) -> tuple[Cause, str, tuple[int, ...]]:
        if "nothing was ever merged" in reason:
            return Cause.NO_QUORUM, "", ()
        of_code = tuple(one.record for one in self._failures.all if one.origin is Origin.CODE)
        if of_code and (shared_error(self._failures) is not None or self._failures.all[-1].origin is Origin.CODE):
            return Cause.CODE, "", of_code
        blamed = Counter(culprit for one in self._failures.all if (culprit := culprits[one.island]))
        if not blamed:
            return Cause.OTHER, "", ()
        (cause, subject), _ = blamed.most_common(1)[0]
        return cause, subject, tuple(one.record for one in self._failures.all)

    def _finding(self, look: _Look, cause: Cause, subject: str, spent: Duration) -> Finding:
        statement, records = self._evidence(look, cause, subject)
        share = spent / look.total if look.total else 0.0
        text = f"{statement}: {seconds(spent)} of island time, {percent(share)} of all"
        return Finding(cause, subject, spent, share, text, cause.remedy, tuple(sorted(set(records)))[-RECORDS_SHOWN:])

    def _evidence(self, look: _Look, cause: Cause, subject: str) -> tuple[str, tuple[int, ...]]:
        """Return a statement with the figures that show the cause, and the numbers of the records."""
        own = self._islands.get(IslandId(subject))
        blamed = [one for one in self._failures.all if look.culprits[one.island] == (cause, subject)]
        if cause is Cause.BAD_NODE:
            blamed = [one for one in blamed if one.node == subject]
        records = tuple((cause is Cause.ON_PURPOSE and one.kill) or one.record for one in blamed)
        if blamed and (words := evidence(self._failures, blamed, cause, subject)):
            return words, records
        match cause:
            case Cause.NO_NODE | Cause.CORDONED:
                state = IslandState.WAITING.value if cause is Cause.NO_NODE else IslandState.CORDONED.value
                return f"islands wait because of node group {subject}", (*self._entered(state), *records)
            case Cause.LINK if own is not None:
                return f"{subject} was silent", (*own.states.get(IslandState.SUSPECT.value, ()), *records)
            case Cause.NO_QUORUM:
                return f"fewer islands trained than the quorum for {seconds(self._short_s)}", tuple(self._shortages)
            case Cause.SLOW_MERGES if self._longest:
                merges = look.long_merges or [(self._longest[-1][0], 0.0)]
                took, written = (median(values) for values in zip(*merges, strict=True))
                of_journal = f", {seconds(written)} of it in the journal" if written else ""
                text = f"merges take {seconds(took)}{of_journal}, where {seconds(look.interval_s)} are H steps"
                return text, tuple(number for _, number in self._longest)
            case Cause.NOT_ARRIVING if own is not None:
                last = tuple(number for _, number in own.arrived)[-1:]
                return self._came(look, subject, "arrived", "contribution", "from"), (*last, own.progress)
            case Cause.STRAGGLER if own is not None:
                mean, usual = look.beside(subject, "step_s")
                slowest = tuple(number for _, number in own.slowest)
                return f"{subject} takes {mean} a step where the others take {usual}", slowest
            case Cause.THIN_LINE if own is not None:
                figures = look.figures[IslandId(subject)]
                if _stands_out(figures.pull_z):
                    median_s, usual = look.beside(subject, "pull_s")
                    return f"contributions of {subject} travel {median_s}, those of others {usual}", own.late_records()
                if _stands_out(figures.delivery_z):
                    median_s, usual = look.beside(subject, "delivery_s")
                    return f"versions reach {subject} after {median_s}, others after {usual}", own.late_records()
                if self._few(look, subject, "adopted"):
                    last = tuple(number for _, number in own.adopted)[-1:]
                    return self._came(look, subject, "adopted", "version", "to"), (*last, *own.late_records())
                if self._last_work.waits()[1][0] == subject:
                    return f"the last contributions of {subject} came late", tuple(n for _, n in own.arrived)
                return f"reports of {subject} come late", (own.progress,)
            case Cause.HUNG_STEP if own is not None:
                silent = own.states.get(IslandState.SUSPECT.value, ()) if own.stops else ()
                at_most = own.frozen_longest_s
                longest = f", for {seconds(at_most)} at the longest" if at_most else " for long at a time"
                return f"{subject} stood still{longest}", (*silent, *own.overdue, *own.stops, *records)
            case Cause.HELD_UP if own is not None:
                part, usual = look.beside(subject, "waiting_ratio")
                return f"{subject} does not step in {part} of its time, the others in {usual}", ()
            case Cause.UNUSABLE_WORK if own is not None:
                kinds = [f"{own.refusals[x]:,} {x.replace('_', ' ')}" for x in UNUSABLE_REASONS if own.refusals[x]]
                of_kind = f" ({', '.join(kinds)})" if kinds else ""
                return f"contributions of {subject} were refused as unusable{of_kind}", (*own.unusable, *records)
            case Cause.LATE_WORK:
                late = {i: sum(x.refusals[reason] for reason in LATE_REASONS) for i, x in self._islands.items()}
                most = max(late, key=lambda i: late[i])
                of_most = f", {late[most]:,} of {fsum(late.values()):,.0f} refusals of {most}" if late[most] else ""
                return f"work came too late to be merged{of_most}", tuple(
                    n for x in self._islands.values() for n in x.late_records()
                )
            case Cause.STARTING:
                first = tuple(own.first_start for own in self._islands.values() if own.first_start)
                parts = Counter[str]()
                for label, took in look.summary["badput_seconds"].items():
                    if label.startswith("starting: "):
                        parts[label.removeprefix("starting: ")] += took
                return f"islands were started for the first time, which was mostly {parts.most_common(1)[0][0]}", first
            case _:
                return cause.value, ()

    def _came(self, look: _Look, island: str, what: str, noun: str, way: str) -> str:
        count, others = self._since(look, island, what)
        since = f"in the {seconds(look.unmerged_s(island))} of its unmerged work"
        return f"{counted(count, noun)} came {way} {island} {since}, {way} others {others:g}"

    def _entered(self, state: str) -> tuple[int, ...]:
        return tuple(n for own in self._islands.values() for n in own.states.get(state, ()))


def _name(finding: Finding) -> tuple[Cause, str]:
    return finding.cause, finding.subject


def _travelled(
    travels: Mapping[IslandId, Travels], less: Mapping[IslandId, Duration], spread_min: Duration
) -> tuple[dict[IslandId, Duration], dict[IslandId, float]]:
    """Return how long payloads of each island travel, and its distance: of the newest ones if that is greater.

    The times are medians, less so many seconds.
    """
    reached = {i: own for i, own in travels.items() if own.newest}
    times = {i: max(0.0, median(own.all.all()) - less.get(i, 0.0)) for i, own in reached.items()}
    latest = {i: max(0.0, median(own.newest) - less.get(i, 0.0)) for i, own in reached.items()}
    z, latest_z = distances(times, spread_min), distances(latest, spread_min)
    late = {i for i in z if _stands_out(latest_z[i]) and latest_z[i] > z[i]}
    return {**times, **{i: latest[i] for i in late}}, {**z, **{i: latest_z[i] for i in late}}


def _stands_out(z: float | None) -> bool:
    return z is not None and z >= Z_MIN


def _stepping(own: Figures) -> Duration:
    return fsum(own["seconds"][name] for name in ("productive", "discarded", "in_flight"))


def _waiting_ratio(own: Figures) -> float:
    idle = own["badput_seconds"].get(NOT_STEPPING, 0.0)
    whole = idle + _stepping(own)
    return idle / whole if whole > 0.0 else 0.0
