"""What happened in a job, for people: tape records as lines, and merges as a table or explained in full. Pure.

A record's line says when it was, what happened, and what was decided on it:

        75.318 s  #1924   contribution of asia to fragment 5: 24 steps, 3,072 tokens on version 11 → admitted towards …

Messages of other builds that have no words here are shown by name and fields.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from functools import cache
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from api.schemas import Advice, Diagnosis, JobState, Merge, MergeSummary, TapeRecord
from api.terminal.listing import Listing
from orchestrator.system.plain import percent, seconds

REQUESTED = "Requested"
"""On tapes, a command appears as its request."""
EVENTS = {
    "JobStarted": "the job starts",
    "SynchroniserRestarted": "the synchroniser restarted from tape and journal, as epoch {epoch}{damage}{upgrade}",
    "OuterStateSeeded": "the {parameter_count:,} initial parameters are ready",
    "EvaluationCompleted": "held-out loss {loss:.4f} at version {global_version}{place}",
    "EvaluationFailed": "the evaluation at version {global_version} failed: {reason}",
    "IslandPlaced": "{island} is placed: incarnation {incarnation}, pid {pid} on {node}",
    "PlacementFailed": "{island} could not be placed: {reason}",
    "PlacementDelayed": "{island} waits for a node: {reason}",
    "IslandReady": "{island} is ready after {start_seconds:.1f} s",
    "IslandCaughtUp": "{island} has caught up from {donor} in {transfer_seconds:.2f} s, at step {step}",
    "CatchUpFailed": "{island} could not catch up from {donor}: {reason}",
    "ProgressReported": "{island} trained up to step {step}, {tokens_total:,} tokens, loss {loss:.3f}, "
    "{step_seconds_median:.2g} s a step, {gap_max_seconds:.2g} s at most",
    "StepOverdue": "{island} hangs: {seconds:.0f} s in one step, where {usual_seconds:.2g} s is usual",
    "ConnectionLost": "{island} stopped answering: {reason}",
    "ConnectionRestored": "{island} answers again",
    "IslandFlushed": "{island} has offered all its work",
    "IslandDrained": "{island} is drained: all its work is merged",
    "NoticeReceived": "the node of {island} will go away: {cause}",
    "ContributionArrived": "contribution of {contribution[island]} to fragment {contribution[fragment]}: "
    "{contribution[step_count]} steps, {contribution[token_count]:,} tokens on version {contribution[base_version]}"
    "{displacement}",
    "ContributionUnusable": "contribution of {contribution[island]} to fragment {contribution[fragment]} is unusable, "
    "{reason}: {detail}",
    "MergeFailed": "fragment {fragment} keeps its version, {version} is unusable: {reason}",
    "MergeCompleted": "fragment {fragment} is at version {version}, merged in {merge_seconds:.3f} s",
    "FragmentAdopted": "{island} adopted fragment {fragment} at version {version}",
    "TimerFired": "timer {timer} fired",
    "KillRequested": "{caller} asks to kill {island}",
    "DrainRequested": "{caller} asks to drain {island}",
    "ReaddRequested": "{caller} asks to place {island} again",
    "ScaleRequested": "{caller} sets the number of islands on {node_group} to {count}",
    "CordonRequested": "{caller} asks to place nothing new on {node_group}",
    "UncordonRequested": "{caller} asks to place islands on {node_group} again",
    "JobResumed": "the job resumes from {checkpoint}, with {tokens_trained:,} tokens trained before",
    "JobSalvaged": "epoch {epoch} continues from what islands hold: the files of {continued_from} are lost",
    "ShardMoved": "shard {shard} continues on node {node}, from {source}: {reason}",
    "RollbackRequested": "{caller} asks to go back to checkpoint {checkpoint} (0: the newest)",
    "FragmentRestored": "fragment {fragment} is at version {version}, restored from checkpoint {checkpoint} "
    "(0: from the version before the last, which is lost)",
    "RollbackFailed": "going back to checkpoint {checkpoint} failed: {reason}",
    "CheckpointRequested": "{caller} asks for a checkpoint",
    "IslandSaved": "{island} has saved its state for checkpoint {checkpoint}, held up for {held_seconds:.3f} s",
    "IslandNotSaved": "{island} could not save its state for checkpoint {checkpoint}: {reason}",
    "CheckpointTaken": "checkpoint {checkpoint} is complete after {seconds:.2f} s, {byte_count:,} bytes",
    "CheckpointFailed": "checkpoint {checkpoint} failed: {reason}",
    "CancelRequested": "{caller} asks to cancel the job",
    "FinishRequested": "{caller} asks to finish the job early",
    "SetRequested": "{caller} asks to change settings: lr {lr_ratio}, quorum {quorum}, grace {grace_cap_steps}, "
    "interval {sync_interval_steps}, cost {cost_max} (None: as before)",
    "PauseRequested": "{caller} asks to pause the job: {reason}",
    "ContinueRequested": "{caller} asks to continue the job: {reason}",
    "FaultInjected": "chaos of {caller}: {kind} {island}",
}
EFFECTS = {
    "SetTimer": "",
    "AdmitContribution": "admitted towards version {version}",
    "RefuseContribution": "refused as {reason}: {detail}",
    "MergeFragment": "merge fragment {fragment} to version {version} from {inputs} ({detail})",
    "PublishFragment": "publish fragment {fragment} at version {version} to {recipients}",
    "ReleasePayload": "",
    "PlaceIsland": "place {island} on {node_group}: {reason}",
    "WantIsland": "",
    "HoldIsland": "{island} waits: {reason}",
    "BeginCatchUp": "let {island} catch up from {donor}: {reason}",
    "StartTraining": "let {island} train",
    "AdjustIsland": "let {island} offer every {interval_steps} steps, at {lr_ratio} of its learning rate",
    "StandBy": "{island} stands by",
    "FlushIsland": "let {island} offer all its work",
    "DrainIsland": "drain {island}: stop training once all its work is merged",
    "KillIsland": "kill {island}: {reason}",
    "QuarantineIsland": "{island} is quarantined, {reason}: {detail}",
    "StopIsland": "end {island}: {reason}",
    "Evaluate": "measure the held-out loss",
    "BeginCheckpoint": "begin checkpoint {checkpoint}",
    "RestoreFragments": "restore every fragment from checkpoint {checkpoint}",
    "SealCheckpoint": "seal checkpoint {checkpoint}",
    "DropCheckpoint": "remove checkpoint {checkpoint}: {reason}",
    "HandOver": "let a synchroniser of the release {build} go on",
    "ResolveCommand": "{accepted}: {detail}",
    "FinishJob": "the job is {outcome}: {reason}",
}
"""Effects with an empty text are bookkeeping that the others imply."""
ADDED_LATER = {"place": "", "upgrade": "", "displacement": 0.0}
"""Defaults for fields that messages of earlier builds lack."""


def tell(record: TapeRecord) -> str:
    """Return the record as one line."""
    happened = sentence(EVENTS, record.event)
    decided = "; ".join(filter(None, (sentence(EFFECTS, effect) for effect in record.effects)))
    return f"{record.event['at']:>10.3f} s  #{record.n:<6} {happened}{f' → {decided}' if decided else ''}"


def sentence(forms: Mapping[str, str], message: Mapping[str, Any]) -> str:
    """Return one event or effect as text."""
    form = forms.get(message["type"])
    if form is None and message["type"].endswith(REQUESTED) and "caller" in message:
        form = _request_form(message)
    if form is None or not fields_of(form) <= message.keys() | ADDED_LATER.keys():
        return " ".join([message["type"], *(f"{name}={value}" for name, value in message.items() if name != "type")])
    return _Words().vformat(
        form, (), {name: _named(name, value) for name, value in (ADDED_LATER | dict(message)).items()}
    )


def _request_form(message: Mapping[str, Any]) -> str:
    """Return a text for a command without one: the caller, the request and its fields."""
    fields = [f"{name} {{{name}}}" for name in message if name not in ("type", "at", "command", "caller")]
    return " ".join(["{caller} asks to", message["type"].removesuffix(REQUESTED).lower(), *fields])


@cache
def fields_of(form: str) -> frozenset[str]:
    """Return the fields of a message that its text uses."""
    names = (name for _, name, _, _ in string.Formatter().parse(form) if name)
    return frozenset(name.partition("[")[0] for name in names)


def _named(name: str, value: Any) -> Any:
    """Return a field's value for people: islands by name, outcomes as a word."""
    if name in ("inputs", "recipients"):
        return ", ".join(item["island"] for item in value) or "no island"
    if name == "place":
        return f", on {value}" if value else ""
    if name == "upgrade":
        return f"; {value}" if value else ""
    if name == "damage":
        return f"; cut off as damaged: {value}" if value else ""
    if name == "displacement":
        return ", too old for its bytes to be pulled" if value is None else ""
    if name == "accepted":
        return "accepted" if value else "refused"
    if name == "island":
        return value or "no island"
    if name == "donor":
        return "the synchroniser" if value is None else value[0] if isinstance(value, list) else value
    return value


