"""Runs of chaos plans as text in a terminal: a headline, the news since the last poll, a verdict.

Responsible for words and for the exit code of a verdict. Refuses to ask the service for more than how a run stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from api.commands.common import echo, print_json, say
from orchestrator.errors import InfrastructureError

if TYPE_CHECKING:
    from api.chaos.schemas import ChaosRun
    from api.client import Client
    from api.schemas import Job


class ChaosObserver:
    """Reads the run whenever the job is polled (``watch.Observer``), and returns what is new as a note."""

    def __init__(self, client: Client, begun: ChaosRun) -> None:
        self._client = client
        self._shown = begun.model_copy(update={"decisions": [], "state": "waiting"})  # it may have news already

    def __call__(self, _job: Job) -> str | None:
        before = self._shown
        try:
            self._shown = self._client.chaos_run(before.job, before.run)
        except InfrastructureError:
            return None  # the job is asked next, and says so
        return "; ".join(self.news(before, self._shown)) or None

    @staticmethod
    def news(before: ChaosRun, now: ChaosRun) -> list[str]:
        """Lines for what is in ``now`` and was not in ``before``."""
        news = lines(now)[len(before.decisions) : len(now.decisions)]
        if now.state != before.state and now.state in ("aborted", "stopped"):
            news.append(f"{now.state}: {now.reason}")
        return news


def conclude_verdict(verdict: Mapping[str, Any], page: Path | None, as_json: bool) -> None:
    """Print the verdict. Exit code 1 if it is a fail."""
    if as_json:
        print_json(verdict)
    else:
        for one in verdict["objectives"]:
            echo(f"{'held  ' if one['passed'] else 'FAILED'}  {one['objective']}  ({one['detail']})")
        for note in verdict["notes"]:
            echo(f"note    {note}")
        echo("passed" if verdict["passed"] else "failed")
    if page is not None:
        say(f"the verdict's page: {page}")
    if not verdict["passed"]:
        raise typer.Exit(1)


def headline(run: ChaosRun) -> str:
    reason = f" ({run.reason})" if run.reason else ""
    if run.next is None:
        coming = ""
    elif run.next.after_s is None:
        coming = "; it begins when enough islands train"
    else:
        coming = f"; next {run.next.told} at {run.next.after_s:.1f} s"
    done = f"{run.struck_count} of {run.fault_count} faults struck, {run.spared_count} spared"
    return f"{run.plan} against {run.job} is {run.state}{reason}: {done}{coming}"


def lines(run: ChaosRun) -> list[str]:
    """One line for the outcome of each fault."""
    return [
        f"{one.after_s:.1f} s: {one.told}" + (f" spared, {one.spared}" if one.spared else "") for one in run.decisions
    ]
