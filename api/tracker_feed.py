"""Feed trackers with jobs, each thing once: the file that names trackers, and the follower of tapes.

    trackers:
      - {kind: tensorboard, folder: /srv/tensorboard}
      - {kind: mlflow, url: http://mlflow.example:5000, experiment: atoll}
      - {kind: wandb, project: atoll, mode: offline, folder: /srv/wandb}
      - {kind: opentelemetry, endpoint: http://collector.example:4318/v1/traces}
      - {kind: webhook, url: https://example.com/hook, secret_env: HOOK_SECRET, events: [job_ended]}
      - {kind: slack, url_env: SLACK_WEBHOOK_URL}

    tape ──▶ Story.read ──▶ Batch(rows, spans, notices) ──▶ Sink.deliver ──▶ the cursor, durable

The follower stores its cursor after the sink has what came before. A process that is killed in between sends the same again,
and the sink recognises it (``api.trackers``). A tracker that is down is tried again, with longer and longer pauses, and then
gets everything that it missed. Training never notices: the follower reads the tape through the service, as ``atoll events``
does. Each tracker has a thread of its own, so that one that does not answer holds up no other.

Secrets come from the environment: ``secret_env`` and ``url_env`` name variables. No secret is in the file or in a cursor.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal, assert_never

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from api.client import Client
from api.schemas import TapeRecord
from api.trackers import MlflowSink, SlackSink, TensorBoardSink, TraceSink, WandbSink, WebhookSink
from api.tracking import Batch, Mark, NoticeKind, Run, Sink, Story, TrackerUnavailable
from orchestrator.errors import (
    AtollError,
    ConfigurationError,
    Conflict,
    DataError,
    NotFound,
    ServiceUnreachable,
    first_line,
)
from orchestrator.specification.bounds import Name
from orchestrator.specification.documents import read_document
from orchestrator.specification.validation import problems_of
from orchestrator.system.disk import LocalDisk
from orchestrator.system.plain import has_secret

logger = logging.getLogger(__name__)

EVERY_S = 5.0
TRACKERS_MAX = 32
RECORDS_MAX = 2000
"""The most records of one delivery."""
JOBS_MAX = 1000
RETRY_MIN_S, RETRY_MAX_S = 1.0, 120.0
JOIN_EVERY_S, STOP_TIMEOUT_S = 0.2, 30.0
DEFAULT_NOTICES: tuple[NoticeKind, ...] = (
    "job_started",
    "job_ended",
    "island_quarantined",
    "checkpoint_failed",
    "synchroniser_restarted",
    "job_salvaged",
)
INSTALL = "Install it with `pip install 'atoll[trackers]'`."

# ── the file ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _web_address(url: str) -> str:
    if has_secret(url):
        raise ValueError("contains a password or a key; leave it out, and put it into the environment")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r:.80} is no URL; begin it with http:// or https://")
    return url


class _Tracker(BaseModel):
    """``name`` tells trackers of one kind apart, ``jobs`` is a pattern of jobs' names, as ``sweep-*``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Name = ""
    jobs: str = Field(default="*", min_length=1, max_length=200)
    every_s: float = Field(default=EVERY_S, ge=0, le=86400, description="least time between two rows of a series")

    @property
    def label(self) -> str:
        return self.name or str(getattr(self, "kind", ""))

    @property
    def place(self) -> str:
        """Return what the tracker's cursors belong to: another address begins anew."""
        parts = self.model_dump(mode="json", exclude={"jobs", "every_s", "events", "name"})
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=6).hexdigest()


class TensorBoard(_Tracker):
    kind: Literal["tensorboard"]
    folder: Path


