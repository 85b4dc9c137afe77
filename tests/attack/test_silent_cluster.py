"""A head that is dead and a job that is silent hold up those who ask about them, and nobody else."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from inspect import isasyncgenfunction, iscoroutinefunction
from pathlib import Path

import httpx
import pytest
from fastapi.dependencies.models import Dependant

from api.app import create_app
from api.auth.permissions import Role
from api.storage.store import JobRow, Store
from orchestrator.errors import InfrastructureError
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.system.threads import BoundedThreads
from tests.api.installation import Installation
from tests.attack.ports import ANSWER_TIMEOUT_S, CONTROL
from tests.attack.routes import app, routes_of
from tests.attack.wire import Wire, process_of
from tests.waiting import PATIENCE_S, wait_until

ON_THE_LOOP = {
    "/",
    "/docs",
    "/openapi.json",
    "/web/{digest}/{name}",
    "/healthz",
    "/readyz",
    "/v1/whoami",
    "/v1/jobs",
    "/v1/jobs/check",
}
"""Coroutines that wait for nothing, or see to their own threads, as a submission and its check do."""
STREAMS = {"/v1/jobs/{job}/events", "/v1/jobs/{job}/logs/{source}"}


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    installation = Installation(tmp_path_factory.mktemp("troubled"))
    installation.up("--control", CONTROL)
    yield installation
    installation.atoll("down")


@contextmanager
def switched(service: Installation, name: str) -> Iterator[None]:
    switch = service.home.path / "clockwork" / name
    switch.touch()
    try:
        yield
    finally:
        switch.unlink()


def test_every_route_has_a_pool_of_threads_and_no_dependency_takes_one_of_another() -> None:
    routes = routes_of()
    assert len(routes) > 40
    for route in routes:
        if not hasattr(route.endpoint, "pool"):
            assert iscoroutinefunction(route.endpoint)
            assert route.path in ON_THE_LOOP | STREAMS, f"{route.path} runs in no pool: give its router runs_in(POOL)"
        for dependant in dependants(route.dependant):
            call = dependant.call
            assert iscoroutinefunction(call) or isasyncgenfunction(call), f"{route.path}: {call} takes a thread"
    for handler in app().exception_handlers.values():
        assert iscoroutinefunction(handler), "the framework would run it in a thread of its own pool"


def dependants(of: Dependant) -> Iterator[Dependant]:
    for dependant in of.dependencies:
        yield dependant
        yield from dependants(dependant)


def test_with_a_dead_head_readiness_says_so_and_nobody_else_waits(troubled: Installation) -> None:
    with troubled.client() as client, troubled.http() as http:
        job = client.submit(troubled.spec()).job
        threads = process_of(troubled).num_threads()
        with switched(troubled, "head-hangs"):
            probers = [Wire(troubled, f"127.0.2.{number + 1}").ask("GET", "/readyz") for number in range(48)]
            for prober in probers:
                status, headers, body = prober.answer()
                assert (status, "retry-after" in headers) == (503, True)
                assert b"within 0.7 s" in body
                prober.close()
            impatient = [Wire(troubled, f"127.0.2.{number + 1}").ask("GET", "/readyz") for number in range(48)]
            for prober in impatient:
                prober.close()
            with ThreadPoolExecutor(24) as pool:
                asking = [pool.submit(http.get, "/v1/node-groups", timeout=PATIENCE_S) for _ in range(24)]
                for path in ("/v1/whoami", f"/v1/jobs/{job}", "/v1/jobs", "/metrics", f"/v1/jobs/{job}/merges"):
                    assert http.get(path, timeout=PATIENCE_S).status_code == 200, path
                assert not all(one.done() for one in asking), "all this was answered while they waited"
                assert {one.result().status_code for one in asking} == {503}
            assert process_of(troubled).num_threads() < threads + 64
        wait_until(lambda: http.get("/readyz").status_code == 200)
        wait_until(lambda: http.get("/v1/node-groups").status_code == 200)


def test_a_lost_head_costs_each_answer_one_look_at_its_port_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes a second where the head's machine is gone, so the page has its answer within two, whatever it asks."""
    looks: Counter[int] = Counter()

    def answers(cluster: ClusterFile) -> bool:
        looks[threading.get_ident()] += 1
        return False

    monkeypatch.setattr(ClusterFile, "answers", answers)
    lost = RayControlPort(ClusterFile("x", "127.0.0.1:1", str(tmp_path), {}))
    store = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
    lives = create_app(lost, store, tmp_path / "runs")
    spec = Installation(tmp_path).spec()
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    about = {"run_dir": str(run), "caller": "me", "submitted_at": time.time()}
    store.add_job(JobRow(job=run.name, name=run.name, spec=spec, state="running", **about))
    headers = {"Authorization": f"Bearer {lives.state.tokens.create('me', Role.ADMIN, 'the test')[1]}"}
    paths = sorted({route.path for route in routes_of() if "GET" in (route.methods or ())} - STREAMS)
    assert {"/readyz", "/metrics", "/v1/jobs", "/v1/node-groups", "/v1/jobs/{job}"} <= set(paths)
    asked = Counter[str]()

    async def exchange(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(lives, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as http:
            return await http.get(path, timeout=PATIENCE_S)

    for path in paths:
        where = re.sub(r"{(\w+)}", lambda part: "one" if part[1] == "job" else "1", path)
        looks.clear()
        answer = asyncio.run(exchange(where))
        assert answer.status_code in (200, 304, 404, 422, 503), answer.text
        assert max(looks.values(), default=0) <= 1, f"for {path} a thread waited twice, one look after the other"
        asked[path] = looks.total()
    assert asked["/v1/node-groups"] == asked["/readyz"] == 1, "they ask the head"
    store.close()


def test_many_who_look_at_a_silent_job_hold_up_no_other_request(troubled: Installation) -> None:
    with troubled.client() as client, troubled.http() as http, troubled.http(patient=False) as plain:
        silent, healthy = (client.submit(troubled.spec()).job for _ in range(2))
        answers: Counter[int] = Counter()
        with switched(troubled, f"{silent}.silent"), ThreadPoolExecutor(60) as pool:
            time.sleep(1.1)  # so that the last look is older than what all are content with

            def look() -> int:
                with troubled.http(patient=False) as viewer:
                    return viewer.get(f"/v1/jobs/{silent}", timeout=PATIENCE_S).status_code

            pending: list[int] = []
            looking = [pool.submit(look) for _ in range(60)]
            for _ in range(5):
                for path in ("/v1/whoami", f"/v1/jobs/{healthy}", f"/v1/jobs/{healthy}/islands", "/v1/jobs", "/readyz"):
                    assert http.get(path, timeout=PATIENCE_S).status_code == 200, path
                    pending.append(sum(not one.done() for one in looking))
            assert pending[0], "the first of all this was answered while they waited"
            answers.update(one.result() for one in looking)

            def answered_at_once() -> bool:
                asked_at = time.monotonic()
                assert plain.get(f"/v1/jobs/{silent}", timeout=PATIENCE_S).status_code == 503
                return time.monotonic() - asked_at < ANSWER_TIMEOUT_S

            # a machine that stands still makes one wait, not all of them
            assert any(answered_at_once() for _ in range(5)), "its silence is known, and is not waited for again"
        assert set(answers) == {503}
        wait_until(lambda: http.get(f"/v1/jobs/{silent}").status_code == 200)


def test_commands_to_a_silent_job_take_a_part_of_the_threads_only(troubled: Installation) -> None:
    with troubled.client() as client, troubled.http() as http, troubled.http(patient=False) as plain:
        silent, healthy = (client.submit(troubled.spec()).job for _ in range(2))
        with switched(troubled, f"{silent}.silent"), ThreadPoolExecutor(40) as pool:
            path = f"/v1/jobs/{silent}/islands/asia/kill"
            asked = [pool.submit(plain.post, path, timeout=PATIENCE_S) for _ in range(40)]
            assert http.get(f"/v1/jobs/{healthy}", timeout=PATIENCE_S).status_code == 200
            assert http.post(f"/v1/jobs/{healthy}/islands/asia/kill", timeout=PATIENCE_S).status_code == 202
            assert not all(one.done() for one in asked)
            assert {one.result().status_code for one in asked} <= {202, 503}


def test_many_who_want_the_parameters_have_the_job_write_them_once_and_leave_nothing(troubled: Installation) -> None:
    with troubled.client() as client:
        job = client.submit(troubled.spec()).job
        count = troubled.home.path / "clockwork" / "pictures"
        count.unlink(missing_ok=True)

        def download() -> tuple[int, int]:
            with troubled.http() as http:
                answer: httpx.Response = http.get(f"/v1/jobs/{job}/parameters", timeout=PATIENCE_S)
                return answer.status_code, len(answer.content)

        with ThreadPoolExecutor(12) as pool:
            answers = set(pool.map(lambda _: download(), range(12)))
        assert len(answers) == 1
        assert answers.pop()[0] == 200
        assert count.read_text().count("one") <= 2, "not one for each of the twelve"
        assert not list((troubled.runs / job).glob("picture*"))
        process, folder = process_of(troubled), str(troubled.runs / job)
        wait_until(lambda: not any(file.startswith(folder) and "picture" in file for file in open_files(process.pid)))
        wait_until(lambda: not any("picture" in file for file in open_files(process.pid)))
        time.sleep(0)
        with switched(troubled, "disk-is-full"), troubled.http() as http:
            answer = http.get(f"/v1/jobs/{job}/parameters")
            assert answer.status_code == 503
            assert "No space left" in answer.json()["detail"]


def open_files(pid: int) -> list[str]:
    """With those that have no name any more."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except OSError:
            continue
    return found


def test_threads_that_hang_are_counted_and_nobody_waits_behind_them() -> None:
    threads, gate = BoundedThreads("a test", 3), threading.Event()
    for _ in range(3):
        with pytest.raises(InfrastructureError, match="did not answer within"):
            threads.answer(gate.wait, 0.01, "Nobody")
    with pytest.raises(InfrastructureError, match="All 3 threads"):
        threads.begin(gate.wait)
    gate.set()
    wait_until(lambda: _begins(threads))
    with pytest.raises(ZeroDivisionError):
        threads.answer(lambda: 1 // 0, 60.0, "Arithmetic")


def _begins(threads: BoundedThreads) -> bool:
    try:
        return threads.answer(lambda: True, 60.0, "It")
    except InfrastructureError:
        return False
