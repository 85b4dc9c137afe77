"""One job's samples: a ``JobStatus`` as the metrics of ``metrics.catalogue``.

Pure: the same status gives the same samples. It computes nothing that the folds did not count, except that it adds up
buckets and divides norms. Figures that the status of an earlier build lacks are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from math import inf
from typing import Any

from api.schemas import Look
from orchestrator.core.faults import Kind
from orchestrator.core.vocabulary import DataFlaws, IslandState, JobPhase, RefusalReason
from orchestrator.parameters.codec.registry import EXACT
from orchestrator.status import CostFigures, Histogram, JobStatus, StatisticsFigures, TrafficFigures

CONTRIBUTOR_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
RECOVERY_BOUNDS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
DATA_FLAWS = tuple(field.name for field in fields(DataFlaws) if field.name != "sources")
FAULT_KINDS = tuple(sorted(kind.value for kind in Kind if kind not in (Kind.CONTINUE, Kind.KILL_API)))
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


def samples(status: JobStatus, spec: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield all samples of a status. ``spec`` is the job's, for the quorum and the codec, which no event repeats."""
    job = status.job_id
    schedule = spec["synchroniser"]
    yield Sample("atoll_quorum_islands", (job,), status.view.quorum)
    yield from _of_job(job, status)
    if interval_s := checkpoint_interval_s(spec.get("checkpoints"), status):
        yield Sample("atoll_checkpoint_interval_seconds", (job,), interval_s)
    yield from _of_islands(job, status)
    yield from _of_rounds(job, status)
    yield from _of_mixture(job, status)
    yield from _of_recoveries(job, status.statistics)
    if "traffic" in status.statistics:
        regions = {island.island: island.region for island in status.view.islands}
        traffic = status.statistics["traffic"]
        yield from _of_traffic(job, traffic, regions)
        yield Sample("atoll_payloads", (job, "up"), sum(traffic["payloads_up"]))
        yield Sample("atoll_payloads", (job, "down"), sum(traffic["payloads_down"]))
    yield from _of_lines(job, status, schedule["wire"])
    yield from _of_norms(job, status)
    yield from _of_commands(job, status)


def advice_samples(job: str, newest_look: Sequence[Look]) -> Iterator[Sample]:
    """Yield the samples of the autopilot's newest look at the job's tape; none if there was none yet."""
    for look in newest_look:
        yield Sample("atoll_autopilot_look_timestamp_seconds", (job,), look.looked_at_time)
        yield Sample("atoll_autopilot_gain_ratio", (job,), look.advice.gain_ratio if look.advice is not None else 0.0)


def checkpoint_interval_s(section: Mapping[str, Any] | None, status: JobStatus) -> float | None:
    """Return the expected time between two checkpoints; None if the job makes none by itself, or has not merged yet."""
    section = section or {}
    merges, intervals = status.view.global_version, []
    if every_s := section.get("every_s"):
        intervals.append(float(every_s))
    if (every_merges := section.get("every_merges")) and merges:
        intervals.append(every_merges * status.at / merges)
    return min(intervals, default=None)


