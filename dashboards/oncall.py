"""The dashboard On call, to open first: is anything wrong, where, and how much time is left?

Each line answers one question of the person who was just woken. The other dashboards have the details.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import BAD, GOOD, JOB, WARN, Column, Panel, Query, board, curves, figure, listing, most

NAMED = "max by (atoll_job)"
HOURS_LEFT = "(atoll_disk_free_bytes / -(deriv(atoll_disk_free_bytes[6h]) < 0))"
ETA = f"max by (atoll_job) (atoll_job_remaining_seconds{{{JOB}}})"


def dashboard() -> Dashboard:
    return board(
        "atoll-oncall",
        "atoll / On call",
        "Is anything wrong, where, and how much time is left? Open this one first.",
        [
            ("Is anything wrong?", _wrong()),
            ("Jobs", _jobs()),
            ("Nodes and disks", _nodes()),
            ("Does training go well?", _training()),
        ],
    )


def _wrong() -> list[Panel]:
    return [
        figure(
            "Service",
            "Whether the last scrape of the service was answered.",
            "bool_yes_no",
            Query("up and on (job, instance) last_over_time(atoll_build_info[1d])", "{{instance}}"),
            steps=((None, BAD), (1, GOOD)),
        ),
        figure(
            "Head",
            "Whether the cluster's head answered the service at the last scrape. Nothing merges without it.",
            "bool_yes_no",
            Query("atoll_head_up", "{{instance}}"),
            steps=((None, BAD), (1, GOOD)),
        ),
        figure(
            "Alerts",
            "Firing alerts; the table below lists them.",
            "none",
            Query('count(ALERTS{alertname=~"Atoll.+", alertstate="firing"}) or vector(0)', "firing"),
            steps=((None, GOOD), (1, BAD)),
        ),
        figure(
            "Silent jobs",
            "Jobs whose synchroniser did not answer the last scrape. What is shown of them is old.",
            "none",
            Query("sum(1 - atoll_job_answers) or vector(0)", "silent"),
            steps=((None, GOOD), (1, BAD)),
        ),
        figure(
            "Failed jobs",
            "Jobs that failed within the last week, and were neither continued nor deleted.",
            "none",
            Query("count(atoll_job_failed_timestamp_seconds) or vector(0)", "failed"),
            steps=((None, GOOD), (1, BAD)),
        ),
        figure(
            "Certificates",
            "Days until the first certificate in use expires. Without TLS between machines there is none.",
            "d",
            Query("min((atoll_certificate_expiry_timestamp_seconds - time()) / 86400)", "first"),
            steps=((None, BAD), (2, WARN), (14, GOOD)),
        ),
        listing(
            "Firing alerts",
            "The name of an alert leads to its section of the runbook.",
            "alertname",
            [
                Column("Alert", name="alertname", link="${runbook}#:~:text=${__value.text}"),
                Column("Severity", name="severity"),
                Column("Job", name="atoll_job", link="${page}/#${__value.text}"),
                Column("Island", name="island"),
                Column("Place", name="place"),
                Column("Group", name="group"),
                Column("Path", name="path"),
                Column("Firing", 'ALERTS{alertname=~"Atoll.+", alertstate="firing"}', words=("no", "yes")),
            ],
        ),
    ]


def _jobs() -> list[Panel]:
    return [
        listing(
            "Live jobs",
            "One line for each job that runs, or ended in the last minutes. A silent job shows only its name: the rest is "
            "not known. Its name leads to its page. Advised: the autopilot's newest look, and the gain that it promises.",
            "atoll_job",
            [
                Column("Job", name="atoll_job", link="${page}/#${__value.text}"),
                Column("Phase", name="phase"),
                Column("", f"max by (atoll_job, phase) (atoll_job_phase{{{JOB}}} == 1)"),
                Column(
                    "Answers",
                    f"{NAMED} (atoll_job_answers{{{JOB}}})",
                    steps=((None, BAD), (1, GOOD)),
                    words=("silent", "yes"),
                ),
                Column(
                    "Merging",
                    f"{NAMED} (1 - atoll_job_paused{{{JOB}}})",
                    steps=((None, BAD), (1, GOOD)),
                    words=("paused", "yes"),
                ),
                Column("Last merge", f"min by (atoll_job) (atoll_island_last_merge_age_seconds{{{JOB}}})", "s"),
                Column("Ready in", ETA, "s"),
                Column("Checkpoint age", f"{NAMED} (atoll_checkpoint_age_seconds{{{JOB}}})", "s"),
                Column("Training", f'sum by (atoll_job) (atoll_island_state{{{JOB}, state="training"}})'),
                Column("Goodput", f"{NAMED} (atoll_goodput_ratio{{{JOB}}})", "percentunit"),
                Column("Held-out loss", f"{NAMED} (atoll_held_out_loss_nats{{{JOB}}})"),
                Column("Advised gain", f"{NAMED} (atoll_autopilot_gain_ratio{{{JOB}}})", "percentunit"),
                Column("Advised", f"{NAMED} (time() - atoll_autopilot_look_timestamp_seconds{{{JOB}}})", "s"),
            ],
        ),
    ]


def _nodes() -> list[Panel]:
    return [
        listing(
            "Nodes by group",
            "There: nodes of the group. Leaving: about to go. Down: they do not answer. Cordoned: nothing new is placed on "
            "them. Wanted: islands that running jobs want there. Waiting: those for which there is no node.",
            "group",
            [
                Column("Group", name="group"),
                Column("There", "sum by (group) (atoll_nodes)"),
                Column("Leaving", "sum by (group) (atoll_nodes_leaving)", steps=((None, GOOD), (1, WARN))),
                Column("Down", "sum by (group) (atoll_nodes_down)", steps=((None, GOOD), (1, WARN))),
                Column("Cordoned", "sum by (group) (atoll_nodes_cordoned)", steps=((None, GOOD), (1, WARN))),
                Column("Islands wanted", "sum by (group) (atoll_islands_wanted)"),
                Column("Islands waiting", "sum by (group) (atoll_islands_waiting)", steps=((None, GOOD), (1, WARN))),
            ],
            width=8,
        ),
        listing(
            "Disks",
            "Free space, and when it is used up at the rate of the last six hours.",
            "path",
            [
                Column("Path", name="path"),
                Column("Free", "min by (path) (atoll_disk_free_bytes)", "bytes", steps=((None, BAD), (5e9, GOOD))),
                Column(
                    "Full in",
                    f"min by (path) ({HOURS_LEFT})",
                    "s",
                    steps=((None, BAD), (7200, WARN), (86400, GOOD)),
                ),
            ],
            width=8,
        ),
        listing(
            "Certificates in use",
            "Whose certificate expires when.",
            "place",
            [
                Column("Place", name="place"),
                Column(
                    "Expires in",
                    "min by (place) (atoll_certificate_expiry_timestamp_seconds - time())",
                    "s",
                    steps=((None, BAD), (2 * 86400, WARN), (14 * 86400, GOOD)),
                ),
                Column("Issued for", "min by (place) (atoll_certificate_lifetime_seconds)", "s"),
            ],
            width=8,
        ),
    ]


def _training() -> list[Panel]:
    return [
        curves(
            "Held-out loss",
            "Loss of the merged parameters on held-out text, in nats per token. It should fall.",
            "none",
            Query(f"atoll_held_out_loss_nats{{{JOB}}}", "{{atoll_job}}"),
            width=8,
        ),
        curves(
            "Islands that train",
            "By job. A step down: islands have left or died.",
            "none",
            Query(f'sum by (atoll_job) (atoll_island_state{{{JOB}, state="training"}})', "{{atoll_job}}"),
            width=8,
        ),
        curves(
            "Islands that fail",
            "Failures of the last half hour, of the islands with the most. Departures after a notice do not count.",
            "none",
            Query(most(f"increase(atoll_island_failures_total{{{JOB}}}[30m])"), "{{atoll_job}} {{island}}"),
            width=8,
        ),
    ]
