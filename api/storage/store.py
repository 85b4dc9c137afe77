"""The store of the service: its jobs, and the commands to them with who asked for each.

Responsible for rows: insert, look up, update. It refuses to know what a job is doing (the control port and
``RUN_DIR/status.json`` do); of a job that ended it keeps the last summary, so that lists need nobody else.

SQLite in a file by default, PostgreSQL by its URL; opening it upgrades it (``api.storage.upgrade``). Every method is one
transaction and safe from any thread: what it returned is on disk, so a SIGKILL of the service loses nothing it has
answered for. Where the database cannot be had it raises StoreUnavailable within seconds (``api.storage.sessions``).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Set
from contextlib import suppress
from typing import Any, ClassVar, TypeVar, cast

from sqlalchemy import (
    JSON,
    CursorResult,
    Dialect,
    Double,
    ForeignKey,
    Integer,
    String,
    TypeDecorator,
    Update,
    create_engine,
    delete,
    event,
    func,
    select,
    text,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from api.storage.sessions import ANSWER_TIMEOUT_S, Sessions
from api.storage.upgrade import VERSION_TABLE, upgrade, url_of

logger = logging.getLogger(__name__)


class _Words(TypeDecorator[str]):
    """Text, whatever the column holds."""

    impl, cache_ok = String, True

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        return value if value is None or isinstance(value, str) else words(value)


class _Real(TypeDecorator[float]):
    """A finite number. What is none is 0, an instant long ago: so a token whose end is damaged has ended."""

    impl, cache_ok = Double, True

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        return value if value is None or (type(value) in (float, int) and math.isfinite(value)) else 0.0


class _Whole(TypeDecorator[int]):
    """A whole number; 0 for what is none."""

    impl, cache_ok = Integer, True

    def process_result_value(self, value: Any, dialect: Dialect) -> int | None:
        return value if value is None or type(value) is int else 0


class Base(DeclarativeBase):
    """All tables. A change to one of them needs a migration too (``api/storage/migrations``).

    SQLite keeps anything in any column. What is read is of the column's kind all the same, so that a row that is damaged
    is told of as what is left of it, and no list fails for it.
    """

    type_annotation_map: ClassVar[dict[Any, Any]] = {str: _Words, float: _Real, int: _Whole}


class JobRow(Base):
    """``state`` is the last one known: ``queued``, ``starting``, ``running``, or a final one; then ``summary`` is set.

    ``last_known`` is how far the job was when it was last seen, for a job that cannot tell that any more.
    """

    __tablename__ = "jobs"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str]
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    run_dir: Mapped[str]
    caller: Mapped[str]
    submitted_at: Mapped[float]
    state: Mapped[str]
    priority: Mapped[int] = mapped_column(default=0)
    reason: Mapped[str] = mapped_column(default="")
    summary: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    idempotency_key: Mapped[str | None] = mapped_column(unique=True, default=None)
    request_digest: Mapped[str] = mapped_column(default="")
    last_known: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True), default=None)


class CommandRow(Base):
    """``accepted`` is None until the job has decided; ``delivered`` is set once the control port took the command.

    ``request`` is the command in its plain form (``tape.command_codec``).
    """

    __tablename__ = "commands"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    command: Mapped[str] = mapped_column(unique=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.job"), index=True)
    request: Mapped[dict[str, Any]] = mapped_column(JSON)
    caller: Mapped[str]
    requested_at: Mapped[float]
    delivered: Mapped[bool] = mapped_column(default=False)
    accepted: Mapped[bool | None] = mapped_column(default=None)
    detail: Mapped[str] = mapped_column(default="")
    idempotency_key: Mapped[str | None] = mapped_column(unique=True, default=None)
    request_digest: Mapped[str] = mapped_column(default="")


class CordonRow(Base):
    """A node group that nothing new is placed on, and who wanted that."""

    __tablename__ = "cordons"

    node_group: Mapped[str] = mapped_column(primary_key=True)
    caller: Mapped[str]
    cordoned_at: Mapped[float]


Row = TypeVar("Row", JobRow, CommandRow)


class DuplicateKey(Exception):
    """The idempotency key was used before, by ``row``."""

    def __init__(self, row: Any) -> None:
        super().__init__(row.idempotency_key)
        self.row = row


class Store:
    """Jobs and commands in a database. Rows handed out are detached copies."""

    def __init__(self, url: str, *, had_tables: bool = False) -> None:
        """Raises InfrastructureError where the database cannot be used, or ``had_tables`` and has none any more."""
        place = url_of(url)
        upgrade(place, had_tables=had_tables)
        # A database server may be started again meanwhile: a connection is looked at before it is used.
        self.engine = create_engine(
            place, pool_pre_ping=True, pool_timeout=ANSWER_TIMEOUT_S, json_deserializer=_document
        )
        if place.get_backend_name() == "sqlite":
            event.listen(self.engine, "connect", _tune_sqlite)
        elif place.get_backend_name() == "postgresql":
            from api.storage import postgresql  # late: its driver is of no use to SQLite

            postgresql.bound(self.engine, ANSWER_TIMEOUT_S)
        self._session = Sessions(self.engine)

    def close(self) -> None:
        self.engine.dispose()

    def check(self) -> None:
        """Raises StoreUnavailable if rows cannot be read, or could not be written when that was tried last."""
        with self._session() as session:
            session.execute(select(JobRow.number).limit(1))
        if self._session.write_failed:  # nobody else may try for hours
            with self._session.begin() as session:
                session.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = version_num"))

    def add_job(self, row: JobRow) -> JobRow:
        """Store a new job. Raises DuplicateKey with the earlier one if its idempotency key was used before."""
        return self._add(row)

    def add_command(self, row: CommandRow) -> CommandRow:
        """Store a new command. Raises DuplicateKey with the earlier one if its idempotency key was used before."""
        return self._add(row)

    def job(self, job: str) -> JobRow | None:
        """The job of this id; ``latest`` is the one submitted last."""
        newest = select(JobRow).order_by(JobRow.number.desc()).limit(1)
        with self._session() as session:
            return session.scalar(newest if job == "latest" else select(JobRow).where(JobRow.job == job))

    def job_by_key(self, idempotency_key: str) -> JobRow | None:
        with self._session() as session:
            return session.scalar(select(JobRow).where(JobRow.idempotency_key == idempotency_key))

    def jobs(
        self,
        *,
        name: str | None = None,
        states: Set[str] | None = None,
        before: int | None = None,
        limit: int | None = None,
    ) -> list[JobRow]:
        """All jobs, newest first; or the newest of this name, in these states, submitted before that number."""
        query = select(JobRow).order_by(JobRow.number.desc())
        if name is not None:
            query = query.where(JobRow.name == name)
        if states is not None:
            query = query.where(JobRow.state.in_(sorted(states)))
        if before is not None:
            query = query.where(JobRow.number < before)
        if limit is not None:
            query = query.limit(limit)
        with self._session() as session:
            return list(session.scalars(query))

    def queued(self) -> list[tuple[str, int, int]]:
        """Id, priority and number of every queued job, the next one first. Their specifications stay where they are."""
        query = select(JobRow.job, JobRow.priority, JobRow.number).where(JobRow.state == "queued")
        with self._session() as session:
            return [(*row,) for row in session.execute(query.order_by(JobRow.priority.desc(), JobRow.number))]

    def remove_job(self, job: str) -> None:
        """The job and its commands are gone. Nothing happens if they were."""
        with self._session.begin() as session:
            session.execute(delete(CommandRow).where(CommandRow.job == job))
            session.execute(delete(JobRow).where(JobRow.job == job))

    def command(self, command: str) -> CommandRow | None:
        with self._session() as session:
            return session.scalar(select(CommandRow).where(CommandRow.command == command))

    def command_by_key(self, idempotency_key: str) -> CommandRow | None:
        with self._session() as session:
            return session.scalar(select(CommandRow).where(CommandRow.idempotency_key == idempotency_key))

    def commands(self, job: str) -> list[CommandRow]:
        """All commands of a job, oldest first."""
        with self._session() as session:
            return list(session.scalars(select(CommandRow).where(CommandRow.job == job).order_by(CommandRow.number)))

    def open_commands(self, job: str) -> list[CommandRow]:
        """The commands of a job that have no outcome yet, oldest first."""
        query = select(CommandRow).where(CommandRow.job == job, CommandRow.accepted.is_(None))
        with self._session() as session:
            return list(session.scalars(query.order_by(CommandRow.number)))

    def generation(self, job: str) -> int:
        """The number of the job's newest command, 0 before the first: another one whenever something was asked of it."""
        with self._session() as session:
            return session.scalar(select(func.max(CommandRow.number)).where(CommandRow.job == job)) or 0

    def jobs_with_open_commands(self) -> list[str]:
        with self._session() as session:
            query = select(CommandRow.job).where(CommandRow.accepted.is_(None)).distinct()
            return list(session.scalars(query.order_by(CommandRow.job)))

    def update_job(self, job: str, **values: Any) -> None:
        self._update(JobRow, JobRow.job == job, values)

    def move_job(self, job: str, before: str, after: str, **values: Any) -> bool:
        """The job goes from one state to another, with these values. False, and nothing is changed, if it is in neither."""
        move = update(JobRow).where(JobRow.job == job, JobRow.state == before).values(state=after, **values)
        with self._session.begin() as session:
            return bool(_changed_count(session, move))

    def cancel_queued(self, command: CommandRow) -> bool:
        """The job is cancelled by this command, all at once. False, and nothing is changed, if it is not queued."""
        is_queued = (JobRow.job == command.job, JobRow.state == "queued")
        reason = f"cancelled by {command.caller} while it was queued"
        outcome = {"delivered": True, "accepted": True, "detail": "it was queued, and nothing of it ran"}
        with self._session.begin() as session:
            move = update(JobRow).where(*is_queued).values(state="cancelled", reason=reason)
            if not _changed_count(session, move):
                return False
            session.execute(update(CommandRow).where(CommandRow.command == command.command).values(**outcome))
            return True

    def queue_position(self, row: JobRow) -> int:
        """The job's place in the queue, from 1: by priority, then by the order in which they came."""
        sooner = (JobRow.priority == row.priority) & (JobRow.number < row.number)
        ahead = select(func.count()).where(JobRow.state == "queued", (JobRow.priority > row.priority) | sooner)
        with self._session() as session:
            return 1 + (session.scalar(ahead) or 0)

    def update_command(self, command: str, **values: Any) -> None:
        self._update(CommandRow, CommandRow.command == command, values)

    def cordons(self) -> dict[str, CordonRow]:
        """The cordoned node groups, by name."""
        with self._session() as session:
            return {row.node_group: row for row in session.scalars(select(CordonRow).order_by(CordonRow.node_group))}

    def cordon(self, row: CordonRow) -> None:
        """The node group is cordoned from now on; by whom it was cordoned first stays."""
        with suppress(IntegrityError), self._session.begin() as session:
            session.add(row)

    def uncordon(self, node_group: str) -> None:
        with self._session.begin() as session:
            session.execute(delete(CordonRow).where(CordonRow.node_group == node_group))

    def _add(self, row: Row) -> Row:
        try:
            with self._session.begin() as session:
                session.add(row)
        except IntegrityError:
            kind: Any = type(row)
            with self._session() as session:
                earlier = session.scalar(select(kind).where(kind.idempotency_key == row.idempotency_key))
            if row.idempotency_key is None or earlier is None:
                raise
            raise DuplicateKey(earlier) from None
        return row

    def _update(self, kind: type[Any], where: Any, values: dict[str, Any]) -> None:
        with self._session.begin() as session:
            row = session.scalar(select(kind).where(where))
            if row is not None:
                for name, value in values.items():
                    setattr(row, name, value)


def words(value: object) -> str:
    """The readable part of a column that should hold text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _document(text: str | bytes) -> Any:
    """A column's JSON; one that is damaged is an empty document, so that only its own row has lost something."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        logger.warning("a document in the store is damaged: %.80r", text)
        return {}


def _tune_sqlite(connection: Any, _record: Any) -> None:
    """Readers do not wait for the writer, writers wait for each other, and a commit is on disk.

    Text that is damaged is read as far as it is text: SQLite's driver would refuse all rows of the answer for it.
    """
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute(f"PRAGMA busy_timeout={int(ANSWER_TIMEOUT_S * 1000)}")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _changed_count(session: Session, statement: Update) -> int:
    return cast("CursorResult[Any]", session.execute(statement)).rowcount
