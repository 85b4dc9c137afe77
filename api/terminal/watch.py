"""A job in a terminal: live, as a line, at its end, and with everything about its islands.

The live view is a table that redraws itself on a terminal, or a line every few seconds elsewhere. It draws the answers of
``GET /v1/jobs/JOB`` until the job ends. Ending the view, by Ctrl-C or by losing the service, does not affect the job.

``lines_that_matter`` shows an ended job: loss, goodput and recovery, from its report. ``wide_island_table`` is the table of
`atoll islands -o wide`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from api.client import Client
from api.schemas import Island, Job, JobSummary, NodeCordon
from api.terminal.listing import POLL_S, Listing, Poller
from orchestrator.errors import NotFound
from orchestrator.system.plain import money

PARTS = ("detect", "place", "start", "connect", "transfer", "first_merge")
CAUSES_MAX = 4
STATE_STYLES = {
    "placing": "yellow",
    "waiting": "yellow",
    "starting": "yellow",
    "catching_up": "cyan",
    "training": "green",
    "standby": "dim green",
    "suspect": "magenta",
    "draining": "blue",
    "drained": "dim blue",
    "cordoned": "yellow",
    "lost": "red",
    "stopped": "dim",
    "failed": "bold red",
}
LINE_EVERY_S = 5.0
Observer = Callable[[Job], str | None]
WORDS = ("island", "node group", "region", "state", "node")
FIGURES = (
    *("pid", "life", "restarts", "steps/s", "tokens/s", "MFU", "step", "behind", "tokens", "loss", "lr", "grad norm"),
    *("last merge", "merges", "refused", "gap"),
)


def watch(client: Client, job: str, console: Console, observer: Observer | None = None) -> Job:
    """Show the job until it has ended, and return its final state.

    ``observer`` gets each state before it is drawn; what it returns is shown from then on. KeyboardInterrupt passes.
    """
    poller = Poller(asking(client, job), observer)
    if not console.is_terminal:
        return _watch_lines(poller, console)
    current = poller()
    with Live(render(current, poller.note), console=console, refresh_per_second=4, transient=False) as live:
        while not current.state.final:
            time.sleep(POLL_S)
            current = poller()
            live.update(render(current, poller.note))
    return current


def follow(client: Client, job: str, emit: Callable[[Job], None]) -> Job:
    """Pass the job to ``emit`` at every poll until it has ended, and return its final state."""
    poller = Poller(asking(client, job))
    while True:
        current = poller()
        emit(current)
        if current.state.final:
            return current
        time.sleep(2 * POLL_S)


def asking(client: Client, job: str) -> Callable[[], Job]:
    """Return a function that gets the job. `latest` is resolved once, so that the same job is watched to its end."""
    name = job

    def ask() -> Job:
        nonlocal name
        current = client.job(name)
        name = current.job
        return current

    return ask


def _watch_lines(poller: Poller[Job], console: Console) -> Job:
    shown_at, shown_states, shown_note = -LINE_EVERY_S, None, None
    while True:
        current = poller()
        states = (current.state, current.reason, [island.state for island in current.islands])
        due = time.monotonic() - shown_at >= LINE_EVERY_S
        if due or states != shown_states:
            console.print(line(current), soft_wrap=True, highlight=False, markup=False)
            shown_at, shown_states = time.monotonic(), states
        if poller.note and poller.note != shown_note and not poller.note.startswith("no answer"):
            console.print(poller.note, soft_wrap=True, highlight=False, markup=False)
            shown_note = poller.note
        if current.state.final:
            return current
        time.sleep(POLL_S)


# ── drawing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def render(job: Job, note: str | None = None) -> RenderableType:
    """Return the whole view: headline, progress to the budget, islands, and what blocks the job."""
    parts: list[RenderableType] = [_headline(job), _progress(job), island_table(job)]
    if words := step_words(job):
        parts.append(Text(words, style="dim"))
    if job.wire:
        parts.append(Text(wire_words(job), style="dim"))
    if words := mixture_words(job):
        parts.append(Text(words, style="dim"))
    if job.settings is not None and job.settings.changed:
        parts.append(Text(settings_words(job), style="dim"))
    parts += [Text(words, style="yellow") for words in warning_lines(job)]
    if job.queue_position:
        parts.append(Text(queue_place(job), style="bold yellow"))
    parts += [Text(words, style="bold yellow") for words in (job.pause_reason, job.checkpoint.trouble) if words]
    parts += [Text(words, style="bold yellow") for words in helper_words(job)]
    parts += [Text(f"node {one.node} is {cordon_words(one)}", style="yellow") for one in job.cordoned_nodes]
    parts += [Text(words, style=style) for style, words in shard_words(job)]
    if job.reason and job.state.final:
        parts.append(Text(job.reason, style="bold red" if job.state == "failed" else "default"))
    if note:
        parts.append(Text(note, style="cyan"))
    return Panel(Group(*parts), title=Text(job.job, style="bold"), title_align="left", border_style="dim")


def island_table(job: Job) -> Listing:
    words, figures = ("island", "region", "state"), ("life", "tokens/s", "tokens", "loss", "last merge")
    table = Listing(*words, *figures, "why", prose=("why",), right=figures, padding=(0, 1, 0, 0), expand=True)
    # a line for each island on a terminal, so the reason gets what is left; `atoll status | cat` prints all of it
    why = table.columns[-1]
    why.ratio, why.no_wrap, why.overflow = 1, True, "ellipsis"
    for island in job.islands:
        table.add_row(
            island.island,
            island.region,
            Text(_state(island), style=STATE_STYLES.get(island.state, "default")),
            str(island.incarnation or "–"),
            _number(island.tokens_per_second, ",.0f"),
            f"{island.tokens_total:,}",
            _number(island.loss, ".3f"),
            last_merge(island, job),
            Text(_wrong(island), style="bold red") if _wrong(island) else Text(_why(island), style="dim"),
        )
    return table


def last_merge(island: Island, job: Job) -> str:
    """Return how long ago the island's work was last merged; for an ended job, how long before the end."""
    if island.last_merge_after_s is None or job.after_s is None:
        return "–"
    seconds = max(0.0, job.after_s - island.last_merge_after_s)
    if not job.state.final:
        return f"{seconds:.0f} s ago"
    return "at the end" if seconds < 1 else f"{seconds:.0f} s before the end"


