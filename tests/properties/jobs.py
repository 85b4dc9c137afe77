"""Strategies: whole simulated jobs with faults. One integer seed and a few settings name each of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan, sample_policy
from tests.simulation.random_faults import SILENCE_MAX_S, random_faults

FAULTS_UNTIL = 6.0
CALM_AT = FAULTS_UNTIL + SILENCE_MAX_S


@st.composite
def jobs(draw, calm=False):
    """(policy, plan, seed). With ``calm``, faults end at CALM_AT and the budget lasts well beyond."""
    count = draw(st.integers(1, 5), label="islands")
    adoption = draw(st.sampled_from(["replace", "rebase"]), label="adoption")
    policy = sample_policy(
        count,
        quorum=draw(st.integers(1, count), label="quorum"),
        fragment_count=draw(st.integers(1, 6), label="fragments"),
        interval=draw(st.integers(3, 16), label="interval"),
        steps=600 if calm else draw(st.integers(20, 150), label="steps"),
        # an island that keeps its work at an adoption may not have an older offer of it merged later
        staleness_max=draw(st.integers(0, 2), label="staleness") if adoption == "replace" else 0,
        grace_cap_steps=draw(st.sampled_from([None, 1.0, 3.0]), label="grace cap"),
        restarts_max=1000,
    )
    seed = draw(st.integers(0, 2**16), label="seed")
    probability = st.sampled_from([0.0, 0.0, 0.1, 0.3])
    plan = WorldPlan(
        step_s=tuple(draw(st.sampled_from([0.05, 0.05, 0.07, 0.12])) for _ in range(count)),
        adoption=adoption,
        faults=random_faults(seed, policy, FAULTS_UNTIL, draw(st.integers(0, 10), label="faults")),
        calm_at=CALM_AT,
        corrupt=draw(probability),
        duplicate=draw(probability),
        reorder=draw(probability),
        catch_up_failure=draw(probability),
        placement_failure=draw(probability),
        publication_loss=draw(probability),
    )
    return policy, plan, seed


@st.composite
def evacuated_jobs(draw):
    """(policy, plan, seed). All islands hear within one round that their nodes go; there is no other fault."""
    count = draw(st.integers(1, 5), label="islands")
    policy = sample_policy(
        count,
        quorum=draw(st.integers(1, count), label="quorum"),
        fragment_count=draw(st.integers(1, 6), label="fragments"),
        interval=draw(st.integers(3, 16), label="interval"),
        steps=300,
        grace_cap_steps=draw(st.sampled_from([None, 1.0, 3.0]), label="grace cap"),
    )
    step_s = tuple(draw(st.sampled_from([0.05, 0.05, 0.07, 0.12])) for _ in range(count))
    begun, round_s = draw(st.floats(2.5, 5.0), label="begun"), policy.sync_interval_steps * max(step_s)
    offsets = [draw(st.floats(0.0, round_s)) for _ in range(count)]
    faults = tuple(
        Fault(begun + offset, FaultKind.NOTICE, plan.island, 30.0)
        for offset, plan in zip(offsets, policy.islands, strict=True)
    )
    plan = WorldPlan(step_s=step_s, adoption="rebase", faults=faults, calm_at=CALM_AT)
    return replace(policy, leaving_closes=True), plan, draw(st.integers(0, 2**16), label="seed")
