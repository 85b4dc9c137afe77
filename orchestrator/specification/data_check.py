"""Check a job's data files before it is queued: they exist, are what their names say, and have the text field.

The service checks at submission, and `atoll check` before that. Islands check every file again when they open it
(``learners.streaming.documents``), by the same table (``file_kinds``), so they find what is skipped here to save time.

A missing file is a problem if the job will read it on this machine: if the head measures the held-out loss
(``evaluation.on: head``), or if other files of the job are here. Otherwise it may be on the nodes only. A store that
does not answer in time is skipped. At most ``LOOK_S`` seconds and ``LOOKED_INTO_MAX`` files of a field are spent.
``config`` refuses names that are never read, and ``api.jobs.path_check`` paths outside the roots.

``with_found_files`` replaces patterns by the files that match at submission, so that every island, and a restarted job, has
the same files whatever is added later. Only the last component of a path on this machine may be a pattern.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import IO

from orchestrator.errors import AtollError, ConfigurationError, InvalidJobSpec, OutsideRoots, Problem, first_line
from orchestrator.specification.bounds import BYTES
from orchestrator.specification.config import JobSpec
from orchestrator.specification.data_sources import FILES_MAX, with_hub_files
from orchestrator.system.roots import AllowedRoots, data_bytes, open_data, open_folder, shown
from orchestrator.system.threads import BoundedThreads
from orchestrator.text import chat_template, file_kinds, parquet_bytes, token_files, tokenizer_file
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.file_kinds import Format, Head, Misfit, kind_of
from orchestrator.text.parquet_bytes import Column
from orchestrator.text.text_records import CONVERSATION, CONVERSATION_KINDS, NotText
from orchestrator.text.token_files import NotTokens

OF_PATTERNS = frozenset("*?[")
SHOWN_MAX = 3
ROWS_LOOKED_AT = 256
"""Of a Parquet file with conversations."""


def with_found_files(spec: JobSpec, roots: AllowedRoots) -> JobSpec:
    """Return the specification with files in place of patterns, in the order of their names, and of data sets of the Hub.

    Raises InvalidJobSpec for patterns that match no file, or too many, and for data sets that are not found. Paths outside
    the roots are left unchanged.
    """
    problems: list[Problem] = []
    files = _found(roots, spec.data.files, "data.files", problems)
    sources = []
    for index, source in enumerate(spec.data.sources):
        try:
            source = with_hub_files(source, roots, f"data.sources.{index}", is_tokens=spec.data.source == "tokens")
        except InvalidJobSpec as error:
            problems += error.problems
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
            problems.append(Problem(where, f"is {name!r}, but only a file name may be a pattern.", "Name the folder."))
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
            problems.append(Problem(where, f"is {name!r}, which matches no file here.", remedy))
        paths += [f"{folder}/{one}" for one in fitting]
    if len(paths) > FILES_MAX:
        problems.append(Problem(field, f"has {len(paths):,} files, but may have {FILES_MAX:,}.", "Join files."))
    return tuple(paths)


def _fitting(roots: AllowedRoots, folder: str, pattern: str) -> list[str]:
    """Return the names of a folder's files that match a pattern. A leading dot matches only a leading dot."""
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
    """Return whether it counts as a file. A circular link does, so that only that one is refused later."""
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
            "Remove them here, or from files.",
        )
        for index, (_, held_out) in enumerate(sources)
        if (both := sorted(trained & set(held_out)))
    ]


LOOK_S = 10.0
LOOKED_INTO_MAX, STORE_FILES_MAX = 64, 4
"""How many files of a field are opened, on this machine and in stores: the first, the last, and some between."""

_store_threads = BoundedThreads("data files in stores", 8)


@dataclass(frozen=True, slots=True)
class _Field:
    """The files of one field, with the field that has their text; or the vocabulary of tokens, 0 if it is unknown."""

    path: str
    files: Sequence[str]
    text_field: str
    text_field_path: str
    vocabulary_size: int | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """The result of checking a file: its size if known, and a problem if there is one."""

    size: int | None
    problem: Problem | None = None
    is_missing: bool = False


