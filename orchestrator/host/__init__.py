"""Threads, clock and disk of a job's process, without Ray: the swarm runs the same code on a simulated disk.

    job_files           tape and journal, created or recovered where the last synchroniser died
    tape_sync, retry    how far the tape is durable; a refused write is tried again until it is done
    snapshot_writer     snapshots of core and folds, so that less of the tape need be replayed
    checkpoint_writer   a running job's checkpoints
    records             what a job leaves for people and programs: status, report, parameters
    last_known          the last known progress of a job whose files are damaged
    job_clock, timers   a job's own time, and deadlines in it
    state_view          the core's state, read under one rule for threads
    job_context         what every part of a job's process is given
    posting             how threads hand events to the one that decides

``runtime`` uses all of this live, ``tests/swarm`` in simulation.
"""
