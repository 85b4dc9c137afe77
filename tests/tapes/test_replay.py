"""Replay decides the same, in this process and in others; where it does not, it stops and tells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core.effects import MergeFragment
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.tape.driver import Driver, MemorySink
from orchestrator.tape.replay import fresh_core, replay
from orchestrator.tape.schema import Tape
from orchestrator.tape.storage import TapeWriter, read_tape
from tests.hash_seeds import said_under


@pytest.fixture(scope="module")
def world():
    policy = sample_policy(3, steps=120)
    return World(policy, WorldPlan((0.05,) * 3, faults=(Fault(3.0, FaultKind.KILL, "europe"),)), seed=5).run()


def test_a_tape_replays_exactly_and_folds_to_the_same_figures(world, tmp_path):
    path = tmp_path / "tape.jsonl"
    with TapeWriter(path, world.tape.header) as writer:
        for record in world.tape.records:
            writer.append(record)
    goodput, statistics = Goodput(world.policy), Statistics(world.policy)
    tape = read_tape(path)
    again = replay(tape, folds=(goodput, statistics))
    assert again.exact
    assert again.matching == again.steps == len(world.sink.records)
    assert again.digest == tape.footer.digest
    assert goodput.summary() == world.goodput.summary()
    assert statistics.summary() == world.statistics.summary()


def test_the_first_divergence_is_found_and_told(world):
    index, merge = next(
        (n, effect)
        for n, record in enumerate(world.tape.records)
        for effect in record.effects
        if isinstance(effect, MergeFragment)
    )
    changed = replace(merge, step=merge.step + 1)
    record = world.tape.records[index]
    effects = tuple(changed if effect is merge else effect for effect in record.effects)
    records = list(world.tape.records)
    records[index] = replace(record, effects=effects)
    again = replay(Tape(world.tape.header, tuple(records)))
    assert not again.exact
    assert again.matching == index
    assert again.divergence.n == index + 1
    assert again.divergence.decided == record.effects
    told = str(again.divergence)
    assert f"step={merge.step + 1}" in told
    assert f"step={merge.step}" in told
    assert str(world.tape.records[index - 1].event) in told


def test_another_policy_decides_otherwise(world):
    header = replace(world.tape.header, policy=replace(world.policy, quorum=3))
    assert not replay(replace(world.tape, header=header)).exact


def test_a_build_that_fails_has_diverged(world):
    class Broken:
        def handle(self, event):
            raise ValueError("no")

    again = replay(world.tape, core_of=lambda header: Broken())
    assert again.matching == 0
    assert "ValueError: no" in str(again.divergence)


def test_a_failing_core_tells_its_recent_story(world):
    core = fresh_core(world.tape.header)
    driver = Driver(core, (), MemorySink())
    for record in world.tape.records[:20]:
        driver.step(record.event)
    with pytest.raises(AttributeError) as caught:
        driver.step("no event at all")
    story = "\n".join(caught.value.__notes__)
    assert "step 21" in story
    assert str(world.tape.records[19].event) in story


def test_decisions_do_not_depend_on_the_hash_seed():
    """Sets and dictionaries of strings iterate in another order under each seed; the tape must not show it."""
    module = "tests.tapes.simulate_and_replay"
    said = {said_under(seed, "-m", module, "11") for seed in ("0", "1", "4242")}
    assert len(said) == 1
    written, replayed, matching, steps, _ = said.pop().split()
    assert written == replayed
    assert matching == steps
