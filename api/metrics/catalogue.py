"""Every metric of the service: its name, its labels, and what its rise means to whoever is on call.

Responsible for the catalogue only. Names are in base units; labels are bounded: by the jobs that live, by their islands,
fragments and regions, and by reasons and classes that the code knows. Nothing a caller can choose freely is a label.

What a job says is the job's own totals, so a counter goes on where it was after the service restarts. Where a total may
also fall (a share of time that is reckoned anew, tokens that were given up and came back) it is a gauge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """``name`` without the ``_total`` that a counter is exposed with."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    labels: tuple[str, ...]
    help: str

    @property
    def series(self) -> frozenset[str]:
        """The names under which queries find it."""
        endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
        return frozenset(self.name + ending for ending in endings[self.kind])


ISLAND = ("job", "island", "region")
_FRAGMENT = ("job", "fragment")

_FAMILIES = (
    # ── this service ──────────────────────────────────────────────────────────────────────────────────────────────
    Family(
        "histogram",
        "atoll_api_request_seconds",
        ("method", "route", "status"),
        "Time from a request's arrival to the beginning of its answer. A rise: the cluster or the disk is slow.",
    ),
    Family(
        "gauge",
        "atoll_clock_set_seconds",
        (),
        "By how much the clock of the service's machine was set since the service began; negative if back. Far from 0: "
        "times of day in jobs and audit trail are not one clock's.",
    ),
    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────
    Family("gauge", "atoll_jobs", ("state",), "Jobs the service knows, by state."),
    Family(
        "gauge",
        "atoll_queue_oldest_seconds",
        (),
        "How long the job that has waited longest has been queued; 0 if none is. A steady rise: nothing moves on.",
    ),
    Family(
        "gauge",
        "atoll_queue_hopeless",
        (),
        "1 while the first in line asks for more than the fleet has in all: nodes are away, and waiting does not help.",
    ),
    Family(
        "gauge",
        "atoll_job_answers",
        ("job",),
        "Whether the job's synchroniser answered this scrape. 0: see it is alive.",
    ),
    Family("gauge", "atoll_job_phase", ("job", "phase"), "1 for the phase the job is in, 0 for the others."),
    Family("gauge", "atoll_job_age_seconds", ("job",), "Time since the job was created."),
    Family(
        "gauge",
        "atoll_job_paused",
        ("job",),
        "1 while no fragment can merge: fewer islands than the quorum, or the journal fails.",
    ),
    Family(
        "gauge",
        "atoll_helper_up",
        ("job", "helper"),
        "1 while the job's helper process (controller, evaluator, a node's agent) answers. 0: it is made again, or silent.",
    ),
    Family(
        "counter",
        "atoll_helper_restarts",
        ("job", "helper"),
        "Times the helper process died and was made again. A steady rise: it cannot live; the job's page says why.",
    ),
    Family("gauge", "atoll_job_token_budget", ("job",), "Tokens after which the job ends."),
    Family("gauge", "atoll_quorum_islands", ("job",), "Islands a round needs before it may close (K)."),
    # ── what it was worth ─────────────────────────────────────────────────────────────────────────────────────────
    Family(
        "gauge",
        "atoll_goodput_ratio",
        ("job",),
        "Part of all accelerator-seconds so far whose tokens reached a merge. A fall means work is being lost.",
    ),
    Family("gauge", "atoll_uptime_ratio", ("job",), "Part of the time with at least a quorum of islands training."),
    Family(
        "gauge",
        "atoll_island_seconds",
        (*ISLAND, "class"),
        "Island-seconds by what they were worth; every second is in one class. Only productive ones should rise.",
    ),
    Family("gauge", "atoll_island_accelerators", ISLAND, "Accelerators of the island; 1 for an island on CPUs."),
    Family("gauge", "atoll_badput_seconds", ("job", "cause"), "Island-seconds that were not productive, by cause."),
    Family("counter", "atoll_tokens_trained", ISLAND, "Tokens trained, merged or not: the raw rate."),
    Family("counter", "atoll_tokens_merged", ISLAND, "Tokens that reached a merge (mean over fragments)."),
    Family("gauge", "atoll_tokens_in_flight", ISLAND, "Tokens trained and neither merged nor discarded yet."),
    Family("gauge", "atoll_tokens_discarded", ("job", "cause"), "Tokens that never will be in a merge, by cause."),
    Family("gauge", "atoll_held_out_loss_nats", ("job",), "Latest loss of the merged parameters, nats per token."),
    Family(
        "gauge", "atoll_held_out_bits_per_byte", ("job",), "The same per byte of text, by which tokenizers compare."
    ),
    Family(
        "gauge",
        "atoll_held_out_source_loss_nats",
        ("job", "source"),
        "The same on each source, where there are several.",
    ),
    Family("counter", "atoll_evaluations", ("job",), "Held-out losses measured."),
    Family("counter", "atoll_evaluation_failures", ("job",), "Evaluations that gave no loss: look at the events."),
    Family("gauge", "atoll_evaluation_seconds", ("job",), "Time that the latest evaluation took to measure."),
    Family(
        "gauge",
        "atoll_evaluation_sequences",
        ("job",),
        "Held-out sequences in the latest loss. Below evaluation.sequences: all of them would have taken too long.",
    ),
    # ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────
    Family(
        "counter",
        "atoll_island_unreadable_records",
        ISLAND,
        "Records and pieces of files passed over. A rise: look into the island's log for the file. A limit ends the job.",
    ),
    Family(
        "counter",
        "atoll_island_cut_pieces",
        ISLAND,
        "Pieces of files whose text was too much and is left out in part. A rise: a compressed file is not what it seems.",
    ),
    Family(
        "counter",
        "atoll_island_repeated_sequences",
        ISLAND,
        "Sequences drawn a second time in an epoch. A rise: the text has changed, or is large and has no data.index.",
    ),
    Family("counter", "atoll_island_omitted_sequences", ISLAND, "Sequences passed over in their epoch, likewise."),
    # ── islands ───────────────────────────────────────────────────────────────────────────────────────────────────
    Family("gauge", "atoll_island_state", (*ISLAND, "state"), "1 for the state the island is in, 0 for the others."),
    Family(
        "gauge",
        "atoll_island_overdue_seconds",
        ISLAND,
        "Seconds in its present step where that is far beyond the usual, else 0. At the limit the island is ended.",
    ),
    Family("counter", "atoll_island_restarts", ISLAND, "Times the island was placed again. A steady rise: it flaps."),
    Family(
        "gauge", "atoll_island_flagged", ISLAND, "1 from an unusable or exploding contribution until a good one merges."
    ),
    Family(
        "counter",
        "atoll_island_quarantines",
        ISLAND,
        "Times it was replaced for what it computed: look at its machine.",
    ),
    Family("counter", "atoll_island_steps", ISLAND, "Inner steps over all incarnations."),
    Family(
        "gauge",
        "atoll_island_schedule_step",
        ISLAND,
        "Logical step, by which fragments are due, of an island that trains. Far below the others': its work comes late.",
    ),
    Family("gauge", "atoll_island_step_seconds", ISLAND, "Time of an inner step of late."),
    Family("gauge", "atoll_island_gap_max_seconds", ISLAND, "Longest time between two steps so far: was it held up?"),
    Family("gauge", "atoll_training_loss_nats", ISLAND, "Training loss of the island's last step, nats per token."),
    Family("counter", "atoll_island_merges", ISLAND, "Merges that the island's work is in."),
    Family("gauge", "atoll_island_last_merge_age_seconds", ISLAND, "Time since a merge last held the island's work."),
    Family(
        "gauge", "atoll_standby_seconds", ("job", "class"), "Time of standbys, ready or preparing; no island's time."
    ),
    Family("counter", "atoll_standby_takeovers", ("job",), "Lost islands that went on as a standby's process."),
    Family("counter", "atoll_catch_ups", ("job", "source"), "States handed to islands, by who gave them."),
    Family("counter", "atoll_catch_up_failures", ("job",), "Attempts to hand over a state that failed."),
    Family("counter", "atoll_placement_failures", ("job",), "Attempts to make an island's process that failed."),
    Family(
        "histogram", "atoll_recovery_seconds", ("job",), "From an island's loss to a merge that holds its new work."
    ),
    Family("histogram", "atoll_recovery_part_seconds", ("job", "part"), "The parts of those recoveries; they add up."),
    # ── rounds and merges ─────────────────────────────────────────────────────────────────────────────────────────
    Family("counter", "atoll_merges", _FRAGMENT, "Outer steps taken. No rise for minutes: merging has stalled."),
    Family("counter", "atoll_merge_failures", ("job",), "Outer steps thrown away because their result was not finite."),
    Family("gauge", "atoll_fragment_version", _FRAGMENT, "Version the fragment stands at."),
    Family("gauge", "atoll_round_offered_islands", _FRAGMENT, "Islands in the fragment's open round."),
    Family("histogram", "atoll_merge_contributors", ("job",), "Islands whose work one merge holds."),
    Family("counter", "atoll_rounds_closed", ("job", "reason"), "Rounds by why they stopped waiting."),
    Family(
        "histogram",
        "atoll_round_part_seconds",
        ("job", "part"),
        "A round: collecting until it could close, grace until it did, merging until the new version stood.",
    ),
    Family(
        "histogram",
        "atoll_journal_seconds",
        ("job",),
        "From an outer step to its version being durable. A rise: the disk of journal and tape is slow.",
    ),
    Family(
        "gauge",
        "atoll_journal_failing",
        ("job",),
        "1 while the disk refuses journal or tape: nothing merges until it takes them. Is it full?",
    ),
    Family(
        "counter", "atoll_synchroniser_deaths", ("job",), "Times the synchroniser was made again. Islands trained on."
    ),
    Family(
        "counter",
        "atoll_damages",
        ("job",),
        "Times it found the end of tape or journal unreadable, and went on without that.",
    ),
    Family("counter", "atoll_contributions", (*ISLAND, "outcome"), "Contributions admitted and refused."),
    Family("counter", "atoll_refusals", ("job", "reason"), "Contributions refused, by reason. Work is thrown away."),
    Family("histogram", "atoll_staleness_versions", ("job",), "Versions an admitted contribution's base was behind."),
    Family("counter", "atoll_payloads", ("job", "direction"), "Fragments sent up to, and down from, the synchroniser."),
    Family(
        "counter",
        "atoll_payload_bytes",
        (*ISLAND, "direction", "kind", "codec"),
        "Bytes carried between island and synchroniser, headers included, since the synchroniser began. Many of values or "
        "states beside updates: islands miss versions.",
    ),
    Family(
        "counter",
        "atoll_line_busy_seconds",
        (*ISLAND, "direction"),
        "Time in which something was under way. A rate near 1: the line is full, or nothing comes through.",
    ),
    Family(
        "gauge",
        "atoll_line_queued_fragments",
        ISLAND,
        "Fragments published for the island that have not arrived. Steadily as many as there are: the line is too slow.",
    ),
    Family("gauge", "atoll_line_queued_bytes", ISLAND, "Their bytes, as updates where there are any."),
    Family(
        "gauge",
        "atoll_line_hindered",
        ISLAND,
        "1 while the island's payloads do not come through (a firewall, certificates); the job's page says why.",
    ),
    Family(
        "gauge",
        "atoll_fragment_update_norm",
        _FRAGMENT,
        "Norm of the last outer step's change of the fragment. A jump: its contributions changed.",
    ),
    Family(
        "gauge",
        "atoll_fragment_residue_ratio",
        _FRAGMENT,
        "Norm of what the codec of updates still owes, over that of the last update. A steady rise: too few bits.",
    ),
    # ── operators ─────────────────────────────────────────────────────────────────────────────────────────────────
    Family("counter", "atoll_commands", ("job", "kind", "outcome"), "Operators' commands that were decided."),
    Family("gauge", "atoll_commands_pending", ("job",), "Commands the job has not decided yet."),
    Family("counter", "atoll_chaos_faults", ("job", "kind"), "Faults that chaos injected: an outage somebody wanted."),
)
FAMILIES = {family.name: family for family in _FAMILIES}
