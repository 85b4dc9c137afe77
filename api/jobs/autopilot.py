"""The autopilot of running jobs: now and then it looks at a job's tape, records its advice, and may change settings.

    service ──▶ python -m api.jobs.autopilot FOLDER    a process of the lowest priority: reads the tape, simulates, prints
            ◀── the report (``simulation.autopilot``)
            ──▶ FOLDER/advice.json                     the newest looks, which the service, the page and `atoll advise` show
            ──▶ a command to the job                   if the job's specification says ``act``, within its bounds

One look at a time runs, whatever the number of jobs, so that it never slows down the service. Its process has limits of time
and memory, and ends with the service. A look that fails is recorded with its reason, and the next one is tried. The job and
the newest record of the tape determine the key of a command, so no look changes anything twice.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import ValidationError

from api.jobs.background_loop import BackgroundLoop, ProblemLog, reason_of
from api.jobs.service import Service
from api.jobs.translate import request_in
from api.run.folder import parsed, put, read_below
from api.run.records import TapeReader
from api.schemas import Look, SettingAdvice
from api.storage.store import CommandRow, JobRow, Store
from orchestrator.core import commands
from orchestrator.errors import AtollError, DataError, InfrastructureError, first_line
from orchestrator.simulation.autopilot import AUTOPILOT, Limits, Pilot, command_for
from orchestrator.specification.sections import AutopilotSection
from orchestrator.system import plain, python_process, signals
from orchestrator.system.run_folder import ADVICE, TAPE
from orchestrator.tape.schema import Header, Record, Tape, decode_header, decode_line

logger = logging.getLogger(__name__)

ROUND_EVERY_S = 5.0
LOOK_TIMEOUT_S = 900.0
MEMORY_BYTES = 4 << 30
TAPE_BYTES_MAX = 256 << 20
"""Of a tape, as it is sent. A longer one does not fit into ``MEMORY_BYTES``."""
LOOKS_KEPT = 20
ADVICE_BYTES_MAX = 1 << 20
ANSWER_BYTES_MAX = 256 << 10
NICE = 19
RUNNING = frozenset({"running"})
CHANGED_MEANWHILE = "settings were changed while the autopilot looked at the tape"
"""A look takes minutes on a busy machine, and an operator's `atoll set` in that time is the operator's."""


def advice_of(folder: Path, count: int = LOOKS_KEPT) -> list[Look]:
    """Return so many looks at a job's tape, the newest first; none if there was none yet, or the file is damaged."""
    try:
        looks = parsed(read_below(folder, ADVICE, ADVICE_BYTES_MAX), folder / ADVICE)["looks"]
        return [Look.model_validate(look) for look in looks[:count]]
    except (FileNotFoundError, AtollError, KeyError, TypeError, ValidationError):
        return []


