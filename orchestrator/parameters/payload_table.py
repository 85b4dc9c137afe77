"""The payload table: contributions that are held, by payload id, until the core releases them."""

from __future__ import annotations

import threading

from orchestrator.core.vocabulary import PayloadId
from orchestrator.errors import InternalError
from orchestrator.parameters.wire_format import EncodedTensors


class PayloadTable:
    """Thread-safe: links put, the merge reads, the pump releases."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[PayloadId, EncodedTensors] = {}

    def hold(self, payload: PayloadId, displacement: EncodedTensors) -> None:
        with self._lock:
            self._held[payload] = displacement

    def get(self, payload: PayloadId) -> EncodedTensors:
        with self._lock:
            try:
                return self._held[payload]
            except KeyError:
                raise InternalError(detail=f"Payload {payload} is asked for, but not held.") from None

    def release(self, payload: PayloadId) -> None:
        with self._lock:
            self._held.pop(payload, None)
