"""The store's tables on SQLite and on a real PostgreSQL: made, upgraded, refused, and the same rows on both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from alembic import command as alembic
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text

from api.auth.permissions import Role
from api.auth.tokens import AccessStore, AuditRow, Tokens
from api.jobs.outbox import digest_of
from api.storage.store import MIGRATIONS, Base, CommandRow, DuplicateKey, JobRow, Store, url_of
from orchestrator.core import commands
from orchestrator.errors import AtollError, ConfigurationError, InfrastructureError
from orchestrator.tape import codec
from tests.api.installation import CONTROL, Installation
from tests.postgresql import PostgreSQL, a_server
from tests.waiting import wait_until

OLD_TABLES = """
CREATE TABLE jobs (
    number INTEGER NOT NULL, job VARCHAR NOT NULL, name VARCHAR NOT NULL, spec JSON NOT NULL, run_dir VARCHAR NOT NULL,
    caller VARCHAR NOT NULL, submitted_at DOUBLE NOT NULL, state VARCHAR NOT NULL, reason VARCHAR NOT NULL, summary JSON,
    idempotency_key VARCHAR, request_digest VARCHAR NOT NULL,
    PRIMARY KEY (number), UNIQUE (job), UNIQUE (idempotency_key)
);
CREATE TABLE commands (
    number INTEGER NOT NULL, command VARCHAR NOT NULL, job VARCHAR NOT NULL, kind VARCHAR NOT NULL, island VARCHAR,
    restart BOOLEAN NOT NULL, caller VARCHAR NOT NULL, requested_at DOUBLE NOT NULL, delivered BOOLEAN NOT NULL,
    accepted BOOLEAN, detail VARCHAR NOT NULL, idempotency_key VARCHAR, request_digest VARCHAR NOT NULL,
    PRIMARY KEY (number), UNIQUE (command), FOREIGN KEY(job) REFERENCES jobs (job), UNIQUE (idempotency_key)
);
CREATE INDEX ix_commands_job ON commands (job);
INSERT INTO jobs VALUES (1, 'old-1', 'old', '{}', '/r', 'me', 1.0, 'completed', '', '{"loss": 2.5}', NULL, '');
INSERT INTO commands VALUES (1, 'k', 'old-1', 'kill', 'asia', 1, 'me', 2.0, 1, 1, '', NULL, '');
INSERT INTO commands VALUES (2, 'l', 'old-1', 'kill', 'asia', 1, 'me', 3.0, 0, NULL, '', NULL, '');
"""
"""What the first release wrote, before there were migrations. Its second command was never handed over."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgreSQL]:
    with a_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.sqlite'}"
    server: PostgreSQL = request.getfixturevalue("postgres")
    return server.new_database()


def job_row(job: str, key: str | None = None) -> JobRow:
    values = {"name": "n", "spec": {"a": [1, None, "ü"]}, "run_dir": "/r", "caller": "c", "submitted_at": 1.5}
    return JobRow(job=job, state="running", idempotency_key=key, **values)


def test_the_migrations_make_the_tables_that_the_rows_describe(url: str) -> None:
    store = Store(url)
    with store.engine.connect() as connection:
        difference = compare_metadata(MigrationContext.configure(connection), Base.metadata)
    store.close()
    assert difference == [], "a row class was changed without a migration, or the other way round"


def test_rows_come_back_as_they_went_in_also_after_a_restart(url: str) -> None:
    store = Store(url)
    store.add_job(job_row("a-1"))
    store.add_job(job_row("b-2", "once"))
    assert [store.job(job).priority for job in ("a-1", "b-2")] == [0, 0]
    with pytest.raises(DuplicateKey) as known:
        store.add_job(job_row("c-3", "once"))
    assert known.value.row.job == "b-2"
    kill = {"kind": "kill", "island": "ü", "restart": True}
    store.add_command(CommandRow(command="k", job="a-1", request=kill, caller="c", requested_at=2.25))
    store.update_job("a-1", state="completed", summary={"loss": 1.5})
    store.update_command("k", delivered=True, accepted=False, detail="no")
    book = Tokens(AccessStore(store.engine))
    raw = book.create("ci", Role.OPERATOR, "me", expires_in_s=60.0)[1]
    row = AuditRow(at=1.0, caller="ci", role="operator", address="::1", method="POST", path="/v1/jobs")
    AccessStore(store.engine).begin_audit(row)
    store.close()

    again = Store(url)
    assert [(row.job, row.spec) for row in again.jobs()] == [(j, {"a": [1, None, "ü"]}) for j in ("b-2", "a-1")]
    assert again.job("latest").job == "b-2"
    assert (again.job("a-1").summary, again.job("a-1").submitted_at) == ({"loss": 1.5}, 1.5)
    assert [(c.request, c.accepted, c.delivered, c.detail) for c in again.commands("a-1")] == [
        (kill, False, True, "no")
    ]
    access = AccessStore(again.engine)
    assert Tokens(access).principal_of(raw).role is Role.OPERATOR
    access.end_audit(access.audit(1, None)[0].number, 201)
    assert [(row.caller, row.status) for row in access.audit(10, None)] == [("ci", 201)]
    again.close()


