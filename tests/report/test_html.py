"""The page is whole, self-contained and safe, for a full job, an empty one and one that still runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from orchestrator.accounting.report import build
from orchestrator.host.line_traffic import LineCounter
from orchestrator.report.html import render
from orchestrator.report.page import Scale
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.system.plain import count, seconds

VOID = {"meta", "br", "hr", "img", "link"}


class _Nesting(HTMLParser):
    """Notes every element that is closed out of order."""

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.seen = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def _report(until=float("inf"), name="a demo", **extra):
    policy = sample_policy(4, steps=150)
    plan = WorldPlan((0.05,) * 4, faults=(Fault(3.0, FaultKind.KILL, "asia"),))
    world = World(policy, plan, seed=2).run(until)
    return build(policy, world.goodput, world.statistics, {"name": name, "loss_unigram": 3.2, **extra})


@pytest.fixture(scope="module")
def report():
    return _report()


def test_every_element_is_closed_and_every_picture_is_a_picture(report):
    page = render(report)
    parser = _Nesting()
    parser.feed(page)
    assert (parser.wrong, parser.open) == ([], [])
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 4
    for picture in pictures:
        assert len(list(ElementTree.fromstring(picture).iter())) > 10


def test_nothing_is_loaded_from_anywhere(report):
    page = render(report)
    assert not re.search(r"<script|<link|<img|@import|url\(|src=|href=", page)
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}


def test_lines_and_what_codecs_owe_are_shown_where_the_job_says_them(report):
    assert "not yet sent" not in render(report)
    counter = LineCounter()
    counter.received(12_000_000, 3.0)
    counter.sent("update", 2_000_000)
    lines = {
        "islands": {
            "asia": counter.status().model_dump(mode="json"),
            "<gone>": counter.status().model_dump(mode="json"),
        },
        "regions": {},
    }
    norms = [{"fragment": 3, "version": 7, "update_norm": 2.0, "residue_norm": 0.5}]
    page = render({**report, "wire": {"up": "int8", "down": "int4"}, "lines": lines, "fragment_norms": norms})
    assert "Contributions were encoded as int8, updates as int4." in page
    assert "<td>12.0 MB</td><td>2.0 MB</td>" in page
    assert "<td>3</td><td>7</td><td>2</td><td>25.0 %</td>" in page
    assert "&lt;gone&gt;" in page
    assert "<gone>" not in page


def test_routers_and_experts_of_a_mixture_are_shown_and_other_models_have_no_such_cards(report):
    assert "Routers" not in render(report)
    routers = {"fragment": 2, "merges": 7, "distance": 1.0, "travel": 1.0, "distance_mean": 0.5, "travel_mean": 0.4}
    figures = {"expert_share_max": 0.25, "expert_entropy_ratio": 0.9, "adoptions": 3}
    islands = {
        "<asia>": {**figures, "loss_before": 2.5, "loss_after": 2.625},
        "europe": {**figures, "adoptions": 0, "loss_before": None, "loss_after": None},
    }
    page = render({**report, "mixture": {"routers": [routers], "router_curve": [], "islands": islands}})
    assert "<td>2</td><td>7</td><td>0.5</td><td>0.4</td><td>1.25</td>" in page
    assert "<td>&lt;asia&gt;</td><td>25.0 %</td><td>90.0 %</td><td>3</td><td>2.500</td><td>2.625</td>" in page
    assert "<td>europe</td><td>25.0 %</td><td>90.0 %</td><td>0</td><td>–</td><td>–</td>" in page


def test_warnings_about_the_specification_are_in_the_report_and_none_takes_no_room(report):
    warning = {"path": "synchroniser.interval_steps", "message": "is 500 <too long>.", "remedy": "Set it to 10."}
    page = render({**report, "warnings": [warning]})
    assert "<td>synchroniser.interval_steps</td><td>is 500 &lt;too long&gt;.</td><td>Set it to 10.</td>" in page
    assert "Warnings" not in render({**report, "warnings": []})


def test_the_headline_says_loss_goodput_and_recovery(report):
    page = render(report)
    assert f"{report['loss_final']:.3f}" in page
    assert f"{100 * report['goodput_ratio']:.1f} %" in page
    assert "Recovery of asia" in page
    assert "first merge" in page


def test_every_colour_has_a_light_and_a_dark_value(report):
    page = render(report)
    used = set(re.findall(r"var\(--([a-z0-9_-]+)\)", page))
    light, dark = (
        set(re.findall(r"--([a-z0-9_-]+):", block)) for block in re.findall(r":root\{(.*?)\}", page, re.DOTALL)
    )
    assert used <= light
    assert light == dark


def test_it_survives_being_json_in_between(report):
    assert render(json.loads(json.dumps(report))) == render(report)


def test_names_are_escaped():
    page = render(_report(name="<script>alert(1)</script>"))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("until", [0.0, 0.2, 2.0, 3.5])
def test_a_job_that_has_only_begun_has_a_page_too(until):
    parser = _Nesting()
    parser.feed(render(_report(until)))
    assert (parser.wrong, parser.open) == ([], [])


def test_ticks_are_round_and_inside():
    assert Scale(0.0, 37.0, 0, 1).ticks() == [0.0, 10.0, 20.0, 30.0]
    assert Scale(1.3, 5.5, 0, 1).ticks(6) == [2.0, 3.0, 4.0, 5.0]
    assert Scale(2.0, 2.0, 0, 1).ticks() == [2.0]


def test_numbers_read_well():
    assert [count(n) for n in (None, 0, 999, 1234, 1_234_567)] == ["–", "0", "999", "1.23 k", "1.23 M"]
    told = [seconds(s) for s in (None, 0.0123, 1.5, 42.0, 300.0, 9000.0)]
    assert told == ["–", "12 ms", "1.50 s", "42.0 s", "5.0 min", "2.5 h"]


def test_a_spare_is_said_to_be_one_and_is_no_island_of_goodput_nought(report):
    spare = {**report["islands"]["asia"], "spare": True}
    page = render({**report, "islands": {**report["islands"], "spare-slot": spare}})
    assert "4 islands in" in page
    assert "and 1 spare" in page
    assert page.count("spare-slot") == 1, "it has a row in the table, and none over time"


def test_the_page_shows_what_the_job_cost_if_there_are_prices(report):
    assert "<h2>Cost</h2>" not in render(report)
    cost = {"currency": "USD", "so_far": 12.3, "per_merged_million_tokens": 4.5, "badput": {"a<b": 0.002}}
    page = render({**report, "cost": {**cost, "node_groups": {"asia": 12.3}, "unpriced": ["moon"]}})
    assert "12.30 USD, 4.50 USD per merged million tokens. Without a price: moon." in page
    assert '<td class="words">a&lt;b</td><td>0.002 USD</td>' in page
