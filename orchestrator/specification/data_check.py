"""The data files of a job, looked at before it is queued: they are there, are what their names say, and have the text.

The service asks when a job is submitted, `atoll check` before that. Islands look again at every file when they open it
(``learners.streaming.documents``), by the same table (``file_kinds``), so what is left out here for its time is found there.

A file of this machine that is missing is a problem where the job will look for it here: if the head measures the held-out
loss (``evaluation.on: head``), or if others of the job's files are here. Otherwise it may be on the nodes alone. A store
that does not answer in time, or not to this machine, says nothing. Never more than ``LOOK_S`` seconds are spent, and
``LOOKED_INTO_MAX`` files of a field. Refuses to know names that are never read (``config``), and roots
(``api.jobs.path_check``).

The files of a job whose names are patterns: which they are, when the job is submitted.

What is found takes the pattern's place in the specification, so that every island, and a later start of the job, has the
same files, whatever is put beside them meanwhile. Only the last component may be a pattern, of a folder on this machine.
Refuses to know what is in the files: that is ``data_check``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import IO

from orchestrator.errors import AtollError, ConfigurationError, InvalidJobSpec, OutsideRoots, Problem, first_line
from orchestrator.specification.config import JobSpec
from orchestrator.specification.sections import FILES_MAX
from orchestrator.system.roots import AllowedRoots, data_bytes, open_data, open_folder, shown
from orchestrator.system.threads import BoundedThreads
from orchestrator.text import file_kinds, parquet_bytes
from orchestrator.text.file_kinds import Format, Head, Misfit, kind_of

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


LOOK_S = 10.0
LOOKED_INTO_MAX, STORE_FILES_MAX = 64, 4
"""Of a field: files of this machine, and of stores, whose content is looked at: the first, the last, and some between."""

_store_threads = BoundedThreads("data files in stores", 8)


@dataclass(frozen=True, slots=True)
class _Field:
    """Files of one field, with the field that has their text."""

    path: str
    files: Sequence[str]
    text_field: str
    text_field_path: str


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was seen of a file: its size, or why that is not known; and a problem of its content."""

    size: int | None
    problem: Problem | None = None
    is_missing: bool = False


def data_problems(spec: JobSpec, roots: AllowedRoots, limit_s: float = LOOK_S) -> tuple[Problem, ...]:
    """What is wrong with the files of ``spec.data``, each field's most telling problems. Raises nothing.

    The specification has files in the place of patterns already (``data_files``).
    """
    deadline = time.monotonic() + limit_s
    looks = [_Look(spec, roots, field, deadline) for field in _fields(spec)]
    for look in looks:
        look.into_contents()
    for look in looks:
        look.for_files()
    is_here = spec.evaluation.on == "head" or any(
        seen.size is not None for look in looks for seen in look.seen.values()
    )
    return tuple(problem for look in looks for problem in look.problems(is_here))


def with_stored_bytes(spec: JobSpec, roots: AllowedRoots, limit_s: float = LOOK_S) -> JobSpec:
    """The specification with the sizes of its sources, as far as they are known here in time, for ``advice``.

    Files of a store count nothing: to ask for each takes too long.
    """
    data, deadline = spec.data, time.monotonic() + limit_s
    sizes = () if data.index is not None else tuple(_size(source.files, roots, deadline) for source in data.sources)
    return spec.model_copy(update={"data": data.model_copy(update={"stored_bytes": sizes})})


def _size(files: Sequence[str], roots: AllowedRoots, deadline: float) -> int:
    size = 0
    for path in files:
        if "://" not in path and time.monotonic() < deadline:
            with suppress(OSError, ConfigurationError):
                size += data_bytes(roots, path)
    return size


