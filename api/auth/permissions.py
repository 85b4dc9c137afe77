"""What a caller may do: by the role of its token, and whose code its jobs may run. Pure.

    viewer      reads: jobs, islands, merges, events, reports, metrics
    operator    … and changes: submits, cancels, kills, drains, scales, runs chaos plans
    admin       … and manages tokens, and reads the audit trail

The rule depends on method and path only, so that a route added later is protected by default. Every open path is listed
here.

A token has 256 random bits, so its plain SHA-256 digest is stored: slow hashes are for passwords, which can be guessed.

``model.factory``, ``training.inner_optimizer.factory``, ``data.source`` and ``trainer`` may be ``package.module:function``,
which runs in every island with the rights of the service's user. Such code is accepted only from the packages named when the
service was started (``atoll up --allow PACKAGE``), from ``learners`` and from ``torch.optim``. An entry allows a package and
everything in it.

Source: Kubernetes and Grafana, whose roles have these three steps; RFC 6750 (bearer tokens); NIST SP 800-63B, 5.1.1.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Any

from orchestrator.errors import ConfigurationError, Forbidden, Problem, Unauthenticated

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
OWN_PACKAGES = ("learners", "torch.optim")

_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


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


# ── whose code a job may run ──────────────────────────────────────────────────────────────────────────────────────────


def code_problems(document: Mapping[str, Any], packages: Sequence[str]) -> tuple[Problem, ...]:
    """Return a problem for each function that the specification names and no allowed package has.

    The specification may have other problems.
    """
    source = _at(document, "data", "source")
    named = (
        ("data.source", source if isinstance(source, str) and ":" in source else None, "Use files"),
        ("model.factory", _at(document, "model", "factory"), "Use a preset"),
        ("training.inner_optimizer.factory", _at(document, "training", "inner_optimizer", "factory"), "Use a kind"),
        ("trainer", document.get("trainer"), "Leave it out"),
        ("trainer.factory", _at(document, "trainer", "factory"), "Leave it out"),
        ("trainer.model", _function(_at(document, "trainer", "model")), "Name a folder"),
    )
    return tuple(
        _problem(path, function, otherwise, packages)
        for path, function, otherwise in named
        if function and isinstance(function, str) and not _is_allowed(function, packages)
    )


def _at(document: Any, *path: str) -> Any:
    """Return the value at this path of the document, or None."""
    for name in path:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def _function(model: Any) -> str | None:
    """Return what ``trainer.model`` names, if it is no folder."""
    from orchestrator.specification.training_sections import is_function  # brings pydantic

    return model if isinstance(model, str) and is_function(model) else None


def _is_allowed(function: str, packages: Sequence[str]) -> bool:
    module = function.partition(":")[0]
    return any(module == package or module.startswith(package + ".") for package in packages)


def _problem(path: str, function: str, otherwise: str, packages: Sequence[str]) -> Problem:
    package = function.partition(":")[0].partition(".")[0]
    return Problem(
        path,
        f"names {function!r}, but this service allows code only from {', '.join(sorted(packages))}.",
        f"{otherwise}; or restart the service with `atoll up --allow {package}`, if you trust that package.",
    )


def refuse_unfit(packages: Sequence[str]) -> None:
    """Raise ConfigurationError for an entry that is not a package's name."""
    for package in packages:
        if not _PACKAGE.fullmatch(package):
            raise ConfigurationError(detail=f"--allow {package!r} is not a package name. Write it as in an import.")
