"""Folders of a fleet's authority and of its machines' certificates: created, renewed, and checked before they are used.

    AUTHORITY/ca.crt       the authorities that machines trust: the current one, and the former one until it is retired
    AUTHORITY/ca.key       the private key; this folder stays where certificates are issued
    AUTHORITY/ca.key.next  during a rotation: the next key, which is the authority's as soon as ca.crt begins with it
    AUTHORITY/cross.crt    while the former authority is trusted: its certificate for the current one

    MACHINE/tls.crt        the machine's certificate, followed by cross.crt for machines that know only the former authority
    MACHINE/tls.key        its private key
    MACHINE/ca.crt         the authorities that it trusts

Kubernetes' own tools use the same names. A renewed certificate keeps its machine's key, and each file is replaced as a
whole, so no program ever finds a certificate beside another key. ca.crt decides which authority is current, and the key that
fits it is used. So a rotation happens at the instant at which ca.crt is replaced. If it was interrupted, the next ``rotate``
or ``retire`` undoes it (before that instant) or completes it (after).

Every problem is reported with its remedy before anything is started. Nothing here depends on how the folders are used.
"""

from __future__ import annotations

import datetime
import os
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from orchestrator.certificates import AUTHORITY_CERTIFICATE as AUTHORITY_CERTIFICATE
from orchestrator.certificates import AUTHORITY_DAYS, MACHINE_DAYS
from orchestrator.certificates import CERTIFICATE as CERTIFICATE
from orchestrator.certificates import KEY as KEY
from orchestrator.certificates.authority import Authority, new_key, pem_of_certificates, pem_of_key
from orchestrator.errors import ConfigurationError
from orchestrator.system import home_files
from orchestrator.system.disk import LocalDisk

AUTHORITY_KEY, NEXT_KEY, CROSS = "ca.key", "ca.key.next", "cross.crt"
OWN_MACHINE = ("localhost", "127.0.0.1", "::1")
"""Names in every machine's certificate: processes on one machine call each other by these."""
ISSUE = "Issue one with `atoll certificates issue`, and copy its folder to this machine."


@dataclass(frozen=True, slots=True)
class Described:
    """The facts of a certificate, for display and for monitoring its expiry."""

    file: str
    subject: str
    issuer: str
    names: tuple[str, ...]
    not_before: datetime.datetime
    not_after: datetime.datetime
    fingerprint: str

    @property
    def lifetime_s(self) -> float:
        return (self.not_after - self.not_before).total_seconds()

    def days_left(self, now: datetime.datetime) -> int:
        """Return the whole days left; negative after the certificate has expired."""
        return (self.not_after - now).days


# ── an authority ──────────────────────────────────────────────────────────────────────────────────────────────────────


def make_authority(folder: Path, name: str, days: int = AUTHORITY_DAYS) -> None:
    """Create an authority in the folder. Raises ConfigurationError if the folder has one."""
    _refuse_present(folder, AUTHORITY_CERTIFICATE, AUTHORITY_KEY)
    authority = Authority.new(name, datetime.timedelta(days=days), path_length=1)
    _make_folder(folder)
    _write(folder / AUTHORITY_KEY, pem_of_key(authority.private_key), 0o600)
    _write(folder / AUTHORITY_CERTIFICATE, pem_of_certificates([authority.certificate]), 0o644)


def rotate(folder: Path, days: int = AUTHORITY_DAYS) -> None:
    """Create the next authority, which issues from now on. Machines trust both; the former one certifies the new one."""
    former, trusted = _settled(folder)
    if (folder / CROSS).exists():
        raise ConfigurationError(
            detail=f"{folder} is in the middle of a rotation: its former authority is still trusted. Renew and restart "
            f"every machine, retire the former authority (`atoll certificates retire {folder}`), then rotate again."
        )
    number = trusted[0].serial_number % 10**6
    name = f"{_common_name(former.certificate.subject).partition(' after ')[0]} after {number:06d}"
    new = Authority.new(name, datetime.timedelta(days=days), path_length=1)
    _write(folder / NEXT_KEY, pem_of_key(new.private_key), 0o600)
    _write(folder / CROSS, pem_of_certificates([former.vouch_for(new)]), 0o644)
    _write(folder / AUTHORITY_CERTIFICATE, pem_of_certificates([new.certificate, former.certificate]), 0o644)
    _settled(folder)


