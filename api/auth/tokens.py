"""Tokens and their life: created, shown once, recognised, expired, revoked. With their rows, and those of the audit trail.

``AccessStore`` has the rows, as ``api.storage.store`` has those of jobs. It sees only digests of tokens, never raw ones, so
that the database and its backups hold nothing that gives access.

``Tokens`` decides when a token is valid and creates the first one. A raw token is never stored: it exists in the answer to
the request that created it, and for the first one in ``HOME/token``.

``FailureLimit`` bounds how often one address may show invalid tokens. Valid tokens are never refused: many programs may
share an address, and one with an old token must not lock out the rest. Tokens are too long to be guessed; the limit keeps
attempts from filling the log and the database.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from sqlalchemy import Engine, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped, mapped_column

from api.auth.permissions import Principal, Role, digest_of, new_token, role_of
from api.clocks import Clock, TimeOfDay, uptime
from api.installation.home import Home
from api.storage.sessions import Sessions
from api.storage.store import Base
from orchestrator.errors import Conflict, NotFound

FIRST_NAME = "local"
FIRST_CREATOR = "the service"
REMEMBERED_S = 1.0
"""How long another service on the same database may accept a token after this one has revoked it."""


class TokenRow(Base):
    """A token. Revoked and expired tokens keep their rows, because the audit trail identifies tokens by name."""

    __tablename__ = "tokens"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    name: Mapped[str] = mapped_column(unique=True)
    digest: Mapped[str] = mapped_column(unique=True)
    role: Mapped[str]
    created_at: Mapped[float]
    created_by: Mapped[str]
    expires_at: Mapped[float | None] = mapped_column(default=None)
    revoked_at: Mapped[float | None] = mapped_column(default=None)


class AuditRow(Base):
    """One changing request. ``status`` is None until it is answered, and stays so if the service died meanwhile."""

    __tablename__ = "audit"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[float]
    caller: Mapped[str]
    role: Mapped[str]
    address: Mapped[str]
    method: Mapped[str]
    path: Mapped[str]
    status: Mapped[int | None] = mapped_column(default=None)


class AccessStore:
    """Tokens and audited requests in the database of a ``Store``. Rows handed out are detached copies."""

    def __init__(self, engine: Engine) -> None:
        self._session = Sessions(engine)

    def add_token(self, row: TokenRow) -> bool:
        """Store a new token. Return False, and store nothing, if its name was used before."""
        try:
            with self._session.begin() as session:
                session.add(row)
        except IntegrityError:
            return False
        return True

    def token_by_digest(self, digest: str) -> TokenRow | None:
        with self._session() as session:
            return session.scalar(select(TokenRow).where(TokenRow.digest == digest))

    def tokens(self) -> list[TokenRow]:
        """Return all tokens, oldest first."""
        with self._session() as session:
            return list(session.scalars(select(TokenRow).order_by(TokenRow.number)))

    def revoke_token(self, name: str, now: float) -> TokenRow | None:
        """Revoke the token of this name, unless it is revoked, and return it; None if it does not exist."""
        with self._session.begin() as session:
            row = session.scalar(select(TokenRow).where(TokenRow.name == name))
            if row and row.revoked_at is None:
                row.revoked_at = now
        return row

    def begin_audit(self, row: AuditRow) -> int:
        """Store a request that is about to be carried out, and return its number."""
        with self._session.begin() as session:
            session.add(row)
        return row.number

    def end_audit(self, number: int, status: int) -> None:
        """Store the status that the audited request is answered with."""
        with self._session.begin() as session:
            session.execute(update(AuditRow).where(AuditRow.number == number).values(status=status))

    def audit(self, limit: int, before: int | None) -> list[AuditRow]:
        """Return the newest requests, or the newest before a number; newest first."""
        query = select(AuditRow).order_by(AuditRow.number.desc()).limit(limit)
        with self._session() as session:
            return list(session.scalars(query if before is None else query.where(AuditRow.number < before)))


class FailureLimit:
    """A token bucket for each address: ``failures_max`` failures at once, then one each ``window_s / failures_max``.

    At most ``addresses_max`` buckets are kept, and the one that failed least recently is dropped first, which bounds the
    memory that an attacker with many addresses can use. Pure: the time comes as ``now``.
    """

    def __init__(self, failures_max: int = 10, window_s: float = 60.0, addresses_max: int = 1024) -> None:
        self._failures_max = failures_max
        self._seconds_each = window_s / failures_max
        self._addresses_max = addresses_max
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By address: the failures less what has drained, and the time of that count."""

    def __len__(self) -> int:
        return len(self._spent)

    def failed(self, address: str, now: float) -> int:
        """Count one more failure and return 0, or return how many seconds the address has to wait and count nothing."""
        failures, at = self._spent.pop(address, (0.0, now))
        failures = max(0.0, failures - max(0.0, now - at) / self._seconds_each)
        wait_s = 0
        if failures + 1 > self._failures_max:
            wait_s = math.ceil(round((failures + 1 - self._failures_max) * self._seconds_each, 6))
        else:
            failures += 1
        self._spent[address] = (failures, now)
        while len(self._spent) > self._addresses_max:
            self._spent.popitem(last=False)
        return wait_s


