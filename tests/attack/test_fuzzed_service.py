"""Hostile requests at the real service: it answers each, in words, on a connection that goes on, for little CPU and memory.

What is sent: every body of the attack, specifications with one value changed, text of the shipped files spoilt, and every
operation of the document with hostile paths, queries, headers and bodies. ``ATOLL_FUZZ_EXAMPLES`` says how many of each
(``make soak`` sends thousands). The examples are the same in every run; a failure prints the request.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import quote, urlencode

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.http.guard import BODY_BYTES_MAX
from orchestrator.specification.config import JobSpec
from tests.api.installation import ROOT, Installation
from tests.waiting import PATIENCE_S, wait_until

EXAMPLES = int(os.environ.get("ATOLL_FUZZ_EXAMPLES", "60"))
CPU_MAX_S = 1.0
"""Of the service's process for one request, its background threads included."""
MEMORY_MAX_BYTES = 100 << 20
FUZZ = settings(
    derandomize=True, max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
YAML, JSON = "application/yaml", "application/json"


@dataclass
class Target:
    """A connection that is kept, and what the service's process has used."""

    installation: Installation
    process: psutil.Process
    token: str
    connection: http.client.HTTPConnection
    memory_before: int
    job: str = ""
    ended: str = ""
    """A job that has ended: a plan against it is read and judged, and then nothing is struck."""
    sent: int = 0
    statuses: set[int] = field(default_factory=set)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """One request on the connection that all others use; whatever is wrong with the answer fails."""
        request = f"{method} {path} {headers} {(body or b'')[:300]!r}"
        before = self._cpu_s()
        named = {"Authorization": f"Bearer {self.token}", **{k.replace("_", "-"): v for k, v in headers.items()}}
        try:
            self.connection.request(method, path, body, named)
            answer = self.connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            raise AssertionError(f"the connection was dropped ({error!r}) by or before {request}") from error
        spent = self._cpu_s() - before
        self.sent += 1
        self.statuses.add(answer.status)
        assert spent < CPU_MAX_S, f"{spent:.2f} s of CPU for {request}"
        assert answer.status < 500 or _is_infrastructure(answer.status, content), (
            f"{answer.status} {content!r} to {request}"
        )
        if answer.status >= 400 and method != "HEAD":
            assert answer.headers["Content-Type"] == "application/problem+json", request
            _check_problem(json.loads(content), request)
        return answer.status, content

    def submit(self, body: bytes, content_type: str) -> int:
        """Submit, and take back what was accepted."""
        status, content = self.ask("POST", "/v1/jobs", body, Content_Type=content_type)
        if status == 201:
            job = json.loads(content)["job"]
            self.ask("POST", f"/v1/jobs/{job}/cancel")
        return status

    def _cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


def _is_infrastructure(status: int, content: bytes) -> bool:
    """503 is right where no job is there to be asked any more, or none has begun yet."""
    return status == 503 and json.loads(content)["type"].endswith(":infrastructure")


def _check_problem(document: dict[str, Any], request: str) -> None:
    assert document["status"] >= 400, request
    said = (document["detail"], document.get("remedy", ""), *(one["remedy"] for one in document.get("problems", ())))
    assert len(" ".join(said)) > 20, f"{document} says too little to {request}"
    assert "bug" not in document["detail"], request
    assert all(problem["message"] for problem in document.get("problems", ())), request
    assert len(json.dumps(document)) < 100_000, request


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    installation = Installation(tmp_path_factory.mktemp("fuzzed"))
    installation.up()
    address = installation.home.address()
    assert address is not None
    process = psutil.Process(address.pid)
    connection = http.client.HTTPConnection(address.url.removeprefix("http://"), timeout=PATIENCE_S)
    found = Target(installation, process, installation.home.token(), connection, 0)
    islands = [{"node_group": "asia", "cpus": 0.01}]  # clockwork works each look out from the beginning: keep it cheap
    for steps in (1, 20_000):
        spec = json.dumps(installation.spec(steps=steps, islands=islands)).encode()
        _, content = found.ask("POST", "/v1/jobs", spec, Content_Type=JSON)
        found.job, found.ended = json.loads(content)["job"], found.ended or json.loads(content)["job"]
        found.ask("GET", "/openapi.json")  # what is loaded at first is no leak
    wait_until(lambda: json.loads(found.ask("GET", f"/v1/jobs/{found.ended}")[1])["report_ready"])
    found.memory_before = process.memory_info().rss
    yield found
    connection.close()
    installation.atoll("down")


# ── what the attack sent ──────────────────────────────────────────────────────────────────────────────────────────────

NINES = "9" * 5_000
WRITTEN = [
    "model: {1: a, b: c}",
    "model: {2020-01-01: a}",
    "model: {!!binary aGk=: a}",
    "model: {~: a, b: c}",
    "a: !!int ''",
    "a: !!float ''",
    "a: !!bool 'x'",
    f"seed: 0x{'f' * 5_000}",
    f"seed: {':'.join('1' * 3_000)}",
    f"seed: {NINES}",
    "a: [" + "1," * 100_000 + "1]",
    "islands: [{node_group: asia, count: 1e30}]",
    "a: &a [x, x]\nb: &b [*a, *a]",
    "[" * 100_000,
    "\x00",
    "\ufeff",
    "",
    "- a",
    "islands: [{node_group: asia}]\nislands: [{node_group: asia}]",
    "recovery: {suspect_timeout_s: .inf}",
]
SMALLEST = {"islands": [{"node_group": "asia", "cpus": 0.01}], "budget": {"steps": 10}}
SENT = [
    '{"model": {"factory": "\\ud800"}}',
    '{"data": {"text_field": "\\u0000"}}',
    '{"\\ud800": 1}',
    f'{{"seed": {NINES}}}',
    '{"recovery": {"suspect_timeout_s": Infinity}, "health": {"displacement_ratio_max": NaN}}',
    '{"recovery": {"suspect_timeout_s": 1e999}}',
    '{"seed": 1, "seed": 2}',
    "[" * 200_000,
    '{"a":' * 100_000,
    '"' * 1_000,
    "null",
    "[]",
    json.dumps(SMALLEST | {"islands": [{"node_group": "asia", "count": 10**30}]}),
    json.dumps(
        SMALLEST | {"islands": [{"node_group": "asia", "count": 10**18, "count_max": 10**18, "standby": 10**18}]}
    ),
    json.dumps(SMALLEST | {"islands": [{"node_group": "asia"}] * 40_000}),
    json.dumps(SMALLEST | {"islands": [{"node_group": "mars"}] * 10_000}),
    json.dumps(SMALLEST | {"islands": [{}] * 90_000}),
    json.dumps(SMALLEST | {f"k{n}": 1 for n in range(70_000)}),
    json.dumps(SMALLEST | {"model": {"preset": [[0] * 100] * 1_000}}),
    json.dumps(SMALLEST | {"model": {"x" * 500_000: "y" * 400_000}}),
    json.dumps(SMALLEST | {"islands": [{"node_group": "asia", "cpus": 1e-9}]}),
    json.dumps(SMALLEST | {"synthetic": {"parameters": 10**30}}),
    json.dumps(SMALLEST | {"training": {"batch_size": 10**18}}),
    json.dumps(SMALLEST | {"islands": [{"node_group": "asia", "count": True}]}),
]


def test_what_the_attack_sent_as_a_specification_is_refused(target: Target) -> None:
    for text in WRITTEN:
        assert target.submit(text.encode(), YAML) == 422, text[:80]
    for text in SENT:
        assert target.submit(text.encode(), JSON) == 422, text[:80]
    for raw in (b"\xff\xfe{\x00}\x00", b"\x80", json.dumps(SMALLEST).encode("utf-16")):
        assert target.submit(raw, JSON) == target.submit(raw, YAML) == 422


def test_what_the_attack_sent_as_a_plan_is_refused(target: Target) -> None:
    path = f"/v1/jobs/{target.job}/chaos/runs"
    plain = {"objectives": ["merges > 1"]}
    deep: Any = "x"
    for _ in range(600):
        deep = {"a": deep}
    plans: list[Any] = [*WRITTEN, plain | {"name": deep}, plain | {"seed": 10**18}, plain | {"duration": "9" * 60_000}]
    plans += [
        plain | {"faults": [{"kind": "kill", "target": {"random": 1}, "every": 1e-320}]},
        {"objectives": ["a"] * 20_000},
    ]
    for plan in plans:
        status, _ = target.ask("POST", path, json.dumps({"plan": plan}).encode(), Content_Type=JSON)
        assert status == 422, plan
    policy = {"token_budget": 1, "islands": 4}
    references = [
        {"loss_final": 10**18, "policy": policy},
        {"loss_final": True, "policy": policy},
        {"loss_final": 1},
        {},
        deep,
    ]
    for reference in references:
        body = {"plan": {"objectives": ["loss_gap < 1"]}, "reference": reference}
        status, _ = target.ask("POST", path, json.dumps(body).encode(), Content_Type=JSON)
        assert status == 422, reference
    endless = b'{"plan": {"objectives": ["loss_gap < 1"]}, "reference": {"loss_final": Infinity, "policy": {}}}'
    assert target.ask("POST", path, endless, Content_Type=JSON)[0] == 422


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "scale"), ("POST", "chaos/faults"), ("POST", "islands/asia/kill"), ("POST", "rollback"), ("PATCH", "")],
)
def test_every_body_is_read_by_the_strict_parser(target: Target, method: str, path: str) -> None:
    where = f"/v1/jobs/{target.job}/{path}".rstrip("/")
    for text in (*SENT, '{"restart": "yes"}', '{"count": 1, "count": 2}', '{"priority": 1.0}', '{"priority": true}'):
        if text != "null":  # which stands for no body where there need be none
            refused = 413 if len(text) > BODY_BYTES_MAX else 422
            assert target.ask(method, where, text.encode(), Content_Type=JSON)[0] == refused, text[:80]


