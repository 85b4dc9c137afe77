"""The queue's decision: properties over random fleets and jobs, held against a check that shares nothing with it."""

from __future__ import annotations

from math import fsum
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from api.jobs.dispatcher import QueuedJob, Resources, Wants, decide, wants_of
from orchestrator.specification.sections import IslandsSection
from orchestrator.status import NodeGroupRecord

NAMES = ("asia", "europe", "mars")
rooms = st.builds(Resources, st.integers(4, 16).map(lambda n: n / 4), st.integers(0, 2))
asked = st.builds(Resources, st.integers(1, 6).map(lambda n: n / 4), st.sampled_from((0, 0, 0, 1)))
wants = st.dictionaries(st.sampled_from(NAMES), asked, min_size=1, max_size=2)
"""Small beside what a group has, so that several fit and the next one does not."""


@st.composite
def queues(draw: st.DrawFn) -> list[QueuedJob]:
    drawn = draw(st.lists(st.tuples(st.integers(-2, 2), wants), max_size=8))
    return [QueuedJob(f"job-{n}", priority, n, asked) for n, (priority, asked) in enumerate(drawn)]


@st.composite
def fleets(draw: st.DrawFn) -> list[NodeGroupRecord]:
    away = draw(st.sampled_from((None, None, None, *NAMES)))
    return [group(name, draw(rooms)) for name in NAMES if name != away]


def group(name: str, room: Resources) -> NodeGroupRecord:
    cpus, accelerators = room.cpus, int(room.accelerators)
    return NodeGroupRecord(name=name, region=name, nodes=1, cpus=cpus, cpus_free=0.0, accelerators=accelerators)


def fits(together: list[Wants], groups: list[NodeGroupRecord]) -> bool:
    """Whether all of these have room beside each other."""
    has = {group["name"]: (group["cpus"], group["accelerators"]) for group in groups}
    for name in {name for wants in together for name in wants}:
        asked = [wants[name] for wants in together if name in wants]
        cpus, accelerators = has.get(name, (-1, -1))
        if fsum(room.cpus for room in asked) > cpus or sum(room.accelerators for room in asked) > accelerators:
            return False
    return True


@settings(max_examples=400)
@given(queues(), st.lists(wants, max_size=3), fleets(), st.integers(1, 9), st.randoms())
def test_whoever_is_first_starts_if_there_is_room_and_nobody_overtakes(
    queued: list[QueuedJob], running: list[Wants], groups: list[NodeGroupRecord], jobs_max: int, random: Random
) -> None:
    in_order = sorted(queued, key=lambda job: (-job.priority, job.number))
    shuffled = random.sample(queued, len(queued))
    decision = decide(shuffled, running, groups, jobs_max)
    assert [*decision.starts, *decision.waits] == [job.job for job in in_order], "each starts or waits, in order"
    count = len(decision.starts)
    assert all(decision.waits.values())
    # what was running may take more than a group that has lost nodes has; nobody new comes to such a group
    touched = {name for job in in_order[:count] for name in job.wants}
    beside = [{name: room for name, room in wants.items() if name in touched} for wants in running]
    assert fits([*beside, *(job.wants for job in in_order[:count])], groups)
    assert not count or len(running) + count <= jobs_max
    if decision.waits:
        first = in_order[count]
        beside = [{name: room for name, room in wants.items() if name in first.wants} for wants in running]
        started = [{name: room for name, room in job.wants.items() if name in first.wants} for job in in_order[:count]]
        full = len(running) + count >= jobs_max
        assert full or not fits([*beside, *started, first.wants], groups)
        assert decision.unschedulable == (not fits([first.wants], groups))


@given(queues(), fleets(), st.integers(1, 3), st.randoms())
def test_all_that_the_fleet_can_hold_start_once_and_in_order_while_jobs_come_and_end(
    coming: list[QueuedJob], groups: list[NodeGroupRecord], jobs_max: int, random: Random
) -> None:
    coming = [job for job in coming if fits([job.wants], groups)]
    queued: list[QueuedJob] = []
    running: dict[str, Wants] = {}
    started: list[str] = []
    while coming or queued:
        for _ in range(random.randint(0 if queued else 1, 2)):
            queued += [coming.pop(0)] if coming else []
        decision = decide(queued, list(running.values()), groups, jobs_max)
        for name in decision.starts:
            job = next(job for job in queued if job.job == name)
            queued.remove(job)
            ahead = [other.job for other in queued if (-other.priority, other.number) < (-job.priority, job.number)]
            assert not ahead, f"{name} overtook {ahead}"
            running[name] = job.wants
            started.append(name)
        assert decision.starts or running, "with nothing running the first in line fits"
        for name in random.sample(sorted(running), random.randint(1, len(running))):
            del running[name]
    assert len(started) == len(set(started))


def test_the_reason_names_what_is_lacking_and_who_holds_the_others_up() -> None:
    groups = [group("asia", Resources(4.0, 1)), group("europe", Resources(4.0))]
    large = QueuedJob("large", 0, 1, {"asia": Resources(3.0)})
    small = QueuedJob("small", 0, 2, {"europe": Resources(0.5)})
    waits = decide([large, small], [{"asia": Resources(2.0)}], groups, 9).waits
    why = "it asks for 3 cpus on asia, where running jobs leave 2 of 4"
    assert waits == {"large": why, "small": f"behind large: {why}"}
    gpu = QueuedJob("gpu", 0, 3, {"asia": Resources(1.0, 1)})
    assert "1 accelerators on asia" in decide([gpu], [{"asia": Resources(1.0, 1)}], groups, 9).waits["gpu"]
    assert "1 jobs are running" in decide([small], [{}], groups, 1).waits["small"]


def test_a_job_that_needs_more_than_the_fleet_has_left_is_unschedulable() -> None:
    job = QueuedJob("job", 0, 1, {"asia": Resources(3.0), "mars": Resources(1.0)})
    gone = decide([job], [], [group("asia", Resources(4.0))], 9)
    assert (gone.unschedulable, gone.waits["job"]) == (True, "node group mars has no nodes")
    less = decide([job], [], [group("asia", Resources(2.0)), group("mars", Resources(4.0))], 9)
    assert (less.unschedulable, less.waits["job"]) == (True, "it asks for 3 cpus on asia, which now has 2 in total")


def test_the_islands_of_a_group_are_added_up_and_tenths_of_a_cpu_do_not_spoil_it() -> None:
    third = IslandsSection(node_group="asia", cpus=0.1, accelerator="gpu", accelerators=1)
    asked = wants_of([third] * 3)
    assert asked["asia"].accelerators == 3
    assert asked["asia"].cpus != 0.3, "as floats are"
    assert decide([QueuedJob("job", 0, 1, asked)], [], [group("asia", Resources(0.3, 3))], 1).starts == ("job",)
