"""The decision of a job that lost its synchroniser's machine with its disk: which version of each fragment of Θ goes on.

    islands answer ──▶ choose ──▶ pull each chosen version, compare digests ──┬─▶ JobSalvaged, on a new tape
                          ▲                                                   │
                          └── without the island whose bytes were others ◀────┘

Every island keeps the newest version of each fragment that reached it, with the facts that came with it (``HeldVersion``).
The newest *confirmed* version of each fragment is taken. A version is confirmed by digests, which islands compute from the
bytes that they hold at that moment:

    damaged     the digest is not the one that the synchroniser announced with the version. The copy does not count
    agreed      at least two islands have the same digest, and more than have any other digest of that version
    alone       one island has it. It counts if the synchroniser announced the same digest to that island
    disputed    as many islands have one digest as another. Nothing tells which is right, so the version does not count

If the newest version is not confirmed, the one before it is looked at, and so on. An island *survives*, with its unmerged
work, if all that it holds is in the history of what was chosen. The others are placed again, as lost islands are: those
with a damaged copy or a digest that the majority contradicts, and those that hold or built on a version that did not count.

Digests protect against damage: of memory, of a line, of a program. They do not protect against a malicious island that
computes with the announced digest's bytes withheld; such an island cannot give bytes of that digest, so it is found at the
pull, and the next holder or version is asked for.

An island that has drained, or that has given its last work, still vouches for the versions that it holds, and gives them. It
takes no more steps, so it is placed again.

Contributions are not lost with a version: an island offers its work again until a version that it adopts contains it. To
tell which work a chosen version contains, islands keep with each version the offers in it, of all islands (``merged``).
Only the latest incarnation of an island takes part (``latest``): the synchroniser may have merged offers of an earlier one
without telling anyone, because it had given that process up.

Pure; the shell is ``runtime.salvaging``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.core import island_record
from orchestrator.core.commands import ChangedSettings
from orchestrator.core.effects import Effect, FlushIsland, StartTraining
from orchestrator.core.fragment_life import publish_newer
from orchestrator.core.fragment_round import FragmentRound
from orchestrator.core.island_record import Island
from orchestrator.core.messages import HeldVersion, IslandHoldings
from orchestrator.core.saving import JobSalvaged, LostVersion, SurvivingIsland
from orchestrator.core.state import JobState
from orchestrator.core.vocabulary import (
    AllOffers,
    Epoch,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    JobPhase,
    Life,
    MergedOffer,
    Version,
    offer_number,
    offer_of_number,
)


@dataclass(frozen=True, slots=True)
class ChosenVersion:
    """The version of a fragment that goes on, and the islands that have its bytes, in the order in which to ask them."""

    fragment: FragmentId
    version: Version
    digest: str
    step: int
    holders: tuple[IslandId, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """``chosen`` has no entry for a fragment of which no version is confirmed: then Θ cannot be taken from the islands.

    ``doubted`` says of islands why they do not survive. ``lost`` are the versions that somebody heard of and that are gone.
    """

    chosen: tuple[ChosenVersion, ...]
    doubted: Mapping[IslandId, str]
    lost: tuple[LostVersion, ...]


def latest(
    answers: Sequence[IslandHoldings], last_incarnations: Mapping[IslandId, Incarnation]
) -> tuple[IslandHoldings, ...]:
    """Return the answers that count: those of an island's latest incarnation. Others are of processes that were given up."""
    return tuple(answer for answer in answers if answer.incarnation >= last_incarnations.get(answer.island, 0))


def next_epoch(epochs: Iterable[Epoch]) -> Epoch:
    """Return the epoch in which the job continues: later than every epoch that an island has heard of."""
    return Epoch(max(epochs) + 1)


def last_incarnations(lives: Iterable[Life]) -> dict[IslandId, Incarnation]:
    """Return the highest incarnation of each island."""
    highest: dict[IslandId, Incarnation] = {}
    for island, incarnation in lives:
        highest[island] = max(incarnation, highest.get(island, incarnation))
    return dict(sorted(highest.items()))


