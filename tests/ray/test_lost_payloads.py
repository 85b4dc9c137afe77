"""What died with an earlier synchroniser is not taken from its successor, to whom it may have been sent again already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from orchestrator.core import effects as f
from orchestrator.core.vocabulary import Epoch, PayloadId, ReleaseReason
from orchestrator.errors import InternalError
from orchestrator.host.timers import Timers
from orchestrator.runtime.payloads import PayloadTable

if TYPE_CHECKING:
    from orchestrator.runtime.interpreter import Interpreter

PAYLOAD = PayloadId("asia.1.0.7")


class Closed:
    """Nothing is merged here, and nothing saved."""

    def close(self) -> None:
        pass


@pytest.fixture
def payloads() -> PayloadTable:
    """A link heard the island's standing offer before the pump came to the restart, and holds its bytes."""
    table = PayloadTable()
    table.hold(PAYLOAD, {"w": np.ones(3, np.float32)})
    return table


@pytest.fixture
def interpreter(port: object, payloads: PayloadTable) -> Iterator[Interpreter]:
    from orchestrator.runtime.interpreter import Interpreter  # imports Ray, which reads its environment then

    nobody: Any = None
    made = Interpreter(
        "job",
        island_count=1,
        controller=nobody,
        workshop=Closed(),
        payloads=payloads,
        timers=Timers(lambda: 0.0, nobody),
        epoch=Epoch(2),
        post=nobody,
        kept_count=nobody,
        resolve=nobody,
        finish=nobody,
        checkpoints=Closed(),
        now=nobody,
        failed=nobody,
    )
    yield made
    made.close()


def test_bytes_that_came_anew_before_their_loss_was_decided_are_kept(
    interpreter: Interpreter, payloads: PayloadTable
) -> None:
    interpreter.act(f.ReleasePayload(PAYLOAD, ReleaseReason.LOST))
    assert payloads.get(PAYLOAD)["w"].sum() == 3.0


@pytest.mark.parametrize("reason", [reason for reason in ReleaseReason if reason is not ReleaseReason.LOST])
def test_for_any_other_reason_they_are_let_go(
    interpreter: Interpreter, payloads: PayloadTable, reason: ReleaseReason
) -> None:
    interpreter.act(f.ReleasePayload(PAYLOAD, reason))
    with pytest.raises(InternalError, match="not held"):
        payloads.get(PAYLOAD)