def test_of_many_at_once_with_one_key_or_one_name_exactly_one_is_stored(url: str) -> None:
    store = Store(url)
    book = Tokens(AccessStore(store.engine))

    def add(number: int) -> tuple[bool, bool]:
        stored = named = True
        try:
            store.add_job(job_row(f"job-{number}", key="same"))
        except DuplicateKey:
            stored = False
        try:
            book.create("one", Role.VIEWER, str(number))
        except AtollError:
            named = False
        return stored, named

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(add, range(16)))
    assert [sum(column) for column in zip(*answers, strict=True)] == [1, 1]
    assert len(store.jobs()) == len(book.list()) == 1
    store.close()


def test_several_services_may_open_a_new_database_at_once(url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(Store, [url] * 4))
    assert [store.jobs() for store in stores] == [[]] * 4
    for store in stores:
        store.close()


def test_a_database_from_before_migrations_is_upgraded_with_its_rows(url: str) -> None:
    engine = create_engine(url_of(url))
    statements = OLD_TABLES
    if url.startswith("postgresql"):
        statements = statements.replace(" DOUBLE ", " DOUBLE PRECISION ").replace(
            "number INTEGER NOT NULL", "number SERIAL NOT NULL"
        )
        statements = statements.replace("'asia', 1, 'me', 2.0, 1, 1,", "'asia', true, 'me', 2.0, true, true,")
        statements = statements.replace("'asia', 1, 'me', 3.0, 0, NULL,", "'asia', true, 'me', 3.0, false, NULL,")
    with engine.begin() as connection:
        for statement in statements.split(";\n"):
            if statement.strip():
                connection.execute(text(statement.replace(":", r"\:")))
    engine.dispose()
    store = Store(url)
    assert store.job("old-1").summary == {"loss": 2.5}
    assert store.commands("old-1")[0].request == {"kind": "kill", "island": "asia", "restart": True}
    lost = store.commands("old-1")[1]
    assert (lost.accepted, "earlier release" in lost.detail) == (False, True), "nobody knows what it was to say"
    assert Tokens(AccessStore(store.engine)).list() == []
    with store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    store.close()


COMMANDS_BEFORE = [
    ("kill", "asia", False, None, None, None, "ff54ce5fcb9e051f77e737bf658a24d2"),
    ("drain", "europe", True, None, None, None, "ae9da37c135601a1ef3cfa48a72f7b6a"),
    ("readd", "asia", True, None, None, None, "51025528d743e9eebc3ed40b966b468c"),
    ("scale", None, True, None, "us-east", 1, "690081dc884b764a6fc5bc3e42fa872d"),
    ("checkpoint", None, True, None, None, None, "2d3fafc6773eaebe6ad31cc167cfcfd1"),
    ("rollback", None, True, None, None, 0, "803c4b9e64653265cf015c4bdb73e123"),
    ("rollback", None, True, None, None, 3, "f8ca42b37ccbc1a4c85a0135c2f79d0a"),
    ("stop", "us-west", True, {"duration": 0.5, "bytes_per_second": 0.0, "payloads": 0}, None, None, "44cb"),
    ("kill", "us-west", True, {"duration": 0.0, "bytes_per_second": 0.0, "payloads": 0}, None, None, "904e"),
    ("kill_synchroniser", None, True, {"duration": 0.0, "bytes_per_second": 0.0, "payloads": 0}, None, None, "77b3"),
    ("cordon", None, True, None, "asia", None, ""),
    ("uncordon", None, True, None, "asia", None, ""),
    ("cancel", None, False, None, None, None, "0382442d656187af65f2b3b635e968b3"),
]
"""Kind, island, restart, dose, node group, count and digest, as the build before revision 0008 stored them for a job."""
COMMANDS_NOW = [
    commands.Kill("asia", restart=False),
    commands.Drain("europe"),
    commands.Readd("asia"),
    commands.Scale("us-east", 1),
    commands.Checkpoint(),
    commands.Rollback(0),
    commands.Rollback(3),
    commands.Inject("stop", "us-west", 0.5),
    commands.Inject("kill", "us-west"),
    commands.Inject("kill_synchroniser", None),
    commands.Cordon("asia"),
    commands.Uncordon("asia"),
    commands.Cancel(),
]


