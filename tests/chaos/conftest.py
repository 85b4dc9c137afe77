"""The service of the API's tests: real processes, and the clockwork instead of a cluster."""

from __future__ import annotations

from tests.api.conftest import cold, http, service, warm

__all__ = ["cold", "http", "service", "warm"]
