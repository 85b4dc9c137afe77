"""A cluster beyond loopback talks by TLS: what listens, who is refused, and certificates renewed while it trains."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.certificates import folders, peer
from orchestrator.errors import ConfigurationError
from orchestrator.runtime import embedded, join, processes
from orchestrator.runtime.settings import CONTROL_GROUP, TOKEN_VARIABLE
from tests.listening import EVERYWHERE, Listener, guards, listeners, undocumented
from tests.ray.jobs import assert_sound
from tests.waiting import PATIENCE_S, wait_until
from tests.wan.archipelago import Archipelago, WideJob
from tests.wan.conftest import ASIA, EAST

pytestmark = pytest.mark.ray
FIRST, LAST = 21_000, 21_009
Submit = Callable[..., WideJob]


def listening(archipelago: Archipelago) -> dict[str, list[Listener]]:
    """What processes of the cluster and its service listen for, by region."""
    pids = [process.pid for process in processes.marked(archipelago.cluster.id)]
    address = archipelago.home.address()
    assert address is not None
    return {name: listeners([*pids, address.pid], place.enter) for name, place in archipelago.regions.places.items()}


def refuse_undocumented(archipelago: Archipelago) -> None:
    """Nothing listens but what the document lists, and behind TLS where it says so."""
    seen = listening(archipelago)
    assert {"gcs_server", "raylet", "SynchroniserActor", "service"} <= {one.process for one in seen[CONTROL_GROUP]}
    assert {"raylet", "Island"} <= {one.process for one in seen[EAST]}
    for region, here in seen.items():
        assert undocumented(here) == [], region
        for one in here:
            address = archipelago.regions.address(region) if one.where == EVERYWHERE else one.host
            says_tls = {"TLS" in guard for guard in guards(one)}
            assert says_tls == {peer.speaks_tls(address, one.port)}, one


@pytest.fixture
def outside(archipelago: Archipelago, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """`atoll join` in the region of the east, with these options; its log is ``tmp_path / "log"``."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*options: str, token: str = archipelago.cluster.environment[TOKEN_VARIABLE]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "api.cli", "join", archipelago.cluster.address, "--group", "late"]
        command += ["--region", EAST, "--cpus", "1", "--token-file", token, *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ATOLL_"))}
        with (tmp_path / "log").open("wb") as log:
            program = [*archipelago.regions.places[EAST].enter, *command]
            started.append(subprocess.Popen(program, env=environment, stdout=log, stderr=log))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE_S)


def test_a_machine_without_certificates_that_the_head_trusts_starts_nothing_and_with_them_it_is_a_node(
    archipelago: Archipelago, outside: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    own, foreign, mixed = archipelago.certificates, tmp_path / "foreign", tmp_path / "mixed"
    folders.make_authority(tmp_path / "other", "another fleet")
    folders.issue(tmp_path / "other", foreign, folders.described(own)[0].names)
    shutil.copytree(foreign, mixed)
    shutil.copy(own / folders.AUTHORITY_CERTIFICATE, mixed)  # it trusts the head, which does not trust it
    host, port = join.head_of(archipelago.cluster.address)
    with pytest.raises(ConfigurationError, match="of an authority that is not in"):
        peer.refuse_foreign(host, port, foreign)
    with pytest.raises(ConfigurationError, match="does not accept this machine's certificate"):
        peer.refuse_foreign(host, port, mixed)
    assert peer.refuse_foreign(host, port, own) is None
    raylets = [one for one in listening(archipelago)[EAST] if one.process == "raylet"]
    assert len(raylets) == 2
    for raylet in raylets:
        with pytest.raises(ConfigurationError, match="does not accept this machine's certificate"):
            peer.refuse_foreign(archipelago.regions.address(EAST), raylet.port, mixed)

    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    for options, token, says in (
        (["--insecure"], {}, "speaks TLS, and this machine was given no certificates"),
        (["--certificates", str(own)], {"token": str(wrong)}, "is not the cluster's secret"),
    ):
        assert outside(*options, **token).wait(PATIENCE_S) == 2
        assert says in " ".join((tmp_path / "log").read_text().split())
    with archipelago.client() as client:
        assert "late" not in {group.name for group in client.node_groups()}

    machine = outside("--certificates", str(own), "--ports", f"{FIRST}-{LAST}")
    wait_until(lambda: "is a node of" in (tmp_path / "log").read_text() or machine.poll() is not None, "its joining")

    def listening_there() -> list[Listener] | None:
        """Once its raylet does, which is a process before it listens."""
        pids = [each.pid for each in psutil.Process(machine.pid).children(recursive=True)]
        seen = listeners(pids, archipelago.regions.places[EAST].enter)
        return seen if len([one for one in seen if one.process == "raylet"]) == 2 else None

    seen = wait_until(listening_there, "its raylet's listening")
    assert undocumented(seen) == []
    assert {one.port for one in seen if one.process == "raylet"} == {FIRST, FIRST + 1}
    assert all(FIRST <= one.port <= LAST for one in seen), seen
    machine.send_signal(signal.SIGTERM)
    assert machine.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()


def shown(address: str, port: int, folder: Path) -> bytes:
    """The certificate that the server there shows to a machine with this folder."""
    context = folders.context_of(folder, server_side=False)
    with (
        socket.create_connection((address, port), PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=address) as connection,
    ):
        certificate = connection.getpeercert(binary_form=True)
    assert certificate
    return certificate


def of_folder(folder: Path) -> bytes:
    first, end, _ = (folder / folders.CERTIFICATE).read_text().partition("-----END CERTIFICATE-----")
    return ssl.PEM_cert_to_DER_cert(first + end)


def test_a_job_trains_where_nothing_listens_but_what_is_told_and_while_authority_and_certificates_are_exchanged(
    archipelago: Archipelago, submit: Submit
) -> None:
    job = submit()
    for island in (EAST, ASIA):
        job.wait_for_merge(island, 1)
    refuse_undocumented(archipelago)

    folder, address = archipelago.certificates, archipelago.regions.address(EAST)
    service = archipelago.home.address()
    assert service is not None
    began_with = of_folder(folder)
    folders.rotate(folder.with_name(embedded.AUTHORITY))
    folders.renew(folder.with_name(embedded.AUTHORITY), folder)
    renewed = of_folder(folder)
    assert renewed != began_with

    os.kill(job.island(EAST)["pid"], signal.SIGKILL)
    pid = job.wait_for_merge(EAST, 2)["pid"]  # by calls of a head, a raylet and a synchroniser that began before
    here = listening(archipelago)[EAST]
    (island,) = [one for one in here if one.pid == pid and one.where == EVERYWHERE]
    raylet = next(one for one in here if one.process == "raylet")
    assert shown(address, island.port, folder) == renewed
    assert shown(address, raylet.port, folder) == began_with, "Ray's servers keep what they began with"
    assert shown(archipelago.regions.address(CONTROL_GROUP), service.port, folder) == renewed
    job.cancel()
    job.wait_for_end()
    assert_sound(job)
