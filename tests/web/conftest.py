"""A running service with a living job, and a real browser in front of it.

Chromium is the system's (``deploy/system-packages.sh``). Without it these tests are skipped, and say so; in CI they fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.programs import required
from tests.waiting import PATIENCE_S
from tests.web.visit import Site, Visit

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
]
expect.set_options(timeout=PATIENCE_S * 1000)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """It ends with the last test of the page: while it lives, this thread has an event loop, and others start theirs."""
    chromium_path = required("chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=chromium_path, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The service that all tests of the page share, with one job that outlasts them."""
    site = Site(tmp_path_factory.mktemp("web"))
    site.start()
    yield site
    site.installation.atoll("down")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where a test leaves what it saw."""
    folder = Path(os.environ.get("ATOLL_PICTURES", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def visit(browser: Browser, site: Site, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """The page in a window of its own. Whatever a test does: nothing leaves loopback, and nothing is complained about."""
    visit = Visit(browser, site)
    yield visit
    visit.close()
    assert visit.complaints == []
    assert visit.strangers == []
