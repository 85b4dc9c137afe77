"""`atoll doctor --lines`: the lines between node groups, and what they mean for a job's H, τ, P and codec.

Finds out what is trained (a running job, a specification, or two figures), has the lines measured and prints the result.
``orchestrator.simulation.line_advice`` advises. A process of its own joins the cluster and measures, because this one never
imports Ray:

    python -m orchestrator.runtime.line_probe --home HOME
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from rich.text import Text

from api.commands.common import connect, console, echo, print_json, say
from api.installation.home import Home
from api.terminal.listing import Listing
from orchestrator.errors import ConfigurationError, InfrastructureError
from orchestrator.parameters.codec.registry import CODEC_NAMES, EXACT
from orchestrator.simulation.line_advice import (
    COMPARED,
    UTILISATION_MIN,
    Advice,
    Demand,
    Line,
    SyncSettings,
    advised,
    bits_of,
    table,
)
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.documents import read_document
from orchestrator.specification.memory_budget import parameter_count_of, router_parameter_count_of
from orchestrator.specification.sections import SynchroniserSection
from orchestrator.system import python_process
from orchestrator.system.python_process import built

PROBE_MODULE = "orchestrator.runtime.line_probe"
HEAD = "control"
"""The node group of the head, where the synchroniser runs."""


class MeasuredLine(BaseModel):
    """A line between two node groups, or the problem with it. ``forth`` is from ``one`` to ``other``."""

    one: str
    other: str
    round_trip_s: float | None = None
    forth_bits_per_second: float | None = None
    back_bits_per_second: float | None = None
    problem: str | None = None


def measured_lines(home: Home, ports: tuple[int, int] = (0, 0)) -> Iterator[MeasuredLine]:
    """Yield each line once it is measured, on a free port of this range (0, 0: any).

    Raises InfrastructureError if there is no cluster, or joining it fails.
    """
    command = python_process.module(PROBE_MODULE, "--home", str(home.path), "--ports", *map(str, ports))
    process = subprocess.Popen(
        command,
        env=built(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                yield _parsed(line)
            complaint = process.stderr.read().strip()
            if process.wait():
                last = complaint.splitlines()[-1] if complaint else f"it ended with exit code {process.returncode}"
                raise InfrastructureError(detail=f"The lines cannot be measured: {last}")
        finally:
            process.terminate()


def _parsed(line: str) -> MeasuredLine:
    try:
        return MeasuredLine.model_validate(json.loads(line))
    except (ValueError, ValidationError) as error:
        raise InfrastructureError(
            detail=f"The line probe printed {line[:80]!r}, which is not a measurement.", remedy="Try again."
        ) from error


LINES_FOR_ADVICE = "For advice, say what is trained with --job JOB, --config SPEC, or --parameters N and --step-s T."


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of the advice: a job or a specification; explicit figures take precedence over theirs.

    ``ports`` are used to measure.
    """

    job: str | None
    config: Path | None
    parameters: float | None
    step_s: float | None
    ports: tuple[int, int] | None = None


def _ports(subject: Subject) -> tuple[int, int]:
    """Return the given ports, or else the specification's."""
    if subject.ports is not None:
        return subject.ports
    return (0, 0) if subject.config is None else parse_job(read_document(subject.config)).transport.ports


def examine_lines(home: Home, url: str | None, subject: Subject, *, as_json: bool) -> int:
    """Measure, print and advise. Return the exit code: 1 if a line carries nothing, or is too slow for any settings."""
    request = _request(home, url, subject)
    lines = []
    for line in measured_lines(home, _ports(subject)):
        if not as_json:
            say(f"measured {line.one} ─ {line.other}")
        lines.append(line)
    used = [] if request is None else _used(lines, request[0])
    advice = advised(used, *request) if request is not None and used else None
    if as_json:
        print_json(_plain(lines, request, used, advice))
    else:
        console().print(_measured_table(lines))
        if request is None:
            echo(LINES_FOR_ADVICE)
        elif advice is not None:
            console().print(_utilisation_table(used, *request))
            for text in _words(advice, request[1]):
                echo(text)
    return int(any(line.problem for line in lines) or (advice is not None and advice.settings is None))


# ── what is trained ───────────────────────────────────────────────────────────────────────────────────────────────────


def _request(home: Home, url: str | None, subject: Subject) -> tuple[Demand, SyncSettings] | None:
    """Return demand and settings, or None without a subject. Raises ConfigurationError if a figure is missing."""
    if subject.job is not None and subject.config is not None:
        raise ConfigurationError(detail="Give either --job or --config, not both.")
    if subject.job is not None:
        return _of_job(home, url, subject, subject.job)
    if subject.config is not None:
        return _of_spec(subject, parse_job(read_document(subject.config)))
    if subject.parameters is None and subject.step_s is None:
        return None
    return _demand(subject, None, None, {}), SyncSettings.of(SynchroniserSection())


def _of_job(home: Home, url: str | None, subject: Subject, name: str) -> tuple[Demand, SyncSettings]:
    with connect(home.path, url) as client:
        job = client.job(name)
    rates = [island.steps_per_second for island in job.islands if island.steps_per_second]
    islands = Counter(island.node_group for island in job.islands if not island.standby)
    step_s = 1.0 / statistics.median(rates) if rates else None
    if job.schedule.keys() < {"fragments", "interval_steps", "overlap_steps"}:
        raise ConfigurationError(detail=f"The service does not report the schedule of job {job.job}. Give --config.")
    settings = _settings(job.schedule, job.wire, job.statistics.get("mixture", {}).get("router_parameter_count", 0))
    return _demand(subject, job.statistics.get("parameter_count"), step_s, islands), settings


