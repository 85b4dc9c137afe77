"""The dashboard Islands: who trains, who is away, and how fast do they come back?"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import BAD, CALM, GOOD, JOB, RATE, WARN, Panel, Query, board, curves, figure, quantiles, timeline

STATES = (
    ("cordoned", "light-orange"),
    ("placing", "light-purple"),
    ("starting", "light-yellow"),
    ("catching_up", "purple"),
    ("training", "green"),
    ("standby", "light-green"),
    ("suspect", "orange"),
    ("draining", "light-blue"),
    ("drained", "blue"),
    ("lost", "red"),
    ("stopped", "text"),
    ("failed", "dark-red"),
)
"""In the order of an island's life; the number of a state in the timeline is its place here."""


def dashboard() -> Dashboard:
    return board(
        "atoll-islands",
        "atoll / Islands",
        "Who trains, who is away, and how fast do they come back?",
        [
            ("States", _states()),
            ("Steps", _steps()),
            ("Contributions", _contributions()),
            ("Text", _text()),
            ("Recovery", _recovery()),
        ],
    )


def _in(states: str) -> str:
    return f'sum by (job) (atoll_island_state{{{JOB}, state=~"{states}"}})'


def _states() -> list[Panel]:
    numbered = " or ".join(
        f'{number} * (atoll_island_state{{{JOB}, state="{state}"}} == 1)' for number, (state, _) in enumerate(STATES, 1)
    )
    return [
        figure(
            "Training", "Islands that train.", "none", Query(_in("training"), "{{job}}"), steps=((None, BAD), (1, GOOD))
        ),
        figure(
            "On their way",
            "Islands being placed, starting or catching up.",
            "none",
            Query(_in("placing|starting|catching_up"), "{{job}}"),
        ),
        figure(
            "Suspect",
            "Islands that do not answer. They may train on behind a cut link.",
            "none",
            Query(_in("suspect"), "{{job}}"),
            steps=((None, GOOD), (1, WARN)),
        ),
        figure(
            "Lost",
            "Islands that are gone and wait to be placed again.",
            "none",
            Query(_in("lost"), "{{job}}"),
            steps=((None, GOOD), (1, WARN)),
        ),
        figure(
            "Given up",
            "Islands that failed too often in a row. Only an operator brings them back.",
            "none",
            Query(_in("failed"), "{{job}}"),
            steps=((None, GOOD), (1, BAD)),
        ),
        figure(
            "Restarts",
            "Times that islands were placed again in the last hour.",
            "none",
            Query(f"sum by (job) (increase(atoll_island_restarts_total{{{JOB}}}[1h]))", "{{job}}"),
        ),
        timeline(
            "Timeline",
            "Each island's state.",
            Query(f"max by (job, island) ({numbered})", "{{island}}"),
            STATES,
        ),
    ]


def _steps() -> list[Panel]:
    return [
        curves(
            "Step rate",
            "Inner steps per second of each island. A death elsewhere must not bend these lines.",
            "cps",
            Query(f"rate(atoll_island_steps_total{{{JOB}}}[{RATE}])", "{{island}}"),
            width=8,
        ),
        curves(
            "Step time",
            "Time of an inner step of late.",
            "s",
            Query(f"atoll_island_step_seconds{{{JOB}}}", "{{island}}"),
            width=8,
        ),
        curves(
            "Steps behind",
            "How far each island that trains is behind the furthest. One that stays far behind offers late, or stale work.",
            "none",
            Query(
                f"max by (job) (atoll_island_schedule_step{{{JOB}}}) "
                f"- on (job) group_right () atoll_island_schedule_step{{{JOB}}}",
                "{{island}}",
            ),
            width=8,
        ),
        curves(
            "Longest gap between steps",
            "So far. It rises when an island is held up: frozen, starved, or waiting for something of ours.",
            "s",
            Query(f"atoll_island_gap_max_seconds{{{JOB}}}", "{{island}}"),
        ),
        curves(
            "Tokens by region",
            "Tokens trained per second.",
            "cps",
            Query(f"sum by (region) (rate(atoll_tokens_trained_total{{{JOB}}}[{RATE}]))", "{{region}}"),
            stacked=True,
        ),
    ]


