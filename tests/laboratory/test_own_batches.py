"""Islands whose batches differ, in the laboratory and the simulator: tokens, weights and schedule go by their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from api.chaos.plans import world_of
from learners import synthetic
from orchestrator.core.effects import MergeFragment
from orchestrator.core.events import ContributionArrived
from orchestrator.errors import ConfigurationError
from orchestrator.laboratory import baselines
from orchestrator.laboratory.multiplex import MultiplexedJob
from orchestrator.simulation.world import World
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.tape.schema import Record, job_steps

DOCUMENT = {
    "trainer": "learners.synthetic:create",
    "islands": [{"node_group": "a"}, {"node_group": "b", "batch_size": 12}],
    "training": {"batch_size": 4},
    "synchroniser": {"fragments": 2, "interval_steps": 4, "overlap_steps": 1, "quorum": 2, "wire": "float32"},
    "budget": {"steps": 24},
    "synthetic": {"parameters": 64, "step_s": 1e-6},
}
WEIGHTS = {"a": pytest.approx(1 / 10), "b": pytest.approx(9 / 10)}
"""As many steps of a third of the tokens: c_tokens²/c_steps is a ninth."""


class Records(list[Record]):
    """A sink that keeps them."""


def weights(orders: list[MergeFragment]) -> list[dict[str, float]]:
    return [{str(item.island): item.weight for item in order.inputs} for order in orders if len(order.inputs) == 2]


def test_a_multiplexed_job_trains_and_weighs_each_islands_own_batch() -> None:
    spec, records = parse_job(DOCUMENT), Records()
    job = MultiplexedJob(spec, synthetic.create, transfer_steps=1.0, recorder=records)
    for _ in job.run():
        pass
    assert job.outcome.curve[-1][0] == spec.token_budget == 24 * (4 + 12) * 128
    found = weights([f for record in records for f in record.effects if isinstance(f, MergeFragment)])
    assert len(found) > 5
    assert all(one == WEIGHTS for one in found[:-2])  # the last round of each fragment has what each island had left


def test_a_simulated_job_trains_each_islands_own_batch(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(DOCUMENT | {"synthetic": {"parameters": 64, "step_s": 1.0}}))
    world = World(*world_of(job), 0).run()
    contributions = [e.contribution for e, _ in job_steps(world.tape) if isinstance(e, ContributionArrived)]
    assert {(str(c.island), c.token_count / c.step_count) for c in contributions} == {("a", 4 * 128), ("b", 12 * 128)}


def test_what_takes_batches_of_one_size_refuses_others_by_name() -> None:
    spec: JobSpec = parse_job(DOCUMENT)
    with pytest.raises(ConfigurationError, match=r"islands\.1\.batch_size is 12"):
        next(baselines.train("data-parallel", spec, 0.0))
