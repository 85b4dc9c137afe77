"""The parts that report pages are made of: style sheet, document, header, tiles, cards, tables, and the charts.

A page is one self-contained file: no script, no network. Every colour is a CSS variable with a light and a dark value, so
one drawing serves both themes. What the pages say is up to ``html`` and ``chaos``. The functions of the page's parts escape
the text that they are given, except a ``body`` and table cells, which must be HTML already.

There are four charts of a job: loss, islands over time, island time by class, merges. report.json in, SVG out. Below them is
the vocabulary of SVG that they and ``report.simulated`` share: scales, ticks, axes and marks. Coordinates in, elements as
strings out. There is no plotting library behind it, because the synchroniser writes reports and should not have to load one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from math import ceil, floor, log10
from typing import Any

from orchestrator.system.plain import count, counted, loss, percent, seconds, tick_text

WIDTH = 520.0
"""The width of all charts, in units. They scale with the page, and text is large enough to be readable on a phone."""
STATES = {
    "training": "training",
    "flushed": "flushed, waiting for the end",
    "catching_up": "catching up",
    "starting": "building and compiling",
    "placing": "being placed",
    "waiting": "waiting for a node",
    "suspect": "unreachable",
    "draining": "draining",
    "lost": "lost, waiting to restart",
    "failed": "failed",
    "stopped": "stopped",
    "drained": "drained",
    "cordoned": "waiting for its node group",
}
CLASSES = {
    "productive": "productive",
    "in_flight": "in flight",
    "discarded": "discarded",
    "stalled": "stalled",
    "recovering": "recovering",
    "starting": "starting",
    "down": "down",
}
Report = Mapping[str, Any]
HIGH_ROW, LOW_ROW, HIGH_ROWS_MAX = 30.0, 17.0, 24
"""Row heights of the timeline. Beyond ``HIGH_ROWS_MAX`` islands the rows are low, so that the chart fits a screen or two."""
_LIGHT = """
--page:#f5f7f8;--card:#ffffff;--ink:#14242b;--soft:#566a73;--faint:#dfe6e9;--rule:#c3ced3;--accent:#0b7a75;
--loss:#0b7a75;--training-loss:#8aa4ad;--badput:#c9794a;--bad:#b3372f;
--class-productive:#0f8b7f;--class-in_flight:#7cc5bd;--class-discarded:#d08a4e;--class-stalled:#e3bd5a;
--class-recovering:#7388c9;--class-starting:#b3bfe2;--class-down:#b5483f;
--state-training:#0f8b7f;--state-flushed:#9ad0ca;--state-catching_up:#5b74c4;--state-starting:#93a5da;
--state-placing:#c3cdea;--state-waiting:#d8c59a;--state-suspect:#e3bd5a;--state-lost:#b5483f;--state-failed:#6e1f1a;--state-stopped:#cfd6d9;
--state-draining:#8a6fb8;--state-drained:#d9d2e6;--state-cordoned:#c9b08a;
--share-1:#d9ece9;--share-2:#a9d6d0;--share-3:#6fbab2;--share-4:#359a91;--share-5:#0b746c;
--part-detect:#b5483f;--part-place:#d08a4e;--part-start:#93a5da;--part-connect:#e3bd5a;--part-transfer:#5b74c4;
--part-first_merge:#0f8b7f;--inside:#ffffff;
"""
_DARK = """
--page:#0d1518;--card:#142025;--ink:#e6eef0;--soft:#94a8b0;--faint:#22323a;--rule:#3a4d55;--accent:#4cc3b6;
--loss:#4cc3b6;--training-loss:#6f8790;--badput:#d9905f;--bad:#ef7d74;
--class-productive:#2ba597;--class-in_flight:#23635d;--class-discarded:#c98149;--class-stalled:#c9a545;
--class-recovering:#7d92d8;--class-starting:#4a5a94;--class-down:#d1584e;
--state-training:#2ba597;--state-flushed:#1f5d57;--state-catching_up:#7d92d8;--state-starting:#53659f;
--state-placing:#364470;--state-waiting:#6b5c33;--state-suspect:#c9a545;--state-lost:#d1584e;--state-failed:#8f2f28;--state-stopped:#33434a;
--state-draining:#a88fd6;--state-drained:#40384f;--state-cordoned:#7d6a48;
--share-1:#17393a;--share-2:#1b5553;--share-3:#20756f;--share-4:#2a9a90;--share-5:#5ad0c3;
--part-detect:#d1584e;--part-place:#c98149;--part-start:#6b7fbf;--part-connect:#c9a545;--part-transfer:#7d92d8;
--part-first_merge:#2ba597;--inside:#ffffff;
"""
_LAYOUT = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 48px}
header{margin-bottom:20px}
h1{font-size:30px;line-height:1.15;letter-spacing:-.02em;margin:0 0 6px;overflow-wrap:anywhere}
h2{font-size:16px;margin:0 0 2px}
.eyebrow{color:var(--accent);font-weight:600;font-size:13px;letter-spacing:.08em;text-transform:uppercase;margin:0 0 4px}
.lead,.sub{color:var(--soft);margin:0}
.sub{font-size:13.5px;margin-bottom:12px}
.badge{display:inline-block;border-radius:99px;padding:1px 10px;font-size:13px;font-weight:600;
color:var(--page);background:var(--accent);vertical-align:middle;margin-left:8px;letter-spacing:0}
.badge.bad{background:var(--bad)}
.tiles,.grid{display:grid;gap:14px}
.tiles{grid-template-columns:repeat(auto-fit,minmax(230px,1fr));margin-bottom:14px}
.grid{grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr))}
.card{background:var(--card);border:1px solid var(--faint);border-radius:12px;padding:16px 18px;min-width:0}
.tile .what{color:var(--soft);font-size:13.5px}
.tile .figure{font-size:36px;font-weight:650;letter-spacing:-.02em;line-height:1.2;font-variant-numeric:tabular-nums}
.tile .note{color:var(--soft);font-size:13.5px}
svg{display:block;width:100%;height:auto;overflow:visible;font-family:inherit}
svg .label{font-size:13px;fill:var(--ink)}
svg .tick{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg .inside{font-size:16px;font-weight:650;fill:var(--inside)}
svg .over{paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
svg .axis{stroke:var(--rule)}svg .grid{stroke:var(--faint)}
svg .reference{stroke:var(--soft);stroke-dasharray:5 4}
svg .curve{fill:none;stroke-linejoin:round;stroke-linecap:round}
svg .cross{stroke:var(--bad);stroke-width:2.2;fill:none}
svg .ring{fill:var(--card);stroke:var(--ink);stroke-width:2}
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;margin:8px 0 10px;font-size:13px;color:var(--soft)}
.key{white-space:nowrap}.key i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;
vertical-align:-1px}
.parts{display:flex;gap:2px;height:9px;margin:9px 0 7px}.parts i{min-width:2px;border-radius:2px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{font-weight:600;color:var(--soft);text-align:right;padding:5px 8px;border-bottom:1px solid var(--rule);
white-space:nowrap}
td{text-align:right;padding:5px 8px;border-bottom:1px solid var(--faint);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0}
td.words,th.words{text-align:left}td.words{white-space:normal;min-width:15em}
tr:last-child td{border-bottom:0}
b.bad{color:var(--bad)}pre{margin:0;font-size:13px}
.nothing{color:var(--soft);padding:24px 0}
.wide{grid-column:1/-1}
footer{color:var(--soft);font-size:13px;margin-top:22px}
@media (max-width:560px){main{padding:18px 12px 32px}h1{font-size:24px}.card{padding:13px 13px}
.tile .figure{font-size:30px}svg .tick{font-size:14.5px}svg .label{font-size:15px}}
@media print{body{background:#fff}.card{break-inside:avoid}}
"""
CSS = f":root{{color-scheme:light dark;{_LIGHT}}}@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}{_LAYOUT}"


