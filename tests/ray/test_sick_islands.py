"""An island whose work cannot be used, in real processes: never merged, flagged, replaced, and the others do not notice."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from safetensors.numpy import load_file

from orchestrator.core import commands, effects, events
from orchestrator.core.messages import Overdue
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import Job, synthetic

pytestmark = pytest.mark.ray
GROUPS = ("us-east", "asia")


def test_an_island_that_sends_no_numbers_garbled_bytes_and_explosions_is_never_merged_and_comes_back(
    start: Callable[..., Job],
) -> None:
    job = start(synthetic(steps=100_000, groups=GROUPS), trainer="tests.ray.sick:create")
    job.wait_for_merge("us-east", 1)
    well = job.island("us-east")
    back = job.wait_for_merge("asia", 4)
    assert back["quarantines"] == 3
    assert back["flag"] == ""
    now = job.island("us-east")
    assert (now["pid"], now["quarantines"], now["flag"]) == (well["pid"], 0, "")
    job.command(commands.Cancel())
    status = job.wait_for_end()
    records = read_tape(job.run_dir / "tape.jsonl").records
    unusable = [r.event for r in records if isinstance(r.event, events.ContributionUnusable)]
    diverged = next(event.detail for event in unusable if event.reason.value == "non_finite")
    assert re.search(
        r"contains a value that is not a number; that was at step \d+, .*training.inner_optimizer.lr", diverged
    )
    told = " ".join(event.detail for event in unusable if event.contribution.incarnation == 2)
    sizes = [(int(a), int(b)) for a, b in re.findall(r"announces (\d+) bytes but has (\d+)", told)]
    assert "bytes changed on the way" in told
    assert {has - announced for announced, has in sizes} >= {-9, sizes[0][0]}  # cut short, and twice as long
    decided = [effect for record in records for effect in record.effects]
    quarantined = [x for x in decided if isinstance(x, effects.QuarantineIsland)]
    assert [(x.island, x.incarnation, x.reason.value) for x in quarantined] == [
        ("asia", 1, "non_finite"),
        ("asia", 2, "corrupt"),
        ("asia", 3, "exploding"),
    ]
    bad = {"non_finite", "corrupt", "exploding"}
    refused = {x.contribution.payload for x in decided if isinstance(x, effects.RefuseContribution) and x.reason in bad}
    merged = {item.payload for x in decided if isinstance(x, effects.MergeFragment) for item in x.inputs}
    assert len(refused) >= 1 + 3 + 3
    assert not refused & merged
    assert all(np.abs(array).max() < 100 for array in load_file(job.run_dir / "merged.safetensors").values())
    assert status["goodput"]["discarded_tokens"]["quarantined"] > 0
    assert {x.donor for x in decided if isinstance(x, effects.BeginCatchUp) and x.incarnation > 1} == {("us-east", 1)}


@pytest.mark.soak("live what tests/core/test_hanging.py and tests/learners/test_step_watch.py have")
def test_an_island_whose_trainer_deadlocks_is_named_while_nothing_merges_and_comes_back(
    start: Callable[..., Job],
) -> None:
    """Before, it counted as training for as long as one likes, and nothing merged for no reason."""
    both = {"quorum": 2, "grace_cap_steps": None}
    limits = {"step_limit_s": 12.0, "step_limit_ratio": 2.0, "backoff_max_s": 1.0}
    document = synthetic(steps=100_000, groups=GROUPS, synchroniser=both, recovery=limits)
    job = start(document, trainer="tests.ray.trainers:create_hanging")

    def paused() -> str | None:
        view = job.status()["view"]
        hung = next(island for island in view["islands"] if island["island"] == "asia")
        return view["pause_reason"] if hung["overdue_s"] else None

    reason = job.wait_until(paused, "the name of the hang")
    assert reason.startswith("merging waits for asia (it hangs: ")
    back = job.wait_for_merge("asia", 2)
    assert back["overdue_s"] == 0.0
    ended = [e for e in job.events(Overdue, "asia") if e.incarnation == 1][-1]
    assert ended.seconds >= limits["step_limit_s"]
    assert job.island("us-east")["incarnation"] == 1
