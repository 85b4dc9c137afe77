from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchestrator.specification.config import parse_job
from tests.learners.stepped import Island


def job(**sections: Any) -> dict[str, Any]:
    """A complete job specification as plain data: two small islands, changed by whole sections."""
    document = {
        "islands": [{"node_group": "here", "count": 2}],
        "budget": {"steps": 100},
        "model": {"compute_dtype": "float32"},
        "data": {"sequence_length": 32},
        "training": {"batch_size": 4, "inner_optimizer": {"warmup_steps": 5}},
        "evaluation": {"sequences": 24},
        "synthetic": {"parameters": 1_000, "step_s": 0.001},
    }
    return parse_job(document | sections).model_dump(mode="json")


@pytest.fixture(scope="session")
def make_job() -> Callable[..., dict[str, Any]]:
    return job


@pytest.fixture(scope="session", autouse=True)
def compiled_programs_stay_here(tmp_path_factory: pytest.TempPathFactory) -> None:
    import jax

    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))


@pytest.fixture(autouse=True)
def counts_of_tokens_stay_here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def new_island(make_job) -> Iterator:
    islands: list[Island] = []

    def make(**options) -> Island:
        islands.append(Island(make_job(), **options))
        return islands[-1]

    yield make
    for island in islands:
        for _ in range(100):
            island.trainer.permits.release()
        island.loop.stop()