def loss_chart(report: Report) -> str:
    """Draw held-out loss against tokens, with the islands' own training loss and the loss of a unigram model."""
    held_out, training = report["loss_curve"], report["training_loss_curve"]
    unigram = report.get("loss_unigram")
    values = [point[1] for point in (*held_out, *training)] + ([unigram] if unigram else [])
    if not values:
        return _nothing("Nothing was trained.")
    low, high = min(values), max(values)
    margin = 0.08 * (high - low or 1.0)
    x = Scale(0.0, max((point[0] for point in (*held_out, *training)), default=1.0), 44.0, WIDTH - 12)
    y = Scale(low - margin, high + margin, 226.0, 10.0)
    parts = [y_axis(y, x.start, x.stop, tick_text, 6), x_axis(x, 226.0, count, "tokens trained, all islands")]
    if len(training) > 1:
        parts.append(path([(x(p[0]), y(p[1])) for p in training], "training-loss", width=1.2, opacity=0.55))
    if unigram:
        parts.append(line(x.start, y(unigram), x.stop, y(unigram), "reference"))
    if held_out:
        parts.append(path([(x(p[0]), y(p[1])) for p in held_out], "loss", width=2.4))
    if unigram:
        parts.append(text(x.stop, y(unigram) - 6, f"unigram model {loss(unigram)}", anchor="end", kind="tick over"))
    for tokens, value, at in held_out:
        parts.append(dot(x(tokens), y(value), 3.0, "loss", f"{loss(value)} at {count(tokens)} tokens, {seconds(at)}"))
    keys = [("loss", "held-out loss, nats per token"), ("training-loss", "training loss, as the islands report it")]
    return drawing(264.0, "Loss against tokens", *parts) + legend(keys)


