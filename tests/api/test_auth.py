"""Who may do what, asked of the app itself: every route it has, and what becomes of strangers, guessers and changes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from starlette.routing import Route

from api.app import create_app
from api.auth import middleware
from api.auth.permissions import Role
from api.auth.tokens import REMEMBERED_S, AccessStore, FailureLimit, Tokens
from api.installation.home import Home
from api.storage.store import Store
from orchestrator.errors import Conflict, NotFound
from tests.api.clockwork import Clockwork

OPEN = {"/", "/web/{digest}/{name}", "/healthz", "/readyz", "/openapi.json", "/docs"}
"""All that a stranger may read. Whoever adds a path here has thought about it."""
FOR_ADMINS = ("/v1/tokens", "/v1/audit")


@dataclass(frozen=True)
class World:
    """An app with one token of each role."""

    app: FastAPI
    tokens: dict[Role, str]
    book: Tokens
    access: AccessStore

    def ask(
        self,
        method: str,
        path: str,
        token: str = "",
        address: str = "127.0.0.1",
        authorization: str | None = None,
        **more: Any,
    ) -> httpx.Response:
        async def exchange() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, client=(address, 1), raise_app_exceptions=False)
            said = authorization if authorization is not None else f"Bearer {token}" if token else None
            headers = {} if said is None else {"Authorization": said.encode("latin-1")}
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.request(method, path, headers=headers, **more)

        return asyncio.run(exchange())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    store = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
    app = create_app(Clockwork(tmp_path / "clockwork"), store, tmp_path / "runs")
    book = app.state.tokens
    tokens = {role: book.create(f"a-{role}", role, "the test")[1] for role in Role}
    yield World(app, tokens, book, app.state.access)
    store.close()


def routes(app: FastAPI | APIRouter) -> Iterator[tuple[str, str]]:
    """Every method and path that the app answers."""
    for route in app.routes:
        if included := getattr(route, "original_router", None):
            assert route.include_context.prefix == "", "routers say their paths in full"
            yield from routes(included)
            continue
        assert isinstance(route, Route), f"{type(route)} is no plain route: the walk does not know how to ask it"
        for method in sorted(route.methods or ()):
            yield method, route.path


def filled(path: str) -> str:
    """A path with something in the place of each parameter."""
    return re.sub(r"\{[^}]*\}", "latest", path)


def test_every_route_that_is_not_on_the_list_refuses_strangers_and_lesser_roles(world: World) -> None:
    walked = set()
    for method, path in routes(world.app):
        walked.add(path)
        where, reads = filled(path), method in ("GET", "HEAD")
        if path in OPEN:
            assert reads, f"{method} {path} changes something and is open to all"
            assert world.ask(method, where).status_code not in (401, 403), path
            continue
        stranger = world.ask(method, where)
        assert stranger.status_code == 401, f"{method} {path} answers {stranger.status_code} to a stranger"
        assert stranger.headers["www-authenticate"].startswith("Bearer")
        needed = Role.ADMIN if path.startswith(FOR_ADMINS) else Role.VIEWER if reads else Role.OPERATOR
        for role in Role:
            answer = world.ask(method, where, world.tokens[role])
            if role.reaches(needed):
                assert answer.status_code not in (401, 403), f"{method} {path} refuses the role {role}"
            else:
                assert answer.status_code == 403, f"{method} {path} answers {answer.status_code} to the role {role}"
    assert {"/v1/jobs", "/v1/jobs/{job}/islands/{island}/kill", "/v1/tokens", "/v1/audit", "/metrics"} <= walked


def test_a_route_that_somebody_adds_is_refused_before_anybody_thinks_of_it(world: World) -> None:
    @world.app.api_route("/v2/treasure", methods=["GET", "POST", "PATCH"])
    def treasure() -> str:
        return "gold"

    assert world.ask("GET", "/v2/treasure").status_code == 401
    assert world.ask("PATCH", "/v2/treasure", world.tokens[Role.VIEWER]).status_code == 403
    assert world.ask("GET", "/v2/treasure", world.tokens[Role.VIEWER]).json() == "gold"
    assert world.ask("POST", "/web/evil").status_code == 401
    assert world.ask("GET", "/nowhere").status_code == 401, "a stranger does not learn which paths there are"


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Basic YTpi", "bearer \u00fcnknown", "Bearer " + "x" * 5000]
)
def test_what_is_no_token_is_refused_with_a_remedy_and_not_repeated(world: World, value: str) -> None:
    answer = world.ask("POST", "/v1/jobs", authorization=value, content=b"{")
    assert (answer.status_code, answer.json()["type"]) == (401, "urn:atoll:problem:unauthenticated")
    assert "atoll token create" in answer.json()["remedy"]
    assert "x" * 50 not in answer.text


def test_a_token_ends_when_it_is_revoked_or_its_time_is_over(tmp_path: Path) -> None:
    now = [1000.0]
    store = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
    book = Tokens(AccessStore(store.engine), clock=lambda: now[0], passed=lambda: now[0])
    _, short = book.create("short", Role.VIEWER, "me", expires_in_s=60.0)
    _, long = book.create("long", Role.OPERATOR, "me")
    principal = book.principal_of(long)
    assert principal is not None
    assert (principal.name, principal.role) == ("long", Role.OPERATOR)
    now[0] += 59.9
    assert book.principal_of(short) is not None
    now[0] += 0.1
    assert book.principal_of(short) is None
    book.revoke("long")
    revoked_at = book.revoke("long").revoked_at
    now[0] += 1
    assert book.revoke("long").revoked_at == revoked_at, "the first time counts"
    assert book.principal_of(long) is None
    with pytest.raises(Conflict, match="never used"):
        book.create("long", Role.ADMIN, "me")
    with pytest.raises(NotFound):
        book.revoke("nobody")
    assert all(raw not in str(vars(row)) for row in book.list() for raw in (short, long))
    _, elsewhere = book.create("elsewhere", Role.VIEWER, "me")
    assert book.principal_of(elsewhere) is not None
    Tokens(AccessStore(store.engine)).revoke("elsewhere")
    now[0] += REMEMBERED_S + 0.01
    assert book.principal_of(elsewhere) is None, "by another service on the same database"
    store.close()


def test_whoever_owns_the_home_gets_an_admin_back_by_starting_the_service(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
    home, book = Home(tmp_path), Tokens(AccessStore(store.engine))
    book.leave_first(home)
    first = home.token()
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    book.leave_first(home)
    assert home.token() == first, "a valid one is kept"
    book.revoke("local")
    book.leave_first(home)
    assert home.token() != first
    (tmp_path / "token").write_text(book.create("weak", Role.VIEWER, "me")[1])
    book.leave_first(home)
    assert [row.name for row in book.list()] == ["local", "local-2", "weak", "local-3"]
    assert book.principal_of(home.token()).role is Role.ADMIN
    store.close()


def test_wrong_tokens_are_slowed_down_by_address_and_right_ones_never(world: World) -> None:
    answers = [world.ask("GET", "/v1/jobs", f"guess-{n}", "192.0.2.1") for n in range(12)]
    assert [answer.status_code for answer in answers] == [401] * 10 + [429] * 2
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 12
    assert answers[-1].json()["type"] == "urn:atoll:problem:too-many-failures"
    assert world.ask("GET", "/v1/jobs", world.tokens[Role.VIEWER], "192.0.2.1").status_code == 200
    assert world.ask("GET", "/v1/jobs", "guess", "192.0.2.2").status_code == 401
    assert world.ask("GET", "/v1/jobs", "", "192.0.2.1").status_code == 401, "no token is no guess"


def test_an_unknown_client_with_many_addresses_has_one_limit_and_does_not_fill_the_log(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every client of IPv6 has 2**64 addresses, and a path may be longer than everything else in the log."""
    clock = SimpleNamespace(monotonic=lambda: 0.0, time=time.time)  # a limit lets go with time
    monkeypatch.setattr(middleware, "time", clock)
    answers = [world.ask("GET", "/v1/jobs", f"guess-{n}", f"2001:db8::{n + 1:x}") for n in range(12)]
    assert [answer.status_code for answer in answers] == [401] * 10 + [429] * 2
    for number in range(150):
        assert world.ask("GET", "/v1/" + "%01" * 5_000, "guess", f"192.0.2.{number}").status_code == 401
    lines = [record.getMessage() for record in caplog.records if record.name == "api.auth.middleware"]
    assert len(lines) == middleware.LINES_MAX
    assert max(map(len, lines)) < 300


