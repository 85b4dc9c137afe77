"""The store of the service: its jobs, the commands to them with their callers, and cordoned node groups.

Rows only: insert, look up, update. What a job is doing is known to the control port and ``RUN_DIR/status.json``; the store
keeps the last summary of a job that ended, so that lists need nothing else.

SQLite in a file by default, PostgreSQL by its URL; opening it upgrades it to the tables of this build. Every method is one
transaction and safe from any thread. What it returned is on disk, so a SIGKILL of the service loses nothing that it has
confirmed. If the database is unavailable, it raises StoreUnavailable within seconds (``api.storage.sessions``).

The upgrade takes all steps or none, for one service at a time, on a connection of its own. A database from before the first
migration is recognised by its tables. One that a newer build has upgraded is refused, because there is no downgrade.

Source: Alembic's cookbook (programmatic use with a connection); SQLAlchemy's pysqlite dialect, "transactional DDL".
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import (
    JSON,
    URL,
    Connection,
    CursorResult,
    Dialect,
    Double,
    Engine,
    ForeignKey,
    Integer,
    NullPool,
    String,
    TypeDecorator,
    Update,
    create_engine,
    delete,
    event,
    func,
    inspect,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from api.storage.sessions import ANSWER_TIMEOUT_S, Sessions
from orchestrator.errors import ConfigurationError, InfrastructureError, first_line

MIGRATIONS = Path(__file__).resolve().parent / "migrations"
BEFORE_MIGRATIONS = "0001"
VERSION_TABLE = "alembic_version"
LOCK = 0x61746F6C6C
"""PostgreSQL's advisory locks go by number; this one spells atoll."""


def url_of(text: str) -> URL:
    """Return the parsed URL. Raises ConfigurationError; its message never repeats the URL, which may hold a password."""
    try:
        url = make_url(text)
        if url.drivername in ("postgres", "postgresql"):
            url = url.set(drivername="postgresql+psycopg")  # the one that is installed
        url.get_dialect().import_dbapi()
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            detail=f"The database's driver {error.name!r} is not installed. Write sqlite:///PATH or postgresql://USER@HOST/NAME."
        ) from error
    except (ArgumentError, NoSuchModuleError) as error:
        detail = f"The database URL is invalid: {first_line(error).rstrip('.')}. Write sqlite:///PATH or postgresql://USER@HOST/NAME."
        raise ConfigurationError(detail=detail) from error
    return url


def upgrade(url: URL, *, had_tables: bool = False) -> None:
    """Create or upgrade the tables. Idempotent, and safe from several services at once.

    Raises InfrastructureError if the database ``had_tables`` and is empty now, because then they were lost.
    """
    engine = create_engine(url, poolclass=NullPool)
    if url.get_backend_name() == "sqlite":
        _make_tables_transactional(engine)
    try:
        with engine.begin() as connection:
            if url.get_backend_name() == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            _upgrade(connection, url, had_tables)
    except DBAPIError as error:
        where = url.render_as_string(hide_password=True)
        detail = f"The database {where} cannot be used: {first_line(error.orig or error).rstrip('.')}."
        raise InfrastructureError(
            detail=detail, remedy="Check that it runs and that this user may create tables in it."
        ) from error
    finally:
        engine.dispose()


def _upgrade(connection: Connection, url: URL, had_tables: bool) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    tables = inspect(connection).get_table_names()
    if had_tables and not {VERSION_TABLE, "jobs"} & set(tables):
        raise InfrastructureError(
            detail=f"The database {url.render_as_string(hide_password=True)} is empty, though a service of this home has "
            "used it before: its jobs, tokens and commands are lost.",
            remedy="Restore it from a backup, or start with an empty database: `atoll up --new-store`.",
        )
    if VERSION_TABLE not in tables and "jobs" in tables:
        command.stamp(config, BEFORE_MIGRATIONS)
    elif VERSION_TABLE in tables:
        version = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
        if version not in {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}:
            raise ConfigurationError(
                detail=f"The database {url.render_as_string(hide_password=True)} has the tables of a newer atoll "
                f"(version {version}). Use that version of atoll, or another database."
            )
    command.upgrade(config, "head")


