"""``make wan-lab``: the same training on the same lines, held together by all-reduces and by the service, side by side.

    python -m tests.wan.lab [quick|full|small] [--only METHOD …] [--megabits RATE …] [--no-loss] [--folder FOLDER] [--json]

Needs root, for network namespaces, and iproute2, util-linux and gcc. Regions, lines, processes and the cluster are removed
at the end, also by Ctrl-C; what was measured until then is kept in the folder: outcome.json, tables.md, utilisation.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tests.bench.goals import exit_code, told
from tests.wan.lab import losses
from tests.wan.lab.fleets import Fleet, archipelago_of, collective_fleet, lines_of, service_fleet
from tests.wan.lab.outcome import DATA_PARALLEL, Outcome, goals, markdown, tables
from tests.wan.lab.picture import picture
from tests.wan.lab.plan import OURS, SETTINGS, Plan
from tests.wan.lab.windows import Window, bystanders, window, window_s_by_formula

PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
PROGRAMS |= {"gcc": "build-essential"}


def refusal() -> str | None:
    """Why this machine cannot run the lab, and what to do about it."""
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if os.geteuid() != 0:
        return "The lab makes network namespaces, which needs root: run it as root (sudo make wan-lab)."
    if missing:
        return f"The lab needs packages that are not here: apt-get install {' '.join(missing)}"
    if not Path("/dev/net/tun").exists():
        return "The lab's long lines need /dev/net/tun: modprobe tun, or give the container --device /dev/net/tun."
    return None


def measure(outcome: Outcome, only: Sequence[str], folder: Path, *, with_loss: bool) -> None:
    """All that the plan has, into ``outcome``, which is kept after each window."""
    plan = outcome.plan
    collectives = [method for method in plan.collectives if not only or method in only]
    first = lines_of(plan, max(plan.megabits), plan.round_trip_s)
    for method in collectives:
        with collective_fleet(method, plan, first) as fleet:
            _sweep(fleet, outcome, folder, strike=method == DATA_PARALLEL)
    codecs = [codec for codec in plan.codecs if not only or OURS + codec in only or codec in only]
    if codecs:
        with (
            tempfile.TemporaryDirectory(prefix="atoll-lab-") as home,
            archipelago_of(plan, first, Path(home)) as archipelago,
        ):
            for codec in codecs:
                with service_fleet(codec, plan, archipelago, first) as fleet:
                    _sweep(fleet, outcome, folder, strike=codec == codecs[-1])
                for name, line in first.items():
                    archipelago.regions.set_line(name, line)
            for codec in codecs if with_loss else ():
                _add(losses.of_service(plan, codec, archipelago), outcome, folder)
    if with_loss:
        for curve in losses.of_collectives(plan, collectives):
            _add(curve, outcome, folder)


def _add(curve: losses.Curve, outcome: Outcome, folder: Path) -> None:
    outcome.curves.append(curve)
    best = min((loss for _, loss in curve.points), default=float("nan"))
    print(f"{curve.method:18} nano: {curve.step_s:.2f} s a step, best held-out loss {best:.4f}", file=sys.stderr)
    keep(outcome, folder)


def _sweep(fleet: Fleet, outcome: Outcome, folder: Path, *, strike: bool) -> None:
    """From wide lines to narrow ones; then far ones and lossy ones, for one codec only; then one line is struck."""
    plan = outcome.plan
    for megabits in _affordable(fleet.method, outcome):
        outcome.windows.append(window(fleet, plan, megabits, plan.round_trip_s))
        _say(outcome.windows[-1], outcome, folder)
    for round_trip_s in plan.round_trips_s if strike or not fleet.hub else ():
        if window_s_by_formula(fleet.method, plan, plan.aside_megabits, round_trip_s) <= plan.window_max_s:
            outcome.far.append(window(fleet, plan, plan.aside_megabits, round_trip_s))
            _say(outcome.far[-1], outcome, folder)
    for ratio in plan.frame_loss_ratios if strike or not fleet.hub else ():
        outcome.lossy.append(window(fleet, plan, plan.aside_megabits, plan.round_trip_s, ratio))
        _say(outcome.lossy[-1], outcome, folder)
    if strike and plan.round_trips_s:
        for cut in (False, True):
            outcome.strikes.append(bystanders(fleet, plan, plan.aside_megabits, cut=cut))
            one = outcome.strikes[-1]
            print(f"{one.method:18} one line {one.what}: others' pace {one.pace_ratio:.3f}", file=sys.stderr)
            keep(outcome, folder)


def _affordable(method: str, outcome: Outcome) -> Iterable[float]:
    plan = outcome.plan
    for megabits in sorted(plan.megabits, reverse=True):
        takes_s = window_s_by_formula(method, plan, megabits, plan.round_trip_s)
        if takes_s <= plan.window_max_s:
            yield megabits
        else:
            outcome.left_out.append(f"{method} at {megabits:g} Mbit/s: two exchanges would take {takes_s:.0f} s")


def _say(one: Window, outcome: Outcome, folder: Path) -> None:
    lost = f", {one.frame_loss_ratio:.1%} lost" if one.frame_loss_ratio else ""
    print(
        f"{one.method:18} {one.megabits:8g} Mbit/s {one.round_trip_s * 1e3:4g} ms{lost}: utilisation {one.utilisation:.3f} "
        f"(formula {one.formula_utilisation:.3f}), {one.line_bytes_per_token:,.0f} bytes a token, "
        f"{one.merged_ratio:.0%} merged",
        file=sys.stderr,
    )
    keep(outcome, folder)


def keep(outcome: Outcome, folder: Path) -> None:
    """Everything so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "outcome.json").write_text(json.dumps(outcome.plain(), indent=1) + "\n")
    (folder / "tables.md").write_text(markdown(outcome))
    if outcome.windows:
        (folder / "utilisation.svg").write_text(picture(outcome) + "\n")


