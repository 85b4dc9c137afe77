"""What is recorded of a mixture of experts: the load of its experts, and a whole job of two islands with its routers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learners import jax_trainer
from learners.models import decoder as family
from learners.models.model import Model
from orchestrator.core.events import IslandReported, MergeCompleted
from orchestrator.core.messages import Progress
from orchestrator.errors import InvalidJobSpec
from orchestrator.laboratory import train_tape
from orchestrator.laboratory.multiplex import MultiplexedJob
from orchestrator.laboratory.tape_training import TapeTraining
from orchestrator.models.decoder import DecoderSection
from orchestrator.simulation.plan import sample_policy
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.tape.codec import to_json
from orchestrator.tape.driver import MemorySink
from orchestrator.tape.replay import replay
from orchestrator.tape.schema import Header, decode_header, encode_header

EXPERTS, ACTIVE, LAYERS = 4, 2, 2
MIXTURE: dict[str, Any] = {
    "vocabulary_size": 256,
    "width": 16,
    "layer_count": LAYERS,
    "head_count": 2,
    "key_value_head_count": 1,
    "head_size": 8,
    "experts": {"count": EXPERTS, "active": ACTIVE, "hidden_size": 8, "balance_weight": 0.01},
}
ROUTER = "layers.feedforward.router"


def of_mixture(**changed: Any) -> dict[str, Any]:
    return {"decoder": {**MIXTURE, **changed}, "compute_dtype": "float32"}


def test_a_step_in_parts_says_how_evenly_its_tokens_chose_experts(make_job: Any) -> None:
    document = make_job(model=of_mixture(), training={"batch_size": 4, "accumulation": 2})
    trainer = jax_trainer.create(document, 0, 2)
    router = trainer.initial_parameters([ROUTER])[ROUTER]
    load = trainer.step(0).expert_load
    assert load is not None
    assert 1 / EXPERTS <= load.share_max <= 1 / ACTIVE
    assert math.log(ACTIVE) / math.log(EXPERTS) - 1e-6 <= load.entropy_ratio <= 1 + 1e-6
    trainer.load({ROUTER: np.zeros_like(router)})  # every expert is as likely, and the first ones are chosen
    collapsed = trainer.step(1).expert_load
    assert collapsed == pytest.approx((1 / ACTIVE, math.log(ACTIVE) / math.log(EXPERTS)), rel=1e-5)


def test_shares_are_those_of_the_experts_that_each_layers_tokens_chose() -> None:
    built = family.decoder(DecoderSection(**MIXTURE), "float32")
    parameters = family.initial_parameters(DecoderSection(**MIXTURE), 3)
    parameters["layers.attention.output"] = jnp.zeros_like(parameters["layers.attention.output"])
    tokens = np.random.default_rng(0).integers(0, 256, (3, 9)).astype(np.int32)
    assert built.objective is not None
    assert built.measured is not None
    both = jax.jit(lambda *of: (built.measured(*of), built.objective(*of)))
    (objective, loss, shares), pair = both(parameters, tokens)
    assert (float(objective), float(loss)) == tuple(map(float, pair))
    assert shares.shape == (LAYERS, EXPERTS)
    np.testing.assert_allclose(np.sum(shares, axis=1), 1.0, rtol=1e-6)
    # without attention the first layer's router reads the embeddings, to a factor for each token
    rated = np.asarray(parameters["embed"])[tokens[:, :-1]] @ np.asarray(parameters[ROUTER])[0]
    chosen = np.argsort(-rated, axis=-1)[..., :ACTIVE]
    np.testing.assert_allclose(shares[0], np.bincount(chosen.ravel(), minlength=EXPERTS) / chosen.size, rtol=1e-6)


def with_own_objective(spec: Any) -> Model:
    """Return the built-in mixture with an objective of its user: nothing is learned."""
    whole = family.decoder(DecoderSection(**MIXTURE), "float32")

    def objective(parameters: Any, tokens: Any) -> tuple[jax.Array, jax.Array]:
        loss = whole.loss(parameters, tokens)
        return 0 * loss, loss

    return replace(whole, objective=objective)


def test_an_own_objective_is_what_a_step_minimises_and_has_no_load(make_job: Any) -> None:
    own = jax_trainer.create(make_job(model={"factory": f"{__name__}:with_own_objective"}), 0, 2)
    result = own.step(0)
    assert result.expert_load is None
    assert result.gradient_norm == 0.0


def of_two_islands(steps: int, **synchroniser: Any) -> JobSpec:
    """Return the specification of a small mixture's job, in which both islands are in each merge."""
    return parse_job(
        {
            "islands": [{"node_group": "here", "count": 2}],
            "budget": {"steps": steps},
            "model": of_mixture(),
            "data": {"sequence_length": 16},
            "training": {"batch_size": 2, "inner_optimizer": {"warmup_steps": 2}},
            "evaluation": {"sequences": 2},
            "synchroniser": {"overlap_steps": 1, "quorum": 2, **synchroniser},
        }
    )


