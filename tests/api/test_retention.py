"""Ended jobs are removed by age and room as the settings say; what still matters to somebody stays."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api.clocks import Ages
from api.jobs.job_list import DAY_S, EndedJob, JobList, Retainer, due
from api.jobs.service import Service
from api.schemas import JobState
from api.storage.store import Store
from orchestrator.system.run_folder import STATUS, Retention
from tests.api.clockwork import connect
from tests.api.installation import Installation
from tests.waiting import wait_until

COMPLETED, CANCELLED, FAILED = JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED


def ended(job: str, days: float, size: int = 10, state: JobState = COMPLETED, needed_by: str = "") -> EndedJob:
    return EndedJob(job, state, days * DAY_S, size, needed_by)


def removed(jobs: list[EndedJob], retention: Retention) -> list[str]:
    return [job.job for job, _ in due(jobs, retention)]


def test_without_settings_nothing_is_removed() -> None:
    assert not removed([ended("a", 1e4, 10**12), ended("b", 1e4, state=FAILED)], Retention())
    assert not Retention().removes


def test_the_old_go_oldest_first_and_failed_ones_by_their_own_limit() -> None:
    jobs = [ended("new", 6.9), ended("old", 7.1), ended("older", 30, state=CANCELLED), ended("bad", 400, state=FAILED)]
    assert removed(jobs, Retention(days=7)) == ["older", "old"]
    assert removed(jobs, Retention(failed_days=90)) == ["bad"]


def test_for_room_the_oldest_go_until_the_rest_fits_and_no_failed_one() -> None:
    jobs = [ended("a", 4, 50), ended("b", 3, 30), ended("bad", 9, 40, FAILED), ended("c", 2, 20), ended("d", 1, 10)]
    assert removed(jobs, Retention(bytes=150)) == []
    assert removed(jobs, Retention(bytes=149)) == ["a"]
    assert removed(jobs, Retention(bytes=99)) == ["a", "b"]
    assert removed(jobs, Retention(bytes=1)) == ["a", "b", "c", "d"]


def test_what_another_job_needs_stays_and_counts() -> None:
    jobs = [ended("source", 99, 50, needed_by="next"), ended("b", 3, 30), ended("c", 2, 20)]
    assert removed(jobs, Retention(days=1, bytes=1)) == ["b", "c"]


@given(
    st.lists(
        st.tuples(
            st.floats(0, 100), st.integers(0, 100), st.sampled_from([COMPLETED, CANCELLED, FAILED]), st.booleans()
        ),
        max_size=12,
    ),
    st.none() | st.floats(0.1, 100),
    st.none() | st.floats(0.1, 100),
    st.none() | st.integers(1, 600),
)
@example([(0.0, 0, COMPLETED, False), (0.0, 2, COMPLETED, False)], None, None, 1)
def test_never_too_much_and_never_too_little_is_removed(
    facts: list[tuple[float, int, JobState, bool]], days: float | None, failed_days: float | None, size: int | None
) -> None:
    jobs = [ended(str(n), age, b, state, "next" if needed else "") for n, (age, b, state, needed) in enumerate(facts)]
    gone = set(removed(jobs, Retention(days, failed_days, size)))
    left = [job for job in jobs if job.job not in gone]
    for job in jobs:
        limit = failed_days if job.state is FAILED else days
        too_old = limit is not None and job.age_s > limit * DAY_S
        assert not (job.needed_by and job.job in gone)
        assert not (too_old and not job.needed_by and job.job not in gone)
        assert not (job.state is FAILED and job.job in gone and not too_old)
    if size is not None and sum(job.bytes for job in left) > size:
        assert all(job.needed_by or job.state is FAILED for job in left)
    for_room = [job for job in jobs if job.job in gone and not (days is not None and job.age_s > days * DAY_S)]
    for_room = [job for job in for_room if job.state is not FAILED]
    if for_room:
        assert size is not None
        last = max(for_room, key=lambda job: (-job.age_s, job.job))
        assert sum(job.bytes for job in left) + last.bytes > size


class Desk:
    """A service with two ended jobs and one that runs, without HTTP."""

    def __init__(self, folder: Path) -> None:
        self.installation = Installation(folder)
        self.store = Store(f"sqlite:///{folder / 'service.sqlite'}")
        self.control, self.runs = connect(folder), folder / "runs"
        self.service = Service(self.control, self.store, self.runs)
        self.jobs = [self.submit(steps=12), self.submit(steps=12)]
        for job, days in zip(self.jobs, (40, 2), strict=True):
            wait_until(lambda job=job: self.service.job(job).state.final)
            ended_at = time.time() - days * DAY_S
            os.utime(Path(self.service.job(job).run_dir) / STATUS, (ended_at, ended_at))
        self.running = self.submit(steps=20_000)

    def submit(self, **changes: object) -> str:
        return self.service.submit(self.installation.spec(**changes), "me", None).job  # type: ignore[arg-type]

    def retainer(self, **limits: float) -> Retainer:
        return Retainer(self.store, self.job_list(), Retention(**limits))  # type: ignore[arg-type]

    def job_list(self) -> JobList:
        return JobList(self.service, self.store, self.control, self.runs)

    def there(self) -> list[str]:
        return sorted(row.job for row in self.store.jobs())


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    opened = Desk(tmp_path)
    yield opened
    opened.store.close()


def test_a_round_removes_what_the_dry_run_showed_and_no_living_job(desk: Desk) -> None:
    retainer, (old, new) = desk.retainer(days=30), desk.jobs
    plan = retainer.plan()
    assert [(one.job, one.state) for one in plan.removals] == [(old, COMPLETED)]
    assert plan.removals[0].ended_days == pytest.approx(40, abs=0.1)
    assert (plan.ended_count, plan.ended_bytes > plan.removals[0].bytes > 0) == (2, True)
    assert {one.job for one in retainer.plan(Retention(days=1)).removals} == {old, new}
    assert desk.there() == sorted([old, new, desk.running])
    folder = Path(desk.service.job(old).run_dir)
    retainer.round()
    assert not folder.exists()
    assert desk.there() == sorted([new, desk.running])
    desk.retainer(days=0.001, failed_days=0.001, bytes=1).round()
    assert desk.there() == [desk.running]


def test_a_job_whose_files_another_uses_stays_until_that_ends(desk: Desk) -> None:
    old, _ = desk.jobs
    row = desk.store.job(desk.running)
    assert row is not None
    source = f"{desk.service.job(old).run_dir}/checkpoints/3"
    desk.store.update_job(desk.running, spec={**row.spec, "resume": {"checkpoint": source}})
    retainer = desk.retainer(days=30)
    assert retainer.plan().kept_for_others == [old]
    retainer.round()
    assert old in desk.there()


def test_a_clock_that_is_set_forward_makes_no_job_old(desk: Desk) -> None:
    now = [time.time()]
    retainer = Retainer(desk.store, desk.job_list(), Retention(days=30), Ages(wall=lambda: now[0]))
    assert [one.job for one in retainer.plan().removals] == desk.jobs[:1]
    now[0] += 1000 * DAY_S
    assert [one.job for one in retainer.plan().removals] == desk.jobs[:1]


def test_the_command_shows_what_would_go_and_up_takes_the_settings(cold: Installation) -> None:
    cold.up("--retention-days", "30", "--retention-bytes", "200GiB")
    assert "completed and cancelled jobs 30 days after their end, the oldest beyond 214,748,364,800" in cold.atoll(
        "retention"
    )
    with cold.client() as client:
        job = client.submit(cold.spec(steps=12)).job
        wait_until(lambda: client.job(job).report_ready)
        plan = json.loads(cold.atoll("retention", "--retention-bytes", "1K", "--json"))
        assert [one["job"] for one in plan["removals"]] == [job]
        assert f"remove   {job}" in cold.atoll("retention", "--retention-bytes", "1K")
        assert client.job(job).report_ready


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--retention-days", "0", "--retention-days is 0"),
        ("--retention-days", "-3", "--retention-days is -3"),
        ("--retention-failed-days", "nan", "--retention-failed-days is nan"),
        ("--retention-bytes", "lots", "is not an amount of bytes"),
    ],
)
def test_a_senseless_limit_is_refused_before_anything_starts(
    cold: Installation, option: str, value: str, said: str
) -> None:
    assert said in cold.atoll("up", "--runs", str(cold.runs), "--control", "none:none", option, value, code=2)
