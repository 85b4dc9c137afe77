"""One incarnation's history: what the tape holds of it, put into its own order, with its counters worked out anew.

The order is by tokens trained. At one boundary, adopting a version comes before offers that build on it and after offers
that build on an older one; what concerns different fragments may stand in any order.

What an adoption kept is the tape's to say (``messages.Adopted.kept_tokens``); *since* when it is counted follows from which
offer the publication named as merged, exactly as in ``orchestrator.replica.work``, whose counters these are. An island
that began from a peer has what it was given as its base. On older tapes it knew none, and its first adoption of a fragment
overwrote all; both are read as they are told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.core import messages
from orchestrator.core.effects import BeginCatchUp, StartTraining
from orchestrator.core.messages import CaughtUp, Progress
from orchestrator.core.vocabulary import (
    NO_ANCHOR,
    AllOffers,
    Contribution,
    FragmentId,
    MergedOffer,
    PayloadId,
    ScheduleAnchor,
    Version,
)
from orchestrator.laboratory.training_trace import Adopted, Exported, LifeId, Moment, Offered
from orchestrator.replica.work import AdoptionRule, FragmentWork, Rebase, Trained


@dataclass(slots=True)
class IncarnationRecords:
    """What a tape tells of an incarnation, in the order of the telling; each thing once.

    ``begun`` is how it came to its state, ``catch_up`` the latest order to; ``published[p, v]`` its latest offer of p
    whose work is in v; ``reports`` by tokens trained; ``started`` is how it was first let train.
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
        """Tokens a step, over every stretch between two reports."""
        steps = tokens = 0
        for total, report in sorted(self.reports.items()):
            if report.steps_total > steps:
                yield (total - tokens) / (report.steps_total - steps)
            steps, tokens = report.steps_total, total


@dataclass(frozen=True, slots=True, order=True)
class Receiver:
    """A life that took its state from this one, when this one stood at ``versions`` and ``logical_step``."""

    life: LifeId
    versions: tuple[Version, ...]
    logical_step: int


@dataclass(slots=True)
class IncarnationHistory:
    """``kept_work``: an adoption kept own work; ``could_keep_work``: by rebasing one would have.

    Moments end with the last needed.
    """

    moments: tuple[Moment, ...] = ()
    contradictions: list[str] = field(default_factory=list)
    inferred_count: int = 0
    kept_work: bool = False
    could_keep_work: bool = False


_Entry = Contribution | messages.Adopted | Receiver
_Placed = tuple[int, float, _Entry]
"""Tokens trained by then, place among things of that moment, what it is."""


def history_of(
    life: LifeId,
    records: IncarnationRecords,
    rule: AdoptionRule,
    tokens_per_step: int,
    receivers: Sequence[Receiver],
    wanted: Collection[PayloadId],
    merged: Collection[tuple[FragmentId, Version]],
) -> IncarnationHistory:
    """The life's history up to the last offer in ``wanted`` and the last of ``receivers``."""
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
                    f"{entry.fragment}, but by what it told before it has {has} on version {own.version}"
                )
            own.offered(entry.offer, _trained(own.origin.tokens + entry.token_count), snapshots_max=None)
            payloads[entry.fragment, entry.offer] = entry.payload
            if entry.payload in wanted:
                moments.append(Offered(steps, entry.fragment, entry.payload))
                needed_count = len(moments)
        elif entry.version > work[entry.fragment].version:
            if (entry.fragment, entry.version) not in merged:
                history.contradictions.append(
                    f"{name} adopts version {entry.version} of fragment {entry.fragment}, never merged"
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
    """Put the fragment on its new version, and say what survived. ``published`` is the offer that is merged in it."""
    merged_offer = None if isinstance(published, AllOffers) or published not in own.offers else published
    uncontributed = own.remaining(Rebase(merged_offer), _trained(report.tokens_total)).tokens
    kept_tokens = (
        uncontributed if report.kept_tokens == _UNREPORTED and rule == "rebase" else max(0, report.kept_tokens)
    )
    if rule == "rebase":
        keeps, has_work = kept_tokens == uncontributed, uncontributed > 0
        if kept_tokens not in (0, uncontributed):
            history.contradictions.append(
                f"{name} kept {kept_tokens} of {uncontributed} tokens in no version when it adopted "
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
    """Only tokens are compared; adoptions that no report told of have no count of steps."""
    return Trained(0, tokens)


_UNREPORTED = -1
"""Stands for ``kept_tokens`` where an adoption was inferred."""


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
    """Where in the donor's life the receiver's state is from, with the adoptions that no letter told of.

    The receiver says the donor's versions and logical step. Letters of a donor that died soon after may be lost.
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
    for total, report in sorted(records.reports.items()):  # the latest that tells of the stretch in question
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
