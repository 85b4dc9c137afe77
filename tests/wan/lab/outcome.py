"""What a run of the lab says: tables, goals, JSON. Refuses to know how anything was measured.

The goals: 236 times fewer bytes than data-parallel, 20 times faster on the lines of the paper's four regions, 95 %
utilisation on its 0.84 Gbps, made smaller; the formulas within 10 % of what was measured; and bystanders untouched. Speed
counts merged tokens only: an island that trains on while its fragments come late has not learned for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.bench.goals import Goal, at_least, at_most
from tests.wan.lab.losses import Curve, time_to
from tests.wan.lab.plan import MEGA, OURS, Plan
from tests.wan.lab.windows import Bystanders, Window

BYTES_GOAL, SPEED_GOAL, UTILISATION_GOAL, AGREEMENT_GOAL, PACE_GOAL = 236.0, 20.0, 0.95, 0.10, 0.95
DATA_PARALLEL = "data-parallel"
PAPER_FOUR_BIT, PAPER_REGIONS = 0.84 / 4.86, 16 / 24
"""Bits per second over N/T: the paper's 0.84 Gbps for eight datacentres, and 2 to 5 Gbps for 12B over four regions."""
NEAR = 1.2
"""A line of the plan is the paper's if it is at most so many times as wide, or as narrow."""
Table = list[list[str]]


@dataclass(slots=True)
class Outcome:
    plan: Plan
    windows: list[Window] = field(default_factory=list)
    far: list[Window] = field(default_factory=list)
    lossy: list[Window] = field(default_factory=list)
    strikes: list[Bystanders] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """As JSON says it."""
        judged = [
            {"figure": goal.figure, "value": goal.value, "bound": goal.bound, "met": goal.met} for goal in goals(self)
        ]
        strikes = [asdict(strike) | {"pace_ratio": strike.pace_ratio} for strike in self.strikes]
        return asdict(self) | {"strikes": strikes, "goals": judged}


def goals(outcome: Outcome) -> list[Goal]:
    """Of what was measured; nothing is said of what was not."""
    judged: list[Goal] = []
    dense = [window for window in outcome.windows if window.method == DATA_PARALLEL]
    ours = [window for window in outcome.windows if window.method.startswith(OURS)]
    if dense and ours:
        widest = max(window.megabits for window in ours)  # where nothing comes late, so that nothing is left unsent
        least = min((window for window in ours if window.megabits == widest), key=_bytes)
        judged.append(
            at_least(f"bytes of data-parallel over {least.method}", _bytes(dense[0]) / _bytes(least), BYTES_GOAL)
        )
    per_second = outcome.plan.parameters / outcome.plan.step_s
    for window in ours:
        twin = next((one for one in dense if one.megabits == window.megabits), None)
        if _is_near(window.megabits * MEGA, PAPER_REGIONS * per_second) and twin is not None:
            ratio = window.merged_tokens_per_s / twin.merged_tokens_per_s
            judged.append(
                at_least(f"{window.method} over data-parallel at {window.megabits:g} Mbit/s", ratio, SPEED_GOAL)
            )
        if _is_near(window.megabits * MEGA, PAPER_FOUR_BIT * per_second):
            figure = f"utilisation of {window.method} at {window.megabits:g} Mbit/s"
            judged.append(at_least(figure, window.utilisation, UTILISATION_GOAL))
    compared = line_bound(outcome)
    if compared:
        worst = max(compared, key=disagreement)
        figure = f"formula's distance, worst of {len(compared)} ({worst.method} at {worst.megabits:g} Mbit/s)"
        judged.append(at_most(figure, disagreement(worst), AGREEMENT_GOAL))
    for strike in outcome.strikes:
        if strike.method.startswith(OURS):
            judged.append(at_least(f"pace beside a line {strike.what} ({strike.method})", strike.pace_ratio, PACE_GOAL))
    return judged


def line_bound(outcome: Outcome) -> list[Window]:
    """The windows in which the line was the limit: half as wide, at most, as what the method reached on the widest one."""
    reached: dict[str, float] = {}
    for window in outcome.windows:
        rate = window.sent_bytes_per_token * 8 * window.tokens_per_s / outcome.plan.regions / MEGA
        reached[window.method] = max(rate, reached.get(window.method, 0.0))
    return [one for one in outcome.windows if one.method.startswith(OURS) or one.megabits <= reached[one.method] / 2]


def disagreement(window: Window) -> float:
    return abs(window.utilisation / window.formula_utilisation - 1.0)


