"""Ask a cloud's metadata server whether this machine will be taken away: spot machines get 30 to 120 seconds notice.

    gce            GET /computeMetadata/v1/instance/preempted, answered when it changes (``wait_for_change``)
    aws            PUT /latest/api/token, then GET /latest/meta-data/spot/instance-action: 404 until there is one
    aws-rebalance  the same, and GET …/events/recommendations/rebalance: earlier advice, which may not come true
    azure          GET /metadata/scheduledevents: events of this machine, among others of its set

Asks as the clouds document it, and turns an answer into a ``Notice``. Answers are not trusted: their size and duration are
limited, redirections and proxies are not followed, times are bounded, and their text is only compared, never passed on. Only
a link-local address is asked, or this machine's loopback, where tests have their server.

Sources: cloud.google.com/compute/docs/instances/create-use-spot; docs.aws.amazon.com, "Spot Instance interruption notices"
and "EC2 instance rebalance recommendations"; learn.microsoft.com, "Azure Metadata Service: Scheduled Events".
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlsplit

from orchestrator.errors import ConfigurationError

SOURCES_VARIABLE, URL_VARIABLE = "ATOLL_NOTICES", "ATOLL_METADATA_URL"
"""The sources to ask: a comma-separated list, ``auto`` for the cloud that answers, or ``off`` (default). And the address."""
OFF, AUTO = "off", "auto"
GCE, AWS, AWS_REBALANCE, AZURE = "gce", "aws", "aws-rebalance", "azure"
SOURCES = (GCE, AWS, AWS_REBALANCE, AZURE)
DEFAULT_URL = "http://169.254.169.254"
"""A link-local address, the same for all three clouds, reachable only from the machine itself."""
ANSWER_BYTES_MAX = 64 << 10
ANSWER_S = 5.0
CHANGE_S = 60
"""How long GCE holds a request that waits for a change."""
POLL_S = 2.0
NOBODY_S = (5.0, 300.0)
"""The pause between two requests while no cloud answers: the first, and the longest."""
NOTICE_S = {GCE: 30.0, AWS: 120.0, AWS_REBALANCE: 120.0, AZURE: 30.0}
"""The notice that each cloud promises at least. Rebalancing names no time, so the shortest is assumed."""
NOTICE_MAX_S = 86_400.0
AZURE_ENDS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
"""Not Freeze, after which the machine continues."""


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine is taken away at ``deadline`` (seconds since 1970). ``cause`` contains no text of the answer."""

    cause: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Unanswered(Exception):
    """There is no answer, or it is not that of a metadata server."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The sources to ask, in order, and the address of the server."""

    sources: tuple[str, ...] = ()
    host: str = ""
    port: int = 80


def settings(environment: Mapping[str, str]) -> Settings:
    """Return the settings in the two variables. Raises ConfigurationError with the variable, its value and the choices."""
    words = [word.strip() for word in environment.get(SOURCES_VARIABLE, OFF).split(",") if word.strip()] or [OFF]
    if words == [OFF]:
        return Settings()
    unknown = [word for word in words if word not in SOURCES and words != [AUTO]]
    if unknown:
        raise ConfigurationError(
            detail=f"{SOURCES_VARIABLE} is {','.join(words)!r}, but {unknown[0]!r} is not a source of notices. Set it to "
            f"{OFF}, {AUTO}, or a comma-separated list of {', '.join(SOURCES)}."
        )
    host, port = address(environment.get(URL_VARIABLE, DEFAULT_URL))
    return Settings((AUTO,) if words == [AUTO] else tuple(dict.fromkeys(words)), host, port)


def address(url: str) -> tuple[str, int]:
    """Return host and port of a metadata server's URL. Raises ConfigurationError unless it is link-local or loopback."""
    try:
        parts = urlsplit(url)
        host = ipaddress.ip_address(parts.hostname or "")
        near = (host.is_link_local or host.is_loopback) and parts.scheme == "http"
        whole = parts.path.strip("/") == parts.query == parts.fragment == "" and parts.username is None
        port = parts.port or 80
    except ValueError:
        near = whole = False
    if not (near and whole):
        raise ConfigurationError(
            detail=f"{URL_VARIABLE} is {url!r}, which is not a link-local or loopback address. Set it to one such as "
            f"{DEFAULT_URL}, or to http://127.0.0.1:PORT for a server of your own."
        )
    return str(host), port


