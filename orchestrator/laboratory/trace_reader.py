"""The reader of a training trace: it puts each incarnation's part of a tape into its own order and checks it.

A tape is in the order in which the synchroniser heard of things. An island's own order follows from what its letters say:
tokens trained so far, and versions. In that order its counters are worked out anew, and must be those of its letters:
a tape whose islands adopted by another rule, or that misses something, is found out before anything is trained.

Responsible for: what ``trace`` says, without arrays. Decides nothing of a job: contributors, weights, adoptions, donors
are the tape's. Source: arXiv:2604.21428, "event tapes".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from orchestrator.core import effects, events, messages
from orchestrator.core.vocabulary import FragmentId, JobPolicy, PayloadId, Version
from orchestrator.errors import Problem
from orchestrator.laboratory.incarnation_history import IncarnationHistory, IncarnationRecords, Receiver, history_of
from orchestrator.laboratory.training_trace import Act, Evaluated, IncarnationTrace, LifeId, Merged, TrainingTrace
from orchestrator.replica.work import AdoptionRule
from orchestrator.tape.schema import Tape


@dataclass(frozen=True, slots=True)
class Reading:
    """The trace as far as it could be read, and everything that keeps it from being trained."""

    trace: TrainingTrace
    problems: tuple[Problem, ...]


def read(tape: Tape, rule: AdoptionRule) -> Reading:
    """The training trace of the tape's job, whose islands adopt by ``rule``."""
    policy = tape.header.policy
    assert isinstance(policy, JobPolicy), "matching refuses the tapes of fleets"
    contents = _TapeContents(tape)
    tokens_per_step = contents.tokens_per_step()
    histories = dict(_histories(contents, rule, tokens_per_step))
    shards = {plan.island: index for index, plan in enumerate(policy.islands)}
    lives = {life: _life(life, contents.records[life], history, shards[life[0]]) for life, history in histories.items()}
    trace = TrainingTrace(
        policy=policy,
        lives=lives,
        acts=tuple(contents.acts),
        tokens_per_step=tokens_per_step,
        tokens_trained=contents.tokens_trained,
        steps_trained=sum(records.steps_trained for records in contents.records.values()),
        inferred_count=sum(history.inferred_count for history in histories.values()),
        ended=contents.ended,
    )
    problems = [*_unreadable_states(contents, histories), *_problems(trace, list(histories.values()), rule)]
    return Reading(trace, tuple(problems))


def _life(life: LifeId, records: IncarnationRecords, history: IncarnationHistory, shard: int) -> IncarnationTrace:
    assert records.begun is not None
    caught_up, catch_up = records.begun
    return IncarnationTrace(
        life, shard, catch_up.donor, catch_up.cursor, caught_up.versions, caught_up.step, records.fix, history.moments
    )


def _histories(
    contents: _TapeContents, rule: AdoptionRule, tokens_per_step: int
) -> Iterator[tuple[LifeId, IncarnationHistory]]:
    """The histories of all lives that some merge needs: those that contributed, and those they took their state from."""
    receivers: dict[LifeId, list[Receiver]] = {}
    payloads = {item.payload for act in contents.merges() for item in act.inputs}
    wanted = sorted({contents.author[payload] for payload in payloads if payload in contents.author})
    needed = set(wanted)
    while wanted:
        life = wanted.pop()
        records = contents.records[life]
        if records.begun is None or (donor := records.begun[1].donor) is None:
            continue
        receivers.setdefault(donor, []).append(Receiver(life, records.begun[0].versions, records.begun[0].step))
        if donor not in needed:
            needed.add(donor)
            wanted.append(donor)
    merged = {(act.fragment, act.version) for act in contents.merges()}
    for life in sorted(needed):
        records = contents.records.get(life) or IncarnationRecords()
        if records.begun is not None:
            yield (
                life,
                history_of(life, records, rule, tokens_per_step, sorted(receivers.get(life, [])), payloads, merged),
            )


def _unreadable_states(contents: _TapeContents, histories: Iterable[LifeId]) -> Iterator[Problem]:
    """States that no trace holds: a standby's is of two times, one in pieces of as many as there were pieces."""
    begun = [
        (f"{life[0]}.{life[1]}", records) for life in histories if (records := contents.records[life].begun) is not None
    ]
    if taken := sorted(name for name, (_, catch_up) in begun if catch_up.held):
        message = f"tells of islands that went on as the processes of standbys ({', '.join(taken)})."
        yield Problem("tape", message, "Take the tape of a job without standbys, or on which none was needed.")
    if dealt := sorted(name for name, (began, _) in begun if began.sources):
        message = f"tells of islands that took their states in pieces ({', '.join(dealt)})."
        yield Problem("tape", message, "Take the tape of a job with recovery.donors_max 1 and no donor_bytes_per_s.")