def choose(
    answers: Sequence[IslandHoldings], fragment_count: int, gave_other_bytes: Mapping[IslandId, str] | None = None
) -> Choice:
    """Decide which version of each fragment goes on. The order of ``answers`` has no effect.

    ``gave_other_bytes`` are islands, with the reason, whose bytes had another digest than they said: nothing of them counts.
    """
    doubted: dict[IslandId, str] = dict(gave_other_bytes or {})
    islands = sorted((a for a in answers if a.island not in doubted), key=lambda answer: answer.island)
    chosen: list[ChosenVersion] = []
    lost: list[LostVersion] = []
    for p in map(FragmentId, range(fragment_count)):
        claims = [(a.island, held) for a in islands for held in a.held if held.fragment == p]
        for island, held in claims:
            if held.announced is not None and held.digest != held.announced.digest:
                doubted.setdefault(island, f"its copy of version {held.version} of fragment {p} is damaged")
        sound = [(i, h) for i, h in claims if h.announced is None or h.digest == h.announced.digest]
        best, passed_over = _confirmed(p, sound)
        versions = [h.version for a in answers for h in a.held if h.fragment == p]
        versions += [x.version for a in answers for x in a.expected if x.fragment == p]
        lost += _lost(p, best, versions, passed_over)
        if best is None:
            continue
        chosen.append(best)
        for a in islands:
            if why := _contradicts(a, best):
                doubted.setdefault(a.island, why)
    return Choice(tuple(chosen), dict(sorted(doubted.items())), tuple(lost))


def settled(
    answers: Sequence[IslandHoldings],
    fragment_count: int,
    pull: Callable[[ChosenVersion, IslandId], str],
) -> Choice:
    """Choose, pull what is chosen, and choose again until every island that still counts gave the bytes that it said.

    ``pull`` gets a version from an island and returns why that failed; empty if it did not.
    """
    gave_other_bytes: dict[IslandId, str] = {}
    pulled: set[tuple[FragmentId, Version, str]] = set()
    while True:
        choice = choose(answers, fragment_count, gave_other_bytes)
        failed_before = len(gave_other_bytes)
        for one in choice.chosen:
            key = (one.fragment, one.version, one.digest)
            if key in pulled:
                continue
            for island in one.holders:
                if island in gave_other_bytes:
                    continue
                if not (why := pull(one, island)):
                    pulled.add(key)
                    break
                gave_other_bytes[island] = why
        if len(gave_other_bytes) == failed_before:
            return choice


def _confirmed(
    p: FragmentId, sound: Sequence[tuple[IslandId, HeldVersion]]
) -> tuple[ChosenVersion | None, dict[Version, str]]:
    """Return the newest confirmed version, and why newer ones do not count."""
    passed_over: dict[Version, str] = {}
    for version in sorted({held.version for _, held in sound}, reverse=True):
        those = [(island, held) for island, held in sound if held.version == version]
        ranked = Counter(held.digest for _, held in those).most_common()
        digest, count = min(ranked, key=lambda one: (-one[1], one[0]))
        if len(ranked) > 1 and sorted((n for _, n in ranked), reverse=True)[1] == count:
            passed_over[version] = f"{' and '.join(sorted(island for island, _ in those))} hold different bytes of it"
            continue
        holders = [(island, held) for island, held in those if held.digest == digest]
        announcements = [held.announced for _, held in holders if held.announced is not None]
        if count == 1 and not announcements:
            passed_over[version] = f"only {holders[0][0]} holds it, and was not told its digest"
            continue
        step = max((announced.step for announced in announcements), default=0)
        # those that heard it from the synchroniser first: a copy from a peer may have been damaged before it came
        order = sorted(holders, key=lambda one: (one[1].announced is None, one[0]))
        return ChosenVersion(p, version, digest, step, tuple(island for island, _ in order)), passed_over
    return None, passed_over


def _lost(
    p: FragmentId, best: ChosenVersion | None, versions: Collection[Version], passed_over: Mapping[Version, str]
) -> list[LostVersion]:
    newer = sorted({version for version in versions if best is None or version > best.version})
    return [LostVersion(p, version, passed_over.get(version, "no island has sound bytes of it")) for version in newer]


def _contradicts(answer: IslandHoldings, best: ChosenVersion) -> str:
    """Return why the island cannot go on from Θ with the chosen version; empty if it can."""
    p, version = best.fragment, best.version
    for held in answer.held:
        if held.fragment == p and held.version == version and held.digest != best.digest:
            return f"its copy of version {version} of fragment {p} is not the one that most islands hold"
        if held.fragment == p and held.version > version:
            return f"it holds version {held.version} of fragment {p}, which is lost"
    if answer.versions[p] > version:
        return f"it trained on version {answer.versions[p]} of fragment {p}, which is lost"
    return ""