def timeline_chart(report: Report) -> str:
    """Draw one row per island, coloured by state. A cross marks a loss, a ring the first merge afterwards."""
    islands = [name for name, island in report["islands"].items() if not island.get("spare")]
    duration = report["duration_s"] or 1.0
    label_width = min(150.0, 12.0 + 7.2 * max((len(name) for name in islands), default=0))
    x = Scale(0.0, duration, label_width, WIDTH - 12)
    row = HIGH_ROW if len(islands) <= HIGH_ROWS_MAX else LOW_ROW
    bar, height = row * 0.7, 10.0 + row * len(islands)
    tops = {island: 8.0 + n * row for n, island in enumerate(islands)}
    parts = [text(label_width - 9, tops[name] + bar / 2 + 4.5, name, anchor="end") for name in islands]
    shown = set()
    for island, since, until, state in report["timeline"]:
        tooltip = f"{island}: {STATES.get(state, state)} for {seconds(until - since)}, from {seconds(since)}"
        width = max(x(until) - x(since), 0.8)
        parts.append(box(x(since), tops[island], width, bar, f"state-{state}", tooltip, radius=2))
        shown.add(state)
    for recovery in report["recoveries"]:
        top = tops[recovery["island"]]
        if recovery["parts"]["detect"]:  # without it, an operator had stopped the island and readmitted it
            parts.append(_cross(x(recovery["killed_at"]), top - 1.5))
        if recovery["complete"]:
            tooltip = f"{recovery['island']} contributed again after {seconds(recovery['total'])}"
            back_at = recovery["killed_at"] + recovery["total"]
            ring = element("title", escape(tooltip))
            parts.append(element("circle", ring, cx=x(back_at), cy=top + bar / 2, r=5.0, class_="ring"))
    parts.append(x_axis(x, height, tick_text, "seconds since the job was created"))
    keys = [(f"state-{state}", name) for state, name in STATES.items() if state in shown]
    return drawing(height + 40, "Islands over time", *parts) + legend(keys)


def goodput_chart(report: Report) -> str:
    """Draw all island-seconds in one bar by class, and below it the lost time by cause."""
    spent = report["island_seconds"]
    total = spent["total"]
    if not total:
        return _nothing("No island was placed.")
    x = Scale(0.0, total, 0.0, WIDTH)
    parts, at = [], 0.0
    for name, words in CLASSES.items():
        if spent[name] > 0.0:
            tooltip = f"{words}: {seconds(spent[name])}, {percent(spent[name] / total)}"
            parts.append(
                box(x(at), 0.0, x(spent[name]) - (1.0 if x(spent[name]) > 2 else 0.0), 34.0, f"class-{name}", tooltip)
            )
            at += spent[name]
    if x(spent["productive"]) > 90:
        parts.append(text(10.0, 22.0, percent(spent["productive"] / total), kind="inside"))
    causes = list(report["badput_seconds"].items())[:9]
    longest = max((value for _, value in causes), default=1.0)
    bars = Scale(0.0, longest, 0.0, WIDTH - 268)
    for n, (cause, value) in enumerate(causes):
        top = 58.0 + 24.0 * n
        parts.append(text(206.0, top + 12, _shortened(cause), anchor="end", kind="tick"))
        parts.append(box(214.0, top, max(bars(value), 1.0), 15.0, "badput", f"{cause}: {seconds(value)}"))
        parts.append(text(220.0 + bars(value), top + 12, seconds(value), kind="tick"))
    keys = [
        (f"class-{name}", f"{words} {percent(spent[name] / total)}")
        for name, words in CLASSES.items()
        if spent[name] > 0
    ]
    chart = drawing(62.0 + 24.0 * len(causes), "Island time by class, and lost time by cause", *parts)
    return legend(keys) + chart


