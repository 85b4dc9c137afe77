"""Every metric of the service: its name, its labels, and what a rise means to the person on call.

Names are in base units. The number of label values is bounded: by the living jobs, their islands, fragments and regions, and
by reasons and classes that the code defines. Nothing that a caller can choose freely is a label.

The label of a training job is ``atoll_job``, because Prometheus itself sets the label ``job`` on whatever it scrapes.

Jobs report their own totals, so a counter continues after a restart of the service. A total that may also fall (a share of
time that is computed again, discarded tokens that were recovered) is a gauge.
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
        """Return the names under which queries find it."""
        endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
        return frozenset(self.name + ending for ending in endings[self.kind])


ISLAND = ("atoll_job", "island", "region")
_FRAGMENT = ("atoll_job", "fragment")

_FAMILIES = (
    # ── this service ──────────────────────────────────────────────────────────────────────────────────────────────
    Family(
        "histogram",
        "atoll_api_request_seconds",
        ("method", "route", "status"),
        "Time from the arrival of a request to the start of its answer. A rise: the cluster or the disk is slow.",
    ),
    Family(
        "gauge",
        "atoll_build_info",
        ("version", "python", "ray"),
        "Always 1: which release the service runs. Its absence means that Prometheus does not scrape the service.",
    ),
    Family(
        "gauge",
        "atoll_clock_set_seconds",
        (),
        "How far the clock of the service's machine was set since the service started; negative if set back. Far from 0: "
        "times of day in jobs and in the audit trail are not comparable.",
    ),
    Family(
        "gauge",
        "atoll_certificate_expiry_timestamp_seconds",
        ("place",),
        "When the certificate that is in use expires (Unix seconds): the service's, the head's, the first of a node group's "
        "nodes, or the authority's. Connections fail from then on.",
    ),
    Family(
        "gauge",
        "atoll_certificate_lifetime_seconds",
        ("place",),
        "For how long that certificate was issued, so that an alert can tell a short-lived one from one that was forgotten.",
    ),
    # ── the cluster ───────────────────────────────────────────────────────────────────────────────────────────────
    Family(
        "gauge",
        "atoll_head_up",
        (),
        "1 if the cluster's head answered this scrape. 0: no job can be watched or commanded, and nothing merges.",
    ),
    Family("gauge", "atoll_nodes", ("group", "region"), "Nodes of the group. A fall: machines have left or died."),
    Family(
        "gauge",
        "atoll_nodes_down",
        ("group", "region"),
        "Nodes besides these that do not answer: dead, and forgotten within seconds, or cut off. Above 0 for long: a "
        "partition.",
    ),
    Family(
        "gauge",
        "atoll_nodes_leaving",
        ("group", "region"),
        "Nodes of the group that are about to go: islands leave them, and nothing is placed there.",
    ),
    Family(
        "gauge",
        "atoll_nodes_cordoned",
        ("group", "region"),
        "Nodes of the group on which an operator or the rule for bad nodes lets nothing new be placed.",
    ),
    Family(
        "gauge",
        "atoll_islands_wanted",
        ("group",),
        "Islands that running jobs want on nodes of the group, standbys included.",
    ),
    Family(
        "gauge",
        "atoll_islands_waiting",
        ("group",),
        "Those of them that wait for a node: the group has none, or none with room. They start once one is there.",
    ),
    Family(
        "gauge",
        "atoll_disk_free_bytes",
        ("path",),
        "Free space where the service's machine keeps runs, the home, and temporary files. Near 0: tapes and journals "
        "cannot be written, and no merge is announced until there is room. Remove ended jobs, or set a retention.",
    ),
    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────
    Family("gauge", "atoll_jobs", ("state",), "Jobs that the service knows, by state."),
    Family(
        "counter",
        "atoll_jobs_ended",
        ("state", "reason"),
        "Jobs that have ended since the service started, by their final state and what ended them.",
    ),
    Family(
        "gauge",
        "atoll_job_failed_timestamp_seconds",
        ("atoll_job", "reason"),
        "When the job failed (Unix time), for a week or until it is deleted or continued: `atoll status` says why.",
    ),
    Family(
        "gauge",
        "atoll_queue_oldest_seconds",
        (),
        "How long the longest waiting job has been queued; 0 if none is queued. A steady rise: no job starts.",
    ),
    Family(
        "gauge",
        "atoll_queue_unschedulable",
        (),
        "1 while the first queued job asks for more than the whole fleet has. Waiting does not help: nodes are missing.",
    ),
    Family(
        "gauge",
        "atoll_job_answers",
        ("atoll_job",),
        "1 if the job's synchroniser answered this scrape. 0: check that it is alive.",
    ),
    Family("gauge", "atoll_job_phase", ("atoll_job", "phase"), "1 for the phase the job is in, 0 for the others."),
    Family("gauge", "atoll_job_age_seconds", ("atoll_job",), "Time since the job was created."),
    Family(
        "gauge",
        "atoll_job_paused",
        ("atoll_job",),
        "1 while no fragment can merge: fewer islands than the quorum, or the journal fails.",
    ),
    Family(
        "gauge",
        "atoll_job_paused_at_limit",
        ("atoll_job",),
        "1 while the job has no islands because it has cost its limit, which somebody must raise.",
    ),
    Family(
        "gauge",
        "atoll_helper_up",
        ("atoll_job", "helper"),
        "1 while the job's helper process (controller, evaluator, a node's agent) answers. 0: it restarts, or is silent.",
    ),
    Family(
        "gauge",
        "atoll_shard_up",
        ("atoll_job", "shard", "node"),
        "1 while this shard of several serves. 0: its fragments do not merge; the job's status says why.",
    ),
    Family(
        "gauge",
        "atoll_shard_bytes",
        ("atoll_job", "shard", "node"),
        "Bytes of the parameters of the shard's fragments. Uneven shards: few fragments, or very different ones.",
    ),
    Family(
        "counter",
        "atoll_helper_restarts",
        ("atoll_job", "helper"),
        "Restarts of the helper process after it died. A steady rise: it keeps failing; the job's page shows why.",
    ),
    Family(
        "counter",
        "atoll_checkpoint_failures",
        ("atoll_job",),
        "Checkpoints that failed. A rise: the job's status says why; a loss of the head's disk would cost more and more.",
    ),
    Family(
        "gauge",
        "atoll_checkpoint_age_seconds",
        ("atoll_job",),
        "Time since the cut of the newest complete checkpoint, or since the job was created if there is none; absent if the "
        "job has none and schedules none. Far above the job's schedule: checkpoints fail or take too long.",
    ),
    Family(
        "gauge",
        "atoll_checkpoint_bytes",
        ("atoll_job",),
        "Size of the newest complete checkpoint; the job keeps `checkpoints.keep` of them.",
    ),
    Family(
        "gauge",
        "atoll_run_bytes",
        ("atoll_job", "kind"),
        "Size of the job's files in its run folder on the service's machine, by kind: tape, journal, logs, checkpoints, "
        "parameters, other. A tape of 64 islands grows by some 15 MB an hour. Faster: see the guide's page Retention.",
    ),
    Family("gauge", "atoll_job_token_budget", ("atoll_job",), "Tokens after which the job ends."),
    Family(
        "gauge",
        "atoll_job_remaining_seconds",
        ("atoll_job",),
        "Time until the budget is trained, at the islands' recent pace. Absent while nothing can merge. A rise: slow steps.",
    ),
    Family(
        "gauge",
        "atoll_checkpoint_interval_seconds",
        ("atoll_job",),
        "Time from one checkpoint to the next by the specification, at the job's mean rate of merges so far.",
    ),
    Family("gauge", "atoll_quorum_islands", ("atoll_job",), "Islands that a round needs before it may close (K)."),
    # ── goodput ───────────────────────────────────────────────────────────────────────────────────────────────────
    Family(
        "gauge",
        "atoll_goodput_ratio",
        ("atoll_job",),
        "Share of all accelerator-seconds so far whose tokens reached a merge. A fall: work is being lost.",
    ),
    Family(
        "gauge", "atoll_uptime_ratio", ("atoll_job",), "Share of the time with at least a quorum of islands training."
    ),
    Family(
        "gauge",
        "atoll_island_seconds",
        (*ISLAND, "class"),
        "Island-seconds by class; every second is in exactly one. Only the class productive should rise.",
    ),
    Family("gauge", "atoll_island_accelerators", ISLAND, "Accelerators of the island; 1 for an island on CPUs."),
    Family(
        "gauge", "atoll_badput_seconds", ("atoll_job", "cause"), "Island-seconds that were not productive, by cause."
    ),
    Family("counter", "atoll_tokens_trained", ISLAND, "Tokens trained, whether merged or not: the raw throughput."),
    Family("counter", "atoll_tokens_merged", ISLAND, "Tokens that reached a merge (mean over fragments)."),
    Family("gauge", "atoll_tokens_in_flight", ISLAND, "Tokens trained, but neither merged nor discarded yet."),
    Family("gauge", "atoll_tokens_discarded", ("atoll_job", "cause"), "Tokens that will never be merged, by cause."),
    Family(
        "gauge",
        "atoll_held_out_loss_nats",
        ("atoll_job",),
        "Latest held-out loss of the merged parameters, in nats per token.",
    ),
    Family(
        "gauge",
        "atoll_held_out_bits_per_byte",
        ("atoll_job",),
        "Latest held-out loss in bits per byte of text, comparable across tokenizers.",
    ),
    Family(
        "gauge",
        "atoll_held_out_preference_accuracy_ratio",
        ("atoll_job",),
        "Share of held-out pairs in which the chosen answer gained more than the rejected one; a fall is a loss of quality.",
    ),
    Family(
        "gauge",
        "atoll_held_out_preference_margin_nats",
        ("atoll_job",),
        "Mean margin of the chosen answer over the rejected one in held-out pairs, times beta.",
    ),
    Family(
        "gauge",
        "atoll_held_out_source_loss_nats",
        ("atoll_job", "source"),
        "Latest held-out loss on each source, if there are several, in nats per token.",
    ),
    Family("counter", "atoll_evaluations", ("atoll_job",), "Held-out losses measured."),
    Family("counter", "atoll_evaluation_failures", ("atoll_job",), "Evaluations that failed: see the job's events."),
    Family("gauge", "atoll_evaluation_seconds", ("atoll_job",), "Duration of the latest evaluation."),
    Family(
        "gauge",
        "atoll_evaluation_sequences",
        ("atoll_job",),
        "Held-out sequences in the latest loss. Below evaluation.sequences: using all of them would have taken too long.",
    ),
    # ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────
    Family(
        "counter",
        "atoll_island_unreadable_records",
        ISLAND,
        "Records and parts of files skipped as unreadable. A rise: the island's log names the file. A limit ends the job.",
    ),
    Family(
        "counter",
        "atoll_island_cut_pieces",
        ISLAND,
        "Pieces of files with more text than expected, of which a part is left out. A rise: check the compressed files.",
    ),
    Family(
        "counter",
        "atoll_island_repeated_sequences",
        ISLAND,
        "Sequences drawn twice in an epoch. A rise: the text has changed, or is large and has no data.index.",
    ),
    Family(
        "counter", "atoll_island_omitted_sequences", ISLAND, "Sequences skipped in their epoch, for the same reasons."
    ),
    # ── islands ───────────────────────────────────────────────────────────────────────────────────────────────────
    Family("gauge", "atoll_island_state", (*ISLAND, "state"), "1 for the state the island is in, 0 for the others."),
    Family(
        "gauge",
        "atoll_island_overdue_seconds",
        ISLAND,
        "Seconds in the current step if that is far beyond the usual, else 0. At the limit the island is ended.",
    ),
    Family(
        "counter", "atoll_island_restarts", ISLAND, "Times the island was placed again. A steady rise: it keeps dying."
    ),
    Family(
        "counter",
        "atoll_island_failures",
        ISLAND,
        "Times the island's process failed or was lost. Unlike restarts, it does not count those that left after a notice.",
    ),
    Family(
        "gauge", "atoll_island_flagged", ISLAND, "1 from an unusable or exploding contribution until a good one merges."
    ),
    Family(
        "counter",
        "atoll_island_quarantines",
        ISLAND,
        "Times it was replaced because of unusable contributions: check its machine.",
    ),
    Family("counter", "atoll_island_steps", ISLAND, "Inner steps over all incarnations."),
    Family(
        "gauge",
        "atoll_island_schedule_step",
        ISLAND,
        "Logical step of a training island; it decides which fragments are due. Far below the others: its work is late.",
    ),
    Family("gauge", "atoll_island_step_seconds", ISLAND, "Recent duration of an inner step."),
    Family(
        "gauge",
        "atoll_island_gap_max_seconds",
        ISLAND,
        "Longest time between two steps so far. A jump: it was held up.",
    ),
    Family("gauge", "atoll_training_loss_nats", ISLAND, "Training loss of the island's last step, in nats per token."),
    Family("gauge", "atoll_island_learning_rate", ISLAND, "Learning rate of the island's last step."),
    Family(
        "gauge",
        "atoll_island_gradient_norm",
        ISLAND,
        "L2 norm of the gradient of the island's last step, before clipping. A sharp rise: training may be diverging.",
    ),
    Family(
        "gauge",
        "atoll_island_mfu_ratio",
        ISLAND,
        "Model FLOPs utilisation: the model's operations at the median step as a part of the devices' peak. A fall: steps "
        "became slower. Absent where the peak, or the model's operations, are unknown.",
    ),
    Family(
        "gauge",
        "atoll_island_expert_share_max_ratio",
        ISLAND,
        "Mixtures: largest part of a layer's choices that one expert got in the last step. Near 1: the router collapses.",
    ),
    Family(
        "gauge",
        "atoll_island_expert_entropy_ratio",
        ISLAND,
        "Mixtures: entropy of the least even layer's choices in the last step; 1 if experts share evenly. A fall: fewer "
        "experts learn.",
    ),
    Family(
        "gauge",
        "atoll_island_loss_before_adoption_nats",
        ISLAND,
        "Mixtures: mean training loss of the steps before an adoption, over all adoptions of the island.",
    ),
    Family(
        "gauge",
        "atoll_island_loss_after_adoption_nats",
        ISLAND,
        "Mixtures: mean training loss of the first step after an adoption. Above the one before: merges cost loss at first.",
    ),
    Family("counter", "atoll_island_merges", ISLAND, "Merges that contain the island's work."),
    Family(
        "gauge", "atoll_island_last_merge_age_seconds", ISLAND, "Time since a merge last contained the island's work."
    ),
    Family(
        "gauge",
        "atoll_cost",
        ("atoll_job", "currency"),
        "What the job has cost, by the prices of its node groups. Absent if none of them has a price.",
    ),
    Family(
        "gauge",
        "atoll_cost_per_merged_million_tokens",
        ("atoll_job", "currency"),
        "The same for a million merged tokens. A rise: more badput, or more expensive machines. See `atoll cost`.",
    ),
    Family(
        "gauge",
        "atoll_cost_badput",
        ("atoll_job", "currency", "cause"),
        "The part of the cost that was badput, by cause. Fix the largest first.",
    ),
    Family(
        "gauge",
        "atoll_cost_forecast",
        ("atoll_job", "currency", "bound"),
        "What the job will have cost at the end of its token budget: expected, low and high.",
    ),
    Family(
        "gauge",
        "atoll_standby_seconds",
        ("atoll_job", "class"),
        "Standby time, ready or preparing; not part of island-seconds.",
    ),
    Family("counter", "atoll_standby_takeovers", ("atoll_job",), "Lost islands that a standby's process took over."),
    Family("counter", "atoll_catch_ups", ("atoll_job", "source"), "States handed to islands, by source."),
    Family("counter", "atoll_catch_up_failures", ("atoll_job",), "Attempts to hand over a state that failed."),
    Family("counter", "atoll_placement_failures", ("atoll_job",), "Attempts to start an island's process that failed."),
    Family(
        "histogram",
        "atoll_recovery_seconds",
        ("atoll_job",),
        "From the loss of an island to a merge with its new work.",
    ),
    Family(
        "histogram",
        "atoll_recovery_part_seconds",
        ("atoll_job", "part"),
        "The parts of those recoveries, which add up to the whole.",
    ),
    # ── rounds and merges ─────────────────────────────────────────────────────────────────────────────────────────
    Family("counter", "atoll_merges", _FRAGMENT, "Outer steps taken. No rise for minutes: merging has stalled."),
    Family(
        "counter", "atoll_merge_failures", ("atoll_job",), "Outer steps discarded because their result was not finite."
    ),
    Family("gauge", "atoll_fragment_version", _FRAGMENT, "Current version of the fragment."),
    Family(
        "gauge", "atoll_round_offered_islands", _FRAGMENT, "Islands that have contributed to the fragment's open round."
    ),
    Family("histogram", "atoll_merge_contributors", ("atoll_job",), "Islands whose work a merge contains."),
    Family(
        "counter", "atoll_rounds_closed", ("atoll_job", "reason"), "Closed rounds, by the reason they stopped waiting."
    ),
    Family(
        "histogram",
        "atoll_round_part_seconds",
        ("atoll_job", "part"),
        "Parts of a round: collecting until it could close, grace until it closed, merging until the version was durable.",
    ),
    Family(
        "histogram",
        "atoll_journal_seconds",
        ("atoll_job",),
        "From an outer step to its version being durable. A rise: the disk of journal and tape is slow.",
    ),
    Family(
        "gauge",
        "atoll_journal_failing",
        ("atoll_job",),
        "1 while the disk refuses writes of journal or tape; nothing merges meanwhile. Check whether it is full.",
    ),
    Family(
        "gauge",
        "atoll_store_failing",
        ("atoll_job",),
        "1 while the store of a mirrored job refuses writes or takes more than 5 s; nothing merges meanwhile.",
    ),
    Family(
        "counter",
        "atoll_store_puts",
        ("atoll_job",),
        "Objects that a mirrored job has put into its store, since its synchroniser began. Stores charge for each.",
    ),
    Family(
        "counter",
        "atoll_store_put_bytes",
        ("atoll_job",),
        "Bytes of these objects. What is superfluous is removed with the next base.",
    ),
    Family(
        "counter",
        "atoll_store_put_seconds",
        ("atoll_job",),
        "Time of these puts. For each put, a rise: the store is slow, and merges wait for it.",
    ),
    Family(
        "gauge",
        "atoll_synchroniser_fenced",
        ("atoll_job",),
        "1 once the synchroniser that this service knows was replaced by one that it did not start. It has stopped.",
    ),
    Family(
        "counter", "atoll_synchroniser_deaths", ("atoll_job",), "Restarts of the synchroniser. Islands kept training."
    ),
    Family(
        "counter",
        "atoll_damages",
        ("atoll_job",),
        "Times the synchroniser found the end of its tape or journal unreadable, and continued without it.",
    ),
    Family("counter", "atoll_contributions", (*ISLAND, "outcome"), "Contributions admitted and refused."),
    Family(
        "counter", "atoll_refusals", ("atoll_job", "reason"), "Contributions refused, by reason. Their work is lost."
    ),
    Family(
        "histogram",
        "atoll_staleness_versions",
        ("atoll_job",),
        "How many versions behind the base of an admitted contribution was.",
    ),
    Family(
        "counter",
        "atoll_payloads",
        ("atoll_job", "direction"),
        "Fragments pulled up by the synchroniser, and published down to islands. One that an island holds needs no bytes.",
    ),
    Family(
        "counter",
        "atoll_payload_bytes",
        (*ISLAND, "direction", "kind", "codec"),
        "Bytes sent between island and synchroniser, headers included, since the synchroniser started. Many values or "
        "states compared with updates: islands miss versions.",
    ),
    Family(
        "counter",
        "atoll_line_busy_seconds",
        (*ISLAND, "direction"),
        "Time with a transfer under way. A rate near 1: the line is saturated, or nothing gets through.",
    ),
    Family(
        "gauge",
        "atoll_line_queued_fragments",
        ISLAND,
        "Fragments published for the island that have not arrived. Constantly all fragments: the line is too slow.",
    ),
    Family("gauge", "atoll_line_queued_bytes", ISLAND, "Bytes of those fragments, as updates if there are any."),
    Family(
        "gauge",
        "atoll_line_hindered",
        ISLAND,
        "1 while the island's payloads do not get through (a firewall, certificates); the job's page shows why.",
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
        "Norm of the codec's accumulated rounding error relative to the last update. A steady rise: too few bits.",
    ),
    Family(
        "gauge",
        "atoll_fragment_router_distance",
        _FRAGMENT,
        "Mixtures: distance between the islands' routers in the last merge. Rises against travel: islands disagree.",
    ),
    Family(
        "gauge",
        "atoll_fragment_router_travel",
        _FRAGMENT,
        "Mixtures: how far islands had moved the routers by the last merge; independent ones are √2 times that apart.",
    ),
    # ── operators ─────────────────────────────────────────────────────────────────────────────────────────────────
    Family(
        "counter", "atoll_commands", ("atoll_job", "kind", "outcome"), "Operators' commands that jobs have decided."
    ),
    Family(
        "gauge",
        "atoll_autopilot_gain_ratio",
        ("atoll_job",),
        "Gain that the autopilot's newest advice promises, of merged tokens; 0: no advice. Above 0 for long: see `atoll "
        "advise`.",
    ),
    Family(
        "gauge",
        "atoll_autopilot_look_timestamp_seconds",
        ("atoll_job",),
        "When the autopilot last looked at the job's tape (Unix seconds).",
    ),
    Family("gauge", "atoll_commands_pending", ("atoll_job",), "Commands that the job has not decided yet."),
    Family(
        "counter", "atoll_chaos_faults", ("atoll_job", "kind"), "Faults that chaos plans injected: intended outages."
    ),
)
FAMILIES = {family.name: family for family in _FAMILIES}
