"""The cost of keeping a merge: writing and syncing one fragment's Θ and momentum to this disk before the merge is
published.

It must fit into τ inner steps (``overlap_steps``, its default), because a merge is published that much later. Judged are
``small``'s merges with the default durability (sync): the median, the worst, and all fragments back to back, as after a
disk had refused for a while. The inner step is ``small``'s on this machine, in float32, the faster of two; on an
accelerator it is shorter, and ``--step-seconds`` sets it. With ``--small`` all of this is for nano.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from learners import jax_trainer
from orchestrator.core.vocabulary import Epoch, FragmentId, Version
from orchestrator.parameters import tensors
from orchestrator.parameters.journal import Facts, Journal
from orchestrator.parameters.outer_state import FragmentState
from orchestrator.specification.config import parse_job
from orchestrator.specification.sections import SynchroniserSection
from tests.bench.goals import Goal, at_most
from tests.bench.options import Options

FRAGMENT_PARAMETERS = {"nano": 106_000, "small": 15_800_000}
"""Parameters of one of eight fragments of the presets of ``learners.model`` (0.85 and 126 million parameters)."""
VERSIONS = 3
"""Versions written of each fragment."""
KNOBS = SynchroniserSection()


def main(asked: Options) -> list[Goal]:
    judged = "nano" if asked.small else "small"
    step_s = step_seconds(judged) if asked.step_seconds is None else asked.step_seconds
    slack_s = KNOBS.overlap_steps * step_s
    told = f"{KNOBS.overlap_steps} steps of {step_s:.3f} s, {'measured' if asked.step_seconds is None else 'as told'}"
    print(f"journal    the slack of {judged}: {slack_s:.3f} s ({told})")
    goals = []
    for name in [judged] if asked.small else FRAGMENT_PARAMETERS:
        for kind, merges_max in (("sync", 0), ("async", VERSIONS * KNOBS.fragments)):
            one, all_of_them, size = kept(FRAGMENT_PARAMETERS[name], merges_max)
            figures = {"median": median(one), "longest": max(one), "all fragments back to back": max(all_of_them)}
            row = {figure: f"{figure} {1000 * seconds:.1f} ms" for figure, seconds in figures.items()}
            if name == judged and kind == "sync":
                found = {figure: at_most(f"journal {figure} s", value, slack_s) for figure, value in figures.items()}
                goals += found.values()
                row = {figure: f"{text} ({found[figure]})" for figure, text in row.items()}
            print(f"journal    {name:<6} {kind:<6} {size / 1e6:6.1f} MB a merge: {', '.join(row.values())}")
    return goals


def step_seconds(preset: str) -> float:
    """Return the seconds of one inner step of this model here, without other load."""
    model = {"preset": preset, "compute_dtype": "float32"}
    document = {"model": model, "islands": [{"node_group": "here"}], "budget": {"steps": 10**6}}
    trainer = jax_trainer.create(parse_job(document).model_dump(mode="json"), 0, 1)
    trainer.warm_up()
    took = []
    for step in range(2):
        began = perf_counter()
        trainer.step(step)
        took.append(perf_counter() - began)
    return min(took)


def kept(parameter_count: int, merges_max: int) -> tuple[list[float], list[float], int]:
    """Return the seconds of every merge, those of every round through all fragments, and the bytes of a merge."""
    values = {"w": np.random.default_rng(1).standard_normal(parameter_count, np.float32)}
    digest = tensors.digest(values)
    one, rounds = [], []
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=Path.cwd()) as folder:
        journal = Journal(Path(folder), merges_max=merges_max)
        for version in range(VERSIONS):
            began_all = perf_counter()
            for fragment in range(KNOBS.fragments):
                facts = Facts(FragmentId(fragment), Version(version), 0, Epoch(1), digest, digest, (), 0.0)
                state = FragmentState(Version(version), values, values, digest)
                began = perf_counter()
                journal.append(facts, state)
                one.append(perf_counter() - began)
            rounds.append(perf_counter() - began_all)
    return one, rounds, 2 * values["w"].nbytes
