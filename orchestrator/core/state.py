"""The synchroniser's state of one job. Only ``Synchroniser`` holds it, and only its handlers change it.

The parts are frozen records (``Island``, ``FragmentRound``, ``Pace``); this class is the one place where they are replaced.
A state that is frozen as a whole would be copied at every event. What an island's current incarnation has trained is its
latest report, kept as it came.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.commands import UNCHANGED, ChangedSettings
from orchestrator.core.fragment_round import FragmentRound, Leaving, Pace, UpdateNorms
from orchestrator.core.island_record import Island
from orchestrator.core.messages import Progress
from orchestrator.core.saving import SavedPart, SurvivingIsland
from orchestrator.core.vocabulary import (
    CommandId,
    Duration,
    Epoch,
    FragmentId,
    Instant,
    IslandId,
    IslandState,
    JobOutcome,
    JobPhase,
    JobPolicy,
    Life,
    NodeGroupId,
    ScheduleAnchor,
    Version,
)

LEAVING_STEPS = 2.0
"""An island that is to leave ends its step before it offers its work. Its present step may take twice as long as usual."""
TRANSFER_MIN_S = 0.2
"""The shortest wait for what islands offer as they leave, while no transfer was seen yet."""
NAMED_MAX = 5
"""A reason names at most this many islands."""


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """The checkpoint being taken. ``awaited`` have not answered yet; ``saved`` have, in order.

    ``unsaved`` is the latest reason why an island could not save its state.
    """

    number: int
    versions: tuple[Version, ...]
    awaited: frozenset[Life]
    serial: int
    saved: tuple[SavedPart, ...] = ()
    sealing: bool = False
    unsaved: str = ""


@dataclass(frozen=True, slots=True)
class RetainedCheckpoint:
    """A whole checkpoint that was not dropped."""

    number: int
    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Rollback:
    """A rollback under way; ``left`` are the fragments that are not restored yet."""

    checkpoint: int
    left: frozenset[FragmentId]


@dataclass(frozen=True, slots=True)
class OpenUpgrade:
    """An upgrade that waits for a checkpoint. ``command`` asked for it."""

    command: CommandId
    checkpoint: int
    build: str
    python: str


@dataclass(frozen=True, slots=True)
class OpenEvaluation:
    """The evaluation under way; ``evaluator`` is the island that measures, if one does."""

    global_version: int
    limit_s: Duration | None
    evaluator: Life | None


@dataclass(frozen=True, slots=True)
class Paused:
    """A pause of the job. ``islands`` are those that it wanted before, in order."""

    reason: str
    islands: tuple[IslandId, ...]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The job's checkpoints. ``count`` numbers are used up; ``begun_at`` is the global version at the last of them.

    ``failures`` counts all that failed, ``failures_in_a_row`` those since the last complete one, and ``failure`` is the
    latest reason, empty once one is complete. Before ``retry_at`` none begins by itself. ``taken_at`` is the instant of the
    last complete one's cut, and ``byte_count`` its size.
    """

    count: int = 0
    begun_at: int = 0
    open: OpenCheckpoint | None = None
    retained: tuple[RetainedCheckpoint, ...] = ()
    due_serial: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    failure: str = ""
    retry_at: Instant = 0.0
    taken_at: Instant | None = None
    byte_count: int = 0


