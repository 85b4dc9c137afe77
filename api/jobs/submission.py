"""All checks of a submitted specification, on every part of it that is valid, before anything is started.

    the document ──▶ fields, rules between them ──▶ files ──▶ tokenizer ──▶ index ──▶ checkpoint ──▶ memory, weights
                                   node groups, packages of code: from the document itself

Reports every problem at once, and each once: files that an invalid section names are not read, and a stage that depends on
another is skipped if that has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.auth.code import code_problems
from api.checkpoints.lookup import resolved
from api.jobs.code_check import absent_functions
from api.jobs.control import ControlPort
from api.jobs.path_check import (
    fleet_problems,
    group_problems,
    problems_outside_roots,
    sections_of,
    weights_problems,
    with_index_digest,
    with_tokenizer,
)
from api.storage.store import JobRow
from orchestrator.errors import InvalidJobSpec, Problem
from orchestrator.specification.config import JobSpec, parse_job, right_sections
from orchestrator.specification.data_check import data_problems, with_found_files, with_stored_bytes
from orchestrator.specification.memory_budget import memory_problems, parameter_count_of
from orchestrator.system.roots import AllowedRoots

Stage = Callable[[JobSpec], JobSpec]


@dataclass(frozen=True, slots=True)
class Checks:
    """The cluster, packages, roots and jobs that a specification is checked against."""

    control: ControlPort
    packages: tuple[str, ...]
    roots: AllowedRoots
    job_named: Callable[[str], JobRow | None]

    def accepted(self, document: Mapping[str, Any]) -> JobSpec:
        """Return the specification, with what the service fills in. Raises InvalidJobSpec with every problem at once."""
        groups = self.control.node_groups()
        problems: list[Problem] = []
        omitted_count = 0
        spec: JobSpec | None
        try:
            spec = parse_job(document)
        except InvalidJobSpec as error:
            problems, omitted_count = list(error.problems), error.omitted_count
            spec = right_sections(document, problems)
        is_whole = not problems
        of_groups = group_problems(document, groups)
        replaced = {
            problem.path for problem in of_groups
        }  # the list of existing groups says more than the pattern of names
        problems = [problem for problem in problems if problem.path not in replaced]
        if spec is not None:
            spec = self._of_files(spec, problems)
        problems += fleet_problems(spec.islands if is_whole and spec else sections_of(document), groups)
        problems += of_groups
        if is_whole and spec is not None and (count := parameter_count_of(spec)) is not None:
            problems += memory_problems(spec, count, self.control.node_memory())
        problems += _in_other_places(code_problems(document, self.packages), problems)
        if spec is not None:
            problems += _in_other_places(absent_functions(spec), problems)
        if problems or spec is None:
            raise InvalidJobSpec(problems=tuple(dict.fromkeys(problems)), omitted_count=omitted_count)
        return spec

    def _of_files(self, spec: JobSpec, problems: list[Problem]) -> JobSpec:
        """Add the problems of the files that the specification names; each stage may depend on the ones before it."""
        spec, is_found = _after(lambda before: with_found_files(before, self.roots), spec, problems)
        outside = problems_outside_roots(spec, self.roots, begun=True)
        problems += outside
        if is_found:
            problems += _in_other_places(data_problems(spec, self.roots), problems)
            spec = with_stored_bytes(spec, self.roots)
        spec, is_known = _after(lambda before: with_tokenizer(before, self.roots), spec, problems)
        if is_found and is_known and not outside:
            spec, _ = _after(lambda before: with_index_digest(before, self.roots), spec, problems)
        spec, _ = _after(lambda before: resolved(before, self.job_named, self.roots), spec, problems)
        problems += weights_problems(spec, self.roots)
        return spec


def _in_other_places(more: Iterable[Problem], problems: Sequence[Problem]) -> list[Problem]:
    places = {problem.path for problem in problems}
    return [problem for problem in more if problem.path not in places]


def _after(stage: Stage, spec: JobSpec, problems: list[Problem]) -> tuple[JobSpec, bool]:
    try:
        return stage(spec), True
    except InvalidJobSpec as error:
        problems += error.problems
        return spec, False