def _of_job(job: str, status: JobStatus) -> Iterator[Sample]:
    view, goodput = status.view, status.goodput
    for phase in JobPhase:
        yield Sample("atoll_job_phase", (job, phase.value), view.phase == phase)
    yield Sample("atoll_job_age_seconds", (job,), status.at)
    yield Sample("atoll_job_paused", (job,), view.pause_reason is not None)
    yield Sample("atoll_job_paused_at_limit", (job,), view.paused)
    for helper in status.helpers:
        yield Sample("atoll_helper_up", (job, helper.name), helper.condition == "running")
        yield Sample("atoll_helper_restarts", (job, helper.name), helper.restarts)
    for shard in status.shards:
        yield Sample("atoll_shard_up", (job, str(shard.shard), shard.node), shard.condition == "running")
        yield Sample("atoll_shard_bytes", (job, str(shard.shard), shard.node), shard.byte_count)
    if "disk_trouble" in status.model_fields_set:
        yield Sample("atoll_journal_failing", (job,), status.disk_trouble is not None)
    if "fenced" in status.model_fields_set:
        yield Sample("atoll_synchroniser_fenced", (job,), status.fenced is not None)
    if (store := status.store) is not None:
        yield Sample("atoll_store_failing", (job,), store.trouble is not None)
        yield Sample("atoll_store_puts", (job,), store.puts)
        yield Sample("atoll_store_put_bytes", (job,), store.put_bytes)
        yield Sample("atoll_store_put_seconds", (job,), store.put_seconds)
    if deaths := status.statistics.get("synchroniser"):
        yield Sample("atoll_synchroniser_deaths", (job,), deaths["deaths"])
        yield Sample("atoll_damages", (job,), deaths["damages"])
    yield Sample("atoll_job_token_budget", (job,), view.token_budget)
    yield from _known("atoll_job_remaining_seconds", (job,), status.eta_s)
    checkpoint = view.checkpoint
    yield Sample("atoll_checkpoint_failures", (job,), checkpoint.failures)
    if checkpoint.scheduled or checkpoint.taken_at is not None:
        yield Sample("atoll_checkpoint_age_seconds", (job,), status.at - (checkpoint.taken_at or 0.0))
        yield Sample("atoll_checkpoint_bytes", (job,), checkpoint.bytes)
    yield from _known("atoll_goodput_ratio", (job,), goodput["goodput_ratio"])
    yield from _known("atoll_uptime_ratio", (job,), goodput["uptime_ratio"])
    if standbys := goodput.get("standbys"):  # not of jobs that ended under an earlier build
        yield Sample("atoll_standby_seconds", (job, "ready"), standbys["ready_seconds"])
        yield Sample("atoll_standby_seconds", (job, "preparing"), standbys["preparing_seconds"])
        yield Sample("atoll_standby_takeovers", (job,), standbys["takeovers"])
    if cost := goodput.get("cost"):
        yield from _of_cost(job, cost)
    for cause, seconds in goodput["badput_seconds"].items():
        yield Sample("atoll_badput_seconds", (job, cause), seconds)
    for cause, tokens in goodput["discarded_tokens"].items():
        yield Sample("atoll_tokens_discarded", (job, cause), tokens)
    if evaluations := status.statistics.get("evaluations"):  # not of jobs that ended under an earlier build
        yield Sample("atoll_evaluations", (job,), evaluations["count"])
        yield Sample("atoll_evaluation_failures", (job,), evaluations["failures"])
        yield Sample("atoll_evaluation_seconds", (job,), evaluations["last_seconds"])
        yield Sample("atoll_evaluation_sequences", (job,), evaluations["sequence_count"])
        yield from _known("atoll_held_out_bits_per_byte", (job,), evaluations.get("bits_per_byte"))
        if pairs := evaluations.get("preference"):
            yield from _known("atoll_held_out_preference_accuracy_ratio", (job,), pairs["accuracy"])
            yield from _known("atoll_held_out_preference_margin_nats", (job,), pairs["margin"])
        for one in evaluations.get("sources", ()):
            yield from _known("atoll_held_out_source_loss_nats", (job, one["source"]), one["loss"])
    if status.loss_curve:
        yield from _known("atoll_held_out_loss_nats", (job,), status.loss_curve[-1][1])


def _of_islands(job: str, status: JobStatus) -> Iterator[Sample]:
    statistics = status.statistics
    for island in status.view.islands:
        name = island.island
        labels = (job, name, island.region)
        for state in IslandState:
            yield Sample("atoll_island_state", (*labels, state.value), island.state == state)
        yield Sample("atoll_island_accelerators", labels, island.accelerator_count)
        yield Sample("atoll_island_overdue_seconds", labels, island.overdue_s)
        yield Sample("atoll_island_restarts", labels, island.restarts)
        if "failures" in statistics:
            yield Sample("atoll_island_failures", labels, statistics["failures"].get(name, 0))
        yield Sample("atoll_island_flagged", labels, bool(island.flag))
        yield Sample("atoll_island_quarantines", labels, island.quarantines)
        yield Sample("atoll_island_steps", labels, island.steps_total)
        yield Sample("atoll_island_merges", labels, statistics["merges_per_island"].get(name, 0))
        optional = {
            "atoll_island_step_seconds": island.step_seconds,
            "atoll_training_loss_nats": island.loss,
            "atoll_island_learning_rate": island.learning_rate,
            "atoll_island_gradient_norm": island.gradient_norm,
            "atoll_island_mfu_ratio": island.mfu_ratio,
            "atoll_island_schedule_step": island.step if island.state == IslandState.TRAINING else None,
            "atoll_island_gap_max_seconds": statistics["gaps_max_s"].get(name),
        }
        if (merged_at := island.last_merge_at) is not None:
            optional["atoll_island_last_merge_age_seconds"] = status.at - merged_at
        for family, value in optional.items():
            yield from _known(family, labels, value)
        flaws = statistics.get("data_flaws", {}).get("islands", {}).get(name, {})
        for kind in DATA_FLAWS:
            yield Sample(f"atoll_island_{kind}", labels, flaws.get(kind, 0))
        if summary := status.goodput["islands"].get(name):
            for kind, seconds in summary["seconds"].items():
                yield Sample("atoll_island_seconds", (*labels, kind), seconds)
            for kind in ("trained", "merged", "in_flight"):
                yield Sample(f"atoll_tokens_{kind}", labels, summary["tokens"][kind])


def _of_rounds(job: str, status: JobStatus) -> Iterator[Sample]:
    statistics = status.statistics
    for fragment in status.view.fragments:
        labels = (job, str(fragment.fragment))
        yield Sample("atoll_fragment_version", labels, fragment.version)
        yield Sample("atoll_round_offered_islands", labels, len(fragment.offered))
        yield Sample("atoll_merges", labels, statistics["merges_per_fragment"][fragment.fragment])
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


