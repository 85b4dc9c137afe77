"""The handlers of events that concern the job as a whole: its start, its end, and operators' commands.

    RUNNING ──budget reached, or finished early──▶ FINISHING ──flushed, merged, evaluated──▶ FINISHED (completed)
       └──────cancelled, or every island given up──────────────────────────────────────────▶ FINISHED (cancelled, failed)

While FINISHING, islands stop stepping and give what they have, so that trained tokens reach a merge instead of being lost
with the processes.

**Scaling** changes how many islands of a node group a job wants, while the job trains. The policy names every island that
there may ever be, in order, each with a data shard of its own. So nothing that is planned by islands (shards, accounts,
names) changes under a running job. Islands that are not wanted yet are *scale-up slots*: they have no process and cost
nothing. Scaling up wants the first ones that are not wanted. Scaling down drains the last ones that are, and stops at once
those without work to lose. As with a drain, a quorum must remain to merge that work.

Recovery: the handler of the synchroniser's own restart.

Whatever died with the process is declared lost: contributions whose bytes it held, and merges that were not journalled.
Islands keep what they offered until a version contains it, and offer it again to the new epoch. Effects that may have been
decided but not carried out are returned again; each is idempotent by its name. The link to a suspect island finds out
whether it answers. The driver keeps the deadlines of timers (``tape.pending``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, astuple

from orchestrator.core import checkpoints, evaluation, island_life, island_record
from orchestrator.core.commands import (
    Continue,
    Cordon,
    Drain,
    Kill,
    Pause,
    Readd,
    Scale,
    Set,
    Uncordon,
    settings_applied,
)
from orchestrator.core.effects import (
    DrainIsland,
    Effect,
    FinishJob,
    FlushIsland,
    HoldIsland,
    KillIsland,
    PlaceIsland,
    ResolveCommand,
    StartTraining,
    StopIsland,
    WantIsland,
)
from orchestrator.core.events import (
    CommandRequested,
    ConnectionLost,
    ContributionArrived,
    ContributionUnusable,
    Event,
    JobStarted,
    PlacementFailed,
    SynchroniserRestarted,
    TimerFired,
    report_of,
)
from orchestrator.core.fragment_life import abandon_open_rounds, advance_all, lose_payloads, publish_newer
from orchestrator.core.island_record import WITH_PROCESS, Island
from orchestrator.core.messages import CatchUpFailure, Overdue, Progress
from orchestrator.core.state import JobState, Paused
from orchestrator.core.vocabulary import (
    FailureExtent,
    Instant,
    IslandId,
    IslandState,
    JobOutcome,
    JobPhase,
    RoundPhase,
    Version,
    replace,
)


def restarted(state: JobState, event: SynchroniserRestarted) -> list[Effect]:
    """Declare lost what is lost, and ask again for all that is pending. An epoch that is not newer changes nothing."""
    if event.epoch <= state.epoch:
        return []
    state.epoch = event.epoch
    effects = [*lose_payloads(state), *checkpoints.give_up(state, "the synchroniser died while it was taken")]
    flushing = state.phase is JobPhase.FINISHING and not state.complete
    for island in list(state.islands.values()):
        if flushing and island.current.flushed:  # what it gave last may be lost
            island = state.islands[island.id] = island_record.not_flushed(state.islands[island.id])
        effects += _pending_requests(state, state.islands[island.id], event.at)
    effects += island_life.flush_deadline(state, event.at) if flushing else []
    return effects + _evaluation(state)


def _pending_requests(state: JobState, island: Island, now: Instant) -> list[Effect]:
    life = (island.id, island.incarnation)
    effects: list[Effect] = []
    match island.state:
        case IslandState.PLACING | IslandState.WAITING:
            effects.append(PlaceIsland(*life, island.plan.node_group, island.reason, island.current.process))
        case IslandState.CATCHING_UP:
            effects += island_life.catch_up(state, island.id)
        case IslandState.STANDBY:
            effects += publish_newer(state, island, tuple(Version(0) for _ in state.rounds), now)
        case IslandState.TRAINING | IslandState.DRAINING:
            effects += publish_newer(state, island, tuple(Version(0) for _ in state.rounds), now)
            order = StartTraining if island.state is IslandState.TRAINING else DrainIsland
            command = FlushIsland if state.phase is JobPhase.FINISHING else order
            effects += [] if state.complete else [*island_life.adjustment(state, island), command(*life)]
    if island.current.kill_reason and island.state in WITH_PROCESS:
        effects.append(KillIsland(*life, island.current.kill_reason))
    return effects


def _evaluation(state: JobState) -> list[Effect]:
    """Repeat an evaluation that was under way. An ending job requests its last evaluation by itself."""
    if state.evaluation is None:
        return []
    if state.phase is JobPhase.RUNNING:
        return [evaluation.begin_anew(state, state.evaluation)]
    state.evaluation = None
    return []


BUDGET_REACHED = "the token budget is reached"
MAY_GIVE_UP = (PlacementFailed, ConnectionLost, TimerFired, ContributionArrived, ContributionUnusable)
MAY_GIVE_UP_REPORTS = (CatchUpFailure, Overdue)
"""Events, and reports of islands, after which an island may have been given up."""


def started(state: JobState, event: JobStarted) -> list[Effect]:
    fleet = [island for island in state.islands.values() if island.wanted]
    placing = [effect for island in fleet for effect in island_life.place(state, island, "the job starts")]
    return [*placing, *checkpoints.first_due(state, event.at)]


def settle(state: JobState, event: Event) -> list[Effect]:
    """Begin to end the job, continue to end it, or end it. Called after every event until it decides nothing."""
    if state.phase is JobPhase.RUNNING:
        report = report_of(event)
        if isinstance(report, Progress):
            over = state.tokens_trained >= state.policy.token_budget
            return _begin_finishing(state, event.at, BUDGET_REACHED) if over else []
        if isinstance(event, ConnectionLost) and _ends_job(state, event):
            return finish(state, JobOutcome.FAILED, f"{event.island}: {event.reason}")
        given_up = isinstance(event, MAY_GIVE_UP) or isinstance(report, MAY_GIVE_UP_REPORTS)
        if given_up and all(i.state is IslandState.FAILED for i in state.job_islands):
            reasons = "; ".join(f"{i.id}: {i.reason}" for i in state.job_islands)
            return finish(state, JobOutcome.FAILED, f"every island was given up ({reasons})")
        return island_life.promote(state) if state.standbys and state.paused is None else []
    if state.phase is JobPhase.FINISHING:
        return _go_on_finishing(state, event.at)
    return []


def flush_timed_out(state: JobState, serial: int, now: Instant) -> list[Effect]:
    if state.phase is not JobPhase.FINISHING or serial != state.flush_serial:
        return []
    for island in sorted(state.live):
        late = state.islands[island]
        state.islands[island] = island_record.flushed(late, "did not give its last work in time")
    return advance_all(state, now)


def finish(state: JobState, outcome: JobOutcome, reason: str) -> list[Effect]:
    effects = [*abandon_open_rounds(state), *checkpoints.give_up(state, "the job ended")]
    state.phase, state.outcome, state.reason = JobPhase.FINISHED, outcome, reason
    for island in list(state.islands.values()):
        if island.state in WITH_PROCESS:
            effects.append(StopIsland(island.id, island.incarnation, f"the job is {outcome}"))
            state.islands[island.id] = island_record.stopped(island, f"the job is {outcome}")
    return [*effects, FinishJob(outcome, reason)]


# ── operators ─────────────────────────────────────────────────────────────────────────────────────────────────────


def kill(state: JobState, event: CommandRequested, request: Kill) -> list[Effect]:
    island = _addressed(state, request.island)
    if isinstance(island, str):
        return [ResolveCommand(event.command, False, island)]
    if island.state not in WITH_PROCESS or island.state is IslandState.WAITING:
        detail = f"{island.id} has no process to kill: it is {island.state.words} ({island.reason})"
        return [ResolveCommand(event.command, False, detail)]
    reason = f"killed by {event.caller}"
    paused = state.paused
    state.islands[island.id] = island_record.being_killed(island, request.restart and paused is None, reason)
    outcome = "it will be placed again" if request.restart else "it stays away until it is re-added"
    if paused is not None:
        outcome += ", once the job continues" if request.restart else ""
        others = tuple(name for name in paused.islands if name != island.id)
        state.paused = replace(paused, islands=(*others, island.id) if request.restart else others)
    return [
        ResolveCommand(event.command, True, f"{island.id} is being killed; {outcome}"),
        KillIsland(island.id, island.incarnation, reason),
    ]


def drain(state: JobState, event: CommandRequested, request: Drain) -> list[Effect]:
    """Drain an island, if that can succeed: the island trains, and a quorum continues to merge without it."""
    island = _addressed(state, request.island)
    if isinstance(island, str):
        return [ResolveCommand(event.command, False, island)]
    others = len(state.live - {island.id})
    if island.state is not IslandState.TRAINING or island.current.kill_reason:
        now = island.current.kill_reason or f"it is {island.state.words} ({island.reason})"
        return [ResolveCommand(event.command, False, f"{island.id} is not training, and has no work to give: {now}")]
    if others < state.policy.quorum:
        detail = (
            f"without {island.id} only {others} of the {state.policy.quorum} islands that the quorum needs would train, "
            f"and nothing would merge: re-add others first, or kill it and keep it away"
        )
        return [ResolveCommand(event.command, False, detail)]
    state.islands[island.id] = island_record.draining(island, f"drained by {event.caller}; its work is to be merged")
    return [
        ResolveCommand(event.command, True, f"{island.id} steps no more; it ends when all its work is merged"),
        DrainIsland(island.id, island.incarnation),
        *advance_all(state, event.at),
    ]


def readd(state: JobState, event: CommandRequested, request: Readd) -> list[Effect]:
    island = _addressed(state, request.island) if state.paused is None else _paused(state.paused)
    if isinstance(island, str):
        return [ResolveCommand(event.command, False, island)]
    if island.state in WITH_PROCESS and island.wanted:
        return [ResolveCommand(event.command, False, f"{island.id} is there already: it is {island.state.words}")]
    effects = _want(state, island, f"re-added by {event.caller}")
    after = state.islands[island.id]
    if island.state in WITH_PROCESS:
        goes_on = after.state is IslandState.TRAINING and not island.current.kill_reason
        outcome = "is not drained any more; it trains on" if goes_on else f"is {island.state}; it will be placed again"
        effects += advance_all(state, event.at)  # alone, it need not wait for islands that leave
    else:
        outcome = "is being placed again" if after.state is IslandState.PLACING else f"waits: {after.reason}"
    return [ResolveCommand(event.command, True, f"{island.id} {outcome}"), *effects]


def scale(state: JobState, event: CommandRequested, request: Scale) -> list[Effect]:
    group_islands = [state.islands[p.island] for p in state.policy.islands if p.node_group == request.node_group]
    wanted = [i for i in group_islands if i.wanted]
    removed = wanted[request.count :]
    if refusal := _refusal(state, request, group_islands, removed):
        return [ResolveCommand(event.command, False, refusal)]
    added = [i for i in group_islands if not i.wanted][: max(0, request.count - len(wanted))]
    reason = f"{event.caller} wants {request.count} islands of node group {request.node_group}"
    effects: list[Effect] = [ResolveCommand(event.command, True, _outcome(added, removed) or f"{reason}, and has them")]
    for island in added:
        effects += [WantIsland(island.id, True, reason), *_want(state, island, reason)]
    for island in removed:
        effects += [WantIsland(island.id, False, reason), *_leave(state, island, reason)]
    return [*effects, *advance_all(state, event.at)]


def cordon(state: JobState, event: CommandRequested, request: Cordon) -> list[Effect]:
    """Place nothing new on the node group. Islands that wait for a node there stop waiting until it is uncordoned."""
    state.cordoned.add(request.node_group)
    effects: list[Effect] = [
        ResolveCommand(event.command, True, f"nothing new is placed on node group {request.node_group}")
    ]
    reason = f"node group {request.node_group} is cordoned"
    for island in list(state.islands.values()):
        if island.state is IslandState.WAITING and island.plan.node_group == request.node_group:
            state.islands[island.id] = island_record.cordoned(island, reason)
            effects.append(StopIsland(island.id, island.incarnation, reason))
            effects.append(HoldIsland(island.id, island.plan.node_group, reason))
    return effects


def uncordon(state: JobState, event: CommandRequested, request: Uncordon) -> list[Effect]:
    """Take islands on the node group again, and place at once those that waited, unless the job is ending."""
    state.cordoned.discard(request.node_group)
    answer = ResolveCommand(event.command, True, f"node group {request.node_group} takes islands again")
    if state.phase is not JobPhase.RUNNING:
        return [answer]
    cordoned = (i for i in list(state.islands.values()) if i.state is IslandState.CORDONED)
    waiting = [island for island in cordoned if island.plan.node_group == request.node_group]
    reason = f"node group {request.node_group} was uncordoned by {event.caller}"
    return [answer, *(effect for island in waiting for effect in island_life.place(state, island, reason))]


def cancel(state: JobState, event: CommandRequested) -> list[Effect]:
    if state.phase is JobPhase.FINISHED:
        return [ResolveCommand(event.command, False, f"the job has ended already: {state.outcome}")]
    cancelled = finish(state, JobOutcome.CANCELLED, f"cancelled by {event.caller}")
    return [ResolveCommand(event.command, True, "the job is being cancelled"), *cancelled]


def finish_early(state: JobState, event: CommandRequested) -> list[Effect]:
    """Begin to end the job as if its budget were reached here, if it has trained anything."""
    trained, refusal = state.tokens_trained, ""
    if state.phase is JobPhase.FINISHED:
        refusal = f"the job has ended already: {state.outcome}"
    elif state.phase is JobPhase.FINISHING:
        refusal = f"the job is finishing already: {state.reason}"
    elif not trained:
        refusal = "the job is not finished: no island has trained yet, so there is no work to merge; cancel it instead"
    if refusal:
        return [ResolveCommand(event.command, False, refusal)]
    budget = state.policy.token_budget
    reason = f"finished early by {event.caller}, after {trained:,} of {budget:,} tokens"
    answer = ResolveCommand(event.command, True, "islands give their last work; the job completes once it is merged")
    return [answer, *_begin_finishing(state, event.at, reason)]


def pause(state: JobState, event: CommandRequested, request: Pause) -> list[Effect]:
    """Send all islands away once their work is merged, but those that were given up stay so.

    A checkpoint is begun first: no island holds Θ during a pause.
    """
    refusal = ""
    if state.phase is not JobPhase.RUNNING:
        refusal = f"the job is {state.phase}"
    elif state.paused is not None:
        refusal = f"it is paused already: {state.paused.reason}"
    if refusal:
        return [ResolveCommand(event.command, False, f"the job is not paused: {refusal}")]
    effects: list[Effect] = [
        ResolveCommand(event.command, True, f"islands give their work and leave: {request.reason}")
    ]
    effects += checkpoints.begin_if_possible(state, event.at)
    wanted = [i for i in state.islands.values() if i.wanted and i.state is not IslandState.FAILED]
    state.paused = Paused(request.reason, tuple(island.id for island in wanted))
    for island in wanted:
        if island.id not in state.standbys:
            effects.append(WantIsland(island.id, False, request.reason))
        effects += _leave(state, island, request.reason)
    return [*effects, *advance_all(state, event.at)]


def go_on(state: JobState, event: CommandRequested, request: Continue) -> list[Effect]:
    """Place the islands again that the job wanted before it was paused."""
    paused = state.paused
    if paused is None or state.phase is not JobPhase.RUNNING:
        return [ResolveCommand(event.command, False, f"the job is not paused: it is {state.phase}")]
    state.paused = None
    effects: list[Effect] = [ResolveCommand(event.command, True, f"islands are placed again: {request.reason}")]
    for name in paused.islands:
        if name not in state.standbys:
            effects.append(WantIsland(name, True, request.reason))
        effects += _want(state, state.islands[name], request.reason)
    return effects


def change_settings(state: JobState, event: CommandRequested, request: Set) -> list[Effect]:
    """Change settings of the running job, all of them or none. Islands use them from their next boundary on."""
    if refusal := _settings_refusal(state, request):
        return [ResolveCommand(event.command, False, refusal)]
    policy = state.policy
    changes = [
        (f"lr {wanted:g} of the specification's", f"{before:g}")
        if name == "lr"
        else (f"{name} {wanted:g}", "everyone" if before is None else f"{before:g}")
        for name, wanted, before in (
            ("lr", request.lr_ratio, state.lr_ratio),
            ("quorum", request.quorum, policy.quorum),
            ("grace", request.grace_cap_steps, policy.grace_cap_steps),
            ("interval", request.sync_interval_steps, policy.sync_interval_steps),
        )
        if wanted is not None
    ]
    if request.cost_max is not None:
        before = "the specification's" if state.changed.cost_max is None else f"{state.changed.cost_max:g}"
        changes.append((f"cost {request.cost_max:g}", before))
    wanted = {name: value for name, value in asdict(request).items() if value is not None and name != "reason"}
    state.changed = replace(state.changed, epoch=state.epoch, count=state.changed.count + 1, **wanted)
    state.policy = settings_applied(policy, request)
    state.quorum_least = min(state.quorum_least, state.policy.quorum)
    words = ", ".join(f"{now} (until now {before})" for now, before in changes)
    why = f", because {request.reason}" if request.reason else ""
    answer = ResolveCommand(event.command, True, f"{words}; islands use it from their next boundary on{why}")
    trains = (IslandState.TRAINING, IslandState.DRAINING)
    islands = [island for island in state.islands.values() if island.state in trains]
    adjusted = [effect for island in islands for effect in island_life.adjustment(state, island)]
    return [answer, *adjusted, *advance_all(state, event.at)]


LR_RATIO_MIN, LR_RATIO_MAX = 1e-3, 1e3
"""Beyond these a learning rate is a slip of the pen."""
STEPS_MAX = 10**6
"""As many steps as the specification allows between two offers, and for a grace window."""
COST_MAX = 10**9
"""The highest limit of cost that the specification allows."""


def _settings_refusal(state: JobState, request: Set) -> str | None:
    """Return why these settings are refused, with the field, its value, its bounds and a remedy."""
    policy = state.policy
    if state.phase is not JobPhase.RUNNING:
        return f"the job is {state.phase}: its settings are not changed any more"
    if replace(request, reason="") == Set():
        return "no setting was named: give lr, quorum, grace, interval or cost"
    ratio, quorum, grace, interval, cost, _ = astuple(request)
    islands = sum(island.wanted for island in state.islands.values() if island.id not in state.standbys)
    if ratio is not None and not LR_RATIO_MIN <= ratio <= LR_RATIO_MAX:
        bounds = f"{LR_RATIO_MIN:g} to {LR_RATIO_MAX:g}"
        return f"lr is {ratio:g} of the specification's, but must be {bounds} of it: choose one between"
    if quorum is not None and not 1 <= quorum <= islands:
        remedy = "lower it, or scale the job up first" if quorum > islands else "raise it"
        return f"quorum is {quorum}, but must be 1 to {islands}, the islands that the job wants: {remedy}"
    least = policy.grace_floor_steps
    if grace is not None and not least <= grace <= STEPS_MAX:
        return f"grace is {grace:g}, but must be {least:g} to {STEPS_MAX:,} inner steps: choose one between"
    own = policy.router_interval_steps
    limit, field = (policy.overlap_steps, "overlap_steps") if own is None else (own, "router_interval_steps")
    least = limit + 1
    if interval is not None and not least <= interval <= STEPS_MAX:
        above = f"above synchroniser.{field} ({limit})"
        return f"interval is {interval}, but must be {least} to {STEPS_MAX:,} inner steps, {above}: choose one between"
    if cost is not None and not 0 < cost <= COST_MAX:
        return f"cost is {cost:g}, but must be above 0 and at most {COST_MAX:,}: choose one between"
    return None


def _paused(paused: Paused) -> str:
    return f"the job is paused, and no island is placed: {paused.reason}"


def _addressed(state: JobState, island_id: IslandId) -> Island | str:
    """Return the island that a command names, or why there is nothing to do."""
    if state.phase is not JobPhase.RUNNING:
        return f"the job is {state.phase}: islands are not changed any more"
    island = state.islands.get(island_id)
    return island or f"no island is named {island_id!r}; there are {', '.join(sorted(state.islands))}"


# ── ending ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _begin_finishing(state: JobState, now: Instant, reason: str) -> list[Effect]:
    state.phase, state.end_reason = JobPhase.FINISHING, reason
    state.reason = f"{reason}; collecting the last contributions"
    flushes = [FlushIsland(i.id, i.incarnation) for i in state.islands.values() if i.id in state.live]
    return [*island_life.flush_deadline(state, now), *flushes, *_go_on_finishing(state, now)]


def _go_on_finishing(state: JobState, now: Instant) -> list[Effect]:
    if state.live or any(r.phase is RoundPhase.MERGING for r in state.rounds):
        return []
    if any(r.offered for r in state.rounds):
        return abandon_open_rounds(state)  # below quorum, and nobody is left to make it up
    state.complete = True  # an unreachable island may still be training; do not wait for it
    if state.evaluation is not None:
        return []
    if state.evaluated != state.global_version:
        return [evaluation.begin(state, now)]
    if not state.global_version:
        never = f"never did {state.policy.quorum} islands contribute"
        over = "the token budget is used up" if state.end_reason == BUDGET_REACHED else state.end_reason
        return finish(state, JobOutcome.FAILED, f"{over}, but nothing was ever merged: {never}")
    return finish(state, JobOutcome.COMPLETED, state.end_reason)


def _ends_job(state: JobState, event: ConnectionLost) -> bool:
    """Return whether the reason for which an island was given up ends the job as well.

    A specification that is wrong on one node may be right on others. So an island's own failure ends only a job that has
    not trained yet.
    """
    island = state.islands.get(event.island)
    if island is None or island.incarnation != event.incarnation or island.state is not IslandState.FAILED:
        return False
    begun = state.tokens_trained > 0
    return event.extent is FailureExtent.JOB or (event.extent is FailureExtent.ISLAND and not begun)


def _refusal(state: JobState, request: Scale, group_islands: list[Island], removed: list[Island]) -> str | None:
    if state.phase is not JobPhase.RUNNING:
        return f"the job is {state.phase}: islands are not changed any more"
    if state.paused is not None:
        return _paused(state.paused)
    if not 0 <= request.count <= len(group_islands):
        return (
            f"of this job there may be 0 to {len(group_islands)} islands on node group {request.node_group!r}; "
            f"{request.count} were asked for"
        )
    removed_live = state.live & {island.id for island in removed}
    live_count = len(state.live - removed_live)
    if removed_live and live_count < state.policy.quorum:
        return (
            f"only {live_count} of the {state.policy.quorum} islands that the quorum needs would go on training, and the "
            f"last work of {', '.join(sorted(removed_live))} might never merge: leave more, or kill them and keep them away"
        )
    return None


def _want(state: JobState, island: Island, reason: str) -> list[Effect]:
    if island.state not in WITH_PROCESS:
        return island_life.place(state, island_record.failures_reset(island), reason)
    state.islands[island.id] = after = island_record.wanted_again(island, reason)
    return [StartTraining(island.id, island.incarnation)] if after.state is IslandState.TRAINING else []


def _leave(state: JobState, island: Island, reason: str) -> list[Effect]:
    """Drain an island that trains, a suspect one as soon as it answers. Stop any other: it has no work to lose."""
    state_answered = island.current.state_before_suspect if island.state is IslandState.SUSPECT else island.state
    if island.state is IslandState.TRAINING:
        state.islands[island.id] = island_record.draining(island, reason)
        return [DrainIsland(island.id, island.incarnation)]
    if state_answered is IslandState.TRAINING:
        state.islands[island.id] = island_record.to_drain(replace(island, wanted=False))
        return []
    if state_answered is IslandState.DRAINING:
        state.islands[island.id] = replace(island, wanted=False)  # killed meanwhile, to be placed again
        return []
    state.islands[island.id] = island_record.dismissed(island, reason)
    return [StopIsland(island.id, island.incarnation, reason)] if island.state in WITH_PROCESS else []


def _outcome(added: Iterable[Island], removed: Iterable[Island]) -> str:
    placed = [f"{island.id} is placed" for island in added]
    return "; ".join([*placed, *(f"{island.id} leaves" for island in removed)])
