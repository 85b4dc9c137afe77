"""Tests a TLS connection to a server that this machine has not talked to before, so that a refusal is explained.

It also reads the certificate that a server presents. A server of Ray's keeps the one with which it started, so its file on
disk may be newer.

Ray's own client only says "unavailable", whatever the reason, again and again. This module connects once with the machine's
folder and reports what is wrong. It knows of the server only that it speaks gRPC, in which the server sends first: the
first byte shows that it has accepted our certificate.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from cryptography import x509

from orchestrator.certificates import AUTHORITY_CERTIFICATE, CERTIFICATE
from orchestrator.certificates.folders import Described, context_of, described, facts_of
from orchestrator.errors import ConfigurationError

PATIENCE_S = 10.0
THREADS_MAX = 32
NOTHING_STARTED = "Nothing was started here."
HTTP_2, REFUSED = "h2", "refused"
HTTP_2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""With an empty frame of settings. Source: RFC 9113, 3.4."""
HTTP_2_SETTINGS = b"\4"
"""The type of the frame with which a server begins, in its fourth byte."""


def refuse_foreign(host: str, port: int, folder: Path) -> None:
    """Raise ConfigurationError if the server and the machine with this folder do not accept each other's certificates.

    Returns if they do, and also if nothing answers, which is reported elsewhere.
    """
    where = f"The head at {host}:{port}"
    try:
        with socket.create_connection((host, port), PATIENCE_S) as plain:
            context = context_of(folder, server_side=False)
            with context.wrap_socket(plain, server_hostname=host) as connection:
                if connection.recv(1):
                    return
        shown = "it closed the connection"
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(detail=_foreign_server(where, host, folder, error.verify_message)) from error
    except ssl.SSLError as error:
        if not _is_refusal(error):
            raise ConfigurationError(
                detail=f"{where} does not speak TLS ({error.reason}). Start it with certificates, as "
                f"deploy/compose.yaml does; or, if something else encrypts, join with --insecure. {NOTHING_STARTED}"
            ) from error
        shown = str(error.reason)
    except ConnectionResetError:
        shown = "it reset the connection"
    except OSError:
        return
    raise ConfigurationError(
        detail=f"{where} does not accept this machine's certificate, {folder / CERTIFICATE} ({shown}): another authority "
        f"issued it, or it has expired. Issue one with the authority of that cluster. {NOTHING_STARTED}"
    )


def speaks_tls(host: str, port: int) -> bool:
    """Return whether the server speaks TLS, whichever certificates it trusts."""
    return _protocol_by_tls(host, port, PATIENCE_S) is not None


def why_no_head(host: str, port: int, within_s: float) -> str:
    """Return why what listens there is no head of a cluster; empty if it may be one, with TLS or without.

    A head begins each connection with a frame of HTTP/2. Raises OSError if nothing can be reached.
    """
    begun, is_closed = b"", False
    with socket.create_connection((host, port), within_s) as plain:
        try:
            plain.sendall(HTTP_2_PREFACE)
            begun = plain.recv(64)
            is_closed = not begun
        except TimeoutError:
            pass
        except OSError:
            is_closed = True
    if begun[3:4] == HTTP_2_SETTINGS:
        return ""
    if begun.startswith((b"HTTP/", b"<")):  # of HTTP/0.9 without a status line
        return "an HTTP server listens at that port, such as a service of atoll"
    protocol = _protocol_by_tls(host, port, within_s)
    if protocol is not None:
        return (
            "" if protocol in (HTTP_2, REFUSED) else "an HTTPS server listens at that port, such as a service of atoll"
        )
    if begun:
        return f"another program listens at that port, which says {begun[:24].decode(errors='replace').strip()!r}"
    if is_closed:
        return "what listens at that port closes the connection, as no head does"
    return f"something listens at that port and says nothing within {within_s:.0f} s, so it hangs or is no head"


def _protocol_by_tls(host: str, port: int, within_s: float) -> str | None:
    """Return the protocol that the server chooses by TLS, ``REFUSED`` if it refuses us, and None if it speaks no TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([HTTP_2])
    try:
        with socket.create_connection((host, port), within_s) as plain, context.wrap_socket(plain) as connection:
            return connection.selected_alpn_protocol() or ""
    except ssl.SSLError as error:
        return REFUSED if _is_refusal(error) else None
    except OSError:
        return None


def presented(host: str, port: int, folder: Path, within_s: float) -> x509.Certificate:
    """Return the certificate that the server presents, even an expired one. Raises OSError if there is no handshake."""
    context = context_of(folder, server_side=False)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((host, port), within_s) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        encoded = connection.getpeercert(binary_form=True)
    if encoded is None:
        raise ssl.SSLError(f"{host}:{port} presented no certificate")
    return x509.load_der_x509_certificate(encoded)


def in_use(servers: Sequence[tuple[str, str, int]], folder: Path, within_s: float) -> dict[str, Described]:
    """Return the certificates that these servers (place, host, port) present, and the authority's, by place.

    Of several at one place it is the one that expires first. ``folder`` is this machine's. A server that does not answer is
    left out, and others report that.
    """

    def facts(server: tuple[str, str, int]) -> Described | None:
        with suppress(OSError):
            return facts_of(presented(*server[1:], folder, within_s))
        return None

    with ThreadPoolExecutor(min(len(servers), THREADS_MAX), "certificates") as pool:
        shown = [(place, fact) for (place, *_), fact in zip(servers, pool.map(facts, servers), strict=True) if fact]
    shown.append(("authority", described(folder / AUTHORITY_CERTIFICATE)[0]))
    first: dict[str, Described] = {}
    for place, fact in sorted(shown, key=lambda one: one[1].not_after):
        first.setdefault(place, fact)
    return dict(sorted(first.items()))


def _foreign_server(where: str, host: str, folder: Path, message: str) -> str:
    if "mismatch" in message:
        return (
            f"{where} has a certificate that is not valid for {host} ({message}). Issue the head one with --name {host}, "
            f"or call it by a name that is in its certificate. {NOTHING_STARTED}"
        )
    if "expired" in message:
        return f"{where} has a certificate that has expired. Renew it and restart the head. {NOTHING_STARTED}"
    return (
        f"{where} has a certificate of an authority that is not in {folder / AUTHORITY_CERTIFICATE} ({message}): it is "
        f"another cluster, or someone intercepts it. Issue this machine's folder with the authority of that cluster. "
        f"{NOTHING_STARTED}"
    )


def _is_refusal(error: ssl.SSLError) -> bool:
    """Return True for a TLS alert, which only a server that speaks TLS sends."""
    return "ALERT" in (error.reason or "")
