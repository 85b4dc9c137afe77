"""A database's address on a command line: everybody on the machine sees those, so a password may not be in it."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from api.installation.home import DATABASE_VARIABLE
from orchestrator.errors import ConfigurationError


def refuse_password_in_view(url: str | None) -> None:
    """Raises ConfigurationError, without the password, if ``url`` has one."""
    if url is None:
        return
    try:
        parts = urlsplit(url)
        secret = parts.password or any("password" in name.lower() for name, _ in parse_qsl(parts.query))
    except ValueError:
        secret = "@" in url
    if secret:
        raise ConfigurationError(
            detail="--database has a password in it, and everybody on this machine sees command lines. "
            f"Give the same URL in the environment variable {DATABASE_VARIABLE}, or the password in a file that the "
            "database's driver reads (for PostgreSQL, ~/.pgpass)."
        )
