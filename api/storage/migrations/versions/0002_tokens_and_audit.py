"""Tokens, and the audit trail of what was changed with them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "tokens",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
        sa.Column("digest", sa.String, nullable=False, unique=True),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("created_by", sa.String, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
    )
    op.create_table(
        "audit",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("caller", sa.String, nullable=False),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("address", sa.String, nullable=False),
        sa.Column("method", sa.String, nullable=False),
        sa.Column("path", sa.String, nullable=False),
        sa.Column("status", sa.Integer),
    )