def retire(folder: Path) -> None:
    """Remove the former authority. Machines that are renewed from now on no longer trust its certificates."""
    authority, _ = _settled(folder)
    if not (folder / CROSS).exists():
        raise ConfigurationError(
            detail=f"{folder} has no former authority to retire. `atoll certificates rotate {folder}` starts a rotation."
        )
    _write(folder / AUTHORITY_CERTIFICATE, pem_of_certificates([authority.certificate]), 0o644)
    with _write_problems(folder / CROSS):
        (folder / CROSS).unlink()


def _settled(folder: Path) -> tuple[Authority, list[x509.Certificate]]:
    """Do the same as ``_authority_of``, after completing or undoing an interrupted rotation, as ca.crt decides."""
    authority, trusted = _authority_of(folder)
    if (folder / NEXT_KEY).exists():
        with _write_problems(folder / AUTHORITY_KEY):
            if _key(folder / NEXT_KEY, "Remove it.").public_key() == trusted[0].public_key():
                os.replace(folder / NEXT_KEY, folder / AUTHORITY_KEY)
            else:
                (folder / CROSS).unlink(missing_ok=True)  # before the key, whose presence marks this file as useless
                (folder / NEXT_KEY).unlink()
    return authority, trusted


def _authority_of(folder: Path) -> tuple[Authority, list[x509.Certificate]]:
    """Return the authority and the certificates that machines trust. Raises ConfigurationError if it cannot issue."""
    remedy = f"Create an authority with `atoll certificates authority {folder}`, or name another folder."
    keys = [folder / name for name in (AUTHORITY_KEY, NEXT_KEY) if name == AUTHORITY_KEY or (folder / name).exists()]
    for key in keys:
        home_files.refuse_unfit(key, "The authority's key", remedy)
    trusted, pairs = _certificates(folder / AUTHORITY_CERTIFICATE, remedy), [(key, _key(key, remedy)) for key in keys]
    path, private_key = next((pair for pair in pairs if pair[1].public_key() == trusted[0].public_key()), pairs[0])
    _refuse_other_key(folder / AUTHORITY_CERTIFICATE, trusted[0], path, private_key)
    _refuse_expired(
        folder / AUTHORITY_CERTIFICATE,
        trusted[0],
        "Certificates that it issued are no longer accepted: create another authority and reissue every folder.",
    )
    return Authority(trusted[0], private_key), trusted


# ── a machine ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def issue(
    authority_folder: Path,
    folder: Path,
    names: Sequence[str],
    days: int | None = MACHINE_DAYS,
    *,
    replace: bool = False,
) -> None:
    """Create a key and certificate for a machine with these names and addresses, in ``folder``.

    The certificate ends with the authority if ``days`` is None.
    """
    if not replace:
        _refuse_present(folder, CERTIFICATE, KEY, AUTHORITY_CERTIFICATE)
    private_key = new_key()
    content = _issued(authority_folder, private_key, names, days)
    _make_folder(folder)
    _write(folder / KEY, pem_of_key(private_key), 0o600)
    for name, text in content.items():
        _write(folder / name, text, 0o644)


def usual_days(authority_folder: Path) -> int:
    """Return the default lifetime of a machine's certificate: a year, or less if its authority ends sooner."""
    authority, _ = _authority_of(authority_folder)
    return max(1, min(MACHINE_DAYS, _left(authority).days))


def renew(authority_folder: Path, folder: Path, days: int = MACHINE_DAYS) -> None:
    """Issue a new certificate with the machine's key and names, and update the authorities that the machine trusts."""
    remedy = "Issue a new folder with `atoll certificates issue`."
    certificate, private_key = _certificates(folder / CERTIFICATE, remedy)[0], _key(folder / KEY, remedy)
    names = names_of(certificate)
    if not names:
        raise ConfigurationError(detail=f"{folder / CERTIFICATE} has no names or addresses. {remedy}")
    content = _issued(authority_folder, private_key, names, days)
    # trusted authorities first, so that the machine never presents a certificate that it would itself refuse
    for name in (AUTHORITY_CERTIFICATE, CERTIFICATE):
        _write(folder / name, content[name], 0o644)


