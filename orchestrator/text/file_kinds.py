"""What a data file is: one table, by its name and its first bytes together.

    the name (without regard to case)              the file
    .jsonl .json .ndjson .jsonlines                JSON Lines: one object a line
    .parquet .parq .pq                             Parquet
    .arrayrecord .array_record                     ArrayRecord: a record is a text
    .bz2 .zip .csv .pdf … (``_REFUSED``)           refused, with what to make of it
    anything else                                  text, UTF-8
    … behind it .gz .gzip .zst .zstd               compressed; JSON Lines and text alone

The name decides how a file is read, so that every node decides the same before opening it. The content must agree: ``look``
refuses a file whose first bytes are of another kind, so that compressed, binary and JSON bytes are never read as text.
Streamed sources, ``source: files``, held-out text, `atoll data index`, `atoll tokenizer train` and the service at submission
use this table.

``text_records`` reads single records.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Any

from orchestrator.text.text_records import CONVERSATION_KINDS, NAME_LENGTH_MAX, NotText, object_of, plain_line, text_of

HEAD_BYTES = 256 << 10
"""How many bytes of a file are checked, after decompression."""
HEAD_LINES = 100
ZSTD_WINDOW_MAX = 128 << 20
"""The memory that a zstd frame may need: `zstd --long=27`. Decoders refuse more by default as well."""
RECORDS_MIN, RECORDS_RATIO_MIN = 3, 0.9
"""So many lines that are objects are records, whatever their fields are called, if so many of all first lines are."""
CONTROL_RATIO_MAX = 0.01
"""Of bytes of text. A line with a NUL byte cannot be read in any case."""


class Format(StrEnum):
    TEXT = "text"
    JSON_LINES = "JSON Lines"
    PARQUET = "Parquet"
    ARRAY_RECORD = "ArrayRecord"


class Compression(StrEnum):
    NONE = ""
    GZIP = "gzip"
    ZSTD = "zstd"


@dataclass(frozen=True, slots=True)
class FileKind:
    """The format and compression of a file. Files of one kind have about as many tokens per stored byte."""

    format: Format
    compression: Compression

    @property
    def is_compressed(self) -> bool:
        return self.compression is not Compression.NONE

    @property
    def has_lines(self) -> bool:
        return self.format in (Format.TEXT, Format.JSON_LINES)

    def __str__(self) -> str:
        return f"{self.format}, compressed by {self.compression}" if self.is_compressed else str(self.format)


@dataclass(frozen=True, slots=True)
class Misfit:
    """The reason why a file is not read, as a clause about it, and what to do.

    ``is_kind``: its kind is wrong or unsupported; otherwise only its text was not found.
    """

    message: str
    remedy: str
    is_kind: bool = True

    def __str__(self) -> str:
        return f"it {self.message}. {self.remedy}"


_COMPRESSIONS = {
    ".gz": Compression.GZIP,
    ".gzip": Compression.GZIP,
    ".zst": Compression.ZSTD,
    ".zstd": Compression.ZSTD,
}
_FORMATS = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson", ".jsonlines"), Format.JSON_LINES),
    **dict.fromkeys((".parquet", ".parq", ".pq"), Format.PARQUET),
    **dict.fromkeys((".arrayrecord", ".array_record"), Format.ARRAY_RECORD),
}
_ANEW = "Decompress it, or compress it by gzip (.gz) or zstd (.zst)."
_UNPACK = "Unpack it, and name the files in it."
_CONVERT = "Make JSON Lines (.jsonl, also .gz and .zst) or Parquet of its text."
_TABLE = "Make JSON Lines or Parquet of it, with the text in one field, and name that in text_field."
_REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys((".bz2", ".bzip2", ".tbz2"), ("compressed by bzip2", _ANEW)),
    **dict.fromkeys((".xz", ".lzma", ".txz"), ("compressed by xz", _ANEW)),
    **dict.fromkeys((".lz4", ".lzo", ".lz", ".z", ".zz", ".zlib", ".deflate"), ("compressed otherwise", _ANEW)),
    **dict.fromkeys((".br", ".brotli"), ("compressed by Brotli", _ANEW)),
    **dict.fromkeys((".snappy", ".sz", ".snz"), ("compressed by Snappy", _ANEW)),
    **dict.fromkeys((".zip", ".7z", ".rar", ".tar", ".tgz", ".tzst", ".jar", ".cpio"), ("an archive", _UNPACK)),
    **dict.fromkeys((".csv", ".tsv", ".psv"), ("a table", _TABLE)),
    **dict.fromkeys((".xls", ".xlsx", ".ods"), ("a spreadsheet", _TABLE)),
    **dict.fromkeys(
        (".arrow", ".feather", ".orc", ".avro", ".tfrecord", ".tfrecords", ".riegeli", ".lance", ".mdb", ".lmdb"),
        ("records of another format", _CONVERT),
    ),
    **dict.fromkeys((".warc", ".wet", ".wat", ".arc"), ("a web archive (headers between its texts)", _CONVERT)),
    **dict.fromkeys((".npy", ".bin", ".idx"), ("numbers", "If they are tokens, set data.source to tokens.")),
    **dict.fromkeys((".npz", ".h5", ".hdf5", ".mat", ".zarr"), ("numbers", _CONVERT)),
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".safetensors", ".gguf", ".onnx"), ("a model", _CONVERT)),
    **dict.fromkeys((".pkl", ".pickle", ".joblib", ".pyc", ".so", ".o", ".a", ".exe", ".dll"), ("binary", _CONVERT)),
    **dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".mobi", ".pptx"), ("a document", _CONVERT)),
    **dict.fromkeys(
        (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tiff", ".mp3", ".wav", ".flac", ".ogg", ".mp4", ".mkv"),
        ("an image or a recording", "Leave it out."),
    ),
}
"""By the ending of a name: what a file is, and what to do."""
_GZIP, _ZSTD, _PARQUET, _RECORDS = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1\x15", b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f"
_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"BZh", *_REFUSED[".bz2"]),
    (b"\xfd7zXZ\0", *_REFUSED[".xz"]),
    (b"\x04\x22\x4d\x18", "compressed by LZ4", _ANEW),
    (b"\xff\x06\0\0sNaPpY", *_REFUSED[".snappy"]),
    (b"PK\x03\x04", *_REFUSED[".zip"]),
    (b"PK\x05\x06", *_REFUSED[".zip"]),
    (b"7z\xbc\xaf\x27\x1c", *_REFUSED[".zip"]),
    (b"Rar!\x1a\x07", *_REFUSED[".zip"]),
    (b"PARE\x15", "encrypted Parquet", "Write it without encryption."),
    (b"ARROW1\0\0", *_REFUSED[".arrow"]),
    (b"FEA1\0", *_REFUSED[".arrow"]),
    (b"Obj\x01", *_REFUSED[".avro"]),
    (b"\x89HDF\r\n", *_REFUSED[".h5"]),
    (b"\x93NUMPY", *_REFUSED[".npy"]),
    (b"SQLite format 3\0", "a database", _CONVERT),
    (b"WARC/1.", *_REFUSED[".warc"]),
    (b"%PDF-", *_REFUSED[".pdf"]),
    (b"{\\rtf", *_REFUSED[".rtf"]),
    (b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS", "Fetch the file itself: git lfs pull."),
)
_BEGINNINGS = {Format.PARQUET: _PARQUET[:4], Format.ARRAY_RECORD: _RECORDS}
_BZIP2_BLOCK = b"1AY&SY"
_SKIPPABLE = tuple(bytes([0x50 + n, 0x2A, 0x4D, 0x18]) for n in range(16))
_TAR_AT, _TAR = 257, b"ustar"
_BOMS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_JSON_BEGINS = re.compile(rb'\s*(\[\s*)?\{\s*"')
_ARRAY_BEGINS = re.compile(rb'\s*\[\s*\{\s*"[^"\n]{1,100}"\s*:')
_WEB_PAGE_BEGINS = re.compile(rb"\s*<(!doctype\s+html|html)\b", re.IGNORECASE)
_ISO_2022_SHIFTS = re.compile(rb"\x1b\$(?:[@AB]|[()][A-D])")
UTF8_BOM = b"\xef\xbb\xbf"
_WHITE = frozenset(b"\a\b\t\n\v\f\r\x1b")
_CONTROLS = bytes(byte for byte in range(32) if byte not in _WHITE)


def kind_of(path: str) -> FileKind:
    """Return how a file with this name is read. A refused name (``refusal``) counts as text."""
    stem, compression = _stem_of(path)
    return FileKind(_FORMATS.get(_ending(stem), Format.TEXT), compression)


def refusal(path: str) -> Misfit | None:
    """Return the reason why no file with this name is read; None if it may be."""
    stem, compression = _stem_of(path)
    ending = _ending(stem)
    if ending in _REFUSED:
        what, remedy = _REFUSED[ending]
        return Misfit(f"is {what} by its name, which is not supported", remedy)
    kind = kind_of(path)
    if kind.format is Format.ARRAY_RECORD and "://" in path:
        message = "is ArrayRecord in a store, but these files are read from disks only"
        return Misfit(message, "Copy it to the nodes, or use parquet.")
    if kind.is_compressed and not kind.has_lines:
        remedy = (
            f"{kind.format} is compressed inside: write it with a codec, and name it without {compression}'s ending."
        )
        return Misfit(f"is {kind.format} inside {compression} by its name", remedy)
    if ending in _COMPRESSIONS:
        return Misfit("is compressed twice by its name", "Compress it once.")
    return None


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file of lines, decompressed; ``is_whole`` if it is all there is."""

    kind: FileKind
    content: bytes
    is_whole: bool

    def unreadable(self, text_field: str, check: Callable[[bytes], object] = len) -> list[str]:
        """Return the reasons why complete lines cannot be read. ``check`` raises NotText for a text that cannot be used."""
        reasons, at = list[str](), 0
        for line in _lines(self.content, self.is_whole):
            try:
                if self.kind.format is Format.TEXT:
                    plain_line(line)
                elif line.strip() and (text := text_of(line, text_field)):
                    check(text)
            except NotText as error:
                reasons.append(f"the line at byte {at:,} {error}")
            at += len(line) + 1
        return reasons


