"""What the processes of an island of many hosts say to each other.

Rank 0 says what is to be done, and the others what they hold and how it went. All of it is frozen data; arrays are named,
not carried, but for payloads so small that any call of the service would carry them too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from orchestrator.channel.endpoint import Carried
from orchestrator.checkpoints.manifest import File
from orchestrator.core.messages import Broken
from orchestrator.core.vocabulary import Epoch, IslandId, Version
from orchestrator.logbook import Logbook
from orchestrator.replica.replica import Action, AdoptVersion

# ── from rank 0 ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Beat:
    """Boundary ``number``: carry these out, say what you hold, and take the step behind it; None: none follows."""

    number: int
    actions: tuple[Action, ...]
    cuts: tuple[Hashable, ...]
    schedule_step: int | None


@dataclass(frozen=True, slots=True)
class TakeOuter:
    """Begin from the synchroniser's parameters: one payload a fragment, of what this process holds."""

    epoch: Epoch
    versions: tuple[Version, ...]
    step: int
    cursor: int
    payloads: tuple[Carried, ...]


@dataclass(frozen=True, slots=True)
class TakeSaved:
    """Begin from the state that the checkpoint in ``folder`` has of this island."""

    folder: str
    cursor: int


@dataclass(frozen=True, slots=True)
class FetchPart:
    """Get from these processes of a peer, by their names, what of a fragment's state is to lie here, and keep it.

    ``cut`` is what they call the boundary that it is of, ``chunk`` what ``TakePeer`` calls it.
    """

    epoch: Epoch
    chunk: str
    fragment: int
    cut: str
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakePeer:
    """Begin from these chunks of a peer's state: of what is in several, the last one's stays."""

    chunks: tuple[str, ...]
    versions: tuple[Version, ...]
    step: int
    cursor: int


@dataclass(frozen=True, slots=True)
class Promote:
    """Begin as this island, which has this logbook, from what a standby holds and these versions."""

    island: IslandId
    book: Logbook
    adoptions: tuple[AdoptVersion, ...]
    shard_index: int
    cursor: int


StateOrder = TakeOuter | TakeSaved | FetchPart | TakePeer
Order = Beat | StateOrder | Promote

# ── to rank 0 ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Prepared:
    """The model is built, on so many devices of this host. ``process`` is what others call this process."""

    device_count: int
    process: str = ""


@dataclass(frozen=True, slots=True)
class News:
    """Boundary ``number`` is carried out; ``versions`` of all fragments lie ready here, −1 for none."""

    number: int
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """What rank 0 last wanted, other than a boundary, is done; ``problem`` says why it is not."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """This process's part of a cut is on the disk, in these files of the island's folder; ``problem`` says why not."""

    cut: Hashable
    files: tuple[File, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """This process cannot go on, and so the island cannot."""

    report: Broken


Answer = Prepared | News | Done | Written | Failed
