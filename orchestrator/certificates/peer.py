"""What comes of a TLS connection to a server that this machine has never talked to: asked before anything is started.

Ray's own client says "unavailable" whatever the reason is, again and again. So this asks once, with the machine's folder,
and says what is the matter. Refuses to know what the server serves: that it is gRPC matters only in that it speaks first,
which shows that it has taken our certificate.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from orchestrator.certificates.folders import AUTHORITY_CERTIFICATE, CERTIFICATE, context_of
from orchestrator.errors import ConfigurationError

PATIENCE_S = 10.0
NOTHING_STARTED = "Nothing was started here."


def refuse_foreign(host: str, port: int, folder: Path) -> None:
    """Raises ConfigurationError where the server there and the machine with this folder do not trust each other.

    Returns where they do, and where nobody answers: that is another matter.
    """
    where = f"The head at {host}:{port}"
    try:
        with socket.create_connection((host, port), PATIENCE_S) as plain:
            context = context_of(folder, server_side=False)
            with context.wrap_socket(plain, server_hostname=host) as connection:
                if connection.recv(1):
                    return
        shown = "it ended the connection"
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(detail=_foreign_server(where, host, folder, error.verify_message)) from error
    except ssl.SSLError as error:
        if not _is_refusal(error):
            raise ConfigurationError(
                detail=f"{where} does not speak TLS ({error.reason}). Start it with certificates, as "
                f"deploy/compose.yaml does; or, where something else encrypts, join with --insecure. {NOTHING_STARTED}"
            ) from error
        shown = str(error.reason)
    except ConnectionResetError:
        shown = "it reset the connection"
    except OSError:
        return
    raise ConfigurationError(
        detail=f"{where} does not take this machine's certificate, {folder / CERTIFICATE} ({shown}): another authority has "
        f"issued it, or it has expired there. Issue one with the authority of that cluster. {NOTHING_STARTED}"
    )


def speaks_tls(host: str, port: int) -> bool:
    """Whether the server there does, whoever it trusts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, port), PATIENCE_S) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return _is_refusal(error)
    except OSError:
        return False


def _foreign_server(where: str, host: str, folder: Path, message: str) -> str:
    if "mismatch" in message:
        return (
            f"{where} shows a certificate that is not for {host} ({message}). Issue the head one with --name {host}, or "
            f"call it by a name that it has. {NOTHING_STARTED}"
        )
    if "expired" in message:
        return f"{where} shows a certificate that has expired. Renew the head's, and start it again. {NOTHING_STARTED}"
    return (
        f"{where} shows a certificate of another authority than {folder / AUTHORITY_CERTIFICATE} ({message}): it is another "
        f"cluster, or somebody between. Issue this machine's folder with the authority of that cluster. {NOTHING_STARTED}"
    )


def _is_refusal(error: ssl.SSLError) -> bool:
    """A TLS alert, which only a server that speaks TLS sends; and not what is no TLS at all."""
    return "ALERT" in (error.reason or "")