def merges_chart(report: Report) -> str:
    """Draw the merges of each fragment by number of contributors."""
    fragments = report["contributors_per_fragment"]
    highest = max((sum(one.values()) for one in fragments), default=0)
    if not highest:
        return _nothing("No fragment has merged.")
    islands = report["policy"]["islands"]
    x = Scale(0.0, len(fragments), 40.0, WIDTH - 12)
    y = Scale(0.0, highest * 1.06, 196.0, 8.0)
    parts = [y_axis(y, x.start, x.stop, tick_text)]
    gap = min(6.0, 0.25 * (x(1) - x(0)))
    every = max(1, round(len(fragments) / 12))
    for n, one in enumerate(fragments):
        below = 0
        for contributors in range(1, islands + 1):
            times = one.get(str(contributors), 0)
            if times:
                colour = _share_colour(contributors, islands)
                tooltip = f"fragment {n}: {times} merges of {contributors} islands"
                top = y(below + times)
                parts.append(box(x(n) + gap / 2, top, x(1) - x(0) - gap, y(below) - top, colour, tooltip, radius=0.5))
                below += times
        if n % every == 0:
            parts.append(text(x(n + 0.5), 213.0, str(n), anchor="middle", kind="tick"))
    parts.append(line(x.start, 196.0, x.stop, 196.0, "axis"))
    parts.append(text(x.stop, 230.0, "fragment", anchor="end", kind="tick"))
    seen = sorted({int(contributors) for one in fragments for contributors in one})
    keys = [(colour, _from_to(list(counts))) for colour, counts in groupby(seen, lambda n: _share_colour(n, islands))]
    return drawing(236.0, "Merges per fragment by number of contributors", *parts) + legend(keys)


def _share_colour(contributors: int, islands: int) -> str:
    return f"share-{max(1, round(5 * contributors / islands))}"


def _from_to(counts: list[int]) -> str:
    """Return the legend of one colour: the numbers of islands that it stands for."""
    most = counted(counts[-1], "island")
    return most if len(counts) == 1 else f"{counts[0]} to {most}"


def parts_bar(parts: Mapping[str, float]) -> str:
    """Draw the parts of a recovery side by side, in proportion to their durations."""
    total = sum(parts.values()) or 1.0
    spans = (
        f'<i style="flex:{value / total:.4f};background:var(--part-{name})" title="{name}: {seconds(value)}"></i>'
        for name, value in parts.items()
        if value > 0.0
    )
    return f'<div class="parts">{"".join(spans)}</div>'


def _cross(x: float, y: float) -> str:
    return element("path", d=f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8", class_="cross")


def _shortened(cause: str) -> str:
    return cause if len(cause) <= 36 else cause[:35] + "…"


def _nothing(why: str) -> str:
    return f'<p class="nothing">{escape(why)}</p>'


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from [low, high] to [start, stop] of the drawing."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return about ``count`` round values inside the range."""
        span = self.high - self.low
        if span <= 0.0:
            return [self.low]
        raw = span / count
        power = 10.0 ** floor(log10(raw))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
        first = ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class LogScale(Scale):
    """A logarithmic map: equal ratios get equal lengths. ``low`` and ``high`` are above zero."""

    def __call__(self, value: float) -> float:
        share = log10(value / self.low) / (log10(self.high / self.low) or 1.0)
        return self.start + share * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return the powers of ten inside the range. ``count`` is ignored."""
        first, last = ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]


def element(name: str, *children: str, **attributes: object) -> str:
    """Return one element. ``_`` in attribute names becomes ``-``, and ``class_`` becomes ``class``."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{named}>{''.join(children)}</{name}>"


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "label") -> str:
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, class_=kind)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def box(x: float, y: float, width: float, height: float, colour: str, title: str = "", radius: float = 1.5) -> str:
    """Return a filled rectangle with ``title`` as its tooltip."""
    tooltip = element("title", escape(title)) if title else ""
    return element(
        "rect", tooltip, x=x, y=y, width=max(0.0, width), height=height, rx=radius, style=f"fill:var(--{colour})"
    )


