"""An authority that issues certificates: of one job, in memory (``JobAuthority``), or of a fleet (``folders``).

It defines the content of a certificate. It knows nothing of files, nor of what a certificate is used for. Each certificate
is valid for both ends of a connection, because processes of a cluster both serve and call.

Source: X.509 as in RFC 5280, by ``cryptography``, elliptic curve P-256.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from orchestrator.certificates import Identity

CLOCK_SKEW = datetime.timedelta(days=1)
"""Certificates are valid from this long ago, because the clocks of regions differ."""
COMMON_NAME_MAX = 64
"""The limit of the standard."""
LIFETIME = datetime.timedelta(days=3650)
"""Longer than any job: a certificate becomes useless with its job's authority, and must not expire during a run."""
ANY_NAME = "server"
"""The host name in certificates. It is never compared."""


@dataclass(frozen=True, slots=True)
class Authority:
    """The certificate and private key of an issuer. ``new`` creates one."""

    certificate: x509.Certificate
    private_key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls, name: str, lifetime: datetime.timedelta, path_length: int = 0) -> Authority:
        """Create a self-signed authority. ``path_length`` is the longest chain of further authorities that it may sign."""
        private_key = new_key()
        subject = _name(name)
        builder = _of_authority(_unsigned(subject, subject, private_key.public_key(), lifetime), path_length)
        builder = builder.add_extension(_key_id(private_key.public_key()), critical=False)
        return cls(builder.sign(private_key, hashes.SHA256()), private_key)

    def issue(
        self, subject: str, names: Iterable[str], public_key: ec.EllipticCurvePublicKey, lifetime: datetime.timedelta
    ) -> x509.Certificate:
        """Issue a certificate for a process or machine with these names and addresses."""
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = _unsigned(_name(subject), self.certificate.subject, public_key, lifetime)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_general, names))), critical=False)
        return self._sign(builder.add_extension(purposes, critical=False), public_key)

    def vouch_for(self, other: Authority) -> x509.Certificate:
        """Certify the other authority's name and key. A peer that trusts this authority then trusts the other, too."""
        public_key = other.private_key.public_key()
        lifetime = self.certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        builder = _unsigned(other.certificate.subject, self.certificate.subject, public_key, lifetime)
        return self._sign(_of_authority(builder, 0), public_key)

    def _sign(self, builder: x509.CertificateBuilder, public_key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.private_key.public_key())
        builder = builder.add_extension(_key_id(public_key), critical=False).add_extension(issuer, critical=False)
        return builder.sign(self.private_key, hashes.SHA256())


class JobAuthority:
    """The certificate authority of one job. ``new`` creates one. It exists only in the memory of one process.

    It issues an ``Identity`` to each process of the job. Its own private key never leaves its process. An identity's key
    goes to its own process only, in the job's authenticated calls, and is never left on a disk (``Identity.context``).
    """

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    @classmethod
    def new(cls, job: str) -> JobAuthority:
        return cls(Authority.new(f"atoll job {job}", LIFETIME))

    def issue(self, subject: str) -> Identity:
        """Create a key and certificate for one process, valid for serving and pulling."""
        private_key = new_key()
        certificate = self._authority.issue(subject, [ANY_NAME], private_key.public_key(), LIFETIME)
        own = pem_of_certificates([self._authority.certificate])
        return Identity(own, pem_of_certificates([certificate]), pem_of_key(private_key))


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def pem_of_certificates(certificates: Iterable[x509.Certificate]) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def pem_of_key(private_key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the key as PEM without encryption. The caller protects the file that it writes."""
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return private_key.private_bytes(encoding, form, serialization.NoEncryption())


def _of_authority(builder: x509.CertificateBuilder, path_length: int) -> x509.CertificateBuilder:
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
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
    return builder.add_extension(usage, critical=True)


def _key_id(public_key: ec.EllipticCurvePublicKey) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(public_key)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:COMMON_NAME_MAX])])


def _general(name: str) -> x509.GeneralName:
    """Return an IP address or a DNS name, as TLS clients compare them with what they called."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - CLOCK_SKEW).not_valid_after(now + lifetime)
