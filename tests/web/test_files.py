"""How the page is served: safely, cacheably, complete, and from nothing but the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.routes.page import DOCUMENT, FOLDER, POLICY
from tests.waiting import PATIENCE_S
from tests.web.visit import Site

LINES_MAX = 600
SOURCES = sorted(FOLDER.iterdir())


@pytest.fixture
def http(site: Site) -> Iterator[httpx.Client]:
    """Somebody without a token."""
    with httpx.Client(base_url=site.url, timeout=PATIENCE_S) as client:
        yield client


def static_paths(document: str) -> list[str]:
    return [f"/{path}" for path in re.findall(r'(?:href|src)="(web/[^"]+)"', document)]


def test_the_document_is_asked_for_anew_and_not_sent_twice(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    again = http.get("/", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get("/", headers={"If-None-Match": f'"other", W/{answer.headers["etag"]}'}).status_code == 304
    assert http.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    head = http.head("/")
    assert (head.status_code, head.content) == (200, b"")


def test_every_file_may_be_kept_for_ever_at_a_path_that_names_its_content(http: httpx.Client) -> None:
    document = http.get("/").text
    paths = static_paths(document)
    assert {path.rpartition("/")[2] for path in paths} >= {"main.js", "icon.svg", "layout.css"}
    for path in paths:
        answer = http.get(path)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert http.get(re.sub("web/[0-9a-f]+/", "web/0000000000000000/", path)).status_code == 404
    folder = paths[0].rpartition("/")[0]
    for name in (DOCUMENT, "no-such-file.js", "..%2fapp.py", "%2e%2e/app.py"):
        assert http.get(f"{folder}/{name}").status_code in (401, 404)


def test_a_browser_is_told_to_run_nothing_but_the_pages_own_files(http: httpx.Client) -> None:
    document = http.get("/")
    for answer in (document, *(http.get(path) for path in static_paths(document.text))):
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert "unsafe" not in POLICY
    assert POLICY.startswith("default-src 'none'")


@pytest.mark.parametrize("path", SOURCES, ids=[path.name for path in SOURCES])
def test_a_file_of_the_page_is_short_says_what_it_is_for_and_names_no_other_host(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LINES_MAX
    assert set(re.findall(r"https?://[^\s\"'<>]*", text)) <= {"http://www.w3.org/2000/svg"}
    if path.suffix in (".js", ".css"):
        assert text.startswith("/*")
    for imported in re.findall(r'from "\./([^"]+)"', text):
        assert (FOLDER / imported).is_file()
    if path.suffix == ".js":
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage", text)
