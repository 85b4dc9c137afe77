"""A job's report as one self-contained page.

Takes what ``accounting.report.build`` made (or what report.json holds) and refuses to know anything else: no script, no
network, no plotting library. Names that users chose are escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from orchestrator.core.vocabulary import CloseReason
from orchestrator.report.charts import goodput_chart, loss_chart, merges_chart, timeline_chart
from orchestrator.report.page import card, cards, document, header, table, tile, tiles
from orchestrator.report.words import count, loss, percent, plural, seconds

Report = Mapping[str, Any]
REGIONS_NAMED_MAX = 8
"""Of more the number is enough: each island's is in its row."""
_PARTS = ("detect", "place", "start", "connect", "transfer", "first_merge")
_BECAUSE = {reason.value: reason.words for reason in CloseReason}


def render(report: Report) -> str:
    """The page, as text to be written in UTF-8."""
    body = (
        _header(report)
        + _tiles(report)
        + cards(
            card("Loss", "Held-out loss of the merged parameters, as training went on.", loss_chart(report)),
            card("Where island time went", _goodput_words(report), goodput_chart(report)),
            card("Islands over time", "× lost   ○ its work is in a merge again", timeline_chart(report)),
            card("Merges per fragment", _merges_words(report), merges_chart(report)),
            card("Why rounds closed", _grace_words(report), _reasons(report)),
            card(
                "Contributions refused", "Each refusal is a decision with a reason; nothing failed.", _refusals(report)
            ),
            card("Recoveries", _recovery_words(report), _recoveries(report), wide=True),
            card("Islands", "Each with its own data and inner optimizer.", _islands(report), wide=True),
            *_wire_cards(report),
            *_warning_cards(report),
        )
        + _footer(report)
    )
    return document(f"{report.get('name') or 'job'} · atoll", body)


def _header(report: Report) -> str:
    outcome = report.get("outcome") or "running"
    islands = {name: island for name, island in report["islands"].items() if not island.get("spare")}
    regions = sorted({island["region"] for island in islands.values()})
    spares = len(report["islands"]) - len(islands)
    named = f" ({', '.join(regions)})" if len(regions) <= REGIONS_NAMED_MAX else ""
    where = f"{plural(len(islands), 'island')} in {plural(len(regions), 'region')}{named}"
    where += f" and {plural(spares, 'spare')}" if spares else ""
    size = f", {count(report['parameter_count'])} parameters" if report.get("parameter_count") else ""
    lead = f"{where}{size}, {seconds(report['duration_s'])}. {_sentence(report.get('reason'))}"
    bad = outcome not in ("completed", "running")
    return header("atoll · training report", report.get("name") or "job", outcome, lead, bad=bad)


def _tiles(report: Report) -> str:
    unigram = report.get("loss_unigram")
    against = f"a model without context has {loss(unigram)}" if unigram else "nats per token, held out"
    if (initial := report.get("loss_initial")) is not None:
        against += f"; {loss(initial)} at the start"
    evaluations = report.get("evaluations") or {}
    if (bits := evaluations.get("bits_per_byte")) is not None:
        against += f"; {bits:.3f} bits per byte"
    against += "".join(f"; {one['source']} {loss(one['loss'])}" for one in evaluations.get("sources") or ())
    if flaws := (report.get("data_flaws") or {}).get("remark"):
        against += f"; of the text, {flaws}"
    merged, trained = report["tokens_merged"], report["tokens_trained"]
    worth = f"{count(merged)} of {count(trained)} tokens trained are in the result"
    recovery = report.get("recovery_s")
    if recovery:
        parts = {name: recovery[name] for name in _PARTS}
        back = tile(f"Recovery of {recovery['island']}", seconds(recovery["total"]), _parts_words(parts), parts)
    else:
        gap = report.get("survivor_gap_max_s")
        back = tile("Recovery", "none needed", f"longest gap between two steps: {seconds(gap)}")
    return tiles(
        tile("Final loss", loss(report["loss_final"]), against),
        tile("Goodput", percent(report["goodput_ratio"]), worth),
        back,
    )


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


def _reasons(report: Report) -> str:
    rows = (
        (
            escape(_BECAUSE.get(row["reason"], row["reason"])),
            str(row["merges"]),
            f"{row['contributors_mean']:.2f}",
            seconds(row["waited_mean_s"]),
            seconds(row["waited_max_s"]),
        )
        for row in report["close_reasons"]
    )
    head = ("because", "merges", "islands", "waited", "longest")
    return table(head, rows, "No round has closed.")


def _refusals(report: Report) -> str:
    rows = [(escape(reason.replace("_", " ")), str(times)) for reason, times in report["refusals"].items()]
    return table(("because", "times"), rows, "No contribution was refused.")


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
    return table(head, rows, "No island was lost.")


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
            "spare" if island.get("spare") else percent(_productive(island["seconds"])),
        )
        for name, island in report["islands"].items()
    )
    head = ("island", "region", "tokens trained", "of them merged", "merges", "step", "longest gap", "goodput")
    return table(head, rows, "The job has no islands.")


def _productive(spent: Mapping[str, float]) -> float:
    return spent["productive"] / (sum(spent.values()) or 1.0)


def _wire_cards(report: Report) -> list[str]:
    """What lines carried and what codecs owe; nothing of jobs that do not say it: simulated ones, and earlier builds'."""
    lines, norms = report.get("lines", {}).get("islands", {}), report.get("fragment_norms", [])
    shown = []
    if lines:
        shown.append(card("Lines", _wire_words(report), _lines(lines, report["islands"]), wide=True))
    if norms:
        words = "What the last outer step changed, and how much of that the codec of updates still owed."
        shown.append(card("Fragments", words, _norms(norms)))
    return shown


def _warning_cards(report: Report) -> list[str]:
    """What of the specification was probably a mistake."""
    rows = [(escape(one["path"]), escape(one["message"]), escape(one["remedy"])) for one in report.get("warnings", [])]
    if not rows:
        return []
    words = "What the specification allows, and is most likely not meant."
    return [card("Warnings", words, table(("field", "value", "remedy"), rows, ""), wide=True)]


def _wire_words(report: Report) -> str:
    wire = report["wire"]
    return (
        f"Contributions travelled in {escape(wire['up'])}, updates in {escape(wire['down'])}. "
        "Counted since the synchroniser last began."
    )


def _lines(lines: Mapping[str, Any], islands: Mapping[str, Any]) -> str:
    rows = (
        (
            escape(name),
            escape(islands[name]["region"] if name in islands else "–"),
            _megabytes(line["up_bytes"]),
            *(_megabytes(line["down_bytes"][kind]) for kind in ("update", "values", "state")),
            seconds(line["up_busy_seconds"]),
            seconds(line["down_busy_seconds"]),
        )
        for name, line in lines.items()
    )
    head = ("island", "region", "up", "updates", "values", "states", "busy up", "busy down")
    return table(head, rows, "Nothing was carried.")


def _norms(norms: Sequence[Mapping[str, Any]]) -> str:
    rows = (
        (
            str(own["fragment"]),
            str(own["version"]),
            f"{own['update_norm']:.3g}",
            percent(own["residue_norm"] / own["update_norm"]) if own["update_norm"] else "–",
        )
        for own in norms
    )
    return table(("fragment", "version", "update", "owed by the codec"), rows, "Nothing was merged.")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


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
