"""Which outer optimizer to have by default: held-out loss by outer rate and momentum. No part of ``make bench``.

``python -m tests.bench.outer_defaults FILE [--stage NAME …]`` trains what ``STAGES`` lists, in virtual time, one run after
another, and appends a line to FILE for each. Runs that FILE already holds are skipped, so the command can be stopped and
started again. ``--lost-momentum 3`` measures what the loss of momentum costs, with three seeds. ``--table`` trains nothing
and prints what FILE holds. All stages take about an hour of one core.

Every other setting is a default of the specification, except the inner learning rate, which is near the best that is known
for the model and optimizer, and the windows where a stage says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

from learners import jax_trainer
from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.laboratory.multiplex import MultiplexedJob
from orchestrator.parameters.journaled_store import Inputs
from orchestrator.parameters.outer_state import OuterState
from orchestrator.specification.config import parse_job

CANDIDATES = ((0.7, 0.9), (0.5, 0.3), (0.7, 0.6), (0.6, 0.5), (1.0, 0.0), (0.4, 0.8))
FINALISTS = ((0.7, 0.9), (0.5, 0.3), (0.6, 0.5))
INNER_LR = {("nano", "adamw"): 4e-3, ("nano", "muon"): 8e-3, ("micro", "adamw"): 2e-3, ("micro", "muon"): 4e-3}
KINDS = ("adamw", "muon")
WIDE, NARROW = (4, 3.0), (2, 1.0)
"""τ and the cap of the grace window, in steps. With WIDE all islands are in a merge if a publication travels for a step."""


@dataclass(frozen=True)
class Run:
    """One job. ``windows`` are τ and the cap of the grace window; a publication travels for ``transfer_steps``."""

    preset: str
    kind: str
    interval_steps: int
    fragments: int
    outer: tuple[float, float]
    islands: int = 2
    steps: int = 192
    seed: int = 0
    windows: tuple[int, float] = WIDE
    transfer_steps: float = 1.0
    averaging: str = "radial"

    @property
    def key(self) -> str:
        return json.dumps(asdict(self))

    def document(self) -> dict[str, Any]:
        (lr, momentum), (overlap, cap) = self.outer, self.windows
        merges = self.fragments * self.steps // self.interval_steps
        return {
            "model": {"preset": self.preset, "compute_dtype": "float32"},
            "training": {
                "batch_size": 4,
                "inner_optimizer": {"kind": self.kind, "lr": INNER_LR[self.preset, self.kind]},
            },
            "synchroniser": {
                "fragments": self.fragments,
                "interval_steps": self.interval_steps,
                "overlap_steps": overlap,
                "grace_cap_steps": cap,
                "averaging": self.averaging,
                "outer_optimizer": {"kind": "nesterov", "lr": lr, "momentum": momentum},
            },
            "islands": [{"node_group": "island", "count": self.islands}],
            "budget": {"steps": self.steps},
            "evaluation": {"every_merges": max(1, merges // 4), "sequences": 128},
            "seed": self.seed,
        }


def _nano() -> Iterator[Run]:
    """Yield runs in the budget of a first job, 196,000 tokens: all candidates with H = 24, and fewer around it."""
    for fragments, kind, outer in itertools.product((8, 24), KINDS, CANDIDATES):
        yield Run("nano", kind, 24, fragments, outer)
    for interval, (fragments, kind, some) in itertools.product(
        (6, 48),
        ((8, "adamw", CANDIDATES), (8, "muon", FINALISTS), (24, "adamw", FINALISTS), (24, "muon", FINALISTS)),
    ):
        for outer in some:
            yield Run("nano", kind, interval, fragments, outer)


def _seeds() -> Iterator[Run]:
    """Yield runs of four islands with two seeds."""
    for seed, kind, outer in itertools.product((0, 1), KINDS, FINALISTS):
        yield Run("nano", kind, 24, 8, outer, islands=4, steps=240, seed=seed)


def _long() -> Iterator[Run]:
    """Yield runs of 256 rounds: what wins in a short run may lose here."""
    for outer in (*FINALISTS, (0.7, 0.0)):
        yield Run("nano", "adamw", 6, 8, outer, steps=1536)


def _micro() -> Iterator[Run]:
    for outer in FINALISTS:
        yield Run("micro", "adamw", 24, 24, outer, steps=144)


def _micro_more() -> Iterator[Run]:
    for (kind, fragments), outer in itertools.product((("muon", 24), ("adamw", 8)), FINALISTS):
        yield Run("micro", kind, 24, fragments, outer, steps=144)


def _windows() -> Iterator[Run]:
    for transfer, windows in itertools.product((1.0, 0.25), (NARROW, WIDE)):
        yield Run("nano", "adamw", 24, 8, (0.5, 0.3), islands=4, windows=windows, transfer_steps=transfer)


STAGES = {
    "nano": _nano,
    "micro": _micro,
    "long": _long,
    "seeds": _seeds,
    "windows": _windows,
    "micro-more": _micro_more,
}


def trained(run: Run) -> dict[str, Any]:
    began = process_time()
    job = MultiplexedJob(
        parse_job(run.document()), jax_trainer.create, transfer_steps=run.transfer_steps, speed_spread=0.1
    )
    for _ in job.run():
        pass
    outcome = job.outcome
    return {
        "run": asdict(run),
        "loss": round(outcome.loss, 4),
        "curve": [[tokens, round(loss, 4)] for tokens, loss in outcome.curve],
        "islands_per_merge": round(outcome.statistics["contributors_mean"], 2),
        "cpu_s": round(process_time() - began),
    }


def lost_momentum(seed: int) -> tuple[float, float]:
    """Return the last held-out loss of a job that keeps its momentum, and of one that loses it half way."""
    run = Run("nano", "adamw", 24, 8, (0.6, 0.5), islands=4, steps=240, seed=seed)
    kept = trained(run)["loss"]
    merge, half = OuterState.merge, run.steps // run.interval_steps // 2

    def forgetting(
        outer: OuterState, fragment: FragmentId, version: Version, inputs: Inputs, lr_ratio: float = 1.0
    ) -> str:
        if version == half:
            for array in outer.state(fragment).momentum.values():
                array.flags.writeable = True
                array[:] = 0.0
        return merge(outer, fragment, version, inputs, lr_ratio)

    with patch.object(OuterState, "merge", forgetting):
        return kept, trained(run)["loss"]


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def missing(runs: Iterable[Run], held: list[dict[str, Any]]) -> Iterator[Run]:
    known = {json.dumps(result["run"]) for result in held}
    return (run for run in runs if run.key not in known)


def table(held: list[dict[str, Any]]) -> str:
    """Return a table with a row for each setting and a column for each outer optimizer, the best of a row in bold."""
    columns = list(dict.fromkeys(tuple(result["run"]["outer"]) for result in held))
    rows: dict[tuple[Any, ...], dict[tuple[float, ...], float]] = {}
    for result in held:
        setting = tuple(str(value) for name, value in result["run"].items() if name != "outer")
        rows.setdefault(setting, {})[tuple(result["run"]["outer"])] = result["loss"]
    names = [name for name in held[0]["run"] if name != "outer"] if held else []
    lines = ["| " + " | ".join([*names, *(f"{lr:g}, {momentum:g}" for lr, momentum in columns)]) + " |"]
    lines.append("|" + "---|" * (len(names) + len(columns)))
    for setting, losses in rows.items():
        best = min(losses.values())
        cells = [
            "" if (loss := losses.get(c)) is None else f"**{loss}**" if loss == best else f"{loss}" for c in columns
        ]
        lines.append("| " + " | ".join([*setting, *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.bench.outer_defaults", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON lines, a run each; appended to")
    parser.add_argument("--stage", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--table", action="store_true", help="print what the file holds")
    parser.add_argument("--lost-momentum", type=int, metavar="SEEDS", help="train with it, and with it lost half way")
    asked = parser.parse_args()
    if asked.lost_momentum:
        for seed in range(asked.lost_momentum):
            kept, lost = lost_momentum(seed)
            print(
                f"seed {seed}: {kept} with momentum, {lost} with momentum lost half way: {lost / kept - 1:+.2%}",
                flush=True,
            )
        return
    if asked.table:
        print(table(results(asked.file)))
        return
    for stage in asked.stage:
        for run in missing(STAGES[stage](), results(asked.file)):
            result = trained(run)
            with asked.file.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(stage, result["loss"], result["islands_per_merge"], f"{result['cpu_s']} s", run.key, flush=True)


if __name__ == "__main__":
    main()
