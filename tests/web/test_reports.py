"""The pages that a job leaves behind, its report and a plan's verdict, for everybody: axe-core in every look."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from orchestrator.accounting.report import build
from orchestrator.chaos.simulated import run
from orchestrator.report import html
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.simulation.world import World
from tests.chaos.plans import RANDOM_KILLS, plan
from tests.web.audit import axe_violations
from tests.web.visit import STILL, each_look, sideways


def report() -> str:
    policy = sample_policy(4, steps=150)
    world = World(policy, WorldPlan((0.05,) * 4, faults=(Fault(3.0, FaultKind.KILL, "asia"),)), seed=2).run()
    return html.render(build(policy, world.goodput, world.statistics, {"name": "a job", "loss_unigram": 3.2}))


def verdict() -> str:
    asked = plan(RANDOM_KILLS, objectives=["uptime_ratio > 10 %", "bystander_gap_max_s < 0.001"])
    found = run(asked, sample_policy(4, steps=600), WorldPlan((0.05,) * 4), seed=3)
    return html.render_verdict(found.verdict.plain(), found.verdict.report, "name: random-kills")


PAGES = {"report": report, "verdict": verdict}


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_fault_in_what_a_job_leaves_behind(browser: Browser, name: str, pictures: Path) -> None:
    page = browser.new_page(**STILL)
    page.set_content(PAGES[name]())
    assert page.locator("table").count() > 1
    for look in each_look(page):
        page.screenshot(path=pictures / f"{name}-{look}.png", full_page=True)
        assert axe_violations(page) == [], look
        assert sideways(page) == 0, look
    page.close()
