"""Runs of chaos plans, and what was decided in each."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "chaos_runs",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("run", sa.String, nullable=False, unique=True),
        sa.Column("job", sa.String, sa.ForeignKey("jobs.job", ondelete="CASCADE"), nullable=False),
        sa.Column("plan", sa.String, nullable=False),
        sa.Column("text", sa.String, nullable=False),
        sa.Column("fleet", sa.JSON, nullable=False),
        sa.Column("caller", sa.String, nullable=False),
        sa.Column("requested_at", sa.Double, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("begun_at", sa.Double),
        sa.Column("ended_at", sa.Double),
        sa.Column("reference", sa.JSON),
        sa.Column("verdict", sa.JSON),
        sa.Column("holds", sa.String, unique=True),
        sa.Column("idempotency_key", sa.String, unique=True),
        sa.Column("request_digest", sa.String, nullable=False),
    )
    op.create_index("ix_chaos_runs_job", "chaos_runs", ["job"])
    op.create_table(
        "chaos_decisions",
        sa.Column("run", sa.String, sa.ForeignKey("chaos_runs.run", ondelete="CASCADE"), primary_key=True),
        sa.Column("fault", sa.Integer, primary_key=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("training", sa.JSON, nullable=False),
        sa.Column("decision", sa.JSON, nullable=False),
    )
