"""Alembic's entry: run the migrations on the caller's connection, in the caller's transaction."""

from __future__ import annotations

from alembic import context

from api.auth.tokens import TokenRow
from api.chaos import store as chaos_store
from api.storage.store import Base

for table in (TokenRow, chaos_store.ChaosRunRow):
    assert table.metadata is Base.metadata, "every table is known before they are compared"

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite changes a table by copying it
)
context.run_migrations()
