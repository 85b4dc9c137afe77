from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.channel.jobs import Job


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    job = Job(tls=request.param)
    yield job
    job.close()


@pytest.fixture
def secured() -> Iterator[Job]:
    job = Job(tls=True)
    yield job
    job.close()


@pytest.fixture
def plain() -> Iterator[Job]:
    job = Job(tls=False)
    yield job
    job.close()