@dataclass(slots=True)
class Metadata:
    """The metadata server at this address. ``ask`` raises Unanswered."""

    host: str
    port: int
    token: str = ""
    token_until: float = 0.0

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET", limit_s: float = ANSWER_S) -> Answer:
        """Return one answer. Limits its size, and its whole duration to ``limit_s``, however slowly it arrives."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=min(limit_s, ANSWER_S))
        watchdog: threading.Timer | None = None
        late = threading.Event()
        try:
            connection.connect()
            connection.sock.settimeout(limit_s)
            # pass the socket, because the connection may drop its reference
            watchdog = threading.Timer(limit_s, _hang_up, [connection.sock, late])
            watchdog.daemon = True
            watchdog.start()
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            body = response.read(ANSWER_BYTES_MAX + 1)
            if len(body) > ANSWER_BYTES_MAX:
                raise Unanswered(f"{path} is answered with more than {ANSWER_BYTES_MAX} bytes")
            if late.is_set():  # a truncated answer may look like a complete one
                raise Unanswered(f"{path} is not answered within {limit_s:g} s")
            fields = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, fields, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unanswered(f"{path}: {type(error).__name__}") from error
        finally:
            if watchdog is not None:
                watchdog.cancel()
            connection.close()


def watch(wanted: Settings, announce: Callable[[Notice], None], pause: Callable[[float], Any] = time.sleep) -> None:
    """Ask the sources until the first notice, pass it to ``announce``, and return.

    If nothing answers, that is not a notice; ask again.
    """
    if not wanted.sources:
        return
    announced, announcing = threading.Event(), threading.Lock()

    def follow(source: str) -> None:
        metadata = Metadata(wanted.host, wanted.port)
        for notice in _asked(source, metadata, pause, announced.is_set):
            with announcing:
                if not announced.is_set():
                    announce(notice)
                    announced.set()
            return

    threads = [
        threading.Thread(target=follow, args=(source,), name=f"notices-{source}", daemon=True)
        for source in wanted.sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def cloud_of(metadata: Metadata) -> str | None:
    """Return the cloud whose metadata server answers, or None."""
    with suppress(Unanswered):
        if metadata.ask("/computeMetadata/v1/instance/id", GCE_HEADERS).headers.get("metadata-flavor") == "Google":
            return GCE
    with suppress(Unanswered):
        if _aws_token(metadata):
            return AWS
    with suppress(Unanswered):
        if _azure_name(metadata):
            return AZURE
    return None


def _asked(
    source: str, metadata: Metadata, pause: Callable[[float], Any], is_over: Callable[[], bool]
) -> Iterator[Notice]:
    wait_s = NOBODY_S[0]
    while not is_over() and source == AUTO:
        if (cloud := cloud_of(metadata)) is not None:
            source = cloud
            break
        pause(wait_s)
        wait_s = min(2 * wait_s, NOBODY_S[1])
    question, wait_s = QUESTIONS[source](metadata), POLL_S
    while not is_over():
        try:
            if (notice := question()) is not None:
                yield notice
            wait_s = POLL_S
        except Unanswered:
            wait_s = min(2 * wait_s, NOBODY_S[1])
        pause(wait_s)


# ── Google ────────────────────────────────────────────────────────────────────────────────────────────────────────

GCE_HEADERS = {"Metadata-Flavor": "Google"}
GCE_PREEMPTED = "/computeMetadata/v1/instance/preempted"


@dataclass(slots=True)
class GceQuestion:
    """Asks Google. The first answer is the current state and its tag; later requests are held until it changes."""

    metadata: Metadata
    etag: str = ""

    def __call__(self) -> Notice | None:
        path = GCE_PREEMPTED
        if self.etag:
            path += f"?wait_for_change=true&timeout_sec={CHANGE_S}&last_etag={quote(self.etag, safe='')}"
        answer = self.metadata.ask(path, GCE_HEADERS, limit_s=(CHANGE_S if self.etag else 0) + ANSWER_S)
        if answer.status != http.client.OK or answer.headers.get("metadata-flavor") != "Google":
            self.etag = ""
            raise Unanswered("not as Google's server")
        self.etag = answer.headers.get("etag", "")[:64]
        if answer.body.strip() != b"TRUE":
            return None
        return Notice("Google reclaims the spot machine", time.time() + NOTICE_S[GCE])


# ── Amazon ────────────────────────────────────────────────────────────────────────────────────────────────────────

AWS_TOKEN_S = 21_600
AWS_ACTIONS = {"terminate": "ends", "stop": "stops", "hibernate": "hibernates"}


@dataclass(slots=True)
class AwsQuestion:
    metadata: Metadata
    path: str = "/latest/meta-data/spot/instance-action"
    read: Callable[[Mapping[str, Any]], Notice | None] = field(default=lambda document: _aws_action(document))

    def __call__(self) -> Notice | None:
        answer = self.metadata.ask(self.path, {"X-aws-ec2-metadata-token": _aws_token(self.metadata)})
        if answer.status == http.client.NOT_FOUND:
            return None
        if answer.status != http.client.OK:
            self.metadata.token = ""
            raise Unanswered("not as Amazon's server")
        return self.read(_document(answer))


def _aws_token(metadata: Metadata) -> str:
    if not metadata.token or time.monotonic() > metadata.token_until:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_S)}
        answer = metadata.ask("/latest/api/token", headers, "PUT")
        text = answer.body.decode("ascii", "replace").strip()
        if answer.status != http.client.OK or not 0 < len(text) <= 1024 or not text.isprintable() or "�" in text:
            raise Unanswered("no token as Amazon's server has them")
        metadata.token, metadata.token_until = text, time.monotonic() + AWS_TOKEN_S / 2
    return metadata.token


def _aws_action(document: Mapping[str, Any]) -> Notice | None:
    """Return the notice; None for an action that this build does not know."""
    action = document.get("action")
    if not isinstance(action, str) or action not in AWS_ACTIONS:
        return None
    return Notice(f"Amazon {AWS_ACTIONS[action]} the spot machine", _bounded(document.get("time"), _iso, NOTICE_S[AWS]))


def _aws_rebalance(document: Mapping[str, Any]) -> Notice | None:
    if not isinstance(document.get("noticeTime"), str):
        return None
    return Notice("Amazon recommends leaving the spot machine", time.time() + NOTICE_S[AWS_REBALANCE])


# ── Microsoft ─────────────────────────────────────────────────────────────────────────────────────────────────────

AZURE_HEADERS = {"Metadata": "true"}
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
AZURE_FIRST_S = 130.0
"""The first request for events enables them, which may take two minutes."""
EVENTS_MAX = 1000


@dataclass(slots=True)
class AzureQuestion:
    """Asks Azure. A machine of a set also sees events of the others; those count whose resources name this machine."""

    metadata: Metadata
    name: str = ""
    limit_s: float = AZURE_FIRST_S

    def __call__(self) -> Notice | None:
        self.name = self.name or _azure_name(self.metadata)
        answer = self.metadata.ask(AZURE_EVENTS, AZURE_HEADERS, limit_s=self.limit_s)
        if answer.status != http.client.OK:
            raise Unanswered("not as Microsoft's server")
        self.limit_s = ANSWER_S
        listed = _document(answer).get("Events")
        deadlines = [
            (_bounded(event.get("NotBefore"), _http_date, NOTICE_S[AZURE]), str(event["EventType"]))
            for event in (listed[:EVENTS_MAX] if isinstance(listed, list) else [])
            if isinstance(event, dict) and event.get("EventType") in AZURE_ENDS and self._is_meant(event)
        ]
        if not deadlines:
            return None
        deadline, kind = min(deadlines)
        return Notice(f"Azure has scheduled {kind} for the machine", deadline)

    def _is_meant(self, event: Mapping[str, Any]) -> bool:
        resources = event.get("Resources")
        return isinstance(resources, list) and self.name in resources


def _azure_name(metadata: Metadata) -> str:
    answer = metadata.ask(AZURE_NAME, AZURE_HEADERS)
    name = answer.body.decode("ascii", "replace").strip()
    if answer.status != http.client.OK or not 0 < len(name) <= 128 or not name.isprintable():
        raise Unanswered("no name as Microsoft's server has them")
    return name


# ── what answers say ──────────────────────────────────────────────────────────────────────────────────────────────

QUESTIONS: Mapping[str, Callable[[Metadata], Callable[[], Notice | None]]] = {
    GCE: GceQuestion,
    AWS: AwsQuestion,
    AWS_REBALANCE: lambda metadata: AwsQuestion(
        metadata, "/latest/meta-data/events/recommendations/rebalance", _aws_rebalance
    ),
    AZURE: AzureQuestion,
}
"""Each is called repeatedly until it returns a notice."""


def _document(answer: Answer) -> Mapping[str, Any]:
    try:
        document = json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise Unanswered("not in JSON") from error
    if not isinstance(document, dict):
        raise Unanswered("not a JSON object")
    return document


def _bounded(text: object, read: Callable[[str], datetime], otherwise_s: float) -> float:
    """The instant that ``text`` names, from now to a day on; ``otherwise_s`` from now where it names none."""
    now = time.time()
    try:
        at = read(text).timestamp() if isinstance(text, str) else now + otherwise_s
    except (ValueError, TypeError, IndexError, OverflowError):
        at = now + otherwise_s
    return min(max(at, now), now + NOTICE_MAX_S)


def _iso(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _http_date(text: str) -> datetime:
    """Empty once the event has begun."""
    if not text:
        return datetime.now(UTC)
    at = parsedate_to_datetime(text)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _hang_up(connected: socket.socket, late: threading.Event) -> None:
    """Whoever reads from it reads its end at once, and finds ``late`` set."""
    late.set()
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
