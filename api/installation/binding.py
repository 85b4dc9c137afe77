"""The address that the service listens on, the certificates that clients trust, and the check for passwords in URLs.

The service listens on loopback by default, and beyond it only with TLS or ``--insecure``: without TLS, others on the network
could read the tokens. ``atoll up`` binds before it starts anything, so that a refusal costs nothing; this module is light.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from api.installation.home import DATABASE_VARIABLE
from orchestrator.errors import ConfigurationError, InfrastructureError
from orchestrator.system.ports import EVERYWHERE, LOOPBACK, is_host, is_loopback, refuse_uncallable


def refuse_password_in_view(url: str | None) -> None:
    """Raise ConfigurationError if ``url`` is empty or holds a password; the message does not repeat it."""
    if url is None:
        return
    if not url.strip():
        raise ConfigurationError(detail="--database is empty, as from an unset variable. Give a URL, or leave it out.")
    try:
        parts = urlsplit(url)
        secret = parts.password or any("password" in name.lower() for name, _ in parse_qsl(parts.query))
    except ValueError:
        secret = "@" in url
    if secret:
        raise ConfigurationError(
            detail="--database contains a password, and all users of this machine can see command lines. "
            f"Give the URL in the environment variable {DATABASE_VARIABLE}, or the password in a file that the database's "
            "driver reads (for PostgreSQL, ~/.pgpass)."
        )


AUTHORITY_BESIDE = "ca.crt"
PORT_FIRST = 8470
PORT_COUNT = 100


AUTHORITIES_VARIABLE = "SSL_CERT_FILE"
"""As for curl and OpenSSL: a file with the authorities that issue the certificates of services."""


def authorities() -> ssl.SSLContext | bool:
    """Return what to trust at an address that is not from a home. Raises ConfigurationError for an unusable file."""
    file = os.environ.get(AUTHORITIES_VARIABLE)
    if not file:
        return True
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:
        raise ConfigurationError(
            detail=f"{AUTHORITIES_VARIABLE} {file} cannot be used: {error.strerror or error}. Name a file with certificates "
            "in PEM format, such as the ca.crt of the fleet."
        ) from error


def untrusted(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return the refusal of the service's certificate that caused this error, if one did."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def trusting(certificate: Path) -> ssl.SSLContext:
    """Return a context that trusts this certificate, and those of the authority beside it if there is one.

    A machine's folder from ``atoll certificates`` holds both, so a client that runs for long accepts a renewed certificate.
    Raises ConfigurationError for unusable files.
    """
    beside = certificate.with_name(AUTHORITY_BESIDE)
    named = certificate
    try:
        context = ssl.create_default_context(cafile=certificate)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust it whatever its issuer
        if beside.exists():
            named = beside
            context.load_verify_locations(beside)
    except OSError as error:
        raise ConfigurationError(
            detail=f"{named}, the certificate of the service, cannot be used ({error.strerror}). Copy it again from the "
            "service's machine."
        ) from error
    return context


@dataclass(frozen=True, slots=True)
class Binding:
    """An address to listen on: HTTPS with a certificate and its key. ``insecure`` allows HTTP beyond loopback."""

    host: str = LOOPBACK
    certificate: Path | None = None
    key: Path | None = None
    insecure: bool = False

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    def refuse_if_unfit(self) -> None:
        """Raise ConfigurationError if tokens would cross a network in the clear, or the files are unusable."""
        if not is_host(self.host.strip("[]")):
            raise ConfigurationError(
                detail=f"--host {self.host!r} is not an address. Give one of this machine's without a port, or leave it out."
            )
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError(detail="--certificate and --key belong together. Give both, or neither.")
        if self.certificate and self.insecure:
            raise ConfigurationError(detail="--certificate and --insecure contradict each other. Leave one out.")
        if self.certificate and self.key:
            from orchestrator.certificates import folders  # late: few commands need cryptography

            folders.refuse_unfit_pair(self.certificate, self.key)
        if not (self.loopback or self.certificate or self.insecure):
            raise ConfigurationError(
                detail=f"--host {self.host} is not a loopback address, and without TLS every token would cross the "
                "network in the clear. Give --certificate and --key; or keep 127.0.0.1 and use a tunnel (ssh -L); or "
                "--insecure if something else encrypts."
            )

    def listen(self, ports: Iterable[int]) -> socket.socket | None:
        """Listen on the first free port of these; return None if none is free. Raises if this machine lacks the host."""
        host = self.host.strip("[]")
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise ConfigurationError(
                detail=f"--host {self.host} cannot be resolved: {error.strerror}. Give an address of this machine."
            ) from error
        for port in ports:
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address[0], port))
                listener.listen(128)
                if not ip_address(str(address[0]).partition("%")[0]).is_unspecified:
                    refuse_uncallable(str(address[0]))
                return listener
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRINUSE:
                    detail = f"Cannot listen on port {port} of {self.host}: {error.strerror}."
                    raise InfrastructureError(detail=detail, remedy="Choose another --host or --port.") from error
        return None

    def url(self, listener: socket.socket) -> str:
        """Return the URL for programs on this machine: with loopback if the service listens on all addresses."""
        host = "localhost" if self.host in EVERYWHERE and self.certificate else self.host
        host = LOOPBACK if host in EVERYWHERE else host.strip("[]")
        scheme = "https" if self.certificate else "http"
        port = listener.getsockname()[1]
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def bound_listener(binding: Binding, port: int | None, before: int | None) -> socket.socket:
    """Return a socket on the given port; else on the previous one, so that addresses stay; else on the first free one.

    The service inherits the socket: a port that was only probed could be taken before the service binds it.
    """
    had = [before] if before else []
    listener = binding.listen([port] if port is not None else chain(had, range(PORT_FIRST, PORT_FIRST + PORT_COUNT)))
    if listener:
        return listener
    ports = f"Port {port} is" if port is not None else f"The ports {PORT_FIRST} to {PORT_FIRST + PORT_COUNT - 1} are"
    raise InfrastructureError(detail=f"{ports} in use by other programs.", remedy="Give another with --port.")
