"""A service and its cluster, each node of it in a region of its own: the head's, and one for each node of every group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from api.client import Client
from api.installation.home import Home
from orchestrator.certificates import folders
from orchestrator.core.events import ContributionArrived
from orchestrator.core.vocabulary import Contribution
from orchestrator.errors import InfrastructureError
from orchestrator.runtime import embedded
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.groups import NodeGroup
from orchestrator.runtime.ray_start import Place
from orchestrator.runtime.settings import CONTROL_GROUP
from orchestrator.tape.storage import read_tape
from tests.api.installation import ROOT
from tests.programs import required
from tests.ray.jobs import Job
from tests.waiting import wait_until
from tests.wan.diary import Diary
from tests.wan.line import Line
from tests.wan.regions import NO_LINES, Regions

UNSHARED = 'mount -t tmpfs -o mode=700 runs "$0" && mount -t tmpfs -o mode=700 data "$1" && shift && exec "$@"'
"""Gives a region's node disks of its own in the place of the service's folders of runs and of data."""


class Archipelago:
    """The whole of it, seen from outside all regions. No region but the head's sees the service's runs and data."""

    def __init__(
        self,
        folder: Path,
        groups: Sequence[NodeGroup],
        lines: Mapping[str, Line] = NO_LINES,
        window_bytes: int | None = None,
        readers: Sequence[str] = (),
    ) -> None:
        """``readers`` are regions without a node of the cluster."""
        self._groups, self._readers = tuple(groups), tuple(readers)
        self.names = (CONTROL_GROUP, *(name for group in groups for name in _nodes_of(group)), *readers)
        self.regions = Regions(self.names, lines, window_bytes)
        self.home, self.runs = Home(folder / "home"), folder / "runs"
        self.data = self.home.path / "data"
        for unshared in (self.runs, self.data):
            unshared.mkdir(parents=True, exist_ok=True)
        self._unshare = required("unshare")
        self._service: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """What does not run of it is started: what an operator does after a failure, too."""
        embedded.up(self.home.path, self._groups, places=self._places())
        if self._service is not None and self._service.poll() is None and not self._answers():
            self._service.kill()  # its own node has died, as `atoll up` learns from readiness
            self._service.wait()
        if self._service is None or self._service.poll() is not None:
            place = self.regions.places[CONTROL_GROUP]
            shown = ["--certificate", str(self.certificates / folders.CERTIFICATE)]
            shown += ["--key", str(self.certificates / folders.KEY)]
            served = ["--home", str(self.home.path), "--runs", str(self.runs), "--host", place.address, *shown]
            served += ["--control", "tests.wan.diary:connect", "--allow", "tests"]
            command = [*place.enter, sys.executable, "-m", "api.serve", *served]
            with self.home.log.open("ab") as log:
                self._service = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
            wait_until(self._answers)

    def _places(self) -> dict[str, Place]:
        own_disk = (self._unshare, "--mount", "sh", "-c", UNSHARED, str(self.runs), str(self.data))
        return {
            name: place if name == CONTROL_GROUP else Place(place.address, (*place.enter, *own_disk))
            for name, place in self.regions.places.items()
            if name not in self._readers
        }

    def down(self) -> None:
        if self._service is not None:
            self._service.kill()
            self._service.wait()
        embedded.down(self.home.path)
        self.regions.close()

    def client(self) -> Client:
        return Client.at(self.home.path)

    @property
    def cluster(self) -> ClusterFile:
        found = ClusterFile.find(self.home.path)
        assert found is not None
        return found

    @property
    def certificates(self) -> Path:
        """Those of all its nodes; the authority's folder lies beside."""
        return self.cluster.state / embedded.CERTIFICATES

    def region_of(self, pid: int) -> str:
        """Where this process is."""
        space = os.stat(f"/proc/{pid}/ns/net").st_ino
        return next(name for name in self.names if os.stat(f"/run/netns/{self.regions.space(name)}").st_ino == space)

    def _answers(self) -> bool:
        if self.home.address() is None:
            return False
        with suppress(InfrastructureError), self.client() as client:
            return bool(client.node_groups())
        return False


class WideJob(Job):
    """A job watched and commanded by REST, from outside."""

    def __init__(self, archipelago: Archipelago, job_id: str, seed: int) -> None:
        super().__init__(None, job_id, archipelago.runs / job_id)  # type: ignore[arg-type]
        self._client, self.seed = archipelago.client(), seed

    def seen(self) -> dict[str, Any]:
        seen = self._client.job(self.id)
        islands = [{**island.model_dump(), "last_merge_at": island.last_merge_after_s} for island in seen.islands]
        view = {"islands": islands, "epoch": seen.epoch}
        return {"view": view, "at": seen.after_s, "goodput": seen.goodput, "state": seen.state}

    def trouble(self, island: str) -> str:
        """What the status says to be in the way of the island's payloads."""
        line = self.island(island)["line"]
        return (line and line["trouble"]) or ""

    def contributions_since(self, at: float) -> list[Contribution]:
        records = read_tape(self.run_dir / "tape.jsonl").records
        found = [record.event for record in records if isinstance(record.event, ContributionArrived)]
        return [event.contribution for event in found if event.at > at]

    def contributors_since(self, at: float) -> set[str]:
        return {contribution.island for contribution in self.contributions_since(at)}

    def diary(self, pid: int) -> Diary:
        return Diary(self.seed, pid)

    def cancel(self) -> None:
        self._client.cancel(self.id)

    def close(self) -> None:
        self._client.close()


def _nodes_of(group: NodeGroup) -> list[str]:
    """As an embedded cluster names them."""
    return [group.name] if group.nodes == 1 else [f"{group.name}-{number}" for number in range(group.nodes)]
