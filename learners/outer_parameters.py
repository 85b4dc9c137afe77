"""Θ as an island holds it, and the evaluation of it that the island is asked for.

An island that rebases keeps of each fragment the published value that it adopted last. Those of all fragments, with what
arrived since, are Θ at some versions, on the host: no byte is sent for an evaluation. What came from a peer is that peer's
own and not Θ, until the next version of it is published.

Not thread-safe: its loop guards it. Refuses to know boundaries, trainers and reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from learners.contract import Arrays
from orchestrator.core.vocabulary import FragmentId, Version


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Measure Θ at these versions, or later ones. One of more than ``limit_s`` measures fewer sequences."""

    global_version: int
    versions: tuple[Version, ...]
    limit_s: float


class OuterParameters:
    """Θ by fragment, each at its version."""

    def __init__(self) -> None:
        self._values: dict[FragmentId, tuple[Version, Mapping[str, np.ndarray]]] = {}

    def put(self, fragment: FragmentId, version: Version, value: Mapping[str, np.ndarray]) -> None:
        """This is Θ of the fragment, unless a newer version is here."""
        if version >= self.version(fragment):
            self._values[fragment] = (version, value)

    def version(self, fragment: FragmentId) -> int:
        """−1 where no value of the fragment is here."""
        return self._values[fragment][0] if fragment in self._values else -1

    def at(self, versions: tuple[Version, ...]) -> Arrays | None:
        """Θ by pieces, if it is here at these versions or later ones."""
        if any(self.version(FragmentId(p)) < version for p, version in enumerate(versions)):
            return None
        return {name: array for _, value in self._values.values() for name, array in value.items()}
