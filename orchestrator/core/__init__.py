"""The synchroniser's protocol as a deterministic state machine: events in, effects out.

    effects = Synchroniser(policy).handle(event)

The core makes every decision about a job: which islands run, what enters a merge, when a round closes, when the job ends.
It has no clock, no randomness, no threads and no I/O. Time comes in with events, and requests go out as effects. Whoever
calls ``handle`` is a *driver*: the live service (``runtime.synchroniser_actor``), the simulator (``simulation.world``),
replay and recovery (``tape``), or a test.

    events, messages, saving     what a driver hands over: facts, reports of islands, and what became of checkpoints
    commands                     what operators ask for, which comes as the event ``CommandRequested``
    effects, saving              what it gets back
    vocabulary                   the words that both consist of
    synchroniser                 the entry point, which names the handler of every event
    job_life, island_life, fragment_life, checkpoints, evaluation, recovery      the handlers
    state, island_record, fragment_round                                         what is remembered
    invariants                   what is always true of it

The smallest driver, from the start of a job with two islands to its first merge::

    >>> from orchestrator.core import events as e, messages as m, vocabulary as v
    >>> from orchestrator.core.synchroniser import Synchroniser
    >>> policy = v.JobPolicy(
    ...     islands=tuple(v.IslandPlan(name, "cpu", "here", 1) for name in ("a", "b")), quorum=2, fragment_count=1,
    ...     sync_interval_steps=4, overlap_steps=1, grace_margin=0.5, grace_cap_steps=1.0, staleness_max=0,
    ...     token_budget=1000, evaluation_every_merges=0, suspect_timeout_s=30.0, backoff_first_s=1.0, backoff_max_s=8.0,
    ...     restarts_max=3, flush_timeout_s=10.0, moving_average_decay=0.9)
    >>> core, clock = Synchroniser(policy), iter(range(100))
    >>> def step(event_type, *facts):
    ...     effects = core.handle(event_type(float(next(clock)), *facts))  # a real driver records both before it acts
    ...     print(event_type.__name__, "→", ", ".join(type(effect).__name__ for effect in effects) or "nothing")
    >>> step(e.JobStarted)
    JobStarted → PlaceIsland, PlaceIsland
    >>> step(e.OuterStateSeeded, 1000, "digest of the parameters")
    OuterStateSeeded → nothing
    >>> for name in ("a", "b"):
    ...     step(e.IslandPlaced, name, 1, "node", 4711)
    ...     step(e.IslandReported, name, 1, m.Ready(device_count=1, start_seconds=0.5))
    ...     step(e.IslandReported, name, 1, m.CaughtUp(None, versions=(0,), step=0, transfer_seconds=0.1))
    IslandPlaced → nothing
    IslandReported → BeginCatchUp
    IslandReported → StartTraining
    IslandPlaced → nothing
    IslandReported → BeginCatchUp
    IslandReported → StartTraining
    >>> for name in ("a", "b"):
    ...     step(e.ContributionArrived, v.Contribution(f"{name}-1", name, 1, 0, 1, 4, 0, 4, 40, 40))
    ContributionArrived → AdmitContribution
    ContributionArrived → AdmitContribution, MergeFragment
    >>> step(e.MergeCompleted, 0, 1, "digest of version 1", 0.01)
    MergeCompleted → ReleasePayload, ReleasePayload, PublishFragment

What a driver must do
---------------------

 1. **Order.** It MUST hand over one event at a time, from one thread. It MUST stamp every event when the event enters, so
    that instants have the order of events. Instants MUST NOT run backwards, not even across a restart.
    (``test_a_jobs_time_never_runs_back_and_within_one_start_of_the_machine_is_what_passed``)
 2. **Start.** It MUST hand over ``JobStarted`` exactly once in the life of a job; only ``JobResumed`` and commands may come
    before. It MUST hand over ``OuterStateSeeded`` once the parameters exist; islands wait for it.
    (``test_an_island_that_is_ready_before_there_are_parameters_waits_for_them``)
 3. **Truth.** An event MUST be true when it is handed over. ``ContributionArrived`` means that the payload is held, that its
    checksum is right and that every value is finite. ``MergeCompleted`` and ``FragmentRestored`` mean that the version
    survives the death of this process.
 4. **Order of reports.** It MUST hand over the reports of one incarnation in the order in which the island made them, and
    ``IslandPlaced`` before all of them. Reports of different islands may come in any order.
 5. **Record before acting.** It MUST record an event and its effects on the tape before it carries out any of the effects.
    (``test_the_driver_writes_before_anybody_can_act``)
 6. **Make durable.** Three things MUST survive a loss of power before anybody learns of them: the record of a report before
    the island is told that it may forget the report; the record that ordered a merge before the merge is journalled; and
    the record of an epoch before any island hears of that epoch. Otherwise a successor could reuse the number of the epoch,
    and islands would take two lives for one. A driver that gives up the first two, for speed, MUST refuse to continue after
    a loss of power. (``test_a_loss_of_power_takes_only_what_nobody_was_told``,
    ``test_islands_hear_of_no_synchroniser_that_dies_before_its_epoch_is_on_the_tape``,
    ``test_async_merges_that_a_loss_of_power_took_from_islands_that_hold_them_end_the_job_loudly``)
 7. **Carry out.** It MUST begin the effects of an event in the order in which they were returned. It may run effects
    concurrently only where they concern different fragments or different islands; a publication and a command to the same
    island may overtake each other. It MUST handle every kind of effect; those that are a ``Note`` need nothing done. It
    MUST NOT wait for the outcome of an effect before it hands over the next event.
 8. **Repeat safely.** An effect may be asked for again, after a restart or by the core. Carrying it out twice MUST be the
    same as once. Effects are known by their names: a merge by epoch, fragment and version; a process by island and
    incarnation; a payload by its id; a checkpoint by its number; a timer by timer and serial; a command by its id.
    (``test_asking_again_for_a_version_changes_nothing_and_gives_the_same_digest``)
 9. **Answer.** It MUST hand over what came of an effect, as the effect's docstring says:

        MergeFragment       MergeCompleted, or MergeFailed       FlushIsland        the report Flushed
        RestoreFragments    FragmentRestored for each fragment,  DrainIsland        the report Drained
                            or RollbackFailed                    KillIsland         ConnectionLost (dead)
        PlaceIsland         IslandPlaced, or PlacementFailed     Evaluate           EvaluationCompleted or -Failed
        BeginCatchUp        the report CaughtUp, or              BeginCheckpoint    the report Saved or NotSaved of each
                            CatchUpFailure                                          island, or CheckpointFailed
        SetTimer            TimerFired                           SealCheckpoint     CheckpointTaken or CheckpointFailed

    Reports come as ``IslandReported``. If an island dies before it answers, ``ConnectionLost`` is the answer. Other effects
    need none.
10. **Timers.** It MUST keep one deadline for each timer; a newer ``SetTimer`` replaces it. It MUST hand over ``TimerFired``
    with the serial of the deadline, at ``due_at`` or later, never earlier. A timer that fires late is harmless: the core
    ignores serials that are not the latest. (``test_a_timer_of_an_earlier_round_does_nothing``)
11. **Publish the newest.** It MUST publish exactly the version that ``PublishFragment`` names, or nothing if it already
    holds a newer one: the publication of that one follows.
12. **Restart.** A new process MUST first bring a core to the state of the dead one by replaying the tape, and refuse to
    continue if the replayed effects differ from the recorded ones. It MUST NOT carry out effects that it read from the
    tape. It then hands over, in this order: ``MergeCompleted`` or ``FragmentRestored`` for each version that is in the
    journal but not on the tape, ``SynchroniserRestarted`` with a higher epoch, and ``FragmentRestored`` for each fragment
    whose newest version the journal has lost. It records them, makes them durable, sets the timers that were pending,
    connects to every island with a process, and only then carries out what the core decided: the core asks again for
    everything that was pending. (``test_a_build_that_decides_otherwise_does_not_go_on``,
    ``test_everyone_that_trains_is_told_to_and_gets_every_version_again``,
    ``test_an_offer_that_was_merged_before_the_death_is_not_taken_again``)
13. **Lost payloads.** It MUST NOT carry out ``ReleasePayload`` with the reason LOST. Those bytes died with the former
    process, and the island may have offered the same payload, under the same id, to this one already.
    (``test_many_deaths_at_random_points_lose_and_double_nothing``)
14. **Earlier epochs.** Every command to an island MUST carry the driver's epoch. An island that has heard a newer epoch
    refuses an older one. A driver that is refused was replaced: it MUST stop, carry out nothing more and write nothing more.
    What an effect of an earlier epoch still brings about is an event like any other; the core ignores it if it no longer
    waits for it.
    (``test_a_synchroniser_that_was_replaced_is_fenced_and_gets_nothing``)
15. **Failure.** If ``handle`` raises, the state may be half changed. The driver MUST end the job and MUST NOT hand over
    another event. (``test_a_failing_core_tells_its_recent_story``)
16. **End.** ``FinishJob`` is the last effect of a job. The driver MUST end every process of the job and may then stop.

What a driver may rely on
-------------------------

 a. **Purity.** The core imports nothing but a list of pure modules of the standard library.
    (``test_imports_only_go_down``, ``test_the_core_imports_with_nothing_installed``)
 b. **Determinism.** The same policy, epoch and events give the same effects, on every machine and under every hash seed.
    (``test_decisions_do_not_depend_on_the_hash_seed``, ``test_every_tape_replays_exactly``,
    ``test_the_decisions_are_the_recorded_ones``)
 c. **Idempotence.** Every event but ``JobStarted`` may come again, at once or long afterwards, and is then safe. A command
    that comes again under its id changes nothing, and neither does an epoch that is not newer.
    (``test_everything_holds_under_every_seed``, ``test_a_drain_repeated_under_its_id_changes_nothing``,
    ``test_an_epoch_that_is_not_newer_changes_nothing``)
 d. **Boundedness.** ``handle`` returns. What follows from a decision is decided in a bounded number of passes.
    (``test_a_core_that_never_settles_fails_with_the_recent_story``)
 e. **Consistency.** After every event the invariants hold; every test of the core checks them.
    (``test_a_broken_invariant_of_an_incarnation_is_named``)
 f. **Conservation.** Every payload that arrived is held by one round or released once, and no work is merged twice. The
    versions of a fragment rise by one, and it merges one version at a time.
    (``test_every_payload_is_held_or_released_and_never_both``, ``test_no_work_is_merged_twice``,
    ``test_no_merge_is_below_quorum_and_versions_rise_by_one``)
 g. **Order does not matter to a merge.** The inputs of a merge and their weights do not depend on who was first.
    (``test_the_order_of_arrival_changes_nothing``)
 h. **Fencing.** A process of an incarnation that is over is told to stop when it shows up, and cannot contribute.
    (``test_a_replaced_process_that_shows_up_is_ended``,
    ``test_a_contribution_of_a_replaced_process_is_fenced_and_the_process_ended``)
 i. **Progress.** Once faults end and a quorum of islands trains, every fragment advances and the job ends.
    (``test_once_faults_end_every_fragment_advances_and_the_job_ends``)
"""
