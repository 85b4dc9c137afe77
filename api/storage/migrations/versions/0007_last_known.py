"""How far a job was when it was last seen, for one that cannot tell that any more."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("last_known", sa.JSON))