# ── specifications with one value changed ─────────────────────────────────────────────────────────────────────────────


def paths_of(
    schema: dict[str, Any], definitions: dict[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Every field of the specification."""
    for choice in (schema, *schema.get("anyOf", ()), *schema.get("allOf", ())):
        found = definitions[choice["$ref"].rpartition("/")[2]] if "$ref" in choice else choice
        for name, inner in found.get("properties", {}).items():
            yield (*above, name)
            yield from paths_of(inner, definitions, (*above, name))
        if "$ref" in str(found.get("items", "")):
            yield from paths_of(found["items"], definitions, (*above, "0"))


SCHEMA = JobSpec.model_json_schema()
NOT_HERE = {("resume",), ("resume", "checkpoint"), ("checkpoints", "folder"), ("data", "files")}
"""Where files are is another subject of the attack, with tests of its own."""
PATHS = sorted(path for path in paths_of(SCHEMA, SCHEMA["$defs"]) if path not in NOT_HERE)

NUMBERS = st.sampled_from(
    [0, -1, 1, 2, True, False, 0.5, 1e-9, 1e-320, 1e308, -1e308, 2**31, 2**63 - 1, -(2**63) + 1, 10_001, 10**9, 0.0001]
) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.sampled_from(
    [
        "",
        "x",
        "5",
        "a" * 5_000,
        "../../etc/passwd",
        "a\nb",
        "%00",
        "é",
        "😀",
        "null",
        "-",
        "a:b",
        "os:system",
        "true",
        "<b>",
        "{}",
    ]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
HOSTILE = st.recursive(
    st.none() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def with_value(document: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(document))
    here: Any = made
    for name, behind in pairwise(path):
        here = here[0] if name == "0" else here.setdefault(name, [{}] if behind == "0" else {})
    if isinstance(here, dict):
        here[path[-1]] = value
    return made


@FUZZ
@given(path=st.sampled_from(PATHS), value=HOSTILE, group=st.sampled_from(["asia", "mars"]))
def test_a_specification_with_one_hostile_value_is_answered(
    target: Target, path: tuple[str, ...], value: Any, group: str
) -> None:
    document = target.installation.spec(steps=10, islands=[{"node_group": group, "cpus": 0.01}])
    assert target.submit(json.dumps(with_value(document, path, value)).encode(), JSON) in (201, 422)


# ── spoilt text ───────────────────────────────────────────────────────────────────────────────────────────────────────

SHIPPED = [
    path.read_bytes() for path in sorted((ROOT / "deploy").glob("*/*.yaml")) if path.parent.name in ("configs", "plans")
]
INSERTED = st.sampled_from(
    [
        b"!!int ''",
        b"&a ",
        b"*a",
        b"<<: ",
        b"? ",
        b"- ",
        b"[" * 200,
        b"{a: " * 100,
        b"1" * 5_000,
        b"1e999",
        b".inf",
        b"~: ",
    ]
) | st.sampled_from(
    [
        b"\x00",
        b"\xff",
        b"\xc2\x85",
        b"\xed\xa0\x80",
        b"\t",
        b"%YAML 1.1\n",
        b"\n---\n",
        b"...\n",
        b'"',
        b"'",
        b"|",
        b"#",
    ]
)


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """A shipped file with some of its lines twice or away, and hostile bytes in it."""
    text = draw(st.sampled_from(SHIPPED))
    lines = text.splitlines(keepends=True)
    for _ in range(draw(st.integers(0, 2))):
        n = draw(st.integers(0, len(lines) - 1))
        lines[n : n + 1] = draw(st.sampled_from([[], [lines[n]] * 2, [lines[n].lstrip()], [b"  " + lines[n]]]))
    text = b"".join(lines)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(INSERTED | st.binary(max_size=2)) + text[at + draw(st.integers(0, 2)) :]
    return text


@FUZZ
@given(text=spoilt(), kind=st.sampled_from([YAML, JSON, "text/plain", ""]))
def test_spoilt_text_is_answered(target: Target, text: bytes, kind: str) -> None:
    assert target.submit(text, kind) in (201, 422)
    said = text.decode("utf-8", "replace")
    for body in ({"plan": said}, {"shipped": said}, {"plan": said, "reference": {"loss_final": said}}):
        path = f"/v1/jobs/{target.ended}/chaos/runs"
        status, _ = target.ask("POST", path, json.dumps(body).encode(), Content_Type=JSON)
        assert status in (404, 409, 422)


# ── every operation ───────────────────────────────────────────────────────────────────────────────────────────────────

METHODS = ("get", "post", "put", "patch", "delete", "head", "options")
HEADERS = ("Idempotency_Key", "If_Match", "If_None_Match", "Last_Event_ID", "Content_Type", "Accept", "Range", "Host_")


@FUZZ
@given(data=st.data())
def test_every_operation_answers_whatever_is_asked(target: Target, data: st.DataObject) -> None:
    _, content = target.ask("GET", "/openapi.json")
    paths = json.loads(content)["paths"]
    path = data.draw(st.sampled_from(sorted(paths)))
    operations = paths[path]
    method = data.draw(st.sampled_from(METHODS) | st.sampled_from(sorted(operations)))
    operation = operations.get(method, {})
    query = {"follow": "false"}
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "query" and parameter["name"] != "follow":
            query[parameter["name"]] = str(data.draw(HOSTILE))[:2_000]
    named = (
        st.sampled_from(["latest", target.job, "asia", "0", "1", "-1", "9" * 30, "..", "%", "a\0b", "é", "x" * 300])
        | TEXTS
    )
    while "{" in path:
        before, _, after = path.partition("{")
        path = before + (quote(data.draw(named), safe="") or "x") + after.partition("}")[2]
    headers = data.draw(st.dictionaries(st.sampled_from(HEADERS), st.text('abcW/"*,;=0-9é%', max_size=40), max_size=3))
    body = (
        json.dumps(data.draw(HOSTILE)).encode() if operation.get("requestBody") and data.draw(st.booleans()) else None
    )
    if body is not None:
        headers.setdefault("Content_Type", JSON)
    target.ask(method.upper(), f"{path}?{urlencode(query, errors='replace')}", body, **headers)


def test_after_all_of_it_the_service_is_as_large_as_before_and_its_log_has_no_traceback(target: Target) -> None:
    grown = target.process.memory_info().rss - target.memory_before
    log = (target.installation.home.path / "service.log").read_text()
    assert target.ask("GET", "/healthz")[0] == 200
    assert "Traceback" not in log, log[log.index("Traceback") :][:3_000]
    assert grown < MEMORY_MAX_BYTES, f"{grown / 2**20:.0f} MiB more after {target.sent} requests"
    assert {200, 422} <= target.statuses
