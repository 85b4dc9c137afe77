"""A whole what-if question, worked out."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.simulation.whatif import WhatIf
from orchestrator.tape.schema import Tape


def what_if(tape: Tape, changes: Mapping[str, str], seed: int = 0) -> WhatIf:
    """Raises as ``WhatIf``."""
    question = WhatIf(tape, changes, seed)
    for _ in question.run():
        pass
    return question
