"""A standby's process becomes an island: the state it was given, what was published since, and the island's own data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from learners import jax_trainer, synthetic
from learners.loop import IslandLoop, LoopPlan
from learners.outbox import Outbox
from orchestrator.errors import InternalError

CREATE = {"synthetic": synthetic.create, "jax": jax_trainer.create}


def loop_of(trainer: Any, adoption: str = "rebase") -> tuple[IslandLoop, Outbox]:
    names, outbox = sorted(trainer.tensor_shapes()), Outbox()
    plan = LoopPlan((tuple(names[::2]), tuple(names[1::2])), 4, adoption, tokens_per_schedule_step=128)
    return IslandLoop(trainer, plan, outbox), outbox


@pytest.mark.parametrize("kind", sorted(CREATE))
def test_it_takes_the_steps_that_an_island_of_that_state_and_shard_takes_to_the_bit(kind, make_job) -> None:
    spec = make_job()
    islands, standbys = CREATE[kind](spec, 1, 2), CREATE[kind](spec, 0, 2)
    standbys.warm_up()  # which draws a batch of its own shard
    (island, _), (standby, told) = loop_of(islands), loop_of(standbys)
    initial = islands.initial_parameters()
    newer = {name: array + np.float32(0.01) for name, array in initial.items()}
    first = sorted(initial)[::2]
    mixed = {name: newer[name] if name in first else initial[name] for name in initial}

    standby.load(initial, (0, 0), 0, cursor=0)
    standby.deliver(0, 2, 30, {name: newer[name] for name in first})
    standby.deliver(0, 3, 40, {name: newer[name] for name in first})
    assert standby.promote(1, cursor=5) == ((3, 0), 40)
    island.load(mixed, (3, 0), 40, cursor=5)

    for _ in range(3):
        island.train()
        standby.train()
    names = sorted(initial)
    expected, found = (t.snapshot(names).arrays() for t in (islands, standbys))
    assert all(np.array_equal(found[name], expected[name]) for name in names)
    assert islands.cursor() == standbys.cursor() == 8
    assert not [letter for letter in told.take(0) if type(letter).__name__ == "Adopted"]  # nobody counts on it


def test_asked_again_before_it_trains_it_tells_what_it_holds_by_then(make_job) -> None:
    trainer = synthetic.create(make_job(), 0, 2)
    loop, _ = loop_of(trainer)
    arrays = trainer.initial_parameters()
    loop.load(arrays, (1, 1), 10, cursor=0)
    assert loop.promote(1, cursor=0) == ((1, 1), 10)
    loop.deliver(1, 2, 20, {name: arrays[name] for name in sorted(arrays)[1::2]})
    assert loop.promote(1, cursor=0) == ((1, 2), 20)


def test_who_holds_no_state_or_trains_already_takes_nobodys_place(make_job) -> None:
    trainer = synthetic.create(make_job(), 0, 2)
    loop, _ = loop_of(trainer)
    with pytest.raises(InternalError):
        loop.promote(1, cursor=0)
    loop.load(trainer.initial_parameters(), (0, 0), 0, cursor=0)
    loop.start()
    with pytest.raises(InternalError):
        loop.promote(1, cursor=0)
    loop.stop()
