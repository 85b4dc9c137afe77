"""A typed client of the REST API, for the command line and for any program.

    with Client.at() as client:
        job = client.submit(document)
        print(client.wait(job.job).state)

Answers become the models of ``api.schemas``, and problem documents the errors of ``orchestrator.errors``, so that a remote
refusal reads like a local one. Every changing request carries an ``Idempotency-Key`` and is sent again once if the
connection breaks before the answer: the service carries it out at most once.

``error_of`` is the inverse of ``api.http.problems``. It is here because clients need no web framework. An answer that is
not a problem document did not come from an atoll service.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, assert_never
from urllib.parse import quote, urlsplit

import httpx

from api.auth.permissions import Role
from api.chaos.schemas import ChaosRun, ChaosRunList, ChaosRunSummary, ShownPlan, ShownPlans, VerdictDocument
from api.http.eventstream import events_of
from api.installation.binding import AUTHORITIES_VARIABLE, authorities, trusting, untrusted
from api.installation.home import DEFAULT_HOME, TOKEN_VARIABLE, Home

# isort: off
from api.schemas import (
    Advice, Answer, AuditTrail, Checkpoint, Checkpoints, Command, Commands, Diagnosis, Health, Island, Islands, Job,
    JobCheck, Jobs, JobSummary, Log, Logs, Merge, Merges, NewToken, NodeGroup, NodeGroupChange, NodeGroups, ProblemDocument,
    Profile, Restart, RetentionPlan, Specification, TapeRecord, Token, TokenList,
)  # fmt: skip
from orchestrator.errors import (
    AtollError, ConfigurationError, Conflict, Forbidden, InfrastructureError, InternalError, InvalidJobSpec, NotFound,
    PreconditionFailed, Problem, RequestError, ServiceUnreachable, StoreUnavailable, TooManyFailures, Unauthenticated,
)  # fmt: skip

# isort: on
from orchestrator.core import commands
from orchestrator.core.commands import Inject
from orchestrator.core.vocabulary import IslandId, NodeGroupId
from orchestrator.system.marks import BY_UP, supervisor_of

if TYPE_CHECKING:
    from api.run.following import Followed

WAIT_DIGITS_MAX = 9
"""The longest Retry-After that is believed, in digits: the answer may come from some other server."""
Shape = TypeVar("Shape", bound=Answer)
WAIT_EVERY_S, AWAY_MAX_S = 0.5, 60.0


def refuse_unfit_url(url: str) -> None:
    """Raise ConfigurationError for a text that cannot be the address of a service."""
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    raise ConfigurationError(
        detail=f"The service's URL {url!r} is not of the form https://HOST:PORT. Correct --url, or leave it out for the "
        "service of --home."
    )


def command_for(home: Path) -> str:
    """Return the command that starts the service of this home."""
    return "atoll up" if supervisor_of(home) == BY_UP else "atoll serve"


class Client:
    """The service at ``url``. Raises ServiceUnreachable if it does not answer within ``timeout_s``."""

    def __init__(
        self, url: str, *, token: str | None = None, timeout_s: float = 30.0, certificate: Path | None = None
    ) -> None:
        refuse_unfit_url(url)
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        verify = trusting(certificate) if certificate else authorities()
        # trust_env off: a proxy from the environment must not see requests of this machine to itself.
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, headers=headers, verify=verify, trust_env=False)

    @classmethod
    def at(cls, home: Path = DEFAULT_HOME, url: str | None = None, *, timeout_s: float = 30.0) -> Self:
        """Return a client of the service that runs in ``home``, or of the one at ``url``.

        The token is the one in ``ATOLL_TOKEN``, else the one in ``home``, which is sent only to that home's own service.
        Raises ServiceUnreachable if no address is known, or if the home's service has ended: another program may listen
        at its address by then.
        """
        place = Home(home)
        address = place.address() or (place.discovered_address() if url is None else None)
        token = os.environ.get(TOKEN_VARIABLE)
        if url is None and address is None:
            raise ServiceUnreachable(
                detail=f"No service is running in {home}: {home / 'service.json'} does not exist.",
                remedy=f"Start one with `{command_for(home)}`, or name another with --home or --url.",
            )
        if address is None or url not in (None, address.url):
            return cls(str(url), token=token, timeout_s=timeout_s)
        running = place.running()
        if url is None and not running:
            raise ServiceUnreachable(
                detail=f"No service is running in {home}: the one at {address.url} has ended.",
                remedy=f"Start it again with `{command_for(home)}`. Jobs kept running without it.",
            )
        if token is None and running:
            token = place.token()
        return cls(address.url, token=token, timeout_s=timeout_s, certificate=address.certificate)

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

    def cordon(self, node_group: str, node: str | None = None) -> NodeGroupChange:
        """Cordon the node group, or one node of it: no job places anything new there until it is uncordoned."""
        return self._post(f"{_nodes(node_group, node)}/cordon", NodeGroupChange)

    def uncordon(self, node_group: str, node: str | None = None) -> NodeGroupChange:
        return self._post(f"{_nodes(node_group, node)}/uncordon", NodeGroupChange)

    def submit(self, document: Mapping[str, Any], *, priority: int = 0) -> Job:
        """Submit a job specification. The job is queued while there is no room. Raises InvalidJobSpec with every problem."""
        return self._post(f"/v1/jobs?priority={priority}" if priority else "/v1/jobs", Job, dict(document))

    def check(self, document: Mapping[str, Any]) -> JobCheck:
        """Check a job specification as a submission would, and queue nothing. Raises InvalidJobSpec with every problem."""
        return self._post("/v1/jobs/check", JobCheck, dict(document))

    def prioritise(self, job: str, priority: int) -> Job:
        """Change the priority of a queued job. Raises Conflict if it is no longer queued."""
        return self._read(self._request("PATCH", _job(job), json={"priority": priority}), Job)

    def jobs(self, *, state: str | None = None, name: str | None = None, limit: int = 100) -> list[JobSummary]:
        """Return the newest jobs, newest first."""
        return self._get("/v1/jobs", Jobs, {"state": state, "name": name, "limit": limit}).jobs

    def retention(
        self, *, days: float | None = None, failed_days: float | None = None, bytes: int | None = None
    ) -> RetentionPlan:
        """Return what the service would remove of ended jobs now, with these settings or with its own. Removes nothing."""
        return self._get("/v1/retention", RetentionPlan, {"days": days, "failed_days": failed_days, "bytes": bytes})

    def delete(self, job: str) -> None:
        """Remove an ended job with all its files. Raises Conflict if it has not ended."""
        self._request("DELETE", _job(job))

    def job(self, job: str) -> Job:
        return self._get(_job(job), Job)

    def specification(self, job: str) -> Specification:
        """Return the job's specification, with all defaults as they were when it was submitted."""
        return self._get(f"{_job(job)}/spec", Specification)

    def compare(self, jobs: Iterable[str | JobSummary]) -> list[dict[str, Any]]:
        """Return a row for each job: the settings in which they differ, by path, beside loss, tokens and goodput."""
        from api.run.tables import compared

        there = [self.job(job if isinstance(job, str) else job.job) for job in jobs]
        specifications = [self.specification(job.job).specification for job in there]
        return compared([job.model_dump(mode="json") for job in there], specifications)[1] if there else []

    def wait(self, job: str | JobSummary) -> Job:
        """Wait until the job has ended and its report is readable, and return it.

        The tape's last event comes a little earlier. A job that cannot write its report stays `finishing` with the reason.
        Waits for a service or synchroniser that restarts; raises InfrastructureError if that takes over ``AWAY_MAX_S``.
        """
        current, answered_at = self.job(job if isinstance(job, str) else job.job), time.monotonic()
        while not current.state.final:
            time.sleep(WAIT_EVERY_S)
            try:
                current, answered_at = self.job(current.job), time.monotonic()  # `latest` may be another one by now
            except InfrastructureError:
                if time.monotonic() - answered_at > AWAY_MAX_S:
                    raise
        return current

    def islands(self, job: str) -> list[Island]:
        return self._get(f"{_job(job)}/islands", Islands).islands

    def send(self, job: str, command: commands.Command) -> Command:
        """Send a command to a job; ``command`` returns its outcome. The methods below are shortcuts for this one."""
        path, body = _place_of(command)
        return self._post(f"{_job(job)}{path}", Command, body)

    def kill(self, job: str, island: str, *, restart: bool = True) -> Command:
        return self.send(job, commands.Kill(IslandId(island), restart))

    def drain(self, job: str, island: str) -> Command:
        return self.send(job, commands.Drain(IslandId(island)))

    def readd(self, job: str, island: str) -> Command:
        return self.send(job, commands.Readd(IslandId(island)))

    def record_profile(self, job: str, island: str, profile: str, steps: int) -> Profile:
        """Record a trace of the island's next inner steps under this name. A second call returns how far it is."""
        return self._post(_profile(job, island, profile), Profile, {"steps": steps})

    def profile(self, job: str, island: str, profile: str) -> Profile:
        return self._get(_profile(job, island, profile), Profile)

    def cancel_profile(self, job: str, island: str, profile: str) -> Profile:
        return self._read(self._request("DELETE", _profile(job, island, profile)), Profile)

    def download_trace(self, job: str, island: str, profile: str, to: Path) -> None:
        """Write a complete trace as a zip to the file ``to``. Raises Conflict while it is not complete."""
        self._download(f"{_profile(job, island, profile)}/trace", to)

    def scale(self, job: str, node_group: str, count: int) -> Command:
        """Set the number of the job's islands on the node group. Islands that leave are drained."""
        return self.send(job, commands.Scale(NodeGroupId(node_group), count))

    def cancel(self, job: str) -> Command:
        return self.send(job, commands.Cancel())

    def finish(self, job: str) -> Command:
        """End a running job early: islands give their last work, and it completes once that is merged."""
        return self.send(job, commands.Finish())

    def change(self, job: str, **settings: float) -> Command:
        """Change settings of a running job: ``lr`` or ``lr_ratio``, ``quorum``, ``grace``, ``interval``, ``cost``."""
        return self._post(f"{_job(job)}/set", Command, settings)

    def restart(self, job: str) -> Restart:
        """End the process of the job's synchroniser, even one that hangs; a new one continues from its files."""
        return self._post(f"{_job(job)}/restart", Restart)

    def upgrade(self, job: str) -> Command:
        """Have the job's synchroniser go on in the release of the service. Its outcome comes before the restart itself."""
        return self._post(f"{_job(job)}/upgrade", Command)

    def command(self, job: str, command: str) -> Command:
        return self._get(f"{_job(job)}/commands/{_part(command)}", Command)

    def commands(self, job: str) -> list[Command]:
        return self._get(f"{_job(job)}/commands", Commands).commands

    def events(self, job: str, *, after: int = 0, follow: bool = True) -> Iterator[TapeRecord]:
        """Yield the records of the job's tape after number ``after``; with ``follow``, until the job has ended.

        Raises ServiceUnreachable if the stream stops earlier; call again with the number of the last record.
        """
        path, query = f"{_job(job)}/events", {"after": after, "follow": follow}
        try:
            with self._http.stream("GET", path, params=query) as answer:
                if not answer.is_success:
                    answer.read()
                    raise error_of(answer)
                for name, data in events_of(answer.iter_lines()):
                    if name == "record":
                        yield TapeRecord.model_validate(data)
                    elif name == "end":
                        return
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if follow:
            detail = "The service closed the event stream before the job ended."
            raise ServiceUnreachable(detail=detail, remedy="Repeat the request; if the service refuses, it says why.")

    def logs(self, job: str) -> list[Log]:
        return self._get(f"{_job(job)}/logs", Logs).logs

    def log(
        self, job: str, source: str, *, incarnation: int | None = None, tail: int = 200, follow: bool = False
    ) -> Iterator[str]:
        """Yield the log of an island or another process of the job: its last lines, and with ``follow`` new ones.

        Raises ServiceUnreachable if the connection breaks.
        """
        path, query = f"{_job(job)}/logs/{_part(source)}", {"tail": tail, "follow": follow}
        query |= {} if incarnation is None else {"incarnation": incarnation}
        # a process may log nothing for any length of time
        timeout = httpx.Timeout(self._http.timeout.connect, read=None) if follow else self._http.timeout
        try:
            with self._http.stream("GET", path, params=query, timeout=timeout) as answer:
                if not answer.is_success:
                    answer.read()
                    raise error_of(answer)
                yield from answer.iter_text()
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def merges(self, job: str, *, fragment: int | None = None, limit: int = 50, cursor: str | None = None) -> Merges:
        """Return a page of the job's merges, newest first; ``cursor`` is the ``next_cursor`` of the previous page."""
        query = {"fragment": fragment, "limit": limit, "cursor": cursor}
        return self._get(f"{_job(job)}/merges", Merges, query)

    def merge(self, job: str, fragment: int, version: int) -> Merge:
        """Return one merge with its explanation."""
        return self._get(f"{_job(job)}/merges/{fragment}/{version}", Merge)

    def diagnosis(self, job: str) -> Diagnosis:
        """Return the one cause of the job's slowness or death, with the tape's records that show it."""
        return self._get(f"{_job(job)}/diagnosis", Diagnosis)

    def advice(self, job: str) -> Advice:
        """Return what the job's autopilot found in its looks at the tape, the newest first."""
        return self._get(f"{_job(job)}/advice", Advice)

    def report(self, job: str) -> dict[str, Any]:
        """Return the report of an ended job. Raises Conflict if it has not ended."""
        answer = self._request("GET", f"{_job(job)}/report.json")
        try:
            report: dict[str, Any] = answer.json()
        except ValueError as error:
            raise InternalError(detail=f"The report of {job} is not JSON: {error}.") from error
        return report

    def download_parameters(self, job: str, to: Path) -> None:
        """Write the job's current merged parameters to the file ``to``. Raises Conflict while there are none."""
        self._download(f"{_job(job)}/parameters", to)

    def download_tokenizer(self, job: str, to: Path) -> None:
        """Write the job's tokenizer to the file ``to``. Raises NotFound for bytes, Conflict if the file is missing."""
        self._download(f"{_job(job)}/tokenizer", to)

    def download_origin(self, job: str, to: Path) -> None:
        """Write what exports keep of the job's initial checkpoint, JSON, to ``to``. Raises NotFound, or Conflict if lost."""
        self._download(f"{_job(job)}/origin", to)

    def follow(self, job: str, folder: Path, **options: Any) -> Iterator[Followed]:
        """Keep ``folder`` at the job's newest parameters and yield each version (``api.run.following.follow``)."""
        from api.run.following import follow  # brings NumPy

        return follow(lambda: self, job, folder, **options)

    @contextmanager
    def updates(self, job: str, held: Iterable[int] = ()) -> Iterator[Iterator[bytes]]:
        """Open what is newer than the versions held of each fragment; no bytes if nothing is."""
        with self._stream(f"{_job(job)}/updates", {"held": ",".join(map(str, held))}) as answer:
            yield answer.iter_bytes()

    def _download(self, path: str, to: Path) -> None:
        with self._stream(path) as answer, to.open("wb") as file:
            file.writelines(answer.iter_bytes())

    @contextmanager
    def _stream(self, path: str, query: Mapping[str, str] | None = None) -> Iterator[httpx.Response]:
        try:
            with self._http.stream("GET", path, params=query) as answer:
                if not answer.is_success:
                    answer.read()
                    raise error_of(answer)
                yield answer
        except httpx.RemoteProtocolError as error:
            raise InfrastructureError(detail=f"The download was interrupted: {error}.", remedy="Try again.") from error
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    # ── checkpoints ───────────────────────────────────────────────────────────────────────────────────────────────────

    def checkpoints(self, job: str) -> list[Checkpoint]:
        """Return the job's complete checkpoints, oldest first."""
        return self._get(f"{_job(job)}/checkpoints", Checkpoints).checkpoints

    def download_checkpoint(self, job: str, number: int, to: Path) -> None:
        """Write a checkpoint as a tar to the file ``to``. Raises NotFound if it does not exist (any more)."""
        self._download(f"{_job(job)}/checkpoints/{number}", to)

    def take_checkpoint(self, job: str) -> Command:
        """Make a running job take a checkpoint now."""
        return self.send(job, commands.Checkpoint())

    def roll_back(self, job: str, checkpoint: int | None = None) -> Command:
        """Take a running job back to one of its checkpoints, or to the newest."""
        return self.send(job, commands.Rollback(checkpoint or 0))

    # ── chaos ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def inject(
        self,
        job: str,
        kind: str,
        island: str | None,
        duration_s: float = 0.0,
        *,
        bytes_per_second: float = 0.0,
        payloads: int = 0,
        host: int | None = None,
    ) -> Command:
        """Inject a fault into an island (or none: kill_synchroniser), or ``continue`` a stopped one early."""
        whom = IslandId(island) if island is not None else None
        return self.send(job, Inject(kind, whom, duration_s, bytes_per_second, payloads, host))

    def chaos_plans(self) -> list[ShownPlan]:
        """Return the plans that come with the service."""
        return self._get("/v1/chaos/plans", ShownPlans).plans

    def start_chaos(
        self,
        job: str,
        plan: str | Mapping[str, Any],
        reference: str | Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> ChaosRun:
        """Run a plan, as data or as YAML text, against a job; ``reference`` is for objectives of ``loss_gap``.

        A repeated ``key`` returns the run that it started. Raises InvalidJobSpec with every problem of the plan, Conflict
        while another plan runs against the job.
        """
        return self._post(_runs(job), ChaosRun, {"plan": plan, "reference": reference}, key)

    def start_shipped_chaos(self, job: str, name: str) -> ChaosRun:
        """Run a plan that comes with the service."""
        return self._post(_runs(job), ChaosRun, {"shipped": name})

    def chaos_runs(self, job: str) -> list[ChaosRunSummary]:
        """Return all runs of plans against a job, newest first."""
        return self._get(_runs(job), ChaosRunList).runs

    def chaos_run(self, job: str, run: str = "latest") -> ChaosRun:
        return self._get(_run(job, run), ChaosRun)

    def stop_chaos(self, job: str, run: str = "latest") -> ChaosRun:
        """Stop a run: inject no more faults, and let stopped processes continue."""
        return self._post(f"{_run(job, run)}/stop", ChaosRun)

    def chaos_verdict(self, job: str, run: str = "latest") -> VerdictDocument:
        """Return the verdict of a run. Raises Conflict while there is none."""
        return self._get(f"{_run(job, run)}/verdict", VerdictDocument)

    def chaos_report(self, job: str, run: str = "latest") -> str:
        """Return the verdict's page, HTML. Raises Conflict while there is none."""
        return self._request("GET", f"{_run(job, run)}/report").text

    # ── tokens and the audit trail ────────────────────────────────────────────────────────────────────────────────────

    def tokens(self) -> list[Token]:
        """Return all tokens, without their secrets, oldest first."""
        return self._get("/v1/tokens", TokenList).tokens

    def create_token(self, name: str, role: Role, *, expires_in_s: float | None = None) -> NewToken:
        """Create a token; its ``token`` cannot be read again. Raises Conflict if the name was used before."""
        body = {"name": name, "role": role, "expires_in_s": expires_in_s}
        return self._post("/v1/tokens", NewToken, body)

    def revoke_token(self, name: str) -> Token:
        """Revoke a token. Raises NotFound if there is none of that name."""
        return self._post(f"/v1/tokens/{_part(name)}/revoke", Token)

    def audit(self, *, limit: int = 100, cursor: str | None = None) -> AuditTrail:
        """Return a page of changing requests, newest first; ``cursor`` is the ``next_cursor`` of the previous page."""
        return self._get("/v1/audit", AuditTrail, {"limit": limit, "cursor": cursor})

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────

    def _get(self, path: str, shape: type[Shape], query: Mapping[str, Any] | None = None) -> Shape:
        parameters = {name: value for name, value in (query or {}).items() if value is not None}
        return self._read(self._request("GET", path, params=parameters), shape)

    def _post(self, path: str, shape: type[Shape], body: dict[str, Any] | None = None, key: str | None = None) -> Shape:
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}
        try:
            answer = self._request("POST", path, json=body, headers=headers)
        except ServiceUnreachable as error:
            if isinstance(error.__cause__, httpx.ConnectError):
                raise  # nothing was sent
            answer = self._request("POST", path, json=body, headers=headers)
        return self._read(answer, shape)

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **options)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        if answer.is_success:
            return answer
        raise error_of(answer)

    def _unreachable(self, error: Exception) -> ServiceUnreachable:
        if (refusal := untrusted(error)) is not None:
            return ServiceUnreachable(
                detail=f"The service at {self.url} has a certificate that is not trusted here ({refusal.verify_message}).",
                remedy=f"Set {AUTHORITIES_VARIABLE} to its fleet's ca.crt, use a name of its certificate, or renew it.",
            )
        return ServiceUnreachable(
            detail=f"The service at {self.url} does not answer ({str(error) or type(error).__name__}).",
            remedy="Start it (`atoll up` or `atoll serve`), or correct --url or --home. Jobs continue without it.",
        )

    def _read(self, answer: httpx.Response, shape: type[Shape]) -> Shape:
        try:
            return shape.model_validate_json(answer.content)
        except ValueError as error:
            remedy = "Check that it is an atoll service of the same version."
            raise InfrastructureError(detail=f"The answer of {self.url} is not valid.", remedy=remedy) from error


