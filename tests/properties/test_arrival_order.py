"""In which order contributions arrive inside one window never changes what is merged, nor with which weights."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import CaughtUp, Ready
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import Contribution, payload_id
from orchestrator.simulation.plan import sample_policy
from tests.harness.job import Job

ISLANDS, DUE = 5, 12


def _training(quorum):
    """A job whose islands all train."""
    policy = sample_policy(ISLANDS, quorum=quorum, fragment_count=1, interval=DUE, grace_cap_steps=None)
    job = Job(Synchroniser(policy))
    job.tell(e.JobStarted(0.0))
    job.tell(e.OuterStateSeeded(0.0, 10, "d"))
    for plan in policy.islands:
        job.tell(e.IslandPlaced(0.1, plan.island, 1, "node", 7))
        job.tell(e.IslandReported(0.2, plan.island, 1, Ready(1, 0.1)))
        job.tell(e.IslandReported(0.3, plan.island, 1, CaughtUp(None, (0,), 0, 0.1)))
    return job, [plan.island for plan in policy.islands]


@st.composite
def windows(draw):
    """Work of each island (steps, tokens), a first and a second order of arrival, who offers twice, and the quorum."""
    work = draw(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 10_000)), min_size=ISLANDS, max_size=ISLANDS))
    first, second = (draw(st.permutations(range(ISLANDS))) for _ in range(2))
    repeated = draw(st.sets(st.integers(0, ISLANDS - 1)))
    return work, first, second, repeated, draw(st.integers(1, ISLANDS))


def _merge_of(work, order, repeated, quorum):
    job, islands = _training(quorum)
    merges = []
    for n, index in enumerate(order):
        steps, tokens = work[index]
        c = Contribution(
            payload_id(islands[index], 1, 0, 1), islands[index], 1, 0, 1, DUE + steps, 0, steps, tokens, tokens
        )
        for again in range(2 if index in repeated else 1):
            effects = job.tell(e.ContributionArrived(1.0 + n / 100 + again / 1000, c))
            merges += [x for x in effects if isinstance(x, f.MergeFragment)]
    (merge,) = merges
    return merge


@settings(max_examples=200, deadline=None, derandomize=True)
@given(windows())
def test_the_order_of_arrival_changes_nothing(window):
    work, first, second, repeated, quorum = window
    one, other = _merge_of(work, first, repeated, quorum), _merge_of(work, second, set(), quorum)
    assert (one.inputs, one.version, one.step) == (other.inputs, other.version, other.step)
    quality = [tokens * tokens / steps for steps, tokens in work]
    expected = {f"{name}": q / sum(quality) for name, q in zip(_training(1)[1], quality, strict=True)}
    assert all(abs(item.weight - expected[item.island]) < 1e-9 for item in one.inputs)