def test_a_job_of_two_islands_records_routers_experts_and_losses_around_adoptions() -> None:
    spec = of_two_islands(16, fragments=2, interval_steps=4)
    sink = MemorySink()
    job = MultiplexedJob(spec, jax_trainer.create, transfer_steps=1.0, recorder=sink)
    for _ in job.run():
        pass
    records = sink.tape(Header(spec.name, spec.policy())).records
    merges = [record.event for record in records if isinstance(record.event, MergeCompleted)]
    with_routers = [event for event in merges if event.router_distance is not None]
    assert all(0 < event.router_distance <= 2 * event.router_travel for event in with_routers)
    reports = [
        record.event.report
        for record in records
        if isinstance(record.event, IslandReported) and isinstance(record.event.report, Progress)
    ]
    assert all(report.mixture is not None for report in reports)
    mixture = job.outcome.statistics["mixture"]
    assert sum(routers["merges"] for routers in mixture["routers"]) == len(with_routers) > 2
    for routers in mixture["routers"]:
        own = [event for event in with_routers if event.fragment == routers["fragment"]]
        assert routers["distance"] == own[-1].router_distance
        assert routers["travel_mean"] == pytest.approx(np.mean([event.router_travel for event in own]))
    assert [point[1:] for point in mixture["router_curve"]] == [
        [event.router_distance, event.router_travel] for event in with_routers
    ]
    assert len(mixture["islands"]) == 2
    for own in mixture["islands"].values():
        assert 1 / EXPERTS <= own["expert_share_max"] <= 1 / ACTIVE
        assert own["adoptions"] > 2
        assert 0 < own["loss_after"] < 2 * own["loss_before"]
    assert json.loads(json.dumps(mixture)) == mixture


def test_routers_with_a_period_of_their_own_merge_as_much_more_often_and_the_tape_replays_to_the_bit() -> None:
    spec = of_two_islands(24, fragments=3, interval_steps=8, router_interval_steps=4, adoption="replace")
    sink = MemorySink()
    job = MultiplexedJob(spec, jax_trainer.create, transfer_steps=0.5, recorder=sink)
    for _ in job.run():
        pass
    tape = sink.tape(Header(spec.name, spec.policy()))
    merges = [record.event for record in tape.records if isinstance(record.event, MergeCompleted)]
    with_routers = {event.fragment for event in merges if event.router_distance is not None}
    assert with_routers == {2}, "routers are in a fragment of their own, and in no other"
    *others, of_routers = job.outcome.statistics["merges_per_fragment"]
    assert max(others) <= 4, "3 intervals, and what is left at the end"
    assert of_routers >= 2 * min(others)
    assert replay(tape).exact
    match = train_tape.match(tape, spec)
    again = TapeTraining(match.spec, match.trace, jax_trainer.create)
    for _ in again.run():
        pass
    assert again.trained.as_recorded_count == len(merges)
    assert again.trained.digest == job.outcome.digest
    with pytest.raises(InvalidJobSpec, match="router_interval_steps"):
        train_tape.match(tape, parse_job({**spec.model_dump(mode="json"), "synchroniser": without_routers(spec)}))


def without_routers(spec: JobSpec) -> dict[str, Any]:
    return {**spec.synchroniser.model_dump(mode="json"), "router_interval_steps": None}


def test_tapes_of_models_without_experts_are_as_they_were() -> None:
    merged = MergeCompleted(1.0, 0, 1, "d", 0.1)  # type: ignore[arg-type]
    report = IslandReported(1.0, "east", 1, Progress(1, 1, 10, 1.0, 0.1, 0.1, 3.0))  # type: ignore[arg-type]
    assert "router" not in to_json(merged)
    assert "router" not in encode_header(Header("job", policy := sample_policy()))
    assert decode_header(encode_header(apart := Header("job", replace(policy, router_interval_steps=5)))) == apart
    assert "mixture" not in to_json(report)