class Autopilots:
    """The loop over jobs. ``look`` returns the report on a tape as plain data; it is another process's unless a test has its
    own."""

    def __init__(
        self,
        service: Service,
        store: Store,
        look: Callable[[Path, AutopilotSection], Mapping[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service, self._store, self._clock = service, store, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()
        self._closing = False
        self._look = look or self.look_elsewhere
        self._looked_at: dict[str, float] = {}
        self._problem_log = ProblemLog(logger)
        self._loop = BackgroundLoop(self.round, "autopilot", ROUND_EVERY_S)

    def begin(self) -> None:
        self._loop.start()

    def close(self) -> None:
        """Look at no more tapes. The look under way is ended."""
        with self._lock:
            self._closing = True
            if self._process is not None:
                self._process.kill()
        self._loop.stop()

    def round(self) -> None:
        """Look at every tape that is due."""
        piloted = [(row, section_of(row.spec)) for row in self._store.jobs(states=RUNNING)]
        piloted = [(row, section) for row, section in piloted if section.kind != "off"]
        for row, section in piloted:
            due = self._looked_at.setdefault(row.job, self._clock()) + section.every_s
            if self._closing or self._clock() < due:
                continue
            try:
                self._see_to(row, section)
            except Exception as error:  # other jobs are not affected
                self._problem_log.note(f"job {row.job}", f"its autopilot failed: {reason_of(error)}", error)
            self._looked_at[row.job] = self._clock()
        jobs = {row.job for row, _ in piloted}
        self._looked_at = {job: at for job, at in self._looked_at.items() if job in jobs}
        self._problem_log.keep(f"job {job}" for job in jobs)

    def _see_to(self, row: JobRow, section: AutopilotSection) -> None:
        folder = Path(row.run_dir)
        on_tape = {change.command for change in self._changes(row.job) if change.accepted is not None}
        try:
            report = dict(self._look(folder, section))
        except InfrastructureError as error:
            report = {"record": 0, "at": 0.0, "settings": {}, "fit_error_ratio": None, "looked_at": 0}
            report |= {"outcome": f"this look failed: {first_line(error)}", "advice": None}
        if self._closing:
            return
        looks = advice_of(folder)
        if report.get("advice") and not {change.command for change in self._changes(row.job)} <= on_tape:
            report["advice"] = {**report["advice"], "held_by": CHANGED_MEANWHILE}
        report["command"] = self._acted(row, section, report)
        look = Look.model_validate({**plain.finite(report), "looked_at_time": time.time()})
        content = {"looks": [one.model_dump(mode="json") for one in (look, *looks)][:LOOKS_KEPT]}
        put(folder, ADVICE, json.dumps(content).encode())

    def _changes(self, job: str) -> list[CommandRow]:
        """Return the commands, of any caller, that change settings of the job."""
        return [row for row in self._store.commands(job) if isinstance(request_in(row), commands.Set)]

    def _acted(self, row: JobRow, section: AutopilotSection, report: Mapping[str, Any]) -> str | None:
        """Have the job make the advised change, if it may. Return the command's id."""
        if section.kind != "act" or not report.get("advice"):
            return None
        advice = SettingAdvice.model_validate(plain.finite(report["advice"]))
        command = command_of(advice, section)
        if command is None:
            return None
        key = f"{AUTOPILOT}:{row.job}:{report['record']}"
        stored = self._service.submit_command(row.job, command, AUTOPILOT, key)
        logger.info("job %s: %s", row.job, advice.reason)
        return stored.command

    # ── a look in a process of its own ────────────────────────────────────────────────────────────────────────────────

    def look_elsewhere(self, folder: Path, section: AutopilotSection) -> Mapping[str, Any]:
        """Look at the tape in another process. Raises InfrastructureError with the reason if that fails."""
        command = python_process.module("api.jobs.autopilot", str(folder))
        wanted = {"ranges": section.bounds.ranges(), "gain_min": section.gain_min_ratio, "service": os.getpid()}
        with self._lock:
            if self._closing:
                raise InfrastructureError(detail="the service ends.")
            self._process = subprocess.Popen(
                command,
                env=python_process.built(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        process = self._process
        try:
            answer, complaint = process.communicate(json.dumps(wanted).encode(), LOOK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise InfrastructureError(detail=f"it took longer than {LOOK_TIMEOUT_S:.0f} s.") from None
        finally:
            with self._lock:
                self._process = None
        if process.returncode:
            last = complaint.decode("utf-8", "replace").strip().splitlines()
            why = last[-1][:300] if last else f"its process ended with exit code {process.returncode}"
            raise InfrastructureError(detail=why)
        try:
            report: dict[str, Any] = json.loads(answer[:ANSWER_BYTES_MAX])
        except ValueError as error:
            raise InfrastructureError(detail="its process printed no report.") from error
        return report


def command_of(advice: SettingAdvice, section: AutopilotSection) -> commands.Set | None:
    """Return the command that makes the change; None if the autopilot may not make it.

    The bounds are checked here once more, whatever process gave the advice.
    """
    least, most = section.bounds.ranges().get(advice.setting, (inf, -inf))
    if advice.held_by or not least <= advice.after <= most:
        return None
    return command_for(advice.setting, advice.after, advice.reason)


def section_of(document: Any) -> AutopilotSection:
    """Return the section of a stored specification, without reading the rest of it. A damaged one is off."""
    try:
        return AutopilotSection.model_validate(document.get("autopilot", {}))
    except (AttributeError, ValidationError):
        return AutopilotSection.model_validate({})


# ── the process ───────────────────────────────────────────────────────────────────────────────────────────────────────


def report_on(folder: Path, ranges: Mapping[str, tuple[float, float]], gain_min: float) -> dict[str, Any]:
    """Return the report on the tape in this folder as plain data. Raises DataError if there is none to be understood."""
    report: dict[str, Any] = plain.finite(asdict(Pilot(tape_in(folder), Limits(ranges), gain_min).look()))
    return report


def tape_in(folder: Path) -> Tape:
    """Return the tape so far. Raises DataError if it is missing, damaged or too long."""
    reader = TapeReader(folder / TAPE)
    header: Header | None = None
    records: list[Record] = []
    size = 0
    while lines := reader.read():
        for line in lines:
            size += len(line)
            if size > TAPE_BYTES_MAX:
                raise DataError(detail=f"the tape is longer than {TAPE_BYTES_MAX >> 20} MiB, so it is not simulated.")
            if header is None:
                first = decode_header(line.decode())
                if not isinstance(first, Header):
                    raise DataError(detail="the tape is that of a fleet, not of a job.")
                header = first
            elif isinstance(record := decode_line(line.decode()), Record):
                records.append(record)
    if header is None:
        raise DataError(detail="there is no tape yet.")
    return Tape(header, tuple(records))


def main(arguments: list[str]) -> int:
    """Print the report on the tape in a folder, with the wanted bounds on standard input, as JSON."""
    signals.end_with_parent()  # a service that is killed cannot end this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    wanted = json.loads(sys.stdin.buffer.read())
    if os.getppid() != wanted["service"]:
        return 1  # it was killed before this process could ask to end with it
    ranges = {name: (pair[0], pair[1]) for name, pair in wanted["ranges"].items()}
    try:
        print(json.dumps(report_on(Path(arguments[0]), ranges, wanted["gain_min"])))
    except AtollError as error:
        print(first_line(error), file=sys.stderr)
        return 1
    except MemoryError:
        print(f"the tape does not fit into {MEMORY_BYTES >> 30} GiB of memory.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
