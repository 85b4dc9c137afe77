"""Upgrade a database to the tables of this build: all steps or none, and one service at a time.

Uses a connection of its own. A database from before the first migration is recognised by its tables. A database that a
newer build has upgraded is refused, because there is no downgrade.

Source: Alembic's cookbook (programmatic use with a connection); SQLAlchemy's pysqlite dialect, "transactional DDL".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

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
        url.get_dialect()
    except (ArgumentError, NoSuchModuleError) as error:
        detail = (
            f"The database URL is invalid: {first_line(error)} Write sqlite:///PATH or postgresql://USER@HOST/NAME."
        )
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
        detail = f"The database {where} cannot be used: {first_line(error.orig or error)}"
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
