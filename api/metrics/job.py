"""One job's samples: a ``StatusRecord`` as the metrics of ``metrics.catalogue``.

Pure: the same record gives the same samples. It computes nothing that the folds did not count, except that it adds up
buckets and divides norms. Parts that a record of an earlier build lacks are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from math import inf
from typing import Any

from orchestrator.actors.records import StatusRecord
from orchestrator.core.faults import Kind
from orchestrator.core.vocabulary import DataFlaws, IslandState, JobPhase, RefusalReason
from orchestrator.parameters.codec.registry import EXACT

CONTRIBUTOR_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
RECOVERY_BOUNDS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
DATA_FLAWS = tuple(field.name for field in fields(DataFlaws) if field.name != "sources")
FAULT_KINDS = tuple(sorted(kind.value for kind in Kind if kind is not Kind.KILL_API))
"""Of ``core.events.FaultInjected``; a continue is the end of another, and the service's own death is on no job's tape."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram as it is exposed: how many were at most each bound, the last of them infinite."""

    cumulative: tuple[tuple[float, int], ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Sample:
    """``labels`` are in the order of the family."""

    family: str
    labels: tuple[str, ...]
    value: float | Buckets


def samples(record: StatusRecord, spec: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield all samples of a record. ``spec`` is the job's, for the quorum and the codec, which no event repeats."""
    job = record["job_id"]
    schedule = spec["synchroniser"]
    yield Sample("atoll_quorum_islands", (job,), schedule["quorum"])
    yield from _of_job(job, record)
    yield from _of_islands(job, record)
    yield from _of_rounds(job, record)
    yield from _of_recoveries(job, record["statistics"])
    if "traffic" in record["statistics"]:
        regions = {island["island"]: island["region"] for island in record["view"]["islands"]}
        traffic = record["statistics"]["traffic"]
        yield from _of_traffic(job, traffic, regions)
        for direction in ("up", "down"):
            yield Sample("atoll_payloads", (job, direction), sum(traffic[f"payloads_{direction}"]))
    yield from _of_lines(job, record, schedule["wire"])
    yield from _of_norms(job, record)
    yield from _of_commands(job, record)


def _of_job(job: str, record: StatusRecord) -> Iterator[Sample]:
    view, goodput = record["view"], record["goodput"]
    for phase in JobPhase:
        yield Sample("atoll_job_phase", (job, phase.value), view["phase"] == phase)
    yield Sample("atoll_job_age_seconds", (job,), record["at"])
    yield Sample("atoll_job_paused", (job,), view["pause_reason"] is not None)
    for helper in record.get("helpers", ()):
        yield Sample("atoll_helper_up", (job, helper["name"]), helper["condition"] == "running")
        yield Sample("atoll_helper_restarts", (job, helper["name"]), helper["restarts"])
    if "disk_trouble" in record:
        yield Sample("atoll_journal_failing", (job,), record["disk_trouble"] is not None)
    if deaths := record["statistics"].get("synchroniser"):
        yield Sample("atoll_synchroniser_deaths", (job,), deaths["deaths"])
        yield Sample("atoll_damages", (job,), deaths["damages"])
    yield Sample("atoll_job_token_budget", (job,), view["token_budget"])
    yield Sample("atoll_goodput_ratio", (job,), goodput["goodput_ratio"])
    yield Sample("atoll_uptime_ratio", (job,), goodput["uptime_ratio"])
    if standbys := goodput.get("standbys"):  # not of jobs that ended under an earlier build
        for kind in ("ready", "preparing"):
            yield Sample("atoll_standby_seconds", (job, kind), standbys[f"{kind}_seconds"])
        yield Sample("atoll_standby_takeovers", (job,), standbys["takeovers"])
    for cause, seconds in goodput["badput_seconds"].items():
        yield Sample("atoll_badput_seconds", (job, cause), seconds)
    for cause, tokens in goodput["discarded_tokens"].items():
        yield Sample("atoll_tokens_discarded", (job, cause), tokens)
    if evaluations := record["statistics"].get("evaluations"):  # not of jobs that ended under an earlier build
        yield Sample("atoll_evaluations", (job,), evaluations["count"])
        yield Sample("atoll_evaluation_failures", (job,), evaluations["failures"])
        yield Sample("atoll_evaluation_seconds", (job,), evaluations["last_seconds"])
        yield Sample("atoll_evaluation_sequences", (job,), evaluations["sequence_count"])
        if (bits := evaluations.get("bits_per_byte")) is not None:
            yield Sample("atoll_held_out_bits_per_byte", (job,), bits)
        for one in evaluations.get("sources", ()):
            yield Sample("atoll_held_out_source_loss_nats", (job, one["source"]), one["loss"])
    if record["loss_curve"]:
        yield Sample("atoll_held_out_loss_nats", (job,), record["loss_curve"][-1][1])


def _of_islands(job: str, record: StatusRecord) -> Iterator[Sample]:
    statistics = record["statistics"]
    for island in record["view"]["islands"]:
        name = island["island"]
        labels = (job, name, island["region"])
        for state in IslandState:
            yield Sample("atoll_island_state", (*labels, state.value), island["state"] == state)
        yield Sample("atoll_island_accelerators", labels, island["accelerator_count"])
        yield Sample("atoll_island_overdue_seconds", labels, island.get("overdue_s", 0.0))
        yield Sample("atoll_island_restarts", labels, island["restarts"])
        yield Sample("atoll_island_flagged", labels, bool(island.get("flag")))
        yield Sample("atoll_island_quarantines", labels, island.get("quarantines", 0))
        yield Sample("atoll_island_steps", labels, island["steps_total"])
        yield Sample("atoll_island_merges", labels, statistics["merges_per_island"].get(name, 0))
        optional = {
            "atoll_island_step_seconds": island["step_seconds"],
            "atoll_training_loss_nats": island["loss"],
            "atoll_island_schedule_step": island["step"] if island["state"] == IslandState.TRAINING else None,
            "atoll_island_gap_max_seconds": statistics["gaps_max_s"].get(name),
        }
        if (merged_at := island["last_merge_at"]) is not None:
            optional["atoll_island_last_merge_age_seconds"] = record["at"] - merged_at
        yield from (Sample(family, labels, value) for family, value in optional.items() if value is not None)
        flaws = statistics.get("data_flaws", {}).get("islands", {}).get(name, {})
        for kind in DATA_FLAWS:
            yield Sample(f"atoll_island_{kind}", labels, flaws.get(kind, 0))
        if summary := record["goodput"]["islands"].get(name):
            for kind, seconds in summary["seconds"].items():
                yield Sample("atoll_island_seconds", (*labels, kind), seconds)
            for kind in ("trained", "merged", "in_flight"):
                yield Sample(f"atoll_tokens_{kind}", labels, summary["tokens"][kind])


def _of_rounds(job: str, record: StatusRecord) -> Iterator[Sample]:
    statistics = record["statistics"]
    for fragment in record["view"]["fragments"]:
        labels = (job, str(fragment["fragment"]))
        yield Sample("atoll_fragment_version", labels, fragment["version"])
        yield Sample("atoll_round_offered_islands", labels, len(fragment["offered"]))
        yield Sample("atoll_merges", labels, statistics["merges_per_fragment"][fragment["fragment"]])
    contributors = {int(count): times for count, times in statistics["merges_by_contributors"].items()}
    yield Sample("atoll_merge_contributors", (job,), _counted(contributors, CONTRIBUTOR_BOUNDS))
    for closed in statistics["close_reasons"]:
        yield Sample("atoll_rounds_closed", (job, closed["reason"]), closed["merges"])
    for part, histogram in statistics.get("round_seconds", {}).items():
        yield Sample("atoll_round_part_seconds", (job, part), _buckets(histogram))
    if "journal_seconds" in statistics:
        yield Sample("atoll_journal_seconds", (job,), _buckets(statistics["journal_seconds"]))
    for reason in RefusalReason:  # also those that never occurred: a rise from zero must be visible as one
        yield Sample("atoll_refusals", (job, reason.value), statistics["refusals"].get(reason.value, 0))


def _of_recoveries(job: str, statistics: Mapping[str, Any]) -> Iterator[Sample]:
    complete = [recovery for recovery in statistics["recoveries"] if recovery["complete"]]
    totals = Counter(recovery["total"] for recovery in complete)
    yield Sample("atoll_recovery_seconds", (job,), _counted(totals, RECOVERY_BOUNDS_S))
    for part in dict.fromkeys(part for recovery in complete for part in recovery["parts"]):
        lengths = Counter(recovery["parts"][part] for recovery in complete if part in recovery["parts"])
        yield Sample("atoll_recovery_part_seconds", (job, part), _counted(lengths, RECOVERY_BOUNDS_S))


def _of_traffic(job: str, traffic: Mapping[str, Any], regions: Mapping[str, str]) -> Iterator[Sample]:
    for island, region in regions.items():
        for outcome in ("admitted", "refused"):
            count = traffic[outcome].get(island, 0)
            yield Sample("atoll_contributions", (job, island, region, outcome), count)
    yield Sample("atoll_staleness_versions", (job,), _buckets(traffic["staleness"]))
    for source, count in traffic["catch_ups"].items():
        yield Sample("atoll_catch_ups", (job, source), count)
    yield Sample("atoll_catch_up_failures", (job,), traffic["catch_up_failures"])
    yield Sample("atoll_placement_failures", (job,), traffic["placement_failures"])
    yield Sample("atoll_merge_failures", (job,), traffic.get("merge_failures", 0))


def _of_lines(job: str, record: StatusRecord, wire: Mapping[str, str]) -> Iterator[Sample]:
    if "lines" not in record:
        return
    lines = record["lines"]["islands"]
    for island in record["view"]["islands"]:
        if (line := lines.get(island["island"])) is None:
            continue
        labels = (job, island["island"], island["region"])
        yield Sample("atoll_payload_bytes", (*labels, "up", "contribution", wire["up"]), line["up_bytes"])
        for kind, size in line["down_bytes"].items():
            codec_name = wire["down"] if kind == "update" else EXACT
            yield Sample("atoll_payload_bytes", (*labels, "down", kind, codec_name), size)
        yield Sample("atoll_line_busy_seconds", (*labels, "up"), line["up_busy_seconds"])
        yield Sample("atoll_line_busy_seconds", (*labels, "down"), line["down_busy_seconds"])
        yield Sample("atoll_line_queued_fragments", labels, line["queued_fragments"])
        yield Sample("atoll_line_queued_bytes", labels, line["queued_bytes"])
        yield Sample("atoll_line_hindered", labels, line.get("trouble") is not None)


def _of_norms(job: str, record: StatusRecord) -> Iterator[Sample]:
    for norms in record.get("fragment_norms", []):
        labels = (job, str(norms["fragment"]))
        yield Sample("atoll_fragment_update_norm", labels, norms["update_norm"])
        if norms["update_norm"]:
            yield Sample("atoll_fragment_residue_ratio", labels, norms["residue_norm"] / norms["update_norm"])


def _of_commands(job: str, record: StatusRecord) -> Iterator[Sample]:
    outcomes = {True: "accepted", False: "refused", None: "pending"}
    counts = Counter((noted["kind"], outcomes[noted["accepted"]]) for noted in record["commands"].values())
    yield Sample("atoll_commands_pending", (job,), sum(n for (_, outcome), n in counts.items() if outcome == "pending"))
    for (kind, outcome), count in sorted(counts.items()):
        if outcome != "pending":
            yield Sample("atoll_commands", (job, kind, outcome), count)
    faults = Counter(fault["kind"] for fault in record["statistics"].get("faults", ()))
    for kind in FAULT_KINDS:
        yield Sample("atoll_chaos_faults", (job, kind), faults[kind])


def _buckets(histogram: Mapping[str, Any]) -> Buckets:
    """Return the cumulative counts of a histogram of ``accounting.series``."""
    bounds = (*histogram["bounds"], inf)
    return Buckets(tuple(zip(bounds, accumulate(histogram["counts"]), strict=True)), histogram["sum"])


def _counted(values: Mapping[Any, int], bounds: Sequence[float]) -> Buckets:
    """Return how many values are in each bucket, given how often each value occurred."""
    cumulative = [(bound, sum(n for value, n in values.items() if value <= bound)) for bound in (*bounds, inf)]
    return Buckets(tuple(cumulative), sum(value * n for value, n in values.items()))
