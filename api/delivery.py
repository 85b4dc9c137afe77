"""Handing a command to the job that it is for, in the control port's words.

Responsible for knowing whether the job took it, also when the job was gone before it could answer.
"""

from __future__ import annotations

from pathlib import Path

from api.control import ControlPort
from api.runs import read_status
from api.schemas import Scale
from api.store import CommandRow
from orchestrator.core.vocabulary import Dose
from orchestrator.errors import NotFound


def deliver(control: ControlPort, command: CommandRow, run_dir: Path, fault: Dose | None, scale: Scale | None) -> None:
    """The job has taken the command. With ``fault`` it is one of chaos, and ``scale`` says how many of whom.

    Raises what the control port says when it has not.
    """
    whom = (command.job, command.kind, command.command, command.caller, command.island)
    try:
        if scale is not None:
            control.scale_job(command.job, command.command, command.caller, scale.node_group, scale.count)
        elif fault is not None:
            control.inject_fault(*whom, fault)
        else:
            control.submit_command(*whom, command.restart)
    except NotFound:
        ended = read_status(run_dir)  # a cancelled job may be over before its answer is on the way
        if ended is None or command.command not in ended["commands"]:
            raise
