"""Cordoned nodes, with the reason, and since when failures of a node count again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "node_cordons",
        sa.Column("node", sa.String, primary_key=True),
        sa.Column("node_group", sa.String, nullable=False),
        sa.Column("caller", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("cordoned_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=True),
        sa.Column("lifted_at", sa.Double, nullable=True),
    )
