"""The parts that all report pages share: style sheet, document, header, tiles, cards and tables.

A page is one self-contained file: no script, no network. Every colour is a CSS variable with a light and a dark value.
Functions here escape the text that they are given, except a ``body`` and table cells, which must be HTML already. What the
pages say is up to ``html`` and ``chaos``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from orchestrator.report.charts import parts_bar

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
