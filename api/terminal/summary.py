"""An ended job in three lines: loss, goodput and recovery. Pure: text from a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.schemas import Job

PARTS = ("detect", "place", "start", "connect", "transfer", "first_merge")
CAUSES_MAX = 4


def lines_that_matter(report: Mapping[str, Any]) -> list[str]:
    """Return the loss with that of a unigram model, goodput with its losses, the slowest recovery with its parts.

    And remarks on the text, if there are any.
    """
    return [_loss(report), *_text(report), _goodput(report), _recovery(report)]


def warning_lines(job: Job) -> list[str]:
    """Return a line for each probable mistake in the job's specification."""
    return [f"warning: {warning.path}: {warning.message} {warning.remedy}".rstrip() for warning in job.warnings]


def _loss(report: Mapping[str, Any]) -> str:
    final, unigram = report.get("loss_final"), report.get("loss_unigram")
    if final is None:
        return "loss      not evaluated"
    initial = report.get("loss_initial")
    against = f", {initial:.3f} at the start" if initial is not None else ""
    against += f", against {unigram:.3f} of a unigram model" if unigram is not None else ""
    evaluations = report.get("evaluations") or {}
    bits = evaluations.get("bits_per_byte")
    per_byte = f" ({bits:.3f} bits per byte)" if bits is not None else ""
    by_source = ", ".join(f"{one['source']} {one['loss']:.3f}" for one in evaluations.get("sources") or ())
    of_sources = f" ({by_source})" if by_source else ""
    merged, trained = report["tokens_merged"], report["tokens_trained"]
    measured = f"{final:.3f} nats per token held out{per_byte}{of_sources}{against}"
    return f"loss      {measured}; {merged:,} of {trained:,} trained tokens merged"


def _text(report: Mapping[str, Any]) -> list[str]:
    remark = (report.get("data_flaws") or {}).get("remark")
    return [f"text      {remark}"] if remark else []


def _goodput(report: Mapping[str, Any]) -> str:
    ratio, badput = report.get("goodput_ratio"), report.get("badput_seconds") or {}
    total = (report.get("island_seconds") or {}).get("total")
    if ratio is None or not total:
        return "goodput   nothing was placed"
    causes = sorted(badput.items(), key=lambda item: -item[1])
    shares = [f"{cause.replace('_', ' ')} {100 * spent / total:.1f} %" for cause, spent in causes[:CAUSES_MAX]]
    if rest := sum(spent for _, spent in causes[CAUSES_MAX:]):
        shares.append(f"other {100 * rest / total:.1f} %")
    lost = f"; lost to {', '.join(shares)}" if shares else ""
    return f"goodput   {100 * ratio:.1f} % of {total:,.0f} island-seconds{lost}"


def _recovery(report: Mapping[str, Any]) -> str:
    slowest = report.get("recovery_s")
    if not slowest:
        lost = report.get("recoveries") or []
        if not lost:
            return "recovery  no island was lost"
        return f"recovery  {lost[0]['island']} was lost and had not contributed again when the job ended"
    parts = " + ".join(f"{part.replace('_', ' ')} {slowest[part]:.2f}" for part in PARTS)
    sentence = f"recovery  {slowest['island']} was back in {slowest['total']:.2f} s = {parts}"
    gap, step = report.get("survivor_gap_max_s"), report.get("survivor_step_time_median_s")
    return (
        sentence
        if gap is None or step is None
        else f"{sentence}; the others' longest gap was {gap:.2f} s at {step:.2f} s a step"
    )
