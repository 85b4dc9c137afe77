"""What is wrong with a page for people who see it badly or not at all, or use no mouse.

axe-core looks first, in the page, from a package: nothing is fetched. What it does not look at, or cannot tell, our own
``accessibility.js`` does. Both speak of the page as it is at this moment; neither knows which page it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

OWN = (Path(__file__).parent / "accessibility.js").read_text()
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
RULES = {"label-content-name-mismatch": {"enabled": True}, "duplicate-id": {"enabled": True}}
OPTIONS = {
    "resultTypes": ["violations", "incomplete"],
    "runOnly": {"type": "tag", "values": TAGS},
    "rules": RULES,
    "selectors": False,  # an element is shown by its text here, and its selector is long to find
}
MEASURED_BY_US = {"shortTextContent", "elmPartiallyObscuring"}  # the second is a toast's, over whatever is below it
"""Why axe may leave a text's contrast open: ``accessibility.js`` measures these, and what is in a drawing or a dialog."""


def faults(page: Page) -> list[str]:
    """Whatever either finds, of any impact; empty if the page is for everybody."""
    return [*axe_faults(page), *own_faults(page)]


def own_faults(page: Page) -> list[str]:
    found: list[str] = page.evaluate(OWN)
    return found


def axe_faults(page: Page) -> list[str]:
    """What axe finds, and what it cannot tell, unless we measure that."""
    said = _asked(page)
    open_questions = [
        _told(rule, node) for rule in said["incomplete"] for node in rule["nodes"] if not _ours(page, rule, node)
    ]
    return _violations(said) + open_questions


def axe_violations(page: Page) -> list[str]:
    """What axe is sure of, for pages that our own audit does not know."""
    return _violations(_asked(page))


def _asked(page: Page) -> dict[str, Any]:
    said: dict[str, Any] = Axe().run(page, options=OPTIONS).response
    return said


def _violations(said: dict[str, Any]) -> list[str]:
    """RULE (IMPACT): what axe says of it: the element."""
    return [_told(rule, node) for rule in said["violations"] for node in rule["nodes"]]


def _ours(page: Page, rule: dict[str, Any], node: dict[str, Any]) -> bool:
    if rule["id"] != "color-contrast":
        return False
    if node["html"].startswith(("<text", "<tspan")) or page.locator("dialog[open]").count() > 0:
        return True
    return all((check["data"] or {}).get("messageKey") in MEASURED_BY_US for check in node["any"])


def _told(rule: dict[str, Any], node: dict[str, Any]) -> str:
    return f"{rule['id']} ({rule['impact']}): {node.get('failureSummary') or rule['help']}: {node['html'][:90]}"
