"""The address that the service listens on: loopback unless told otherwise, beyond it only under TLS or by force.

Responsible for listening sockets and for the one rule about them: a token that crosses a network in the clear belongs to
whoever listens there. Light, because ``atoll up`` binds before it starts anything, so that a refusal costs nothing.

Whom clients trust of a service with a certificate of its own: that one, and what its authority issues after it.

A database's address on a command line: everybody on the machine sees those, so a password may not be in it.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from api.installation.home import DATABASE_VARIABLE
from orchestrator.errors import ConfigurationError, InfrastructureError
from orchestrator.system.ports import EVERYWHERE, LOOPBACK, is_loopback


def refuse_password_in_view(url: str | None) -> None:
    """Raises ConfigurationError, without the password, if ``url`` has one."""
    if url is None:
        return
    try:
        parts = urlsplit(url)
        secret = parts.password or any("password" in name.lower() for name, _ in parse_qsl(parts.query))
    except ValueError:
        secret = "@" in url
    if secret:
        raise ConfigurationError(
            detail="--database has a password in it, and everybody on this machine sees command lines. "
            f"Give the same URL in the environment variable {DATABASE_VARIABLE}, or the password in a file that the "
            "database's driver reads (for PostgreSQL, ~/.pgpass)."
        )


AUTHORITY_BESIDE = "ca.crt"


def trusting(certificate: Path) -> ssl.SSLContext:
    """A context that takes this certificate of a service, and what the authority issues that lies beside it, if one does.

    So a machine's folder of ``atoll certificates`` does, and whoever waits for long bears its certificate being renewed.
    Raises ConfigurationError for files that are none.
    """
    beside = certificate.with_name(AUTHORITY_BESIDE)
    named = certificate
    try:
        context = ssl.create_default_context(cafile=certificate)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it is named here, whoever has issued it
        if beside.exists():
            named = beside
            context.load_verify_locations(beside)
    except OSError as error:
        raise ConfigurationError(
            detail=f"{named}, by which the service is known here, cannot be used ({error.strerror}). Copy it anew from the "
            "service's machine."
        ) from error
    return context


@dataclass(frozen=True, slots=True)
class Binding:
    """An address to listen on. With a certificate and its key it is HTTPS; ``insecure`` allows HTTP on a network."""

    host: str = LOOPBACK
    certificate: Path | None = None
    key: Path | None = None
    insecure: bool = False

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    def refuse_if_unfit(self) -> None:
        """Raises ConfigurationError if tokens would cross a network in the clear, or the files are no use."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError(detail="--certificate and --key belong together; give both, or neither.")
        if self.certificate and self.key:
            try:
                # An empty password, so that a locked key is refused instead of asking at a terminal that nobody watches.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")
            except OSError as error:
                raise ConfigurationError(
                    detail=f"--certificate {self.certificate} and --key {self.key} cannot be used ({error.strerror}). They "
                    "must be files in PEM format that belong together, the key without a password."
                ) from error
        if not (self.loopback or self.certificate or self.insecure):
            raise ConfigurationError(
                detail=f"--host {self.host} is not a loopback address, and without TLS every token would cross the "
                "network in the clear. Give --certificate and --key; or keep 127.0.0.1 and use a tunnel (ssh -L); or, "
                "where something else encrypts, --insecure."
            )

    def listen(self, ports: Iterable[int]) -> socket.socket | None:
        """A socket on the first of these ports that is free; None if none is. Raises if the host is not of this machine."""
        host = self.host.strip("[]")
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise ConfigurationError(detail=f"--host {self.host} cannot be resolved: {error.strerror}.") from error
        for port in ports:
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address[0], port))
                listener.listen(128)
                return listener
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRINUSE:
                    detail = f"{self.host} port {port} cannot be listened on: {error.strerror}."
                    raise InfrastructureError(detail=detail, remedy="Choose another --host or --port.") from error
        return None

    def url(self, listener: socket.socket) -> str:
        """The host by which programs of this machine reach the service: loopback, where it listens everywhere."""
        host = "localhost" if self.host in EVERYWHERE and self.certificate else self.host
        host = LOOPBACK if host in EVERYWHERE else host.strip("[]")
        scheme = "https" if self.certificate else "http"
        port = listener.getsockname()[1]
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
