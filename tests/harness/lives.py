"""A job of scripted islands whose synchroniser is restarted after each of its deaths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.core import commands
from orchestrator.core.vocabulary import FragmentId
from orchestrator.host.state_view import core_status
from orchestrator.system.disk import Disk
from orchestrator.system.object_store import ObjectStore
from tests.harness.shell import FRAGMENTS, ISLANDS, ScriptedIsland, Shell, spec
from tests.swarm.disk import Died

DEATHS_MAX = 100


class Lives:
    """The lives of a synchroniser. ``shell`` is the present one, or None after a death. ``reached`` is called at every
    labelled point.
    """

    def __init__(
        self,
        folder: Path,
        reached: Callable[[str], None],
        disk: Disk | None = None,
        after_death: Callable[[], None] = lambda: None,
        store: ObjectStore | None = None,
        **synchroniser: Any,
    ) -> None:
        job = spec(**synchroniser)
        self.islands = {name: ScriptedIsland(job, index) for index, name in enumerate(ISLANDS)}
        self.deaths = 0
        self._make = lambda: Shell(folder, job, self.islands, reached, disk, store)
        self._after_death = after_death
        self._shell: Shell | None = None
        self._asked = 0
        self.insist(Shell.work_until_quiet)
        assert all(island.trains for island in self.islands.values()), core_status(self.shell.core.state, 0.0)

    @property
    def shell(self) -> Shell:
        assert self._shell is not None
        return self._shell

    def insist(self, work: Callable[[Shell], object]) -> None:
        """Do the work, with a new life of the synchroniser after each death."""
        while True:
            try:
                if self._shell is None:
                    self._shell = self._make()
                    self._shell.begin()
                work(self._shell)
                return
            except Died:
                self.deaths += 1
                assert self.deaths <= DEATHS_MAX
                if self._shell is not None:
                    self._shell.die()
                    self._shell = None
                self._after_death()

    def step(self, count: int) -> None:
        """Let every island take ``count`` steps, and do all work that follows from them."""
        for _ in range(count):
            for island in self.islands.values():
                island.loop.advance()
            self.insist(Shell.work_until_quiet)

    def adopt(self) -> None:
        """Bring every island to a boundary without a step."""
        for island in self.islands.values():
            island.loop.adopt_mail()
        self.insist(Shell.work_until_quiet)

    def save(self) -> None:
        """Take one more checkpoint of the job, however often it is dropped."""
        before = self._newest_kept()
        while self._newest_kept() == before:
            self._ask(commands.Checkpoint())
            self.adopt()

    def roll_back(self) -> None:
        """Roll the job back to its newest checkpoint."""
        self._ask(commands.Rollback(0))
        self.insist(Shell.work_until_quiet)

    def _ask(self, request: commands.OperatorCommand) -> None:
        """Give a command. If it is unknown whether it arrived, give it again under the same id."""
        self._asked += 1
        self.insist(lambda shell: shell.command(f"c{self._asked}", request))

    def _newest_kept(self) -> int:
        return max((kept.number for kept in self.shell.core.state.checkpoints.retained), default=0)

    def bits(self) -> list[tuple[int, str, bytes, bytes]]:
        """Return versions, digests, Θ and momentum."""
        told = []
        for p in range(FRAGMENTS):
            state = self.shell.shard.state(FragmentId(p))
            arrays = [np.concatenate([a.reshape(-1) for a in x.values()]) for x in (state.parameters, state.momentum)]
            told.append((state.version, state.digest, arrays[0].tobytes(), arrays[1].tobytes()))
        return told
