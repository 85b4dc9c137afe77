"""Certificates of machines: who trusts whom through a rotation, and what is refused before anything is started."""

from __future__ import annotations

import json
import os
import shutil
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from typer.testing import CliRunner

from api import cli
from api.commands import nodes
from api.http.connections import ServedCertificate
from orchestrator.certificates import folders, peer
from orchestrator.errors import ConfigurationError
from orchestrator.system.ports import free_port
from tests.listening import Listener, guards, undocumented
from tests.waiting import PATIENCE_S

ADDRESS = "127.0.0.9"


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    folders.make_authority(tmp_path / "authority", "atoll test")
    return tmp_path / "authority"


@pytest.fixture
def machine(authority: Path, tmp_path: Path) -> Path:
    folders.issue(authority, tmp_path / "machine", [ADDRESS, "head.example"])
    return tmp_path / "machine"


def trust(one: Path, other: Path) -> bool:
    """Whether either may call the other."""
    try:
        folders.shake_hands(one, other)
        folders.shake_hands(other, one)
    except ssl.SSLError:
        return False
    return True


# ── a rotation ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_through_a_rotation_machines_trust_each_other_in_whatever_order_they_are_renewed(
    authority: Path, machine: Path, tmp_path: Path
) -> None:
    renewed, latest = tmp_path / "renewed", tmp_path / "latest"
    folders.issue(authority, renewed, ["renewed.example"])
    key = (renewed / folders.KEY).read_bytes()
    folders.rotate(authority)
    folders.renew(authority, renewed)
    assert (renewed / folders.KEY).read_bytes() == key, "no program finds a certificate beside the key of another"
    folders.issue(authority, latest, ["latest.example"])
    assert trust(machine, renewed)
    assert trust(machine, latest)
    assert trust(renewed, latest)
    with pytest.raises(ConfigurationError, match="former authority is still trusted"):
        folders.rotate(authority)

    folders.retire(authority)
    folders.renew(authority, latest)
    assert trust(renewed, latest), "which was renewed before the former authority was retired"
    assert not trust(machine, latest), "which is of the former authority, and trusts nobody else"
    folders.renew(authority, machine)
    assert trust(machine, latest)
    with pytest.raises(ConfigurationError, match="no former authority"):
        folders.retire(authority)


class PowerLost(BaseException):
    """No error that anybody handles."""