def _place_of(command: commands.Command) -> tuple[str, dict[str, Any] | None]:
    """Return the path below the job that the command is posted to, and the body."""
    match command:
        case commands.Kill(island, restart):
            return f"/islands/{_part(island)}/kill", {"restart": restart}
        case commands.Drain(island) | commands.Readd(island):
            return f"/islands/{_part(island)}/{commands.kind_of(command)}", None
        case commands.Scale(node_group, count):
            return "/scale", {"node_group": node_group, "count": count}
        case commands.Checkpoint():
            return "/checkpoints", None
        case commands.Rollback(checkpoint):
            return "/rollback", {"checkpoint": checkpoint} if checkpoint else None
        case commands.Upgrade() | commands.Cancel() | commands.Finish():
            return f"/{commands.kind_of(command)}", None
        case commands.Set(ratio, quorum, grace, interval, cost, _):
            return "/set", {"lr_ratio": ratio, "quorum": quorum, "grace": grace, "interval": interval, "cost": cost}
        case commands.Pause() | commands.Continue():
            raise ConfigurationError(detail="A job is paused at its limit of cost. Set budget.at_cost and cost.")
        case commands.Inject(fault, island, duration, bytes_per_second, payloads, host):
            parts = {"duration_s": duration, "bytes_per_second": bytes_per_second, "payloads": payloads}
            more = {name: value for name, value in {"island": island, **parts}.items() if value}
            return "/chaos/faults", {"kind": fault, **more, **({} if host is None else {"host": host})}
        case commands.Cordon() | commands.Uncordon():
            raise ConfigurationError(detail="A node group is cordoned for all jobs. Use cordon and uncordon.")
        case _:
            assert_never(command)