def dot(x: float, y: float, radius: float, colour: str, title: str = "") -> str:
    tooltip = element("title", escape(title)) if title else ""
    return element("circle", tooltip, cx=x, cy=y, r=radius, style=f"fill:var(--{colour})")


def path(points: Iterable[tuple[float, float]], colour: str, *, width: float = 2.0, opacity: float = 1.0) -> str:
    drawn = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    style = f"stroke:var(--{colour});stroke-width:{width};opacity:{opacity}"
    return element("path", d=drawn, class_="curve", style=style)


def x_axis(scale: Scale, y: float, say: Callable[[float], str], name: str) -> str:
    """Return a horizontal axis at ``y``: ticks below it, and ``name`` at its right end."""
    marks = [text(scale(tick), y + 17, say(tick), anchor="middle", kind="tick") for tick in scale.ticks()]
    named = text(scale.stop, y + 34, name, anchor="end", kind="tick")
    return line(scale.start, y, scale.stop, y, "axis") + "".join(marks) + named


def y_axis(scale: Scale, x: float, until: float, say: Callable[[float], str], count: int = 4) -> str:
    """Return grid lines from ``x`` to ``until`` with their values on the left."""
    marks = []
    for tick in scale.ticks(count):
        marks.append(line(x, scale(tick), until, scale(tick), "grid"))
        marks.append(text(x - 7, scale(tick) + 4, say(tick), anchor="end", kind="tick"))
    return "".join(marks)


def drawing(height: float, label: str, *parts: str) -> str:
    """Return a whole chart. ``label`` is its description for screen readers."""
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return colour keys as HTML, so that they wrap like text."""
    keys = (f'<span class="key"><i style="background:var(--{c})"></i>{escape(name)}</span>' for c, name in entries)
    return f'<p class="legend">{"".join(keys)}</p>'


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def document(title: str, body: str) -> str:
    """Return the whole page, to be written as UTF-8."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body><main>{body}</main></body></html>\n"
    )


def header(eyebrow: str, title: str, badge: str, lead: str, *, bad: bool) -> str:
    return (
        f'<header><p class="eyebrow">{escape(eyebrow)}</p>'
        f'<h1>{escape(title)}<span class="badge{" bad" if bad else ""}">{escape(badge)}</span></h1>'
        f'<p class="lead">{escape(lead)}</p></header>'
    )


def tile(what: str, figure: str, note: str, parts: Mapping[str, float] | None = None) -> str:
    bar = parts_bar(parts) if parts else ""
    return (
        f'<div class="card tile"><div class="what">{escape(what)}</div><div class="figure">{escape(figure)}</div>'
        f'{bar}<div class="note">{escape(note)}</div></div>'
    )


def tiles(*each: str) -> str:
    return f'<div class="tiles">{"".join(each)}</div>'


def card(title: str, sub: str, body: str, *, wide: bool = False) -> str:
    kind = "card wide" if wide else "card"
    return f'<section class="{kind}"><h2>{escape(title)}</h2><p class="sub">{escape(sub)}</p>{body}</section>'


def cards(*each: str) -> str:
    return f'<div class="grid">{"".join(each)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], empty: str, *, words: Sequence[int] = ()) -> str:
    """Return a table, or ``empty`` if it has no rows. ``words`` are the columns of sentences: left-aligned and wrapped.

    On a phone the table is wider than the page and scrolls on its own. It takes the focus, so the keyboard can scroll it.
    """
    kinds = dict.fromkeys(words, ' class="words"')
    body = "".join(
        "<tr>" + "".join(f"<td{kinds.get(n, '')}>{cell}</td>" for n, cell in enumerate(row)) + "</tr>" for row in rows
    )
    if not body:
        return f'<p class="nothing">{escape(empty)}</p>'
    named = "".join(f'<th{kinds.get(n, "")} scope="col">{escape(name)}</th>' for n, name in enumerate(head))
    reached = f'tabindex="0" role="region" aria-label="Table of {escape(", ".join(head))}"'
    return f'<div class="scroll" {reached}><table><thead><tr>{named}</tr></thead><tbody>{body}</tbody></table></div>'
