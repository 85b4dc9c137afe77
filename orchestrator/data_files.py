"""The files of a job whose names are patterns: which they are, when the job is submitted.

What is found takes the pattern's place in the specification, so that every island, and a later start of the job, has the
same files, whatever is put beside them meanwhile. Only the last component may be a pattern, of a folder on this machine.
Refuses to know what is in the files: that is ``data_check``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase

from orchestrator.config import JobSpec
from orchestrator.errors import AtollError, InvalidJobSpec, OutsideRoots, Problem, first_line
from orchestrator.roots import AllowedRoots, open_folder
from orchestrator.sections import FILES_MAX

OF_PATTERNS = frozenset("*?[")
SHOWN_MAX = 3


def with_found_files(spec: JobSpec, roots: AllowedRoots) -> JobSpec:
    """The specification with files in the place of patterns, in the order of their names.

    Raises InvalidJobSpec for patterns that fit no file, or too many. What is outside the roots is left for others to refuse.
    """
    problems: list[Problem] = []
    files = _found(roots, spec.data.files, "data.files", problems)
    sources = []
    for index, source in enumerate(spec.data.sources):
        replaced = {}
        for field in ("files", "held_out"):
            replaced[field] = _found(roots, getattr(source, field), f"data.sources.{index}.{field}", problems)
        sources.append(source.model_copy(update=replaced))
    if not problems:
        problems += _on_both_sides([(source.files, source.held_out) for source in sources])
    if problems:
        raise InvalidJobSpec(problems=tuple(problems))
    return spec.model_copy(update={"data": spec.data.model_copy(update={"files": files, "sources": tuple(sources)})})


def _found(roots: AllowedRoots, names: Sequence[str], field: str, problems: list[Problem]) -> tuple[str, ...]:
    paths: list[str] = []
    for number, name in enumerate(names):
        folder, _, pattern = name.rpartition("/")
        if "://" in name or not OF_PATTERNS & set(name) or os.path.lexists(name):
            paths.append(name)
            continue
        where, remedy = f"{field}.{number}", "Correct the pattern, or name the files."
        if OF_PATTERNS & set(folder):
            problems.append(Problem(where, f"is {name!r}: a folder's name is no pattern.", "Name the folder."))
            continue
        try:
            fitting = _fitting(roots, folder, pattern)
        except OutsideRoots:
            paths.append(name)
            continue
        except (OSError, AtollError) as error:
            problems.append(Problem(where, f"is {name!r}, whose folder cannot be read ({first_line(error)}).", remedy))
            continue
        if not fitting:
            problems.append(Problem(where, f"is {name!r}, which no file here fits.", remedy))
        paths += [f"{folder}/{one}" for one in fitting]
    if len(paths) > FILES_MAX:
        problems.append(Problem(field, f"are {len(paths):,} files, of at most {FILES_MAX:,}.", "Put files together."))
    return tuple(paths)


def _fitting(roots: AllowedRoots, folder: str, pattern: str) -> list[str]:
    """The names of a folder's files that a pattern fits; those that begin with a dot only where it does."""
    descriptor = open_folder(roots.data_file(folder or "/").real())
    try:
        with os.scandir(f"/proc/self/fd/{descriptor}") as entries:
            return sorted(
                entry.name
                for entry in entries
                if fnmatchcase(entry.name, pattern)
                and entry.name.startswith(".") == pattern.startswith(".")
                and _is_file(entry)
            )
    finally:
        os.close(descriptor)


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether to name it. A link that leads in a circle is named, so that ``data_check`` refuses that one alone."""
    try:
        return entry.is_file()
    except OSError:
        return True


def _on_both_sides(sources: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[Problem]:
    trained = {path for files, _ in sources for path in files}
    return [
        Problem(
            f"data.sources.{index}.held_out",
            f"has files on which islands train: {', '.join(both[:SHOWN_MAX])}{', …' if len(both) > SHOWN_MAX else ''}.",
            "Leave them out here, or in files.",
        )
        for index, (_, held_out) in enumerate(sources)
        if (both := sorted(trained & set(held_out)))
    ]
