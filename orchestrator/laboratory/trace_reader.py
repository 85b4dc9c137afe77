"""Reads a training trace from a tape: puts the events of each incarnation into its own order and checks them.

A tape is in the order in which the synchroniser received things. The own order of an island follows from its reports: by
tokens trained, and at one boundary an adoption comes before the offers that build on it and after the offers that build on
an older version. Events of different fragments may be in any order. In this order the island's counters are recomputed, and
they must equal those in its reports. A tape whose islands adopted by another rule, or that misses something, is therefore
detected before anything is trained.

The tape says how much an adoption kept (``messages.Adopted.kept_tokens``). *Since* when that work is counted follows from
the offer that the publication named as merged, exactly as in ``orchestrator.replica.work``, whose counters are used here. An
island that took its state from a peer has that state as its base. On older tapes it had none, and its first adoption of a
fragment overwrote everything; both are read as recorded.

The training trace of a job says how far each incarnation trained between its adoptions and offers:

    IncarnationTrace   one incarnation: the origin of its state, then its moments in its own order
      Offered          it made an offer that was merged
      Adopted          it adopted a published version
      Exported         another incarnation took its state from it
    Merged             the outer step of a fragment, with its contributions and weights
    Evaluated          an evaluation of Θ

Only what a merge depends on is kept: steps after an island's last merged offer never reached the model. ``tape_training``
trains by it.

Steps are counted in steps of the training *here*, which stand for as many tokens as the fastest steps on the tape had
(``tokens_per_step``). An island that stepped at less capacity, on fewer tokens, takes fewer steps here, so that tokens stay
comparable.

Nothing is decided here: contributors, weights, adoptions and donors are those of the tape. There are no arrays.
Source: arXiv:2604.21428, "event tapes".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.core import effects, events, messages
from orchestrator.core.effects import BeginCatchUp, StartTraining
from orchestrator.core.messages import CaughtUp, Progress
from orchestrator.core.vocabulary import (
    NO_ANCHOR,
    AllOffers,
    Contribution,
    FragmentId,
    Incarnation,
    IslandId,
    JobPolicy,
    MergedOffer,
    PayloadId,
    ScheduleAnchor,
    Version,
    WeightedPayload,
)
from orchestrator.errors import Problem
from orchestrator.replica.work import AdoptionRule, FragmentWork, Rebase, Trained
from orchestrator.tape.schema import Tape

_UNREPORTED = -1
"""The ``kept_tokens`` of an inferred adoption."""
LifeId = tuple[IslandId, Incarnation]


@dataclass(frozen=True, slots=True)
class Offered:
    """The fragment was copied as ``payload`` after ``steps`` inner steps of this incarnation."""

    steps: int
    fragment: FragmentId
    payload: PayloadId


@dataclass(frozen=True, slots=True)
class Adopted:
    """The incarnation adopted ``version`` after ``steps`` inner steps. Its logical step is then at least ``logical_step``.

    ``fix`` is the latest schedule anchor that it had received, in tokens of the tape. ``has_work`` says whether it had own
    work, and ``keeps`` whether all of that survived. ``since`` is its own offer that the version contains, if any.
    """

    steps: int
    fragment: FragmentId
    version: Version
    logical_step: int
    fix: ScheduleAnchor
    keeps: bool = False
    has_work: bool = False
    since: PayloadId | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """The whole state went to ``receiver`` after ``steps`` inner steps."""

    steps: int
    receiver: LifeId


Moment = Offered | Adopted | Exported


@dataclass(frozen=True, slots=True)
class IncarnationTrace:
    """One incarnation. Without a donor it began from Θ at ``versions`` with a fresh inner optimizer.

    ``shard`` is the index of its island, and ``cursor`` the number of batches of that shard drawn before it.
    ``logical_step`` and ``fix`` are its step and the job's schedule anchor at the start.
    """

    id: LifeId
    shard: int
    donor: LifeId | None
    cursor: int
    versions: tuple[Version, ...]
    logical_step: int
    fix: ScheduleAnchor
    moments: tuple[Moment, ...]

    @property
    def step_count(self) -> int:
        return self.moments[-1].steps if self.moments else 0


@dataclass(frozen=True, slots=True)
class Merged:
    """A merge. ``digest`` is the recorded digest of the fragment's parameters (made up on a simulated tape).

    ``outer_lr_ratio`` is the outer learning rate relative to the specification's.
    """

    fragment: FragmentId
    version: Version
    inputs: tuple[WeightedPayload, ...]
    digest: str
    outer_lr_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation of Θ after ``tokens``, in tokens of the tape."""

    tokens: int


