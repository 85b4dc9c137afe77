"""A control port without a cluster: its jobs live in a simulated world that runs like clockwork (``tests.harness``).

A job is only what it was given: its specification, the time it began, and the commands with theirs, in one file under the
home folder. Asked how it stands, the port works it out up to now: from the instant at which it last looked, and from the
beginning if it never did. So it lives through a SIGKILL of the service as a Ray job does, and it takes no process.
Islands are never late and lose nothing but what they are told to lose. Without that file a job is lost, as with its
cluster; started again over its tape, it goes on as if it had never been away.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zipfile import ZipFile, ZipInfo

import numpy as np

from api.clocks import uptime
from api.jobs.service import NOTHING_MORE
from orchestrator.accounting import report
from orchestrator.core.commands import Command, Cordon
from orchestrator.core.vocabulary import Life
from orchestrator.errors import FilesElsewhere, InfrastructureError, LogStoreUnavailable, NotFound
from orchestrator.host.records import FragmentUpdate, updates, write_parameters, write_updates
from orchestrator.parameters import wire_format
from orchestrator.parameters.tensors import digest, shapes
from orchestrator.specification.config import JobSpec
from orchestrator.specification.memory_budget import NodeMemory
from orchestrator.status import CertificateRecord, NodeGroupRecord, StatusDocument, UnseenFile
from orchestrator.system.logbook import island_logbook, service_logbook
from orchestrator.system.roots import AllowedRoots
from orchestrator.tape import codec
from orchestrator.tape.schema import Digest, Footer, Header, decode_header, encode_footer, encode_header, encode_record
from tests.harness.simulated_job import GROUPS, SimulatedJob, Taken

COURSES_MAX = 64
"""How many jobs are worked out from where they were last looked at. A course has some megabytes a minute."""


def connect(home: Path) -> Clockwork:
    return Clockwork(home / "clockwork")


class Clockwork:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._courses: dict[str, Course] = {}
        """Each is touched under its job's lock only."""

    def node_groups(self) -> list[NodeGroupRecord]:
        """The file ``node-names.json`` has the names of nodes by group, where a test needs some."""
        self._fail_if("cluster-is-gone")
        path = self._folder / "node-names.json"
        names = json.loads(path.read_text()) if path.exists() else {}
        return [NodeGroupRecord(**group | {"node_names": names.get(group["name"], [])}) for group in GROUPS]

    def unseen_files(self, groups: Collection[str], sizes: Mapping[str, int | None]) -> list[UnseenFile]:
        return []

    def begin(self, runs: Path) -> None:
        """Do nothing: there is one machine."""

    def delete_log(self, job_id: str) -> None:
        pass

    def has_store(self) -> bool:
        return (self._folder / "store").exists()

    def has_log(self, job_id: str) -> bool:
        if (self._folder / "log-store-is-down").exists():
            raise LogStoreUnavailable(detail="the store memory cannot be reached.")
        return not (self._folder / "store-was-emptied").exists()

    def sweep(self, runs: Path, is_known: Callable[[str], bool], *, again: bool) -> None:
        """Do nothing: there is one machine."""

    def cordon_nodes(self, names: Collection[str]) -> None:
        """Write the names to ``cordoned-nodes.json``, for tests to read. A full disk there is a head that cannot write."""
        self._fail_if("cluster-is-gone")
        try:
            replace(self._folder / "cordoned-nodes.json", json.dumps(sorted(names)))
        except OSError as error:
            raise InfrastructureError(detail=f"The head did not take the cordons: {error}") from error

    def node_memory(self) -> list[NodeMemory]:
        """As ``memory.json`` in the folder has it; nobody says anything where there is none."""
        path = self._folder / "memory.json"
        return [NodeMemory(**row) for row in json.loads(path.read_text())] if path.exists() else []

    def certificates(self) -> list[CertificateRecord]:
        return []

    def start_job(
        self,
        job_id: str,
        spec: JobSpec,
        run_dir: Path,
        cordoned: Mapping[str, str] = MappingProxyType({}),
        roots: AllowedRoots = NOTHING_MORE,
        last_known: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if (self._folder / "log-store-is-down").exists():
            raise LogStoreUnavailable(detail="the store memory cannot be reached.")
        if (self._folder / "files-are-elsewhere").exists():
            raise FilesElsewhere(detail="The files of the job are elsewhere.")
        if (self._folder / "no-more-jobs").exists():
            raise InfrastructureError(detail="No synchroniser could be placed.", remedy="Free some room.")
        while (self._folder / "starts-are-slow").exists():
            (self._folder / "starting").touch()
            time.sleep(0.02)
        with self._changing(job_id) as record:
            if not record:
                dump, goes_on = spec.model_dump(mode="json"), (run_dir / "tape.jsonl").exists()
                started_at = begun_at(run_dir)
                record |= {"spec": dump, "run_dir": str(run_dir), "started_at": started_at}
                record["created_uptime_s"] = uptime() - (time.time() - started_at)
                leave_logs(run_dir, spec)
                record["commands"] = [
                    {
                        "at": 0.0,
                        "id": f"cordon {group}",
                        "caller": caller,
                        "request": codec.encode_command(Cordon(group)),
                    }
                    for group, caller in cordoned.items()
                    if not goes_on
                ]

    def lose(self, job_id: str) -> None:
        """Nothing of the job runs any more; only its run folder is left."""
        (self._folder / f"{job_id}.json").unlink()
        self._courses.pop(job_id, None)

    def submit(self, job_id: str, command_id: str, caller: str, command: Command) -> None:
        self._fail_if("jobs-are-deaf")
        with self._changing(job_id) as record:
            if not record:
                raise NotFound(detail=f"No job {job_id} runs here.")
            at = uptime() - record["created_uptime_s"]
            if command_id not in [taken["id"] for taken in record["commands"]]:
                request = codec.encode_command(command)
                record["commands"].append({"at": at, "id": command_id, "caller": caller, "request": request})
        self._fail_if("answers-are-lost")

    def status(self, job_id: str) -> StatusDocument:
        self._fail_if("jobs-are-silent")
        with self._changing(job_id) as record:
            if not record:
                raise NotFound(detail=f"No job {job_id} runs here.")
            now = uptime() - record["created_uptime_s"]
            world = self._world(job_id, record, now)
            status = world.status(job_id, record["started_at"], now)
            run_dir, ended = Path(record["run_dir"]), status["view"]["phase"] == "finished"
            header = Header(job_id, world.policy, record["started_at"])
            try:
                write_tape(run_dir / "tape.jsonl", header, world, ended)
                if ended:
                    leave_results(run_dir, job_id, world, status)
                    record.clear()  # like the actors of a real job, it is gone
                    self._courses.pop(job_id, None)
            except OSError as error:  # a real job waits for room, and trains on meanwhile
                trouble = f"the tape cannot be written: {error}"
                status |= {"disk_trouble": trouble, "view": status["view"] | {"pause_reason": trouble}}
                if ended:
                    raise InfrastructureError(detail=f"Job {job_id} cannot end: {error}") from error
        return status

    def restart_job(self, job_id: str) -> str:
        """A synchroniser that hangs (``jobs-are-silent``) answers again."""
        self._fail_if("cluster-is-gone")
        with self._changing(job_id) as record:
            if not record:
                raise NotFound(detail=f"No job {job_id} runs here.")
        (self._folder / "jobs-are-silent").unlink(missing_ok=True)
        with (self._folder / "restarts").open("a") as restarts:
            restarts.write(f"{job_id}\n")
        return "process 1 of its synchroniser was ended; a new one continues from tape and journal"

    def save_parameters(self, job_id: str, held: Sequence[int] | None = None) -> str:
        with self._changing(job_id) as record:
            if not record:
                raise NotFound(detail=f"No job {job_id} runs here.")
            spec = json.dumps(record["spec"])
            arrays = {"embed": np.full((2, 3), 0.5, np.float32)}
            if held is not None:
                update = FragmentUpdate(1, digest(arrays), None, [wire_format.encode(arrays)])
                write_updates(Path(record["run_dir"]) / "picture.updates", updates(job_id, [update]))
                return "picture.updates"
            facts = {"job": job_id, "spec": spec}
            write_parameters(Path(record["run_dir"]), shapes(arrays), [arrays], facts, "picture.safetensors")
        return "picture.safetensors"

    def profile(self, job_id: str, life: Life, profile: str, steps: int | None) -> Mapping[str, Any]:
        """Complete a trace at the second look. A file ``profile-problem`` has what the profiler says instead.

        With a file ``profile-waits``, no trace gets complete. A cancelled one is a file ``profile-cancelled``.
        """
        self._fail_if("cluster-is-gone")
        looks = self._folder / f"{job_id}-{life[0]}-{life[1]}-{profile}"
        if not steps and not looks.exists():
            raise NotFound(detail=f"This process of the island knows no trace {profile!r}.")
        if not looks.exists():
            looks.write_text(str(steps))
            return _profile(profile, int(steps or 0), 0, None)
        problem = self._folder / "profile-problem"
        wanted = int(looks.read_text())
        if steps == 0:
            (self._folder / "profile-cancelled").write_text(profile)
            return _profile(profile, wanted, 1, None, "It was cancelled.")
        if (self._folder / "profile-waits").exists():
            return _profile(profile, wanted, 1, None)
        if problem.exists():
            return _profile(profile, wanted, 1, None, problem.read_text())
        return _profile(profile, wanted, wanted, len(TRACE))

    def read_profile(self, job_id: str, life: Life, profile: str, start: int, stop: int) -> bytes:
        return TRACE[start : min(stop, start + 100)]

    def close(self) -> None:
        pass

    def _world(self, job_id: str, record: dict[str, Any], now: float) -> SimulatedJob:
        """The job up to ``now``."""
        course = self._courses.pop(job_id, None)
        if course is None or not course.leads_to(record):
            taken = [Taken.of(command) for command in record["commands"]]
            course = Course(record, now, SimulatedJob(JobSpec.model_validate(record["spec"]), taken, now))
        for command in record["commands"][len(course.record["commands"]) :]:
            course.world.take(Taken.of(command))
        course.world.resume(now)
        if len(self._courses) < COURSES_MAX:
            self._courses[job_id] = Course(dict(record), now, course.world)
        return course.world

    def _fail_if(self, switch: str) -> None:
        if (self._folder / switch).exists():
            raise InfrastructureError(detail="The cluster does not answer.", remedy="Start it with `atoll up`.")

    @contextmanager
    def _changing(self, job_id: str) -> Iterator[dict[str, Any]]:
        path = self._folder / f"{job_id}.json"
        with path.with_suffix(".lock").open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            before = path.read_text() if path.exists() else "{}"
            yield (record := json.loads(before))
            if (after := json.dumps(record)) != before:
                draft = path.with_suffix(".draft")
                draft.write_text(after)
                draft.replace(path)  # a process that is killed here leaves one or the other


@dataclass(frozen=True)
class Course:
    """A job's world up to the instant at which somebody looked, and the record that it was worked out from."""

    record: dict[str, Any]
    until: float
    world: SimulatedJob

    def leads_to(self, record: dict[str, Any]) -> bool:
        """This is the same job, and all that it was told since is of later."""
        known_count = len(self.record["commands"])
        known, fresh = record["commands"][:known_count], record["commands"][known_count:]
        return self.record == {**record, "commands": known} and all(command["at"] > self.until for command in fresh)


def leave_logs(run_dir: Path, spec: JobSpec) -> None:
    """What the processes of a job say at its beginning."""
    for book in (
        service_logbook(run_dir, "synchroniser"),
        *(island_logbook(run_dir, i, 1) for i in spec.island_sections()),
    ):
        book.path.parent.mkdir(parents=True, exist_ok=True)
        book.path.write_text(f"{book.source} begins\n")


def begun_at(run_dir: Path) -> float:
    """When the job began whose tape is here; now, if there is none."""
    try:
        with (run_dir / "tape.jsonl").open() as tape:
            header = decode_header(tape.readline())
    except FileNotFoundError:
        return time.time()
    assert isinstance(header, Header)
    return header.started_at


def leave_results(run_dir: Path, job_id: str, world: SimulatedJob, status: StatusDocument) -> None:
    """What an ended job leaves in its run's folder."""
    figures = report.build(world.policy, world.goodput, world.statistics, {"job_id": job_id, "loss_unigram": 3.1})
    replace(run_dir / "report.json", json.dumps(figures))
    replace(run_dir / "report.html", f"<!doctype html><title>{job_id}</title>")
    replace(run_dir / "status.json", json.dumps(status))


def replace(path: Path, text: str) -> None:
    """As a real job leaves its files: replacing what is there, and through no link."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}.aside"))
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)


def write_tape(path: Path, header: Header, world: SimulatedJob, ended: bool) -> None:
    """The tape grows whenever somebody looks: what was written before is the beginning of what is worked out now."""
    records = world.sink.records
    with path.open("a+b") as file:
        file.seek(0)
        count = (before := file.read()).count(b"\n")
        lines = [encode_header(header)] if count == 0 else []
        lines += map(encode_record, records[max(0, count - 1) :])
        file.write(fresh := "".join(f"{line}\n" for line in lines).encode())
        if ended:
            digest = Digest()
            digest.add_all(before + fresh)
            file.write(encode_footer(Footer(len(records), digest.hex())).encode() + b"\n")


def _profile(name: str, steps: int, taken: int, byte_count: int | None, problem: str = "") -> dict[str, Any]:
    figures = {"seconds": 1.5, "stalled_s": 0.25, "byte_count": byte_count, "problem": problem}
    return {"profile": name, "steps": steps, "steps_taken": taken, **figures}


def _trace() -> bytes:
    packed = BytesIO()
    with ZipFile(packed, "w") as archive:
        archive.writestr(ZipInfo("plugins/profile/run/host.xplane.pb"), b"planes" * 100)
        archive.writestr(ZipInfo("plugins/profile/run/host.trace.json.gz"), b"events")
    return packed.getvalue()


TRACE = _trace()