class _Words(string.Formatter):
    """Formats missing values, such as a loss that is not finite, as a dash."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        return "–" if value is None else super().format_field(value, format_spec)


def merge_table(merges: list[MergeSummary]) -> Table:
    """One line for each merge, in the order given."""
    table = Listing("merge", "closed", "islands", "why", prose=("why",), pad_edge=False, expand=True)
    for merge in merges:
        closed = f"{merge.closed_after_s:.1f} s"
        table.add_row(f"{merge.fragment}:{merge.version}", closed, str(len(merge.islands)), merge.because)
    return table


def explained(merge: Merge) -> RenderableType:
    """One merge: the story of its round, its contributors, and who is not in it."""
    headline = f"fragment {merge.fragment}, version {merge.version - 1} to {merge.version}"
    parts: list[RenderableType] = [Text(headline, style="bold"), Text(merge.because), Text(), _times(merge), Text()]
    parts.append(_contributors(merge))
    if merge.refusals:
        parts += [Text(), _refusals(merge)]
    if (untold := merge.refusal_count - len(merge.refusals)) > 0:
        parts.append(Text(f"and {untold} refusals more", style="dim"))
    if merge.absent:
        absent = ", ".join(f"{item.island} ({item.state.replace('_', ' ')})" for item in merge.absent)
        parts += [Text(), Text(f"not in it: {absent}")]
    return Group(*parts)


OTHERS_SHOWN = 5


def diagnosed(diagnosis: Diagnosis) -> RenderableType:
    """The cause with its evidence and remedy, further causes, and how islands compare."""
    state = diagnosis.outcome or "running"
    parts: list[RenderableType] = [Text(f"{diagnosis.job} ({state}), goodput {percent(diagnosis.goodput_ratio)}")]
    if diagnosis.cause is None:
        parts.append(Text("No cause takes 2 % of the island time.", style="bold"))
    else:
        about = f": {diagnosis.cause.subject}" if diagnosis.cause.subject else ""
        parts.append(Text(f"{diagnosis.cause.cause}{about}", style="bold"))
        parts += [Text(diagnosis.cause.statement), Text(diagnosis.cause.remedy)]
        if diagnosis.cause.records:
            numbers = ", ".join(str(number) for number in diagnosis.cause.records)
            first = diagnosis.cause.records[0] - 1
            parts.append(Text(f"records {numbers}: atoll events {diagnosis.job} --after {first}", style="dim"))
    if diagnosis.others:
        further = Listing(
            "further causes", "about", "island time", "share", right=("island time", "share"), pad_edge=False
        )
        for one in diagnosis.others[:OTHERS_SHOWN]:
            further.add_row(one.cause, one.subject, seconds(one.island_seconds), percent(one.share))
        parts += [Text(), further]
    right = ("step", "z", "pull", "z ", "delivery", "z  ", "waits", "z   ", "failures")
    table = Listing("island", "node", *right, right=right, pad_edge=False)
    for own in diagnosis.islands:
        figures = (own.step_s, own.step_z), (own.pull_s, own.pull_z), (own.delivery_s, own.delivery_z)
        cells = [text for value, z in figures for text in (seconds(value), _distance(z))]
        cells += [percent(own.waiting_ratio), _distance(own.waiting_z), str(own.failure_count)]
        table.add_row(own.island, own.node, *cells)
    return Group(*parts, Text(), table)


LOOKS_SHOWN = 5


def advised(advice: Advice, state: JobState) -> RenderableType:
    """Return the newest advice with its simulated effect, and the outcomes of the looks before it."""
    parts: list[RenderableType] = [Text(f"{advice.job}, autopilot {advice.kind}")]
    if not advice.looks:
        if advice.kind == "off":
            remedy = "Give `autopilot: {kind: observe}` in the specification of the next job."
        elif state.final:
            remedy = (
                f"The job is {state.value}. A look comes `autopilot.every_s` after its start: give the next job less."
            )
        else:
            remedy = f"The job is {state.value}. The first look comes `autopilot.every_s` after its start."
        return Group(*parts, Text("The autopilot has not looked at this job's tape.", style="bold"), Text(remedy))
    newest = advice.looks[0]
    parts.append(Text(newest.outcome, style="bold"))
    if (one := newest.advice) is not None:
        table = Listing(
            "simulated", "tokens/s", "±", "goodput", "islands in a merge", right=("tokens/s", "±", "goodput")
        )
        for name, effect in (("now", one.now), ("then", one.then)):
            figures = f"{effect.tokens_per_second:,.0f}", f"{effect.spread:,.0f}", percent(effect.goodput_ratio)
            table.add_row(name, *figures, f"{effect.contributors:.2f}")
        done = f"Changed by {newest.command}." if newest.command else f"Not changed: {one.held_by or 'observe only'}."
        parts += [Text(), table, Text(done)]
    if len(advice.looks) > 1:
        parts += [Text(), Text("Before that:", style="dim")]
        parts += [Text(f"{seconds(look.at)}: {look.outcome}") for look in advice.looks[1:LOOKS_SHOWN]]
    return Group(*parts)


def _distance(z: float | None) -> str:
    return "–" if z is None else f"{z:z.1f}"


def _times(merge: Merge) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(justify="right")
    window = "" if merge.grace_window_s is None else f" of at most {seconds(merge.grace_window_s)}"
    grid.add_row("opened", _at(merge.opened_after_s), "with the first contribution made at or after the due point")
    grid.add_row("quorum", _at(merge.quorum_after_s), f"{merge.quorum} contributions had arrived, one of them on time")
    grid.add_row("closed", _at(merge.closed_after_s), f"after {seconds(merge.grace_used_s)} of grace{window}")
    if merge.merged_after_s is None:
        grid.add_row("merged", "–", "the outer step is being taken")
    else:
        grid.add_row("merged", _at(merge.merged_after_s), f"in {seconds(merge.merge_s)}; digest {merge.digest}")
    return grid


def _contributors(merge: Merge) -> Table:
    figures = ("life", "weight", "tokens", "steps", "on version", "arrived")
    table = Listing("contributor", *figures, "", prose=("",), right=figures, pad_edge=False)
    for item in merge.contributors:
        table.add_row(
            item.island,
            str(item.incarnation),
            percent(item.weight),
            f"{item.token_count:,}",
            str(item.step_count),
            f"{item.base_version}" + (f" ({item.staleness} behind)" if item.staleness else ""),
            _at(item.arrived_after_s),
            "" if item.on_time else "early",
        )
    return table


def _refusals(merge: Merge) -> Table:
    table = Listing("refused", "at", "tokens", "why", prose=("why",), pad_edge=False)
    for item in merge.refusals:
        why = f"{item.reason.replace('_', ' ')}: {item.detail}"
        table.add_row(item.island, _at(item.after_s), f"{item.token_count:,}", why)
    return table


def _at(after_s: float) -> str:
    return f"{after_s:.2f} s"