def settings_words(job: Job) -> str:
    """Return the settings that `atoll set` changes, as they are now. The job says them."""
    assert job.settings is not None
    now = job.settings
    grace = "for everyone" if now.grace is None else f"{now.grace:g} steps"
    lr = f"lr {now.lr_ratio:g} of the specification's"
    return f"settings now: {lr}, quorum {now.quorum}, grace {grace}, interval {now.interval} steps"


def step_words(job: Job) -> str:
    """Return the range of what islands say of their last steps; empty if they do not."""
    figures = {
        "steps/s": [(island.steps_per_second, _number(island.steps_per_second, ".1f")) for island in job.islands],
        "gradient norm": [(island.gradient_norm, _number(island.gradient_norm, ".3g")) for island in job.islands],
        "MFU": [(island.mfu_ratio, _percent(island.mfu_ratio)) for island in job.islands],
    }
    ranges = []
    for name, pairs in figures.items():
        values = sorted((value, words) for value, words in pairs if value is not None)
        if values:
            ranges.append(f"{name} {' to '.join(dict.fromkeys((values[0][1], values[-1][1])))}")
    return "; ".join(ranges)


def mixture_words(job: Job) -> str:
    """Return the routers' distance and the load of experts; empty for a model without experts."""
    mixture = job.statistics.get("mixture") or {}
    islands, routers = (mixture.get("islands") or {}).values(), mixture.get("routers") or ()
    words = []
    if shares := [own["expert_share_max"] for own in islands]:
        evenness = min(own["expert_entropy_ratio"] for own in islands)
        words.append(f"experts: largest share {max(shares):.1%}, entropy {evenness:.1%} of even")
    if travel := math.fsum(own["travel"] for own in routers):
        distance = math.fsum(own["distance"] for own in routers)
        words.append(f"routers: {distance / travel:.2f} of their travel apart")
    if merged := [own for own in islands if own["adoptions"]]:
        times = sum(own["adoptions"] for own in merged)
        change = math.fsum(own["adoptions"] * (own["loss_after"] - own["loss_before"]) for own in merged) / times
        words.append(f"loss {change:+.4f} at an adoption, mean of {times:,}")
    return "; ".join(words)