class Mlflow(_Tracker):
    kind: Literal["mlflow"]
    url: str = Field(min_length=1, max_length=2000)
    experiment: str = Field(default="atoll", min_length=1, max_length=200)

    @field_validator("url")
    @classmethod
    def _without_secret(cls, url: str) -> str:
        if has_secret(url):
            raise ValueError("contains a password; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
        return url


class Wandb(_Tracker):
    kind: Literal["wandb"]
    project: str = Field(default="atoll", min_length=1, max_length=128)
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"
    folder: Path = Path("wandb")


class OpenTelemetry(_Tracker):
    kind: Literal["opentelemetry"]
    endpoint: str = Field(min_length=1, max_length=2000)

    _check = field_validator("endpoint")(_web_address)


class Webhook(_Tracker):
    kind: Literal["webhook"]
    url: str = Field(min_length=1, max_length=2000)
    secret_env: str = Field(min_length=1, max_length=200)
    events: tuple[NoticeKind, ...] = DEFAULT_NOTICES

    _check = field_validator("url")(_web_address)


class Slack(_Tracker):
    kind: Literal["slack"]
    url_env: str = Field(default="SLACK_WEBHOOK_URL", min_length=1, max_length=200)
    events: tuple[NoticeKind, ...] = DEFAULT_NOTICES


Tracker = TensorBoard | Mlflow | Wandb | OpenTelemetry | Webhook | Slack
_KINDS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": Mlflow,
    "wandb": Wandb,
    "opentelemetry": OpenTelemetry,
    "webhook": Webhook,
    "slack": Slack,
}


def read_trackers(path: Path) -> tuple[Tracker, ...]:
    """Return the trackers that a file names. Raises ConfigurationError with every problem at once."""
    entries: Any = read_document(path).get("trackers")
    if not isinstance(entries, list) or not 0 < len(entries) <= TRACKERS_MAX:
        raise ConfigurationError(
            detail=f"{path} needs a list of 1 to {TRACKERS_MAX} under 'trackers', each with a kind: {', '.join(_KINDS)}."
        )
    trackers: list[Tracker] = []
    problems: list[str] = []
    for index, entry in enumerate(entries):
        under = f"trackers.{index}"
        kind = _KINDS.get(str(entry.get("kind"))) if isinstance(entry, Mapping) else None
        if kind is None:
            value = entry.get("kind") if isinstance(entry, Mapping) else entry
            problems.append(f"{under}.kind: {value!r:.80} is not a kind of tracker. Give one of {', '.join(_KINDS)}.")
            continue
        try:
            trackers.append(kind.model_validate(entry))
        except ValidationError as error:
            problems += map(str, problems_of(error, unknown="Remove it.", under=under, model=kind))
    labels = Counter(tracker.label for tracker in trackers)
    problems += [
        f"trackers: {label!r} is given {count} times. Give each a name."
        for label, count in sorted(labels.items())
        if count > 1
    ]
    if problems:
        raise ConfigurationError(detail=f"{path} cannot be used:\n" + "\n".join(f"  - {p}" for p in problems))
    return tuple(trackers)


def followers_of(
    trackers: Sequence[Tracker],
    connect: Callable[[], Client],
    folder: Path,
    say: Callable[[str], None],
    jobs: Sequence[str] | None = None,
) -> list[Follower]:
    """Return a follower for each tracker, with its cursors in ``folder``. Raises as ``sink_of`` does."""
    return [
        Follower(
            tracker.label,
            sink_of(tracker),
            connect(),
            folder / f"{tracker.label}-{tracker.place}",
            tracker.every_s,
            say,
            jobs,
            tracker.jobs,
        )
        for tracker in trackers
    ]


def sink_of(tracker: Tracker) -> Sink:
    """Return the sink of a tracker. Raises ConfigurationError if its package or a variable is missing."""
    match tracker:
        case TensorBoard():
            _required("tensorboardX", tracker)
            return TensorBoardSink(tracker.folder)
        case Mlflow():
            _required("mlflow", tracker)
            return MlflowSink(tracker.url, tracker.experiment)
        case Wandb():
            _required("wandb", tracker)
            return WandbSink(tracker.folder, tracker.mode, tracker.project, tracker.entity)
        case OpenTelemetry():
            _required("opentelemetry.proto", tracker)
            return TraceSink(tracker.endpoint)
        case Webhook():
            return WebhookSink(tracker.url, _variable(tracker.secret_env, tracker), frozenset(tracker.events))
        case Slack():
            url = _variable(tracker.url_env, tracker)
            if not url.startswith(("http://", "https://")):
                raise ConfigurationError(detail=f"The variable {tracker.url_env} is no URL. Set it to Slack's URL.")
            return SlackSink(url, frozenset(tracker.events))
        case _:
            assert_never(tracker)


def _required(module: str, tracker: Tracker) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigurationError(
            detail=f"The tracker {tracker.label} needs the package {package}, which is missing. {INSTALL}"
        ) from error


