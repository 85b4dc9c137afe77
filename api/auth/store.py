"""Tokens and the audit trail, as rows in the store.

Rows only, as ``api.storage.store`` has them for jobs. Raw tokens never reach it, only digests, so that the database and its
backups hold nothing that gives access.
"""

from __future__ import annotations

from sqlalchemy import Engine, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped, mapped_column

from api.storage.sessions import Sessions
from api.storage.store import Base


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