class _Look:
    """The files of one field, as far as there is time."""

    def __init__(self, spec: JobSpec, roots: AllowedRoots, field: _Field, deadline: float) -> None:
        self._field, self._roots, self._deadline = field, roots, deadline
        self._unreadable_max = spec.data.unreadable_max
        self.seen: dict[int, _Seen] = {}

    def into_contents(self) -> None:
        local, stored = (
            [number for number, path in enumerate(self._field.files) if ("://" in path) is is_stored]
            for is_stored in (False, True)
        )
        for number in _spread(local, LOOKED_INTO_MAX):
            if time.monotonic() > self._deadline:
                return
            self.seen[number] = self._seen(number)
        answers = list[tuple[int, Future[_Seen]]]()
        for number in _spread(stored, STORE_FILES_MAX):
            try:
                answers.append((number, _store_threads.begin(lambda number=number: self._seen(number))))  # type: ignore[misc]
            except AtollError:
                break  # all threads wait for stores
        for number, answer in answers:
            try:
                self.seen[number] = answer.result(max(0.0, self._deadline - time.monotonic()))
            except NotInTime:
                return

    def for_files(self) -> None:
        """Look for those whose content was not looked at, too."""
        for number, path in enumerate(self._field.files):
            if number not in self.seen and "://" not in path:
                if time.monotonic() > self._deadline:
                    return
                self.seen[number] = self._seen(number, content=False)

    def problems(self, is_here: bool) -> Iterator[Problem]:
        missing = [number for number, seen in sorted(self.seen.items()) if seen.is_missing]
        if missing and is_here:
            yield self._missing(missing)
        others = [seen.problem for _, seen in sorted(self.seen.items()) if seen.problem and not seen.is_missing]
        of_field = [problem for problem in others if problem.path == self._field.text_field_path]
        yield from of_field[:1]  # one field, one problem
        others = [problem for problem in others if problem not in of_field]
        yield from others[:SHOWN_MAX]
        if len(others) > SHOWN_MAX:
            message = f"has {len(others) - SHOWN_MAX:,} more files that cannot be used."
            yield Problem(self._field.path, message, "Look at them as at the first.")
        if (
            not others
            and len(self.seen) == len(self._field.files)
            and not any(seen.size is None or seen.size for seen in self.seen.values())
        ):
            yield Problem(self._field.path, "has empty files only.", "Name others.")

    def _missing(self, numbers: Sequence[int]) -> Problem:
        first = self.seen[numbers[0]].problem
        assert first is not None
        if len(numbers) == 1:
            return first
        named = ", ".join(shown(self._field.files[number]) for number in numbers[:SHOWN_MAX])
        more = ", …" if len(numbers) > SHOWN_MAX else ""
        message = f"names {len(numbers):,} files that are not here, of {len(self._field.files):,}: {named}{more}."
        return Problem(self._field.path, message, first.remedy)

    def _seen(self, number: int, *, content: bool = True) -> _Seen:
        path = self._field.files[number]
        try:
            size = data_bytes(self._roots, path)
            return _Seen(size, self._content_problem(number, path) if content and size else None)
        except OutsideRoots:
            return _Seen(None)  # which is said elsewhere
        except ConfigurationError:
            if "://" in path:
                return _Seen(None)  # its library is not here, or does not reach it
            message = f"is {shown(path)}, which is a folder, or no regular file."
            return _Seen(None, self._problem(number, message, "Name the files of a folder: FOLDER/*.jsonl."))
        except FileNotFoundError:
            if "://" in path:
                return _Seen(None, self._problem(number, f"is {shown(path)}, which is not there.", "Correct the URL."))
            message = f"is {shown(path)}, which is not here."
            remedy = "Correct the path. The file must exist here, where the head measures, and on every island's node."
            return _Seen(None, self._problem(number, message, remedy), is_missing=True)
        except OSError as error:
            if "://" in path:
                return _Seen(None)
            message = f"is {shown(path)}, which cannot be read here ({error.strerror or first_line(error)})."
            return _Seen(None, self._problem(number, message, "Correct the path, or the file's rights."))
        except Exception:  # whatever a store's library raises; islands may reach it
            return _Seen(None)

    def _content_problem(self, number: int, path: str) -> Problem | None:
        with open_data(self._roots, path) as file:
            try:
                seen = file_kinds.look(path, file, self._field.text_field)
                if seen is None and kind_of(path).format is Format.PARQUET:
                    return self._parquet_problem(number, path, file)
            except file_kinds.DAMAGE as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                return self._unreadable(number, [f"it cannot be read: {first_line(error)}"])
        if isinstance(seen, Misfit) and not seen.is_kind:
            message = f"is {self._field.text_field!r}, and {shown(path)} {seen.message}."
            return Problem(self._field.text_field_path, message, "Set it to the field that has the text.")
        if isinstance(seen, Misfit):
            return self._problem(number, f"is {shown(path)}, and this file {seen.message}.", seen.remedy)
        if isinstance(seen, Head):
            return self._unreadable(number, seen.unreadable(self._field.text_field))
        return None

    def _parquet_problem(self, number: int, path: str, file: IO[bytes]) -> Problem | None:
        columns, wanted = parquet_bytes.columns(file), self._field.text_field
        fitting = [column for column in columns if column.name == wanted]
        if len(fitting) == 1 and fitting[0].is_text:
            return None
        named = ", ".join(repr(column.name[:40]) for column in columns[:20])
        if not fitting:
            message = f"is {wanted!r}, and {shown(path)} has no such column, but {named}."
        elif len(fitting) > 1:
            message = f"is {wanted!r}, and {shown(path)} has {len(fitting)} columns of that name."
        else:
            message = f"is {wanted!r}, and {shown(path)} has {fitting[0].what} in that column, and no text."
        return Problem(self._field.text_field_path, message, "Set it to the column that has the text.")

    def _unreadable(self, number: int, reasons: Sequence[str]) -> Problem | None:
        if len(reasons) <= self._unreadable_max:
            return None
        path = self._field.files[number]
        message = (
            f"is {shown(path)}, of which {len(reasons):,} of the first records cannot be read, and "
            f"data.unreadable_max is {self._unreadable_max:,}: {reasons[0]}."
        )
        return self._problem(number, message, "Correct the file, leave it out, or raise the limit.")

    def _problem(self, number: int, message: str, remedy: str) -> Problem:
        return Problem(f"{self._field.path}.{number}", message, remedy)


def _fields(spec: JobSpec) -> Iterator[_Field]:
    data = spec.data
    if data.files:
        yield _Field("data.files", data.files, data.text_field, "data.text_field")
    for index, source in enumerate(data.sources):
        for name, files in (("files", source.files), ("held_out", source.held_out)):
            if files:
                where = f"data.sources.{index}"
                yield _Field(f"{where}.{name}", files, source.text_field, f"{where}.text_field")


def _spread(numbers: Sequence[int], most: int) -> list[int]:
    """So many of them, the first and the last among them."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[at * (len(numbers) - 1) // (most - 1)] for at in range(most)]