def data_problems(spec: JobSpec, roots: AllowedRoots, limit_s: float = LOOK_S) -> tuple[Problem, ...]:
    """Return the problems of the files in ``spec.data``, the most telling ones of each field. Raises nothing.

    Patterns must have been replaced before (``with_found_files``).
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
    """Return the specification with the sizes of its sources, as far as they can be found out in time, for ``advice``.

    Files in a store are not counted: asking for each would take too long.
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
    """Checks the files of one field within the deadline."""

    def __init__(self, spec: JobSpec, roots: AllowedRoots, field: _Field, deadline: float) -> None:
        self._field, self._roots, self._deadline = field, roots, deadline
        self._unreadable_max, self._data = spec.data.unreadable_max, spec.data
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
        """Check that the other files exist."""
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
            message = f"has {len(others) - SHOWN_MAX:,} more unusable files."
            yield Problem(self._field.path, message, "Check them like the first ones.")
        if (
            not others
            and len(self.seen) == len(self._field.files)
            and not any(seen.size is None or seen.size for seen in self.seen.values())
        ):
            yield Problem(self._field.path, "has only empty files.", "Name other files.")

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
            if self._field.vocabulary_size is not None:
                return _Seen(size, self._token_problem(number, path, self._field.vocabulary_size))
            return _Seen(size, self._content_problem(number, path) if content and size else None)
        except OutsideRoots:
            return _Seen(None)  # reported elsewhere
        except ConfigurationError:
            if "://" in path:
                return _Seen(None)  # its library is missing here, or cannot reach it
            message = f"is {shown(path)}, which is not a regular file."
            return _Seen(None, self._problem(number, message, "Name the files of a folder: FOLDER/*.jsonl."))
        except FileNotFoundError:
            if "://" in path:
                return _Seen(
                    None, self._problem(number, f"is {shown(path)}, which does not exist.", "Correct the URL.")
                )
            message = f"is {shown(path)}, which does not exist here."
            remedy = "Correct the path. The file must exist here, where the head measures, and on every island's node."
            return _Seen(None, self._problem(number, message, remedy), is_missing=True)
        except OSError as error:
            if "://" in path:
                return _Seen(None)
            message = f"is {shown(path)}, which cannot be read here ({error.strerror or first_line(error)})."
            return _Seen(None, self._problem(number, message, "Correct the path, or the file's permissions."))
        except Exception:  # whatever a store's library raises; islands may reach it
            return _Seen(None)

    def _token_problem(self, number: int, path: str, vocabulary_size: int) -> Problem | None:
        """Return why a file of tokens is not read. Its index is found beside it. Raises OSError if neither is here."""
        with open_data(self._roots, path) as file:
            if token_files.is_table(path):
                return self._token_table_problem(number, path, file, vocabulary_size)
            try:
                if token_files.has_index(path):
                    try:
                        with open_data(self._roots, token_files.index_of(path)) as index:
                            layout = token_files.megatron_layout(file, index)
                    except FileNotFoundError:
                        message = (
                            f"is {shown(path)}, whose index {shown(token_files.index_of(path))} does not exist here."
                        )
                        return self._problem(number, message, "Copy the .idx beside the .bin.")
                else:
                    layout = token_files.array_layout(file)
                if vocabulary_size and (place_and_token := token_files.beyond(file, layout, vocabulary_size)):
                    raise token_files.too_large(*place_and_token, vocabulary_size)
            except NotTokens as error:
                return self._problem(number, f"is {shown(path)}, but this file {error.message}.", error.remedy)
        return None

    def _token_table_problem(self, number: int, path: str, file: IO[bytes], vocabulary_size: int) -> Problem | None:
        try:
            if (problem := self._column_problem(path, parquet_bytes.columns(file))) is not None:
                return problem
            refused = token_files.table_problem(file, self._field.text_field, vocabulary_size, self._tokenizer_digest)
        except ValueError as error:
            refused = NotTokens(f"cannot be read as Parquet: {error}", "Copy or write it again.")
        if refused is None:
            return None
        return self._problem(number, f"is {shown(path)}, but this file {refused.message}.", refused.remedy)

    @cached_property
    def _tokenizer_digest(self) -> str | None:
        with suppress(AtollError, OSError):  # reported elsewhere
            data = self._data
            return None if data.tokenizer == BYTES else tokenizer_file.read(self._roots, data.tokenizer).digest
        return None

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
            message = f"is {self._field.text_field!r}, but {shown(path)} {seen.message}."
            return Problem(self._field.text_field_path, message, "Set it to the field that has the text.")
        if isinstance(seen, Misfit):
            return self._problem(number, f"is {shown(path)}, but this file {seen.message}.", seen.remedy)
        if isinstance(seen, Head):
            return self._unreadable(number, seen.unreadable(self._field.text_field, self._rendered))
        return None

    @cached_property
    def _template(self) -> ChatTemplate | None:
        data = self._data
        file = tokenizer_file.read(self._roots, data.tokenizer)
        return None if file.is_sentencepiece else chat_template.load(self._roots, data.template, data.tokenizer, file)

    def _rendered(self, text: bytes) -> None:
        """Raise NotText for a conversation that its template refuses, or that has none."""
        if not self._data.has_conversations:
            return
        own = json.loads(text)
        conversations = [one for one in (own, own.get("chosen"), own.get("rejected")) if one and "messages" in one]
        if not conversations:
            return
        try:
            template = None if self._data.tokenizer == BYTES else self._template
        except AtollError:
            return  # reported elsewhere
        if template is None:
            problem = chat_template.missing(self._data.template, self._data.tokenizer)
            raise NotText(f"has messages, but {problem.path} {problem.message} {problem.remedy.rstrip('.')}")
        for conversation in conversations:
            template.checked(conversation)

    def _parquet_problem(self, number: int, path: str, file: IO[bytes]) -> Problem | None:
        columns, wanted = parquet_bytes.columns(file), self._field.text_field
        if wanted in CONVERSATION_KINDS:
            has = {column.name for column in columns}
            is_chat = wanted == CONVERSATION
            if ("messages" in has or {"prompt", "completion"} <= has) if is_chat else {"chosen", "rejected"} <= has:
                return self._unreadable(number, self._row_problems(path, file))
            lacks = (
                "no column 'messages', nor 'prompt' and 'completion'"
                if is_chat
                else "no columns 'chosen' and 'rejected'"
            )
            named = ", ".join(repr(column.name[:40]) for column in columns[:20])
            message = f"is {shown(path)}, which has {lacks}; it has {named}."
            remedy = f"Name a file of {'conversations' if is_chat else 'pairs'}, or change data.format."
            return self._problem(number, message, remedy)
        return self._column_problem(path, columns)

    def _row_problems(self, path: str, file: IO[bytes]) -> list[str]:
        """Return why some of the first rows of a Parquet file are no conversations that can be learned."""
        from orchestrator.text.parquet_rows import Rows, TooLarge  # brings NumPy and pyarrow, which few commands need

        own, of = self._field.text_field, CONVERSATION_KINDS[self._field.text_field][1]
        reasons = list[str]()
        try:
            rows = Rows(file, own, look_at_pages="://" not in path)
            for row, record in rows.records(0, min(rows.row_count, ROWS_LOOKED_AT)):
                try:
                    if (conversation := of(record())) is not None:
                        self._rendered(conversation)
                except NotText as error:
                    reasons.append(f"row {row:,} {error}")
        except TooLarge as error:
            reasons.append(f"it cannot be read: {error}")
        except NotImplementedError as error:  # of pyarrow
            reasons.append(f"it cannot be read: {first_line(error)}")
        return reasons

    def _column_problem(self, path: str, columns: Sequence[Column]) -> Problem | None:
        """Return why a Parquet file has no column of this field's name with the texts, or with the tokens, of the job."""
        wanted, is_tokens = self._field.text_field, self._field.vocabulary_size is not None
        what = "lists of integers" if is_tokens else "text"
        fitting = [column for column in columns if column.name == wanted]
        if len(fitting) == 1 and (fitting[0].is_tokens if is_tokens else fitting[0].is_text):
            return None
        named = ", ".join(repr(column.name[:40]) for column in columns[:20])
        if not fitting:
            message = f"is {wanted!r}, but {shown(path)} has no such column; it has {named}."
        elif len(fitting) > 1:
            message = f"is {wanted!r}, but {shown(path)} has {len(fitting)} columns of that name."
        else:
            message = f"is {wanted!r}, but {shown(path)} has {fitting[0].what} in that column, not {what}."
        remedy = f"Set it to the column that has the {'tokens' if is_tokens else 'text'}."
        return Problem(self._field.text_field_path, message, remedy)

    def _unreadable(self, number: int, reasons: Sequence[str]) -> Problem | None:
        if len(reasons) <= self._unreadable_max:
            return None
        path = self._field.files[number]
        message = (
            f"is {shown(path)}, of which {len(reasons):,} of the first records cannot be read, but "
            f"data.unreadable_max is {self._unreadable_max:,}: {reasons[0]}."
        )
        return self._problem(number, message, "Correct the file, leave it out, or raise the limit.")

    def _problem(self, number: int, message: str, remedy: str) -> Problem:
        return Problem(f"{self._field.path}.{number}", message, remedy)


def _fields(spec: JobSpec) -> Iterator[_Field]:
    data = spec.data
    if data.files:
        yield _Field("data.files", data.files, data.record_field(data.text_field), "data.text_field")
    for index, source in enumerate(data.sources):
        for name, files in (("files", source.files), ("held_out", source.held_out)):
            if files:
                where = f"data.sources.{index}"
                if data.source == "tokens":
                    size = spec.vocabulary_size or 0
                    yield _Field(f"{where}.{name}", files, source.token_field, f"{where}.token_field", size)
                else:
                    field = data.record_field(source.text_field)
                    yield _Field(f"{where}.{name}", files, field, f"{where}.text_field")


def _spread(numbers: Sequence[int], most: int) -> list[int]:
    """Return at most so many of the numbers, evenly spread, with the first and the last."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[at * (len(numbers) - 1) // (most - 1)] for at in range(most)]
