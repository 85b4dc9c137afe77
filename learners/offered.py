"""An offered fragment: a snapshot of an island's parameters, its payload, and what the synchroniser makes of that.

    payload   Δ = Θ_base − θ in the codec, once somebody fetches it; the same bytes as often as it is fetched
    decoded   θ as the synchroniser decodes it, Θ_base − Δ̂; θ itself while nobody has fetched it, or nothing is lost
    residue   θ − decoded

Where the island does not hold Θ_base, its parameters themselves are the payload, and nothing is lost. Thread-safe.

Of an island of many hosts each process offers the pieces that it owns, and decodes all that it holds: pieces that several
hold are coded by each of them alike, so that they stay the same everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from learners.contract import Arrays, Snapshot
from orchestrator.core.vocabulary import Version
from orchestrator.parameters import wire_format
from orchestrator.parameters.codec.registry import EXACT, CodecName
from orchestrator.parameters.displacement import displacement
from orchestrator.parameters.parts import Bounds
from orchestrator.parameters.wire_format import EncodedTensors


class PublishedVersion(NamedTuple):
    """A fragment of Θ as it was published."""

    version: Version
    arrays: Mapping[str, np.ndarray]


class OfferedFragment:
    """``base`` is what the island stands on, None where it does not hold that; residues are kept if they are wanted.

    ``owned`` are the pieces of which this process offers what it has, each with the bounds of that, None for all of it.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        base: PublishedVersion | None,
        codec_name: CodecName,
        *,
        owned: Mapping[str, Bounds | None] | None = None,
        residue_wanted: bool = False,
    ) -> None:
        self._snapshot: Snapshot | None = snapshot
        self._owned = owned
        self._base, self._codec, self._residue_wanted = base, codec_name, residue_wanted
        self._content: EncodedTensors | None = None
        self._residue: Arrays | None = None
        self._lock = threading.Lock()

    def payload(self) -> memoryview:
        """The bytes for the synchroniser, once the snapshot is on the host."""
        with self._lock:
            if self._base is None or self._codec == EXACT:
                assert self._snapshot is not None
                arrays = self._snapshot.arrays()
                if self._base is None:
                    return self._written(wire_format.encoded(arrays, EXACT))
                return self._written(displacement(self._base.arrays, arrays, self._base.version, self._codec))
            return self._written(self._coded())

    def arrays(self) -> Arrays:
        """What is decoded of it."""
        with self._lock:
            if self._content is not None:
                return self._decoded(self._content)
            assert self._snapshot is not None
            return self._snapshot.arrays()

    def merge(self) -> None:
        """A version has this offer in it, so it was decoded somewhere, be it that another process of the island sent it."""
        with self._lock:
            if self._base is not None and self._codec != EXACT:
                self._coded()

    def residue(self) -> Arrays | None:
        """None where nothing was lost."""
        with self._lock:
            return self._residue

    def _written(self, content: EncodedTensors) -> memoryview:
        if self._owned is not None:
            own = {name: replace(content.tensors[name], part=part) for name, part in self._owned.items()}
            content = EncodedTensors(content.codec, content.base, own)
        return wire_format.written(content)

    def _coded(self) -> EncodedTensors:
        """Under the lock: the snapshot in its codec, which is a fraction of it and takes its place."""
        if self._content is None:
            assert self._snapshot is not None
            assert self._base is not None
            arrays = self._snapshot.arrays()
            self._content = displacement(self._base.arrays, arrays, self._base.version, self._codec)
            if self._residue_wanted:
                self._residue = {name: arrays[name] - array for name, array in self._decoded(self._content).items()}
            self._snapshot = None
        return self._content

    def _decoded(self, content: EncodedTensors) -> Arrays:
        assert self._base is not None
        return {name: array - content.decoded(name) for name, array in self._base.arrays.items()}
