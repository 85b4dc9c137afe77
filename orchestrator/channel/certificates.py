"""The certificates of one job: an authority made in memory, and an identity for each process of the job.

The authority's private key never leaves the process that made it; an identity's key goes to its own process only,
with the job's own authenticated calls, and is written to no disk that outlives the call (``Identity.context``). Nobody but
the processes of this job has a certificate of this authority, so a connection that both ends have verified is one within
the job. Names in a certificate say for whom it was issued; they are no host names, because islands move between hosts.

Source: mutual TLS as in RFC 8446 section 4.4.2.
"""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.certificates.authority import Authority, new_key, pem_of_certificates, pem_of_key

LIFETIME = datetime.timedelta(days=3650)
"""Longer than any job: a certificate dies with its job's authority, not by a date in the middle of a run."""
ANY_NAME = "server"
"""Stands where others have a host's name, which nobody compares here."""


@dataclass(frozen=True, slots=True)
class Identity:
    """PEM texts: the own certificate and private key, and the authority's certificate, by which peers are verified."""

    authority: bytes
    certificate: bytes
    private_key: bytes = field(repr=False)

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        """A context that shows this identity, and accepts only peers whose certificate the same authority has issued."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the authority vouches for the job; hosts have no names in it
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode("ascii"))
        with tempfile.TemporaryDirectory(prefix="atoll-identity-") as folder:  # the module takes file names only
            chain = Path(folder) / "identity.pem"
            descriptor = os.open(chain, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.private_key + self.certificate)
            context.load_cert_chain(chain)
        return context


class JobAuthority:
    """The authority of one job, for as long as its process lives. ``new`` makes one."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    @classmethod
    def new(cls, job: str) -> JobAuthority:
        return cls(Authority.new(f"atoll job {job}", LIFETIME))

    def issue(self, subject: str) -> Identity:
        """A new key and certificate for one process, which may both serve and pull."""
        private_key = new_key()
        certificate = self._authority.issue(subject, [ANY_NAME], private_key.public_key(), LIFETIME)
        own = pem_of_certificates([self._authority.certificate])
        return Identity(own, pem_of_certificates([certificate]), pem_of_key(private_key))