def _make_tables_transactional(engine: Engine) -> None:
    """Let SQLAlchemy begin transactions: Python's driver would run CREATE TABLE outside of them."""

    @event.listens_for(engine, "connect")
    def _leave_it_to_us(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.text_factory = lambda raw: raw.decode(
            errors="replace"
        )  # damaged text must not keep the service from starting

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


logger = logging.getLogger(__name__)


class _Words(TypeDecorator[str]):
    """A text column. Values of another type are shown as text."""

    impl, cache_ok = String, True

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        return value if value is None or isinstance(value, str) else words(value)


class _Real(TypeDecorator[float]):
    """A finite float. Anything else reads as 0 (1970), so a token with a damaged expiry counts as expired."""

    impl, cache_ok = Double, True

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        return value if value is None or (type(value) in (float, int) and math.isfinite(value)) else 0.0


class _Whole(TypeDecorator[int]):
    """An integer. Anything else reads as 0."""

    impl, cache_ok = Integer, True

    def process_result_value(self, value: Any, dialect: Dialect) -> int | None:
        return value if value is None or type(value) is int else 0


class Base(DeclarativeBase):
    """All tables. A change to one of them needs a migration too (``api/storage/migrations``).

    SQLite stores any value in any column. Values of the wrong type are coerced when they are read, so that a damaged row
    is shown as far as it is readable, and lists do not fail. Decision 0211 compares this with a parse of whole rows.
    """

    type_annotation_map: ClassVar[dict[Any, Any]] = {str: _Words, float: _Real, int: _Whole}


class JobRow(Base):
    """A job. ``state`` is the last known one: ``queued``, ``starting``, ``running``, or a final one, with ``summary`` set.

    ``last_known`` is the job's progress when it was last seen, for a job that can no longer report it.
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
    """A command. ``accepted`` is None until the job has decided; ``delivered`` is set once the control port took it.

    ``request`` is the command as plain data (``orchestrator.tape.codec``).
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
    """A node group on which nothing new is placed, and who cordoned it."""

    __tablename__ = "cordons"

    node_group: Mapped[str] = mapped_column(primary_key=True)
    caller: Mapped[str]
    cordoned_at: Mapped[float]


class NodeCordonRow(Base):
    """A node on which nothing new is placed, until ``lifted_at`` is set: failures of the node count from then on."""

    __tablename__ = "node_cordons"

    node: Mapped[str] = mapped_column(primary_key=True)
    node_group: Mapped[str]
    caller: Mapped[str]
    reason: Mapped[str]
    cordoned_at: Mapped[float]
    expires_at: Mapped[float | None] = mapped_column(default=None)
    lifted_at: Mapped[float | None] = mapped_column(default=None)


Row = TypeVar("Row", JobRow, CommandRow)


class DuplicateKey(Exception):
    """The idempotency key was used before, by ``row``."""

    def __init__(self, row: Any) -> None:
        super().__init__(row.idempotency_key)
        self.row = row


class Store:
    """Jobs and commands in a database. Rows handed out are detached copies."""

    def __init__(self, url: str, *, had_tables: bool = False) -> None:
        """Raise InfrastructureError if the database is unusable, or ``had_tables`` and has lost them."""
        place = url_of(url)
        upgrade(place, had_tables=had_tables)
        # A database server may have been restarted: test a pooled connection before it is used.
        self.engine = create_engine(
            place, pool_pre_ping=True, pool_timeout=ANSWER_TIMEOUT_S, json_deserializer=_document
        )
        if place.get_backend_name() == "sqlite":
            event.listen(self.engine, "connect", _tune_sqlite)
        elif place.get_backend_name() == "postgresql":
            from api.storage import sessions  # late: SQLite does not need its driver

            sessions.bound(self.engine, ANSWER_TIMEOUT_S)
        self._session = Sessions(self.engine)

    def close(self) -> None:
        self.engine.dispose()

    def check(self) -> None:
        """Raise StoreUnavailable if reading fails, or if the last write failed and writing still does."""
        with self._session() as session:
            session.execute(select(JobRow.number).limit(1))
        if self._session.write_failed:  # there may be no other write for hours
            with self._session.begin() as session:
                session.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = version_num"))

    def add_job(self, row: JobRow) -> JobRow:
        """Store a new job. Raises DuplicateKey with the earlier one if its idempotency key was used before."""
        return self._add(row)

    def add_command(self, row: CommandRow) -> CommandRow:
        """Store a new command. Raises DuplicateKey with the earlier one if its idempotency key was used before."""
        return self._add(row)

    def job(self, job: str) -> JobRow | None:
        """Return the job with this id, or the last submitted one for ``latest``; None if there is none."""
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
        """Return jobs, newest first: all, or those of this name, in these states, submitted before that number."""
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

    def move_runs(self, runs: Path) -> None:
        """Have all jobs keep their files below ``runs``: on another machine, that may be another folder."""
        with self._session.begin() as session:
            for row in session.scalars(select(JobRow)):
                row.run_dir = str(runs / Path(row.run_dir).name)

    def queued(self) -> list[tuple[str, int, int]]:
        """Return id, priority and number of every queued job, the next one first. Specifications are not read."""
        query = select(JobRow.job, JobRow.priority, JobRow.number).where(JobRow.state == "queued")
        with self._session() as session:
            return [(*row,) for row in session.execute(query.order_by(JobRow.priority.desc(), JobRow.number))]

    def remove_job(self, job: str) -> None:
        """Remove the job and its commands. Idempotent."""
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
        """Return all commands of a job, oldest first."""
        with self._session() as session:
            return list(session.scalars(select(CommandRow).where(CommandRow.job == job).order_by(CommandRow.number)))

    def open_commands(self, job: str) -> list[CommandRow]:
        """Return the commands of a job that have no outcome yet, oldest first."""
        query = select(CommandRow).where(CommandRow.job == job, CommandRow.accepted.is_(None))
        with self._session() as session:
            return list(session.scalars(query.order_by(CommandRow.number)))

    def generation(self, job: str) -> int:
        """Return the number of the job's newest command, 0 before the first. It changes with every command."""
        return self.generations([job])[job]

    def generations(self, jobs: Collection[str]) -> dict[str, int]:
        """Return the generation of each of these jobs, by one query."""
        newest = select(CommandRow.job, func.max(CommandRow.number)).where(CommandRow.job.in_(jobs))
        with self._session() as session:
            numbers = dict(iter(session.execute(newest.group_by(CommandRow.job))))
        return {job: numbers.get(job) or 0 for job in jobs}

    def jobs_with_open_commands(self) -> list[str]:
        with self._session() as session:
            query = select(CommandRow.job).where(CommandRow.accepted.is_(None)).distinct()
            return list(session.scalars(query.order_by(CommandRow.job)))

    def update_job(self, job: str, **values: Any) -> None:
        self._update(JobRow, JobRow.job == job, values)

    def move_job(self, job: str, before: str, after: str, **values: Any) -> bool:
        """Move the job from state ``before`` to ``after``, with these values. Return False if it is not in ``before``."""
        move = update(JobRow).where(JobRow.job == job, JobRow.state == before).values(state=after, **values)
        with self._session.begin() as session:
            return bool(_changed_count(session, move))

    def cancel_queued(self, command: CommandRow) -> bool:
        """Cancel a queued job by this command, in one transaction. Return False, and change nothing, if it is not queued."""
        is_queued = (JobRow.job == command.job, JobRow.state == "queued")
        reason = f"cancelled by {command.caller} while it was queued"
        outcome = {"delivered": True, "accepted": True, "detail": "the job was queued; it had not started"}
        with self._session.begin() as session:
            move = update(JobRow).where(*is_queued).values(state="cancelled", reason=reason)
            if not _changed_count(session, move):
                return False
            session.execute(update(CommandRow).where(CommandRow.command == command.command).values(**outcome))
            return True

    def queue_position(self, row: JobRow) -> int:
        """Return the job's place in the queue, from 1: by priority, then by order of submission."""
        sooner = (JobRow.priority == row.priority) & (JobRow.number < row.number)
        ahead = select(func.count()).where(JobRow.state == "queued", (JobRow.priority > row.priority) | sooner)
        with self._session() as session:
            return 1 + (session.scalar(ahead) or 0)

    def update_command(self, command: str, **values: Any) -> None:
        self._update(CommandRow, CommandRow.command == command, values)

    def cordons(self) -> dict[str, CordonRow]:
        """Return the cordoned node groups, by name."""
        with self._session() as session:
            return {row.node_group: row for row in session.scalars(select(CordonRow).order_by(CordonRow.node_group))}

    def cordon(self, row: CordonRow) -> None:
        """Cordon the node group. If it is cordoned already, the first caller stays."""
        with suppress(IntegrityError), self._session.begin() as session:
            session.add(row)

    def uncordon(self, node_group: str) -> None:
        with self._session.begin() as session:
            session.execute(delete(CordonRow).where(CordonRow.node_group == node_group))

    def node_cordons(self) -> dict[str, NodeCordonRow]:
        """Return the nodes that are cordoned, or were, by name."""
        with self._session() as session:
            return {row.node: row for row in session.scalars(select(NodeCordonRow).order_by(NodeCordonRow.node))}

    def cordon_node(self, row: NodeCordonRow) -> None:
        """Cordon the node. If it is cordoned already, the first caller and reason stay."""
        with self._session.begin() as session:
            earlier = session.get(NodeCordonRow, row.node)
            if earlier is not None and earlier.lifted_at is None:
                return
            if earlier is not None:
                session.delete(earlier)
                session.flush()
            session.add(row)

    def uncordon_node(self, node: str, at: float, node_group: str, caller: str) -> None:
        """Lift the cordon of the node, if it has one. In any case its failures before ``at`` count no longer."""
        facts = {"node": node, "node_group": node_group, "caller": caller, "reason": "", "cordoned_at": at}
        with self._session.begin() as session:
            row = session.get(NodeCordonRow, node) or NodeCordonRow(**facts)
            row.lifted_at = at
            session.add(row)

    def forget_node_cordon(self, node: str) -> None:
        """Remove the row of a node whose cordon is lifted. One that is cordoned again meanwhile stays."""
        with self._session.begin() as session:
            session.execute(
                delete(NodeCordonRow).where(NodeCordonRow.node == node, NodeCordonRow.lifted_at.is_not(None))
            )

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
    """Return the readable part of a column that should hold text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _document(text: str | bytes) -> Any:
    """Return a column's JSON. A damaged one reads as an empty document, so that only its own row is affected."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        logger.warning("a document in the store is damaged: %.80r", text)
        return {}


def _tune_sqlite(connection: Any, _record: Any) -> None:
    """Set WAL (readers do not wait for the writer), a busy timeout for writers, and fsync at every commit.

    Damaged text is decoded with replacement characters: SQLite's driver would fail for all rows of the result.
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
