"""Commands in their one plain form, a document, instead of a column for each field that any of them has."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

REPLACED = ("kind", "island", "restart", "dose", "node_group", "count")


def upgrade() -> None:
    op.add_column("commands", sa.Column("request", sa.JSON, nullable=False, server_default="{}"))
    rows = sa.table(
        "commands",
        sa.column("number", sa.Integer),
        sa.column("job", sa.String),
        sa.column("request_digest", sa.String),
        sa.column("request", sa.JSON),
        *(sa.column(name) for name in REPLACED),
    )
    about = (rows.c.number, rows.c.job, rows.c.request_digest)
    fields = (sa.cast(rows.c[name], sa.Text).label(name) if name == "dose" else rows.c[name] for name in REPLACED)
    connection = op.get_bind()
    for number, job, digest, *values in connection.execute(sa.select(*about, *fields)).all():
        request = request_of(*values)
        new = {"request": request, "request_digest": digest and digest_of([job, request])}
        connection.execute(rows.update().where(rows.c.number == number).values(**new))
    for name in REPLACED:
        op.drop_column("commands", name)


def request_of(
    kind: str, island: str | None, restart: bool, dose: str | None, node_group: str | None, count: int | None
) -> dict[str, Any]:
    if dose is not None:
        return {"kind": "inject", "fault": kind, "island": island, **parsed(dose)}
    match kind:
        case "kill":
            return {"kind": kind, "island": island, "restart": bool(restart)}
        case "drain" | "readd":
            return {"kind": kind, "island": island}
        case "scale":
            return {"kind": kind, "node_group": node_group, "count": count}
        case "cordon" | "uncordon":
            return {"kind": kind, "node_group": node_group}
        case "rollback":
            return {"kind": kind, "checkpoint": count or 0}
    return {"kind": kind}


def parsed(dose: str) -> dict[str, Any]:
    try:
        document = json.loads(dose)
    except ValueError:  # damaged; a fault without a dose does nothing that lasts
        return {}
    return document if isinstance(document, dict) else {}


def digest_of(request: list[Any]) -> str:
    """As ``api.jobs.idempotency`` has it in this revision: a request that is repeated under its key is known again."""
    return blake2b(json.dumps(request, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
