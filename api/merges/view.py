"""Merges in a terminal: the list as a table, and one merge explained in full."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from api.schemas import Merge, MergeSummary
from api.terminal.listing import Listing
from orchestrator.report.words import percent, seconds


def merge_table(merges: list[MergeSummary]) -> Table:
    """One line for each merge, in the order given."""
    table = Listing("merge", "closed", "islands", "why", prose=("why",), pad_edge=False, expand=True)
    for merge in merges:
        closed = f"{merge.closed_after_s:.1f} s"
        table.add_row(f"{merge.fragment}:{merge.version}", closed, str(len(merge.islands)), merge.because)
    return table


def explained(merge: Merge) -> RenderableType:
    """One merge: the story of its round, its contributors, and who is not in it."""
    headline = f"fragment {merge.fragment}, version {merge.version - 1} to {merge.version}"
    parts: list[RenderableType] = [Text(headline, style="bold"), Text(merge.because), Text(), _times(merge), Text()]
    parts.append(_contributors(merge))
    if merge.refusals:
        parts += [Text(), _refusals(merge)]
    if (untold := merge.refusal_count - len(merge.refusals)) > 0:
        parts.append(Text(f"and {untold} refusals more", style="dim"))
    if merge.absent:
        absent = ", ".join(f"{item.island} ({item.state.replace('_', ' ')})" for item in merge.absent)
        parts += [Text(), Text(f"not in it: {absent}")]
    return Group(*parts)


def _times(merge: Merge) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(justify="right")
    window = "" if merge.grace_window_s is None else f" of at most {seconds(merge.grace_window_s)}"
    grid.add_row("opened", _at(merge.opened_after_s), "with the first contribution made at or after the due point")
    grid.add_row("quorum", _at(merge.quorum_after_s), f"the {merge.quorum} that are enough, one of them on time")
    grid.add_row("closed", _at(merge.closed_after_s), f"after {seconds(merge.grace_used_s)} of grace{window}")
    if merge.merged_after_s is None:
        grid.add_row("merged", "–", "the outer step is being taken")
    else:
        grid.add_row("merged", _at(merge.merged_after_s), f"in {seconds(merge.merge_s)}; digest {merge.digest}")
    return grid


def _contributors(merge: Merge) -> Table:
    figures = ("life", "weight", "tokens", "steps", "on version", "arrived")
    table = Listing("contributor", *figures, "", prose=("",), right=figures, pad_edge=False)
    for item in merge.contributors:
        table.add_row(
            item.island,
            str(item.incarnation),
            percent(item.weight),
            f"{item.token_count:,}",
            str(item.step_count),
            f"{item.base_version}" + (f" ({item.staleness} behind)" if item.staleness else ""),
            _at(item.arrived_after_s),
            "" if item.on_time else "early",
        )
    return table


def _refusals(merge: Merge) -> Table:
    table = Listing("refused", "at", "tokens", "why", prose=("why",), pad_edge=False)
    for item in merge.refusals:
        why = f"{item.reason.replace('_', ' ')}: {item.detail}"
        table.add_row(item.island, _at(item.after_s), f"{item.token_count:,}", why)
    return table


def _at(after_s: float) -> str:
    return f"{after_s:.2f} s"
