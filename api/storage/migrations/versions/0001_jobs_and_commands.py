"""Jobs and commands, as the first release had them without migrations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("job", sa.String, nullable=False, unique=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("run_dir", sa.String, nullable=False),
        sa.Column("caller", sa.String, nullable=False),
        sa.Column("submitted_at", sa.Double, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("summary", sa.JSON),
        sa.Column("idempotency_key", sa.String, unique=True),
        sa.Column("request_digest", sa.String, nullable=False),
    )
    op.create_table(
        "commands",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("command", sa.String, nullable=False, unique=True),
        sa.Column("job", sa.String, sa.ForeignKey("jobs.job"), nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("island", sa.String),
        sa.Column("restart", sa.Boolean, nullable=False),
        sa.Column("caller", sa.String, nullable=False),
        sa.Column("requested_at", sa.Double, nullable=False),
        sa.Column("delivered", sa.Boolean, nullable=False),
        sa.Column("accepted", sa.Boolean),
        sa.Column("detail", sa.String, nullable=False),
        sa.Column("idempotency_key", sa.String, unique=True),
        sa.Column("request_digest", sa.String, nullable=False),
    )
    op.create_index("ix_commands_job", "commands", ["job"])
