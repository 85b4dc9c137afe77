"""Parse the YAML and JSON of users and clients into plain data, within stated limits. Nothing else parses them.

Plain data is what JSON can express: mappings with text keys, lists, text, integers, decimal numbers, true, false and null.
YAML is restricted to its unambiguous part: no tags, anchors, aliases, merge keys or directives, one document, numbers as in
YAML 1.2 (and ``200_000``), while ``yes``, dates and ``1:30`` are text. In both languages duplicate keys, numbers that are
infinite, NaN or beyond 64 bits, control characters and lone surrogates are refused. Every refusal is a ConfigurationError
that says where, and what to write instead; nothing else is raised.

The cost is linear in the number of bytes: YAML is read as events of the C parser and assembled here without recursion, so
that depth and size are limited while parsing. Decision 0212 compares this with ``yaml.safe_load``. ``config``,
``chaos.plan`` and ``simulation.spec`` interpret the documents.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from orchestrator.errors import ConfigurationError
from orchestrator.system.plain import brief

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser, some twenty times as fast as Python's, which is used if PyYAML was built without it."""
DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

INTEGER_MAX = 2**63 - 1
"""The largest magnitude that databases, tapes and other languages can hold."""
NUMBER_CHARACTERS_MAX = 64
"""A double has 17 digits and an exponent."""
KEYS_MAX = 10_000
"""The limit of one mapping. A report has a mapping of all islands by name."""
DEPTH_MAX = 64
"""The deepest document of ours is a report, which is 8 deep."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``nodes_max`` counts every key, value, list and mapping."""

    yaml_bytes_max: int
    json_bytes_max: int
    nodes_max: int


REQUEST = Limits(yaml_bytes_max=1 << 18, json_bytes_max=1 << 20, nodes_max=300_000)
"""Limits for clients. A specification with an entry for each of 10,000 islands fits as JSON. YAML takes ten times as long to
parse, so it may be a quarter as long, and never takes a second."""
FILE = Limits(yaml_bytes_max=1 << 26, json_bytes_max=1 << 26, nodes_max=10_000_000)
"""Limits for files of a user's own commands, such as a world fitted to a long tape."""


