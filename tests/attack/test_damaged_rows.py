"""Whatever stands in a row of the store: lists and lookups tell what is left of it, and no token gains by it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import JSON

from api.auth.permissions import Role
from api.auth.tokens import AuditRow, TokenRow
from api.chaos.store import ChaosRunRow
from api.storage.store import Base, CommandRow, CordonRow
from tests.api.installation import Installation
from tests.waiting import wait_until

BYTES, TEXT, DEEP = b"\xff\x00", "\x1b[31mX\nY", "[" * 3000
VALUES: tuple[Any, ...] = (BYTES, TEXT, DEEP, "", float("inf"), -1, 2**62, None)
PLAN = """
name: rare
duration: 1d
objectives: ["goodput_ratio > 0.1"]
faults: [{kind: kill, target: {random: 1}, every: 12h}]
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    installation = Installation(tmp_path_factory.mktemp("rows"))
    installation.up()
    yield installation
    installation.atoll("down", code=None)


@pytest.fixture(scope="module")
def job(service: Installation) -> str:
    """It has a row in every table, and an end, so that nobody writes them again."""
    with service.client() as client, service.http() as http:
        job = client.submit(service.spec()).job
        client.create_token("damaged", Role.VIEWER)
        client.cordon("asia")
        wait_until(lambda: http.post(f"/v1/jobs/{job}/chaos/runs", json={"plan": PLAN}).status_code == 202)
        client.cancel(job)
        client.wait(job)
        wait_until(lambda: http.get(f"/v1/jobs/{job}/chaos/runs/latest").json()["ended_at"])
    return job


def changed(service: Installation, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """What somebody else's program does to the store. No constraint of the database keeps it from that."""
    with closing(sqlite3.connect(service.home.path / "service.sqlite", timeout=30)) as connection, connection:
        return connection.execute(statement, values).fetchall()


ROWS: dict[type[Base], tuple[str, tuple[str, ...]]] = {
    TokenRow: ("name = 'damaged'", ("/v1/tokens",)),
    AuditRow: ("number = 1", ("/v1/audit?limit=500",)),
    CordonRow: ("node_group = 'asia'", ("/v1/node-groups",)),
    CommandRow: ("request LIKE '%cancel%'", ("/v1/jobs/{job}/commands",)),
    ChaosRunRow: ("number = 1", ("/v1/jobs/{job}/chaos/runs",)),
}
"""Which row is damaged, and where it is listed beside others."""


@pytest.mark.parametrize("table", ROWS, ids=lambda table: table.__tablename__)
def test_a_row_that_is_damaged_anywhere_spoils_no_list(service: Installation, job: str, table: Any) -> None:
    where, paths = ROWS[table]
    name, failed = table.__tablename__, []
    ((number,),) = changed(service, f"SELECT rowid FROM {name} WHERE {where}")
    with service.http() as http:
        for column in table.__table__.columns:
            if column.primary_key and column.name == "number":
                continue
            ((before,),) = changed(service, f"SELECT {column.name} FROM {name} WHERE rowid = ?", number)
            for value in VALUES:
                try:
                    changed(service, f"UPDATE {name} SET {column.name} = ? WHERE rowid = ?", value, number)
                except sqlite3.IntegrityError:
                    continue  # no null here
                answers = [http.get(path.format(job=job)) for path in paths]
                failed += [(column.name, value, got.status_code, got.text) for got in answers if got.status_code != 200]
            changed(service, f"UPDATE {name} SET {column.name} = ? WHERE rowid = ?", before, number)
    assert failed == []


def test_a_run_of_a_plan_that_is_damaged_is_told_as_that(service: Installation, job: str) -> None:
    columns = [column.name for column in ChaosRunRow.__table__.columns if isinstance(column.type, JSON)]
    with service.http() as http:
        for column in ("state", *columns):
            ((before,),) = changed(service, f"SELECT {column} FROM chaos_runs WHERE number = 1")
            for value in ("[]", "[1, 2]", '"x"', "{", "5"):
                changed(service, f"UPDATE chaos_runs SET {column} = ? WHERE number = 1", value)
                for path in ("", "/verdict", "/report"):
                    answer = http.get(f"/v1/jobs/{job}/chaos/runs/latest{path}")
                    assert "bug in atoll" not in answer.text, (column, value, path, answer.text)
            changed(service, f"UPDATE chaos_runs SET {column} = ? WHERE number = 1", before)


@pytest.mark.parametrize(
    "damage",
    [("role", "ADMIN"), ("role", "admin "), ("role", BYTES), ("expires_at", "x"), ("expires_at", float("inf"))],
    ids=str,
)
def test_a_token_whose_row_is_damaged_lets_nobody_in(service: Installation, damage: tuple[str, Any]) -> None:
    column, value = damage
    with service.client() as client, service.http() as http:
        name = f"holder-{time.monotonic_ns()}"
        token = client.create_token(name, Role.OPERATOR, expires_in_s=3600).token
        changed(service, f"UPDATE tokens SET {column} = ? WHERE name = ?", value, name)
        assert http.get("/v1/whoami", headers={"Authorization": f"Bearer {token}"}).status_code == 401
        assert [told.valid for told in client.tokens() if told.name == name] == [False]


def test_a_service_begins_whatever_its_own_tokens_row_is(tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    installation.up()
    try:
        for column, value in (("role", "x"), ("expires_at", "soon"), ("name", BYTES), ("created_at", DEEP)):
            installation.atoll("down")
            newest = "(SELECT max(number) FROM tokens)"
            changed(installation, f"UPDATE tokens SET {column} = ? WHERE number = {newest}", value)
            installation.up()
            with installation.http() as http:
                assert http.get("/v1/whoami").json()["role"] == "admin"
                assert http.get("/v1/tokens").status_code == 200
    finally:
        installation.atoll("down", code=None)
