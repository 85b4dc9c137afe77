"""Certificates of machines and of processes: their authorities, the folders that hold them, and their checks.

This package knows nothing of Ray, nor of the content of connections. An ``Identity`` is here, and not beside what issues it,
because processes without encryption, which are those on one machine, then need not import ``cryptography``.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

AUTHORITY_DAYS, MACHINE_DAYS = 3650, 365
"""One of Ray's servers keeps the certificate with which it started, so a machine's certificate must outlast its uptime."""
AUTHORITY_CERTIFICATE, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
"""The files of a machine's folder."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One process's certificate and private key, and the authority's certificate that verifies its peers, as PEM."""

    authority: bytes
    certificate: bytes
    private_key: bytes = field(repr=False)

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        """Return a TLS context with this identity. It accepts only peers with a certificate of the same authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # certificates name islands, not hosts
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode("ascii"))
        with tempfile.TemporaryDirectory(prefix="atoll-identity-") as folder:  # ssl accepts only file names
            chain = Path(folder) / "identity.pem"
            descriptor = os.open(chain, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.private_key + self.certificate)
            context.load_cert_chain(chain)
        return context