def wire_words(job: Job) -> str:
    """Return the codecs, and the bytes that all lines carried since the synchroniser started."""
    words = f"wire: {job.wire.get('up', '–')} up, {job.wire.get('down', '–')} down"
    if not (lines := [island.line for island in job.islands if island.line is not None]):
        return words
    up, down = sum(line.up_bytes for line in lines), sum(sum(line.down_bytes.values()) for line in lines)
    queued = sum(line.queued_fragments for line in lines)
    waiting = f"; {queued} fragments queued for islands" if queued else ""
    return f"{words}; {up / 1e6:,.1f} MB up, {down / 1e6:,.1f} MB down{waiting}"


def helper_words(job: Job) -> list[str]:
    """Return a sentence for each helper process of the job that has a problem."""
    return [f"{helper.name}: {helper.reason}" for helper in job.helpers if helper.reason]


def shard_words(job: Job) -> list[tuple[str, str]]:
    """Return a line for each shard of several, and its style."""
    return [
        (
            "bold yellow" if one.reason else "dim",
            f"shard {one.shard} on {one.node or 'no node'}: {one.condition}, fragments "
            f"{', '.join(map(str, one.fragments)) or '(none yet)'}, {one.byte_count / 1e6:,.1f} MB"
            + (f"; {one.reason}" if one.reason else ""),
        )
        for one in job.shards
    ]


def queue_place(job: JobSummary) -> str:
    """Return the place of a queued job, and why it waits."""
    return f"queued as number {job.queue_position}: {job.reason}"


def _wrong(island: Island) -> str:
    """Return the problem with the island, its contributions or its line; empty if there is none."""
    return (
        (island.reason if island.overdue_s else "")
        or island.flag
        or (island.line.trouble if island.line is not None else None)
        or ""
    )


def _state(island: Island) -> str:
    return "spare" if island.spare else _state_words(island.state)


def _state_words(state: str) -> str:
    return "waiting for a node" if state == "waiting" else state.replace("_", " ")


def _why(island: Island) -> str:
    return "" if island.state == "training" else island.reason


def line(job: Job) -> str:
    """Return the view in one line."""
    if job.queue_position:
        return queue_place(job)
    percent = 100 * job.tokens_trained / job.token_budget
    islands = " · ".join(
        f"{island.island} {_state(island)}" + (f" {island.steps_per_second:.1f}/s" if island.steps_per_second else "")
        for island in job.islands
    )
    paused = "".join(f"  {words}" for words in (job.pause_reason, job.checkpoint.trouble, *helper_words(job)) if words)
    share = f"{percent:.0f} %" + ("" if job.eta_s is None else f", {_clock(job.eta_s)} left")
    return (
        f"{_clock(job.after_s)}  {job.state}  {job.tokens_trained:,} of {job.token_budget:,} tokens ({share})  "
        f"version {job.global_version}  loss {_number(job.loss, '.3f')} (train {_number(job.loss_train, '.3f')})  "
        f"goodput {_percent(job.goodput_ratio)}  {islands}{paused}"
    )


def newest_advice(client: Client, job: Job) -> str | None:
    """Ask what the job's autopilot said at its newest look, as a line; None if it has none, or has not looked yet."""
    try:
        looks = client.advice(job.job).looks
    except NotFound:  # a service of an earlier build
        return None
    return f"autopilot: {looks[0].outcome} (`atoll advise {job.job}`)" if looks else None