def read_yaml(content: bytes | str, limits: Limits = REQUEST, name: str = "the document") -> Any:
    """Return the plain data in YAML text; None if it is empty. ``name`` identifies it in errors."""
    text = _text(content, limits.yaml_bytes_max, name, "YAML")
    if _DIRECTIVE.match(text):
        raise _refused(name, "YAML directives (%YAML, %TAG) are not accepted. Remove the line.")
    try:
        return _built(yaml.parse(text, Loader=LOADER), limits.nodes_max, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _refused(
            name, _yaml_in_words(error.problem or "", error.context or "", _rest_of_line(text, mark)), mark
        ) from None
    except yaml.YAMLError as error:
        raise _refused(name, f"this is not valid YAML: {brief(str(error), 200)}.") from None


def read_json(content: bytes | str, limits: Limits = REQUEST, name: str = "the document") -> Any:
    """Return the plain data in JSON text. ``name`` identifies it in errors."""
    text = _text(content, limits.json_bytes_max, name, "JSON")
    without_texts = _JSON_TEXT.sub("", text)
    if max(accumulate(map(_DEEPER.__getitem__, _NO_BRACKET.sub("", without_texts))), default=0) > DEPTH_MAX:
        raise _refused(name, f"lists and mappings are more than {DEPTH_MAX} deep. Write it flatter.")
    if sum(map(without_texts.count, ",:[{")) + 1 > limits.nodes_max:
        raise _too_many(name, limits.nodes_max)
    try:
        value = _JSON.decode(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigurationError(detail=f"{name}, {where}: this is not valid JSON: {error.msg}.") from None
    except _Unusable as error:
        raise _refused(name, str(error)) from None
    if "\\" in text:  # without escapes, the check of the whole text covers all strings
        _check_texts(value, name)
    return value


def dump(document: Any, **options: Any) -> str:
    """Return YAML that ``read_yaml`` reads as the same document; text that it would read as a number is quoted."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, **options)
    return text


def mapping(document: Any, name: str = "the document", example: str | None = "demo.yaml") -> dict[str, Any]:
    """Return the document if it is a mapping. Raises ConfigurationError, which names an example in deploy/configs."""
    if document is None and example is not None:
        raise ConfigurationError(detail=f"{name} is empty; deploy/configs/{example} is an example.")
    if not isinstance(document, dict):
        hint = "" if example is None else f"; see deploy/configs/{example}"
        raise ConfigurationError(detail=f"{name} is {brief(document)} instead of a mapping of fields to values{hint}.")
    return document


def read_document(path: Path, example: str = "demo.yaml") -> dict[str, Any]:
    """Read a YAML file, or a JSON file by its name, holding one mapping, as the ``example`` in deploy/configs does.

    Raises ConfigurationError when the file is missing, unreadable, or something else than a mapping.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(detail=f"{path} cannot be read: {error.strerror}. Check the path.") from error
    read = read_json if path.suffix == ".json" else read_yaml
    return mapping(read(content, FILE, str(path)), str(path), example)


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Refused in texts: C strings end at NUL, terminals interpret ESC, and lone surrogates cannot be encoded."""
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")
"""The first bytes of gzip, zstd, bzip2 and xz files."""
_DIRECTIVE = re.compile(r"(?:[^\S\n]*+(?:#[^\n]*+)?+\n)*+%")
"""Checked before parsing, because libyaml compares each directive with all others."""


class _Unusable(Exception):
    """A problem found by a hook of the parser, whose caller adds the document's name."""


def _refused(name: str, problem: str, mark: Any = None) -> ConfigurationError:
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return ConfigurationError(detail=f"{name}{where}: {problem}")


def _too_many(name: str, nodes_max: int) -> ConfigurationError:
    return _refused(
        name, f"it has more than {nodes_max:,} keys and values. Shorten it: `count` makes many equal islands."
    )


def _text(content: bytes | str, bytes_max: int, name: str, language: str) -> str:
    """Return the content as text. Raises ConfigurationError for a wrong size, encoding or character."""
    if len(content) > bytes_max:
        remedy = "Send it as JSON, which may be longer, or shorten it." if language == "YAML" else "Shorten it."
        raise _refused(name, f"it has {len(content):,} bytes, but {language} may have at most {bytes_max:,}. {remedy}")
    if isinstance(content, str):
        text = content
    else:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if content.startswith(_COMPRESSED):
                raise _refused(name, "it is compressed. Decompress it first.") from None
            encoding = "UTF-16" if content.startswith(_UTF_16) else "not UTF-8"
            where = f"byte {error.start + 1}"
            raise _refused(name, f"its encoding is {encoding} (at {where}). Save it as UTF-8.") from None
    text = text.removeprefix("\ufeff")
    if match := _CONTROL.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise _refused(name, f"line {line} contains the character {match[0]!a}, which is not allowed. Remove it.")
    return text


def _check_texts(document: Any, name: str) -> None:
    """Raise ConfigurationError for a text with a character that an escape sequence has put there."""
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            if match := _CONTROL.search(value):
                problem = (
                    f"the text {brief(value)} contains the character {match[0]!a}, which is not allowed. Remove it."
                )
                raise _refused(name, problem)
        elif isinstance(value, dict):
            waiting += value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _whole(text: str, base: int = 10) -> int:
    if len(text) <= NUMBER_CHARACTERS_MAX:
        number = int(text, base)
        if abs(number) <= INTEGER_MAX:
            return number
    raise _Unusable(f"the number {brief(text)} is beyond {INTEGER_MAX}, the largest of 64 bits. Write a smaller one.")


def _decimal(text: str) -> float:
    if len(text) > NUMBER_CHARACTERS_MAX:
        raise _Unusable(f"the number {brief(text)} has more than {NUMBER_CHARACTERS_MAX} characters. Round it.")
    number = float(text)
    if not math.isfinite(number):
        raise _Unusable(f"the number {brief(text)} is too large for a decimal number. Write a smaller one.")
    return number


def _endless(text: str) -> float:
    raise _Unusable(f"{text} is not accepted, because all numbers are bounded. Write a finite number.")


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_JSON_TEXT = re.compile(r'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)
"""A string, also an unterminated one. Each character is scanned once."""
_NO_BRACKET = re.compile(r"[^\[\]{}]++")
_DEEPER = {"[": 1, "{": 1, "]": -1, "}": -1}


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > KEYS_MAX:
        raise _Unusable(_CROWDED)
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Unusable(_TWICE.format(brief(twice)))
    return mapping


_CROWDED = f"a mapping has more than {KEYS_MAX:,} keys. Use a list, or fewer."
_TWICE = "the key {} occurs twice in one mapping. Keep one of the two."
_JSON = json.JSONDecoder(object_pairs_hook=_pairs, parse_int=_whole, parse_float=_decimal, parse_constant=_endless)


# ── YAML ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*+")
_BASED = re.compile(r"[-+]?0(?:x[0-9a-fA-F_]++|o[0-7_]++|b[01_]++)")
_DECIMAL = re.compile(r"[-+]?(?:[0-9][0-9_]*+(?:\.[0-9_]*+)?|\.[0-9][0-9_]*+)(?:[eE][-+]?[0-9]++)?")
_ENDLESS = re.compile(r"[-+]?\.(?:inf|Inf|INF|nan|NaN|NAN)")
_NUMERIC_STARTS = frozenset("+-.0123456789")
_NO_KEY: Any = object()


_YAML_IN_WORDS = (
    (
        "mapping values are not allowed",
        "a colon is not allowed here. Indent the line as its neighbours, or put a text that contains a colon in "
        "quotation marks.",
    ),
    (
        "block sequence entries are not allowed",
        "a list cannot begin here. Begin it on a line of its own.",
    ),
    (
        "did not find expected ',' or ']'",
        "a list in brackets has no comma here, or is not closed. Add , or ].",
    ),
    (
        "did not find expected ',' or '}'",
        "a mapping in braces has no comma here, or is not closed. Add , or }.",
    ),
    (
        "did not find expected '-' indicator",
        "an entry of the list above has no dash. Add one, or correct the indentation.",
    ),
    (
        "did not find expected key",
        "the line does not fit those above. Correct its indentation, or the quotation marks.",
    ),
    ("could not find expected ':'", "a field's name is not followed by a colon. Write `name: value`."),
    ("found unexpected end of stream", "a quotation mark is not closed. Close it."),
    ("found unknown escape character", "unknown escape sequence in double quotation marks. Use single ones."),
    ("did not find expected alphabetic", "a text may not begin with * or &. Put it in quotation marks."),
    ("did not find expected <document start>", "the document ends before this line. Correct its indentation."),
)
"""The messages of libyaml, and ours instead of them."""


def _yaml_in_words(problem: str, context: str, rest: str) -> str:
    if "cannot start any token" in problem and rest.startswith("\t"):
        return "there is a tab, but YAML is indented with spaces. Replace it with spaces."
    if "cannot start any token" in problem:
        return f"a text may not begin with {rest[:1]!r}. Put it in quotation marks."
    for beginning, words in _YAML_IN_WORDS:
        if problem.startswith(beginning):
            return words
    return (
        f"this is not valid YAML ({', '.join(part for part in (context, problem) if part)}). Compare deploy/configs/."
    )


def _rest_of_line(text: str, mark: Any) -> str:
    if mark is None:
        return ""
    return text.split("\n", mark.line + 1)[mark.line][mark.column :] if mark.line <= text.count("\n") else ""


class _Dumper(DUMPER):  # type: ignore[misc]
    """A dumper that also quotes text that ``_scalar`` reads as a number but YAML 1.1 does not: ``1e5``, ``0o17``."""


for _pattern in (_BASED, _DECIMAL):
    _Dumper.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(f"(?:{_pattern.pattern})\\Z"), sorted(_NUMERIC_STARTS)
    )


def _built(events: Iterator[Any], nodes_max: int, name: str) -> Any:
    """Build the document from the parser's events, with a list in place of recursion."""
    root: Any = None
    container: Any = None
    key: Any = _NO_KEY
    outer: list[tuple[Any, Any]] = []
    documents = nodes = 0
    for event in events:
        kind = type(event)
        if kind is yaml.ScalarEvent:
            try:
                value = _scalar(event.value) if event.implicit[0] else event.value
            except _Unusable as error:
                raise _refused(name, str(error), event.start_mark) from None
            if not event.implicit[0] and _CONTROL.search(value):
                raise _refused(name, f"the text {brief(value)} holds a control character. Remove it.", event.start_mark)
        elif kind is yaml.SequenceStartEvent:
            value = []
        elif kind is yaml.MappingStartEvent:
            value = {}
        elif kind is yaml.SequenceEndEvent or kind is yaml.MappingEndEvent:
            container, key = outer.pop()
            continue
        elif kind is yaml.AliasEvent:
            raise _refused(name, "YAML aliases (*name) are not accepted. Write the value out.", event.start_mark)
        elif kind is yaml.DocumentStartEvent:
            documents += 1
            if documents > 1:
                raise _refused(name, "a second document begins here. Give one.", event.start_mark)
            continue
        else:
            continue
        if event.anchor is not None or event.tag is not None:
            what = "anchors (&name) and aliases (*name)" if event.anchor is not None else "tags (!name)"
            raise _refused(name, f"YAML {what} are not accepted. Write the plain value.", event.start_mark)
        nodes += 1
        if nodes > nodes_max:
            raise _too_many(name, nodes_max)
        if container is None:
            root = value
        elif type(container) is list:
            container.append(value)
        elif key is _NO_KEY:
            if type(value) is not str:
                problem = f"a key is text, and this is {brief(value)}. Put it in quotation marks, or name the field."
                raise _refused(name, problem, event.start_mark)
            if len(container) >= KEYS_MAX:
                raise _refused(name, _CROWDED, event.start_mark)
            if value in container:
                raise _refused(name, _TWICE.format(brief(value)), event.start_mark)
            key = value
            continue
        else:
            container[key] = value
            key = _NO_KEY
        if kind is not yaml.ScalarEvent:
            outer.append((container, key))
            container, key = value, _NO_KEY
            if len(outer) > DEPTH_MAX:
                problem = f"lists and mappings are more than {DEPTH_MAX} deep. Write it flatter."
                raise _refused(name, problem, event.start_mark)
    return root


def _scalar(text: str) -> Any:
    """The value of a word without quotation marks. Raises _Unusable for what is a number to some and not to others."""
    if text in _WORDS:
        return _WORDS[text]
    if text == "<<":
        raise _Unusable("YAML merge keys (<<) are not accepted. Write the fields out.")
    if text[0] not in _NUMERIC_STARTS:
        return text
    if len(text) > NUMBER_CHARACTERS_MAX:
        if not any(pattern.fullmatch(text) for pattern in (_INTEGER, _BASED, _DECIMAL)):
            return text
        raise _Unusable(
            f"the number {brief(text)} has more than {NUMBER_CHARACTERS_MAX} characters. Write a shorter one."
        )
    if _INTEGER.fullmatch(text):
        digits = text.lstrip("+-").replace("_", "")
        if digits[0] == "0" and len(digits) > 1:
            problem = f"{brief(text)} is octal to some readers of YAML and decimal to others."
            raise _Unusable(f"{problem} Write it without the zero in front, or in quotation marks.")
        return _whole(text.replace("_", ""))
    if _BASED.fullmatch(text):
        if len(digits := text.replace("_", "").lstrip("+-")) > 2:
            return _whole(text[: text.index("0")] + digits, 0)
        return text
    if _DECIMAL.fullmatch(text):
        return _decimal(text.replace("_", ""))
    if _ENDLESS.fullmatch(text):
        _endless(text)
    return text
