"""Tickets: where a payload is, what it is, and the credential by which one island may pull it.

A credential is valid for one payload, island, epoch and job: an HMAC-SHA256 over the four names under a secret that the
job's servers share. It says nothing of which bytes: those the ticket's checksum names, so that a server that took the place
of another is as good as the first. Under TLS the server also demands that the island is the subject of the client's
certificate.

Tickets travel by the job's authenticated calls. They are plain data, and their text hides the credential.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field, replace

from orchestrator.errors import TransferRefused

EXPRESS_BYTES = 64 << 10
"""Payloads up to this size go ahead of larger ones: on connections of their own, and past the cap."""
SHARD = "shard"
"""The subject of the process that holds a job's fragments. No island is called so: theirs have a colon."""
NAME_BYTES_MAX = 255
MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Credential:
    """``island`` is who may pull; ``epoch`` is that of the server that issued it."""

    job: str
    epoch: int
    island: str
    payload: str
    mac: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ticket:
    """All that ``ChannelClient.pull`` needs. ``addresses`` are tried in turn; ``local`` is a name on the server's machine.

    ``checksum`` is the composite of ranges of ``range_bytes``. ``tls`` says what the server speaks.
    """

    addresses: tuple[Address, ...]
    payload: str
    size: int
    range_bytes: int
    checksum: int
    credential: Credential
    tls: bool
    local: str | None = None

    def also_at(self, other: Ticket) -> Ticket:
        """The same payload at the addresses of both. Raises ValueError if they are not of the same bytes."""
        if (self.size, self.range_bytes, self.checksum) != (other.size, other.range_bytes, other.checksum):
            raise ValueError(f"{self.payload} and {other.payload} are different bytes")
        if self.credential != other.credential or self.tls != other.tls:
            raise ValueError(f"the tickets of {self.payload} are not of one job, epoch and island")
        return replace(self, addresses=tuple(dict.fromkeys((*self.addresses, *other.addresses))))


def issue(secret: bytes, *, job: str, epoch: int, island: str, payload: str) -> Credential:
    """A credential for one island and payload."""
    return Credential(job, epoch, island, payload, _mac(secret, job, epoch, island, payload))


def require_valid(credential: Credential, secret: bytes, *, job: str, epoch: int, subject: str | None) -> None:
    """Raise TransferRefused unless the credential is of this job and epoch, of the subject's island, and genuine.

    ``subject`` is None on connections that prove none.
    """
    expected = _mac(secret, credential.job, credential.epoch, credential.island, credential.payload)
    if credential.job != job:
        raise _refused(f"it is of job {credential.job}, and this is {job}.")
    if not hmac.compare_digest(expected, credential.mac):
        raise _refused("it was not issued by a server of this job.")
    if credential.epoch != epoch:
        raise _refused(f"it is of epoch {credential.epoch}, and the server's is {epoch}.")
    if subject is not None and credential.island != subject:
        raise _refused(f"it was issued to {credential.island}, and {subject} shows it.")


def _refused(detail: str) -> TransferRefused:
    return TransferRefused(detail=f"The ticket is not valid: {detail}", remedy="Ask for a new one.")


def _mac(secret: bytes, job: str, epoch: int, island: str, payload: str) -> bytes:
    names = [name.encode() for name in (job, str(epoch), island, payload)]
    return hmac.digest(secret, b"".join(len(name).to_bytes(4, "big") + name for name in names), "sha256")
