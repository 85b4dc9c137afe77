"""Everything that is needed to hand a command over later than it was stored."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

LOST = "an earlier release ended before it handed the command over, and kept too little of it to do so now."


def upgrade() -> None:
    op.add_column("commands", sa.Column("dose", sa.JSON))
    op.add_column("commands", sa.Column("node_group", sa.String))
    op.add_column("commands", sa.Column("count", sa.Integer))
    rows = sa.table(
        "commands", sa.column("delivered", sa.Boolean), sa.column("accepted", sa.Boolean), sa.column("detail")
    )
    never = sa.and_(rows.c.delivered.is_(False), rows.c.accepted.is_(None))
    op.execute(rows.update().where(never).values(accepted=False, detail=LOST))
