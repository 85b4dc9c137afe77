"""The end of a job whose islands train."""

from __future__ import annotations

import pytest

from orchestrator.core import commands
from tests.ray.jobs import Job, gone

pytestmark = pytest.mark.ray


def test_a_cancelled_job_ends_at_once_and_its_processes_with_it(last_job: Job) -> None:
    job = last_job
    pid = job.island("asia")["pid"]
    command = job.command(commands.Cancel())
    status = job.wait_for_end()
    assert status["view"]["outcome"] == "cancelled"
    assert status["commands"][command]["accepted"] is True
    job.wait_until(lambda: gone(pid), "the island's process ending")
