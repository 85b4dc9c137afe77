"""The time of day is set by hours, both ways, while things run: nothing lasts longer or shorter for it, and it is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.auth.permissions import Role
from api.auth.tokens import REMEMBERED_S, AccessStore, Tokens
from api.client import Client
from api.clocks import SET_MIN_S, Ages, ClockWatch, TimeOfDay
from api.storage.store import Store
from orchestrator.host.job_files import elapsed
from orchestrator.runtime.processes import signal_seen
from tests.api.installation import CONTROL, ROOT, Installation, environment
from tests.attack.settable_clock import SettableClock
from tests.waiting import PATIENCE_S, wait_until

HOURS_S = 5 * 3600

# ── decided by a clock that a test holds ──────────────────────────────────────────────────────────────────────────────


class Clocks:
    """A machine's two clocks. ``wall`` may be set; ``passed`` cannot."""

    def __init__(self) -> None:
        self.up, self.ahead = 100.0, 1_800_000_000.0

    def wall(self) -> float:
        return self.up + self.ahead

    def passed(self) -> float:
        return self.up


@pytest.mark.parametrize("jump_s", [-HOURS_S, HOURS_S])
def test_a_token_that_another_service_revoked_is_forgotten_in_a_second_however_the_clock_is_set(
    tmp_path: Path, jump_s: int
) -> None:
    clocks = Clocks()
    store = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
    here = Tokens(AccessStore(store.engine), clocks.wall, clocks.passed)
    there = Tokens(AccessStore(store.engine), clocks.wall, clocks.passed)
    _, raw = here.create("ci", Role.OPERATOR, "me")
    assert here.principal_of(raw)
    clocks.ahead += jump_s
    there.revoke("ci")
    clocks.up += REMEMBERED_S + 0.1
    assert here.remembered(raw) is None
    assert here.principal_of(raw) is None
    store.close()


def test_a_clock_that_is_set_back_lengthens_no_tokens_life(tmp_path: Path) -> None:
    clocks = Clocks()
    store = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
    book = Tokens(AccessStore(store.engine), TimeOfDay(clocks.wall, clocks.passed), clocks.passed)
    _, raw = book.create("short", Role.VIEWER, "me", expires_in_s=60)
    clocks.up += 61
    assert book.principal_of(raw) is None
    clocks.ahead -= HOURS_S
    assert book.principal_of(raw) is None, "it expired, and has not become valid again"
    _, later = book.create("later", Role.VIEWER, "me", expires_in_s=60)
    assert book.principal_of(later)
    clocks.up += 61
    assert book.principal_of(later) is None
    clocks.ahead += 2 * HOURS_S
    _, last = book.create("last", Role.VIEWER, "me", expires_in_s=60)
    clocks.up += 59
    assert book.principal_of(last)
    store.close()


JUMPS = st.lists(st.tuples(st.floats(0, 1000), st.floats(-1e5, 1e5)), max_size=20)


@given(JUMPS)
def test_an_age_grows_by_what_passes_whatever_the_clock_is_set_to(jumps: list[tuple[float, float]]) -> None:
    clocks = Clocks()
    ages, began, stamped_at = Ages(clocks.wall, clocks.passed), clocks.up, clocks.wall()
    assert ages.of("a", stamped_at) == 0.0
    for passes_s, set_by_s in jumps:
        clocks.up += passes_s
        clocks.ahead += set_by_s
        assert ages.of("a", stamped_at) == pytest.approx(clocks.up - began)


@given(JUMPS)
def test_time_of_day_for_expiry_goes_at_least_as_fast_as_time_passes(jumps: list[tuple[float, float]]) -> None:
    clocks = Clocks()
    now, before, began = TimeOfDay(clocks.wall, clocks.passed), clocks.wall(), clocks.up
    for passes_s, set_by_s in jumps:
        clocks.up += passes_s
        clocks.ahead += set_by_s
        assert now() >= before + clocks.up - began - 1e-6


@given(JUMPS)
def test_what_the_clock_was_set_by_adds_up(jumps: list[tuple[float, float]]) -> None:
    clocks = Clocks()
    watch = ClockWatch(clocks.wall, clocks.passed)
    for passes_s, set_by_s in jumps:
        clocks.up += passes_s
        clocks.ahead += set_by_s
        assert watch.check() == pytest.approx(clocks.ahead - 1_800_000_000.0, abs=1e-4)


@settings(max_examples=50)
@given(jumps=JUMPS, reboot_at=st.integers(0, 20))
def test_a_jobs_time_never_runs_back_and_within_one_start_of_the_machine_is_what_passed(
    tmp_path_factory: pytest.TempPathFactory, jumps: list[tuple[float, float]], reboot_at: int
) -> None:
    """Each jump befalls a job between two lives of its synchroniser. One of them is behind a start of the machine."""
    run_dir, clocks = tmp_path_factory.mktemp("run"), Clocks()
    boot, started_at = "first", clocks.wall()
    assert elapsed(run_dir, started_at, None, boot=boot, uptime=clocks.passed, wall=clocks.wall) == 0.0
    at = 0.0
    for number, (passes_s, set_by_s) in enumerate(jumps):
        clocks.up += passes_s
        clocks.ahead += set_by_s
        if number == reboot_at:
            boot, clocks.up, clocks.ahead = "second", 7.0, clocks.wall() - 7.0
        now = elapsed(run_dir, started_at, at, boot=boot, uptime=clocks.passed, wall=clocks.wall)
        assert now >= at
        if number != reboot_at:
            assert now == pytest.approx(at + passes_s, abs=1e-3)
        at = now


