"""The record of the databases that a home has had. A lost, empty or damaged one is reported, not silently replaced.

    HOME/stores.json      the databases that this home's services have created, by a digest of their address

The record lies outside the databases, and is checked before anything is started; ``begin_anew`` starts over. A home older
than this file is recognised by its token, which only a service writes. SQLite itself checks whether its file is sound;
``api.storage`` finds out whether another database is empty.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import closing, suppress
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

from api.installation.home import Home
from orchestrator.errors import InfrastructureError
from orchestrator.system import home_files

SQLITE = "sqlite"
BESIDE = ("", "-wal", "-shm", "-journal")
BUSY_S = 10.0
NEW_STORE = "--new-store"


def default_store(home: Home) -> Path:
    return home.path / "service.sqlite"


def had_store(home: Home, database: str | None) -> bool:
    """Return whether a service of this home has used this database before."""
    noted = _noted(home)
    if noted is None:
        return database is None and (home.path / "token").exists()
    return _name_of(home, database) in noted


def note_store(home: Home, database: str | None) -> None:
    """Record that this home uses this database."""
    name, noted = _name_of(home, database), _noted(home) or []
    if name in noted:
        return
    home_files.replace(_list(home), json.dumps([*noted, name]) + "\n")


def refuse_lost_store(home: Home, database: str | None, *, is_copied: bool = False) -> None:
    """Raise InfrastructureError if the database of this home was lost or damaged. Writes nothing.

    If a store has a copy of it (``is_copied``), a missing one is no reason: the service restores it.
    """
    path = file_of(home, database)
    if path is None:
        return
    lost = had_store(home, database)
    if not os.path.lexists(path):
        if lost and not is_copied:
            raise _lost(path, "is missing")
        return
    if not path.is_file():
        raise _lost(path, "is not a file")
    if path.stat().st_size == 0 and not _has_journal(path):
        if lost:
            raise _lost(path, "is empty")
        return
    if problem := _problem_of(path, lost):
        raise _lost(path, f"is damaged ({problem})")


def begin_anew(home: Home, database: str | None) -> Path | None:
    """Move a lost or damaged database aside, so that an empty one is created; a sound one stays. Return its new path."""
    try:
        refuse_lost_store(home, database)
    except InfrastructureError:
        _forget(home, database)
        path = file_of(home, database)
        if path is None or not os.path.lexists(path):
            return None
        aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
        for ending in BESIDE:
            with suppress(FileNotFoundError):
                os.rename(f"{path}{ending}", f"{aside}{ending}")
        return aside
    if file_of(home, database) is None:
        _forget(home, database)  # opening the database finds out whether it is empty
    return None


def _lost(path: Path, what: str) -> InfrastructureError:
    return InfrastructureError(
        detail=f"The service's database {path} {what}, though this home had one: its jobs, tokens and commands are lost. "
        "The files in the runs folder are not affected.",
        remedy=f"Restore the file from a backup. Or start with an empty database, and move this one aside: "
        f"`atoll up {NEW_STORE}`.",
    )


def _problem_of(path: Path, had: bool) -> str:
    """Return the problem that SQLite reports for the file; empty if it is sound."""
    try:
        with closing(sqlite3.connect(f"file:{_quoted(path)}?mode=rw", uri=True, timeout=BUSY_S)) as connection:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
    except sqlite3.OperationalError as error:
        # locked, full or read-only: opening it for use reports that
        return "" if "malformed" not in str(error) and "not a database" not in str(error) else str(error)
    except (sqlite3.DatabaseError, ValueError, TypeError) as error:
        return str(error)
    if verdict != "ok":
        return str(verdict).splitlines()[-1]
    return "it has no tables" if had and not tables else ""


def _quoted(path: Path) -> str:
    return str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _has_journal(path: Path) -> bool:
    """Return whether a journal lies beside the file, as SQLite leaves it when its process is killed."""
    return any(Path(f"{path}{ending}").is_file() and Path(f"{path}{ending}").stat().st_size for ending in BESIDE[1::2])


def file_of(home: Home, database: str | None) -> Path | None:
    """Return the file of an SQLite database; None for one in memory or on a server."""
    if database is None:
        return default_store(home)
    scheme, _, rest = database.partition("://")
    if scheme.partition("+")[0] != SQLITE or not rest.startswith("/") or rest in ("/", "/:memory:"):
        return None
    return Path(rest[1:].partition("?")[0])


def _name_of(home: Home, database: str | None) -> str:
    """Return a digest that identifies the database, without its password."""
    if (path := file_of(home, database)) is not None:
        place = f"{SQLITE}:{os.path.relpath(path, home.path) if path.is_relative_to(home.path) else path.resolve()}"
    else:
        url = urlsplit(database or "")
        place = f"{url.scheme.partition('+')[0]}:{url.netloc.rpartition('@')[2]}{url.path}"
    return blake2b(place.encode(errors="replace"), digest_size=8).hexdigest()


def _list(home: Home) -> Path:
    return home.path / "stores.json"


def _noted(home: Home) -> list[str] | None:
    """Return the recorded databases, or None without a readable record. Then the token shows if there was a service."""
    try:
        noted = json.loads(home_files.read(_list(home)))
    except (OSError, ValueError, RecursionError):
        return None
    return [str(name) for name in noted] if isinstance(noted, list) else None


def _forget(home: Home, database: str | None) -> None:
    name, noted = _name_of(home, database), _noted(home) or []
    home_files.replace(_list(home), json.dumps([other for other in noted if other != name]) + "\n")
