"""``atoll demo``: the whole of it on one machine, with a home of its own, leaving nothing behind but the run's folder.

    up ─▶ submit ─▶ live table ─▶ a third of the tokens: kill an island ─▶ … ─▶ the end ─▶ report ─▶ down

It uses only what users have: the kill is the request that ``atoll kill`` makes. Whatever happens, Ctrl-C included,
everything that it started is ended.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from api.client import Client
from api.installation.home import CONFIGS
from api.installation.up import Installation, Say, end, start
from api.schemas import Job
from api.terminal.watch import lines_that_matter, watch
from orchestrator.errors import AtollError, Conflict, NotFound
from orchestrator.specification.config import read_job_document
from orchestrator.system import signals
from orchestrator.system.run_folder import REPORT_PAGE

KILL_AT_RATIO = 1 / 3
REPORT_TIMEOUT_S = 60.0


def run_demo(wanted: Installation, spec: Path | None, island: str, console: Console, say: Say) -> int:
    """Run the demo and return its exit code.

    1 if the job did not complete or has no report; 128 plus the number of the signal that ended it.
    """
    document = read_job_document(spec or CONFIGS / "demo.yaml")
    with signals.as_exceptions(), wanted.home.locked_for_change("demo"):
        return _run_demo(wanted, document, island, console, say)


def _run_demo(wanted: Installation, document: dict[str, Any], island: str, console: Console, say: Say) -> int:
    try:
        start(wanted, say)
        with Client.at(wanted.home.path) as client:
            job = client.submit(document)
            say(f"submitted {job.job}: {job.island_count} islands, {job.token_budget:,} tokens")
            ended = watch(client, job.job, console, DemoKill(client, island))
            say(f"{ended.job} {ended.state}{f': {ended.reason}' if ended.reason else ''}")
            report = wait_for_report(client, ended)
    except KeyboardInterrupt:
        say("interrupted; stopping what was started")
        return signals.SIGNALLED + signal.SIGINT
    except SystemExit as by_signal:
        say("interrupted; stopping what was started")
        return int(by_signal.code or 0)
    finally:
        with signals.ignored():
            end(wanted.home, say)
    for text in lines_that_matter(report):
        console.print(text, highlight=False, soft_wrap=True)
    page = Path(ended.run_dir) / REPORT_PAGE
    console.print(f"report    {page if page.is_file() else page.with_suffix('.json')}", highlight=False, soft_wrap=True)
    return 0 if ended.state == "completed" and page.is_file() else 1


class DemoKill:
    """Kills one island, once, when a third of the tokens are trained and the island is training."""

    def __init__(self, client: Client, island: str) -> None:
        self._client = client
        self._island = island
        self._done = False

    def __call__(self, job: Job) -> str | None:
        if self._done or job.state.final or job.tokens_trained < KILL_AT_RATIO * job.token_budget:
            return None
        if not any(island.island == self._island and island.state == "training" for island in job.islands):
            return None
        self._done = True
        try:
            self._client.kill(job.job, self._island)
        except AtollError as error:
            return f"{self._island} could not be killed: {error}"
        return f"killed {self._island} (SIGKILL, as by `atoll kill {job.job} {self._island}`); the others keep training"


def wait_for_report(client: Client, job: Job) -> dict[str, object]:
    """Return the report of the ended job, waiting for it. Raises the service's error after ``REPORT_TIMEOUT_S``."""
    deadline = time.monotonic() + REPORT_TIMEOUT_S
    while True:
        try:
            return client.report(job.job)
        except (NotFound, Conflict):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
