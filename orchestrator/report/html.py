"""A job's report as one self-contained page.

Takes what ``accounting.report.build`` made (or what report.json holds) and refuses to know anything else: no script, no
network, no plotting library. Names that users chose are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from orchestrator.report.charts import goodput_chart, loss_chart, merges_chart, parts_bar, timeline_chart
from orchestrator.report.style import CSS
from orchestrator.report.words import count, loss, percent, seconds

Report = Mapping[str, Any]
_PARTS = ("detect", "place", "start", "connect", "transfer", "first_merge")
_WHY = {
    "everyone_in": "everyone was in",
    "grace_over": "the grace window was over",
    "no_grace_left": "no slack was left to wait in",
    "final_flush": "the job was ending",
}


def render(report: Report) -> str:
    """The page, as text to be written in UTF-8."""
    title = escape(f"{report.get('name') or 'job'} · atoll")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{CSS}</style></head><body><main>"
        f"{_header(report)}{_tiles(report)}"
        '<div class="grid">'
        + _card("Loss", "Held-out loss of the merged parameters, as training went on.", loss_chart(report))
        + _card("Where island time went", _goodput_words(report), goodput_chart(report))
        + _card("Islands over time", "× lost   ○ its work is in a merge again", timeline_chart(report))
        + _card("Merges per fragment", _merges_words(report), merges_chart(report))
        + _card("Why rounds closed", _grace_words(report), _reasons(report))
        + _card("Contributions refused", "Each refusal is a decision with a reason; nothing failed.", _refusals(report))
        + _card("Recoveries", _recovery_words(report), _recoveries(report), wide=True)
        + _card("Islands", "Each with its own data and inner optimizer.", _islands(report), wide=True)
        + f"</div>{_footer(report)}</main></body></html>\n"
    )


def _header(report: Report) -> str:
    outcome = report.get("outcome") or "running"
    bad = "" if outcome in ("completed", "running") else " bad"
    regions = sorted({island["region"] for island in report["islands"].values()})
    where = f"{len(report['islands'])} islands in {len(regions)} regions ({', '.join(regions)})"
    size = f", {count(report['parameter_count'])} parameters" if report.get("parameter_count") else ""
    return (
        f'<header><p class="eyebrow">atoll · training report</p>'
        f'<h1>{escape(report.get("name") or "job")}<span class="badge{bad}">{escape(outcome)}</span></h1>'
        f'<p class="lead">{escape(where)}{size}, {seconds(report["duration_s"])}. {escape(_sentence(report.get("reason")))}'
        "</p></header>"
    )


def _tiles(report: Report) -> str:
    unigram = report.get("loss_unigram")
    against = f"a model without context has {loss(unigram)}" if unigram else "nats per token, held out"
    merged, trained = report["tokens_merged"], report["tokens_trained"]
    worth = f"{count(merged)} of {count(trained)} tokens trained are in the result"
    recovery = report.get("recovery_s")
    if recovery:
        parts = {name: recovery[name] for name in _PARTS}
        back = _tile(f"Recovery of {recovery['island']}", seconds(recovery["total"]), _parts_words(parts), parts)
    else:
        gap = report.get("survivor_gap_max_s")
        back = _tile("Recovery", "none needed", f"longest gap between two steps: {seconds(gap)}")
    return (
        '<div class="tiles">'
        + _tile("Final loss", loss(report["loss_final"]), against)
        + _tile("Goodput", percent(report["goodput_ratio"]), worth)
        + back
        + "</div>"
    )


def _tile(what: str, figure: str, note: str, parts: Mapping[str, float] | None = None) -> str:
    bar = parts_bar(parts) if parts else ""
    return (
        f'<div class="card tile"><div class="what">{escape(what)}</div><div class="figure">{escape(figure)}</div>'
        f'{bar}<div class="note">{escape(note)}</div></div>'
    )


def _card(title: str, sub: str, body: str, *, wide: bool = False) -> str:
    kind = "card wide" if wide else "card"
    return f'<section class="{kind}"><h2>{escape(title)}</h2><p class="sub">{escape(sub)}</p>{body}</section>'


# ── sentences ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _sentence(words: str | None) -> str:
    return f"{words[0].upper()}{words[1:]}." if words else ""


def _parts_words(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {seconds(value)}" for name, value in parts.items())


def _goodput_words(report: Report) -> str:
    total, uptime = report["island_seconds"]["total"], report["uptime_ratio"]
    quorum = report["policy"]["quorum"]
    at_least = "an island was" if quorum == 1 else f"{quorum} islands were"
    return f"{seconds(total)} of island time; {at_least} training {percent(uptime)} of the time."


def _merges_words(report: Report) -> str:
    return f"{report['merges']} merges, {report['contributors_mean']:.2f} islands in each on average."


def _grace_words(report: Report) -> str:
    waited, merged = seconds(report["grace_used_mean_s"]), seconds(report["merge_seconds_mean"])
    return f"Waited {waited} after quorum and merged in {merged} on average."


def _recovery_words(report: Report) -> str:
    gap, step = report.get("survivor_gap_max_s"), report.get("survivor_step_time_median_s")
    if gap is None:
        return "No island trained undisturbed from beginning to end."
    return f"Survivors' longest gap between two steps was {seconds(gap)}, their median step takes {seconds(step)}."


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> str:
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    if not body:
        return f'<p class="nothing">{escape(empty)}</p>'
    named = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="scroll"><table><thead><tr>{named}</tr></thead><tbody>{body}</tbody></table></div>'


def _reasons(report: Report) -> str:
    rows = (
        (
            escape(_WHY.get(row["reason"], row["reason"])),
            str(row["merges"]),
            f"{row['contributors_mean']:.2f}",
            seconds(row["waited_mean_s"]),
            seconds(row["waited_max_s"]),
        )
        for row in report["close_reasons"]
    )
    head = ("because", "merges", "islands", "waited", "longest")
    return _table(head, rows, "No round has closed.")


def _refusals(report: Report) -> str:
    rows = [(escape(reason.replace("_", " ")), str(times)) for reason, times in report["refusals"].items()]
    return _table(("because", "times"), rows, "No contribution was refused.")


def _recoveries(report: Report) -> str:
    rows = (
        (
            escape(recovery["island"]),
            seconds(recovery["killed_at"]),
            *(seconds(recovery["parts"].get(part)) for part in _PARTS),
            f"<b>{seconds(recovery['total'])}</b>" if recovery["complete"] else "not back",
        )
        for recovery in report["recoveries"]
    )
    head = ("island", "at", *(part.replace("_", " ") for part in _PARTS), "total")
    return _table(head, rows, "No island was lost.")


def _islands(report: Report) -> str:
    rows = (
        (
            escape(name),
            escape(island["region"]),
            count(island["tokens"]["trained"]),
            percent(island["tokens"]["merged"] / island["tokens"]["trained"]) if island["tokens"]["trained"] else "–",
            str(island["merges"]),
            seconds(island["step_time_median_s"]),
            seconds(island["gap_max_s"]),
            percent(island["seconds"]["productive"] / (sum(island["seconds"].values()) or 1.0)),
        )
        for name, island in report["islands"].items()
    )
    head = ("island", "region", "tokens trained", "of them merged", "merges", "step", "longest gap", "goodput")
    return _table(head, rows, "The job has no islands.")


def _footer(report: Report) -> str:
    policy = report["policy"]
    cap = policy["grace_cap_steps"]
    grace = "until everyone is in" if cap is None else f"up to {cap:g} steps of grace"
    return (
        f"<footer>{policy['fragments']} fragments, each synchronised every {policy['interval_steps']} steps and "
        f"overlapped by {policy['overlap_steps']}; quorum {policy['quorum']} of {policy['islands']}, {grace}. "
        "A token counts as merged once a version of the parameters contains it. "
        f"Job {escape(str(report.get('job_id') or '–'))}.</footer>"
    )
