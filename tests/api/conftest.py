"""Installations for tests: nothing up, up for one test, or up for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.client import Client
from tests.api.installation import Installation


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[Installation]:
    """Nothing is up; whatever the test starts is ended."""
    installation = Installation(tmp_path)
    yield installation
    installation.atoll("down")
    assert not installation.home.running()


@pytest.fixture
def warm(cold: Installation) -> Installation:
    """The service is up."""
    cold.up()
    return cold


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A service that the tests of one module share; none of them may end it."""
    installation = Installation(tmp_path_factory.mktemp("service"))
    installation.up()
    yield installation
    installation.atoll("down")


@pytest.fixture(scope="module")
def client(service: Installation) -> Iterator[Client]:
    """The typed client of the module's service, as an admin."""
    with service.client() as client:
        yield client


@pytest.fixture
def http(service: Installation) -> Iterator[httpx.Client]:
    """Plain HTTP to the service of the module, as an admin."""
    with service.http() as client:
        yield client
