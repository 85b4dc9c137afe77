"""A state that cannot be loaded: whatever the trainer or a donor raises becomes a report, and ends no thread silently."""

from __future__ import annotations

import pytest

from learners.outbox import Outbox
from learners.state_transfer import CatchingUp, Donor, DonorReply
from orchestrator.core.messages import CatchUpFailure
from orchestrator.core.vocabulary import IslandId
from orchestrator.errors import DataError
from tests.waiting import PATIENCE_S


class Stop(KeyboardInterrupt):
    pass


RAISED = [ValueError("enough"), SystemExit("enough"), Stop("enough"), GeneratorExit("enough")]


def letters_of(outbox: Outbox) -> list[object]:
    return list(outbox.take(PATIENCE_S))


@pytest.mark.parametrize("error", [*RAISED, DataError(detail="enough")], ids=lambda error: type(error).__name__)
def test_a_trainer_that_cannot_load_a_state_is_blamed_for_it(error: BaseException) -> None:
    outbox = Outbox()
    catching_up = CatchingUp(outbox)
    catching_up.loadable.set()

    def load() -> None:
        raise error

    catching_up.take(None, load)  # type: ignore[arg-type]
    told = "enough" if isinstance(error, DataError) else f"its trainer cannot load it: {type(error).__name__}: enough"
    assert letters_of(outbox) == [CatchUpFailure(None, told)]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_a_donor_that_gives_nothing_is_reported(error: BaseException) -> None:
    outbox = Outbox()
    catching_up = CatchingUp(outbox)
    catching_up.loadable.set()

    def give(wanted: object) -> DonorReply:
        raise error

    donor = Donor(IslandId("a"), give)
    catching_up.fetch((1, 1), {"actor": donor}, 1, lambda state: None, of_one_boundary=True)
    assert letters_of(outbox) == [CatchUpFailure(IslandId("a"), f"{type(error).__name__}: enough")]
