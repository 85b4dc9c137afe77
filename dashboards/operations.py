"""The dashboard Operations: what do people and the service do with jobs, commands, chaos, requests and alerts?"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import BAD, GOOD, JOB, RATE, WARN, Panel, Query, board, curves, figure

REQUESTS = "atoll_api_request_seconds"
SERVICE = "and on (job, instance) atoll_build_info"
"""Choose the service's own series, whatever Prometheus's scrape job is called."""


def dashboard() -> Dashboard:
    return board(
        "atoll-operations",
        "atoll / Operations",
        "What do operators and the service do: jobs, commands, chaos, requests, alerts?",
        [("Right now", _now()), ("Jobs and commands", _commands()), ("The service", _service())],
    )


def _now() -> list[Panel]:
    return [
        figure(
            "Service",
            "Whether the last scrape of the service was answered.",
            "bool_yes_no",
            Query("up and on (job, instance) last_over_time(atoll_build_info[1d])", "{{instance}}"),
            steps=((None, BAD), (1, GOOD)),
        ),
        figure(
            "Alerts",
            "Firing alerts. The runbook has a section for each.",
            "none",
            Query('count(ALERTS{alertname=~"Atoll.+", alertstate="firing"}) or vector(0)', "firing"),
            steps=((None, GOOD), (1, BAD)),
        ),
        figure(
            "Jobs running",
            "Jobs that are training now.",
            "none",
            Query('sum(atoll_jobs{state=~"running|finishing"})', "running"),
        ),
        figure(
            "Silent jobs",
            "Jobs whose synchroniser did not answer the last scrape.",
            "none",
            Query("sum(1 - atoll_job_answers) or vector(0)", "silent"),
            steps=((None, GOOD), (1, BAD)),
        ),
        figure(
            "Commands pending",
            "Commands that no job has decided yet. They take milliseconds.",
            "none",
            Query(f"sum(atoll_commands_pending{{{JOB}}})", "pending"),
            steps=((None, GOOD), (1, WARN)),
        ),
        figure(
            "Slowest answers",
            "Time within which 99 % of requests are answered.",
            "s",
            Query(f"histogram_quantile(0.99, sum by (le) (rate({REQUESTS}_bucket[{RATE}])))", "p99"),
            steps=((None, GOOD), (0.1, WARN), (1, BAD)),
        ),
    ]


def _commands() -> list[Panel]:
    return [
        curves(
            "Jobs by state",
            "All jobs that the service knows, and those that ended within the last hour.",
            "none",
            Query("atoll_jobs", "{{state}}"),
            Query("sum by (state) (increase(atoll_jobs_ended_total[1h]))", "{{state}} within an hour"),
            width=12,
        ),
        curves(
            "Longest wait",
            "How long the longest waiting job has been queued. Red: the first job needs more than the fleet has.",
            "s",
            Query("atoll_queue_oldest_seconds", "oldest"),
            Query("atoll_queue_oldest_seconds * atoll_queue_unschedulable", "unschedulable"),
            width=12,
            colours={"unschedulable": BAD},
        ),
        curves(
            "Commands",
            "Operators' commands, by kind and outcome.",
            "none",
            Query(f"sum by (kind, outcome) (atoll_commands_total{{{JOB}}})", "{{kind}} {{outcome}}"),
            width=12,
        ),
        curves(
            "Chaos",
            "Faults that chaos plans injected: intended outages.",
            "none",
            Query(f"sum by (kind) (atoll_chaos_faults_total{{{JOB}}})", "{{kind}}"),
            width=12,
        ),
    ]


def _service() -> list[Panel]:
    return [
        curves(
            "Requests by route",
            "Requests per second.",
            "reqps",
            Query(f"sum by (method, route) (rate({REQUESTS}_count[{RATE}]))", "{{method}} {{route}}"),
            stacked=True,
        ),
        curves(
            "Answers by status",
            "4xx: the client is at fault. 5xx: the service is, or the cluster does not answer.",
            "reqps",
            Query(f"sum by (status) (rate({REQUESTS}_count[{RATE}]))", "{{status}}"),
            stacked=True,
            colours={"2xx": GOOD, "4xx": WARN, "5xx": BAD},
        ),
        curves(
            "Answer time by route",
            "99th percentile of the time until the answer starts.",
            "s",
            Query(f"histogram_quantile(0.99, sum by (le, route) (rate({REQUESTS}_bucket[{RATE}])))", "{{route}}"),
        ),
        curves(
            "Scrape time",
            "How long the service took to get the status of every live job.",
            "s",
            Query(f"scrape_duration_seconds {SERVICE}", "{{instance}}"),
        ),
        curves(
            "CPU",
            "CPU cores that the service uses. Jobs run in other processes.",
            "none",
            Query(f"rate(process_cpu_seconds_total[{RATE}]) {SERVICE}", "{{instance}}"),
            width=8,
        ),
        curves(
            "Memory",
            "Resident memory of the service's process.",
            "bytes",
            Query(f"process_resident_memory_bytes {SERVICE}", "{{instance}}"),
            width=8,
        ),
        curves(
            "Clock set by",
            "How far the clock of the service's machine was set since the service started.",
            "s",
            Query("atoll_clock_set_seconds", "{{instance}}"),
            width=8,
        ),
        curves(
            "Run folders by kind",
            "Size of the files of live jobs and of those that ended lately.",
            "bytes",
            Query("sum by (kind) (atoll_run_bytes)", "{{kind}}"),
            stacked=True,
        ),
        curves(
            "Largest run folders",
            "The five jobs with the largest folders.",
            "bytes",
            Query("topk(5, sum by (atoll_job) (atoll_run_bytes))", "{{atoll_job}}"),
        ),
    ]
