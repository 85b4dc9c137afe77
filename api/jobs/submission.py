"""All checks of a submitted specification, on every part of it that is valid, before anything is started.

    the document ──▶ fields, rules between them ──▶ files ──▶ tokenizer ──▶ index ──▶ checkpoint ──▶ memory, weights
                                                                    files on the machines of the islands, last ◀─┘
                                   node groups, packages of code: from the document itself

Reports every problem at once, and each once: files that an invalid section names are not read, and a stage that depends on
another is skipped if that has failed.

``absent_functions`` checks that the functions that a specification names exist in their modules, without running any of
them. A module's source is parsed for its names, so that a misspelt name is reported at submission and not by the job
minutes or hours later. If the names cannot be known (other ways of importing, compiled code, names created at run time)
nothing is reported here; ``atoll check`` and the job do.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from api.auth.permissions import code_problems
from api.jobs.checkpoints import resolved
from api.jobs.control import ControlPort
from api.jobs.path_check import (
    fleet_problems,
    group_problems,
    problems_outside_roots,
    sections_of,
    shard_problems,
    unseen_problems,
    weights_problems,
    with_described_model,
    with_index_digest,
    with_tokenizer,
    with_weights_digest,
)
from api.storage.store import JobRow
from orchestrator.errors import InvalidJobSpec, Problem
from orchestrator.specification.config import JobSpec, parse_job, right_sections
from orchestrator.specification.data_check import data_problems, with_found_files, with_stored_bytes
from orchestrator.specification.memory_budget import memory_problems, parameter_count_of
from orchestrator.specification.sections import PriceSection
from orchestrator.specification.validation import closest, secrets_in_urls
from orchestrator.system import user_packages
from orchestrator.system.roots import AllowedRoots

SOURCE_BYTES_MAX = 1 << 20
_PARSING = threading.Lock()
"""CPython 3.11 counts the depth of ``ast.parse`` once per process: two threads that parse at once raise SystemError."""
Stage = Callable[[JobSpec], JobSpec]


@dataclass(frozen=True, slots=True)
class Checks:
    """The cluster, packages, roots and jobs that a specification is checked against."""

    control: ControlPort
    packages: tuple[str, ...]
    roots: AllowedRoots
    job_named: Callable[[str], JobRow | None]
    prices: Mapping[str, PriceSection] = field(default_factory=dict)

    def accepted(self, document: Mapping[str, Any]) -> JobSpec:
        """Return the specification, with what the service fills in. Raises InvalidJobSpec with every problem at once.

        A secret in a URL is the only problem then, because other messages may quote the value.
        """
        if exposed := secrets_in_urls(document):
            raise InvalidJobSpec(problems=exposed)
        groups = self.control.node_groups()
        problems: list[Problem] = []
        omitted_count = 0
        spec: JobSpec | None
        of_weights: tuple[Problem, ...] = ()
        try:
            document = with_described_model(document, self.roots)
        except InvalidJobSpec as error:
            of_weights = error.problems
        try:
            spec = parse_job(document)
        except InvalidJobSpec as error:
            problems, omitted_count = list(error.problems), error.omitted_count
            spec = right_sections(document, problems)
        problems += of_weights
        is_whole = not problems
        of_groups = group_problems(document, groups)
        replaced = {
            problem.path for problem in of_groups
        }  # the list of existing groups says more than the pattern of names
        problems = [problem for problem in problems if problem.path not in replaced]
        if spec is not None:
            spec = with_prices(spec, self.prices)
            problems += price_problems(spec) if is_whole else ()
            spec = self._of_files(spec, problems)
        problems += fleet_problems(spec.islands if is_whole and spec else sections_of(document), groups)
        problems += of_groups
        if spec is not None:
            problems += shard_problems(spec.synchroniser.shard_groups, groups)
        if is_whole and spec is not None and (count := parameter_count_of(spec)) is not None:
            problems += memory_problems(spec, count, self.control.node_memory())
        if spec is not None and spec.synchroniser.durability.is_mirrored and not self.control.has_store():
            message = "is mirrored, but the service has no store for the job's log."
            problems.append(
                Problem("synchroniser.durability.kind", message, "Start the service with --store URL, or use sync.")
            )
        if spec is not None and not problems:
            problems += unseen_problems(spec, self.roots, self.control.unseen_files)
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
        spec, _ = _after(lambda before: with_weights_digest(before, self.roots), spec, problems)
        spec, _ = _after(lambda before: resolved(before, self.job_named, self.roots), spec, problems)
        problems += weights_problems(spec, self.roots)
        return spec


def with_prices(spec: JobSpec, prices: Mapping[str, PriceSection]) -> JobSpec:
    """Return the specification with the service's price of each entry of islands that names none."""
    entries = tuple(
        entry if entry.price is not None else entry.model_copy(update={"price": prices.get(entry.node_group)})
        for entry in spec.islands
    )
    return spec if entries == spec.islands else spec.model_copy(update={"islands": entries})