def test_the_limit_lets_go_with_time_and_keeps_a_bounded_memory() -> None:
    limit = FailureLimit(failures_max=2, window_s=10.0, addresses_max=50)
    assert [limit.failed("a", 0.0) for _ in range(3)] == [0, 0, 5]
    assert limit.failed("a", 4.0) == 1
    assert limit.failed("a", 5.0) == 0, "what it said to wait was enough"
    assert limit.failed("a", 5.0) > 0
    for number in range(1000):
        limit.failed(f"b{number}", 6.0)
    assert len(limit) == 50
    assert limit.failed("a", 6.0) == 0, "it was forgotten, which costs no more than two guesses"


def test_every_change_by_somebody_known_is_audited_with_its_outcome(world: World) -> None:
    admin = world.tokens[Role.ADMIN]
    world.ask("GET", "/v1/jobs", world.tokens[Role.VIEWER])
    world.ask("POST", "/v1/jobs", "a stranger")
    world.ask("POST", "/v1/jobs", world.tokens[Role.VIEWER])
    world.ask("POST", "/v1/jobs/nope/cancel", world.tokens[Role.OPERATOR], "192.0.2.9")
    made = world.ask("POST", "/v1/tokens", admin, json={"name": "ci", "role": "viewer"})
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    trail = world.ask("GET", "/v1/audit", admin).json()
    told = [(e["caller"], e["role"], e["method"], e["path"], e["status"]) for e in trail["entries"]]
    assert told == [
        ("a-admin", "admin", "POST", "/v1/tokens", 201),
        ("a-operator", "operator", "POST", "/v1/jobs/nope/cancel", 404),
        ("a-viewer", "viewer", "POST", "/v1/jobs", 403),
    ]
    assert trail["entries"][1]["address"] == "192.0.2.9"
    assert trail["next_cursor"] is None
    first = world.ask("GET", "/v1/audit?limit=2", admin).json()
    rest = world.ask("GET", f"/v1/audit?limit=2&cursor={first['next_cursor']}", admin).json()
    assert first["entries"] + rest["entries"] == trail["entries"]