def _issued(
    authority_folder: Path, private_key: ec.EllipticCurvePrivateKey, names: Sequence[str], days: int | None
) -> dict[str, bytes]:
    """Return the content of each file that changes."""
    authority, trusted = _authority_of(authority_folder)
    left = _left(authority)
    lifetime = left if days is None else datetime.timedelta(days=days)
    if lifetime > left:
        shorter = f"Give at most {left.days}, or create" if left.days else "Create"
        raise ConfigurationError(
            detail=f"--days {days} is longer than the authority itself lasts: it ends on "
            f"{authority.certificate.not_valid_after_utc:%Y-%m-%d}. {shorter} the next authority with "
            f"`atoll certificates rotate {authority_folder}`."
        )
    listed = dict.fromkeys([*names, *OWN_MACHINE])
    leaf = authority.issue(names[0], listed, private_key.public_key(), lifetime)
    vouched = len(trusted) > 1 and (authority_folder / CROSS).exists()
    chain = [leaf, *(_certificates(authority_folder / CROSS, "Rotate again.") if vouched else [])]
    return {CERTIFICATE: pem_of_certificates(chain), AUTHORITY_CERTIFICATE: pem_of_certificates(trusted)}


def _left(authority: Authority) -> datetime.timedelta:
    return authority.certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)


def refuse_unfit(folder: Path, address: str | None = None) -> None:
    """Raise ConfigurationError, with a remedy, if a machine with this folder could not talk to others of its fleet.

    ``address`` is the address by which other machines call it.
    """
    home_files.refuse_unfit(folder / KEY, "The machine's key", ISSUE)
    certificates, private_key = _certificates(folder / CERTIFICATE, ISSUE), _key(folder / KEY, ISSUE)
    _certificates(folder / AUTHORITY_CERTIFICATE, ISSUE)
    _refuse_other_key(folder / CERTIFICATE, certificates[0], folder / KEY, private_key)
    _refuse_expired(folder / CERTIFICATE, certificates[0], "Renew it with `atoll certificates renew`.")
    try:
        shake_hands(folder, folder, address)
    except ssl.SSLCertVerificationError as error:
        if address is not None and "mismatch" in error.verify_message:
            raise ConfigurationError(
                detail=f"{folder / CERTIFICATE} is not valid for {address}, the address of this machine, but for "
                f"{', '.join(names_of(certificates[0]))}. Issue one with --name {address}, or give another --own-address."
            ) from error
        if "expired" in error.verify_message:  # the machine's own has been looked at
            raise ConfigurationError(
                detail=f"The authority in {folder / AUTHORITY_CERTIFICATE} has expired, so no machine accepts what it "
                "issued. Create another authority and issue every folder again."
            ) from error
        raise ConfigurationError(
            detail=f"{folder / CERTIFICATE} was not issued by the authority in {folder / AUTHORITY_CERTIFICATE} "
            f"({error.verify_message}), so no machine of its fleet would accept it. {ISSUE}"
        ) from error


def refuse_unfit_pair(certificate: Path, key: Path) -> None:
    """Raise ConfigurationError, with a remedy, if a server could not present this certificate with this key.

    Unlike a machine's folder, the pair may come from any authority, and its key may be of any kind.
    """
    remedy = "Give --certificate and --key PEM files that match."
    _certificates(certificate, remedy)
    try:
        home_files.read_bytes(key)
        # An empty password, so that an encrypted key is refused instead of asking at a terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise ConfigurationError(
                detail=f"--key {key} is not the key of --certificate {certificate}. {remedy}"
            ) from error
        raise ConfigurationError(
            detail=f"--key {key} is not a key in PEM format without a password. {remedy}"
        ) from error
    except OSError as error:
        raise ConfigurationError(detail=f"--key {key}: {error.strerror}. {remedy}") from error


def refuse_expired(certificate: Path) -> None:
    """Raise ConfigurationError if clients would refuse this certificate of a server today."""
    _refuse_expired(certificate, _certificates(certificate, "Give another.")[0], "Renew it, and start this again.")


def context_of(folder: Path, *, server_side: bool) -> ssl.SSLContext:
    """Return a TLS context with the machine's certificate and the authorities that it trusts, as Ray's servers have."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / AUTHORITY_CERTIFICATE)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password="")  # never prompt at a terminal
    context.set_alpn_protocols(["h2"])
    return context


def shake_hands(client_folder: Path, server_folder: Path, address: str | None = None) -> None:
    """Do a TLS handshake in memory. Raises SSLError if a connection between the two would fail."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_context = context_of(client_folder, server_side=False)
    client_context.check_hostname = address is not None
    client = client_context.wrap_bio(to_client, to_server, server_hostname=address)
    server = context_of(server_folder, server_side=True).wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()


