"""The real checkpoint writer of a synchroniser without Ray, in the same thread, with labelled points at its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from orchestrator.accounting.goodput import Goodput
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.reading import manifest_of, outer_states
from orchestrator.checkpoints.writing import OuterCut, cut_of
from orchestrator.core.saving import BeginCheckpoint, FragmentRestored, RestoreFragments, SavingEffect
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.host.checkpoint_writer import CheckpointWriter
from orchestrator.host.job_context import JobContext
from orchestrator.host.job_files import JobFiles
from orchestrator.host.state_view import StateView
from orchestrator.parameters.shard import ParameterShard, Publication
from orchestrator.specification.config import JobSpec
from orchestrator.system.roots import Allowed, AllowedRoots
from tests.swarm.disk import AtOnce

POINTS = (
    "before mark", "after mark", "before file", "half a file", "after file", "before removal", "after removal",
    "before restore",
)  # fmt: skip


class Watched(Folder):
    """A folder that reports its labelled points."""

    def __init__(self, there: Allowed, say: Callable[[str], None]) -> None:
        super().__init__(there)
        self._say = say

    def sub(self, name: str) -> Folder:
        return Watched(self._allowed.sub((name,)), self._say)

    def write(self, name: str, content: bytes) -> None:
        self._say("before file")
        super().write(f"{name}.draft", content[: len(content) // 2])
        self._say("half a file")
        super().write(name, content)
        self._say("after file")

    def remove(self, name: str) -> None:
        self._say("before removal")
        super().remove(name)
        self._say("after removal")


class Writer(Protocol):
    """An island that writes its part at its next boundary."""

    def save(self, checkpoint: int, folder: str) -> None: ...


class Life(Protocol):
    """The parts of a synchroniser's life that its checkpoints need."""

    spec: JobSpec
    files: JobFiles
    core: Synchroniser
    goodput: Goodput
    shard: ParameterShard
    published: dict[int, Publication]
    now: float
    reached: Callable[[str], None]

    @property
    def islands(self) -> Mapping[str, Writer]: ...

    def happen(self, kind: Callable[..., Any], *facts: Any) -> Any: ...


class Saver:
    """The checkpoint writer of one life."""

    def __init__(self, shell: Life, folder: Path) -> None:
        self._shell = shell
        self._posted: list[Callable[[float], Any]] = []
        roots = AllowedRoots.only(folder)
        epoch, now = shell.files.epoch, lambda: shell.now
        context = JobContext("job", shell.spec, folder, roots, epoch, now, self._post, _raise, lambda: 0)
        self._real = CheckpointWriter(
            context, None, StateView(shell.core), shell.goodput.ledger, self._cut, shell.files.tape.sync, AtOnce()
        )
        self._real.root = Watched(roots.checkpoint_folder(self._real.root.url), shell.reached)

    def act(self, effect: SavingEffect) -> None:
        if isinstance(effect, RestoreFragments):
            self._restore(effect)
            return
        self._real.act(effect, self._shell.now)
        if isinstance(effect, BeginCheckpoint) and self._real.is_open(effect.checkpoint):
            for name, _ in effect.islands:
                self._shell.reached("before mark")
                self._shell.islands[name].save(effect.checkpoint, self._real.folder(effect.checkpoint).url)
                self._shell.reached("after mark")
        posted, self._posted = self._posted, []
        for make in posted:
            self._shell.happen(make)

    def _restore(self, order: RestoreFragments) -> None:
        """Restore fragments as ``runtime.shard_worker`` does: all are kept before the first is reported, or sooner."""
        shard, folder = self._shell.shard, self._real.folder(order.checkpoint)
        states, restored = list(outer_states(folder, manifest_of(folder))), []
        for fragment, version, step in order.fragments:
            self._shell.reached("before restore")
            new = shard.restore(fragment, version, step, states[fragment])
            self._shell.reached("after keep")
            self._shell.published[fragment] = new.publication
            restored.append((fragment, version, order.checkpoint, new.facts.digest, new.facts.base_digest))
        for facts in restored:
            self._shell.happen(FragmentRestored, *facts)

    def _cut(self) -> Future[OuterCut]:
        cut = Future[OuterCut]()
        cut.set_result(cut_of(self._shell.shard.states()))
        return cut

    def _post(self, make: Callable[[float], Any]) -> int:
        self._posted.append(make)
        return len(self._posted)


def _raise(error: BaseException) -> None:
    raise error
