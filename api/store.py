"""What the service must not forget: the jobs it was given, and the commands with who asked for them.

Responsible for rows: insert, look up, update. It refuses to know what a job is doing (the control port and
``RUN_DIR/status.json`` do); of a job that ended it keeps the last summary, so that lists need nobody else.

SQLite in a file by default, any SQLAlchemy URL otherwise. Every method is one transaction and safe from any thread: what
it returned is on disk, so a SIGKILL of the service loses nothing it has answered for.
"""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import JSON, ForeignKey, create_engine, event, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker


class Base(DeclarativeBase):
    pass


class JobRow(Base):
    """``state`` is the last one known: ``starting``, ``running``, or a final one, and then ``summary`` is set."""

    __tablename__ = "jobs"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str]
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    run_dir: Mapped[str]
    caller: Mapped[str]
    submitted_at: Mapped[float]
    state: Mapped[str]
    reason: Mapped[str] = mapped_column(default="")
    summary: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    idempotency_key: Mapped[str | None] = mapped_column(unique=True, default=None)
    request_digest: Mapped[str] = mapped_column(default="")


class CommandRow(Base):
    """``accepted`` is None until the job has decided; ``delivered`` is set once the control port took the command."""

    __tablename__ = "commands"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    command: Mapped[str] = mapped_column(unique=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.job"), index=True)
    kind: Mapped[str]
    island: Mapped[str | None]
    restart: Mapped[bool]
    caller: Mapped[str]
    requested_at: Mapped[float]
    delivered: Mapped[bool] = mapped_column(default=False)
    accepted: Mapped[bool | None] = mapped_column(default=None)
    detail: Mapped[str] = mapped_column(default="")
    idempotency_key: Mapped[str | None] = mapped_column(unique=True, default=None)
    request_digest: Mapped[str] = mapped_column(default="")


Row = TypeVar("Row", JobRow, CommandRow)


class AlreadyKnown(Exception):
    """The idempotency key was used before, by ``row``."""

    def __init__(self, row: Any) -> None:
        super().__init__(row.idempotency_key)
        self.row = row


class Store:
    """Jobs and commands in a database. Rows handed out are detached copies."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url)
        if url.startswith("sqlite"):
            event.listen(self._engine, "connect", _tune_sqlite)
        Base.metadata.create_all(self._engine)
        self._session = sessionmaker(self._engine, expire_on_commit=False)

    def close(self) -> None:
        self._engine.dispose()

    def add_job(self, row: JobRow) -> JobRow:
        """Store a new job. Raises AlreadyKnown with the earlier one if its idempotency key was used before."""
        return self._add(row)

    def add_command(self, row: CommandRow) -> CommandRow:
        """Store a new command. Raises AlreadyKnown with the earlier one if its idempotency key was used before."""
        return self._add(row)

    def job(self, job: str) -> JobRow | None:
        """The job of this id; ``latest`` is the one submitted last."""
        newest = select(JobRow).order_by(JobRow.number.desc()).limit(1)
        with self._session() as session:
            return session.scalar(newest if job == "latest" else select(JobRow).where(JobRow.job == job))

    def job_by_key(self, idempotency_key: str) -> JobRow | None:
        with self._session() as session:
            return session.scalar(select(JobRow).where(JobRow.idempotency_key == idempotency_key))

    def jobs(self) -> list[JobRow]:
        """All jobs, newest first."""
        with self._session() as session:
            return list(session.scalars(select(JobRow).order_by(JobRow.number.desc())))

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

    def update_job(self, job: str, **values: Any) -> None:
        self._update(JobRow, JobRow.job == job, values)

    def update_command(self, command: str, **values: Any) -> None:
        self._update(CommandRow, CommandRow.command == command, values)

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
            raise AlreadyKnown(earlier) from None
        return row

    def _update(self, kind: type[Any], where: Any, values: dict[str, Any]) -> None:
        with self._session.begin() as session:
            row = session.scalar(select(kind).where(where))
            if row is not None:
                for name, value in values.items():
                    setattr(row, name, value)


def _tune_sqlite(connection: Any, _record: Any) -> None:
    """Readers do not wait for the writer, writers wait for each other, and a commit is on disk."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
