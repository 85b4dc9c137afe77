"""The three roles, and the role that each request needs. Pure.

    viewer      reads: jobs, islands, merges, events, reports, metrics
    operator    … and changes: submits, cancels, kills, drains, scales, plans of chaos
    admin       … and decides who else may: tokens, and the audit trail

The rule goes by method and path, and by nothing that a route says of itself: a route that is added later is refused to
strangers before anybody thinks of it. What is open to all is listed here, and is all there is.

A token is 256 random bits, so its plain SHA-256 digest is kept: slow hashes protect passwords, which can be guessed.

Source: Kubernetes and Grafana, whose roles have these three steps; RFC 6750 (bearer tokens); NIST SP 800-63B, 5.1.1.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

from orchestrator.errors import Forbidden, Unauthenticated

PREFIX = "atoll_"
"""So that a token which strayed into a repository or a log is recognised by those who look for such."""

READS = frozenset({"GET", "HEAD"})
OPEN = frozenset({"/", "/healthz", "/readyz", "/openapi.json", "/docs"})
OPEN_FOLDER = "/web/"
"""The files of the page, which hold no data."""
FOR_ADMINS = ("/v1/tokens", "/v1/audit")

TOKEN_REMEDY = (
    "Send the header `Authorization: Bearer TOKEN`. The installation's own token is in the file `token` of its home; "
    "other tokens come from an admin (`atoll token create`). On the command line: --token, or ATOLL_TOKEN."
)


class Role(StrEnum):
    """What a token allows. Each role may do all that the ones before it may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def reaches(self, needed: Role) -> bool:
        order = list(Role)
        return order.index(self) >= order.index(needed)


def role_of(name: str) -> Role | None:
    """The role of that name; None where it names none, as in a row that is damaged."""
    return Role(name) if name in Role.__members__.values() else None


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request with a valid token: the token's name and its role."""

    name: str
    role: Role


def required_role(method: str, path: str) -> Role | None:
    """The role that this request needs; None if it is open to all."""
    reads = method in READS
    if reads and (path in OPEN or path.startswith(OPEN_FOLDER)):
        return None
    if any(path == root or path.startswith(root + "/") for root in FOR_ADMINS):
        return Role.ADMIN
    return Role.VIEWER if reads else Role.OPERATOR


def refuse_role(principal: Principal, method: str, path: str) -> None:
    """Raises Forbidden unless the principal's role reaches what the request needs."""
    needed = required_role(method, path)
    if needed and not principal.role.reaches(needed):
        raise Forbidden(
            detail=f"{method} {path} needs the role {needed}; the token {principal.name!r} has the role {principal.role}.",
            remedy=f"Ask an admin for a token of the role {needed}: `atoll token create NAME --role {needed}`.",
        )


def bearer(authorization: str) -> str:
    """The token that this header carries. Raises Unauthenticated if it carries none."""
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated(detail="The request carries no token.", remedy=TOKEN_REMEDY)
    return token.strip()


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """The digest that is stored of a token: enough to recognise it, and not to show it."""
    return sha256(token.encode()).hexdigest()
