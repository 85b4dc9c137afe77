"""Generates the parts of the pages about formats: run folder, tape, wire, and the index of streamed text.

These pages are prose by hand around facts of the code: names, fields, sizes, and bytes that the code has written for the
page. Such a part is between ``<!-- made: NAME -->`` and ``<!-- end -->``. ``docs.generate`` writes the pages with the
others. Explanations belong into the prose.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from docs.generate_service import prose
from orchestrator.accounting.goodput import Goodput
from orchestrator.core import commands, events
from orchestrator.core.effects import ResolveCommand
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import (
    CommandId,
    Epoch,
    FragmentId,
    IslandId,
    IslandPlan,
    JobPolicy,
    NodeGroupId,
    Version,
)
from orchestrator.parameters import journal, tensors, wire_format
from orchestrator.parameters.codec.registry import CODEC_NAMES, codec
from orchestrator.parameters.journal import Facts
from orchestrator.system.run_folder import FILES
from orchestrator.tape import snapshot
from orchestrator.tape.schema import (
    Digest,
    Footer,
    Header,
    Mark,
    Record,
    encode_footer,
    encode_header,
    encode_record,
    with_checksum,
)
from orchestrator.text import data_index
from orchestrator.text.data_index import DataIndex, IndexedSource

PART = re.compile(r"(<!-- made: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEX_MAX = 12
"""Up to this many bytes are shown as digits; of more, only the first."""
VALUES = 1 << 20
"""The size of a tensor by which the bits per value of a codec are counted: many blocks."""


def parts() -> dict[str, Mapping[str, Callable[[], Iterable[str]]]]:
    """Return, by page, the functions that yield the lines of its parts."""
    return {
        "run-dir.md": {"files": run_files, "durability": durability},
        "tape.md": {"lines": tape_lines, "policy": policy_fields, "snapshot": snapshot_lines},
        "wire.md": {"payload": payload_bytes, "codecs": codec_bits, "entry": entry_bytes, "entry-header": entry_fields},
        "data-index.md": {"bytes": index_bytes},
    }


def filled(page: str, made: Mapping[str, Callable[[], Iterable[str]]]) -> str:
    """Return the page with its parts generated anew. Raises ValueError unless its places and the parts match."""
    places = [name for _, name, _ in PART.findall(page)]
    if sorted(places) != sorted(made):
        raise ValueError(f"the page has places for {sorted(places)}, but the generated parts are {sorted(made)}")
    return PART.sub(lambda place: place[1] + "\n".join(made[place[2]]()) + "\n" + place[3], page)


# ── the run's folder ──────────────────────────────────────────────────────────────────────────────────────────────────


def run_files() -> Iterator[str]:
    """Yield the tree of files, each with its contents."""
    shown: set[PurePosixPath] = set()
    rows = [("RUN_DIR/", "")]
    for file in FILES:
        path = PurePosixPath(file.path)
        for folder in reversed(path.parents):
            if folder.name and folder not in shown:
                shown.add(folder)
                rows.append((f"{'  ' * len(folder.parts)}{folder.name}/", ""))
        rows.append((f"{'  ' * len(path.parts)}{path.name}", file.holds))
    width = max(len(name) for name, holds in rows if holds)
    yield from ["```", *(f"{name:{width}}  {holds}".rstrip() for name, holds in rows), "```"]


def durability() -> Iterator[str]:
    yield from ["| file | written | durable |", "|---|---|---|"]
    yield from (f"| `{file.path}` | {file.written} | {file.durable} |" for file in FILES)


# ── the tape ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def example_policy() -> JobPolicy:
    plan = IslandPlan(IslandId("asia"), NodeGroupId("asia"), "asia", 1)
    return JobPolicy((plan,), 24, 24, 2, 1, 0.8, 16.0, 0, 1000, 64, 10.0, 1.0, 60.0, 5, 30.0, 0.9)


def example_records() -> list[Record]:
    """Return a request that the core refuses: an event with an effect."""
    core, ask = Synchroniser(example_policy()), commands.Kill(IslandId("europe"))
    asked = events.CommandRequested(0.5, CommandId("c-1"), "rosa", ask)
    effects = tuple(effect for effect in core.handle(asked) if isinstance(effect, ResolveCommand))
    return [Record(1, asked, effects)]


def tape_lines() -> Iterator[str]:
    """Yield a whole tape, except the policy, which has a list of its own."""
    digest, header = Digest(), Header("demo-x7k2p", example_policy(), 1795292312.4)
    plain = [encode_header(header), *map(encode_record, example_records())]
    for line in plain:
        digest.add(line)
    lines = [*map(with_checksum, plain), encode_footer(Footer(len(plain) - 1, digest.hex()))]
    policy = json.dumps(json.loads(lines[0])["policy"], separators=(",", ":"), ensure_ascii=False)
    yield from ["```json", lines[0].replace(policy, "{…}"), *lines[1:], "```"]


def policy_fields() -> Iterator[str]:
    told = dict(policy_words())
    for field in dataclasses.fields(JobPolicy):
        yield from prose(f"- `{field.name}`: `{field.type}`{told.get(field.name, '')}", hanging="  ")


def policy_words() -> Iterator[tuple[str, str]]:
    """Yield each field with its line in the table of the docstring."""
    for name, words in re.findall(r"^(\w+)  +(\S.*)$", inspect.cleandoc(JobPolicy.__doc__ or ""), re.MULTILINE):
        yield name, f"; {words.replace('``', '`')}"


def snapshot_lines() -> Iterator[str]:
    """Yield the first line of a snapshot, without the name and digest of the build, which change with every build."""
    folds = (Goodput(example_policy()),)
    raw = snapshot.encode(snapshot.Snapshot(Mark(17, 4211, "…"), 12.5, Synchroniser(example_policy()), folds), "…")
    line = json.loads(raw.partition(b"\n")[0])
    yield from ["```json", json.dumps(line | {"digest": "…"}, ensure_ascii=False), "```"]


# ── the wire ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def example_payload() -> bytes:
    return bytes(wire_format.encode({"norm": np.array([0.5, -1.0], np.float32)}, "float32", Version(41)))


def payload_bytes() -> Iterator[str]:
    payload = example_payload()
    header = int.from_bytes(payload[8:12], "little")
    data = int.from_bytes(payload[12:20], "little")
    sizes = [(8, "magic"), (4, "header bytes"), (8, "data bytes"), (header, "header"), (data, "data"), (4, "checksum")]
    yield from anatomy(payload, sizes)


def codec_bits() -> Iterator[str]:
    yield from ["| codec | bits a value | values coded together |", "|---|---|---|"]
    for name in CODEC_NAMES:
        known = codec(name)
        yield f"| `{name}` | {8 * known.data_bytes(VALUES) / VALUES:g} | {known.unit_values} |"


def entry_bytes() -> Iterator[str]:
    theta = {"norm": np.array([0.5, -1.0], np.float32)}
    content = wire_format.parse(wire_format.encode(theta, "float32", Version(41)))
    facts = Facts(
        FragmentId(3), Version(42), 168, Epoch(1), tensors.digest(theta), "0" * 32, (("asia", 1.0),), merge_seconds=0.25
    )
    written = b"".join(map(bytes, journal.encode(facts, (content,))))
    sizes = journal.sizes_of(written)
    prefix = [(8, "magic"), (4, "header bytes"), (8, "body bytes"), (4, "checksum of all before, and of the header")]
    yield from anatomy(
        written, [*prefix, (sizes.header, "header"), (sizes.body, "body: a payload of the one contributor")]
    )


def entry_fields() -> Iterator[str]:
    for field in dataclasses.fields(Facts):
        yield f"- `{field.name}`: `{field.type}`"


# ── the index of streamed text ────────────────────────────────────────────────────────────────────────────────────────


def index_bytes() -> Iterator[str]:
    """Yield the bytes of an index of a source with two pieces, whose one document may be held out by itself."""
    numbers = data_index.numbers([1200, 800], [3, 2], [(1, 400, 0x0123456789ABCDEF)])
    files = (("web-00.jsonl", 8_192),)
    source = IndexedSource("web", "text", files, (), "0" * 32, piece_count=2, listed_count=1, numbers=numbers)
    content = DataIndex("bytes", 0.01, (source,)).content()
    header = content.index(b"\n", len(data_index.MAGIC)) + 1 - len(data_index.MAGIC)
    columns = [(8, "tokens of each piece"), (8, "its documents"), (4, "the piece of each listed document")]
    columns += [(4, "its tokens"), (8, "its digest"), (data_index.DIGEST_BYTES, "digest of everything before")]
    yield from anatomy(content, [(len(data_index.MAGIC), "magic"), (header, "header"), *columns])


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def anatomy(data: bytes, sizes: Sequence[tuple[int, str]]) -> Iterator[str]:
    """Yield each part of the bytes: offset, size, name, and content (as text if it is text)."""
    assert sum(size for size, _ in sizes) == len(data)
    width = max(len(name) for _, name in sizes)
    yield "```"
    at = 0
    for size, name in sizes:
        yield f"{at:5} {size:5}  {name:{width}}  {as_text(data[at : at + size])}".rstrip()
        at += size
    yield "```"


def as_text(data: bytes) -> str:
    text = data.decode(errors="replace")
    if len(data) > 4 and text.replace("\n", "").replace("…", "").isascii() and text.replace("\n", "").isprintable():
        return json.dumps(text, ensure_ascii=False) if text.endswith("\n") else text.rstrip()
    return data[:HEX_MAX].hex(" ") + (" …" if len(data) > HEX_MAX else "")


def pages(folder: Path) -> dict[Path, str]:
    """Return each page of ``folder`` with its parts generated anew and its prose unchanged."""
    return {folder / name: filled((folder / name).read_text(), made) for name, made in parts().items()}
