"""The page for everybody: by keyboard, by screen reader, on a phone, in the dark, without motion.

Each look is saved as a picture, for people to judge what no test can: in the folder ``ATOLL_PICTURES`` or a temporary one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.soak import SOAKING
from tests.web.audit import OWN, axe_faults, faults, own_faults
from tests.web.visit import LOOKS, STILL, Site, Visit, card, each_look, sideways

SAME_STYLE = pytest.mark.soak("by the style sheet whose looks the page of an operator is audited in")


def test_no_fault_is_found_in_any_look(visit: Visit, pictures: Path) -> None:
    """What stands before the page, and over it, has the same style sheet: make soak has those in every look, too."""
    page = visit.enter(**STILL)
    for look in each_look(page, LOOKS if SOAKING else ("phone",)):
        page.screenshot(path=pictures / f"page-{look}-token.png")
        assert faults(page) == [], f"{look}, while a token is asked for"
    visit.give_token(page, "operator")
    expect(page.locator(".card")).to_have_count(6)
    for look in each_look(page):
        if look == "dark":  # one look has a lost island in it
            page.get_by_role("button", name="Kill europe-1").click()
            page.get_by_role("dialog").get_by_role("button", name="Kill", exact=True).click()
            expect(card(page, "europe-1")).to_contain_text("lost")
        page.screenshot(path=pictures / f"page-{look}.png", full_page=True)
        assert faults(page) == [], look
        assert sideways(page) == 0, look
    page.get_by_role("button", name="Kill us-east-0").click()
    for look in each_look(page, LOOKS if SOAKING else ("dark",)):
        page.screenshot(path=pictures / f"page-{look}-question.png")
        assert faults(page) == [], f"{look}, while a question is asked"


@pytest.mark.parametrize("look", ["light", *(pytest.param(look, marks=SAME_STYLE) for look in ("phone", "dark"))])
def test_no_fault_is_found_in_what_a_viewer_sees(visit: Visit, look: str) -> None:
    page = visit.open("viewer", **STILL)
    expect(page.locator(".card")).to_have_count(6)
    next(shown for shown in each_look(page) if shown == look)
    assert faults(page) == []
    assert sideways(page) == 0


@pytest.mark.soak("a second look by the same rules as the job's page")
def test_no_fault_is_found_in_the_list_of_all_jobs(visit: Visit, site: Site, pictures: Path) -> None:
    with site.client() as client:
        waiting = client.submit(site.installation.spec(name="waits", islands=[{"node_group": "asia", "cpus": 4}])).job
        try:
            page = visit.open(address="", **STILL)
            expect(page.locator("#queue li")).to_contain_text(f"1. {waiting}")
            expect(page.locator("#nodes")).to_contain_text("Free on the service's disks")
            for look in each_look(page):
                page.screenshot(path=pictures / f"fleet-{look}.png", full_page=True)
                assert faults(page) == [], look
                assert sideways(page) == 0, look
        finally:
            client.cancel(waiting)


def test_axe_finds_what_is_planted(visit: Visit) -> None:
    """Where the page does not redraw. Each fault is told by the name of axe's rule, and none was there before."""
    page = visit.open(**STILL)
    assert axe_faults(page) == []
    planted = "const planted = (name) => document.querySelector('main').appendChild(document.createElement(name))"
    rules = {
        "planted('img')": "image-alt (critical)",
        "planted('button').id = 'nameless'": "button-name (critical)",
        "const p = planted('p'); p.textContent = 'hardly read'; p.attributeStyleMap.set('color', '#bbb')": "color-contrast",
        "Object.assign(planted('button'), {textContent: 'Kill', ariaLabel: 'Stop'})": "label-content-name-mismatch",
        "planted('div').id = 'islands'": "duplicate-id",
        "planted('ul').append(document.createElement('p'))": "list (serious)",
        "planted('h5').textContent = 'Deep'": "heading-order",
        "planted('input')": "label (critical)",
        "planted('div').setAttribute('role', 'img')": "role-img-alt (serious)",
        "document.querySelector('.bar').ariaHidden = 'true'": "aria-hidden-focus (serious)",
        "document.documentElement.removeAttribute('lang')": "html-has-lang (serious)",
    }
    for planting in rules:
        page.evaluate(f"() => {{ {planted}; {planting} }}")
    found = axe_faults(page)
    for planting, rule in rules.items():
        assert any(fault.startswith(rule) for fault in found), f"{planting} was not found"


def test_our_own_audit_finds_what_axe_does_not_look_at(visit: Visit) -> None:
    """Each of these spoils the page in one way, and is found."""
    page = visit.open(**STILL)
    for spoiling, fault in {
        "document.querySelector('.card').attributeStyleMap.set('border-top-color', '#eee')": "the mark of its state",
        "document.querySelector('.buttons button').attributeStyleMap.set('border-top-color', '#eee')": "its border",
        "document.querySelector('.curve.loss').attributeStyleMap.set('stroke', '#eee')": "the curve",
        "document.querySelector('.label').attributeStyleMap.set('fill', '#999')": "text has a contrast",
        "document.querySelector('.quiet').attributeStyleMap.set('transform', 'scale(0.4)')": "too small to be hit",
        "document.querySelector('progress').removeAttribute('aria-label')": "it has no name",
        "document.querySelector('#job section').setAttribute('aria-labelledby', 'nobody')": "names nobody, which",
        "document.querySelector('svg[aria-hidden]').removeAttribute('aria-hidden')": "neither named nor hidden",
        "document.querySelector('caption').remove()": "a table has no caption",
        "document.querySelector('th').removeAttribute('scope')": "heading has no scope",
        "for (const one of document.querySelectorAll('[aria-live]')) one.remove()": "nothing is told to a screen reader",
    }.items():
        found = page.evaluate(f"() => {{ {spoiling}; return ({OWN})() }}")
        assert any(fault in said for said in found), f"{spoiling} was not found"
    page.get_by_role("button", name="Kill us-east-0").click()
    page.locator("dialog[open] p").first.evaluate("p => p.attributeStyleMap.set('color', '#bbb')")
    assert any("text has a contrast" in said for said in own_faults(page)), "text over a page that a dialog covers"


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


def test_the_skip_link_moves_the_focus_and_keeps_the_address(visit: Visit) -> None:
    page = visit.open()
    link = page.get_by_role("link", name="Skip to the content")
    link.focus()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page).to_have_url(f"{visit.site.url}/#{visit.site.job}")
    expect(page.get_by_role("heading", level=1)).to_have_text(visit.site.job)


def test_whoever_wants_no_motion_gets_none(visit: Visit) -> None:
    page = visit.open(reduced_motion="reduce")
    moving = page.evaluate(
        "document.getAnimations().length + [...document.querySelectorAll('*')]"
        ".filter(e => getComputedStyle(e).transitionDuration.split(', ').some(d => d !== '0s')).length"
    )
    assert moving == 0