def _text() -> list[Panel]:
    return [
        curves(
            "Unreadable text",
            "Records and pieces of files that islands passed over, so far. The island's log names them.",
            "none",
            Query(f"atoll_island_unreadable_records_total{{{JOB}}}", "{{island}}"),
            Query(f"atoll_island_cut_pieces_total{{{JOB}}}", "{{island}}, cut"),
        ),
        curves(
            "Repeated and omitted text",
            "Sequences a second that are drawn a second time in an epoch, or passed over in it.",
            "cps",
            Query(f"rate(atoll_island_repeated_sequences_total{{{JOB}}}[{RATE}])", "{{island}}, twice"),
            Query(f"rate(atoll_island_omitted_sequences_total{{{JOB}}}[{RATE}])", "{{island}}, omitted"),
        ),
    ]


def _contributions() -> list[Panel]:
    return [
        curves(
            "Since last in a merge",
            "How long ago a merge held each island's work. A line that only rises: its work goes nowhere.",
            "s",
            Query(f"atoll_island_last_merge_age_seconds{{{JOB}}}", "{{island}}"),
            width=8,
        ),
        curves(
            "Merges",
            "Merges per second that hold each island's work.",
            "cps",
            Query(f"rate(atoll_island_merges_total{{{JOB}}}[{RATE}])", "{{island}}"),
            width=8,
        ),
        curves(
            "Refused by island",
            "Contributions refused, per second.",
            "cps",
            Query(f'rate(atoll_contributions_total{{{JOB}, outcome="refused"}}[{RATE}])', "{{island}}"),
            width=8,
        ),
        curves(
            "Sick islands",
            "Islands whose latest contributions were unreadable, no numbers or far off, and how often each was replaced.",
            "none",
            Query(f"atoll_island_flagged{{{JOB}}}", "{{island}} flagged"),
            Query(f"atoll_island_quarantines_total{{{JOB}}}", "{{island}} quarantines"),
            width=8,
        ),
        curves(
            "Islands that hang",
            "Seconds in the present step where that is far beyond the usual. At its limit the island is ended.",
            "s",
            Query(f"atoll_island_overdue_seconds{{{JOB}}} > 0", "{{island}}"),
            width=8,
        ),
        curves(
            "Outer steps thrown away",
            "Merges whose result was not finite. They were not published.",
            "none",
            Query(f"sum by (job) (atoll_merge_failures_total{{{JOB}}})", "{{job}}"),
            width=8,
        ),
    ]


def _recovery() -> list[Panel]:
    return [
        curves(
            "Recovery time",
            "From an island's loss to a merge that holds its new work: median and 95th percentile of recoveries in the "
            "last hour.",
            "s",
            *(
                Query(query.expression.replace(f"[{RATE}]", "[1h]"), query.legend)
                for query in quantiles("atoll_recovery_seconds")
            ),
            width=6,
        ),
        curves(
            "Its parts",
            "Mean of each part over all recoveries so far: noticing, placing, starting, connecting to a donor, transfer, "
            "first merge.",
            "s",
            Query(
                f"sum by (part) (atoll_recovery_part_seconds_sum{{{JOB}}}) "
                f"/ sum by (part) (atoll_recovery_part_seconds_count{{{JOB}}})",
                "{{part}}",
            ),
            stacked=True,
            width=6,
        ),
        curves(
            "States handed over",
            "Catch-ups by who gave the state, attempts that failed, and processes that could not be made.",
            "none",
            Query(f"sum by (source) (atoll_catch_ups_total{{{JOB}}})", "from {{source}}"),
            Query(f"sum(atoll_catch_up_failures_total{{{JOB}}})", "failed"),
            Query(f"sum(atoll_placement_failures_total{{{JOB}}})", "not placed"),
            width=6,
            colours={"from peer": GOOD, "from synchroniser": CALM, "failed": BAD, "not placed": WARN},
        ),
        curves(
            "Standbys",
            "How many were ready, and how many were on the way to it, by their time; and how often one took a lost island's "
            "place so far.",
            "none",
            Query(f"sum by (class) (deriv(atoll_standby_seconds{{{JOB}}}[{RATE}]))", "{{class}}"),
            Query(f"sum(atoll_standby_takeovers_total{{{JOB}}})", "took over"),
            width=6,
            colours={"ready": GOOD, "preparing": WARN, "took over": CALM},
        ),
    ]