def cordon_words(cordon: NodeCordon) -> str:
    """Return who cordoned a node and why, and until when."""
    why = f": {cordon.reason}" if cordon.reason else ""
    left = cordon.expires_at - time.time() if cordon.expires_at is not None else None
    until = "" if left is None else f"; for {_clock(max(0.0, left))} more"
    idle = "" if cordon.in_force else "; not in force, because its group has no other node that can be used"
    return f"cordoned by {cordon.cordoned_by}{why}{until}{idle}"


def _headline(job: Job) -> Table:
    grid = Table.grid(expand=True)
    facts = {
        "": f"{job.state} {_clock(job.after_s)}",
        "version": f"{job.global_version:,}",
        "loss": _number(job.loss, ".3f"),
        "train": _number(job.loss_train, ".3f"),
        "goodput": _percent(job.goodput_ratio),
    }
    if (rate := max((island.learning_rate or 0.0 for island in job.islands), default=0.0)) > 0.0:
        facts["lr"] = f"{rate:.2g}"
    grid.add_row(*(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in facts.items()))
    for column in grid.columns:
        column.no_wrap = True
    return grid


def _progress(job: Job) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    done = min(job.tokens_trained, job.token_budget)
    bar = ProgressBar(total=job.token_budget, completed=done)
    left = "" if job.eta_s is None else f", {_clock(job.eta_s)} left"
    grid.add_row(bar, f"{job.tokens_trained:,} of {job.token_budget:,} tokens{left}")
    return grid


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{100 * ratio:.1f} %"


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "–:––"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def wide_island_table(job: Job) -> Listing:
    """A line for each island.

    ``behind`` is its staleness in logical steps, against the furthest that trains; ``gap`` its longest time between steps.
    """
    table = Listing(*WORDS, *FIGURES, "why", prose=("why",), right=FIGURES, padding=(0, 2, 0, 0))
    furthest = max((island.step for island in job.islands if island.state == "training"), default=0)
    for island in job.islands:
        table.add_row(*_words(island), *_figures(island, job, furthest), island.reason)
    return table


def _words(island: Island) -> tuple[str, ...]:
    return island.island, island.node_group, island.region, _state_words(island.state), island.node or "–"


def _figures(island: Island, job: Job, furthest: int) -> tuple[str, ...]:
    statistics = job.statistics
    return (
        _number(island.pid, "d"),
        str(island.incarnation or "–"),
        str(island.restarts),
        _number(island.steps_per_second, ".2f"),
        _number(island.tokens_per_second, ",.0f"),
        _percent(island.mfu_ratio),
        f"{island.step:,}",
        f"{furthest - island.step:,}" if island.state == "training" else "–",
        f"{island.tokens_total:,}",
        _number(island.loss, ".3f"),
        _number(island.learning_rate, ".3g"),
        _number(island.gradient_norm, ".3g"),
        last_merge(island, job),
        str(_of(statistics, "merges_per_island", island) or 0),
        str(_of(statistics.get("traffic", {}), "refused", island) or 0),
        "–" if (gap := _of(statistics, "gaps_max_s", island)) is None else f"{gap:.2f} s",
    )


def _of(statistics: Mapping[str, Any], figure: str, island: Island) -> Any:
    """The island's own part of a figure; None where the job does not tell it."""
    return statistics.get(figure, {}).get(island.island)


def lines_that_matter(report: Mapping[str, Any]) -> list[str]:
    """Return the loss with that of a unigram model, goodput with its losses, the slowest recovery with its parts.

    And remarks on the text, if there are any.
    """
    cost = cost_lines(report["cost"])[:1] if report.get("cost") else []
    return [_loss(report), *_text(report), _goodput(report), _recovery(report), *cost]


