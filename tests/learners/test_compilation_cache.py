"""The cache of compiled programs: shared by processes, and never a reason for an island not to train."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from learners import compilation_cache
from orchestrator.system import program_cache


@pytest.fixture
def cache_in(monkeypatch) -> Iterator[Callable[[Path], None]]:
    """Use the cache folder that this setting names, as a process does that has just begun."""
    before = jax.config.jax_compilation_cache_dir

    def use(folder: Path) -> None:
        monkeypatch.setattr(compilation_cache, "_warned", False)
        jax.config.update("jax_compilation_cache_dir", str(folder))

    yield use
    jax.config.update("jax_compilation_cache_dir", before)
    with compilation_cache.exclusive():
        pass  # what follows has its cache again


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Writing beyond this size of a file fails in the middle, as it does on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def warnings_in(caplog) -> list[logging.LogRecord]:
    """Return the warnings alone: once another test of this process logs everything, JAX's notes come with them."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def compiled(factor: int) -> float:
    jax.clear_caches()
    return float(jax.jit(lambda x: x * factor + 1)(jnp.float32(2)))


def test_a_cache_left_by_a_process_killed_while_writing_is_emptied():
    folder = compilation_cache.directory()
    assert folder is not None
    with compilation_cache.exclusive():
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(3)).block_until_ready()
    entries = set(folder.glob("*-cache"))
    assert entries
    (folder / "being-written").touch()
    with compilation_cache.exclusive():
        assert not set(folder.glob("*-cache"))
    assert not (folder / "being-written").exists()


def test_a_stopped_process_that_holds_the_cache_delays_others_only_so_long(monkeypatch):
    monkeypatch.setattr(compilation_cache, "LOCK_WAIT_MAX_S", 0.1)
    folder = compilation_cache.directory()
    assert folder is not None
    with compilation_cache.exclusive():
        holder = (folder / "lock").open("w")
        with pytest.raises(BlockingIOError):
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with compilation_cache.exclusive():
            assert float(jax.jit(lambda x: x * 5)(2.0)) == 10


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "home").write_text("I am a file")
    return tmp_path / "home" / ".cache" / "atoll" / "xla"


def a_folder_in_place_of_the_lock(tmp_path: Path) -> Path:
    (tmp_path / "xla" / "lock").mkdir(parents=True)
    return tmp_path / "xla"


def a_folder_in_place_of_the_mark(tmp_path: Path) -> Path:
    (tmp_path / "xla" / "being-written" / "x").mkdir(parents=True)
    (tmp_path / "xla" / "torn-cache").mkdir()
    return tmp_path / "xla"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda _: Path("/sys/.cache/atoll/xla"), "/sys"),
        (lambda _: Path("/proc/none/xla"), "/proc/none"),
        (a_file, "home is not a folder"),
        (a_folder_in_place_of_the_lock, "Is a directory"),
        (a_folder_in_place_of_the_mark, "Is a directory"),
        (lambda tmp_path: tmp_path / ("n" * 300), "too long"),
        (lambda tmp_path: tmp_path / "a\0b", "null"),
    ],
)
def test_a_cache_folder_that_cannot_be_used_costs_one_warning_and_no_training(
    make, reason, cache_in, tmp_path, caplog, recwarn
):
    cache_in(make(tmp_path))
    for factor in (3, 4):
        with compilation_cache.exclusive():
            assert compiled(factor) == 2 * factor + 1
    (warning,) = warnings_in(caplog)
    assert reason in warning.getMessage()
    assert "XDG_CACHE_HOME" in warning.getMessage()
    assert not recwarn.list, "JAX adds nothing to it"


def test_a_cache_folder_without_room_is_not_written_to(cache_in, tmp_path, caplog):
    cache_in(tmp_path / "xla")
    with files_limited_to(1000), compilation_cache.exclusive():
        assert compiled(5) == 11
    assert not list((tmp_path / "xla").glob("*-cache"))
    (warning,) = warnings_in(caplog)
    assert "File too large" in warning.getMessage()
    with compilation_cache.exclusive():
        assert compiled(5) == 11
    assert list((tmp_path / "xla").glob("*-cache")), "it has room again"


def test_a_disk_that_fills_while_a_program_is_written_leaves_no_torn_entry_to_the_next_process(
    cache_in, tmp_path, caplog, recwarn
):
    folder = tmp_path / "xla"
    cache_in(folder)
    with compilation_cache.exclusive(), files_limited_to(100):
        assert compiled(6) == 13
    torn = list(folder.glob("*-cache"))
    assert torn, "JAX writes in place"
    (warning,) = warnings_in(caplog)
    assert str(folder) in warning.getMessage()
    with compilation_cache.exclusive():
        assert not list(folder.glob("*-cache"))
        assert compiled(6) == 13
    assert all(entry.stat().st_size > 100 for entry in folder.glob("*-cache"))
    assert not recwarn.list


def test_other_warnings_of_the_block_are_not_lost(cache_in, tmp_path):
    cache_in(tmp_path / "xla")
    with pytest.warns(UserWarning, match="something else"), compilation_cache.exclusive():
        warnings.warn("something else", stacklevel=1)


def test_a_cache_that_the_user_switched_off_stays_off(cache_in, tmp_path, monkeypatch):
    cache_in(tmp_path / "xla")
    monkeypatch.setattr(compilation_cache, "_enabled", False)
    with compilation_cache.exclusive():
        pass
    assert not (tmp_path / "xla").exists()
    assert program_cache.problem({"JAX_ENABLE_COMPILATION_CACHE": "false", "HOME": "/sys"}) is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "/home/me"}, "/home/me/.cache/atoll/xla"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/scratch"}, "/scratch/atoll/xla"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "relative"}, "/home/me/.cache/atoll/xla"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": ""}, "/home/me/.cache/atoll/xla"),
        ({"XDG_CACHE_HOME": "/scratch", "JAX_COMPILATION_CACHE_DIR": "/programs"}, "/programs"),
        ({"JAX_COMPILATION_CACHE_DIR": "gs://bucket/programs"}, None),
    ],
)
def test_where_the_cache_is(environment, expected):
    assert program_cache.directory(environment) == (Path(expected) if expected else None)


def test_the_warning_before_anything_is_started_is_that_of_the_islands(tmp_path):
    assert program_cache.problem({"HOME": str(tmp_path)}) is None
    assert "/sys/.cache/atoll/xla" in str(program_cache.problem({"HOME": "/sys"}))
    assert "not an absolute path" in str(program_cache.problem({"HOME": "here"}))
    with files_limited_to(1000):
        assert "File too large" in str(program_cache.problem({"HOME": str(tmp_path)}))


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")
def test_a_user_whom_no_list_names_has_no_home_and_is_told_so():
    code = (
        "import os; from orchestrator.system import program_cache; os.setuid(54321); print(program_cache.problem({}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], env={}, capture_output=True, text=True, check=True)
    assert "user id 54321 has no entry" in ran.stdout
