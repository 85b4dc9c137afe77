"""Renders the verdict on a chaos plan as one self-contained HTML page.

The input is the verdict of ``chaos.runner`` as plain data and the report of the job. This module draws the verdict and
does not judge anything itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from orchestrator.report.page import card, cards, document, goodput_chart, header, table, tile, tiles, timeline_chart
from orchestrator.system.plain import percent, seconds

Plain = Mapping[str, Any]


def render(verdict: Plain, report: Plain, plan_text: str) -> str:
    """Return the page, to be written as UTF-8. ``plan_text`` is the plan as the user wrote it."""
    title = f"{verdict['plan']} on {verdict['job'] or 'a job'}"
    outcome = "passed" if verdict["passed"] else "failed"
    body = (
        header("atoll · chaos verdict", title, outcome, _lead(verdict, report), bad=not verdict["passed"])
        + _tiles(verdict, report)
        + cards(
            card("Objectives", "What had to hold in spite of the faults.", _objectives(verdict), wide=True),
            card("Islands over time", "× lost   ○ first contribution merged after recovery", timeline_chart(report)),
            card("Where island time went", "All islands, from the first placement to the end.", goodput_chart(report)),
            card("Faults", "Each planned fault and its outcome.", _faults(verdict), wide=True),
            *_notes(verdict),
            card("The plan", "As written.", f'<div class="scroll"><pre>{escape(plan_text)}</pre></div>', wide=True),
        )
    )
    return document(f"{outcome}: {title} · atoll", body)


def _lead(verdict: Plain, report: Plain) -> str:
    failed = [one for one in verdict["objectives"] if not one["passed"]]
    result = "Every objective held." if not failed else f"{failed[0]['objective']} did not hold: {failed[0]['detail']}."
    return f"{len(report['islands'])} islands, {seconds(report['duration_s'])}, seed {verdict['seed']}. {result}"


def _tiles(verdict: Plain, report: Plain) -> str:
    held = sum(one["passed"] for one in verdict["objectives"])
    injected = sum(not fault["spared"] for fault in verdict["faults"])
    longest = report.get("bystander_gap")
    where = f"on {longest['island']} at {seconds(longest['at'])}" if longest else "no bystander reported"
    return tiles(
        tile("Objectives", f"{held} of {len(verdict['objectives'])}", "held"),
        tile("Faults", str(injected), f"injected, {len(verdict['faults']) - injected} skipped"),
        tile("Bystanders' longest gap", seconds(report.get("bystander_gap_max_s")), where),
        tile("Goodput", percent(report["goodput_ratio"]), "of island time is in a merge"),
    )


def _objectives(verdict: Plain) -> str:
    rows = (
        (
            escape(one["objective"]),
            "held" if one["passed"] else '<b class="bad">failed</b>',
            _figure(one["value"]),
            _figure(one["limit"]),
            seconds(one["at"]),
            escape(one["detail"]),
        )
        for one in verdict["objectives"]
    )
    head = ("objective", "outcome", "value", "limit", "at", "detail")
    return table(head, rows, "The plan has no objectives.", words=(5,))


def _faults(verdict: Plain) -> str:
    rows = (
        (
            escape(fault["island"] or "–"),
            escape(_kind(fault)),
            seconds(fault["duration"]) if fault["duration"] else "–",
            seconds(fault["planned_at"]),
            seconds(fault["at"]),
            escape(f"skipped: {fault['spared']}" if fault["spared"] else "injected"),
        )
        for fault in verdict["faults"]
    )
    head = ("island", "fault", "duration", "planned", "job time", "outcome")
    return table(head, rows, "No fault was injected.", words=(5,))


def _kind(fault: Plain) -> str:
    """Return the fault's kind with its parameters other than the duration."""
    size = f", {fault['payloads']} payloads" if fault.get("payloads") else ""
    where = f", host {fault['host']}" if fault.get("host") is not None else ""
    kind: str = fault["kind"]
    return kind + where + size + (f", {fault['bytes_per_second']:g} bytes/s" if fault.get("bytes_per_second") else "")


def _notes(verdict: Plain) -> list[str]:
    notes = verdict.get("notes", ())
    listed = "".join(f"<p>{escape(note)}.</p>" for note in notes)
    return [card("What this run does not show", "", listed, wide=True)] if notes else []


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