@pytest.mark.parametrize("step", range(4))
def test_a_rotation_that_is_broken_off_is_undone_or_finished_by_the_next_command(
    authority: Path, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    replace, steps = os.replace, iter(range(4))

    def until_then(source: Path, target: Path) -> None:
        if next(steps) == step:
            raise PowerLost
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", until_then)
        with pytest.raises(PowerLost):
            folders.rotate(authority)
    folders.issue(authority, tmp_path / "between", ["between.example"])
    assert trust(machine, tmp_path / "between"), "whichever authority it is of"
    if step < 3:
        folders.rotate(authority)
    else:
        with pytest.raises(ConfigurationError, match="former authority is still trusted"):
            folders.rotate(authority)
    assert not (authority / folders.NEXT_KEY).exists()
    folders.issue(authority, tmp_path / "behind", ["behind.example"])
    assert trust(machine, tmp_path / "behind")
    folders.retire(authority)
    assert sorted(path.name for path in authority.iterdir()) == ["ca.crt", "ca.key"]


@pytest.fixture
def serve() -> Iterator[Callable[[Path], int]]:
    """Starts servers of gRPC, the library that Ray has built in, and returns their ports."""
    servers: list[grpc.Server] = []

    def start(folder: Path) -> int:
        key, certificate, trusted = texts(folder)
        server = grpc.server(ThreadPoolExecutor(1))
        mutual = grpc.ssl_server_credentials([(key, certificate)], trusted, require_client_auth=True)
        port: int = server.add_secure_port(f"{ADDRESS}:0", mutual)
        server.start()
        servers.append(server)
        return port

    yield start
    for each in servers:
        each.stop(None)


def texts(folder: Path) -> tuple[bytes, bytes, bytes]:
    names = (folders.KEY, folders.CERTIFICATE, folders.AUTHORITY_CERTIFICATE)
    key, certificate, trusted = ((folder / name).read_bytes() for name in names)
    return key, certificate, trusted


def is_served(port: int, folder: Path) -> bool:
    key, certificate, trusted = texts(folder)
    credentials = grpc.ssl_channel_credentials(trusted, key, certificate)
    with grpc.secure_channel(f"{ADDRESS}:{port}", credentials) as channel:
        try:
            channel.unary_unary("/no/method")(b"", timeout=PATIENCE_S)
        except grpc.RpcError as error:
            return "UNIMPLEMENTED" in str(error)  # an answer, and no failed handshake
    return True


def test_rays_own_library_takes_what_the_next_authority_issues_at_servers_that_began_before(
    authority: Path, machine: Path, tmp_path: Path, serve: Callable[[Path], int]
) -> None:
    began_before = serve(machine)
    folders.issue(authority, tmp_path / "kept", [ADDRESS])
    folders.rotate(authority)
    folders.renew(authority, machine)
    begun_after = serve(machine)
    for folder in (machine, tmp_path / "kept"):
        assert is_served(began_before, folder), folder
        assert is_served(begun_after, folder), folder
    folders.make_authority(tmp_path / "other", "atoll other")
    folders.issue(tmp_path / "other", tmp_path / "strangers", [ADDRESS])
    shutil.copy(machine / folders.AUTHORITY_CERTIFICATE, tmp_path / "strangers")  # it trusts the server
    assert not is_served(begun_after, tmp_path / "strangers")


def test_the_certificate_that_a_server_uses_is_read_from_it_though_its_file_is_newer_or_it_has_expired(
    authority: Path, machine: Path, serve: Callable[[Path], int]
) -> None:
    began_before = serve(machine)
    folders.renew(authority, machine, days=700)
    assert folders.described(machine)[0].lifetime_s > 700 * 86400
    assert lifetime_days(began_before, machine) == 365
    folders.renew(authority, machine, days=0)
    expired = serve(machine)
    folders.renew(authority, machine)
    assert lifetime_days(expired, machine) == 0
    with pytest.raises(OSError, match="refused"):
        peer.presented(ADDRESS, free_port(), machine, 1.0)


def lifetime_days(port: int, folder: Path) -> int:
    """Of the certificate of this server, from the day after the one to which its beginning is set back."""
    facts = folders.facts_of(peer.presented(ADDRESS, port, folder, 5.0))
    return round(facts.lifetime_s / 86400) - 1


def test_a_service_shows_a_renewed_certificate_and_bears_files_that_do_not_belong_together(
    authority: Path, machine: Path, tmp_path: Path
) -> None:
    files = (machine / folders.CERTIFICATE, machine / folders.KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    served = ServedCertificate(context, *files)
    folders.issue(authority, tmp_path / "watching", ["watching.example"])
    watching = folders.context_of(tmp_path / "watching", server_side=False)

    def shown() -> str:
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = watching.wrap_bio(to_client, to_server, server_hostname=ADDRESS)
        server = context.wrap_bio(to_server, to_client, server_side=True)
        for side in (client, server, client):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        certificate = client.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])

    before = shown()
    served.refresh()
    assert shown() == before
    folders.issue(authority, tmp_path / "fresh", [ADDRESS])
    shutil.copy(tmp_path / "fresh" / folders.CERTIFICATE, machine)
    served.refresh()
    assert shown() == before, "the certificate came before its key"
    shutil.copy(tmp_path / "fresh" / folders.KEY, machine)
    served.refresh()
    assert shown() != before


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────


def exchange_key(machine: Path, authority: Path) -> None:
    folders.issue(authority, machine.parent / "other", ["other.example"])
    shutil.copy(machine.parent / "other" / folders.KEY, machine)