def tables(outcome: Outcome) -> list[tuple[str, Table]]:
    """Each with its title, and its head as the first row."""
    plan, made = outcome.plan, []
    lines = f"{plan.regions} regions, {plan.round_trip_s * 1e3:g} ms"
    made.append(
        (f"Utilisation by Mbit/s of a region's line ({lines}); in brackets the formula's", _by_rate(outcome, _utilised))
    )
    title = "Tokens per second, all regions together, and of them merged meanwhile"
    made.append((title, _by_rate(outcome, lambda one: f"{one.tokens_per_s:,.0f} ({min(1.0, one.merged_ratio):.0%})")))
    made.append(("Bytes per token over a region's line", _bytes_table(outcome)))
    if outcome.far:
        trips = [
            (one, f"{one.round_trip_s * 1e3:g} ms") for one in sorted(outcome.far, key=lambda one: one.round_trip_s)
        ]
        made.append((f"Utilisation by round trip, {plan.aside_megabits:g} Mbit/s", _by_label(trips)))
    if outcome.lossy:
        lossy = [
            (one, f"{one.frame_loss_ratio:.1%}") for one in sorted(outcome.lossy, key=lambda one: one.frame_loss_ratio)
        ]
        title = f"Utilisation by frames lost between two regions, {plan.aside_megabits:g} Mbit/s"
        made.append((title, _by_label(lossy, with_formula=False)))
    if outcome.strikes:
        head = ["method", "one region's line", "others' pace", "their longest gap between steps"]
        rows = [
            [one.method, one.what, f"{one.pace_ratio:.3f}", f"{one.longest_gap_s:.2f} s"] for one in outcome.strikes
        ]
        made.append(("The other regions while one is struck", [head, *rows]))
    if any(curve.points for curve in outcome.curves):
        made.append(_loss_table(outcome))
    return [(title, table) for title, table in made if len(table) > 1]


def markdown(outcome: Outcome) -> str:
    """All tables and goals, for a document."""
    parts = []
    for title, (head, *rows) in tables(outcome):
        lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
        parts.append("\n".join([f"**{title}**", "", *lines]))
    parts.append("\n".join(f"- {goal.figure}: {goal.value:.4g} ({goal})" for goal in goals(outcome)))
    parts.append("\n".join(f"- left out: {line}" for line in outcome.left_out))
    return "\n\n".join(part for part in parts if part) + "\n"


def methods_of(windows: Sequence[Window]) -> list[str]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(window.method for window in windows))


def _bytes(window: Window) -> float:
    return window.line_bytes_per_token


def _is_near(rate: float, other: float) -> bool:
    return 1 / NEAR <= rate / other <= NEAR


def _utilised(window: Window) -> str:
    return f"{window.utilisation:.3f} ({window.formula_utilisation:.3f})"


def _by_rate(outcome: Outcome, say: Any) -> Table:
    rates = sorted({window.megabits for window in outcome.windows})
    cells = {(window.method, window.megabits): say(window) for window in outcome.windows}
    rows = [[name, *(cells.get((name, rate), "") for rate in rates)] for name in methods_of(outcome.windows)]
    return [["method", *(f"{rate:g}" for rate in rates)], *rows]


def _by_label(labelled: Sequence[tuple[Window, str]], *, with_formula: bool = True) -> Table:
    """Utilisation; the formulas know of distance, and not of losses."""
    say: Callable[[Window], str] = _utilised if with_formula else lambda one: f"{one.utilisation:.3f}"
    cells = {(window.method, label): say(window) for window, label in labelled}
    labels = list(dict.fromkeys(label for _, label in labelled))
    rows = [
        [name, *(cells.get((name, label), "") for label in labels)] for name in methods_of([w for w, _ in labelled])
    ]
    return [["method", *labels], *rows]


def _bytes_table(outcome: Outcome) -> Table:
    """Of each method's widest line, where nothing came late."""
    head = ["method", "sent", "received", "formula", "hub's line, sent", "data-parallel's over it"]
    widest: dict[str, Window] = {}
    for one in outcome.windows:
        if one.method not in widest or one.megabits > widest[one.method].megabits:
            widest[one.method] = one
    dense = widest.get(DATA_PARALLEL)
    return [
        head,
        *(
            [
                one.method,
                f"{one.sent_bytes_per_token:,.1f}",
                f"{one.received_bytes_per_token:,.1f}",
                f"{one.formula_bytes_per_token:,.1f}",
                "" if one.hub_bytes_per_token is None else f"{one.hub_bytes_per_token:,.1f}",
                "" if dense is None else f"{_bytes(dense) / _bytes(one):,.1f}",
            ]
            for one in widest.values()
        ),
    ]


def _loss_table(outcome: Outcome) -> tuple[str, Table]:
    """Times are to the loss that all reached: the worst of their best."""
    curves = [curve for curve in outcome.curves if curve.points]
    reached = max(min(loss for _, loss in curve.points) for curve in curves)
    head = ["method", "Mbit/s", "seconds a step", "best loss", "time to all's best"]
    rows = []
    for curve in curves:
        at, best = time_to(curve, reached), min(loss for _, loss in curve.points)
        rows.append([curve.method, f"{curve.megabits:g}", f"{curve.step_s:.2f}", f"{best:.4f}", f"{at or 0:,.0f} s"])
    return f"Held-out loss of nano in nats per byte; the loss that all reached is {reached:.4f}", [head, *rows]