def test_a_change_that_breaks_the_service_is_audited_as_500(world: World) -> None:
    @world.app.post("/v1/broken")
    def broken() -> None:
        raise ZeroDivisionError

    assert world.ask("POST", "/v1/broken", world.tokens[Role.OPERATOR]).status_code == 500
    assert [row.status for row in world.access.audit(1, None)] == [500]


def test_tokens_are_shown_once_and_then_only_described(world: World) -> None:
    admin = world.tokens[Role.ADMIN]
    made = world.ask("POST", "/v1/tokens", admin, json={"name": "ci", "role": "operator", "expires_in_s": 60}).json()
    assert made["created_by"] == "a-admin"
    assert world.ask("GET", "/v1/whoami", made["token"]).json() == {"name": "ci", "role": "operator"}
    assert made["expires_at"] == pytest.approx(made["created_at"] + 60)
    assert world.ask("POST", "/v1/jobs/nope/cancel", made["token"]).status_code == 404
    listed = world.ask("GET", "/v1/tokens", admin)
    assert {"name": "ci", "valid": True}.items() <= listed.json()["tokens"][-1].items()
    assert made["token"] not in listed.text
    assert world.ask("POST", "/v1/tokens", admin, json={"name": "ci", "role": "viewer"}).status_code == 409
    for wrong in ({"name": "x y", "role": "viewer"}, {"name": "x", "role": "king"}, {"name": "x"}):
        assert world.ask("POST", "/v1/tokens", admin, json=wrong).status_code == 422
    assert world.ask("POST", "/v1/tokens/ci/revoke", admin).json()["valid"] is False
    assert world.ask("GET", "/v1/jobs", made["token"]).status_code == 401
    assert world.ask("POST", "/v1/tokens/nobody/revoke", admin).status_code == 404