def test_a_job_whose_clock_file_is_damaged_goes_by_the_time_of_day(tmp_path: Path) -> None:
    clocks = Clocks()
    started_at = clocks.wall()
    numbers = (b'"x"', b"-1e308", b"1e308", b"NaN", b"-Infinity", b"9" * 400)
    ages = tuple(b'{"boot": "b", "created_uptime_s": %b}' % number for number in numbers)
    for damaged in (b"", b"\xff", b"[]", b'{"boot": "b"}', b"[" * 100_000, *ages):
        (tmp_path / "clock.json").write_bytes(damaged)
        clocks.up += 10
        now = elapsed(tmp_path, started_at, 1.0, boot="b", uptime=clocks.passed, wall=clocks.wall)
        assert now == pytest.approx(clocks.wall() - started_at)


# ── real processes whose clock is set ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def clock(tmp_path: Path) -> SettableClock:
    return SettableClock(tmp_path)


@pytest.fixture
def installation(tmp_path: Path, clock: SettableClock) -> Iterator[Installation]:
    """A service whose clock a test sets; the test's own goes right."""
    there = Installation(tmp_path)
    there.home.path.mkdir()
    command = [sys.executable, "-m", "api.serve", "--home", str(there.home.path), "--runs", str(there.runs)]
    with there.home.log.open("ab") as log:
        process = subprocess.Popen(
            [*command, "--control", CONTROL],
            cwd=ROOT,
            env=environment() | clock.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: process.poll() is None and there.home.address() and answers(there))
        yield there
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def answers(installation: Installation) -> bool:
    try:
        with installation.client() as client:
            client.ready()
    except Exception:
        return False
    return True


def metric(http: httpx.Client, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found, f"{name} is not told"
    return float(found[1])


def hours_set(http: httpx.Client) -> float:
    """What scrapes are told, which share a look for a second."""
    return round(metric(http, "atoll_clock_set_seconds") / 3600, 2)


def test_a_service_whose_clock_is_set_by_hours_goes_on_and_tells_it(
    installation: Installation, clock: SettableClock
) -> None:
    with installation.http() as http, installation.client() as client:
        job = client.submit(installation.spec()).job
        waiting = client.submit(installation.spec(islands=[{"node_group": "asia", "cpus": 4}])).job
        wait_until(lambda: client.job(job).islands_training == 4)
        tokens = {
            name: http.post("/v1/tokens", json={"name": name, "role": "viewer", "expires_in_s": life_s}).json()["token"]
            for name, life_s in (("short", 1.0), ("hours", 3600.0), ("day", 86400.0))
        }
        wait_until(lambda: whoami(installation, tokens["short"]) == 401)
        wait_until(lambda: hours_set(http) == 0)

        clock.set(-HOURS_S)
        wait_until(lambda: "set back by" in installation.home.log.read_text())
        assert {name: whoami(installation, raw) for name, raw in tokens.items()} == {
            "short": 401,
            "hours": 200,
            "day": 200,
        }
        wait_until(lambda: hours_set(http) == -5)
        assert goes_on(client, job)

        clock.set(HOURS_S)
        wait_until(lambda: "set forward by" in installation.home.log.read_text())
        assert {name: whoami(installation, raw) for name, raw in tokens.items()} == {
            "short": 401,
            "hours": 401,
            "day": 200,
        }
        wait_until(lambda: hours_set(http) == 5)
        assert goes_on(client, job)
        assert client.job(waiting).state == "queued"
        assert metric(http, "atoll_queue_oldest_seconds") < 600, "it has not waited for hours"

        clock.set(0)
        wait_until(lambda: whoami(installation, tokens["hours"]) == 200)
        wait_until(lambda: abs(metric(http, "atoll_clock_set_seconds")) < SET_MIN_S)
        kinds = [entry["path"] for entry in http.get("/v1/audit").json()["entries"]]
        assert kinds[-2:] == ["/v1/jobs", "/v1/jobs"], "in the order in which they came"
        assert " 500 " not in installation.home.log.read_text()


def whoami(installation: Installation, token: str) -> int:
    with installation.http(token) as http:
        return http.get("/v1/whoami").status_code


def goes_on(client: Client, job: str) -> bool:
    """Whether a command reaches the job at once and what it asks for happens."""
    before = client.job(job)
    island = before.islands[0].island
    command = client.kill(job, island)
    wait_until(lambda: client.command(job, command.command).state == "accepted")
    return bool(wait_until(lambda: client.job(job).tokens_trained > before.tokens_trained))


@pytest.mark.parametrize("jump_s", [-HOURS_S, HOURS_S])
def test_a_warden_knows_a_process_again_after_the_clock_was_set(clock: SettableClock, jump_s: int) -> None:
    """The process says when it was seen by the clock of an island, as ``learners.island`` does, with the jump behind it."""
    clock.set(jump_s)
    code = "import time; print(time.clock_gettime(time.CLOCK_BOOTTIME), flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | clock.environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        seen_at = float(process.stdout.readline())
        assert not signal_seen(process.pid, seen_at - 60, signal.SIGKILL), "another process had this id then"
        assert process.poll() is None
        assert signal_seen(process.pid, seen_at, signal.SIGKILL)
        assert process.wait(PATIENCE_S) == -9
        assert not signal_seen(process.pid, seen_at, signal.SIGKILL), "nobody has this id"
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def test_an_island_says_when_it_was_seen_by_the_clock_that_a_warden_goes_by() -> None:
    source = (ROOT / "learners" / "island.py").read_text()
    assert '"seen_at": time.clock_gettime(time.CLOCK_BOOTTIME)' in source
    assert abs(time.clock_gettime(time.CLOCK_BOOTTIME) - float(Path("/proc/uptime").read_text().split()[0])) < 5
