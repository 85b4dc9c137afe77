"""The token ledger: every trained token in one place, per island and fragment, in exact integers.

    trained + carried = merged + discarded + local + held          always

``carried``  brought from the checkpoint that the job goes on from: work that is in no version yet
``local``   trained on the island's present lineage of the fragment, in no contribution that we hold
``held``    in an admitted contribution, not merged yet; *detached* once the island has gone on without that work
            (adopted another value, or died): if such a payload is released unmerged, its tokens are lost
``merged``  in a version of the fragment
``discarded``  never will be, by cause

A token counts once in every fragment; figures for people are means over fragments (``goodput``). Refuses to know: time.
Source: ours (docs/concepts.md); "report goodput in merged tokens" is the lesson of others' headline figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Adopted, CaughtUp, LeftState
from orchestrator.core.saving import (
    BeginCheckpoint,
    DropCheckpoint,
    FragmentRestored,
    FromJournal,
    JobResumed,
    JobSalvaged,
)
from orchestrator.core.vocabulary import (
    Contribution,
    FragmentId,
    Incarnation,
    IslandId,
    PayloadId,
    ReleaseReason,
    Version,
)

LOST_WITH_ISLAND = "lost with the island"
QUARANTINED = "quarantined"
OVERWRITTEN = "overwritten"
SUPERSEDED = "released unmerged"
UNFINISHED = "unmerged when the job ended"
ROLLED_BACK = "rolled back"
NOT_TAKEN_UP = "not taken up from the checkpoint"


def refused(reason: str) -> str:
    return f"refused: {reason.replace('_', ' ')}"


@dataclass(frozen=True, slots=True)
class TokenTotals:
    """Token totals stored in a checkpoint: overall, per incarnation, and merged per fragment (closed merges only)."""

    trained: int
    totals: dict[tuple[str, int], int]
    merged: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CarriedOver:
    """The job before its checkpoint, by fragment: ``trained`` = merged + discarded + kept, by the islands that go on."""

    trained: int
    merged: tuple[int, ...]
    discarded: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(slots=True)
class Held:
    """``reclaimed`` of the tokens had been given up as discarded before their contribution turned up after all."""

    tokens: int
    reclaimed: int
    base_version: Version
    detached: bool


@dataclass(slots=True)
class Account:
    """The tokens of one island in one fragment. ``version`` is what the island adopted last, by its reports.

    ``unclaimed`` of ``carried`` are local provisionally: the island has not taken its state from the checkpoint yet.
    """

    version: Version = Version(0)
    local: int = 0
    carried: int = 0
    unclaimed: int = 0
    merged: int = 0
    held: dict[PayloadId, Held] = field(default_factory=dict)
    discards: dict[str, int] = field(default_factory=dict)
    refusal: tuple[str, int] | None = None

    @property
    def discarded(self) -> int:
        return sum(self.discards.values())

    @property
    def in_flight(self) -> int:
        return self.local + sum(held.tokens for held in self.held.values())

    def discard(self, tokens: int, cause: str) -> None:
        if tokens:
            self.discards[cause] = self.discards.get(cause, 0) + tokens

    def overwrite(self, tokens: int) -> None:
        """Discard local tokens at an adoption: first those of a refused offer, with its reason."""
        if self.refusal is not None:
            cause, offered = self.refusal
            named = min(tokens, offered)
            self.discard(named, cause)
            tokens -= named
            self.refusal = None
        self.discard(tokens, OVERWRITTEN)

    def reclaim(self, tokens: int) -> int:
        """Take back up to ``tokens`` from what was discarded; returns how many."""
        left = tokens
        for cause in sorted(self.discards):
            taken = min(left, self.discards[cause])
            self.discards[cause] -= taken
            left -= taken
        return tokens - left


class Ledger:
    """Accounts of all islands and fragments; ``carried`` is what a resumed job begins with."""

    accounts: dict[IslandId, list[Account]]
    trained: dict[IslandId, int]
    carried: CarriedOver | None
    _merged_at: dict[int, dict[IslandId, list[int]]]
    _fragment_count: int
    _totals: dict[tuple[IslandId, Incarnation], int]
    _taken_back: set[tuple[IslandId, Incarnation]]
    _merging: dict[tuple[FragmentId, Version], list[tuple[IslandId, PayloadId]]]
    _latest: dict[FragmentId, list[tuple[IslandId, int]]]

    def __init__(self, islands: tuple[IslandId, ...], fragment_count: int) -> None:
        self.accounts = {island: [Account() for _ in range(fragment_count)] for island in islands}
        self.trained = dict.fromkeys(islands, 0)
        self.carried = None
        self._merged_at = {}
        self._fragment_count = fragment_count
        self._totals = {}
        self._taken_back = set()
        self._merging = {}
        self._latest = {}

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────────

    def trained_up_to(self, island: IslandId, incarnation: Incarnation, tokens_total: int, counts: bool) -> None:
        """An incarnation has reported how much it has trained. ``counts`` is false for one that was replaced or lost."""
        fresh = tokens_total - self._totals.get((island, incarnation), 0)
        if fresh <= 0 or island not in self.accounts:
            return
        self._totals[island, incarnation] = tokens_total
        self.trained[island] += fresh
        for account in self.accounts[island]:
            if counts:
                account.local += fresh
            else:
                account.discard(fresh, LOST_WITH_ISLAND)

    def resumed(self, event: JobResumed) -> None:
        """Islands that go on bring their open work; what else was in no version is lost. Repeated, it changes nothing."""
        if self.carried is not None:
            return
        for saved in event.islands:
            for account, tokens in zip(self.accounts[saved.island], saved.kept_tokens, strict=True):
                account.carried = account.local = account.unclaimed = tokens
        open_work = tuple(sum(saved.kept_tokens[p] for saved in event.islands) for p in range(self._fragment_count))
        merged, trained = event.merged_tokens, event.tokens_trained
        discarded = tuple(trained - m - k for m, k in zip(merged, open_work, strict=True))
        self.carried = CarriedOver(trained, merged, discarded, open_work)

    def salvaged(self, event: JobSalvaged) -> None:
        """Islands that survived bring their open work. Nothing tells how much of the rest was merged, and how much was lost
        before: it counts as merged. Repeated, the event changes nothing.
        """
        if self.carried is not None:
            return
        for one in event.islands:
            self._totals[one.island, one.incarnation] = one.tokens_total
            for account, version, tokens in zip(self.accounts[one.island], one.versions, one.kept_tokens, strict=True):
                account.version, account.carried, account.local = version, tokens, tokens
        kept = tuple(sum(one.kept_tokens[p] for one in event.islands) for p in range(self._fragment_count))
        merged = tuple(event.tokens_trained - tokens for tokens in kept)
        self.carried = CarriedOver(event.tokens_trained, merged, (0,) * self._fragment_count, kept)

    def caught_up(self, island: IslandId, report: CaughtUp) -> None:
        for account, version in zip(self.accounts[island], report.versions, strict=True):
            account.version, account.refusal = version, None
            if report.donor != island:  # it began otherwise than from the checkpoint
                account.discard(account.unclaimed, NOT_TAKEN_UP)
                account.local -= account.unclaimed
            account.unclaimed = 0
        if report.left is not None:
            self._continued(island, report.left)

    def _continued(self, island: IslandId, left: LeftState) -> None:
        """Take back the work that the island keeps of an incarnation whose work was lost. Repeated, it changes nothing."""
        if (island, left.incarnation) in self._taken_back:
            return
        self._taken_back.add((island, left.incarnation))
        self.trained_up_to(island, left.incarnation, left.tokens_total, counts=False)
        for account, tokens in zip(self.accounts[island], left.kept_tokens, strict=True):
            account.local += account.reclaim(tokens)

    def adopted(self, island: IslandId, incarnation: Incarnation, report: Adopted) -> None:
        """The island's own work on the fragment is overwritten, but for what it kept.

        A late or repeated event changes nothing: what was trained after the adoption stays.
        """
        account = self.accounts[island][report.fragment]
        if report.version <= account.version:
            return
        account.version = report.version
        newer = sum(held.tokens for held in account.held.values() if held.base_version >= report.version)
        after = max(0, self._totals.get((island, incarnation), 0) - report.tokens_total - newer)
        before = account.local - min(account.local, after)
        local_kept = min(before, report.kept_tokens)
        account.overwrite(before - local_kept)
        account.local -= before - local_kept
        held_kept = (
            report.kept_tokens - local_kept
        )  # an adoption that keeps one's own work also keeps what is held of it
        for held in account.held.values():
            if held.base_version < report.version and not held.detached:
                held.detached = held.tokens > held_kept
                held_kept -= 0 if held.detached else held.tokens

    def lost(self, island: IslandId, cause: str = LOST_WITH_ISLAND) -> None:
        """Discard the island's local tokens. Those it has contributed may still merge, but cannot become local again."""
        for account in self.accounts[island]:
            account.discard(account.local, cause)
            account.local, account.unclaimed, account.refusal = 0, 0, None
            for held in account.held.values():
                held.detached = True

    def merge_completed(self, event: e.MergeCompleted) -> None:
        merging = self._merging.pop((event.fragment, event.version), None)
        if merging is not None:
            self._latest[event.fragment] = []
        for island, payload in merging or ():
            account = self.accounts[island][event.fragment]
            held = account.held.pop(payload, None)
            if held is not None:
                account.merged += held.tokens
                self._latest[event.fragment].append((island, held.tokens))

    def restored(self, event: FragmentRestored) -> None:
        """Undo the fragment's merges since the checkpoint, or its last merge, if the journal lost that."""
        if isinstance(event.checkpoint, FromJournal):
            for island, tokens in self._latest.pop(event.fragment, ()):
                self.accounts[island][event.fragment].merged -= tokens
                self.accounts[island][event.fragment].discard(tokens, ROLLED_BACK)
            return
        at_checkpoint = self._merged_at.get(event.checkpoint)
        for island, accounts in self.accounts.items():
            account = accounts[event.fragment]
            remaining = (
                account.merged if at_checkpoint is None else min(account.merged, at_checkpoint[island][event.fragment])
            )
            account.discard(account.merged - remaining, ROLLED_BACK)
            account.merged = remaining

    # ── effects ───────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, effect: f.Effect) -> None:
        if isinstance(effect, f.AdmitContribution):
            self._admit(effect.contribution)
        elif isinstance(effect, f.RefuseContribution):
            self._refuse(effect)
        elif isinstance(effect, f.ReleasePayload):
            self._release(effect)
        elif isinstance(effect, f.MergeFragment):
            named = [(item.island, item.payload) for item in effect.inputs]
            self._merging[effect.fragment, effect.version] = named
        elif isinstance(effect, BeginCheckpoint):
            self._merged_at[effect.checkpoint] = self._merged()
        elif isinstance(effect, DropCheckpoint):
            self._merged_at.pop(effect.checkpoint, None)
        elif isinstance(effect, f.FinishJob):
            self._finish()

    def _admit(self, c: Contribution) -> None:
        account = self.accounts[c.island][c.fragment]
        missing = max(0, c.token_count - account.local)
        reclaimed = account.reclaim(missing) if missing else 0
        account.local -= c.token_count - reclaimed  # below zero, and caught by ``problems``, if it was never trained
        left_behind = c.base_version < account.version
        account.held[c.payload] = Held(c.token_count, reclaimed, c.base_version, left_behind)
        account.refusal = None

    def _refuse(self, effect: f.RefuseContribution) -> None:
        c = effect.contribution
        accounts = self.accounts.get(c.island)
        if accounts is not None and 0 <= c.fragment < len(accounts) and c.payload not in accounts[c.fragment].held:
            accounts[c.fragment].refusal = (refused(effect.reason), c.token_count)

    def _release(self, effect: f.ReleasePayload) -> None:
        if effect.reason in (ReleaseReason.MERGED, ReleaseReason.REFUSED):
            return  # merged payloads left at MergeCompleted, refused ones were never held
        for inputs in self._merging.values():  # that merge came to nothing, and the same payload may be held again
            inputs[:] = [item for item in inputs if item[1] != effect.payload]
        account, held = self._take(effect.payload)
        if account is None or held is None:
            return
        back = 0 if held.detached else held.tokens - held.reclaimed
        account.local += back
        account.discard(held.tokens - back, SUPERSEDED)

    def _take(self, payload: PayloadId) -> tuple[Account, Held] | tuple[None, None]:
        island, _, fragment, _ = payload.rsplit(".", 3)
        account = self.accounts[IslandId(island)][int(fragment)]
        held = account.held.pop(payload, None)
        return (account, held) if held else (None, None)

    def _finish(self) -> None:
        for accounts in self.accounts.values():
            for account in accounts:
                account.discard(account.in_flight, UNFINISHED)
                account.local = 0
                account.held.clear()

    def token_totals(self) -> TokenTotals:
        """Return the totals so far. Work that is being merged counts as merged."""
        before = self.carried or CarriedOver(0, *[(0,) * self._fragment_count] * 3)
        merged = [sum(counts) for counts in zip(before.merged, *self._merged().values(), strict=True)]
        totals = {(str(island), int(incarnation)): tokens for (island, incarnation), tokens in self._totals.items()}
        return TokenTotals(before.trained + sum(self.trained.values()), totals, tuple(merged))

    def _merged(self) -> dict[IslandId, list[int]]:
        """Return the merged tokens by island and fragment, those being merged included."""
        merged = {island: [account.merged for account in accounts] for island, accounts in self.accounts.items()}
        for (fragment, _), inputs in self._merging.items():
            for island, payload in inputs:
                held = self.accounts[island][fragment].held.get(payload)
                merged[island][fragment] += held.tokens if held is not None else 0
        return merged

    # ── questions ─────────────────────────────────────────────────────────────────────────────────────────────

    def problems(self) -> Iterator[str]:
        """Every account that does not add up."""
        if self.carried is not None and min(self.carried.discarded) < 0:
            yield f"the checkpoint has more than was trained: {self.carried}"
        for island, accounts in self.accounts.items():
            trained_here = self.trained[island]
            for fragment, account in enumerate(accounts):
                trained = trained_here + account.carried
                discarded = account.discarded if account.discards else 0
                held = sum([held.tokens for held in account.held.values()]) if account.held else 0
                parts = (account.merged, discarded, account.local, held)
                if sum(parts) != trained or min(parts) < 0:
                    yield (
                        f"{island}, fragment {fragment}: trained {trained} is not merged {parts[0]} + discarded "
                        f"{parts[1]} + local {parts[2]} + held {parts[3]}"
                    )
