"""The decisions are the recorded ones: of live jobs, of simulated jobs, and of seeds of the swarm.

A few seeds here; ``ATOLL_GOLDEN=all``, as ``make soak`` has it, runs all. ``python -m tests.golden.record`` says when they
are recorded anew.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core import commands
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Drained
from orchestrator.core.saving import CheckpointTaken, FragmentRestored
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import JobOutcome
from orchestrator.tape.replay import replay
from orchestrator.tape.storage import read_tape
from tests.golden import record as golden

ALL = os.environ.get("ATOLL_GOLDEN") == "all"
A_FEW = {"plain": 25, "mortal": 10, "simulated": 20}
CHUNK = 5
LIVE = ("live-calm", "live-everything", "live-killed")


def _chunks() -> list[list[golden.Name]]:
    """The runs to be checked: of each kind in chunks, so that one test is a second or two."""
    of_kind = {kind: [name for name in golden.RUNS if name[0] == kind] for kind in A_FEW}
    chosen = {kind: names if ALL else names[: A_FEW[kind]] for kind, names in of_kind.items()}
    return [names[first : first + CHUNK] for names in chosen.values() for first in range(0, len(names), CHUNK)]


@pytest.mark.parametrize("names", _chunks(), ids=lambda names: f"{names[0][0]}-{names[0][1]}")
def test_the_decisions_are_the_recorded_ones(names: list[golden.Name]) -> None:
    expected = golden.read()
    assert {name: golden.RUNS[name]() for name in names} == {name: expected[name] for name in names}


def test_every_run_is_recorded_and_each_decides_otherwise() -> None:
    digests = golden.read()
    assert digests.keys() == golden.RUNS.keys()
    plain, mortal = ({d for (kind, _), d in digests.items() if kind == wanted} for wanted in ("plain", "mortal"))
    assert len(plain) == len(mortal) == golden.SEEDS
    assert not plain & mortal


@pytest.mark.parametrize("path", golden.tapes(), ids=lambda path: path.name.split(".")[0])
def test_a_live_job_is_decided_as_it_was(path: Path) -> None:
    tape = read_tape(path)
    again = replay(tape)
    assert again.exact, str(again.divergence)
    assert again.matching == len(tape.records) > 500


def test_the_live_jobs_hold_what_they_were_recorded_for() -> None:
    assert tuple(path.name.split(".")[0] for path in golden.tapes()) == LIVE
    calm, everything, killed = (read_tape(path).records for path in golden.tapes())
    seen = {type(record.event) for record in everything}
    assert {e.SynchroniserRestarted, CheckpointTaken, FragmentRestored} <= seen
    assert Drained in {type(e.report_of(record.event)) for record in everything}
    requests = {type(record.event.request) for record in everything if isinstance(record.event, e.CommandRequested)}
    assert requests == {commands.Scale, commands.Checkpoint, commands.Rollback, commands.Cancel}
    assert e.ConnectionLost in {type(record.event) for record in killed}
    ends = [
        x.outcome for records in (calm, everything, killed) for x in records[-1].effects if isinstance(x, f.FinishJob)
    ]
    assert ends == [JobOutcome.COMPLETED, JobOutcome.CANCELLED, JobOutcome.COMPLETED]


# ── a changed decision is noticed ─────────────────────────────────────────────────────────────────────────────────


def test_a_timer_that_differs_in_its_last_digits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In seeds, in simulated jobs, and in all live ones."""
    real = Synchroniser.handle

    def later(core: Synchroniser, event: e.Event) -> tuple[f.Effect, ...]:
        effects = real(core, event)
        return tuple(replace(x, due_at=x.due_at * (1.0 + 1e-12)) if isinstance(x, f.SetTimer) else x for x in effects)

    monkeypatch.setattr(Synchroniser, "handle", later)
    expected = golden.read()
    for name in (("plain", "2"), ("mortal", "2"), ("simulated", "world"), ("simulated", "specified")):
        assert golden.RUNS[name]() != expected[name], name
    assert not any(replay(read_tape(path)).exact for path in golden.tapes())