def tokens_trained(answers: Sequence[IslandHoldings]) -> int:
    """Return how much the job had trained at least: what an island heard of it, or what those that answer trained."""
    return max(sum(answer.tokens_total for answer in answers), *(answer.job_tokens for answer in answers), 0)


def changed_settings(answers: Iterable[IslandHoldings], of_checkpoint: ChangedSettings) -> ChangedSettings:
    """Return the newest settings that an island was given, or that the newest checkpoint has."""
    candidates = (of_checkpoint, *(answer.changed for answer in answers))
    return max(candidates, key=lambda changed: (changed.epoch, changed.count))


def survivors(answers: Sequence[IslandHoldings], choice: Choice) -> tuple[SurvivingIsland, ...]:
    """Return the islands that go on with their own work, and what of their offers is in the chosen versions."""
    sound = [answer for answer in sorted(answers, key=lambda a: a.island) if answer.island not in choice.doubted]
    going_on = [answer for answer in sound if answer.trains]
    merged = {chosen.fragment: _merged_in(chosen, answers) for chosen in choice.chosen}
    surviving = []
    for answer in going_on:
        offers = []
        for chosen in choice.chosen:
            p = chosen.fragment
            own: MergedOffer = 0
            if answer.versions[p] < chosen.version:
                offers_in_it = merged[p]
                own = AllOffers() if offers_in_it is None else offer_of_number(offers_in_it.get(answer.life, 0))
            offers.append(offer_number(own))
        surviving.append(
            SurvivingIsland(
                answer.island,
                answer.incarnation,
                answer.versions,
                answer.step,
                answer.steps_total,
                answer.tokens_total,
                answer.stepping_seconds,
                answer.kept_tokens,
                tuple(offers),
            )
        )
    return tuple(surviving)


def _merged_in(chosen: ChosenVersion, answers: Sequence[IslandHoldings]) -> dict[Life, int] | None:
    """Return the latest offers in the chosen version by incarnation; None if no island was told them.

    A later announcement of the same version lacks incarnations that were lost meanwhile, so all of them count together.
    """
    announcements = [
        held.announced
        for answer in answers
        if answer.island in chosen.holders
        for held in answer.held
        if (held.fragment, held.version) == (chosen.fragment, chosen.version) and held.announced is not None
    ]
    merged: dict[Life, int] = {}
    for work in (work for announced in announcements for work in announced.merged):
        life = (work.island, work.incarnation)
        merged[life] = max(work.merged_offer, merged.get(life, 0))
    return merged if announcements else None


# ── what the core makes of it ─────────────────────────────────────────────────────────────────────────────────────


def salvaged(state: JobState, event: JobSalvaged) -> list[Effect]:
    """Go on where Θ stands. Islands that survived are placed as the incarnation that they are, and so found again.

    Repeated, by a synchroniser that died at once, it changes nothing.
    """
    if state.tokens_before is not None:
        return []
    state.epoch = event.epoch
    state.tokens_before = max(0, event.tokens_trained - sum(one.tokens_total for one in event.islands))
    for p, (version, step) in enumerate(zip(event.versions, event.steps, strict=True)):
        state.rounds[p] = FragmentRound(FragmentId(p), version, step)
    for name, incarnation in event.last_incarnations:
        if name in state.islands:
            state.islands[name] = replace(state.islands[name], incarnations_lost=incarnation)
    for one in event.islands:
        island = state.islands[one.island]
        before = Incarnation(one.incarnation - 1)
        state.islands[one.island] = replace(island, incarnations_lost=before, step=one.step, survivor=one)
    state.checkpoints = replace(state.checkpoints, count=event.checkpoints_before, begun_at=state.global_version)
    return []


def found(state: JobState, island: Island, now: Instant) -> list[Effect]:
    """The process of an island that survived was found: it trains, on what it holds, and gets what is newer."""
    survivor = island.survivor
    assert survivor is not None
    present = [current.version for current in state.rounds]
    state.islands[island.id] = island_record.going_on(island, survivor, present)
    newer = publish_newer(state, state.islands[island.id], survivor.versions, now)
    start = StartTraining(island.id, island.incarnation, state.anchor)
    flush = [FlushIsland(island.id, island.incarnation)] if state.phase is not JobPhase.RUNNING else []
    return [start, *newer, *flush]