class Tokens:
    """Creates, recognises and revokes tokens. Times of day come from ``clock``, durations from ``passed``."""

    def __init__(self, store: AccessStore, clock: Clock | None = None, passed: Clock = uptime) -> None:
        self._store = store
        self._clock = clock or TimeOfDay()
        self._passed = passed
        self._remembered: dict[str, tuple[float, TokenRow]] = {}
        """Tokens that were found in the store lately, by digest. Unknown ones are not kept: they could be many."""
        self._known: set[str] = set()
        """Digests of all tokens that this process has ever found in the store, or put there."""

    def create(self, name: str, role: Role, created_by: str, expires_in_s: float | None = None) -> tuple[TokenRow, str]:
        """Create a token and return it with its raw form, which cannot be shown again. Raises Conflict for a used name."""
        raw, now = new_token(), self._clock()
        expires_at = None if expires_in_s is None else now + expires_in_s
        row = TokenRow(
            name=name,
            digest=digest_of(raw),
            role=role.value,
            created_at=now,
            created_by=created_by,
            expires_at=expires_at,
        )
        digest = row.digest
        if not self._store.add_token(row):
            raise Conflict(
                detail=f"The token name {name!r} has been used before, and the audit trail identifies tokens by name.",
                remedy="Choose a name that was never used; `atoll token list` shows all names.",
            )
        self._known.add(digest)
        return row, raw

    def is_known(self, raw: str) -> bool:
        """Return whether this process has seen the token in the store. Does not ask the store.

        A token that another service on the same database created is unknown here until its first request.
        """
        return digest_of(raw) in self._known

    def principal_of(self, raw: str) -> Principal | None:
        """Return the holder of this token if it is valid now, else None."""
        if principal := self.remembered(raw):
            return principal
        if row := self._store.token_by_digest(digest := digest_of(raw)):
            self._remembered[digest] = (self._passed(), row)
            self._known.add(digest)
        return self._principal(row)

    def remembered(self, raw: str) -> Principal | None:
        """Return the holder of this token without asking the store, if the store was asked lately; else None."""
        found_at, row = self._remembered.get(digest_of(raw), (float("-inf"), None))
        return self._principal(row) if self._passed() - found_at <= REMEMBERED_S else None

    def _principal(self, row: TokenRow | None) -> Principal | None:
        role = role_of(row.role) if row else None
        return Principal(row.name, role) if row and role and self.valid(row) else None

    def valid(self, row: TokenRow) -> bool:
        """Return whether the token of this row is valid now. The token of a damaged row is not."""
        in_time = row.expires_at is None or self._clock() < row.expires_at
        return row.revoked_at is None and in_time and role_of(row.role) is not None

    def list(self) -> list[TokenRow]:
        """All tokens, oldest first."""
        return self._store.tokens()

    def revoke(self, name: str) -> TokenRow:
        """Revoke the token. Idempotent. Raises NotFound."""
        row = self._store.revoke_token(name, self._clock())
        if row is None:
            raise NotFound(detail=f"Token {name!r} does not exist.", remedy="`atoll token list` shows all tokens.")
        self._remembered.clear()
        return row

    def leave_first(self, home: Home) -> None:
        """Make sure that ``HOME/token`` holds a valid admin token; write a new one if it was lost, expired or revoked.

        A user who can write that folder owns the installation, so this grants nothing new. It lets an owner who has lost
        every admin token back in: restart the service. Afterwards this process knows all tokens of the store.
        """
        rows = self.list()
        self._known.update(row.digest for row in rows)
        token = home.token()
        principal = self.principal_of(token) if token else None
        if principal and principal.role is Role.ADMIN:
            return
        names = {row.name for row in rows}
        numbered = (f"{FIRST_NAME}-{number}" for number in range(2, len(names) + 3))
        name = next(name for name in (FIRST_NAME, *numbered) if name not in names)
        _, raw = self.create(name, Role.ADMIN, FIRST_CREATOR)
        home.write_token(raw)
