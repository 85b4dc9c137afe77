"""What keeping a merge costs: writing and syncing one fragment's Θ and momentum to this disk, before anybody may hear of it.

The slack it has to fit into is τ inner steps (``overlap_steps``); a merge is told that much later.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from orchestrator.core.vocabulary import Epoch, FragmentId, Version
from orchestrator.journal.entry import Facts
from orchestrator.journal.storage import Journal
from orchestrator.merge import wire
from tests.bench.goals import Goal
from tests.bench.options import Options

FRAGMENT_PARAMETERS = {"nano": 106_000, "small": 15_800_000}
"""One of eight fragments of the presets of ``learners.model`` (0.85 and 126 million parameters)."""
MERGES = 12


def main(_asked: Options) -> list[Goal]:
    for name, count in FRAGMENT_PARAMETERS.items():
        values = {"w": np.random.default_rng(1).standard_normal(count, np.float32)}
        payload, digest = wire.encode(values), wire.digest(values)
        for kind, merges_max in (("sync", 0), ("async", MERGES)):
            with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=Path.cwd()) as folder:
                journal = Journal(Path(folder), merges_max=merges_max)
                seconds = []
                for version in range(MERGES):
                    facts = Facts(FragmentId(0), Version(version), 0, Epoch(1), digest, digest, (), 0.0)
                    began = perf_counter()
                    journal.append(facts, payload, payload)
                    seconds.append(perf_counter() - began)
            told = f"median {median(seconds) * 1000:7.1f} ms, longest {max(seconds) * 1000:7.1f} ms"
            print(f"journal    {name:<6} {kind:<6} {2 * len(payload) / 1e6:6.1f} MB a merge: {told}")
    return []
