"""The lab's one drawing: utilisation against line speed, and bytes per token. It follows light and dark by itself."""

from __future__ import annotations

from html import escape

from orchestrator.report.page import LogScale, Scale, element, line, text
from orchestrator.simulation.bandwidth import utilisation
from tests.wan.lab.outcome import Outcome, methods_of
from tests.wan.lab.plan import MEGA
from tests.wan.lab.windows import HEADERS_RATIO, Window, exchange_for

WIDTH, LEFT, TOP, PLOT_HEIGHT, ROW = 760.0, 56.0, 62.0, 260.0, 26.0
POINTS = 160
COLOURS = ("--a", "--b", "--c", "--d", "--e", "--f", "--g", "--h")
STYLE = """
svg{--page:#fff;--ink:#14242b;--soft:#566a73;--faint:#e6ecee;--rule:#c3ced3;--a:#b3372f;--b:#c9794a;--c:#b08a1e;--d:#5b74c4;
--e:#8a6fb8;--f:#0b7a75;--g:#3f8f3a;--h:#14242b;font-family:system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
@media (prefers-color-scheme:dark){svg{--page:#0d1518;--ink:#e6eef0;--soft:#94a8b0;--faint:#22323a;--rule:#3a4d55;
--a:#ef7d74;--b:#d9905f;--c:#d5b24a;--d:#8ea3e6;--e:#b49be0;--f:#4cc3b6;--g:#7cc576;--h:#e6eef0}}
.page{fill:var(--page)}.title{font-size:18px;font-weight:650;fill:var(--ink)}.label{font-size:13px;fill:var(--ink)}
.tick{font-size:12px;fill:var(--soft)}.axis{stroke:var(--rule)}.grid{stroke:var(--faint)}
"""


def picture(outcome: Outcome) -> str:
    methods = methods_of(outcome.windows)
    colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(methods)}
    bottom = TOP + PLOT_HEIGHT
    bars_at = bottom + 96
    height = bars_at + ROW * len(methods) + 16
    rates = [window.megabits for window in outcome.windows]
    x = LogScale(min(rates) / 1.3, max(rates) * 1.3, LEFT, WIDTH - 24)
    y = Scale(0.0, 1.05, bottom, TOP)
    parts = [element("rect", x=0.0, y=0.0, width=WIDTH, height=height, class_="page")]
    parts.append(text(24.0, 30.0, "Compute utilisation by the speed of a region's line", kind="title"))
    parts.append(text(24.0, 50.0, "dots were measured, lines are simulation/bandwidth's formulas", kind="tick"))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(line(LEFT, y(share), WIDTH - 24, y(share), "grid"))
        parts.append(text(LEFT - 7, y(share) + 4, f"{share:.0%}", anchor="end", kind="tick"))
    for tick in x.ticks():
        parts.append(text(x(tick), bottom + 18, f"{tick:g}", anchor="middle", kind="tick"))
    parts.append(text(WIDTH - 24, bottom + 34, "Mbit/s each way", anchor="end", kind="tick"))
    for name in methods:
        parts.append(_formula(outcome, name, x, y, colours[name]))
        parts += [_dot(one, x, y, colours[name]) for one in outcome.windows if one.method == name]
    parts.append(text(24.0, bars_at - 28, "Bytes per token over a region's line (logarithmic)", kind="title"))
    parts += _bars(outcome, methods, colours, bars_at)
    named = {"viewBox": f"0 0 {WIDTH:g} {height:g}", "role": "img", "xmlns": "http://www.w3.org/2000/svg"}
    return element(
        "svg", element("style", STYLE), *parts, **named, aria_label="Utilisation and bytes per token by method"
    )


def _formula(outcome: Outcome, method: str, x: LogScale, y: Scale, colour: str) -> str:
    exchange = exchange_for(method, outcome.plan, outcome.plan.round_trip_s)
    rates = [x.low * (x.high / x.low) ** (n / (POINTS - 1)) for n in range(POINTS)]
    points = [(x(rate), y(utilisation(exchange, rate * MEGA / HEADERS_RATIO))) for rate in rates]
    drawn = "M" + "L".join(f"{across:.1f} {up:.1f}" for across, up in points)
    return element("path", d=drawn, fill="none", style=f"stroke:var({colour});stroke-width:1.6;opacity:.75")


def _dot(window: Window, x: LogScale, y: Scale, colour: str) -> str:
    said = f"{window.method}: {window.utilisation:.1%} at {window.megabits:g} Mbit/s"
    where = {"cx": x(window.megabits), "cy": y(min(window.utilisation, 1.05)), "r": 4.5}
    return element("circle", element("title", escape(said)), **where, style=f"fill:var({colour})")


def _bars(outcome: Outcome, methods: list[str], colours: dict[str, str], top: float) -> list[str]:
    """The keys of both drawings, too."""
    values = {name: _of_widest(outcome, name) for name in methods}
    x = LogScale(min(values.values()) / 2, max(values.values()) * 1.1, 170.0, WIDTH - 110)
    parts = []
    for n, (name, value) in enumerate(values.items()):
        at = top + ROW * n
        parts.append(text(162.0, at + 13, name, anchor="end", kind="label"))
        where = {"x": x.start, "y": at, "width": x(value) - x.start, "height": 17.0, "rx": 2.0}
        parts.append(element("rect", **where, style=f"fill:var({colours[name]})"))
        parts.append(text(x(value) + 7, at + 13, f"{value:,.0f}", kind="tick"))
    return parts


def _of_widest(outcome: Outcome, method: str) -> float:
    return max(
        (one for one in outcome.windows if one.method == method), key=lambda one: one.megabits
    ).line_bytes_per_token