# ── the certificates of a folder ──────────────────────────────────────────────────────────────────────────────────────


def described(path: Path) -> list[Described]:
    """Return the certificates of a file, or of a folder of either kind. Raises ConfigurationError if there are none."""
    files = [path / name for name in (CERTIFICATE, AUTHORITY_CERTIFICATE, CROSS)] if path.is_dir() else [path]
    there = [file for file in files if file.exists()]
    if not there:
        raise ConfigurationError(
            detail=f"{path} has no certificate. Give a folder with {CERTIFICATE} or {AUTHORITY_CERTIFICATE}, or a file."
        )
    return [
        facts_of(certificate, file.name)
        for file in there
        for certificate in _certificates(file, "Give a file in PEM format.")
    ]


def facts_of(certificate: x509.Certificate, file: str = "") -> Described:
    return Described(
        file,
        _common_name(certificate.subject),
        _common_name(certificate.issuer),
        tuple(names_of(certificate)),
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
        certificate.fingerprint(hashes.SHA256()).hex(":").upper(),
    )


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses for which the certificate is valid."""
    try:
        listed = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(each.value) for each in listed]


def _common_name(name: x509.Name) -> str:
    return str(next((each.value for each in name), ""))


def _certificates(path: Path, remedy: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(home_files.read_bytes(path))
    except OSError as error:
        raise ConfigurationError(detail=f"The certificate {path}: {error.strerror}. {remedy}") from error
    except ValueError as error:
        raise ConfigurationError(detail=f"{path} is not a certificate in PEM format. {remedy}") from error


def _key(path: Path, remedy: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(home_files.read_bytes(path), password=None)
    except OSError as error:
        raise ConfigurationError(detail=f"The key {path}: {error.strerror}. {remedy}") from error
    except (ValueError, TypeError) as error:
        raise ConfigurationError(detail=f"{path} is not a key in PEM format without a password. {remedy}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        raise ConfigurationError(
            detail=f"{path} is neither an elliptic-curve nor an RSA key, the kinds that Ray's library accepts. {remedy}"
        )
    return key  # type: ignore[return-value]  # an RSA key is only compared here; the TLS library uses it


def _refuse_other_key(
    path: Path, certificate: x509.Certificate, key_path: Path, key: ec.EllipticCurvePrivateKey
) -> None:
    if certificate.public_key() != key.public_key():
        raise ConfigurationError(
            detail=f"{key_path} is not the key of {path}: they come from different folders. Copy both from one folder."
        )


def _refuse_expired(path: Path, certificate: x509.Certificate, remedy: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > ends:
        raise ConfigurationError(detail=f"{path} expired on {ends:%Y-%m-%d %H:%M} UTC. {remedy}")
    if now < begins:
        raise ConfigurationError(
            detail=f"{path} is valid only from {begins:%Y-%m-%d %H:%M} UTC, but this machine's clock says "
            f"{now:%Y-%m-%d %H:%M} UTC. Set the clock."
        )


def _refuse_present(folder: Path, *names: str) -> None:
    present = [name for name in names if (folder / name).exists()]
    if present:
        raise ConfigurationError(
            detail=f"{folder} already has {', '.join(present)}, which would be lost. Give another folder, or remove it "
            "if nothing uses it any more."
        )


def _make_folder(folder: Path) -> None:
    with _write_problems(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace the file atomically and durably. It has ``mode`` at every moment."""
    fresh, disk = path.with_name(f".{path.name}.{os.getpid()}"), LocalDisk()
    with _write_problems(path):
        fresh.unlink(missing_ok=True)
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
                os.fchmod(file.fileno(), mode)  # independent of the umask
                file.write(content)
            disk.sync(fresh)
            os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)  # never leave a part of a key behind
        disk.sync(path)


@contextmanager
def _write_problems(path: Path) -> Iterator[None]:
    """Turn an OSError while writing ``path`` into a ConfigurationError with its remedy."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(detail=f"{path} cannot be written: {error.strerror}. Give another folder.") from error
