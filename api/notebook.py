"""Jobs in a Jupyter notebook: submit, wait with a live table and plot, compare.

    sweep = Jobs.submit(demo | {"training": {"inner_optimizer": {"lr": lr}}} for lr in (5e-4, 1e-3, 2e-3))
    sweep.wait()
    sweep.compare()

What is drawn comes from the service's answers only, so another kernel can show the same jobs by name: ``Jobs(names)``.
Ending a cell, or the kernel, does not affect a job. Tables are HTML and plots are SVG, both made here: a notebook needs no
more than Jupyter. Without Jupyter everything works but the display.

``Rows`` is what ``api.client.Client.compare`` returns, a list of dictionaries, which also shows itself as a table.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Protocol, Self

from api.client import AWAY_MAX_S, Client
from api.schemas import Job, JobSummary
from orchestrator.errors import InfrastructureError
from orchestrator.report.simulated import Axis, Line, lines_chart
from orchestrator.system.plain import count, loss

REFRESH_S = 2.0
COLOURS = ("#0f8b7f", "#b5483f", "#5b74c4", "#d9904a", "#7a5fa8", "#3fa498", "#8a5a2b", "#566a73")
STYLE = "text-align:right;padding:2px 10px;white-space:nowrap"
_LIVE = ("job", "state", "progress", "tokens/s", "loss", "goodput", "left", "islands")


class Rows(list[dict[str, Any]]):
    """Rows of a comparison. A notebook shows them as a table, and ``pandas.DataFrame(rows)`` takes them as they are."""

    def _repr_html_(self) -> str:
        head = list(dict.fromkeys(name for row in self for name in row))
        return _table(head, [[_shown(row.get(name)) for name in head] for row in self])


class Jobs:
    """Some jobs, in the order in which they were named. ``client`` is that of the service of ``~/.atoll`` by default."""

    def __init__(self, jobs: Iterable[str | JobSummary], client: Client | None = None) -> None:
        self.names = [job if isinstance(job, str) else job.job for job in jobs]
        self._client = Client.at() if client is None else client

    @classmethod
    def submit(cls, documents: Iterable[Mapping[str, Any]], client: Client | None = None, *, priority: int = 0) -> Self:
        """Submit these job specifications. Jobs without room are queued.

        Raises InvalidJobSpec for the first one that the service refuses. Nothing is submitted then: all are checked before.
        """
        used = Client.at() if client is None else client
        documents = list(documents)
        for document in documents:
            used.check(document)
        return cls([used.submit(document, priority=priority) for document in documents], used)

    def now(self) -> list[Job]:
        """Return the jobs as they are now."""
        return [self._client.job(name) for name in self.names]

    def wait(self, refresh_s: float = REFRESH_S) -> list[Job]:
        """Show table and plot until all jobs have ended, and return these. An interrupt ends the waiting, not the jobs.

        Raises as ``Client.wait``: a service that restarts is waited for.
        """
        display, jobs, answered_at = _Display(), self.now(), time.monotonic()
        display.show(self._drawn(jobs))
        while not all(job.state.final for job in jobs):
            time.sleep(refresh_s)
            try:
                jobs, answered_at = self.now(), time.monotonic()
            except InfrastructureError:
                if time.monotonic() - answered_at > AWAY_MAX_S:
                    raise
                continue
            display.show(self._drawn(jobs))
        return jobs

    def compare(self) -> Rows:
        """Return a row for each job: the settings in which they differ beside loss, tokens and goodput."""
        return Rows(self._client.compare(self.names))

    def plot(self) -> Plot:
        """Return the held-out losses of all jobs over the tokens that they have trained."""
        return Plot(self.now())

    def _repr_html_(self) -> str:
        return self._drawn(self.now())

    def _drawn(self, jobs: Sequence[Job]) -> str:
        return _table(_LIVE, [_live(job) for job in jobs]) + Plot(jobs).svg


class Plot:
    """Curves of jobs, as a notebook shows them. ``svg`` is the drawing as a file."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        curves = {job.job: [(float(p.tokens), p.loss) for p in job.loss_curve if p.loss is not None] for job in jobs}
        self.curves = {name: points for name, points in curves.items() if points}
        self.svg = self._draw()

    def _repr_html_(self) -> str:
        return self.svg

    def _draw(self) -> str:
        every = [point for points in self.curves.values() for point in points]
        if not every:
            return "<p>No job has measured its held-out loss yet.</p>"
        lines = [
            Line(name, COLOURS[n % len(COLOURS)], points, dashes="5 4" if n >= len(COLOURS) else "")
            for n, (name, points) in enumerate(self.curves.items())
        ]
        low, high = min(value for _, value in every), max(value for _, value in every)
        margin = 0.05 * (high - low) or 0.5
        across = Axis("tokens trained", count, 0.0, max(tokens for tokens, _ in every) or 1.0)
        up = Axis("nats per token", loss, low - margin, high + margin)
        return lines_chart(lines, across, up, "Held-out loss")


def _live(job: Job) -> list[str]:
    pace = sum(island.tokens_per_second or 0.0 for island in job.islands)
    return [
        job.job,
        job.state.value,
        f"{min(1.0, job.tokens_trained / job.token_budget):.0%}" if job.token_budget else "–",
        f"{pace:,.0f}" if pace else "–",
        loss(job.loss),
        "–" if job.goodput_ratio is None else f"{job.goodput_ratio:.1%}",
        "–" if job.eta_s is None else f"{job.eta_s:,.0f} s",
        "–" if job.islands_training is None else f"{job.islands_training} of {job.island_count}",
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f'<th style="{STYLE}">{escape(name)}</th>' for name in head)
    cells = ("".join(f'<td style="{STYLE}">{escape(cell)}</td>' for cell in row) for row in rows)
    return (
        f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in cells)}</tbody></table>"
    )


class _Handle(Protocol):
    def update(self, shown: Any) -> None: ...


class _Display:
    """One place of a notebook's output, which each ``show`` replaces. Does nothing outside of Jupyter."""

    def __init__(self) -> None:
        self._handle: _Handle | None = None

    def show(self, html: str) -> None:
        try:
            from IPython import get_ipython
            from IPython.display import HTML, display
        except ImportError:
            return
        if get_ipython() is None:
            return
        if self._handle is None:
            self._handle = display(HTML(html), display_id=True)
        else:
            self._handle.update(HTML(html))
