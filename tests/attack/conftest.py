"""Services to attack: the installations of ``tests.api``."""

from tests.api.conftest import client, cold, http, service, warm

__all__ = ["client", "cold", "http", "service", "warm"]
