"""Bring a database to the tables of this build: all steps or none, and at most one service at a time.

Responsible for upgrades, on a connection of its own. A database from before there were migrations is recognised by its
tables and taken for what it is; one that a newer build has upgraded is refused, because nobody knows the way back.

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
    """The database's URL. Raises ConfigurationError for what is none; the message never repeats it, for its password."""
    try:
        url = make_url(text)
        if url.drivername in ("postgres", "postgresql"):
            url = url.set(drivername="postgresql+psycopg")  # the one that is installed
        url.get_dialect()
    except (ArgumentError, NoSuchModuleError) as error:
        detail = f"The database's URL cannot be used: {first_line(error)} Write sqlite:///PATH or postgresql://USER@HOST/NAME."
        raise ConfigurationError(detail=detail) from error
    return url


def upgrade(url: URL, *, had_tables: bool = False) -> None:
    """The database has the tables of this build. Safe to call at any time, from several services at once.

    Raises InfrastructureError if it ``had_tables`` and is empty now: that is a loss, and not a beginning.
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
            detail=detail, remedy="Does it run, and may this user create tables there?"
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
            "used it before: nothing is known any more of its jobs, tokens and commands.",
            remedy="Put its tables back from a copy, or begin with an empty store: `atoll up --new-store`.",
        )
    if VERSION_TABLE not in tables and "jobs" in tables:
        command.stamp(config, BEFORE_MIGRATIONS)
    elif VERSION_TABLE in tables:
        version = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
        if version not in {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}:
            raise ConfigurationError(
                detail=f"The database {url.render_as_string(hide_password=True)} has the tables of a newer atoll "
                f"(version {version}). Use that one, or another database."
            )
    command.upgrade(config, "head")


def _make_tables_transactional(engine: Engine) -> None:
    """Let SQLAlchemy begin transactions: Python's driver would leave CREATE TABLE outside of them."""

    @event.listens_for(engine, "connect")
    def _leave_it_to_us(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.text_factory = lambda raw: raw.decode(errors="replace")  # damaged text is no reason not to begin

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