def test_commands_that_an_earlier_build_stored_are_the_same_ones_and_known_again_by_their_keys(url: str) -> None:
    engine = create_engine(url_of(url))
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        alembic.upgrade(config, "0007")
        jobs = (
            "INSERT INTO jobs (job, name, spec, run_dir, caller, submitted_at, state, priority, reason, request_digest)"
        )
        connection.execute(text(f"{jobs} VALUES ('j', 'n', '{{}}', '/r', 'me', 1.0, 'running', 0, '', '')"))
        columns = "command, kind, island, restart, dose, node_group, count, request_digest, idempotency_key"
        values = ", ".join(f":{name}" for name in columns.split(", "))
        insert = text(
            f"INSERT INTO commands (job, caller, requested_at, delivered, detail, {columns}) "
            f"VALUES ('j', 'me', 2.0, :no, '', {values})"
        )
        for number, (kind, island, restart, dose, group, count, digest) in enumerate(COMMANDS_BEFORE):
            about = {"command": f"c{number}", "kind": kind, "island": island, "restart": restart, "no": False}
            more = {"dose": dose and json.dumps(dose), "node_group": group, "count": count}
            keys = {"request_digest": digest, "idempotency_key": f"k{number}" if digest else None}
            connection.execute(insert, about | more | keys)
    engine.dispose()
    store = Store(url)
    rows = store.open_commands("j")
    assert [codec.decode_command(row.request) for row in rows] == COMMANDS_NOW
    for row in rows:
        repeated = digest_of(["j", codec.encode_command(codec.decode_command(row.request))])
        assert row.request_digest == (repeated if row.idempotency_key else "")
    with store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    store.close()


def test_an_upgrade_that_fails_half_way_changes_nothing(url: str) -> None:
    engine = create_engine(url_of(url))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE audit (in_the_way INTEGER)"))
    with pytest.raises(InfrastructureError, match="audit"):
        Store(url)
    assert inspect(engine).get_table_names() == ["audit"], "neither jobs nor tokens, which come before it"
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE audit"))
    engine.dispose()
    Store(url).close()


def test_a_database_of_a_newer_build_is_refused(url: str) -> None:
    store = Store(url)
    with store.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    with pytest.raises(ConfigurationError, match="newer atoll"):
        Store(url)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ("no url", ConfigurationError),
        ("mystery://me:pa55word@db/x", ConfigurationError),
        ("postgresql://me:pa55word@127.0.0.1:1/x", InfrastructureError),
        ("sqlite:////no/such/folder/x.sqlite", InfrastructureError),
    ],
)
def test_a_database_that_cannot_be_had_is_told_without_its_password(wrong: str, kind: type[AtollError]) -> None:
    with pytest.raises(kind) as told:
        Store(wrong)
    assert "pa55word" not in str(told.value)


def test_the_service_runs_on_postgresql_and_comes_back_to_it(postgres: PostgreSQL, cold: Installation) -> None:
    url = postgres.new_database()
    start = ["up", "--runs", str(cold.runs), "--control", CONTROL, "--database", url]
    cold.atoll(*start)
    address = cold.home.address()
    assert address is not None
    assert url not in " ".join(psutil.Process(address.pid).cmdline()), "a password in it would be seen by everybody"
    job = json.loads(cold.atoll("submit", cold.spec_file(), "--json"))["job"]
    wait_until(lambda: json.loads(cold.atoll("islands", job, "--json"))[3]["state"] == "training")
    assert json.loads(cold.atoll("kill", job, "asia", "--json"))["state"] == "accepted"
    with cold.http() as http:
        assert http.get("/v1/jobs/a%00b").status_code == 403
        assert http.post("/v1/jobs", json=cold.spec(name="a\0b")).status_code == 422

    cold.atoll("down")
    assert not (cold.home.path / "service.sqlite").exists()
    cold.atoll(*start)
    with cold.client() as client:
        assert client.job("latest").job == job
        assert [command.kind for command in client.commands(job)] == ["kill"]
        assert [(entry.path, entry.status) for entry in client.audit().entries][-2:] == [
            (f"/v1/jobs/{job}/islands/asia/kill", 202),
            ("/v1/jobs", 201),
        ]
        client.cancel(job)
