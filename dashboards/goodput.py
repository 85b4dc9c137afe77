"""The dashboard Goodput: how much of the hardware's time reaches the model, and where the rest goes."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import (
    BAD,
    CALM,
    DULL,
    GOOD,
    JOB,
    RATE,
    TOKENS,
    WARN,
    Panel,
    Query,
    board,
    curves,
    figure,
    most,
    ranking,
)

CLASS_COLOURS = {
    "productive": "green",
    "in_flight": "blue",
    "discarded": "red",
    "stalled": "orange",
    "recovering": "purple",
    "starting": "yellow",
    "down": "dark-red",
}
WEIGHT = "on (atoll_job, island) group_left () atoll_island_accelerators"
"""Seconds of an island times this are seconds of its accelerators."""
SECONDS = f"atoll_island_seconds{{{JOB}}}"
WASTED = f'atoll_island_seconds{{{JOB}, class!~"productive|in_flight"}}'


def dashboard() -> Dashboard:
    return board(
        "atoll-goodput",
        "atoll / Goodput",
        "How much of the hardware's time reaches the model, and where does the rest go?",
        [("The headline", _headline()), ("Where the time went", _time()), ("Tokens and loss", _tokens())],
    )


def _headline() -> list[Panel]:
    return [
        figure(
            "Goodput",
            "Share of all accelerator-seconds of the job so far whose tokens reached a merge.",
            "percentunit",
            Query(f"atoll_goodput_ratio{{{JOB}}}", "{{atoll_job}}"),
            steps=((None, BAD), (0.7, WARN), (0.85, GOOD)),
        ),
        figure(
            "Uptime",
            "Share of the time with at least a quorum of islands training.",
            "percentunit",
            Query(f"atoll_uptime_ratio{{{JOB}}}", "{{atoll_job}}"),
            steps=((None, BAD), (0.9, WARN), (0.99, GOOD)),
        ),
        figure(
            "Wasted",
            "Accelerator-hours that reached no merge: discarded, stalled, starting, recovering or down.",
            "h",
            Query(f"sum by (atoll_job) ({WASTED} * {WEIGHT}) / 3600", "{{atoll_job}}"),
        ),
        figure(
            "Merged tokens",
            "Tokens that reach a merge, per second: the rate at which the model learns.",
            TOKENS,
            Query(f"sum by (atoll_job) (rate(atoll_tokens_merged_total{{{JOB}}}[{RATE}]))", "{{atoll_job}}"),
        ),
        figure(
            "Held-out loss",
            "Latest loss of the merged parameters on held-out text, in nats per token.",
            "none",
            Query(f"atoll_held_out_loss_nats{{{JOB}}}", "{{atoll_job}}"),
        ),
        figure(
            "Budget used",
            "Share of the job's token budget that has been trained.",
            "percentunit",
            Query(
                f"sum by (atoll_job) (atoll_tokens_trained_total{{{JOB}}}) / on (atoll_job) atoll_job_token_budget",
                "{{atoll_job}}",
            ),
        ),
    ]


def _time() -> list[Panel]:
    return [
        curves(
            "What accelerators do",
            "Accelerators by the class of their current time. Only green reaches a merge. Time in flight is counted as "
            "productive or discarded later, so a burst of merges may show more accelerators than there are.",
            "none",
            Query(f"sum by (class) (clamp_min(deriv({SECONDS}[{RATE}]), 0) * {WEIGHT})", "{{class}}"),
            stacked=True,
            width=16,
            colours=CLASS_COLOURS,
        ),
        ranking(
            "Badput by cause",
            "Island-seconds that were not productive, by cause, largest first. Fix the largest first.",
            "s",
            Query(f"topk(8, sum by (cause) (atoll_badput_seconds{{{JOB}}}))", "{{cause}}"),
            width=8,
        ),
        curves(
            "Accelerator-hours",
            "Accelerator-hours since the job started, by class.",
            "h",
            Query(f"sum by (class) ({SECONDS} * {WEIGHT}) / 3600", "{{class}}"),
            stacked=True,
            colours=CLASS_COLOURS,
        ),
        curves(
            "Goodput and uptime",
            "Both since the job started. Uptime above goodput: merging continued while work was lost or islands were away.",
            "percentunit",
            Query(f"atoll_goodput_ratio{{{JOB}}}", "goodput {{atoll_job}}"),
            Query(f"atoll_uptime_ratio{{{JOB}}}", "uptime {{atoll_job}}"),
        ),
        curves(
            "Cost",
            "What jobs have cost, per merged million tokens, and the forecast to the token budget, in the currency of the "
            "prices. Only of jobs whose node groups have prices.",
            "none",
            Query(f"atoll_cost{{{JOB}}}", "so far {{atoll_job}} {{currency}}"),
            Query(f"atoll_cost_per_merged_million_tokens{{{JOB}}}", "per million tokens {{atoll_job}} {{currency}}"),
            Query(f"atoll_cost_forecast{{{JOB}}}", "forecast {{bound}} {{atoll_job}} {{currency}}"),
        ),
        ranking(
            "Cost of badput",
            "The part of the cost that was badput, by cause, largest first.",
            "none",
            Query(f"topk(8, sum by (cause, currency) (atoll_cost_badput{{{JOB}}}))", "{{cause}} {{currency}}"),
        ),
    ]


def _tokens() -> list[Panel]:
    return [
        curves(
            "Raw and merged tokens",
            "Tokens per second as trained and as merged. The difference is lost or in flight.",
            TOKENS,
            Query(f"sum(rate(atoll_tokens_trained_total{{{JOB}}}[{RATE}]))", "trained"),
            Query(f"sum(rate(atoll_tokens_merged_total{{{JOB}}}[{RATE}]))", "merged"),
            colours={"trained": DULL, "merged": GOOD},
        ),
        curves(
            "Discarded and in flight",
            "Tokens that will never be merged, by cause, and tokens that may still be.",
            "short",
            Query(f"sum by (cause) (atoll_tokens_discarded{{{JOB}}})", "{{cause}}"),
            Query(f"sum(atoll_tokens_in_flight{{{JOB}}})", "in flight"),
            colours={"in flight": CALM},
        ),
        curves(
            "Held-out loss",
            "Loss of the merged parameters at each evaluation, in nats per token, by source; and bits per byte.",
            "none",
            Query(f"atoll_held_out_loss_nats{{{JOB}}}", "{{atoll_job}}"),
            Query(f"atoll_held_out_source_loss_nats{{{JOB}}}", "{{source}}"),
            Query(f"atoll_held_out_bits_per_byte{{{JOB}}}", "bits per byte"),
            Query(f"atoll_held_out_preference_accuracy_ratio{{{JOB}}}", "pairs told apart"),
            Query(f"atoll_held_out_preference_margin_nats{{{JOB}}}", "margin of pairs"),
        ),
        curves(
            "What an evaluation takes",
            "Duration of the latest evaluation. Where islands evaluate, one of them pauses training for it.",
            "s",
            Query(f"atoll_evaluation_seconds{{{JOB}}}", "{{atoll_job}}"),
        ),
        curves(
            "Evaluations",
            "Held-out sequences in the latest: fewer than evaluation.sequences where all would have taken too long. "
            "While none is measured, or some fail, the loss above is old.",
            "none",
            Query(f"atoll_evaluation_sequences{{{JOB}}}", "sequences {{atoll_job}}"),
            Query(f"atoll_evaluations_total{{{JOB}}}", "measured {{atoll_job}}"),
            Query(f"atoll_evaluation_failures_total{{{JOB}}}", "failed {{atoll_job}}"),
        ),
        curves(
            "Training loss by island",
            "Loss of the last step, in nats per token, of the worst islands. One that leaves the others has diverged.",
            "none",
            Query(most(f"atoll_training_loss_nats{{{JOB}}}"), "{{island}}"),
        ),
    ]
