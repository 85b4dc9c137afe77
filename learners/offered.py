"""An offered fragment: a snapshot of an island's parameters, its payload, and what the synchroniser makes of that.

    payload   Δ = Θ_base − θ in the codec, once somebody fetches it; the same bytes as often as it is fetched
    decoded   θ as the synchroniser decodes it, Θ_base − Δ̂; θ itself while nobody has fetched it, or nothing is lost
    residue   θ − decoded

Where the island does not hold Θ_base, its parameters themselves are the payload, and nothing is lost. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from learners.contract import Arrays, Snapshot
from orchestrator.core.vocabulary import Version
from orchestrator.parameters import wire_format
from orchestrator.parameters.codec.registry import EXACT, CodecName
from orchestrator.parameters.displacement import displacement
from orchestrator.parameters.wire_format import EncodedTensors


class PublishedVersion(NamedTuple):
    """A fragment of Θ as it was published."""

    version: Version
    arrays: Mapping[str, np.ndarray]


class OfferedFragment:
    """``base`` is what the island stands on, None where it does not hold that; residues are kept if they are wanted."""

    def __init__(
        self, snapshot: Snapshot, base: PublishedVersion | None, codec_name: CodecName, *, residue_wanted: bool = False
    ) -> None:
        self._snapshot: Snapshot | None = snapshot
        self._base, self._codec, self._residue_wanted = base, codec_name, residue_wanted
        self._content: EncodedTensors | None = None
        self._residue: Arrays | None = None
        self._lock = threading.Lock()

    def payload(self) -> memoryview:
        """The bytes for the synchroniser, once the snapshot is on the host."""
        with self._lock:
            if self._content is not None:
                return wire_format.written(self._content)
            assert self._snapshot is not None
            arrays = self._snapshot.arrays()
            if self._base is None:
                return wire_format.encode(arrays)
            content = displacement(self._base.arrays, arrays, self._base.version, self._codec)
            if self._codec == EXACT:
                return wire_format.written(content)
            self._content = content
            if self._residue_wanted:
                self._residue = {name: arrays[name] - array for name, array in self._decoded(content).items()}
            self._snapshot = None  # a twentieth of it lies in the content
            return wire_format.written(content)

    def arrays(self) -> Arrays:
        """What is decoded of it."""
        with self._lock:
            if self._content is not None:
                return self._decoded(self._content)
            assert self._snapshot is not None
            return self._snapshot.arrays()

    def residue(self) -> Arrays | None:
        """None where nothing was lost."""
        with self._lock:
            return self._residue

    def _decoded(self, content: EncodedTensors) -> Arrays:
        assert self._base is not None
        return {name: array - content.decoded(name) for name, array in self._base.arrays.items()}
