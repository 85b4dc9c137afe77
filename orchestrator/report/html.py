"""Renders the report of a job, and the verdict on a chaos plan, each as one self-contained HTML page.

The only inputs are the plain data that ``accounting.report.build`` returns and report.json holds, and that of
``chaos.runner``. A page has no script, loads nothing and needs no plotting library. Names that users chose are escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from orchestrator.core.vocabulary import CloseReason, quorum_of
from orchestrator.report.page import (
    card,
    cards,
    document,
    goodput_chart,
    header,
    loss_chart,
    merges_chart,
    table,
    tile,
    tiles,
    timeline_chart,
)
from orchestrator.system.plain import count, counted, loss, money, percent, seconds

Report = Mapping[str, Any]
REGIONS_NAMED_MAX = 8
"""The header names up to this many regions, and gives only the number of more. The islands' table names all."""
_PARTS = ("detect", "place", "start", "connect", "transfer", "first_merge")
_BECAUSE = {reason.value: reason.words for reason in CloseReason}


def render(report: Report) -> str:
    """Return the page, to be written as UTF-8."""
    body = (
        _header(report)
        + _tiles(report)
        + cards(
            card("Loss", "Held-out loss of the merged parameters during training.", loss_chart(report)),
            card("Where island time went", _goodput_words(report), goodput_chart(report)),
            card("Islands over time", "× lost   ○ first contribution merged after recovery", timeline_chart(report)),
            card("Merges per fragment", _merges_words(report), merges_chart(report)),
            card("Why rounds closed", _grace_words(report), _reasons(report)),
            card(
                "Contributions refused", "Refusals are decisions, not failures; each has a reason.", _refusals(report)
            ),
            card("Recoveries", _recovery_words(report), _recoveries(report), wide=True),
            card("Islands", "Each has its own data and inner optimizer.", _islands(report), wide=True),
            *_cost_cards(report),
            *_mixture_cards(report),
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
    where = f"{counted(len(islands), 'island')} in {counted(len(regions), 'region')}{named}"
    where += f" and {counted(spares, 'spare')}" if spares else ""
    size = f", {count(report['parameter_count'])} parameters" if report.get("parameter_count") else ""
    lead = f"{where}{size}, {seconds(report['duration_s'])}. {_sentence(report.get('reason'))}"
    bad = outcome not in ("completed", "running")
    return header("atoll · training report", report.get("name") or "job", outcome, lead, bad=bad)


def _tiles(report: Report) -> str:
    unigram = report.get("loss_unigram")
    against = f"a unigram model has {loss(unigram)}" if unigram else "nats per token, held out"
    if (initial := report.get("loss_initial")) is not None:
        against += f"; {loss(initial)} at the start"
    evaluations = report.get("evaluations") or {}
    if (bits := evaluations.get("bits_per_byte")) is not None:
        against += f"; {bits:.3f} bits per byte"
    if pairs := evaluations.get("preference"):
        against = f"nats per pair, held out; {pairs['accuracy']:.0%} of pairs told apart, margin {pairs['margin']:.3f}"
    against += "".join(f"; {one['source']} {loss(one['loss'])}" for one in evaluations.get("sources") or ())
    if flaws := (report.get("data_flaws") or {}).get("remark"):
        against += f"; data: {flaws}"
    merged, trained = report["tokens_merged"], report["tokens_trained"]
    merged_words = f"{count(merged)} of {count(trained)} trained tokens are in the result"
    recovery = report.get("recovery_s")
    if recovery:
        parts = {name: recovery[name] for name in _PARTS}
        back = tile(f"Recovery of {recovery['island']}", seconds(recovery["total"]), _parts_words(parts), parts)
    else:
        gap = report.get("survivor_gap_max_s")
        back = tile("Recovery", "none needed", f"longest gap between steps: {seconds(gap)}")
    return tiles(
        tile("Final loss", loss(report["loss_final"]), against),
        tile("Goodput", percent(report["goodput_ratio"]), merged_words),
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
    at_least = "at least one island was" if quorum == 1 else f"at least {quorum} islands were"
    return f"{seconds(total)} of island time; {at_least} training {percent(uptime)} of the time."


def _merges_words(report: Report) -> str:
    return f"{report['merges']} merges with {report['contributors_mean']:.2f} islands on average."


def _grace_words(report: Report) -> str:
    waited, merged = seconds(report["grace_used_mean_s"]), seconds(report["merge_seconds_mean"])
    return f"On average a round waited {waited} after its quorum and merged in {merged}."


def _recovery_words(report: Report) -> str:
    gap, step = report.get("survivor_gap_max_s"), report.get("survivor_step_time_median_s")
    if gap is None:
        return "No island trained without interruption from start to end."
    return (
        f"Islands that survived went at most {seconds(gap)} between two steps; their median step took {seconds(step)}."
    )


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
    head = ("reason", "merges", "islands per merge", "mean wait", "longest wait")
    return table(head, rows, "No round has closed.")


def _refusals(report: Report) -> str:
    rows = [(escape(reason.replace("_", " ")), str(times)) for reason, times in report["refusals"].items()]
    return table(("reason", "count"), rows, "No contribution was refused.")


def _recoveries(report: Report) -> str:
    rows = (
        (
            escape(recovery["island"]),
            seconds(recovery["killed_at"]),
            *(seconds(recovery["parts"].get(part)) for part in _PARTS),
            f"<b>{seconds(recovery['total'])}</b>" if recovery["complete"] else "not back",
            seconds(recovery.get("others_gap_max_s")),
        )
        for recovery in report["recoveries"]
    )
    head = ("island", "at", *(part.replace("_", " ") for part in _PARTS), "total", "others' longest gap")
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
    head = ("island", "region", "tokens trained", "merged", "merges", "median step", "longest gap", "goodput")
    return table(head, rows, "The job has no islands.")


def _productive(spent: Mapping[str, float]) -> float:
    return spent["productive"] / (sum(spent.values()) or 1.0)


def _cost_cards(report: Report) -> list[str]:
    """Return a card about money, if the job's node groups have prices."""
    cost = report.get("cost")
    if not cost:
        return []
    currency = cost["currency"]
    words = (
        f"{money(cost['so_far'], currency)}, {money(cost['per_merged_million_tokens'], currency)} per merged million "
    )
    words += "tokens. " + (f"Without a price: {', '.join(cost['unpriced'])}." if cost["unpriced"] else "")
    rows = [(escape(group), "all", money(value, currency)) for group, value in cost["node_groups"].items()]
    rows += [("badput", escape(cause), money(value, currency)) for cause, value in cost["badput"].items()]
    return [card("Cost", escape(words.strip()), table(("node group", "cause", "cost"), rows, "", words=(1,)))]


def _mixture_cards(report: Report) -> list[str]:
    """Return the cards about routers and experts. Only mixtures have them."""
    if not (mixture := report.get("mixture")):
        return []
    of_routers = (
        "The distance between two islands' routers, and how far an island had moved them: root mean squares in a merge, "
        "means over merges. Islands that move independently are 1.41 times their travel apart."
    )
    of_experts = (
        "The largest part of a layer's choices that one expert got in the last step, and the least even layer's entropy. "
        "Losses are of training batches: of the steps before an adoption, and of the first one after it."
    )
    return [card("Routers", of_routers, _routers(mixture)), card("Experts", of_experts, _experts(mixture))]


def _wire_cards(report: Report) -> list[str]:
    """Return the cards about traffic and codec residues. Simulated jobs and reports of earlier builds have neither."""
    lines, norms = report.get("lines", {}).get("islands", {}), report.get("fragment_norms", [])
    shown = []
    if lines:
        shown.append(card("Lines", _wire_words(report), _lines(lines, report["islands"]), wide=True))
    if norms:
        words = "The size of the last outer step, and the part of it that the update codec has not yet sent."
        shown.append(card("Fragments", words, _norms(norms)))
    return shown


def _warning_cards(report: Report) -> list[str]:
    """Return a card with the warnings about the specification, if there are any."""
    rows = [(escape(one["path"]), escape(one["message"]), escape(one["remedy"])) for one in report.get("warnings", [])]
    if not rows:
        return []
    words = "Settings of the specification that are valid but probably not intended."
    return [card("Warnings", words, table(("field", "value", "remedy"), rows, ""), wide=True)]


def _wire_words(report: Report) -> str:
    wire = report["wire"]
    return (
        f"Contributions were encoded as {escape(wire['up'])}, updates as {escape(wire['down'])}. "
        "Counted since the synchroniser last started."
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
    head = ("island", "region", "contributions", "updates", "values", "states", "busy up", "busy down")
    return table(head, rows, "Nothing was transferred.")


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
    return table(("fragment", "version", "update norm", "not yet sent"), rows, "Nothing was merged.")


def _routers(mixture: Mapping[str, Any]) -> str:
    rows = (
        (
            str(own["fragment"]),
            count(own["merges"]),
            f"{own['distance_mean']:.3g}",
            f"{own['travel_mean']:.3g}",
            f"{own['distance_mean'] / own['travel_mean']:.2f}" if own["travel_mean"] else "–",
        )
        for own in mixture["routers"]
    )
    return table(
        ("fragment", "merges", "distance", "travel", "ratio"), rows, "No merge had routers of several islands."
    )


def _experts(mixture: Mapping[str, Any]) -> str:
    rows = (
        (
            escape(name),
            percent(own["expert_share_max"]),
            percent(own["expert_entropy_ratio"]),
            count(own["adoptions"]),
            loss(own["loss_before"]),
            loss(own["loss_after"]),
        )
        for name, own in mixture["islands"].items()
    )
    head = ("island", "largest share", "entropy", "adoptions", "loss before", "loss after")
    return table(head, rows, "No island reported the load of its experts.")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _footer(report: Report) -> str:
    policy = report["policy"]
    cap = policy["grace_cap_steps"]
    quorum = quorum_of(policy["quorum"], policy.get("quorum_ratio", 0.0), policy["islands"])
    grace = "no limit on the grace window" if cap is None else f"a grace window of at most {cap:g} steps"
    own = policy.get("router_interval_steps")
    routers = "" if own is None else f", the last one, with the routers, every {own} steps,"
    return (
        f"<footer>{policy['fragments']} fragments, each synchronised every {policy['interval_steps']} steps{routers} with "
        f"an overlap of {policy['overlap_steps']} steps; quorum {quorum} of {policy['islands']}, {grace}. "
        "A token counts as merged once a version of the parameters contains it. "
        f"Job {escape(str(report.get('job_id') or '–'))}.</footer>"
    )


# ── the verdict on a chaos plan ───────────────────────────────────────────────────────────────────────────────────────────


def render_verdict(verdict: Report, report: Report, plan_text: str) -> str:
    """Return the page of a verdict, to be written as UTF-8. ``plan_text`` is the plan as the user wrote it."""
    title = f"{verdict['plan']} on {verdict['job'] or 'a job'}"
    outcome = "passed" if verdict["passed"] else "failed"
    body = (
        header("atoll · chaos verdict", title, outcome, _lead(verdict, report), bad=not verdict["passed"])
        + _verdict_tiles(verdict, report)
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


def _lead(verdict: Report, report: Report) -> str:
    failed = [one for one in verdict["objectives"] if not one["passed"]]
    result = "Every objective held." if not failed else f"{failed[0]['objective']} did not hold: {failed[0]['detail']}."
    return f"{len(report['islands'])} islands, {seconds(report['duration_s'])}, seed {verdict['seed']}. {result}"


def _verdict_tiles(verdict: Report, report: Report) -> str:
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


def _objectives(verdict: Report) -> str:
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


def _faults(verdict: Report) -> str:
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


def _kind(fault: Report) -> str:
    """Return the fault's kind with its parameters other than the duration."""
    size = f", {fault['payloads']} payloads" if fault.get("payloads") else ""
    where = f", host {fault['host']}" if fault.get("host") is not None else ""
    kind: str = fault["kind"]
    return kind + where + size + (f", {fault['bytes_per_second']:g} bytes/s" if fault.get("bytes_per_second") else "")


def _notes(verdict: Report) -> list[str]:
    notes = verdict.get("notes", ())
    listed = "".join(f"<p>{escape(note)}.</p>" for note in notes)
    return [card("What this run does not show", "", listed, wide=True)] if notes else []


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
