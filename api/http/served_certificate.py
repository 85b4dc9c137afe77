"""The service's own certificate, read again where its files have changed: new handshakes show the new one.

Whoever renews it tells nobody, and need not: connections that are there go on, and the next one is made with what the files
hold by then. Files that do not belong together, as between the writing of two, leave the service with what it has.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

logger = logging.getLogger(__name__)


class ServedCertificate:
    """Of a context that is in use."""

    def __init__(self, context: ssl.SSLContext, certificate: Path, key: Path) -> None:
        self._context, self._files = context, (certificate, key)
        self._read = self._refused = self._seen()

    def refresh(self) -> None:
        """The next handshake of the context shows what the files hold, if they are of use."""
        seen = self._seen()
        if seen in (self._read, self._refused):
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files, password="")
            self._context.load_cert_chain(*self._files, password="")
        except OSError as error:
            self._refused = seen
            logger.warning("%s and its key have changed and cannot be used: %s", self._files[0], error)
            return
        self._read = seen
        logger.info("the certificate %s has changed, and is shown from now on", self._files[0])

    def _seen(self) -> tuple[tuple[int, ...], ...]:
        """Empty for a file that is not there."""
        return tuple(_state(path) for path in self._files)


def _state(path: Path) -> tuple[int, ...]:
    try:
        about = path.stat()
    except OSError:
        return ()
    return (about.st_ino, about.st_mtime_ns, about.st_size)
