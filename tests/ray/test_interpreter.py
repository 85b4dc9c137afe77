"""Effects into calls, where no cluster is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from orchestrator.core.effects import ReleasePayload
from orchestrator.core.vocabulary import Epoch, PayloadId, ReleaseReason
from orchestrator.errors import InternalError
from orchestrator.runtime.interpreter import Interpreter
from orchestrator.runtime.payloads import PayloadTable

PAYLOAD = PayloadId("us-east.1.0.7")


def test_an_offer_made_again_is_kept_when_what_died_under_its_name_is_declared_lost() -> None:
    """A new synchroniser's links hear the offers again while it still acts on what its restart decided."""
    table = PayloadTable()
    absent: Any = None
    interpreter = Interpreter(
        "job",
        island_count=1,
        controller=absent,
        workshop=absent,
        payloads=table,
        timers=absent,
        epoch=Epoch(2),
        post=absent,
        kept_count=absent,
        resolve=absent,
        finish=absent,
        failed=absent,
    )
    table.hold(PAYLOAD, {"w": np.ones(3, np.float32)})
    interpreter.act(ReleasePayload(PAYLOAD, ReleaseReason.LOST))
    assert table.get(PAYLOAD)["w"].sum() == 3
    interpreter.act(ReleasePayload(PAYLOAD, ReleaseReason.MERGED))
    with pytest.raises(InternalError):
        table.get(PAYLOAD)
