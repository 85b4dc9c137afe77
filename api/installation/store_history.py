"""The record of the stores that a home has had. A lost, emptied or damaged store is reported, not silently begun anew.

    HOME/stores.json      the databases that this home's services have begun, by a digest of their place

Responsible for the check before anything is started, for the way forward (``begin_anew``), and for a record that lies
outside the stores that it is about. A home that is older than that file is recognised by its token, which only a service
leaves. Refuses to know tables: SQLite is asked itself whether its file is whole; whether another database is empty,
``api.storage`` sees.
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
    """Whether a service of this home has begun its store there before."""
    noted = _noted(home)
    if noted is None:
        return database is None and (home.path / "token").exists()
    return _name_of(home, database) in noted


def note_store(home: Home, database: str | None) -> None:
    """From now on this home has a store there."""
    name, noted = _name_of(home, database), _noted(home) or []
    if name in noted:
        return
    home_files.replace(_list(home), json.dumps([*noted, name]) + "\n")


def refuse_lost_store(home: Home, database: str | None) -> None:
    """Raises InfrastructureError where the store of this home is not what a service left. Writes nothing."""
    path = _file_of(home, database)
    if path is None:
        return
    lost = had_store(home, database)
    if not os.path.lexists(path):
        if lost:
            raise _lost(path, "is missing")
        return
    if not path.is_file():
        raise _lost(path, "is no file")
    if path.stat().st_size == 0 and not _has_journal(path):
        if lost:
            raise _lost(path, "is empty")
        return
    if problem := _problem_of(path, lost):
        raise _lost(path, f"is damaged ({problem})")


def begin_anew(home: Home, database: str | None) -> Path | None:
    """A lost store is out of the way, so that an empty one begins; one that is sound stays. Returns where it was put."""
    try:
        refuse_lost_store(home, database)
    except InfrastructureError:
        _forget(home, database)
        path = _file_of(home, database)
        if path is None or not os.path.lexists(path):
            return None
        aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
        for ending in BESIDE:
            with suppress(FileNotFoundError):
                os.rename(f"{path}{ending}", f"{aside}{ending}")
        return aside
    if _file_of(home, database) is None:
        _forget(home, database)  # whether it is empty, the database says
    return None


def _lost(path: Path, what: str) -> InfrastructureError:
    return InfrastructureError(
        detail=f"The service's store {path} {what}, though this home had one: nothing is known any more of its jobs, "
        "tokens and commands, and what lies in the runs folder stays there.",
        remedy="Put the file back from a copy. Or begin with an empty store, and have this one put aside: "
        f"`atoll up {NEW_STORE}`.",
    )


def _problem_of(path: Path, had: bool) -> str:
    """The problem that SQLite reports of the file; empty if it is whole."""
    try:
        with closing(sqlite3.connect(f"file:{_quoted(path)}?mode=rw", uri=True, timeout=BUSY_S)) as connection:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
    except sqlite3.OperationalError as error:
        # locked, full or not to be written: whoever opens it says so
        return "" if "malformed" not in str(error) and "not a database" not in str(error) else str(error)
    except (sqlite3.DatabaseError, ValueError, TypeError) as error:
        return str(error)
    if verdict != "ok":
        return str(verdict).splitlines()[-1]
    return "it has no tables" if had and not tables else ""


def _quoted(path: Path) -> str:
    return str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _has_journal(path: Path) -> bool:
    """Whether what was written lies beside the file still, as SQLite leaves it when its process is killed."""
    return any(Path(f"{path}{ending}").is_file() and Path(f"{path}{ending}").stat().st_size for ending in BESIDE[1::2])


def _file_of(home: Home, database: str | None) -> Path | None:
    """The file of an SQLite database; None for one in memory, or of a server."""
    if database is None:
        return default_store(home)
    scheme, _, rest = database.partition("://")
    if scheme.partition("+")[0] != SQLITE or not rest.startswith("/") or rest in ("/", "/:memory:"):
        return None
    return Path(rest[1:].partition("?")[0])


def _name_of(home: Home, database: str | None) -> str:
    """Names the database and holds no password: it is for comparing only."""
    if (path := _file_of(home, database)) is not None:
        place = f"{SQLITE}:{os.path.relpath(path, home.path) if path.is_relative_to(home.path) else path.resolve()}"
    else:
        url = urlsplit(database or "")
        place = f"{url.scheme.partition('+')[0]}:{url.netloc.rpartition('@')[2]}{url.path}"
    return blake2b(place.encode(errors="replace"), digest_size=8).hexdigest()


def _list(home: Home) -> Path:
    return home.path / "stores.json"


def _noted(home: Home) -> list[str] | None:
    """None where nothing is noted, or what is cannot be read: then the token says whether there was a service."""
    try:
        noted = json.loads(home_files.read(_list(home)))
    except (OSError, ValueError, RecursionError):
        return None
    return [str(name) for name in noted] if isinstance(noted, list) else None


def _forget(home: Home, database: str | None) -> None:
    name, noted = _name_of(home, database), _noted(home) or []
    home_files.replace(_list(home), json.dumps([other for other in noted if other != name]) + "\n")
