"""Create the index of a data set: count the tokens of every piece of its files, once. `atoll data index` runs this module.

   python -m learners.data_indexing --output FILE [--processes N] [--json] < the data section of a specification, as JSON

Counts are appended to FILE.partial piece by piece, so that the same command continues where it was stopped:

   {"of": "<digest of everything that the index depends on>"}\\n
   {"source": 0, "piece": 17, "tokens": …, …}\\n        a PieceCount; anything after the last complete line is cut off

The same files give the same index, byte for byte. Each job decides how many sequences there are and which documents are held
out one by one (those of small sources and of reserved files): the index lists the tokens of all candidates.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from learners import tokenizer
from learners.held_out import HeldOut, digest
from learners.streaming import counting
from learners.streaming.counting import PieceCount, Task
from learners.streaming.documents import Reader, Unreadable, place_in
from learners.streaming.files import HELD_OUT, TRAINING, Files, counted, located, rules
from orchestrator.errors import AtollError, ConfigurationError, InfrastructureError, UnreadableData
from orchestrator.specification.data_sources import SourceSection
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import EVERYTHING
from orchestrator.text import data_index
from orchestrator.text.data_index import DataIndex, IndexedSource
from orchestrator.text.file_kinds import kind_of

PROGRESS_S = 1.0
INTERRUPTED = 130
ANY_NAME = "files"
"""The name that a source without one has while its index is made; it is not written down."""


@dataclass(frozen=True, slots=True)
class Source:
    """A source of the section, with its files and its reserved files."""

    name: str | None
    reader: Reader
    files: Files
    reserved: Files | None

    def empty(self) -> IndexedSource:
        """Return an index entry for these files without counts."""
        held_out = () if self.reserved is None else _named(self.reserved)
        field, cut_by = self.reader.text_field, rules(self.files.paths)
        return IndexedSource(self.name, field, _named(self.files), held_out, cut_by, len(self.files.pieces), 0, b"")


class Counts:
    """The counts so far, of each source and piece."""

    def __init__(self, sources: Sequence[Source], unreadable: Unreadable) -> None:
        self.sources, self._unreadable = sources, unreadable
        self.pieces: list[dict[int, PieceCount]] = [{} for _ in sources]
        self.token_count = self.document_count = self.text_bytes = self.stored_bytes = self.cut_count = 0

    def add(self, count: PieceCount) -> None:
        """Add a count. Raises UnreadableData if more cannot be read than the job allows."""
        files = self.sources[count.source].files
        path = files.paths[files.pieces.file[count.piece]]
        for place, reason in count.unreadable:
            self._unreadable.add(path, place, place_in(path, place), reason)
        self.pieces[count.source][count.piece] = count
        self.token_count += count.tokens
        self.document_count += count.documents
        self.text_bytes += count.text_bytes
        self.stored_bytes += int(files.pieces.size[count.piece])
        self.cut_count += count.is_cut

    def holds(self, count: PieceCount) -> bool:
        """Return whether this is a piece of the sources."""
        return 0 <= count.source < len(self.sources) and 0 <= count.piece < len(self.sources[count.source].files.pieces)

    @property
    def piece_count(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def unreadable_count(self) -> int:
        return len(self._unreadable.reasons)

    def missing(self) -> list[Task]:
        """Return the pieces that are not yet counted, compressed files first, because each of them is one task."""
        work = []
        for number, source in enumerate(self.sources):
            pieces, wanted = source.files.pieces, dict[int, list[int]]()
            for piece in range(len(pieces)):
                if piece not in self.pieces[number]:
                    wanted.setdefault(int(pieces.file[piece]), []).append(piece)
            for file, absent in wanted.items():
                first, count = absent[0] - int(pieces.number[absent[0]]), int(pieces.count[absent[0]])
                path, size = source.files.paths[file], source.files.sizes[file]
                numbers = [piece - first for piece in absent]
                work += counting.tasks(number, path, size, first, numbers, count, source.reader.text_field)
        return sorted(work, key=lambda task: (not kind_of(task.path).is_compressed, -task.size))

    def sections(self) -> Iterator[IndexedSource]:
        """Yield the sources of the index, once everything is counted."""
        for source, pieces in zip(self.sources, self.pieces, strict=True):
            ordered = [pieces[piece] for piece in range(len(pieces))]
            listed = [(count.piece, tokens, number) for count in ordered for number, tokens in count.listed]
            tokens, documents = [count.tokens for count in ordered], [count.documents for count in ordered]
            numbers = data_index.numbers(tokens, documents, listed)
            yield replace(source.empty(), listed_count=len(listed), numbers=numbers)


def make(document: Mapping[str, Any], output: Path, process_count: int, progress: bool) -> Counts | None:
    """Write the index of this ``data`` section to ``output``. Returns None if it exists already.

    A source whose name is None is of any job's source: the index was asked for by files.

    Raises ConfigurationError for what cannot be read, UnreadableData above ``unreadable_max``, InfrastructureError, OSError.
    """
    _require_writable(output)
    names = [source["name"] for source in document["sources"]]
    named = [{**source, "name": source["name"] or ANY_NAME} for source in document["sources"]]
    section = DataSection.model_validate({**document, "sources": named})
    tokens = tokenizer.load(section, EVERYTHING)
    unreadable = Unreadable(section.unreadable_max)
    sources = [_source(name, one, unreadable) for name, one in zip(names, section.sources, strict=True)]
    held_out = HeldOut.of_ratio(data_index.ratio_held_out(section))
    empty = DataIndex(tokens.digest, data_index.ratio_held_out(section), tuple(source.empty() for source in sources))
    if _is_of(output, empty):
        return None
    counts = Counts(sources, unreadable)
    with _partial(output, empty, counts, progress) as file:
        listed = _listed(sources, progress)
        with closing(counting.counts(counts.missing(), section, held_out, listed, process_count)) as arriving:
            for count in _shown(arriving, counts, progress):
                counts.add(count)
                file.write(json.dumps(asdict(count)).encode() + b"\n")
        index = replace(empty, sources=tuple(counts.sections()))
        draft = output.with_name(f"{output.name}.draft")
        with open(draft, "wb") as written:
            written.write(index.content())
            written.flush()
            os.fsync(written.fileno())
        draft.replace(output)
        _partial_of(output).unlink()
    return counts


# ── the partial file ──────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _partial(output: Path, empty: DataIndex, counts: Counts, progress: bool) -> Iterator[IO[bytes]]:
    """Open the partial file after its last complete line, with its content added to ``counts``.

    Raises InfrastructureError while another process writes it.
    """
    first = json.dumps({"of": blake2b(empty.content(), digest_size=16).hexdigest()}).encode() + b"\n"
    with open(_partial_of(output), "a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            detail = f"Another process is writing {_partial_of(output)} to create this index."
            raise InfrastructureError(detail=detail, remedy="Wait until it ends, or stop it.") from error
        file.seek(0)
        whole = _read_back(file, first, counts)
        if not whole:
            if os.fstat(file.fileno()).st_size:
                print(f"{_partial_of(output)} belongs to other files or rules; starting again", file=sys.stderr)
            file.truncate(0)
            file.write(first)
        else:
            file.truncate(whole)
            if progress and counts.piece_count:
                print(f"continuing after {counts.piece_count:,} pieces in {_partial_of(output)}", file=sys.stderr)
        yield file


def _read_back(file: IO[bytes], first: bytes, counts: Counts) -> int:
    """Add the file's counts and return the bytes up to the end of its last complete line; 0 for a file of another index."""
    with os.fdopen(os.dup(file.fileno()), "rb") as lines:
        if lines.readline() != first:
            return 0
        whole = len(first)
        for line in lines:
            count = _piece_count(line)
            if count is None or not counts.holds(count):
                break
            counts.add(count)
            whole += len(line)
    return whole