def exchange_authority(machine: Path, authority: Path) -> None:
    folders.make_authority(machine.parent / "foreign", "atoll test")  # of the same name
    shutil.copy(machine.parent / "foreign" / folders.AUTHORITY_CERTIFICATE, machine)


def let_expire(machine: Path, authority: Path) -> None:
    folders.renew(authority, machine, days=0)


def open_key(machine: Path, authority: Path) -> None:
    (machine / folders.KEY).chmod(0o640)


def lose_certificate(machine: Path, authority: Path) -> None:
    (machine / folders.CERTIFICATE).unlink()


def spoil_certificate(machine: Path, authority: Path) -> None:
    (machine / folders.CERTIFICATE).write_text("no certificate")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (exchange_key, "is not the key of"),
        (exchange_authority, "was not issued by the authority"),
        (let_expire, "expired on"),
        (open_key, "chmod 600"),
        (lose_certificate, "No such file"),
        (spoil_certificate, "not a certificate in PEM"),
    ],
)
def test_a_folder_that_no_machine_would_take_is_refused_with_the_remedy(
    machine: Path, authority: Path, damage: Callable[[Path, Path], None], says: str
) -> None:
    folders.refuse_unfit(machine, ADDRESS)
    damage(machine, authority)
    with pytest.raises(ConfigurationError, match=says):
        folders.refuse_unfit(machine, ADDRESS)


def test_a_certificate_for_another_address_is_refused_for_others_would_refuse_it(machine: Path) -> None:
    folders.refuse_unfit(machine, "127.0.0.1")
    with pytest.raises(ConfigurationError, match=r"is not valid for 10\.0\.0\.7.*--name 10\.0\.0\.7"):
        folders.refuse_unfit(machine, "10.0.0.7")


def test_a_machine_that_is_called_by_its_own_names_alone_is_renewed(authority: Path, tmp_path: Path) -> None:
    folders.issue(authority, tmp_path / "alone", ["127.0.0.1"])
    folders.renew(authority, tmp_path / "alone")
    own, _ = folders.described(tmp_path / "alone")
    assert own.names == ("127.0.0.1", "localhost", "::1")


def test_nothing_is_issued_beyond_the_authoritys_own_end_or_over_what_is_there(authority: Path, machine: Path) -> None:
    with pytest.raises(ConfigurationError, match="rotate"):
        folders.issue(authority, machine.parent / "new", ["a"], days=4000)
    assert not (machine.parent / "new").exists()
    for make in (lambda: folders.issue(authority, machine, ["a"]), lambda: folders.make_authority(authority, "a")):
        with pytest.raises(ConfigurationError, match="would be lost"):
            make()


def test_an_authority_of_which_only_days_are_left_issues_for_as_long_as_it_lasts(tmp_path: Path) -> None:
    folders.make_authority(tmp_path / "old", "old", days=3)
    folders.issue(tmp_path / "old", tmp_path / "late", ["late.example"], days=None)
    own, trusted = folders.described(tmp_path / "late")
    assert abs(own.not_after - trusted.not_after) <= timedelta(seconds=1)


def test_what_an_expired_authority_is_good_for_is_said(tmp_path: Path) -> None:
    folders.make_authority(tmp_path / "old", "old", days=0)
    for command in (folders.rotate, lambda folder: folders.issue(folder, tmp_path / "machine", ["a"])):
        with pytest.raises(ConfigurationError, match="create another authority"):
            command(tmp_path / "old")


def test_an_authority_with_a_key_that_rays_library_does_not_take_issues_nothing(
    authority: Path, tmp_path: Path
) -> None:
    words = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (authority / folders.AUTHORITY_KEY).write_bytes(ed25519.Ed25519PrivateKey.generate().private_bytes(*words))
    with pytest.raises(ConfigurationError, match="elliptic-curve"):
        folders.issue(authority, tmp_path / "machine", ["a"])


