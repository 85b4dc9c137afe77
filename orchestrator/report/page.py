"""The parts of every report page: the document round it, cards, tiles and tables. Refuses to know what they say.

A page is complete in itself: no script, no network. Text is escaped here; a ``body`` or a table's cell is HTML already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from orchestrator.report.charts import parts_bar
from orchestrator.report.style import CSS


def document(title: str, body: str) -> str:
    """The whole page, as text to be written in UTF-8."""
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
    """``words`` are the columns that hold sentences, which wrap and stand on the left.

    On a phone a table is wider than the page and scrolls by itself: so that keys can do that too, it takes the focus.
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