def _of_mixture(job: str, status: JobStatus) -> Iterator[Sample]:
    if not (mixture := status.statistics.get("mixture")):
        return
    for island in status.view.islands:
        if own := mixture["islands"].get(island.island):
            labels = (job, island.island, island.region)
            yield Sample("atoll_island_expert_share_max_ratio", labels, own["expert_share_max"])
            yield Sample("atoll_island_expert_entropy_ratio", labels, own["expert_entropy_ratio"])
            yield from _known("atoll_island_loss_before_adoption_nats", labels, own["loss_before"])
            yield from _known("atoll_island_loss_after_adoption_nats", labels, own["loss_after"])
    for routers in mixture["routers"]:
        fragment = str(routers["fragment"])
        yield Sample("atoll_fragment_router_distance", (job, fragment), routers["distance"])
        yield Sample("atoll_fragment_router_travel", (job, fragment), routers["travel"])


def _of_recoveries(job: str, statistics: StatisticsFigures) -> Iterator[Sample]:
    complete = [recovery for recovery in statistics["recoveries"] if recovery["complete"]]
    totals = Counter(recovery["total"] for recovery in complete)
    yield Sample("atoll_recovery_seconds", (job,), _counted(totals, RECOVERY_BOUNDS_S))
    for part in dict.fromkeys(part for recovery in complete for part in recovery["parts"]):
        lengths = Counter(recovery["parts"][part] for recovery in complete if part in recovery["parts"])
        yield Sample("atoll_recovery_part_seconds", (job, part), _counted(lengths, RECOVERY_BOUNDS_S))


def _of_traffic(job: str, traffic: TrafficFigures, regions: Mapping[str, str]) -> Iterator[Sample]:
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


def _of_lines(job: str, status: JobStatus, wire: Mapping[str, str]) -> Iterator[Sample]:
    lines = status.lines.islands
    for island in status.view.islands:
        if (line := lines.get(island.island)) is None:
            continue
        labels = (job, island.island, island.region)
        yield Sample("atoll_payload_bytes", (*labels, "up", "contribution", wire["up"]), line.up_bytes)
        for kind, size in line.down_bytes.items():
            codec_name = wire["down"] if kind == "update" else EXACT
            yield Sample("atoll_payload_bytes", (*labels, "down", kind, codec_name), size)
        yield Sample("atoll_line_busy_seconds", (*labels, "up"), line.up_busy_seconds)
        yield Sample("atoll_line_busy_seconds", (*labels, "down"), line.down_busy_seconds)
        yield Sample("atoll_line_queued_fragments", labels, line.queued_fragments)
        yield Sample("atoll_line_queued_bytes", labels, line.queued_bytes)
        yield Sample("atoll_line_hindered", labels, line.trouble is not None)


def _of_norms(job: str, status: JobStatus) -> Iterator[Sample]:
    for norms in status.fragment_norms:
        labels = (job, str(norms.fragment))
        yield from _known("atoll_fragment_update_norm", labels, norms.update_norm)
        if norms.update_norm and norms.residue_norm is not None:
            yield Sample("atoll_fragment_residue_ratio", labels, norms.residue_norm / norms.update_norm)


def _of_commands(job: str, status: JobStatus) -> Iterator[Sample]:
    outcomes = {True: "accepted", False: "refused", None: "pending"}
    counts = Counter((command.kind, outcomes[command.accepted]) for command in status.commands.values())
    yield Sample("atoll_commands_pending", (job,), sum(n for (_, outcome), n in counts.items() if outcome == "pending"))
    for (kind, outcome), count in sorted(counts.items()):
        if outcome != "pending":
            yield Sample("atoll_commands", (job, kind, outcome), count)
    faults = Counter(fault["kind"] for fault in status.statistics.get("faults", ()))
    for kind in FAULT_KINDS:
        yield Sample("atoll_chaos_faults", (job, kind), faults[kind])


def _of_cost(job: str, cost: CostFigures) -> Iterator[Sample]:
    labels = (job, cost["currency"])
    yield Sample("atoll_cost", labels, cost["so_far"])
    yield from _known("atoll_cost_per_merged_million_tokens", labels, cost["per_merged_million_tokens"])
    for cause, part in cost["badput"].items():
        yield Sample("atoll_cost_badput", (*labels, cause), part)
    for bound, value in (cost["forecast"] or {}).items():
        yield from _known("atoll_cost_forecast", (*labels, bound), value)


def _known(family: str, labels: tuple[str, ...], value: float | None) -> Iterator[Sample]:
    """Yield the sample, unless there is no value: it was never measured, or it was no number."""
    if value is not None:
        yield Sample(family, labels, value)


def _buckets(histogram: Histogram) -> Buckets:
    """Return the cumulative counts of a histogram of ``accounting.series``."""
    bounds = (*histogram["bounds"], inf)
    return Buckets(tuple(zip(bounds, accumulate(histogram["counts"]), strict=True)), histogram["sum"])


def _counted(values: Mapping[Any, int], bounds: Sequence[float]) -> Buckets:
    """Return how many values are in each bucket, given how often each value occurred."""
    cumulative = [(bound, sum(n for value, n in values.items() if value <= bound)) for bound in (*bounds, inf)]
    return Buckets(tuple(cumulative), sum(value * n for value, n in values.items()))
