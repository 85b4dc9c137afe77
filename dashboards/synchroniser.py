"""The dashboard Synchroniser: do rounds close, with whom, how fast, and what is turned away?"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import BAD, GOOD, JOB, MERGES, RATE, WARN, Panel, Query, board, curves, figure, most, quantiles

MEAN_CONTRIBUTORS = (
    f"sum by (atoll_job) (rate(atoll_merge_contributors_sum{{{JOB}}}[{RATE}])) "
    f"/ sum by (atoll_job) (rate(atoll_merge_contributors_count{{{JOB}}}[{RATE}]))"
)
TRAINING = f'sum by (atoll_job) (atoll_island_state{{{JOB}, state="training"}})'


def dashboard() -> Dashboard:
    return board(
        "atoll-synchroniser",
        "atoll / Synchroniser",
        "Do rounds close, with which islands, how fast, and what is refused?",
        [
            ("Right now", _now()),
            ("Rounds", _rounds()),
            ("Journal", _journal()),
            ("Fragments", _fragments()),
            ("Contributions", _contributions()),
            ("Traffic", _traffic()),
        ],
    )


def _now() -> list[Panel]:
    return [
        figure(
            "Merging",
            "0 while fewer islands than the quorum can contribute: nothing merges then.",
            "bool_yes_no",
            Query(f"1 - atoll_job_paused{{{JOB}}}", "{{atoll_job}}"),
            steps=((None, BAD), (1, GOOD)),
        ),
        figure(
            "Merges",
            "Merges of all fragments, per second.",
            MERGES,
            Query(f"sum by (atoll_job) (rate(atoll_merges_total{{{JOB}}}[{RATE}]))", "{{atoll_job}}"),
        ),
        figure(
            "Contributors",
            "Islands whose work a merge contains, recent average.",
            "none",
            Query(MEAN_CONTRIBUTORS, "{{atoll_job}}"),
        ),
        figure(
            "Quorum",
            "Islands that a round needs before it may close.",
            "none",
            Query(f"atoll_quorum_islands{{{JOB}}}", "{{atoll_job}}"),
        ),
        figure(
            "Islands training",
            "Islands that are training. Below the quorum merging pauses.",
            "none",
            Query(TRAINING, "{{atoll_job}}"),
        ),
        figure(
            "Refused",
            "Share of recent contributions that were refused.",
            "percentunit",
            Query(
                f"sum by (atoll_job) (rate(atoll_refusals_total{{{JOB}}}[{RATE}])) "
                f"/ on (atoll_job) sum by (atoll_job) (rate(atoll_contributions_total{{{JOB}}}[{RATE}]))",
                "{{atoll_job}}",
            ),
            steps=((None, GOOD), (0.02, WARN), (0.05, BAD)),
        ),
    ]


def _rounds() -> list[Panel]:
    return [
        curves(
            "Time of a round, by part",
            "Collecting: from the first contribution until the round could close. Grace: until it closed. Merging: "
            "until the new version was durable. Median and 95th percentile.",
            "s",
            *quantiles("atoll_round_part_seconds", "part"),
        ),
        curves(
            "Why rounds closed",
            "Rounds per second by reason. Mostly grace_over: some island is regularly too slow for the window.",
            "cps",
            Query(f"sum by (reason) (rate(atoll_rounds_closed_total{{{JOB}}}[{RATE}]))", "{{reason}}"),
            stacked=True,
        ),
        curves(
            "Contributors and quorum",
            "Islands in a merge, compared with the quorum and all training islands.",
            "none",
            Query(MEAN_CONTRIBUTORS, "contributors {{atoll_job}}"),
            Query(f"atoll_quorum_islands{{{JOB}}}", "quorum {{atoll_job}}"),
            Query(TRAINING, "training {{atoll_job}}"),
        ),
        curves(
            "Grace used",
            "How long rounds wait after they could have closed, on average. It should fit into the slack of the overlap.",
            "s",
            Query(
                f'sum by (atoll_job) (rate(atoll_round_part_seconds_sum{{{JOB}, part="grace"}}[{RATE}])) '
                f'/ sum by (atoll_job) (rate(atoll_round_part_seconds_count{{{JOB}, part="grace"}}[{RATE}]))',
                "{{atoll_job}}",
            ),
        ),
    ]


def _journal() -> list[Panel]:
    return [
        curves(
            "Time to store a merge",
            "From an outer step to its version being durable; it is not published before. Median and 99th percentile.",
            "s",
            *quantiles("atoll_journal_seconds", of=(0.5, 0.99)),
            width=8,
        ),
        curves(
            "Journal",
            "Waiting: share of the time that merging waits for the disk. Failing: the disk refuses writes.",
            "percentunit",
            Query(f"sum by (atoll_job) (rate(atoll_journal_seconds_sum{{{JOB}}}[{RATE}]))", "waiting {{atoll_job}}"),
            Query(f"atoll_journal_failing{{{JOB}}}", "failing {{atoll_job}}"),
            width=8,
        ),
        curves(
            "Synchroniser restarts",
            "In the last hour. Damaged: the end of tape or journal was unreadable. Fenced: it was replaced from elsewhere.",
            "none",
            Query(f"increase(atoll_synchroniser_deaths_total{{{JOB}}}[1h])", "{{atoll_job}}"),
            Query(f"increase(atoll_damages_total{{{JOB}}}[1h])", "damaged {{atoll_job}}"),
            Query(f"atoll_synchroniser_fenced{{{JOB}}}", "fenced {{atoll_job}}"),
            width=8,
        ),
        curves(
            "Store: time of a put",
            "Of mirrored jobs, on average: a merge waits for one or two. Failing: the store refuses, or takes over 5 s.",
            "s",
            Query(
                f"rate(atoll_store_put_seconds_total{{{JOB}}}[{RATE}]) / rate(atoll_store_puts_total{{{JOB}}}[{RATE}])",
                "put {{atoll_job}}",
            ),
            Query(f"atoll_store_failing{{{JOB}}}", "failing {{atoll_job}}"),
        ),
        curves(
            "Store: bytes put",
            "Of mirrored jobs: segments of the log and larger objects.",
            "Bps",
            Query(f"rate(atoll_store_put_bytes_total{{{JOB}}}[{RATE}])", "{{atoll_job}}"),
        ),
        curves(
            "Helper processes away",
            "Controllers, evaluators and node agents that do not answer, and their restarts in the last hour.",
            "none",
            Query(f"1 - atoll_helper_up{{{JOB}}} > 0", "{{helper}} away"),
            Query(f"1 - atoll_shard_up{{{JOB}}} > 0", "shard {{shard}} on {{node}} away"),
            Query(f"increase(atoll_helper_restarts_total{{{JOB}}}[1h]) > 0", "{{helper}} made again"),
            width=8,
        ),
        curves(
            "Age of the newest checkpoint",
            "Since its cut. Failed: in the last hour; the job's status says why.",
            "s",
            Query(f"atoll_checkpoint_age_seconds{{{JOB}}}", "{{atoll_job}}"),
            Query(f"increase(atoll_checkpoint_failures_total{{{JOB}}}[1h]) > 0", "failed {{atoll_job}}"),
            width=8,
        ),
        curves(
            "Size of the newest checkpoint, and of shards",
            "The job keeps some checkpoints (checkpoints.keep). Of a shard: its parameters.",
            "bytes",
            Query(f"atoll_checkpoint_bytes{{{JOB}}}", "{{atoll_job}}"),
            Query(f"atoll_shard_bytes{{{JOB}}}", "shard {{shard}} on {{node}}"),
            width=8,
        ),
    ]


def _fragments() -> list[Panel]:
    return [
        curves(
            "Version of each fragment",
            "Outer steps of each fragment. All should rise together; one that stays behind does not merge.",
            "none",
            Query(f"atoll_fragment_version{{{JOB}}}", "{{atoll_job}} {{fragment}}"),
        ),
        curves(
            "Islands in the open round",
            "How many have contributed to each fragment's round so far.",
            "none",
            Query(f"atoll_round_offered_islands{{{JOB}}}", "{{atoll_job}} {{fragment}}"),
        ),
    ]


def _contributions() -> list[Panel]:
    return [
        curves(
            "Contributions",
            "Admitted and refused, per second.",
            "cps",
            Query(f"sum by (outcome) (rate(atoll_contributions_total{{{JOB}}}[{RATE}]))", "{{outcome}}"),
            stacked=True,
            width=8,
            colours={"admitted": GOOD, "refused": BAD},
        ),
        curves(
            "Refusals by reason",
            "Refused contributions per second, for the five most frequent reasons. The runbook explains each.",
            "cps",
            Query(f"topk(5, sum by (reason) (rate(atoll_refusals_total{{{JOB}}}[{RATE}])))", "{{reason}}"),
            width=8,
        ),
        curves(
            "Staleness",
            "How many versions behind the base of an admitted contribution was. Beyond the job's limit it is refused.",
            "none",
            *quantiles("atoll_staleness_versions", of=(0.5, 0.99)),
            width=8,
        ),
    ]


def _traffic() -> list[Panel]:
    return [
        curves(
            "Payload bytes",
            "Bytes per second on the wire, up from islands and down to them. Values and states go to islands that missed "
            "versions or are new. Transfers between peers are not included.",
            "Bps",
            Query(
                f"sum by (direction, kind, codec) (rate(atoll_payload_bytes_total{{{JOB}}}[{RATE}]))",
                "{{direction}} {{kind}} {{codec}}",
            ),
        ),
        curves(
            "Payloads",
            "Fragments per second, up from islands and down to them.",
            "cps",
            Query(f"sum by (direction) (rate(atoll_payloads_total{{{JOB}}}[{RATE}]))", "{{direction}}"),
        ),
        curves(
            "Line utilisation",
            "Share of the time with a transfer under way, on the busiest lines. Near 1: the line is saturated.",
            "percentunit",
            Query(
                most(f"max by (island, direction) (rate(atoll_line_busy_seconds_total{{{JOB}}}[{RATE}]))"),
                "{{island}} {{direction}}",
            ),
        ),
        curves(
            "Line speed",
            "Bytes per second of transfer time, by region.",
            "Bps",
            Query(
                f"sum by (region, direction) (rate(atoll_payload_bytes_total{{{JOB}}}[{RATE}])) "
                f"/ sum by (region, direction) (rate(atoll_line_busy_seconds_total{{{JOB}}}[{RATE}]))",
                "{{region}} {{direction}}",
            ),
        ),
        curves(
            "Queued for islands",
            "Fragments that are published but have not arrived. Constantly all fragments: the line is too slow. "
            "Hindered: 1 while nothing gets through (a firewall, certificates, no answer); the job's status says why.",
            "none",
            Query(most(f"sum by (island) (atoll_line_queued_fragments{{{JOB}}})"), "{{island}}"),
            Query(most(f"max by (island) (atoll_line_hindered{{{JOB}}})"), "{{island}} hindered"),
        ),
        curves(
            "Queued bytes",
            "The bytes of those fragments.",
            "bytes",
            Query(f"sum by (region) (atoll_line_queued_bytes{{{JOB}}})", "{{region}}"),
        ),
        curves(
            "Update of each fragment",
            "Norm of the change that the last outer step made.",
            "none",
            Query(f"atoll_fragment_update_norm{{{JOB}}}", "{{atoll_job}} {{fragment}}"),
        ),
        curves(
            "Codec residue",
            "Norm of the rounding error not yet corrected, relative to the last update. It should stay level.",
            "percentunit",
            Query(f"atoll_fragment_residue_ratio{{{JOB}}}", "{{atoll_job}} {{fragment}}"),
        ),
        curves(
            "Routers apart",
            "Mixtures: distance between islands' routers in the last merge.",
            "none",
            Query(f"atoll_fragment_router_distance{{{JOB}}}", "{{atoll_job}} {{fragment}}"),
        ),
        curves(
            "Travel of routers",
            "Mixtures: how far an island had moved its routers by a merge. Independent ones are 1.41 times that apart.",
            "none",
            Query(f"atoll_fragment_router_travel{{{JOB}}}", "{{atoll_job}} {{fragment}}"),
        ),
    ]
