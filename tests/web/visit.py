"""What the tests of the page share: a site to look at, and a visit to it that remembers what went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page

from api.auth.permissions import Role
from api.client import Client
from api.http.guard import is_loopback
from tests.api.installation import Installation
from tests.waiting import PATIENCE_S, wait_until

CONTROL = "tests.web.live:connect"
BACKOFF_S = 2.5
"""How long a killed island stays away: long enough to be seen, short enough to wait for."""


DESK = {"width": 1280, "height": 900}
STILL = {"reduced_motion": "reduce"}  # a colour that fades is not yet the one it is to be
LOOKS = {"light": ("light", DESK), "phone": ("light", {"width": 390, "height": 844}), "dark": ("dark", DESK)}


def each_look(page: Page, looks: Iterable[str] = tuple(LOOKS)) -> Iterator[str]:
    """Show the page in one look after another: its colours and its layout are the style sheet's alone."""
    for look in looks:
        colours, window = LOOKS[look]
        page.emulate_media(color_scheme=colours, reduced_motion="reduce")
        page.set_viewport_size(window)
        yield look


class Site:
    """One service with one job of six islands in four regions, and a token for each role."""

    def __init__(self, folder: Path) -> None:
        self.installation = Installation(folder)
        self.url = ""
        self.job = ""
        self.tokens: dict[str, str] = {}

    def start(self) -> None:
        self.installation.atoll("up", "--runs", str(self.installation.runs), "--control", CONTROL)
        address = self.installation.home.address()
        assert address is not None
        self.url = address.url
        with self.client() as client:
            self.tokens = {
                role: client.create_token(f"{role}-rosa", Role(role)).token for role in ("viewer", "operator")
            }
            self.job = self.submit(client)
            wait_until(lambda: client.job(self.job).islands_training == 6)

    def client(self) -> Client:
        return self.installation.client()

    def submit(self, client: Client, **changes: Any) -> str:
        islands = [{"node_group": name, "count": n} for name, n in zip(GROUPS, (2, 1, 2, 1), strict=True)]
        recovery = {"backoff_first_s": BACKOFF_S}
        sections = {"islands": islands, "recovery": recovery, **changes}
        return client.submit(self.installation.spec(**sections)).job


GROUPS = ("us-east", "us-west", "europe", "asia")


class Visit:
    """One window. ``complaints`` are the console's, ``strangers`` the addresses asked that are not this machine's."""

    def __init__(self, browser: Browser, site: Site) -> None:
        self.site = site
        self.complaints: list[str] = []
        self.strangers: list[str] = []
        self._browser = browser
        self._pages: list[Page] = []

    def open(self, role: str = "operator", address: str | None = None, **window: Any) -> Page:
        """The page as somebody of this role sees it: its job, or what ``address`` names; all jobs if that is empty."""
        page = self.enter(address, **window)
        self.give_token(page, role)
        return page

    def give_token(self, page: Page, role: str) -> None:
        page.get_by_label("Token").fill(self.site.tokens[role])
        page.keyboard.press("Enter")
        page.locator("body.ready").wait_for()

    def enter(self, address: str | None = None, **window: Any) -> Page:
        """The page as a stranger sees it."""
        window.setdefault("viewport", {"width": 1280, "height": 900})
        page = self._browser.new_page(**window)
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("console", self._complained)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._seen(request.url))
        page.goto(f"{self.site.url}/#{self.site.job if address is None else address}")
        self._pages.append(page)
        return page

    def close(self) -> None:
        for page in self._pages:
            page.close()

    def _complained(self, message: ConsoleMessage) -> None:
        """On a busy machine ``/readyz`` may answer 503: its second is over before the cluster has answered."""
        if message.type == "error" and not message.location["url"].endswith("/readyz"):
            self.complaints.append(message.text)

    def _seen(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and not is_loopback(parts.hostname or ""):
            self.strangers.append(url)


def card(page: Page, island: str) -> Locator:
    return page.locator(f"li[data-key='{island}']")


def sideways(page: Page) -> int:
    """By how many pixels the page is wider than its window."""
    overflow: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return overflow
