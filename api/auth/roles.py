"""The three roles, and the role that each request needs. Pure.

    viewer      reads: jobs, islands, merges, events, reports, metrics
    operator    … and changes: submits, cancels, kills, drains, scales, runs chaos plans
    admin       … and manages tokens, and reads the audit trail

The rule depends on method and path only, so that a route added later is protected by default. Every open path is listed
here.

A token has 256 random bits, so its plain SHA-256 digest is stored: slow hashes are for passwords, which can be guessed.

Source: Kubernetes and Grafana, whose roles have these three steps; RFC 6750 (bearer tokens); NIST SP 800-63B, 5.1.1.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

from orchestrator.errors import Forbidden, Unauthenticated

PREFIX = "atoll_"
"""Lets secret scanners recognise a token that was committed or logged by mistake."""

READS = frozenset({"GET", "HEAD"})
OPEN = frozenset({"/", "/healthz", "/readyz", "/openapi.json", "/docs"})
OPEN_FOLDER = "/web/"
"""The static files of the web page, which hold no data."""
FOR_ADMINS = ("/v1/tokens", "/v1/audit")

TOKEN_REMEDY = (
    "Send the header `Authorization: Bearer TOKEN`. The installation's own token is in the file `token` of its home; "
    "an admin creates others with `atoll token create`. On the command line, use --token or ATOLL_TOKEN."
)


class Role(StrEnum):
    """The role of a token. Each role may do everything that the roles before it may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def reaches(self, needed: Role) -> bool:
        order = list(Role)
        return order.index(self) >= order.index(needed)


def role_of(name: str) -> Role | None:
    """Return the role of that name, or None if there is no such role, as in a damaged row."""
    return Role(name) if name in Role.__members__.values() else None


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request with a valid token: the token's name and its role."""

    name: str
    role: Role


def required_role(method: str, path: str) -> Role | None:
    """Return the role that this request needs, or None if it is open to all."""
    reads = method in READS
    if reads and (path in OPEN or path.startswith(OPEN_FOLDER)):
        return None
    if any(path == root or path.startswith(root + "/") for root in FOR_ADMINS):
        return Role.ADMIN
    return Role.VIEWER if reads else Role.OPERATOR


def refuse_role(principal: Principal, method: str, path: str) -> None:
    """Raise Forbidden unless the principal's role is sufficient for the request."""
    needed = required_role(method, path)
    if needed and not principal.role.reaches(needed):
        raise Forbidden(
            detail=f"{method} {path} needs the role {needed}; the token {principal.name!r} has the role {principal.role}.",
            remedy=f"Ask an admin for a token with the role {needed}: `atoll token create NAME --role {needed}`.",
        )


def bearer(authorization: str) -> str:
    """Return the token in this header. Raises Unauthenticated if there is none."""
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated(detail="The request carries no token.", remedy=TOKEN_REMEDY)
    return token.strip()


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """Return the digest that is stored instead of the token: it recognises the token and does not reveal it."""
    return sha256(token.encode()).hexdigest()