def price_problems(spec: JobSpec) -> Iterator[Problem]:
    """Yield the problems of prices that cannot be added up, or are missing for the limit of the budget."""
    unpriced = [index for index, entry in enumerate(spec.islands) if entry.price is None]
    if spec.budget.cost is not None and unpriced:
        group = spec.islands[unpriced[0]].node_group
        message = f"is {spec.budget.cost:g}, but the node group {group!r} has no price."
        remedy = f"Start the service with a --prices FILE that has it, or give islands.{unpriced[0]}.price."
        yield Problem("budget.cost", message, remedy)
    first = next((entry.price for entry in spec.islands if entry.price is not None), None)
    for index, entry in enumerate(spec.islands):
        if first is not None and entry.price is not None and entry.price.currency != first.currency:
            message = f"is {entry.price.currency}, but another entry is priced in {first.currency}."
            yield Problem(f"islands.{index}.price.currency", message, "Give all prices of a job in one currency.")


def _in_other_places(more: Iterable[Problem], problems: Sequence[Problem]) -> list[Problem]:
    places = {problem.path for problem in problems}
    return [problem for problem in more if problem.path not in places]


def _after(stage: Stage, spec: JobSpec, problems: list[Problem]) -> tuple[JobSpec, bool]:
    try:
        return stage(spec), True
    except InvalidJobSpec as error:
        problems += error.problems
        return spec, False


def absent_functions(spec: JobSpec) -> list[Problem]:
    """Return a problem for each named function that its module certainly lacks."""
    named = (
        ("data.source", spec.data.source if spec.data.is_own else None),
        ("model.factory", spec.model.factory),
        ("training.inner_optimizer.factory", spec.training.inner_optimizer.factory),
        ("trainer.factory" if spec.trainer.settings else "trainer", spec.trainer.factory),
        ("trainer.model", spec.trainer.model if spec.trainer.folder is None else None),
    )
    problems = []
    for path, function in named:
        module, _, name = (function or "").partition(":")
        names = _names_of(module) if function else None
        if names is not None and name not in names:
            meant = closest(name, sorted(names))
            remedy = f"Did you mean {module}:{meant}?" if meant else "Correct its name."
            problems.append(Problem(path, f"names {function!r}, but {module} has no {name!r}.", remedy))
    return problems


def _names_of(module: str) -> set[str] | None:
    """Return the names that the module has after import; None if its source does not tell."""
    try:
        source = _source_of(module)
        if source is None or source.stat().st_size > SOURCE_BYTES_MAX:
            return None
        text = source.read_bytes()
        with _PARSING:
            tree = ast.parse(text)
        names = set(_bound(tree.body))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return None if names & {"*", "__getattr__"} else names


def _source_of(module: str) -> Path | None:
    places = [*sys.path, *user_packages.folders_in(os.environ)]  # as islands look for it
    name, located = "", None
    for part in module.split("."):
        name = f"{name}.{part}".removeprefix(".")
        located = PathFinder.find_spec(name, places)
        if located is None:
            return None
        places = list(located.submodule_search_locations or ())
    origin = located.origin if located is not None and located.has_location else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that these statements bind in their module, in any branch."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.Name) and node.id in ("globals", "setattr", "exec"):
                yield "*"
