"""What operators do from the page beyond single islands: run plans of faults, scale a job, and cordon node groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from orchestrator.specification.training_sections import BUILT_IN_TRAINER
from tests.chaos.plans import document
from tests.waiting import wait_until
from tests.web.audit import faults
from tests.web.test_page import confirm
from tests.web.visit import STILL, Site, Visit, card, each_look, sideways

KILL_ASIA = {"kind": "kill", "target": {"name": "asia"}, "at": 0}
LATER = {"kind": "stop", "target": {"name": "us-west"}, "at": 150, "duration": 6}


@pytest.fixture
def begin(site: Site) -> Iterator[Callable[..., str]]:
    """Begins jobs, and leaves none: the newest is what other tests see. Ask for it before the visit, which ends first."""
    begun: list[str] = []
    with site.client() as client:

        def begin(**changes: Any) -> str:
            begun.append(site.submit(client, **changes))
            wait_until(lambda: client.job(begun[-1]).islands_training == 6)
            return begun[-1]

        yield begin
        for job in begun:
            if not client.job(job).state.final:
                client.cancel(job)
                wait_until(lambda job=job: client.job(job).state.final)
            client.delete(job)


def shown(visit: Visit, job: str, role: str = "operator", **window: Any) -> Page:
    page = visit.open(role, **window)
    page.get_by_label("Job", exact=True).select_option(job)
    expect(page.get_by_role("heading", level=1)).to_have_text(job)
    return page


def row(page: Page, group: str) -> Locator:
    return page.locator(f"#groups li[data-key='group-{group}']")


def test_a_plan_is_chosen_knowingly_followed_and_ended_by_keyboard(
    begin: Callable[..., str], visit: Visit, site: Site
) -> None:
    with site.client() as client:
        job = begin(name="broken")
        page = shown(visit, job)
        chaos = page.locator("#chaos")
        expect(chaos).to_contain_text("No plan has run")
        page.get_by_role("button", name="Start a plan").press("Enter")
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_label("Plan")).to_be_focused()
        expect(dialog).to_contain_text("kill 1 of all islands, at random, every 60 s on average from 10 s on")
        expect(dialog).to_contain_text("At least 2 islands of the job always continue to train")
        page.keyboard.type("fla")
        expect(dialog.get_by_role("status")).to_contain_text("stop asia for 6 s, every 30 s")
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Start a plan")).to_be_focused()
        assert client.chaos_runs(job) == []

        page.keyboard.press("Enter")
        expect(dialog.get_by_label("Plan")).to_be_focused()
        page.keyboard.type("fla")
        dialog.get_by_role("button", name="Start").press("Enter")
        expect(chaos.locator(".badge").first).to_have_text("running")
        expect(chaos).to_contain_text("of 23 faults injected, 0 skipped. Started by operator-rosa")
        expect(chaos).to_contain_text("Next: stop asia for 6 s in")
        expect(page.get_by_role("button", name="Start a plan")).to_have_count(0)
        page.get_by_role("button", name="End the plan").press("Enter")
        expect(dialog).to_contain_text("no verdict")
        dialog.get_by_role("button", name="End").press("Enter")
        expect(chaos.locator(".badge").first).to_have_text("stopped")
        expect(page.locator("#announcer")).to_contain_text("The plan flapping is stopped")
        expect(chaos).to_contain_text("Ended by operator-rosa")
        expect(page.get_by_role("button", name="Start a plan")).to_be_visible()


def test_a_viewer_sees_what_a_plan_injected_and_takes_the_verdict_along(
    begin: Callable[..., str], visit: Visit, site: Site
) -> None:
    with site.client() as client:
        job = begin(name="judged", steps=400)
        client.start_chaos(job, document(KILL_ASIA, LATER, name="trial"))
        page = shown(visit, job, "viewer")
        chaos = page.locator("#chaos")
        expect(chaos.locator("tbody tr")).to_contain_text(["kill asia"])
        expect(chaos).to_contain_text("Next: stop us-west for 6 s in")
        expect(chaos.get_by_role("button")).to_have_count(0)
        wait_until(lambda: client.chaos_run(job).ended_at is not None)
        page.reload()
        page.get_by_label("Job", exact=True).select_option(job)
        expect(chaos.locator(".badge").first).to_have_text("passed")
        with page.expect_download() as saved:
            page.get_by_role("button", name="Download the verdict").click()
        assert saved.value.suggested_filename == f"{job}-trial.html"
        assert "bystander_gap_max_s" in saved.value.path().read_text()


@pytest.mark.soak("the page's half of what tests/ray/shared_job/test_membership.py has")
def test_a_node_group_is_cordoned_and_uncordoned(visit: Visit) -> None:
    page = visit.open()
    expect(row(page, "asia")).to_contain_text("1 of 1 island training")
    page.get_by_role("button", name="Cordon asia", exact=True).click()
    expect(page.get_by_role("dialog")).to_contain_text("No job places anything new there")
    confirm(page, "Cordon")
    expect(row(page, "asia")).to_contain_text("cordoned by operator-rosa")
    page.get_by_role("button", name="Kill asia").click()
    confirm(page, "Kill")
    expect(card(page, "asia")).to_contain_text("cordoned")
    page.get_by_role("button", name="Uncordon asia").click()
    confirm(page, "Uncordon")
    expect(row(page, "asia")).to_contain_text("accepts islands")
    expect(row(page, "asia")).to_contain_text("1 of 1 island training")


def test_a_job_is_scaled_down_and_up_on_a_node_group(visit: Visit) -> None:
    page = visit.open()
    page.get_by_role("button", name="Scale europe").click()
    field = page.get_by_role("spinbutton", name="Islands", exact=True)
    expect(field).to_have_value("2")
    field.fill("3")
    confirm(page, "Scale")
    assert field.evaluate("field => field.validity.rangeOverflow"), "more than the specification says is not even asked"
    field.fill("1")
    confirm(page, "Scale")
    expect(card(page, "europe-1")).to_contain_text("drained")
    expect(row(page, "europe")).to_contain_text("1 of 1 island training, 2 at most")
    page.get_by_role("button", name="Scale europe").click()
    expect(field).to_have_value("1")
    field.fill("2")
    confirm(page, "Scale")
    expect(page.locator("#toast")).to_contain_text("europe-1 is placed")
    expect(row(page, "europe")).to_contain_text("2 of 2 islands training")


@pytest.mark.soak("a second look by the same rules as tests/web/test_accessibility.py")
def test_no_fault_is_found_where_plans_are_shown_and_chosen(
    begin: Callable[..., str], visit: Visit, site: Site, pictures: Path
) -> None:
    with site.client() as client:
        job = begin(name="seen")
        client.start_chaos(job, document(KILL_ASIA, KILL_ASIA, LATER, name="trial"))
        page = shown(visit, job, **STILL)
        expect(page.locator("#chaos tbody tr")).to_have_count(2)
        for look in each_look(page):
            page.screenshot(path=pictures / f"chaos-{look}.png", full_page=True)
            assert faults(page) == [], look
            assert sideways(page) == 0, look
        client.stop_chaos(job)
        page.get_by_role("button", name="Start a plan").click()
        expect(page.get_by_label("Plan", exact=True)).to_be_focused()
        for look in each_look(page):
            page.screenshot(path=pictures / f"chaos-{look}-plan.png")
            assert faults(page) == [], f"{look}, while a plan is chosen"
            assert sideways(page) == 0, look
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Scale europe").click()
        for look in each_look(page):
            page.screenshot(path=pictures / f"chaos-{look}-scale.png")
            assert faults(page) == [], f"{look}, while a number is asked for"


def test_settings_are_changed_and_a_refused_one_says_its_bounds(
    begin: Callable[..., str], visit: Visit, site: Site, pictures: Path
) -> None:
    job = begin(name="settings", trainer=BUILT_IN_TRAINER)  # a trainer whose learning rate can be changed
    page = shown(visit, job, **STILL)
    page.get_by_role("button", name=f"Settings {job}").press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Change the settings of {job}?")
    expect(dialog.get_by_label("Limit of cost")).to_have_count(0)
    for look in each_look(page):
        page.screenshot(path=pictures / f"settings-{look}.png")
        assert faults(page) == [], f"{look}, while settings are asked for"
    dialog.get_by_label("Learning rate").fill("0.5")
    dialog.get_by_label("Quorum").fill("2")
    dialog.get_by_role("button", name="Change", exact=True).press("Enter")
    expect(page.locator("#toast")).to_contain_text("accepted, lr 0.5 of the specification's")
    with site.client() as client:
        wait_until(lambda: client.job(job).settings.changed)  # type: ignore[union-attr]
        now = client.job(job).settings
        assert now is not None
        assert (now.lr_ratio, now.quorum, now.changes) == (0.5, 2, 1)
    page.get_by_role("button", name=f"Settings {job}").click()
    expect(dialog.get_by_label("Quorum")).to_have_value("2")
    dialog.get_by_label("Quorum").fill("7")
    dialog.get_by_role("button", name="Change", exact=True).click()
    expect(page.locator("#toast")).to_contain_text("refused, quorum is 7, but must be 1 to 6")
    page.get_by_role("link", name="Settings").click()
    expect(page.locator("#inspection")).to_contain_text("learning rate 0.5 of the specification's, quorum 2")


def test_a_job_is_finished_early_only_once_that_is_confirmed(
    begin: Callable[..., str], visit: Visit, site: Site, pictures: Path
) -> None:
    job = begin(name="finished")
    page = shown(visit, job, **STILL)
    page.get_by_role("button", name=f"Finish {job}").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Once that is merged, the job is completed")
    for look in each_look(page):
        page.screenshot(path=pictures / f"finish-{look}.png")
        assert faults(page) == [], f"{look}, while a question is asked"
    dialog.get_by_role("button", name="Train on").click()
    with site.client() as client:
        assert client.commands(job) == []
        page.get_by_role("button", name=f"Finish {job}").click()
        dialog.get_by_role("button", name="Finish the job").click()
        wait_until(lambda: client.job(job).state == "completed")
    expect(page.locator("#headline .badge")).to_have_text("completed")
    expect(page.locator("#headline")).to_contain_text("Finished early by operator-rosa")


def test_a_job_shows_what_it_cost_pauses_at_its_limit_and_continues_by_the_page(
    begin: Callable[..., str], visit: Visit, site: Site, pictures: Path
) -> None:
    prices = {"us-east": 2.1, "us-west": 3.9, "europe": 3.9, "asia": 1.5}
    islands = [
        {"node_group": name, "count": n, "price": {"chip_hour": price, "kind": "spot"}}
        for (name, price), n in zip(prices.items(), (2, 1, 2, 1), strict=True)
    ]
    job = begin(name="bill", islands=islands, budget={"steps": 2_000_000, "cost": 0.01, "at_cost": "pause"})
    page = shown(visit, job, **STILL)
    cost = page.locator("#cost")
    expect(cost).to_contain_text("per merged million tokens")
    expect(cost).to_contain_text("at the end of the token budget")
    expect(cost.get_by_role("row", name="us-east")).to_contain_text("node group")
    with site.client() as client:
        wait_until(lambda: client.job(job).paused and not client.job(job).islands_training)
        notices = page.locator("#headline .notice")  # another tells of checkpoints: this world takes none
        expect(notices.filter(has_text="The job is paused: it has cost its limit of 0.01 USD")).to_have_count(1)
        for look in each_look(page):
            page.screenshot(path=pictures / f"cost-{look}.png", full_page=True)
            assert faults(page) == [], look
            assert sideways(page) == 0, look
        page.get_by_role("button", name=f"Settings {job}").click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_label("Limit of cost, in USD")).to_have_value("")
        dialog.get_by_label("Limit of cost, in USD").fill("9")
        page.screenshot(path=pictures / "cost-limit.png")
        dialog.get_by_role("button", name="Change", exact=True).click()
        wait_until(lambda: client.job(job).islands_training == 6)
    expect(page.locator("#headline")).not_to_contain_text("is paused")
