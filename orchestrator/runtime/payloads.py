"""The bytes of contributions, held under their names until the core lets go of them. Every payload is held or released."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.vocabulary import PayloadId
from orchestrator.errors import InternalError

Arrays = Mapping[str, NDArray[np.float32]]


class PayloadTable:
    """Thread-safe: links put, the merge reads, the pump releases."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[PayloadId, Arrays] = {}

    def hold(self, payload: PayloadId, arrays: Arrays) -> None:
        with self._lock:
            self._held[payload] = arrays

    def get(self, payload: PayloadId) -> Arrays:
        with self._lock:
            try:
                return self._held[payload]
            except KeyError:
                raise InternalError(detail=f"Payload {payload} is asked for, but not held.") from None

    def release(self, payload: PayloadId) -> None:
        with self._lock:
            self._held.pop(payload, None)
