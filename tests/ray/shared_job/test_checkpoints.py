"""A job that trains goes back to a checkpoint; and neither it nor another one touches a folder outside its roots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounting.ledger import ROLLED_BACK
from orchestrator.actors import IslandInterface
from orchestrator.core import commands, saving
from orchestrator.core.events import MergeCompleted
from orchestrator.core.messages import Adopted
from orchestrator.core.vocabulary import Epoch, Incarnation, IslandId
from orchestrator.errors import InfrastructureError, NotFound
from orchestrator.runtime.settings import island_name
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots
from tests.ray.jobs import GROUPS, Job, synthetic
from tests.ray.test_checkpoints import checkpoints_of, recorded, taken
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.ray


def test_a_job_that_would_go_on_from_outside_its_roots_is_not_started_and_leaves_nothing(
    job: Job, port: Any, tmp_path: Path
) -> None:
    """Whoever asked the control port: the synchroniser looks itself. An island refuses another folder that it is told."""
    import ray  # not before the tests begin

    from orchestrator.runtime import cluster

    outside, roots = tmp_path.parent / f"{tmp_path.name}-outside", AllowedRoots.only(tmp_path)
    for section in ({"resume": {"checkpoint": str(outside)}}, {"checkpoints": {"folder": str(outside)}}):
        spec = parse_job(synthetic(100, **section))
        with pytest.raises(InfrastructureError, match="is not an allowed place for checkpoints of jobs"):
            port.start_job("outside", spec, tmp_path / "outside", {}, roots)
        with pytest.raises(NotFound):
            port.status("outside")
    number, epoch = job.island(GROUPS[0])["incarnation"], job.last["view"]["epoch"]
    island = cluster.actor_named(island_name(job.id, IslandId(GROUPS[0]), Incarnation(number)))
    assert island is not None
    ray.get(island.call(IslandInterface.save, Epoch(epoch), 77, str(outside)), timeout=PATIENCE_S)
    log = job.run_dir / "logs"
    job.wait_until(
        lambda: "is not an allowed place for checkpoints" in "".join(p.read_text() for p in log.rglob("*.log")),
        "a refusal",
    )
    assert not outside.exists()


def test_a_running_job_goes_back_to_a_checkpoint_and_trains_on_from_there(job: Job) -> None:
    job.command(commands.Checkpoint())
    taken(job, len(recorded(job, saving.CheckpointTaken)) + 1)
    saved = checkpoints_of(job)[-1]
    passed = sum(fragment.version for fragment in saved.fragments) + 12
    job.wait_until(lambda: job.status()["view"]["global_version"] >= passed, "merges behind the checkpoint")
    known, rolled_back = len(restorations(job)), job.last["goodput"]["discarded_tokens"].get(ROLLED_BACK, 0)
    job.command(commands.Rollback(0))
    job.wait_until(lambda: len(restorations(job)) == known + 4, "every fragment")
    restored = restorations(job)[known:]

    def merged_again() -> bool:
        fragments = job.status()["view"]["fragments"]
        return all(fragments[event.fragment]["version"] > event.version for event in restored)

    job.wait_until(merged_again, "a merge of every fragment")
    assert [event.digest for event in restored] == [fragment.digest for fragment in saved.fragments]
    for event in restored:
        later = [
            r.event for r in job.records() if isinstance(r.event, MergeCompleted) and r.event.fragment == event.fragment
        ]
        first = next(merge for merge in later if merge.version == event.version + 1)
        assert first.base_digest == event.digest, "the next merge builds on what the checkpoint has"
        adopted = [e for group in GROUPS for e in job.events(Adopted, group) if e.version == event.version]
        assert all(e.kept_tokens == 0 for e in adopted if e.fragment == event.fragment)
    assert job.status()["goodput"]["discarded_tokens"][ROLLED_BACK] > rolled_back


def restorations(job: Job) -> list[saving.FragmentRestored]:
    return recorded(job, saving.FragmentRestored)
