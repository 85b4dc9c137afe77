"""Jobs wait in a queue, and some go before others."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("priority", sa.Integer, nullable=False, server_default="0"))