def look(path: str, file: IO[bytes], text_field: str) -> Misfit | Head | None:
    """Return why a file is not read, by its name and first bytes; otherwise the head of a file of lines, if available.

    Moves the position of ``file``. Raises what decompression raises for a file that is damaged (``DAMAGE``).
    """
    if refused := refusal(path):
        return refused
    file.seek(0)
    stored, kind = file.read(HEAD_BYTES), kind_of(path)
    if misfit := _contradiction(path, stored):
        return misfit
    if not stored or not kind.has_lines:
        return None
    head = stored
    if kind.compression is Compression.GZIP:
        file.seek(0)
        head = gzip.GzipFile(fileobj=file).read(HEAD_BYTES)
    elif kind.compression is Compression.ZSTD:
        if (window := zstd_window(stored)) is not None and window > ZSTD_WINDOW_MAX:
            return Misfit(*window_too_large(window))
        file.seek(0)
        content = _zstd_head(file)
        if content is None:
            return None
        head = content
    is_whole = len(head) < HEAD_BYTES
    return _unfit(path, kind, head, is_whole, text_field) or Head(kind, head.removeprefix(UTF8_BOM), is_whole)


def zstd_window(stored: bytes) -> int | None:
    """Return the bytes of memory that a file's first zstd frame needs; None if unknown. RFC 8878, section 3.1.1.1."""
    if not stored.startswith(_ZSTD) or len(stored) < 18:
        return None
    flags = stored[4]
    if not flags & 0x20:
        base = 1 << (10 + (stored[5] >> 3))
        return base + (base >> 3) * (stored[5] & 7)
    at, length = 5 + (0, 1, 2, 4)[flags & 3], (1, 2, 4, 8)[flags >> 6]
    return int.from_bytes(stored[at : at + length], "little") + (256 if length == 2 else 0)