def _of_spec(subject: Subject, spec: JobSpec) -> tuple[Demand, SyncSettings]:
    synthetic = spec.trainer.is_synthetic
    islands = Counter({section.node_group: 0 for section in spec.islands})
    for section in spec.islands:
        islands[section.node_group] += section.count
    demand = _demand(subject, parameter_count_of(spec), spec.synthetic.step_s if synthetic else None, islands)
    return demand, SyncSettings.of(spec.synchroniser, router_parameter_count_of(spec))


def _demand(subject: Subject, parameters: float | None, step_s: float | None, islands: dict[str, int]) -> Demand:
    parameters, step_s = subject.parameters or parameters, subject.step_s or step_s
    if not parameters:
        raise ConfigurationError(detail="The model's size is unknown. Give it with --parameters.")
    if not step_s:
        raise ConfigurationError(detail="The duration of an inner step is unknown. Give it with --step-s.")
    return Demand(float(parameters), float(step_s), dict(islands))


def _settings(schedule: dict[str, Any], wire: dict[str, str], router_parameters: int) -> SyncSettings:
    """The codec is that of the two that has more bits."""
    name = max((name for name in CODEC_NAMES if name in wire.values()), key=bits_of, default=EXACT)
    steps, overlap = schedule["interval_steps"], schedule["overlap_steps"] or 0
    own = schedule.get("router_interval_steps")
    return SyncSettings(steps, overlap, schedule["fragments"], name, own, float(router_parameters))


def _used(lines: list[MeasuredLine], demand: Demand) -> list[Line]:
    """The head's lines to the groups that train, all groups if it is not known which."""
    return [
        Line(line.other, line.round_trip_s, min(line.forth_bits_per_second, line.back_bits_per_second))
        for line in lines
        if line.one == HEAD and (not demand.islands or line.other in demand.islands)
        if line.round_trip_s is not None
        if line.forth_bits_per_second is not None and line.back_bits_per_second is not None
    ]


# ── what is printed ───────────────────────────────────────────────────────────────────────────────────────────────────


def _measured_table(lines: list[MeasuredLine]) -> Listing:
    figures = ("round trip", "forth", "back")
    drawn = Listing("line", *figures, right=figures, padding=(0, 2, 0, 0))
    for line in lines:
        name = f"{line.one} ─ {line.other}"
        if line.problem is not None:
            drawn.add_row(name, Text("–"), Text("–"), Text(line.problem, style="bold red"))
        else:
            drawn.add_row(
                name,
                f"{1e3 * (line.round_trip_s or 0.0):.2f} ms",
                _speed(line.forth_bits_per_second),
                _speed(line.back_bits_per_second),
            )
    return drawn


def _speed(bits_per_second: float | None) -> str:
    if bits_per_second is None:
        return "–"
    if bits_per_second < 1e9:
        return f"{bits_per_second / 1e6:,.1f} Mbit/s"
    return f"{bits_per_second / 1e9:,.2f} Gbit/s"


def _utilisation_table(lines: list[Line], demand: Demand, settings: SyncSettings) -> Listing:
    drawn = Listing(
        *("group", *COMPARED), right=COMPARED, padding=(0, 2, 0, 0), title="utilisation by codec", title_justify="left"
    )
    for row in table(lines, demand, settings):
        cells = (Text(f"{100 * row[n]:.1f} %", style="" if row[n] >= UTILISATION_MIN else "yellow") for n in COMPARED)
        drawn.add_row(row["line"], *cells)
    return drawn


def _words(advice: Advice, current: SyncSettings) -> list[str]:
    enough = f"{100 * UTILISATION_MIN:.0f} %"
    stands = f"{100 * advice.utilisations[advice.slowest]:.1f} % on the line to {advice.slowest}"
    if advice.settings is None:
        need = f"With the current settings the line would need {_speed(advice.needed_bits_per_second)}."
        return [f"Utilisation is {stands}, and no settings bring it to {enough}. {need}"]
    changes = advice.changes(current)
    if not changes:
        words = f"Keep the settings: utilisation is {stands}; the goal is {enough}."
    else:
        turned = ", ".join(f"{name} {value}" for name, value in changes.items())
        reached = min(advice.reached.values())
        words = f"Utilisation is {stands}. Set {turned} under synchroniser for {100 * reached:.1f} %."
    meeting = advice.meeting
    if meeting is None or meeting.grace_cap_steps <= 1:
        return [words]
    return [
        words,
        f"A fragment takes {meeting.way_steps:.1f} of a step to reach {meeting.line}. For islands to meet in merges, set at "
        f"least grace_cap_steps {meeting.grace_cap_steps} and overlap_steps {meeting.overlap_steps}.",
    ]


def _plain(
    lines: list[MeasuredLine], request: tuple[Demand, SyncSettings] | None, used: list[Line], advice: Advice | None
) -> dict[str, Any]:
    if request is None or advice is None:
        return {"lines": [line.model_dump() for line in lines], "subject": None, "utilisation": [], "advice": None}
    demand, settings = request
    return {
        "lines": [line.model_dump() for line in lines],
        "subject": {**asdict(demand), **asdict(settings)},
        "utilisation": table(used, demand, settings),
        "advice": {**asdict(advice), "changes": advice.changes(settings)},
    }
