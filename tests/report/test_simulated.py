"""Pictures of simulations: well-formed files that stand alone, with every figure in them, and nothing drawn outside."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from orchestrator.report.page import LogScale
from orchestrator.report.simulated import Axis, Line, changes_chart, lines_chart, svg_file, systems_chart

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [
    {"system": "data-parallel", "goodput": 0.25, "stderr": 0.01, "badput": {"stalled: restarting": 0.75}},
    {
        "system": "decoupled",
        "goodput": 0.885,
        "stderr": 0.001,
        "badput": {"stalled: shrinking": 0.1, "slice away": 0.015},
    },
]
ACROSS, UP = Axis("x", lambda x: f"{x:g}", 0.1, 100.0, logarithmic=True), Axis("y", str, 0.0, 1.0)
LINES = [
    Line("a", "#111111", [(0.1, 0.2), (100.0, 0.5)], [(1.0, 0.375)]),
    Line("b", "#222222", [(0.1, 0.3), (100.0, 0.5)]),
]
CHANGES = [("more", 0.172, 0.058), ("nothing", -0.0001, None), ("far from it", 0.004, 0.32)]


def _tree(svg):
    return ElementTree.fromstring(svg)


def _said(svg):
    return [element.text for element in _tree(svg).iter(f"{SVG}text")]


def _pictures():
    return {
        "systems": systems_chart(ROWS, "A title", ["one", "two"]),
        "lines": lines_chart(LINES, ACROSS, UP, "Lines"),
        "changes": changes_chart(CHANGES, "Changes"),
    }


@pytest.mark.parametrize("name", ["systems", "lines", "changes"])
def test_a_picture_stands_alone(name):
    svg = _pictures()[name]
    assert not re.search(r"var\(|url\(|<script|class=|href=", svg), "nothing depends on a page"
    tree = _tree(svg)
    width, height = float(tree.get("width")), float(tree.get("height"))
    for element in tree.iter():
        for key, limit in (("x", width), ("y", height), ("x1", width), ("x2", width), ("cx", width), ("cy", height)):
            assert 0.0 <= float(element.get(key, 0.0)) <= limit, ElementTree.tostring(element)


def test_bars_are_as_long_as_what_they_say():
    bars = [
        (box.find(f"{SVG}title").text, float(box.get("width")), float(box.get("x")))
        for box in _tree(systems_chart(ROWS, "A title")).iter(f"{SVG}rect")
        if box.find(f"{SVG}title") is not None
    ]
    lengths = {title: width for title, width, _ in bars}
    assert set(lengths) == {
        "data-parallel: goodput 25.0 %",
        "data-parallel: stalled: restarting 75.0 %",
        "decoupled: goodput 88.5 %",
        "decoupled: stalled: shrinking 10.0 %",
        "decoupled: slice away 1.5 %",
    }
    whole = lengths["data-parallel: goodput 25.0 %"] / 0.25
    assert lengths["decoupled: goodput 88.5 %"] == pytest.approx(0.885 * whole, abs=0.1)
    assert lengths["decoupled: stalled: shrinking 10.0 %"] == pytest.approx(0.1 * whole, abs=1.0)
    ours = [(x, width) for title, width, x in bars if title.startswith("decoupled")]
    for (x, width), (following, _) in pairwise(sorted(ours)):
        assert following == pytest.approx(x + width, abs=1.0), "stacked without overlap"


def test_goodput_is_said_with_its_95_percent_interval():
    assert "88.5 ± 0.2 %" in _said(systems_chart(ROWS, "A title"))
    without = [{**row, "stderr": None} for row in ROWS]
    assert "88.5 %" in _said(systems_chart(without, "A title"))


def test_published_points_are_marks_and_ours_are_dots():
    tree = _tree(lines_chart(LINES, ACROSS, UP, "Lines"))
    titles = [element.find(f"{SVG}title").text for element in tree.iter() if element.find(f"{SVG}title") is not None]
    assert "a, published: 0.375 at 1" in titles
    assert len(list(tree.iter(f"{SVG}circle"))) == 4
    assert {"a", "b", "published"} <= set(_said(lines_chart(LINES, ACROSS, UP, "Lines")))
    assert "published" not in _said(lines_chart(LINES[1:], ACROSS, UP, "Lines"))


def test_a_published_change_beyond_all_bars_is_a_figure_and_no_mark():
    tree = _tree(_pictures()["changes"])
    titles = [element.find(f"{SVG}title").text for element in tree.iter() if element.find(f"{SVG}title") is not None]
    assert [title for title in titles if "published" in title] == ["more, published: +5.80 %"]
    assert {"+17.2 %", "+0.0 %", "+0.4 % (◇ +32 %)"} <= set(_said(_pictures()["changes"]))


def test_names_of_curves_that_end_together_do_not_lie_on_each_other():
    texts = {e.text: float(e.get("y")) for e in _tree(_pictures()["lines"]).iter(f"{SVG}text")}
    assert abs(texts["a"] - texts["b"]) >= 16.0


def test_a_logarithmic_scale_has_the_powers_of_ten():
    scale = LogScale(0.1, 1000.0, 0.0, 4.0)
    assert scale.ticks() == pytest.approx([0.1, 1.0, 10.0, 100.0, 1000.0])
    assert [scale(x) for x in (0.1, 1.0, 1000.0)] == pytest.approx([0.0, 1.0, 4.0])


def test_names_are_escaped():
    row = {"system": "decoupled", "label": "<b>&", "goodput": 0.5, "badput": {"<i>": 0.5}}
    assert "<b>&" in _said(systems_chart([row], "<title>"))
    assert _tree(svg_file(10.0, "<&>", [])).get("aria-label") == "<&>"