class JobState:
    """The memory of a job.

    ``policy`` is ``policy_begun``, the specification's, with the settings that operators changed since (``changed``).
    ``quorum_least`` is the lowest quorum of the job so far. ``paused`` is set while all islands are sent away.
    ``end_reason`` says why a finishing job ends. ``complete`` says that it has all its work and waits only for its
    evaluation. ``tokens_before`` is what was trained before the checkpoint that the job continues, if it continues one.
    ``evaluated`` is the version that was last measured as a whole, and ``evaluated_at`` is when the last evaluation began.
    """

    policy: JobPolicy
    policy_begun: JobPolicy
    changed: ChangedSettings
    paused: Paused | None
    quorum_least: int
    epoch: Epoch
    phase: JobPhase
    outcome: JobOutcome | None
    reason: str
    end_reason: str
    seeded: bool
    parameter_count: int
    pace: Pace
    standbys: frozenset[IslandId]
    islands: dict[IslandId, Island]
    rounds: list[FragmentRound]
    update_norms: list[UpdateNorms]
    reports: dict[IslandId, Progress]
    commands: set[CommandId]
    cordoned: set[NodeGroupId]
    checkpoints: Checkpoints
    rollback: Rollback | None
    upgrade: OpenUpgrade | None
    tokens_before: int | None
    evaluation: OpenEvaluation | None
    evaluated: int | None
    evaluated_at: Instant
    merges_since_evaluation: int
    flush_serial: int
    complete: bool
    _serial: int

    def __init__(self, policy: JobPolicy, epoch: Epoch) -> None:
        self.policy = self.policy_begun = policy
        self.changed = UNCHANGED
        self.paused = None
        self.quorum_least = policy.quorum
        self.epoch = epoch
        self.phase = JobPhase.RUNNING
        self.outcome = None
        self.reason = ""
        self.end_reason = ""
        self.seeded = False
        self.parameter_count = 0
        self.pace = Pace()
        self.standbys = frozenset(plan.island for plan in policy.standbys)
        self.islands = {p.island: Island(p) for p in (*policy.islands, *policy.standbys)}
        self.rounds = [FragmentRound(FragmentId(p)) for p in range(policy.fragment_count)]
        self.update_norms = [UpdateNorms()] * policy.fragment_count
        self.reports = {}
        self.commands = set()
        self.cordoned = set()
        self.checkpoints = Checkpoints()
        self.rollback = None
        self.upgrade = None
        self.tokens_before = None
        self.evaluation = None
        self.evaluated = None
        self.evaluated_at = 0.0
        self.merges_since_evaluation = 0
        self.flush_serial = 0
        self.complete = False
        self._serial = 0

    def next_serial(self) -> int:
        """Return a serial for a timer: higher than every one before."""
        self._serial += 1
        return self._serial

    @property
    def latest_serial(self) -> int:
        """Return the highest serial that was given out, 0 if none was."""
        return self._serial

    @property
    def lr_ratio(self) -> float:
        """Return the inner learning rate as a ratio of the specification's."""
        return 1.0 if self.changed.lr_ratio is None else self.changed.lr_ratio

    @property
    def live(self) -> frozenset[IslandId]:
        """Return the islands that a round may wait for. Only the last rounds of a job wait for draining ones."""
        if self.phase is JobPhase.FINISHING:
            return frozenset([i.id for i in self.islands.values() if i.live or i.gives])
        return frozenset([i.id for i in self.islands.values() if i.live])  # asked for with every contribution

    @property
    def quorum(self) -> int:
        """Return K: how many contributions an open round needs before it may close."""
        return self.quorum_of(len(self.live))

    def quorum_of(self, live_count: int) -> int:
        """Return K while so many islands are live.

        The last rounds need the fixed number only: islands whose work is all merged offer nothing to them.
        """
        ending = self.phase is JobPhase.FINISHING
        return self.policy.quorum if ending else self.policy.quorum_of(live_count)

    @property
    def leaving(self) -> Leaving | None:
        """Return the islands whose work a round may close on, or None while others train, or none is leaving."""
        if not self.policy.leaving_closes or self.phase is not JobPhase.RUNNING or self.live:
            return None
        giving = [i.id for i in self.islands.values() if i.gives]
        if not giving:
            return None
        trains_perhaps = any(i.current.state_before_suspect is IslandState.TRAINING for i in self.islands.values())
        reports = (self.reports.get(island) for island in giving)
        step_s = max((report.step_seconds_median for report in reports if report), default=0.0)
        window = LEAVING_STEPS * step_s + max(self.pace.sync or 0.0, TRANSFER_MIN_S)
        return Leaving(frozenset(giving), self.policy.quorum if trains_perhaps else 1, window)

    @property
    def job_islands(self) -> tuple[Island, ...]:
        """Return all islands but standbys, and but scale-up slots that were never used."""
        return tuple([i for i in self.islands.values() if (i.wanted or i.incarnation) and i.id not in self.standbys])

    @property
    def global_version(self) -> int:
        return sum(current.version for current in self.rounds)

    @property
    def tokens_trained(self) -> int:
        before = sum([island.tokens_before for island in self.islands.values()])
        survivors = [i.survivor for i in self.islands.values() if i.survivor is not None and i.id not in self.reports]
        unreported = sum([survivor.tokens_total for survivor in survivors])
        reported = sum([report.tokens_total for report in self.reports.values()])
        return (self.tokens_before or 0) + before + unreported + reported

    def totals_of(self, island: Island) -> Progress | SurvivingIsland | None:
        """Return what the island's present incarnation is known to have trained, by report or since a salvage."""
        return self.reports.get(island.id) or island.unreported

    @property
    def anchor(self) -> ScheduleAnchor:
        """Return the schedule anchor. Tokens and step are both of the latest reports, so that neither is older."""
        clocks = (*map(self.step_of, self.islands.values()), *(current.step for current in self.rounds))
        return ScheduleAnchor(self.tokens_trained, max(clocks))

    def step_of(self, island: Island) -> int:
        """Return the island's logical step by its latest report."""
        report = self.reports.get(island.id)
        return report.step if report else island.step

    @property
    def recipients(self) -> tuple[Island, ...]:
        """Return the islands that a new version is published to: those with a state, suspect ones included."""
        holding = (IslandState.TRAINING, IslandState.STANDBY, IslandState.SUSPECT, IslandState.DRAINING)
        return tuple([i for i in self.islands.values() if i.state in holding])

    def pause_reason(self) -> str | None:
        """Return why no fragment can merge at present, or None."""
        if self.paused is not None and self.phase is JobPhase.RUNNING:
            return f"the job is paused: {self.paused.reason}"
        live = len(self.live)
        quorum = self.quorum_of(live)
        if self.phase is not JobPhase.RUNNING or self.leaving is not None:
            return None
        if live < quorum:
            away = [f"{i.id} is {i.state.words}" for i in self.job_islands if not i.live]
            others = f"; {', '.join(away[:NAMED_MAX])}{' …' if len(away) > NAMED_MAX else ''}" if away else ""
            return f"merging waits: {live} of the {quorum} islands that the quorum needs are training{others}"
        hung = [i for i in self.job_islands if i.live and i.current.overdue_s]
        if live - len(hung) >= quorum:
            return None
        return f"merging waits for {', '.join(f'{i.id} ({i.reason})' for i in hung[:NAMED_MAX])}"