def _problems(trace: TrainingTrace, histories: list[IncarnationHistory], rule: AdoptionRule) -> Iterator[Problem]:
    if not trace.merges:
        yield Problem("tape", "no fragment was ever merged on it.", "Take the tape of a job that ran for longer.")
        return
    lives = trace.lives
    inputs = [item.payload for act in trace.merges for item in act.inputs]
    offered = {getattr(moment, "payload", None) for life in lives.values() for moment in life.moments}
    if lost := [payload for payload in inputs if payload not in offered]:
        message = f"{len(lost)} merged contributions, {lost[0]} first, come from islands that it does not tell of."
        yield Problem("tape", message, "Take a whole tape: one that begins with its job.")
    kept_work, could_keep_work = (
        any(getattr(history, name) for history in histories) for name in ("kept_work", "could_keep_work")
    )
    if rule == "replace" and kept_work:
        message = "is replace, but on the tape islands kept work of their own when they adopted."
        yield Problem("synchroniser.adoption", message, "Set it to rebase, or to what the tape's job had.")
        return
    if rule == "rebase" and could_keep_work and not kept_work:
        message = "is rebase, but on the tape no island ever kept work of its own when it adopted."
        yield Problem("synchroniser.adoption", message, "Set it to replace, or to what the tape's job had.")
        return
    if contradictions := [line for history in histories for line in history.contradictions]:
        more = f" ({len(contradictions) - 1} more)" if len(contradictions) > 1 else ""
        remedy = "Was its job of another adoption rule, or recorded by another build? `atoll replay` may know."
        yield Problem("tape", f"contradicts itself: {contradictions[0]}{more}.", remedy)


class _TapeContents:
    """Everything on a tape that matters here, by incarnation."""

    def __init__(self, tape: Tape) -> None:
        self.records: dict[LifeId, IncarnationRecords] = {}
        self.author: dict[PayloadId, LifeId] = {}
        self.acts: list[Act] = []
        self.ended = False
        self._merging: dict[tuple[FragmentId, Version], effects.MergeFragment] = {}
        self._totals: dict[LifeId, int] = {}
        for record in tape.records:
            self._hear(record.event)
            for effect in record.effects:
                self._read(effect)

    @property
    def tokens_trained(self) -> int:
        return sum(self._totals.values())

    def merges(self) -> Iterator[Merged]:
        return (act for act in self.acts if isinstance(act, Merged))

    def tokens_per_step(self) -> int:
        """Tokens of the fastest steps: those of an island with all its capacity."""
        rates = [rate for records in self.records.values() for rate in records.rates()]
        return max(1, round(max(rates, default=1.0)))

    def _hear(self, event: object) -> None:
        match event:
            case events.ContributionArrived(_, c) | events.ContributionUnusable(_, c):
                life = (c.island, c.incarnation)
                self.author.setdefault(c.payload, life)
                self._records_of(life).contributions.setdefault(c.payload, c)
                self._trained(life, c.tokens_total)
            case events.IslandReported():
                self._reported((event.island, event.incarnation), event.report)
            case events.MergeCompleted():
                if (order := self._merging.pop((event.fragment, event.version), None)) is not None:
                    merged = (event.fragment, event.version, order.inputs, event.digest, order.outer_lr_ratio)
                    self.acts.append(Merged(*merged))

    def _reported(self, life: LifeId, report: messages.CarriedReport) -> None:
        match report:
            case messages.Adopted():
                self._records_of(life).adoptions.setdefault((report.fragment, report.version), report)
                self._trained(life, report.tokens_total)
            case messages.Progress():
                self._records_of(life).reports.setdefault(report.tokens_total, report)
                self._trained(life, report.tokens_total)
            case messages.CaughtUp():
                records = self._records_of(life)
                if records.begun is None and records.catch_up is not None:
                    records.begun = (report, records.catch_up)

    def _read(self, effect: object) -> None:
        match effect:
            case effects.BeginCatchUp():
                self._records_of((effect.island, effect.incarnation)).catch_up = effect
            case effects.StartTraining():
                records = self._records_of((effect.island, effect.incarnation))
                records.started = records.started or effect
            case effects.PublishFragment():
                for to in effect.recipients:
                    published = self._records_of((to.island, to.incarnation)).published
                    published[effect.fragment, effect.version] = to.merged_offer
            case effects.MergeFragment():
                self._merging[effect.fragment, effect.version] = effect
            case effects.FlushIsland():
                self.ended = True
            case effects.Evaluate():
                self.acts.append(Evaluated(self.tokens_trained))

    def _records_of(self, life: LifeId) -> IncarnationRecords:
        return self.records.setdefault(life, IncarnationRecords())

    def _trained(self, life: LifeId, tokens_total: int) -> None:
        self._totals[life] = max(tokens_total, self._totals.get(life, 0))
