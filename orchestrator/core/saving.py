"""Events and effects of checkpoints and rollbacks. Nothing here decides.

A checkpoint is a *cut* through the job: Θ and momentum as they stand when every merge that was closed before
``BeginCheckpoint`` is done, and of each island the state at its first boundary after the marker reached it, before it
adopts anything that was published after the marker. An offer is in the cut's Θ or in its island's state, never in both.

Source: Chandy and Lamport, Distributed snapshots, ACM TOCS 3 (1985).
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.vocabulary import (
    CommandId,
    Duration,
    Epoch,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    Life,
    Version,
)


@dataclass(frozen=True, slots=True)
class CheckpointTaken:
    """It is whole and sealed. ``seconds`` since it began; ``byte_count`` is all of its files."""

    at: Instant
    checkpoint: int
    byte_count: int
    seconds: Duration


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """There is no such checkpoint, and nothing of it counts."""

    at: Instant
    checkpoint: int
    reason: str


@dataclass(frozen=True, slots=True)
class FromJournal:
    """The source of a fragment that no checkpoint restored, but the journal. A tape has the number 0 for it."""


RestoredFrom = int | FromJournal
"""The number of a checkpoint, from 1, or the journal."""


@dataclass(frozen=True, slots=True)
class FragmentRestored:
    """Fragment ``fragment`` stands at ``version``, which holds what the checkpoint has. As durable as a merge.

    Restored from the journal, it holds the version before the last one, which the journal has lost.
    """

    at: Instant
    fragment: FragmentId
    version: Version
    checkpoint: RestoredFrom
    digest: str
    base_digest: str


@dataclass(frozen=True, slots=True)
class RollbackFailed:
    """The checkpoint cannot be read."""

    at: Instant
    checkpoint: int
    reason: str


@dataclass(frozen=True, slots=True)
class SavedIsland:
    """An island whose state the checkpoint holds, with ``kept_tokens[p]`` of work on fragment p that is in no version."""

    island: IslandId
    step: int
    kept_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobResumed:
    """The job goes on from a checkpoint of another, or of its own earlier run. Before ``JobStarted``.

    Fragment p stands at ``versions[p]``, made at ``steps[p]``. Of ``tokens_trained`` until then ``merged_tokens[p]`` are in
    it; what is neither in it nor kept by an island that goes on is lost. ``refused`` says of newer checkpoints why not they.
    """

    at: Instant
    checkpoint: str
    job: str
    versions: tuple[Version, ...]
    steps: tuple[int, ...]
    tokens_trained: int
    merged_tokens: tuple[int, ...]
    islands: tuple[SavedIsland, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SurvivingIsland:
    """An island that trained on while the synchroniser was lost, and goes on with its unmerged work.

    Fragment p of its parameters is based on ``versions[p]``, with ``kept_tokens[p]`` of own work. Its latest offer that the
    present version of fragment p contains is ``merged_offers[p]``, as in a ``Recipient``; 0 if it is based on that version.
    Totals are of its incarnation.
    """

    island: IslandId
    incarnation: Incarnation
    versions: tuple[Version, ...]
    step: int
    steps_total: int
    tokens_total: int
    stepping_seconds: Duration
    kept_tokens: tuple[int, ...]
    merged_offers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LostVersion:
    """A version that islands had heard of, and that is lost.

    After a ``JobSalvaged`` the next merge of the fragment makes another of its number, after a ``ShardMoved`` none does.
    """

    fragment: FragmentId
    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class JobSalvaged:
    """The synchroniser's machine is gone with its disk, and the job goes on from what its islands hold. The first event.

    Fragment p stands at ``versions[p]``, made at ``steps[p]``, and its bytes have ``digests[p]``. ``continued_from`` names
    the epoch whose tape is lost. ``lost`` are versions that islands had heard of. ``momentum`` says where momentum comes
    from. ``tokens_trained`` is what the job had trained, as far as the islands knew. ``doubted`` says why islands that
    answered are placed again, and ``last_incarnations`` which incarnations there have been. The next checkpoint has the
    number after ``checkpoints_before``.
    """

    at: Instant
    continued_from: str
    epoch: Epoch
    versions: tuple[Version, ...]
    steps: tuple[int, ...]
    digests: tuple[str, ...]
    lost: tuple[LostVersion, ...]
    momentum: str
    tokens_trained: int
    islands: tuple[SurvivingIsland, ...]
    last_incarnations: tuple[Life, ...]
    checkpoints_before: int
    doubted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShardMoved:
    """The shard ``shard`` is on another node, or another disk, and goes on there with these fragments.

    ``source`` says what it goes on from, and ``momentum`` where momentum comes from. Versions in ``lost`` were announced,
    but no island had them: ``FragmentRestored`` of each of their fragments follows.
    """

    at: Instant
    shard: int
    node: str
    fragments: tuple[FragmentId, ...]
    source: str
    momentum: str
    lost: tuple[LostVersion, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class BeginCheckpoint:
    """Save Θ at exactly ``versions``, the accounts as they are now, and send the marker to these islands.

    The marker goes the way of publications, before any that is decided later. Answered by ``Saved`` or
    ``NotSaved`` of each island, as far as they live, and by ``CheckpointFailed`` when Θ cannot be saved.
    """

    checkpoint: int
    versions: tuple[Version, ...]
    islands: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class SavedPart:
    """An incarnation's part of a checkpoint, by the digest that it reported."""

    island: IslandId
    incarnation: Incarnation
    digest: str


@dataclass(frozen=True, slots=True)
class SealCheckpoint:
    """Make the checkpoint one whole of Θ and these parts. Answered by ``CheckpointTaken`` or ``CheckpointFailed``."""

    checkpoint: int
    parts: tuple[SavedPart, ...]


@dataclass(frozen=True, slots=True)
class DropCheckpoint:
    """Remove it: superseded, or never finished. No answer is expected."""

    checkpoint: int
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreFragments:
    """Put what the checkpoint has in the place of these fragments, as (fragment, version, step), and make that durable.

    Answered by one ``FragmentRestored`` each, or by ``RollbackFailed``, before any was touched.
    """

    epoch: Epoch
    checkpoint: int
    fragments: tuple[tuple[FragmentId, Version, int], ...]


@dataclass(frozen=True, slots=True)
class HandOver:
    """Let this synchroniser end, and one of the release ``build`` go on from its files, as ``command`` asked for.

    No answer is expected: ``SynchroniserRestarted`` says which release goes on. The core decides as before until then.
    """

    command: CommandId
    build: str
    python: str


SavingEvent = (
    CheckpointTaken | CheckpointFailed | JobResumed | JobSalvaged | ShardMoved | FragmentRestored | RollbackFailed
)
SavingEffect = BeginCheckpoint | SealCheckpoint | DropCheckpoint | RestoreFragments | HandOver
