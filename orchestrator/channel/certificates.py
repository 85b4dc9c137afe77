"""The certificates of one job: an authority made in memory, and an identity for each process of the job.

The authority's private key never leaves the process that made it; an identity's key goes to its own process only,
with the job's own authenticated calls, and is written to no disk that outlives the call (``Identity.context``). Nobody but
the processes of this job has a certificate of this authority, so a connection that both ends have verified is one within
the job. Names in a certificate say for whom it was issued; they are no host names, because islands move between hosts.

Source: mutual TLS as in RFC 8446 section 4.4.2; X.509 by ``cryptography``, elliptic curve P-256.
"""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=3650)
"""Longer than any job: a certificate dies with its job's authority, not by a date in the middle of a run."""
CLOCK_SKEW = datetime.timedelta(days=1)
"""Certificates are valid from so long ago: clocks of regions differ."""


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

    def __init__(self, certificate: x509.Certificate, private_key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._private_key = certificate, private_key

    @classmethod
    def new(cls, job: str) -> JobAuthority:
        private_key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"atoll job {job}")
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = _unsigned(name, name, private_key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return cls(builder.add_extension(usage, critical=True).sign(private_key, hashes.SHA256()), private_key)

    def issue(self, subject: str) -> Identity:
        """A new key and certificate for one process, which may both serve and pull."""
        private_key = ec.generate_private_key(ec.SECP256R1())
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = _unsigned(_name(subject), self._certificate.subject, private_key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("server")]), critical=False)
        certificate = builder.add_extension(purposes, critical=False).sign(self._private_key, hashes.SHA256())
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        return Identity(
            self._certificate.public_bytes(encoding),
            certificate.public_bytes(encoding),
            private_key.private_bytes(encoding, form, serialization.NoEncryption()),
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])  # 64 is the standard's most


def _unsigned(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - CLOCK_SKEW).not_valid_after(now + LIFETIME)
