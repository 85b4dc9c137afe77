"""Node groups that nothing new is placed on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "cordons",
        sa.Column("node_group", sa.String, primary_key=True),
        sa.Column("caller", sa.String, nullable=False),
        sa.Column("cordoned_at", sa.Double, nullable=False),
    )
