"""The cost of keeping a merge: writing and syncing one fragment's Θ and momentum to this disk before the merge is
published.

It must fit into τ inner steps (``overlap_steps``, its default), because a merge is published that much later. Judged are
``small``'s merges with the default durability (sync): the median, the worst, and all fragments back to back, as after a
disk had refused for a while. The inner step is ``small``'s on this machine, in float32, the faster of two; on an
accelerator it is shorter, and ``--step-seconds`` sets it. With ``--small`` all of this is for nano.

``mirror-cost`` counts the puts and bytes of the mirrored log for merges of eight islands in int4, in a folder, and says what
they cost in an hour at 1B and 8B parameters, with a step of a second unless ``--step-seconds`` says otherwise. The prices
are Amazon's list prices for S3 Standard in us-east-1 of 2025. They are set with ``ATOLL_BENCH_PUT_USD``, of 1,000 puts, and
``ATOLL_BENCH_GB_MONTH_USD``. Bytes into a store cost nothing there.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from learners import jax_trainer
from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import CloseReason, Epoch, FragmentId, IslandId, PayloadId, Version, WeightedPayload
from orchestrator.host.job_files import mirror
from orchestrator.parameters import tensors, wire_format
from orchestrator.parameters.journal import Facts, Journal
from orchestrator.parameters.journaled_store import MERGES_PER_STATE
from orchestrator.parameters.outer_optimizer import Nesterov
from orchestrator.parameters.outer_state import Averaging, FragmentState, OuterState, OuterStep, initial_state
from orchestrator.parameters.shard import Held, ParameterShard
from orchestrator.specification.config import parse_job
from orchestrator.specification.sections import SynchroniserSection
from orchestrator.system.disk import LocalDisk
from orchestrator.system.mirror import PIECE_BYTES, JobObjects
from orchestrator.system.object_store import admit, open_store
from tests.bench.goals import Goal, at_most
from tests.bench.options import Options

FRAGMENT_PARAMETERS = {"nano": 106_000, "small": 15_800_000}
"""Parameters of one of eight fragments of the presets of ``learners.model`` (0.85 and 126 million parameters)."""
VERSIONS = 3
"""Versions written of each fragment."""
KNOBS = SynchroniserSection()
PUTS_USD = float(os.environ.get("ATOLL_BENCH_PUT_USD", "0.005"))
GB_MONTH_USD = float(os.environ.get("ATOLL_BENCH_GB_MONTH_USD", "0.023"))
HOURS_A_MONTH = 730.0
MIRRORED_PARAMETERS, SMALL_MIRRORED_PARAMETERS = 8_000_000, 200_000
"""Parameters of the one fragment whose merges are counted."""
MIRRORED_ISLANDS, ROUNDS = 8, 2 * MERGES_PER_STATE
MODELS = {"1B": 1e9, "8B": 8e9}


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


def mirror_cost(asked: Options) -> list[Goal]:
    count = SMALL_MIRRORED_PARAMETERS if asked.small else MIRRORED_PARAMETERS
    puts, put_bytes, stored = mirrored(count, 2 if asked.small else ROUNDS)
    per_parameter = put_bytes / count
    print(
        f"mirror     a merge of {count / 1e6:g}M parameters, {MIRRORED_ISLANDS} islands, int4: {puts:.1f} puts and "
        f"{put_bytes / 1e6:.1f} MB, {per_parameter:.2f} bytes a parameter; {stored / 1e6:.0f} MB stored"
    )
    step_s = 1.0 if asked.step_seconds is None else asked.step_seconds
    merges_an_hour = KNOBS.fragments * 3600 / (KNOBS.interval_steps * step_s)
    for name, parameters in MODELS.items():
        fragment_bytes = per_parameter * parameters / KNOBS.fragments
        an_hour = merges_an_hour * (1 + math.ceil(fragment_bytes / PIECE_BYTES))
        # two states of Θ, momentum and residue, and the entries since
        kept_gb = (2 * 12 + MERGES_PER_STATE * per_parameter) * parameters / 1e9
        print(
            f"mirror     {name}: {KNOBS.fragments} fragments, {KNOBS.interval_steps} steps of {step_s:g} s: "
            f"{merges_an_hour:,.0f} merges an hour, {1 + math.ceil(fragment_bytes / PIECE_BYTES)} puts and "
            f"{fragment_bytes / 1e9:.3f} GB each; {an_hour / 1000 * PUTS_USD:.2f} USD an hour of puts "
            f"({PUTS_USD:g} a thousand), at most {kept_gb * GB_MONTH_USD / HOURS_A_MONTH:.3f} of {kept_gb:,.0f} GB "
            f"({GB_MONTH_USD:g} a GB-month); {merges_an_hour * fragment_bytes / 3600 / 1e6:.0f} MB/s to the store"
        )
    return []


def mirrored(parameter_count: int, rounds: int) -> tuple[float, float, int]:
    """Return the puts and the bytes of a merge, and the bytes in the store at the end. One merge in 16 puts the state."""
    generator, names = np.random.default_rng(0), [IslandId(f"island-{n}") for n in range(MIRRORED_ISLANDS)]
    step = OuterStep(Averaging.RADIAL, Nesterov(0.7, 0.9), "int4")
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=Path.cwd()) as folder:
        (Path(folder) / "store").mkdir()
        store = open_store(f"{folder}/store")
        admit(store, None)
        disk = mirror(Path(folder) / "run", JobObjects(store, "job"), LocalDisk())
        shard = ParameterShard(Journal(Path(folder) / "run" / "journal", disk=disk), Epoch(1), _at_once)
        states = {FragmentId(0): initial_state({"w": np.ones(parameter_count, np.float32)}, step)}
        shard.seed(OuterState.restored(states, step), {})
        before = disk.writer.puts, disk.writer.put_bytes
        for version in range(1, rounds + 1):
            _merge(shard, names, Version(version), generator, parameter_count)
        puts, put_bytes = disk.writer.puts - before[0], disk.writer.put_bytes - before[1]
        stored = sum(store.sizes("").values())
    return puts / rounds, put_bytes / rounds, stored


def _merge(
    shard: ParameterShard, names: Sequence[IslandId], version: Version, generator: np.random.Generator, count: int
) -> None:
    learned = {"w": 0.01 * generator.standard_normal(count, dtype=np.float32)}
    content, items = wire_format.encode(learned, "int4", Version(version - 1)), []
    for name in names:
        items.append(WeightedPayload(PayloadId(f"{name}.{version}"), name, 1 / len(names)))
        assert isinstance(shard.receive(items[-1].payload, FragmentId(0), content), Held)
    order = (FragmentId(0), version, version, tuple(items), CloseReason.EVERYONE_IN, "")
    shard.merge(MergeFragment(Epoch(1), *order))
    for item in items:
        shard.release(item.payload)


def _at_once(_: str, work: Callable[[], None]) -> None:
    work()
