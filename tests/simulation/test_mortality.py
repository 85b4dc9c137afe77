"""Simulated jobs in rough weather whose synchroniser dies several times: what the checkers ask holds all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.core import fragment_life, recovery
from orchestrator.core.effects import Effect, ReleasePayload
from orchestrator.core.state import JobState
from orchestrator.core.vocabulary import Epoch
from orchestrator.simulation.swarm import trial

DEATHS = 6
SEEDS = 24
SEEDS_TO_FIND = 40


@pytest.mark.parametrize("first", range(0, SEEDS, 8))
def test_nothing_is_lost_or_doubled_however_often_the_synchroniser_dies(first: int) -> None:
    survived = [trial.run(seed, DEATHS) for seed in range(first, first + 8)]
    assert {"SynchroniserRestarted", "lost", "MergeFragment"} <= frozenset().union(*(s.seen for s in survived))


def test_a_seed_with_deaths_is_found_again_by_its_command() -> None:
    first, again = trial.run(5, DEATHS), trial.run(5, DEATHS)
    assert first.digest == again.digest != trial.run(5).digest


# ── planted bugs ──────────────────────────────────────────────────────────────────────────────────────────────────


def _keeps_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contributions whose bytes are gone still count towards a merge."""

    def forgetful(state: JobState) -> list[Effect]:
        before = list(state.rounds)
        effects = fragment_life.lose_payloads(state)
        state.rounds[:] = before
        return effects

    monkeypatch.setattr(recovery, "lose_payloads", forgetful)


def _releases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(state: JobState) -> list[Effect]:
        return [x for x in fragment_life.lose_payloads(state) if not isinstance(x, ReleasePayload)]

    monkeypatch.setattr(recovery, "lose_payloads", silent)


def _keeps_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    restarted = recovery.restarted

    def timeless(state: JobState, event: object) -> list[Effect]:
        effects = restarted(state, event)  # type: ignore[arg-type]
        state.epoch = Epoch(1)
        return effects

    monkeypatch.setattr(recovery, "restarted", timeless)


def _counts_lost_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An island's lost offer counts as merged, so it is told that the version holds it."""

    def generous(state: JobState) -> list[Effect]:
        for current in state.rounds:
            for c in current.offered.values():
                island = state.islands[c.island]
                offers = {**island.merged_offer, c.fragment: c.offer}
                state.islands[c.island] = replace(island, merged_offer=offers)
        return fragment_life.lose_payloads(state)

    monkeypatch.setattr(recovery, "lose_payloads", generous)


@pytest.mark.parametrize("bug", [_keeps_rounds, _releases_nothing, _keeps_its_epoch, _counts_lost_work])
def test_a_planted_bug_of_recovery_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(trial.SwarmFailure, match=rf"swarm --seed \d+ --deaths {DEATHS}"):
        _run_until_one_fails()


def _run_until_one_fails() -> None:
    for seed in range(SEEDS_TO_FIND):
        trial.run(seed, DEATHS)
