"""The dashboard Islands: who trains, who is away, and how fast do they come back?"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import (
    BAD,
    CALM,
    GOOD,
    JOB,
    MERGES,
    RATE,
    STEPS,
    TOKENS,
    WARN,
    Panel,
    Query,
    board,
    curves,
    figure,
    least,
    most,
    quantiles,
    timeline,
)

STATES = (
    ("cordoned", "light-orange"),
    ("placing", "light-purple"),
    ("waiting", "light-red"),
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
        "Which islands train, which are away, and how fast do they recover?",
        [
            ("States", _states()),
            ("Steps", _steps()),
            ("Contributions", _contributions()),
            ("Text", _text()),
            ("Recovery", _recovery()),
        ],
    )


def _in(states: str) -> str:
    return f'sum by (atoll_job) (atoll_island_state{{{JOB}, state=~"{states}"}})'


def _states() -> list[Panel]:
    numbered = " or ".join(
        f'{number} * (atoll_island_state{{{JOB}, state="{state}"}} == 1)' for number, (state, _) in enumerate(STATES, 1)
    )
    return [
        figure(
            "Training",
            "Islands that are training.",
            "none",
            Query(_in("training"), "{{atoll_job}}"),
            steps=((None, BAD), (1, GOOD)),
        ),
        figure(
            "Starting",
            "Islands being placed, starting or catching up.",
            "none",
            Query(_in("placing|starting|catching_up"), "{{atoll_job}}"),
        ),
        figure(
            "Suspect",
            "Islands that do not answer. They may still be training behind a broken link.",
            "none",
            Query(_in("suspect"), "{{atoll_job}}"),
            steps=((None, GOOD), (1, WARN)),
        ),
        figure(
            "Lost",
            "Islands that were lost and wait to be placed again.",
            "none",
            Query(_in("lost"), "{{atoll_job}}"),
            steps=((None, GOOD), (1, WARN)),
        ),
        figure(
            "Given up",
            "Islands that failed too often in a row. They stay away until `atoll readd`.",
            "none",
            Query(_in("failed"), "{{atoll_job}}"),
            steps=((None, GOOD), (1, BAD)),
        ),
        figure(
            "Restarts",
            "Times that islands were placed again in the last hour.",
            "none",
            Query(f"sum by (atoll_job) (increase(atoll_island_restarts_total{{{JOB}}}[1h]))", "{{atoll_job}}"),
        ),
        timeline(
            "Timeline",
            "Each island's state.",
            Query(f"max by (atoll_job, island) ({numbered})", "{{island}}"),
            STATES,
        ),
    ]


def _steps() -> list[Panel]:
    return [
        curves(
            "Step rate",
            "Inner steps per second of the slowest islands. The loss of another island must not affect it.",
            STEPS,
            Query(least(f"rate(atoll_island_steps_total{{{JOB}}}[{RATE}])"), "{{island}}"),
            width=8,
        ),
        curves(
            "Step time",
            "Recent duration of an inner step, of the slowest islands.",
            "s",
            Query(most(f"atoll_island_step_seconds{{{JOB}}}"), "{{island}}"),
            width=8,
        ),
        curves(
            "Model FLOPs utilisation",
            "The lowest. A fall: steps became slower. Absent where the devices' peak or the model's operations are unknown.",
            "percentunit",
            Query(least(f"atoll_island_mfu_ratio{{{JOB}}}"), "{{island}}"),
            width=8,
        ),
        curves(
            "Gradient norm",
            "Of the last step, before clipping; the highest. A sharp rise: training may be diverging.",
            "none",
            Query(most(f"atoll_island_gradient_norm{{{JOB}}}"), "{{island}}"),
            width=8,
        ),
        curves(
            "Learning rate",
            "Of the last step, the lowest. Islands follow one schedule, so an island apart is far behind the others.",
            "none",
            Query(least(f"atoll_island_learning_rate{{{JOB}}}"), "{{island}}"),
            width=8,
        ),
        curves(
            "Largest share of an expert",
            "Mixtures: the part of a layer's choices that its most used expert got; the highest. Near 1: routers collapse.",
            "percentunit",
            Query(most(f"atoll_island_expert_share_max_ratio{{{JOB}}}"), "{{island}}"),
            width=8,
        ),
        curves(
            "Entropy of experts",
            "Mixtures: how evenly the least even layer uses its experts, 1 if evenly; the lowest.",
            "percentunit",
            Query(least(f"atoll_island_expert_entropy_ratio{{{JOB}}}"), "{{island}}"),
            width=8,
        ),
        curves(
            "Loss at adoptions",
            "Mixtures: training loss of the first step after an adoption less that of the steps before, a mean over all.",
            "none",
            Query(
                most(
                    f"atoll_island_loss_after_adoption_nats{{{JOB}}} - atoll_island_loss_before_adoption_nats{{{JOB}}}"
                ),
                "{{island}}",
            ),
            width=8,
        ),
        curves(
            "Steps behind",
            "Steps by which islands are behind the furthest, the last first. Far behind, their work is late or stale.",
            "none",
            Query(
                most(
                    f"max by (atoll_job) (atoll_island_schedule_step{{{JOB}}}) "
                    f"- on (atoll_job) group_right () atoll_island_schedule_step{{{JOB}}}"
                ),
                "{{island}}",
            ),
            width=8,
        ),
        curves(
            "Longest gap between steps",
            "Since the job started. It rises when an island is frozen, starved of CPU, or blocked by atoll.",
            "s",
            Query(most(f"atoll_island_gap_max_seconds{{{JOB}}}"), "{{island}}"),
        ),
        curves(
            "Tokens by region",
            "Tokens trained per second.",
            TOKENS,
            Query(f"sum by (region) (rate(atoll_tokens_trained_total{{{JOB}}}[{RATE}]))", "{{region}}"),
            stacked=True,
        ),
    ]


def _text() -> list[Panel]:
    return [
        curves(
            "Unreadable text",
            "Records and parts of files that islands have skipped. The island's log names them.",
            "none",
            Query(most(f"atoll_island_unreadable_records_total{{{JOB}}}"), "{{island}}"),
            Query(most(f"atoll_island_cut_pieces_total{{{JOB}}}"), "{{island}}, cut"),
        ),
        curves(
            "Repeated and omitted text",
            "Sequences per second that are drawn twice in an epoch, or skipped in it.",
            "suffix: sequences/s",
            Query(most(f"rate(atoll_island_repeated_sequences_total{{{JOB}}}[{RATE}])"), "{{island}}, twice"),
            Query(most(f"rate(atoll_island_omitted_sequences_total{{{JOB}}}[{RATE}])"), "{{island}}, omitted"),
        ),
    ]


def _contributions() -> list[Panel]:
    return [
        curves(
            "Since last in a merge",
            "Longest times since a merge contained an island's work. A line that only rises: its work reaches no merge.",
            "s",
            Query(most(f"atoll_island_last_merge_age_seconds{{{JOB}}}"), "{{island}}"),
            width=8,
        ),
        curves(
            "Merges",
            "Merges per second that contain an island's work, for the fewest.",
            MERGES,
            Query(least(f"rate(atoll_island_merges_total{{{JOB}}}[{RATE}])"), "{{island}}"),
            width=8,
        ),
        curves(
            "Refused by island",
            "Contributions refused, per second.",
            "cps",
            Query(most(f'rate(atoll_contributions_total{{{JOB}, outcome="refused"}}[{RATE}])'), "{{island}}"),
            width=8,
        ),
        curves(
            "Flagged islands",
            "Islands whose latest contributions were unreadable, not finite or far off, and how often each was replaced.",
            "none",
            Query(most(f"atoll_island_flagged{{{JOB}}}"), "{{island}} flagged"),
            Query(most(f"atoll_island_quarantines_total{{{JOB}}}"), "{{island}} quarantines"),
            width=8,
        ),
        curves(
            "Islands that hang",
            "Seconds in the current step if that is far beyond the usual. At the limit the island is ended.",
            "s",
            Query(most(f"atoll_island_overdue_seconds{{{JOB}}} > 0"), "{{island}}"),
            width=8,
        ),
        curves(
            "Outer steps discarded",
            "Merges whose result was not finite. They were not published.",
            "none",
            Query(f"sum by (atoll_job) (atoll_merge_failures_total{{{JOB}}})", "{{atoll_job}}"),
            width=8,
        ),
    ]


def _recovery() -> list[Panel]:
    return [
        curves(
            "Recovery time",
            "From the loss of an island to a merge with its new work: median and 95th percentile of recoveries in the "
            "last hour.",
            "s",
            *(
                Query(query.expression.replace(f"[{RATE}]", "[1h]"), query.legend)
                for query in quantiles("atoll_recovery_seconds")
            ),
            width=6,
        ),
        curves(
            "Recovery time by part",
            "Mean of each part over all recoveries: noticing, placing, starting, connecting to a donor, transfer, "
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
            "Catch-ups by source of the state, failed attempts, and processes that could not be started.",
            "none",
            Query(f"sum by (source) (atoll_catch_ups_total{{{JOB}}})", "from {{source}}"),
            Query(f"sum(atoll_catch_up_failures_total{{{JOB}}})", "failed"),
            Query(f"sum(atoll_placement_failures_total{{{JOB}}})", "not placed"),
            width=6,
            colours={"from peer": GOOD, "from synchroniser": CALM, "failed": BAD, "not placed": WARN},
        ),
        curves(
            "Standbys",
            "How many standbys were ready and how many were preparing, on average; and how often one took a lost island's "
            "place so far.",
            "none",
            Query(f"sum by (class) (deriv(atoll_standby_seconds{{{JOB}}}[{RATE}]))", "{{class}}"),
            Query(f"sum(atoll_standby_takeovers_total{{{JOB}}})", "took over"),
            width=6,
            colours={"ready": GOOD, "preparing": WARN, "took over": CALM},
        ),
    ]