def _piece_count(line: bytes) -> PieceCount | None:
    if not line.endswith(b"\n"):
        return None
    try:
        fields = json.loads(line)
        listed = tuple((int(number), int(length)) for number, length in fields.pop("listed"))
        unreadable = tuple((int(place), str(reason)) for place, reason in fields.pop("unreadable"))
        names = ("source", "piece", "tokens", "documents", "text_bytes")
        source, piece, tokens, documents, text_bytes = (int(fields[name]) for name in names)
        return PieceCount(source, piece, tokens, documents, text_bytes, listed, unreadable, bool(fields["is_cut"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_of(output: Path, empty: DataIndex) -> bool:
    """Return whether the file is an index of these files and rules."""
    try:
        index, _ = data_index.read(EVERYTHING, os.path.abspath(output))
    except ConfigurationError:
        return False
    bare = (replace(source, listed_count=0, numbers=b"") for source in index.sources)
    return replace(index, sources=tuple(bare)) == empty


def _require_writable(output: Path) -> None:
    """Refuse to overwrite anything but an index, before hours of counting."""
    if output.is_dir():
        raise ConfigurationError(detail=f"--output {output} is a folder. Name a file in it.")
    if output.exists():
        with open(output, "rb") as file:
            if file.read(len(data_index.MAGIC)) not in (data_index.MAGIC, b""):
                raise ConfigurationError(
                    detail=f"--output {output} exists and is not an index. Remove it, or name another file."
                )


def _partial_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.partial")


# ── counting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _source(name: str | None, section: SourceSection, unreadable: Unreadable) -> Source:
    shown, reserved = name or "these files", section.held_out
    files = located(EVERYTHING, section.files, shown, TRAINING)
    held_out = located(EVERYTHING, reserved, shown, HELD_OUT) if reserved else None
    return Source(name, Reader(EVERYTHING, section.text_field, unreadable), files, held_out)


def _named(files: Files) -> tuple[tuple[str, int], ...]:
    return tuple((path.rpartition("/")[2], size) for path, size in zip(files.paths, files.sizes, strict=True))


def _listed(sources: Sequence[Source], progress: bool) -> frozenset[int]:
    """Return the digests of all documents that a job may hold out one by one: of small sources and of reserved files."""
    digests = set[int]()
    for source in sources:
        files = source.reserved if source.reserved is not None else source.files if source.files.is_small else None
        if files is None:
            continue
        for number, path in enumerate(files.paths):
            count = int((files.pieces.file == number).sum())
            for _, documents in source.reader.pieces(path, count, files.sizes[number]):
                digests.update(map(digest, documents))
        if progress:
            print(
                f"{source.name or 'the files'}: {len(digests):,} documents may be held out one by one", file=sys.stderr
            )
    return frozenset(digests)


def _shown(arriving: Iterable[PieceCount], counts: Counts, progress: bool) -> Iterator[PieceCount]:
    """Pass the counts on, and print a line of progress each second."""
    total = sum(len(source.files.pieces) for source in counts.sources)
    stored = sum(sum(source.files.sizes) for source in counts.sources)
    began = shown_at = time.monotonic()
    tokens_before, bytes_before = counts.token_count, counts.stored_bytes
    for count in arriving:
        yield count
        now = time.monotonic()
        if progress and now - shown_at >= PROGRESS_S:
            shown_at = now
            rate, byte_rate = (
                (after - before) / (now - began)
                for after, before in ((counts.token_count, tokens_before), (counts.stored_bytes, bytes_before))
            )
            left = (stored - counts.stored_bytes) / byte_rate if byte_rate else 0.0
            print(
                f"{counts.piece_count:,} of {total:,} pieces, {counts.token_count:,} tokens, {rate:,.0f} tokens/s, "
                f"{left:,.0f} s left",
                file=sys.stderr,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m learners.data_indexing")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if options.output.is_absolute() and _is_working_folder_gone():
        os.chdir("/")  # processes cannot be started in a folder that was removed
    try:
        counts = make(json.load(sys.stdin), options.output, options.processes, progress=not options.json)
        index, name = data_index.read(EVERYTHING, os.path.abspath(options.output))
    except KeyboardInterrupt:
        print(f"atoll: stopped. The same command continues from {_partial_of(options.output)}.", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        print(f"atoll: {options.output} cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    except UnreadableData as error:
        remedy = f"leave it out, or index a job's .yaml file with a data.unreadable_max above {error.most:,}"
        print(f"atoll: {error.detail} Correct the file, {remedy}.", file=sys.stderr)
        return 2
    except ConfigurationError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return 2
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return 1
    print(_summary(options, index, name, counts))
    return 0


def _is_working_folder_gone() -> bool:
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def _summary(options: argparse.Namespace, index: DataIndex, name: str, counts: Counts | None) -> str:
    sources = [counted(source, data_index.count_around(index.tokenizer)) for source in index.sources]
    facts = {
        "output": str(options.output),
        "digest": name,
        "made": counts is not None,
        "tokens": sum(int(source.tokens.sum()) for source in sources),
        "documents": sum(int(source.documents.sum()) for source in sources),
        "pieces": sum(source.piece_count for source in index.sources),
        "files": sum(len(source.files) for source in index.sources),
        "held_out_ratio": index.held_out_ratio,
    }
    if counts is not None:
        facts |= {"unreadable": counts.unreadable_count, "cut_pieces": counts.cut_count}
    if options.json:
        return json.dumps(facts)
    text = (
        f"{options.output}: {facts['tokens']:,} tokens of {facts['documents']:,} documents, in {facts['pieces']:,} pieces "
        f"of {facts['files']:,} files; without the {index.held_out_ratio:g} of them that are held out"
    )
    if counts is None:
        return f"{text}. The file existed already and is up to date."
    if counts.unreadable_count or counts.cut_count:
        text += (
            f"; {counts.unreadable_count:,} records and pieces could not be read, {counts.cut_count:,} pieces were cut"
        )
    return f"{text}."


if __name__ == "__main__":
    sys.exit(main())