def _variable(name: str, tracker: Tracker) -> str:
    if value := os.environ.get(name):
        return value
    raise ConfigurationError(
        detail=f"The tracker {tracker.label} needs a secret in the variable {name}, which is not set. Set it."
    )


# ── the follower ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Cursor(BaseModel):
    """The file that says how far a tracker has got with a job. ``delivered``: the job ended, and nothing is left to send."""

    story: Story
    mark: Mark = {}
    delivered: bool = False


@dataclass(slots=True)
class Following:
    """A job that is being followed: the newest story, and whether its next batch may repeat something."""

    run: Run
    story: Story
    mark: Mark
    in_doubt: bool


class Follower:
    """Sends jobs to one tracker. ``folder`` holds its cursors; a lock in it keeps a second process out.

    ``jobs`` are the jobs to follow, or None for all whose names match ``pattern``.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        client: Client,
        folder: Path,
        every_s: float,
        say: Callable[[str], None],
        jobs: Sequence[str] | None = None,
        pattern: str = "*",
    ) -> None:
        self.name, self._sink, self._client, self._folder = name, sink, client, folder
        self._say = say
        self._every_s, self._jobs, self._pattern = every_s, jobs, pattern
        self._following: dict[str, Following] = {}
        self._delivered: set[str] = set()
        self._disk = LocalDisk()
        self.trouble = ""
        """What the tracker refuses, or is waited for; empty while it works."""

    def close(self) -> None:
        self._sink.close()
        self._client.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from feeding this tracker meanwhile. Raises Conflict if one does."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise Conflict(
                    detail=f"Another process feeds the tracker {self.name} from {self._folder}.",
                    remedy="Stop it first, or give this one a folder of its own with --state.",
                ) from error
            yield

    def run(self, stop: Event, poll_s: float, *, once: bool = False) -> None:
        """Send what is new, turn after turn, until ``stop`` is set or the jobs that were named have ended."""
        wait_s = RETRY_MIN_S
        while not stop.is_set():
            try:
                is_over = self.turn(stop)
            except AtollError as error:
                self._note(first_line(error))
            except Exception as error:  # a client library of a tracker may raise anything
                logger.debug("tracker %s", self.name, exc_info=error)
                self._note(f"{type(error).__name__}: {first_line(error)}.")
            else:
                self._note("")
                wait_s = RETRY_MIN_S
                if once or (is_over and self._jobs is not None):
                    return
                stop.wait(poll_s)
                continue
            if once:
                return
            stop.wait(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)

    def turn(self, stop: Event | None = None) -> bool:
        """Send what is new. Return whether all jobs have ended and the tracker has everything.

        Raises InfrastructureError if the service or the tracker does not answer, and NotFound if a job that was named does
        not exist.
        """
        is_over, problem = True, None
        for job in self._named():
            if job in self._delivered:
                continue
            try:
                is_over &= self._follow(job, stop)
            except (TrackerUnavailable, ServiceUnreachable):
                raise
            except AtollError as error:  # of this job: it holds up no other
                problem = problem or error
        if problem is not None:
            raise problem
        return is_over

    def _named(self) -> list[str]:
        if self._jobs is not None:
            return list(self._jobs)
        jobs = self._client.jobs(limit=JOBS_MAX)
        return [job.job for job in reversed(jobs) if fnmatchcase(job.name, self._pattern)]

    def _follow(self, job: str, stop: Event | None) -> bool:
        """Send what is new of this job. Return whether that was the last of it."""
        if job not in self._following:
            try:
                run = run_of(self._client, job)
            except NotFound:
                if self._jobs is not None:
                    raise
                return True  # it was deleted meanwhile
            if run is None:
                return False  # it has not started
            cursor = self._load(run)
            if cursor.delivered:
                self._delivered.add(job)
                return True
            self._following[job] = Following(run, cursor.story, cursor.mark, in_doubt=True)
        following = self._following[job]
        try:
            while stop is None or not stop.is_set():
                story, batch, count = self._next(following)
                if count == 0:
                    return self._is_over(following)
                if not self._deliver(following, story, batch):
                    continue
        except BaseException:
            del self._following[job]  # begin again at the cursor
            raise
        return False

    def _next(self, following: Following) -> tuple[Story, Batch, int]:
        """Read up to RECORDS_MAX records. Return the story with them, what came of them, and how many there were.

        The last record is read again, to notice that another tape has taken the place of the one that it was on.
        """
        story, batch, count = following.story.model_copy(deep=True), Batch(), 0
        for record in self._records(following.run.job, story):
            part = story.read(record.n, record.event, record.effects, self._every_s)
            batch.rows += part.rows
            batch.spans += part.spans
            batch.notices += part.notices
            batch.outcome = part.outcome or batch.outcome
            count += 1
            if count == RECORDS_MAX:
                break
        return story, batch, count

    def _records(self, job: str, story: Story) -> Iterator[TapeRecord]:
        """Yield the records behind the story's last one; on another tape, all of them, and the story begins again there."""
        records = self._client.events(job, after=max(0, story.n - 1), follow=False)
        if story.n:
            last = next(records, None)
            if last is None:  # the tape is being replaced, or not written yet
                return
            if (last.n, float(last.event.get("at", story.at))) != (story.n, story.at):
                story.begin_again()
                records = self._client.events(job, after=0, follow=False)
        yield from records

    def _deliver(self, following: Following, story: Story, batch: Batch) -> bool:
        mark = self._sink.deliver(following.run, batch, dict(following.mark), following.in_doubt)
        following.story = story
        if mark is None:
            return False
        following.mark, following.in_doubt = mark, False
        self._store(following, delivered=False)
        return True

    def _is_over(self, following: Following) -> bool:
        """Return whether nothing more will come of a job whose tape has nothing new, and note that in the cursor."""
        job = following.run.job
        if not following.story.outcome:
            state = self._client.job(job).state
            if not state.final or self._next(following)[2]:
                return False
            # it left no last record; its state says how it ended
            following.mark = self._sink.deliver(following.run, Batch(outcome=str(state)), following.mark, True) or {}
        self._store(following, delivered=True)
        self._delivered.add(job)
        del self._following[job]
        return True

    # ── the cursor ────────────────────────────────────────────────────────────────────────────────────────────────

    def _path(self, job: str) -> Path:
        return self._folder / f"{job}.json"

    def _load(self, run: Run) -> Cursor:
        try:
            return Cursor.model_validate_json(self._disk.read(self._path(run.job)))
        except FileNotFoundError:
            return Cursor(story=Story())
        except (OSError, ValidationError) as error:
            raise DataError(
                detail=f"{self._path(run.job)} cannot be read: {first_line(error)}. Remove it to send the job anew."
            ) from error

    def _store(self, following: Following, *, delivered: bool) -> None:
        cursor = Cursor(story=following.story, mark=following.mark, delivered=delivered)
        self._disk.replace(self._path(following.run.job), cursor.model_dump_json().encode())

    def _note(self, trouble: str) -> None:
        """Say what the trouble is when it changes, and when it ends."""
        if trouble and trouble != self.trouble:
            self._say(f"tracker {self.name}: {trouble} It is tried again, and nothing is lost.")
        elif self.trouble and not trouble:
            self._say(f"tracker {self.name}: works again")
        self.trouble = trouble


def follow_all(followers: Sequence[Follower], poll_s: float, *, once: bool) -> list[str]:
    """Feed all trackers, each in a thread of its own, until the jobs that were named have ended; with ``once``, one turn.

    Return what is wrong with trackers that did not get everything. KeyboardInterrupt passes.
    """
    stop = Event()

    def feed(follower: Follower) -> None:
        try:
            follower.run(stop, poll_s, once=once)
        finally:
            follower.close()

    with ExitStack() as locks:
        for follower in followers:
            locks.enter_context(follower.locked())
        threads = [Thread(target=feed, args=[follower], daemon=True) for follower in followers]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                stop.wait(JOIN_EVERY_S)
        finally:
            stop.set()
            for thread in threads:
                thread.join(STOP_TIMEOUT_S)
    return [f"tracker {follower.name}: {follower.trouble}" for follower in followers if follower.trouble]


def run_of(client: Client, job: str) -> Run | None:
    """Return the facts of a job; None if it has not started. Raises NotFound."""
    details = client.job(job)
    if details.started_at is None:
        return None
    specification = client.specification(job).specification
    return Run(details.job, details.name, details.caller, details.started_at, specification, details.resumed_from or "")
