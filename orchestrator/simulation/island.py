"""One simulated island process: the learners' protocol without the mathematics.

It steps, counts what it trained on each fragment, offers a fragment when its due point passes (``core.schedule``), adopts
from a mailbox at step boundaries, and says all this in letters (``core.messages``), as ``learners.loop`` does. It knows no
clock and no chance: the world tells it when a step ends and how long it took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from orchestrator.accounting.series import median
from orchestrator.core.messages import ALL_OFFERS, Adopted, Drained, Flushed, Letter, Offer, Progress
from orchestrator.core.schedule import due
from orchestrator.core.vocabulary import NO_FIX, Duration, Fix, FragmentId, Incarnation, IslandId, JobPolicy, Version


@dataclass(slots=True)
class Work:
    """What the island did on one fragment since it adopted ``version``, and the (steps, tokens) of each offer since."""

    version: Version = Version(0)
    steps: int = 0
    tokens: int = 0
    offer: int = 0
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    latest: Offer | None = None

    @property
    def unsent_tokens(self) -> int:
        return self.tokens - (self.sent[self.offer][1] if self.sent else 0)


class SimulatedIsland:
    """The process of one incarnation. ``diverged``: its parameters are no numbers; ``exploded``: far from everybody's."""

    def __init__(
        self,
        island: IslandId,
        incarnation: Incarnation,
        policy: JobPolicy,
        tokens_per_step: int,
        adoption: str,
        *,
        median_over: int = 1,
    ) -> None:
        self.island = island
        self.incarnation = incarnation
        self.stepping = False
        self.flushing = False
        self.draining = self.drained = False
        self.diverged = self.exploded = False
        self.step = 0
        self.steps_total = 0
        self.tokens_total = 0
        self.work = [Work() for _ in range(policy.fragment_count)]
        self._policy = policy
        self.tokens_per_step = tokens_per_step
        self._adoption = adoption
        self._mailbox: dict[FragmentId, tuple[Version, int, int, Fix]] = {}
        self._fix = NO_FIX
        self._asked: list[Callable[[], None]] = []
        self._stepping_seconds: Duration = 0.0
        self._latest_seconds: deque[Duration] = deque(maxlen=median_over)
        self._gap_max: Duration = 0.0

    @property
    def versions(self) -> tuple[Version, ...]:
        return tuple(work.version for work in self.work)

    def load(self, versions: tuple[Version, ...], step: int) -> None:
        """Take over a state: its versions and logical clock."""
        self.step = step
        for work, version in zip(self.work, versions, strict=True):
            work.version = version

    def take_over(self) -> None:
        """Take over what was published since a state was loaded; nothing was trained on it, and nobody is told."""
        for _ in self._adopt():
            pass

    def deliver(self, fragment: FragmentId, version: Version, step: int, merged_offer: int, fix: Fix = NO_FIX) -> None:
        """Put a published version into the mailbox; the newest wins."""
        kept = self._mailbox.get(fragment)
        if kept is None or version > kept[0]:
            self._mailbox[fragment] = (version, step, merged_offer, fix)

    def at_boundary(self, what: Callable[[], None]) -> None:
        """``what`` happens at the next boundary, before anything is adopted there."""
        self._asked.append(what)

    def end_step(self, seconds: Duration, gap: Duration) -> list[Letter]:
        """A step ended: adopt what came, offer what is due. Progress is told before anything that depends on it."""
        previous = self.step
        self.step += 1
        self.steps_total += 1
        self.tokens_total += self.tokens_per_step
        self._stepping_seconds += seconds
        self._latest_seconds.append(seconds)
        self._gap_max = max(self._gap_max, gap)
        for work in self.work:
            work.steps += 1
            work.tokens += self.tokens_per_step
        if self.flushing:
            return self.flush()
        if self.draining:
            return self.hand_over()
        letters = list(self._adopt())
        letters += [self._offer(p) for p in self._due(previous) if self.work[p].unsent_tokens > 0]
        return [self.progress(), *letters] if letters else []

    def flush(self) -> list[Letter]:
        """Step no more, and offer what is left."""
        return [*self._give(), Flushed()]

    def hand_over(self) -> list[Letter]:
        """Step no more, and offer what is left; when versions hold all work, say so and be done with it."""
        self.draining = True
        letters = self._give()
        if all(work.tokens == 0 for work in self.work):
            self.draining, self.drained = False, True
            letters.append(Drained())
        return letters

    def _give(self) -> list[Letter]:
        self.stepping = False
        letters = [self.progress(), *self._adopt()]
        return letters + [self._offer(FragmentId(p)) for p, work in enumerate(self.work) if work.unsent_tokens > 0]

    def progress(self) -> Progress:
        gap, self._gap_max = self._gap_max, 0.0
        return Progress(
            step=self.step,
            steps_total=self.steps_total,
            tokens_total=self.tokens_total,
            stepping_seconds=self._stepping_seconds,
            step_seconds_median=median(self._latest_seconds) if self._latest_seconds else 0.0,
            gap_max_seconds=gap,
            loss=1.5 + 4.0 / (1.0 + self.step / 60.0),
        )

    def holds(self, offer: Offer) -> bool:
        """Whether the bytes of this offer can still be pulled: a newer offer of the fragment replaces it."""
        return self.work[offer.fragment].offer == offer.offer

    def standing_offers(self) -> list[Offer]:
        """The latest offer of each fragment, but for those that an adopted version contains as far as is known here."""
        return [work.latest for work in self.work if work.latest is not None and work.offer in work.sent]

    def _due(self, previous: int) -> tuple[FragmentId, ...]:
        return due(previous, self.step, self._policy.fragment_count, self._policy.sync_interval_steps)

    def _adopt(self) -> Iterator[Letter]:
        asked, self._asked = self._asked, []
        for what in asked:
            what()
        for fragment, (version, step, merged_offer, fix) in sorted(self._mailbox.items()):
            work = self.work[fragment]
            if version <= work.version:
                continue
            keeps = self._adoption == "rebase" and merged_offer != ALL_OFFERS
            merged = work.sent.get(merged_offer, (0, 0)) if keeps else (work.steps, work.tokens)
            work.version, work.steps, work.tokens = version, work.steps - merged[0], work.tokens - merged[1]
            work.sent = {}
            self.step = max(self.step, step)
            self._fix = max(self._fix, fix)
            yield Adopted(fragment, version, self.step, self.tokens_total, work.tokens, self._fix)
        self._mailbox.clear()

    def _offer(self, fragment: FragmentId) -> Offer:
        work = self.work[fragment]
        work.offer += 1
        work.sent[work.offer] = (work.steps, work.tokens)
        work.latest = Offer(fragment, work.offer, self.step, work.version, work.steps, work.tokens, self.tokens_total)
        return work.latest