def window_too_large(window: int | None = None) -> tuple[str, str]:
    """Return the message about a zstd frame beyond ``ZSTD_WINDOW_MAX``, and the remedy."""
    most = f"{ZSTD_WINDOW_MAX >> 20} MiB"
    needs = f"of {window >> 20:,} MiB" if window is not None else f"above {most}"
    return (
        f"was compressed by zstd with a window {needs}, but at most {most} are supported",
        "Compress it again with a smaller window: `zstd -d --long=31 < OLD.zst | zstd -o NEW.zst`.",
    )


def _stem_of(path: str) -> tuple[str, Compression]:
    name = path.rpartition("/")[2].lower()
    ending = _ending(name)
    if ending in _COMPRESSIONS:
        return name[: -len(ending)], _COMPRESSIONS[ending]
    return name, Compression.NONE


def _ending(name: str) -> str:
    stem, dot, ending = name.rpartition(".")
    return f".{ending}" if dot and stem else ""


# ── what the first bytes say ──────────────────────────────────────────────────────────────────────────────────────────


def _contradiction(path: str, stored: bytes) -> Misfit | None:
    """Return the mismatch between the stored bytes and the name, or None."""
    kind, compression = kind_of(path), _compression_of(stored)
    if not stored:
        return None
    if compression is not Compression.NONE:
        if compression is kind.compression:
            return None
        ending = ".gz" if compression is Compression.GZIP else ".zst"
        return Misfit(f"is compressed by {compression}, but its name says {kind}", f"Add {ending} to its name.")
    if not kind.has_lines and stored.startswith(_BEGINNINGS[kind.format]):
        return None
    if foreign := _foreign(kind, stored):
        return foreign
    if kind.has_lines and not kind.is_compressed:
        return None
    if web_page := _web_page(kind, stored):
        return web_page
    what = f"not compressed by {kind.compression}" if kind.is_compressed else f"no {kind.format} file"
    message = f"is {what}, as its name says (it begins with {stored[:12]!r})"
    return Misfit(message, "Give it the name of what it is.")


