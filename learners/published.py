"""Θ as it was published, fragment by fragment: the newest version that has come, whether it is adopted yet or not.

What comes is values, or updates that lead from a version that is here to a newer one. An update is added to what is here,
in float32, as the synchroniser did; the digest shows that the same bits came of it. What does not fit is not taken, and
whoever sends hears which version is here. A process of an island of many hosts has its part of the pieces, and gets that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from learners.contract import Arrays
from learners.offered import PublishedVersion
from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.parameters import wire_format
from orchestrator.parameters.holding import EVERYTHING, Holding
from orchestrator.parameters.tensors import digest

log = logging.getLogger(__name__)


class PublishedFragments:
    """Thread-safe; different fragments are taken at once."""

    def __init__(self, fragments: Sequence[Sequence[str]], holding: Holding = EVERYTHING) -> None:
        """``fragments[p]`` names the pieces of fragment p of which something is here, and ``holding`` says what."""
        self._fragments, self._holding = fragments, holding
        self._locks = [threading.Lock() for _ in fragments]
        self._newest: dict[FragmentId, PublishedVersion] = {}

    def hold(self, fragment: FragmentId, version: Version, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep what came in another way, of what is here, unless something newer is."""
        with self._locks[fragment]:
            if self.version(fragment) < version:
                self._newest[fragment] = PublishedVersion(version, arrays)

    def version(self, fragment: FragmentId) -> int:
        """The version that is here; −1 if there is none."""
        newest = self._newest.get(fragment)
        return -1 if newest is None else newest.version

    def at(self, fragment: FragmentId, version: Version) -> PublishedVersion | None:
        """The fragment at this version, if that is the one that is here."""
        newest = self._newest.get(fragment)
        return newest if newest is not None and newest.version == version else None

    def values_at(self, versions: tuple[Version, ...]) -> Arrays | None:
        """Θ by pieces, if all of it is here at these versions or later ones; no byte is sent for an evaluation."""
        newest = [self._newest.get(FragmentId(p)) for p in range(len(versions))]
        if any(here is None or here.version < version for here, version in zip(newest, versions, strict=True)):
            return None
        return {name: array for here in newest if here is not None for name, array in here.arrays.items()}

    def take(
        self,
        fragment: FragmentId,
        version: Version,
        since: Version | None,
        checked_digest: str,
        payloads: Sequence[bytes | memoryview],
    ) -> Arrays | None:
        """The fragment at ``version``, from updates since the version ``since``, oldest first, or from its values.

        None where something as new is here, or the updates do not lead on from what is here. Raises InvalidPayload for
        damaged bytes, and where not all came of what is here of the fragment.
        """
        with self._locks[fragment]:
            if self.version(fragment) >= version:
                return None
            if since is None:
                arrays = self._holding.own_values(wire_format.parse(payloads[0]), self._fragments[fragment])
            else:
                newest = self.at(fragment, since)
                if newest is None:
                    return None
                arrays = dict(newest.arrays)
                for payload in payloads:
                    arrays = self._holding.added_to(arrays, wire_format.parse(payload))
                if digest(arrays) != checked_digest:
                    log.error(
                        "updates of fragment %d to version %d gave something else; it is asked for whole",
                        fragment,
                        version,
                    )
                    del self._newest[fragment]
                    return None
            self._newest[fragment] = PublishedVersion(version, arrays)
            return arrays