@pytest.mark.parametrize("folder", [None, Path("machine")])
def test_nobody_joins_beyond_loopback_in_the_clear_by_mistake(folder: Path | None) -> None:
    with pytest.raises(ConfigurationError, match="--insecure"):
        nodes.checked_certificates(folder, "head:6379", None, insecure=folder is not None)
    assert nodes.checked_certificates(None, "head:6379", None, insecure=True) is None
    assert nodes.checked_certificates(None, "127.0.0.1:6379", None, insecure=False) is None


def test_what_listens_beyond_the_table_of_ports_is_seen() -> None:
    calls, objects, third = (Listener("tcp", 1, "raylet", "*", port) for port in (1, 2, 3))
    assert undocumented([calls, objects]) == []
    others = [
        third,  # one more than the table has
        Listener("tcp", 2, "gcs_server", "10.0.0.1", 1),  # of another kind of address
        Listener("tcp", 3, "dashboard's agent", "*", 1),
        Listener("udp", 1, "gcs_server", "*", 1),
    ]
    assert undocumented([calls, objects, *others]) == others
    assert guards(calls) == {"TLS; the cluster's token"}


@pytest.mark.parametrize("text", ["", "21000", "21000-21003", "80-90", "65530-65536", "21010-21000"])
def test_a_range_in_which_no_node_has_room_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="21000-21099"):
        nodes.checked_ports(text)
    assert nodes.checked_ports("21000-21004") == "21000-21004"


# ── the commands ──────────────────────────────────────────────────────────────────────────────────────────────────────


def said(*words: str | Path, code: int = 0) -> str:
    """What the command line says on standard output, of this process."""
    result = CliRunner().invoke(cli.app, list(map(str, words)))
    if isinstance(result.exception, ConfigurationError):
        assert cli.exit_code(result.exception) == code
        return str(result.exception)
    assert result.exit_code == code, result.output
    return result.stdout


def test_where_nobody_says_how_long_a_certificate_lasts_a_year_or_what_its_authority_has_left(tmp_path: Path) -> None:
    machine = tmp_path / "machine"
    for left, lasts in ((3, 2), (3650, 365)):
        authority = tmp_path / f"{left}-days"
        said("certificates", "authority", authority, "--days", left)
        for command in (
            ("issue", authority, machine, "--name", "m.example", "--replace"),
            ("renew", authority, machine),
        ):
            said("certificates", *command)
            own, _ = json.loads(said("certificates", "show", machine, "--json"))
            assert lasts - 1 <= own["days_left"] <= lasts
    assert "Give at most 2" in said("certificates", "renew", tmp_path / "3-days", machine, "--days", "3", code=2)


def test_the_commands_make_show_and_renew(tmp_path: Path) -> None:
    authority, machine = tmp_path / "fleet", tmp_path / "m1"
    said("certificates", "authority", authority, "--name", "fleet")
    assert authority.stat().st_mode & 0o077 == 0
    assert (authority / folders.AUTHORITY_KEY).stat().st_mode & 0o077 == 0
    issue = ("certificates", "issue", authority, machine, "--name", "10.0.0.5", "--name", "m1.example", "--days", "30")
    said(*issue)
    assert (machine / folders.KEY).stat().st_mode & 0o077 == 0
    assert "would be lost" in said(*issue, code=2)
    for wrong in ("a b", "a..b", "::::", "fe80::1%eth0", "a" * 64, "", "-a"):
        assert "not a host name" in said(*issue[:4], f"--name={wrong}", code=2), wrong
    own, trusted = json.loads(said("certificates", "show", machine, "--json"))
    assert (own["file"], own["issuer"], own["days_left"]) == ("tls.crt", "fleet", 29)
    assert own["names"] == ["10.0.0.5", "m1.example", *folders.OWN_MACHINE]
    assert trusted["subject"] == "fleet"
    said("certificates", "renew", authority, machine, "--days", "60")
    shown = said("certificates", "show", machine)
    assert "(59 days left)" in shown
    assert trusted["sha256"] in shown
    folders.renew(authority, machine, days=0)
    said("certificates", "show", machine, code=1)
    assert "has no certificate" in said("certificates", "show", tmp_path, code=2)
