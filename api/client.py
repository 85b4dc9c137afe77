"""A typed client of the REST API: what the CLI uses, and any program may.

Responsible for requests and for turning answers into the shapes of ``api.schemas``, and problem documents into the errors
of ``orchestrator.errors``, so that a remote refusal reads like a local one. Every request that changes something carries an
``Idempotency-Key`` and is repeated once if the connection broke before an answer came: the service does it at most once.
"""

from __future__ import annotations

import getpass
import secrets
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx

from api.schemas import (
    Answer,
    Command,
    Commands,
    Health,
    Island,
    Islands,
    Job,
    Jobs,
    JobSummary,
    NodeGroup,
    NodeGroups,
    ProblemDocument,
)
from orchestrator.errors import (
    AtollError,
    ConfigurationError,
    Conflict,
    InfrastructureError,
    InternalError,
    InvalidJobSpec,
    NotFound,
    Problem,
    RequestError,
    ServiceUnreachable,
)

Shape = TypeVar("Shape", bound=Answer)


class Client:
    """One service at ``url``. Raises ServiceUnreachable when it does not answer within ``timeout_s``."""

    def __init__(self, url: str, *, timeout_s: float = 30.0, caller: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Atoll-Caller": caller or default_caller()}
        # trust_env off: a proxy of the environment has no business between this machine and itself.
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, headers=headers, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def health(self) -> Health:
        return self._get("/healthz", Health)

    def ready(self) -> Health:
        return self._get("/readyz", Health)

    def node_groups(self) -> list[NodeGroup]:
        return self._get("/v1/node-groups", NodeGroups).node_groups

    def submit(self, document: Mapping[str, Any]) -> Job:
        """Submit a job specification. Raises InvalidJobSpec with every problem."""
        return self._post("/v1/jobs", Job, dict(document))

    def jobs(self) -> list[JobSummary]:
        return self._get("/v1/jobs", Jobs).jobs

    def job(self, job: str) -> Job:
        return self._get(f"/v1/jobs/{quote(job, safe='')}", Job)

    def islands(self, job: str) -> list[Island]:
        return self._get(f"/v1/jobs/{quote(job, safe='')}/islands", Islands).islands

    def kill(self, job: str, island: str, *, restart: bool = True) -> Command:
        return self._post(f"{_island(job, island)}/kill", Command, {"restart": restart})

    def readd(self, job: str, island: str) -> Command:
        return self._post(f"{_island(job, island)}/readd", Command)

    def cancel(self, job: str) -> Command:
        return self._post(f"/v1/jobs/{quote(job, safe='')}/cancel", Command)

    def command(self, job: str, command: str) -> Command:
        return self._get(f"/v1/jobs/{quote(job, safe='')}/commands/{quote(command, safe='')}", Command)

    def commands(self, job: str) -> list[Command]:
        return self._get(f"/v1/jobs/{quote(job, safe='')}/commands", Commands).commands

    def report(self, job: str) -> dict[str, Any]:
        """The finished job's report. Raises Conflict while it is not finished."""
        answer = self._request("GET", f"/v1/jobs/{quote(job, safe='')}/report.json")
        try:
            report: dict[str, Any] = answer.json()
        except ValueError as error:
            raise InternalError(detail=f"The report of {job} is not JSON: {error}.") from error
        return report

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────

    def _get(self, path: str, shape: type[Shape]) -> Shape:
        return self._read(self._request("GET", path), shape)

    def _post(self, path: str, shape: type[Shape], body: dict[str, Any] | None = None) -> Shape:
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        try:
            answer = self._request("POST", path, json=body, headers=headers)
        except ServiceUnreachable as error:
            if isinstance(error.__cause__, httpx.ConnectError):
                raise  # nobody was there to ask twice
            answer = self._request("POST", path, json=body, headers=headers)
        return self._read(answer, shape)

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **options)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ServiceUnreachable(
                detail=f"The service at {self.url} does not answer ({str(error) or type(error).__name__}).",
                remedy="Start it with `atoll up`; jobs that run go on without it. Is --url or --home right?",
            ) from error
        if answer.is_success:
            return answer
        raise error_of(answer)

    def _read(self, answer: httpx.Response, shape: type[Shape]) -> Shape:
        try:
            return shape.model_validate_json(answer.content)
        except ValueError as error:
            remedy = "Is it another program's, or another version's?"
            detail = f"The answer of {self.url} is not understood."
            raise InfrastructureError(detail=detail, remedy=remedy) from error


def error_of(answer: httpx.Response) -> AtollError:
    """The error that the service meant by this answer."""
    try:
        document = ProblemDocument.model_validate_json(answer.content)
    except ValueError:
        detail = (
            f"{answer.request.method} {answer.request.url} was answered {answer.status_code} {answer.reason_phrase}."
        )
        return InfrastructureError(detail=detail, remedy="Is this the address of an atoll service?")
    detail, remedy = document.detail, document.remedy
    problems = tuple(Problem(item.path, item.message, item.remedy) for item in document.problems)
    match document.type.rpartition(":")[2]:
        case "invalid-job-spec":
            return InvalidJobSpec(detail=detail, problems=problems)
        case "configuration":
            return ConfigurationError(detail=detail)
        case "not-found":
            return NotFound(detail=detail, remedy=remedy)
        case "conflict":
            return Conflict(detail=detail, remedy=remedy)
        case "request" | "forbidden":
            lines = "".join(f"\n  - {problem}" for problem in problems)
            return RequestError(detail=detail, remedy=remedy + lines)
        case "internal":
            return InternalError(detail=detail)
    return InfrastructureError(detail=detail, remedy=remedy)


def default_caller() -> str:
    """Who this is, for the record of commands."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "someone"
    return f"{user}@{socket.gethostname()}".encode("ascii", "replace").decode()


def _island(job: str, island: str) -> str:
    return f"/v1/jobs/{quote(job, safe='')}/islands/{quote(island, safe='')}"