def cost_lines(cost: Mapping[str, Any]) -> list[str]:
    """Return what a job has cost and will cost, by node group and by cause of badput."""
    currency, forecast = cost["currency"], cost.get("forecast")
    per_million = cost["per_merged_million_tokens"]
    rate = f"; {money(per_million, currency)} per merged million tokens" if per_million is not None else ""
    lines = [f"cost      {money(cost['so_far'], currency)}{rate}"]
    if forecast:
        between = (forecast["low"], forecast["high"])
        spread = (
            " to ".join(money(bound, currency) for bound in between) if None not in between else "spread not known yet"
        )
        lines.append(f"forecast  {money(forecast['expected'], currency)} at the end of the budget ({spread})")
    lines += [f"group     {group}: {money(value, currency)}" for group, value in cost["node_groups"].items()]
    lines += [f"badput    {cause}: {money(value, currency)}" for cause, value in cost["badput"].items()]
    if cost["unpriced"]:
        lines.append(f"unpriced  {', '.join(cost['unpriced'])}: not in these figures; see --prices of the service")
    return lines


def warning_lines(job: Job) -> list[str]:
    """Return a line for each probable mistake in the job's specification."""
    return [f"warning: {warning.path}: {warning.message} {warning.remedy}".rstrip() for warning in job.warnings]


def _loss(report: Mapping[str, Any]) -> str:
    final, unigram = report.get("loss_final"), report.get("loss_unigram")
    if final is None:
        return "loss      not evaluated"
    initial = report.get("loss_initial")
    against = f", {initial:.3f} at the start" if initial is not None else ""
    against += f", against {unigram:.3f} of a unigram model" if unigram is not None else ""
    evaluations = report.get("evaluations") or {}
    bits = evaluations.get("bits_per_byte")
    per_byte = f" ({bits:.3f} bits per byte)" if bits is not None else ""
    by_source = ", ".join(f"{one['source']} {one['loss']:.3f}" for one in evaluations.get("sources") or ())
    of_sources = f" ({by_source})" if by_source else ""
    merged, trained = report["tokens_merged"], report["tokens_trained"]
    if pairs := evaluations.get("preference"):
        shown = f"{pairs['accuracy']:.0%} of pairs told apart, margin {pairs['margin']:.3f}"
        return (
            f"loss      {final:.3f} nats per pair held out ({shown}); {merged:,} of {trained:,} trained tokens merged"
        )
    measured = f"{final:.3f} nats per token held out{per_byte}{of_sources}{against}"
    return f"loss      {measured}; {merged:,} of {trained:,} trained tokens merged"


def _text(report: Mapping[str, Any]) -> list[str]:
    remark = (report.get("data_flaws") or {}).get("remark")
    return [f"text      {remark}"] if remark else []


def _goodput(report: Mapping[str, Any]) -> str:
    ratio, badput = report.get("goodput_ratio"), report.get("badput_seconds") or {}
    total = (report.get("island_seconds") or {}).get("total")
    if ratio is None or not total:
        return "goodput   nothing was placed"
    causes = sorted(badput.items(), key=lambda item: -item[1])
    shares = [f"{cause.replace('_', ' ')} {100 * spent / total:.1f} %" for cause, spent in causes[:CAUSES_MAX]]
    if rest := sum(spent for _, spent in causes[CAUSES_MAX:]):
        shares.append(f"other {100 * rest / total:.1f} %")
    lost = f"; lost to {', '.join(shares)}" if shares else ""
    return f"goodput   {100 * ratio:.1f} % of {total:,.0f} island-seconds{lost}"


def _recovery(report: Mapping[str, Any]) -> str:
    slowest = report.get("recovery_s")
    if not slowest:
        lost = report.get("recoveries") or []
        if not lost:
            return "recovery  no island was lost"
        return f"recovery  {lost[0]['island']} was lost and had not contributed again when the job ended"
    parts = " + ".join(f"{part.replace('_', ' ')} {slowest[part]:.2f}" for part in PARTS)
    sentence = f"recovery  {slowest['island']} was back in {slowest['total']:.2f} s = {parts}"
    gap, step = slowest.get("others_gap_max_s"), report.get("step_time_median_s")
    return (
        sentence
        if gap is None or step is None
        else f"{sentence}; meanwhile the others' longest gap was {gap:.2f} s, at {step:.2f} s a step"
    )
