"""The page for everybody: by keyboard, by screen reader, on a phone, in the dark, without motion.

Each look is saved as a picture in the test's temporary folder, for people to judge what no test can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.web.visit import Visit, card

AUDIT = (Path(__file__).parent / "accessibility.js").read_text()
DESK = {"width": 1280, "height": 900}
WINDOWS = {
    "light": {"viewport": DESK, "color_scheme": "light"},
    "dark": {"viewport": DESK, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}


def faults(page: Page) -> list[str]:
    found: list[str] = page.evaluate(AUDIT)
    return found


def sideways(page: Page) -> int:
    """By how many pixels the page is wider than its window."""
    overflow: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return overflow


@pytest.mark.parametrize("look", WINDOWS)
def test_no_fault_is_found_in_any_look(visit: Visit, look: str, tmp_path: Path) -> None:
    window: dict[str, Any] = WINDOWS[look]
    page = visit.enter(**window)
    assert faults(page) == [], "while a token is asked for"
    visit.give_token(page, "operator")
    expect(page.locator(".card")).to_have_count(6)
    if look == "dark":  # one look has a lost island in it
        page.get_by_role("button", name="Kill europe-1").click()
        page.get_by_role("dialog").get_by_role("button", name="Kill", exact=True).click()
        expect(card(page, "europe-1")).to_contain_text("lost")
    page.screenshot(path=tmp_path / f"{look}.png", full_page=True)
    assert faults(page) == []
    assert sideways(page) == 0
    page.get_by_role("button", name="Kill us-east-0").click()
    page.screenshot(path=tmp_path / f"{look}-question.png")
    assert faults(page) == [], "while a question is asked"


def test_the_audit_finds_what_it_looks_for(visit: Visit) -> None:
    """Each of these spoils the page in one way, and is found."""
    page = visit.open(reduced_motion="reduce")  # a colour that fades is not yet the one it was given
    for spoiling, fault in {
        "document.querySelector('.card').attributeStyleMap.set('border-top-color', '#eee')": "the mark of its state",
        "document.querySelector('.lead').attributeStyleMap.set('color', '#999')": "text has a contrast",
        "document.querySelector('.label').attributeStyleMap.set('fill', '#999')": "text has a contrast",
        "document.querySelector('.picker label').textContent = ''": "it has no name",
        "document.querySelector('.buttons button').setAttribute('aria-label', 'Stop')": "not what it shows",
        "document.querySelector('.quiet').attributeStyleMap.set('transform', 'scale(0.4)')": "too small to be hit",
        "document.querySelector('[role=img]').removeAttribute('aria-label')": "it has no name",
        "document.querySelector('caption').remove()": "a table has no caption",
        "document.querySelector('.region h3').replaceWith(document.createElement('h5'))": "a heading of level 5",
        "document.querySelector('h1').remove()": "there are 0 h1",
        "document.querySelector('main').id = 'jobs'": "two elements have the id",
    }.items():
        found = page.evaluate(f"() => {{ {spoiling}; return ({AUDIT})() }}")
        assert any(fault in said for said in found), f"{spoiling} was not found"


def test_everything_is_reached_by_keyboard_in_order_and_seen_to_be(visit: Visit) -> None:
    page = visit.open()
    named = "(e => e.tagName === 'SUMMARY' ? 'a merge' : e.getAttribute('aria-label') || e.textContent)"
    wanted = page.evaluate(
        "[...document.querySelectorAll('a[href], button, select, summary')]"
        f".filter(e => e.checkVisibility() && !e.disabled).map({named})"
    )
    reached = []
    for _ in wanted:
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            f"(e => [{named}(e), parseFloat(getComputedStyle(e).outlineWidth)])(document.activeElement)"
        )
        reached.append(name)
        assert outline >= 2, f"{name} does not show that it has the focus"
    assert reached == wanted
    assert len(reached) > 12


def test_whoever_wants_no_motion_gets_none(visit: Visit) -> None:
    page = visit.open(reduced_motion="reduce")
    moving = page.evaluate(
        "document.getAnimations().length + [...document.querySelectorAll('*')]"
        ".filter(e => getComputedStyle(e).transitionDuration.split(', ').some(d => d !== '0s')).length"
    )
    assert moving == 0