def _nodes(node_group: str, node: str | None) -> str:
    return "/v1/node-groups/" + "/nodes/".join(_part(name) for name in (node_group, node) if name is not None)


def _job(job: str) -> str:
    return f"/v1/jobs/{_part(job)}"


def _part(name: str) -> str:
    """Return the name as one part of a path. Raises NotFound if a path cannot have it: it would lead elsewhere."""
    if name in ("", ".", "..") or "/" in name:
        raise NotFound(detail=f"{name!r} is not a name.", remedy="Names are not empty, and have no '/' nor dots alone.")
    return quote(name, safe="")


def _profile(job: str, island: str, profile: str) -> str:
    return f"{_job(job)}/islands/{_part(island)}/profiles/{_part(profile)}"


def _runs(job: str) -> str:
    return f"{_job(job)}/chaos/runs"


def _run(job: str, run: str) -> str:
    return f"{_runs(job)}/{_part(run)}"


Refusal = RequestError | StoreUnavailable
_ERRORS: dict[str, type[Refusal]] = {"not-found": NotFound, "conflict": Conflict, "store": StoreUnavailable}
_ERRORS |= {"forbidden": Forbidden, "precondition-failed": PreconditionFailed, "unauthenticated": Unauthenticated}


def error_of(answer: httpx.Response) -> AtollError:
    """Return the error that this answer reports."""
    try:
        document = ProblemDocument.model_validate_json(answer.content)
    except ValueError:
        detail = f"{answer.request.method} {answer.url} was answered {answer.status_code} {answer.reason_phrase}."
        return InfrastructureError(detail=detail, remedy="Is this the address of an atoll service?")
    detail, remedy = document.detail, document.remedy
    problems = tuple(Problem(item.path, item.message, item.remedy) for item in document.problems)
    if (kind := document.type.rpartition(":")[2]) in _ERRORS:
        return _ERRORS[kind](detail=detail, remedy=remedy)
    match kind:
        case "invalid-job-spec":
            return InvalidJobSpec(detail=detail, problems=problems)
        case "configuration":
            return ConfigurationError(detail=detail)
        case "too-many-failures":
            seconds = answer.headers.get("Retry-After", "")
            is_count = seconds.isascii() and seconds.isdecimal() and len(seconds) <= WAIT_DIGITS_MAX
            return TooManyFailures(detail=detail, remedy=remedy, retry_after_s=int(seconds) if is_count else 0)
        case "request":
            return RequestError(detail=detail, remedy=remedy + "".join(f"\n  - {problem}" for problem in problems))
        case "internal":
            return InternalError(detail=detail)
    return InfrastructureError(detail=detail, remedy=remedy)