Act = Merged | Evaluated


@dataclass(frozen=True, slots=True)
class TrainingTrace:
    """A whole job. ``acts`` are in their order, and ``lives`` are the incarnations that an act needs.

    ``tokens_trained`` and ``steps_trained`` count all reported training as the tape counts it, including lost work.
    ``inferred_count`` adoptions were not reported but follow from the state that a receiver got. ``ended`` says that the
    budget was reached and the islands were flushed.
    """

    policy: JobPolicy
    lives: dict[LifeId, IncarnationTrace]
    acts: tuple[Act, ...]
    tokens_per_step: int
    tokens_trained: int
    steps_trained: int
    inferred_count: int
    ended: bool

    @property
    def step_count(self) -> int:
        """The number of inner steps to train."""
        return sum(life.step_count for life in self.lives.values())

    def horizon_steps(self, tokens: int) -> int:
        """Convert tokens of the tape to inner steps of each island."""
        return max(1, tokens // (len(self.policy.islands) * self.tokens_per_step))

    @property
    def merges(self) -> tuple[Merged, ...]:
        return tuple(act for act in self.acts if isinstance(act, Merged))


@dataclass(frozen=True, slots=True)
class Reading:
    """A trace, and all problems that prevent its training."""

    trace: TrainingTrace
    problems: tuple[Problem, ...]


@dataclass(slots=True)
class IncarnationRecords:
    """The events of one incarnation, each once, in the order of the tape.

    ``reports`` are by tokens trained. ``published[p, v]`` is its latest offer of p whose work is in v. ``catch_up`` is the
    latest order to get a state, ``begun`` how it got it, and ``started`` the first order to train.
    """

    reports: dict[int, Progress] = field(default_factory=dict)
    contributions: dict[PayloadId, Contribution] = field(default_factory=dict)
    adoptions: dict[tuple[FragmentId, Version], messages.Adopted] = field(default_factory=dict)
    published: dict[tuple[FragmentId, Version], MergedOffer] = field(default_factory=dict)
    catch_up: BeginCatchUp | None = None
    begun: tuple[CaughtUp, BeginCatchUp] | None = None
    started: StartTraining | None = None

    @property
    def fix(self) -> ScheduleAnchor:
        return self.started.fix if self.started is not None else NO_ANCHOR

    @property
    def steps_trained(self) -> int:
        return max((report.steps_total for report in self.reports.values()), default=0)

    def rates(self) -> Iterator[float]:
        """Yield the tokens per step between every two reports."""
        steps = tokens = 0
        for total, report in sorted(self.reports.items()):
            if report.steps_total > steps:
                yield (total - tokens) / (report.steps_total - steps)
            steps, tokens = report.steps_total, total


@dataclass(frozen=True, slots=True, order=True)
class Receiver:
    """An incarnation that took its state from this one, at ``versions`` and ``logical_step``."""

    life: LifeId
    versions: tuple[Version, ...]
    logical_step: int


@dataclass(slots=True)
class IncarnationHistory:
    """The history of one incarnation, up to the last moment that is needed.

    ``kept_work``: an adoption kept own work. ``could_keep_work``: an adoption by rebasing would have kept some.
    """

    moments: tuple[Moment, ...] = ()
    contradictions: list[str] = field(default_factory=list)
    inferred_count: int = 0
    kept_work: bool = False
    could_keep_work: bool = False


_Entry = Contribution | messages.Adopted | Receiver
_Placed = tuple[int, float, _Entry]
"""(Tokens trained until then, order at that moment, the event)."""


def read(tape: Tape, rule: AdoptionRule) -> Reading:
    """Read the training trace of a tape whose islands adopt by ``rule``."""
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
    """Yield the histories of all incarnations that a merge needs: contributors, and those that gave them their state."""
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
    """Yield problems for states that no trace can hold: a standby's, and those taken in pieces, are of several instants."""
    begun = [
        (f"{life[0]}.{life[1]}", records) for life in histories if (records := contents.records[life].begun) is not None
    ]
    if taken := sorted(name for name, (_, catch_up) in begun if catch_up.held):
        message = f"has islands that continued in the process of a standby ({', '.join(taken)})."
        yield Problem("tape", message, "Use the tape of a job without standbys, or one that needed none.")
    if left := sorted(name for name, (began, _) in begun if began.left is not None):
        message = f"has islands that continued from a file of their machine ({', '.join(left)})."
        yield Problem("tape", message, "Use the tape of a job whose head stayed on its machine.")
    if dealt := sorted(name for name, (began, _) in begun if began.sources):
        message = f"has islands that took their states in pieces ({', '.join(dealt)})."
        yield Problem("tape", message, "Use the tape of a job with recovery.donors_max 1 and no donor_bytes_per_s.")


def _problems(trace: TrainingTrace, histories: list[IncarnationHistory], rule: AdoptionRule) -> Iterator[Problem]:
    if not trace.merges:
        yield Problem("tape", "has no merge.", "Use the tape of a job that ran for longer.")
        return
    lives = trace.lives
    inputs = [item.payload for act in trace.merges for item in act.inputs]
    offered = {getattr(moment, "payload", None) for life in lives.values() for moment in life.moments}
    if lost := [payload for payload in inputs if payload not in offered]:
        message = f"has {len(lost)} merged contributions of unknown islands, {lost[0]} first."
        yield Problem("tape", message, "Use a whole tape, which begins with its job.")
    kept_work, could_keep_work = (
        any(getattr(history, name) for history in histories) for name in ("kept_work", "could_keep_work")
    )
    if rule == "replace" and kept_work:
        message = "is replace, but the islands on the tape kept own work when they adopted versions."
        yield Problem("synchroniser.adoption", message, "Set it to rebase, or to the value of the tape's job.")
        return
    if rule == "rebase" and could_keep_work and not kept_work:
        message = "is rebase, but no island on the tape kept own work when it adopted versions."
        yield Problem("synchroniser.adoption", message, "Set it to replace, or to the value of the tape's job.")
        return
    if contradictions := [line for history in histories for line in history.contradictions]:
        more = f" ({len(contradictions) - 1} more)" if len(contradictions) > 1 else ""
        remedy = "Its job may have had another adoption rule, or run with another build. Check with `atoll replay`."
        yield Problem("tape", f"contradicts itself: {contradictions[0]}{more}.", remedy)


class _TapeContents:
    """The relevant contents of a tape, by incarnation."""

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
        """Return the tokens of the fastest steps: those of an island at full capacity."""
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


# ── the history of one incarnation ────────────────────────────────────────────────────────────────────────────────────


def history_of(
    life: LifeId,
    records: IncarnationRecords,
    rule: AdoptionRule,
    tokens_per_step: int,
    receivers: Sequence[Receiver],
    wanted: Collection[PayloadId],
    merged: Collection[tuple[FragmentId, Version]],
) -> IncarnationHistory:
    """Return the history of an incarnation up to the last offer in ``wanted`` and the last of ``receivers``."""
    assert records.begun is not None
    caught_up, _ = records.begun
    history = IncarnationHistory()
    work = [FragmentWork(version) for version in caught_up.versions]
    payloads: dict[tuple[FragmentId, int], PayloadId] = {}
    name, moments = f"{life[0]} (incarnation {life[1]})", list[Moment]()
    needed_count = 0
    for tokens, _, entry in _in_order(life, records, receivers, tokens_per_step, history):
        steps = tokens // tokens_per_step
        if isinstance(entry, Receiver):
            moments.append(Exported(steps, entry.life))
            needed_count = len(moments)
        elif isinstance(entry, Contribution):
            own = work[entry.fragment]
            has = own.since_origin(_trained(tokens)).tokens
            if entry.base_version != own.version or entry.token_count != has:
                history.contradictions.append(
                    f"{name} offers {entry.token_count} tokens on version {entry.base_version} of fragment "
                    f"{entry.fragment}, but by its earlier reports it has {has} on version {own.version}"
                )
            own.offered(entry.offer, _trained(own.origin.tokens + entry.token_count), snapshots_max=None)
            payloads[entry.fragment, entry.offer] = entry.payload
            if entry.payload in wanted:
                moments.append(Offered(steps, entry.fragment, entry.payload))
                needed_count = len(moments)
        elif entry.version > work[entry.fragment].version:
            if (entry.fragment, entry.version) not in merged:
                history.contradictions.append(
                    f"{name} adopts version {entry.version} of fragment {entry.fragment}, which was never merged"
                )
            published = records.published.get((entry.fragment, entry.version), 0)
            moments.append(_adopt(name, entry, work[entry.fragment], published, payloads, rule, steps, history))
    history.moments = tuple(moments[:needed_count])
    return history


def _adopt(
    name: str,
    report: messages.Adopted,
    own: FragmentWork,
    published: MergedOffer,
    payloads: Mapping[tuple[FragmentId, int], PayloadId],
    rule: AdoptionRule,
    steps: int,
    history: IncarnationHistory,
) -> Adopted:
    """Put the fragment on its new version and return what survived. ``published`` is the offer merged in that version."""
    merged_offer = None if isinstance(published, AllOffers) or published not in own.offers else published
    uncontributed = own.remaining(Rebase(merged_offer), _trained(report.tokens_total)).tokens
    kept_tokens = (
        uncontributed if report.kept_tokens == _UNREPORTED and rule == "rebase" else max(0, report.kept_tokens)
    )
    if rule == "rebase":
        keeps, has_work = kept_tokens == uncontributed, uncontributed > 0
        if kept_tokens not in (0, uncontributed):
            history.contradictions.append(
                f"{name} kept {kept_tokens} of {uncontributed} unmerged tokens when it adopted "
                f"version {report.version} of fragment {report.fragment}"
            )
        history.could_keep_work |= uncontributed > 0
    else:
        keeps = has_work = rule == "mix" and bool(own.offers)
    history.kept_work |= kept_tokens > 0
    own.adopt(report.version, _trained(kept_tokens), _trained(report.tokens_total), own.latest_offer)
    since = None if merged_offer is None else payloads[report.fragment, merged_offer]
    return Adopted(steps, report.fragment, report.version, report.step, report.fix, keeps, has_work, since)


def _trained(tokens: int) -> Trained:
    """Return a count of tokens alone: inferred adoptions have no count of steps."""
    return Trained(0, tokens)


def _in_order(
    life: LifeId,
    records: IncarnationRecords,
    receivers: Sequence[Receiver],
    tokens_per_step: int,
    history: IncarnationHistory,
) -> list[_Placed]:
    entries: list[Contribution | messages.Adopted] = [*records.contributions.values(), *records.adoptions.values()]
    entries.sort(key=_own_order)
    placed: list[_Placed] = [(entry.tokens_total, float(place), entry) for place, entry in enumerate(entries)]
    for receiver in receivers:
        placed += _export(life, records, entries, receiver, tokens_per_step, history)
    return sorted(placed, key=lambda item: item[:2])


def _own_order(entry: Contribution | messages.Adopted) -> tuple[int, int, int, int]:
    if isinstance(entry, Contribution):
        return entry.tokens_total, entry.base_version, 1, entry.fragment
    return entry.tokens_total, entry.version, 0, entry.fragment


def _export(
    life: LifeId,
    records: IncarnationRecords,
    entries: Sequence[Contribution | messages.Adopted],
    receiver: Receiver,
    tokens_per_step: int,
    history: IncarnationHistory,
) -> Iterator[_Placed]:
    """Yield the point in the donor's history at which the receiver took its state, and the adoptions inferred from it.

    The receiver reports the donor's versions and logical step. The donor's own reports may be lost if it died soon after.
    """
    assert records.begun is not None
    caught_up = records.begun[0]
    versions = list(caught_up.versions)
    logical_step, tokens, place, before = caught_up.step, 0, len(entries), None
    for index, entry in enumerate(entries):
        if not isinstance(entry, messages.Adopted):
            continue
        if entry.version > receiver.versions[entry.fragment]:
            place, before = index, entry.tokens_total
            break
        versions[entry.fragment] = max(versions[entry.fragment], entry.version)
        logical_step, tokens = entry.step, entry.tokens_total
    for total, report in sorted(records.reports.items()):  # the latest report of that stretch
        if tokens < total and report.step <= receiver.logical_step and (before is None or total <= before):
            logical_step, tokens = report.step, total
    tokens += max(0, receiver.logical_step - logical_step) * tokens_per_step
    tokens = tokens if before is None else min(tokens, before)
    for fragment, (version, wanted) in enumerate(zip(versions, receiver.versions, strict=True)):
        if version < wanted:
            history.inferred_count += 1
            yield (
                tokens,
                place - 0.6,
                messages.Adopted(FragmentId(fragment), wanted, receiver.logical_step, tokens, _UNREPORTED),
            )
    yield tokens, place - 0.5, receiver