def show(outcome: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    for title, (head, *rows) in tables(outcome):
        table = Table(*head, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in outcome.left_out:
        console.print(f"left out: {line}", highlight=False)
    for goal in goals(outcome):
        console.print(f"{goal.figure}: {goal.value:.4g} ({goal})", highlight=False)


def _interrupt(*_: object) -> None:
    """Once; what tidies up after it is not to be interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.wan.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("setting", nargs="?", default="quick", choices=tuple(SETTINGS))
    parser.add_argument("--only", nargs="+", default=[], metavar="METHOD", help="methods or codecs")
    parser.add_argument(
        "--megabits",
        nargs="+",
        type=float,
        metavar="RATE",
        help="only these rates, without far, lossy and struck lines",
    )
    parser.add_argument("--no-loss", action="store_true", help="without nano's real training")
    parser.add_argument("--folder", type=Path, help="for what was measured; by default runs/wan-lab/ and the time")
    parser.add_argument("--json", action="store_true", help="the outcome as JSON instead of tables")
    options = parser.parse_args(arguments)
    if (why := refusal()) is not None:
        print(why, file=sys.stderr)
        return 2
    folder = options.folder or Path("runs", "wan-lab", time.strftime("%Y-%m-%d-%H%M%S"))
    plan: Plan = SETTINGS[options.setting]
    if options.megabits:
        plan = replace(plan, megabits=tuple(options.megabits), round_trips_s=(), frame_loss_ratios=())
    outcome = Outcome(plan)
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    interrupted = False
    try:
        measure(outcome, options.only, folder, with_loss=plan.loss_steps > 0 and not options.no_loss)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted; what was measured is kept", file=sys.stderr)
    keep(outcome, folder)
    if options.json:
        print(json.dumps(outcome.plain(), indent=1))
    else:
        show(outcome)
        print(f"kept in {folder}")
    judged = goals(outcome)
    print(told(judged), file=sys.stderr if options.json else sys.stdout)
    return 130 if interrupted else exit_code(judged)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