def _compression_of(stored: bytes) -> Compression:
    if stored.startswith(_GZIP):
        return Compression.GZIP
    return Compression.ZSTD if stored.startswith((_ZSTD, *_SKIPPABLE)) else Compression.NONE


def _foreign(kind: FileKind, content: bytes) -> Misfit | None:
    """Return the mismatch if the content begins as no text does, or None."""
    if content.startswith(_PARQUET) and kind.format is not Format.PARQUET:
        return Misfit(f"is Parquet, but its name says {kind}", "Name it .parquet.")
    if content.startswith(_RECORDS) and kind.format is not Format.ARRAY_RECORD:
        return Misfit(f"is ArrayRecord, but its name says {kind}", "Name it .arrayrecord.")
    for magic, what, remedy in _MAGIC:
        if content.startswith(magic) and (magic != b"BZh" or content[4:10] == _BZIP2_BLOCK):
            return Misfit(f"is {what} by its first bytes, but its name says {kind}", remedy)
    if content[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        return Misfit(f"is a tar archive, but its name says {kind}", _UNPACK)
    for bom, encoding in _BOMS.items():
        if content.startswith(bom):
            remedy = f"Text is UTF-8 here: `iconv -f {encoding} -t UTF-8 OLD > NEW`."
            return Misfit(f"begins with a byte order mark of {encoding}", remedy)
    return None


def _web_page(kind: FileKind, content: bytes) -> Misfit | None:
    if not _WEB_PAGE_BEGINS.match(content):
        return None
    remedy = "A server may have sent an error page instead of the file: download the file again."
    return Misfit(f"is a web page, but its name says {kind}", remedy)


def _unfit(path: str, kind: FileKind, head: bytes, is_whole: bool, field: str) -> Misfit | None:
    """Return why the decompressed head of a file is not lines of text, or of JSON objects; None if it is."""
    if kind.is_compressed and _compression_of(head) is not Compression.NONE:
        return Misfit(f"is compressed twice: inside is {_compression_of(head)}", "Compress it once.")
    if foreign := _foreign(kind, head):
        return foreign
    text = head.removeprefix(UTF8_BOM)
    if binary := _binary(text):
        remedy = "Text is UTF-8 here: convert it (`iconv -f ENCODING -t UTF-8`), or leave it out."
        return Misfit(f"{binary}, and its name says {kind}", remedy)
    lines = [line for line in _lines(text, is_whole) if line.strip()]
    if kind.format is Format.JSON_LINES:
        return _web_page(kind, text) or _no_objects(text, lines, field)
    return _is_json(path, lines, text, is_whole, field)


def _lines(text: bytes, is_whole: bool) -> list[bytes]:
    """The first lines that are there to their end."""
    lines = text.split(b"\n", HEAD_LINES)
    return lines if is_whole and len(lines) <= HEAD_LINES else lines[:-1]


def _binary(text: bytes) -> str:
    controls = len(text) - len(text.translate(None, _CONTROLS))
    if controls > CONTROL_RATIO_MAX * len(text):
        return f"is binary ({controls:,} of its first {len(text):,} bytes are NUL or other control characters)"
    if _ISO_2022_SHIFTS.search(text):
        return "is ISO-2022, and not UTF-8 (it has escape sequences that shift to another character set)"
    lines = [line for line in text.split(b"\n")[:HEAD_LINES] if line.strip()]
    bad = [line for line in lines if not _is_utf8(line, is_last=line is lines[-1])]
    return "is not UTF-8 in most of its first lines" if len(bad) > len(lines) / 2 else ""


def _is_utf8(line: bytes, is_last: bool) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return is_last and error.start >= len(line) - 3  # where it was cut
    return True


def _no_objects(text: bytes, lines: list[bytes], field: str) -> Misfit | None:
    """JSON, but not one object a line; or objects without the text."""
    begins, reasons, without_text = text.lstrip()[:1], list[str](), 0
    for line in lines:
        try:
            text_of(line, field)
        except NotText as error:
            reasons.append(str(error))
            without_text += f"the field {field!r}" in str(error) or "has no field" in str(error)
    if begins == b"[" and not (len(lines) > 1 and reasons and "is a list" in reasons[0]):
        return Misfit("is one JSON array, and not one object a line", "Convert it: `jq -c '.[]' OLD.json > NEW.jsonl`.")
    if len(reasons) < len(lines) or (not lines and begins in (b"{", b"")):
        return None
    if field in CONVERSATION_KINDS and all(_object(line) is not None for line in lines):
        return None  # lines without conversations are reported one by one
    if len(lines) == 1 and (inner := _inner_records(lines[0])) is not None:
        remedy = f"Convert it: `jq -c '.[{json.dumps(inner)}][]' OLD.json > NEW.jsonl`."
        return Misfit(f"is one JSON object, with a list of objects in {inner!r}, and not one object a line", remedy)
    if lines and without_text == len(lines):
        message = f"has no text: each of its first {len(lines):,} lines {reasons[0]}"
        return Misfit(message.replace("each of its first 1 lines", "its first line"), "Set text_field.", is_kind=False)
    if _JSON_BEGINS.match(text) and len(lines) >= RECORDS_MIN:
        query = "." if begins == b"{" else "'.[]'"
        remedy = f"Write one object a line: `jq -c {query} OLD.json > NEW.jsonl`."
        return Misfit(f"is JSON, and not one object a line (its first line {reasons[0]})", remedy)
    if lines and len(lines) < RECORDS_MIN:
        return None  # lines that cannot be read, one by one
    why = f"the first {reasons[0]}" if reasons else f"it begins with {text[:12]!r}"
    return Misfit(f"has no JSON objects in its first lines: {why}", "Name it .txt if it is text, or correct it.")


def _inner_records(line: bytes) -> str | None:
    """Return the first field of an object that has a list of objects, if its name is short and needs no escape."""
    for name, value in (_object(line) or {}).items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and re.fullmatch(r"\w{1,40}", name):
            return name
    return None


def _is_json(path: str, lines: list[bytes], text: bytes, is_whole: bool, field: str) -> Misfit | None:
    """Return a mismatch if text is JSON: lines of objects with text, records, or one value with objects in it."""
    objects = [one for one in map(_object, lines) if one is not None]
    have_text = [isinstance(one.get(field), str) for one in objects]
    are_records = len(objects) >= max(RECORDS_MIN, RECORDS_RATIO_MIN * len(lines))
    if are_records or (objects and len(objects) == len(lines) and all(have_text)):
        return _misnamed(path, objects[0], field)
    is_array = bool(_ARRAY_BEGINS.match(text) or (is_whole and _is_array(text)))
    has_text = _JSON_BEGINS.match(text) and re.search(re.escape(json.dumps(field).encode()) + rb'\s*:\s*"', text)
    if not is_array and not has_text:
        return None
    if not lines and not is_array:
        return _misnamed(path, {field: ""}, field)
    form = "an array" if is_array else f"an object with {field!r} in it"
    remedy = f"Write one object a line: `jq -c '{'.[]' if is_array else '.'}' OLD > NEW.jsonl`."
    return Misfit(f"is JSON, {form}, but its name says text", remedy)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        return object_of(line)
    except NotText:
        return None


def _is_array(text: bytes) -> bool:
    """Return whether this is one JSON array. Text that begins with a bracket seldom is."""
    if not re.match(rb'\s*\[\s*["{\[]', text):
        return False
    try:
        return isinstance(json.loads(text, parse_int=float), list)
    except (ValueError, RecursionError):
        return False


def _misnamed(path: str, first: dict[str, Any], field: str) -> Misfit:
    ending = next((ending for ending in _COMPRESSIONS if path.lower().endswith(ending)), "")
    named = field if field in first else next(iter(first), None)
    fields = f" with {named[:NAME_LENGTH_MAX]!r}" if named is not None else ""
    message = f"is JSON Lines (its first lines are objects{fields}), but its name says text"
    return Misfit(message, f"Name it .jsonl{ending}, and set text_field to the field that has the text.")


def _zstd_head(file: IO[bytes]) -> bytes | None:
    """Return the decompressed head; None if the library is not installed, which islands report."""
    try:
        import zstandard
    except ImportError:
        return None
    reader: Any = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_MAX)
    try:
        return bytes(reader.stream_reader(file, read_across_frames=True, closefd=False).read(HEAD_BYTES))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


DAMAGE = (EOFError, OSError, zlib.error, ValueError)
"""The exceptions that ``look`` raises for a damaged file."""
