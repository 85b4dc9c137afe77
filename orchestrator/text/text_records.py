"""One record of a data file: its text, or precisely why it has none.

A record is a line of JSON Lines or of plain text, a row of Parquet or a record of ArrayRecord. The service checks the first
lines of a file with these functions, and islands read every record with them, so both report the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

INT_DIGITS_MAX = 300
LONG_LINE_BYTES, VALUES_MAX = 16 << 20, 8 << 20
"""A longer line may have at most so many values: each takes two bytes of the line, and a hundred in memory."""
_VALUES = re.compile(rb'"(?:[^"\\]+|\\.)*+"|[,\[{]', re.DOTALL)
NAMES_MAX, NAME_LENGTH_MAX = 8, 40
"""How many fields a message names, and their length."""
_BOM = "\ufeff"
_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


class NotText(ValueError):
    """A record that has no text to train on. Its message is a clause about the record: ``has no field 'text'``."""


class NotUtf8(NotText):
    """A record that is not valid UTF-8."""


def utf8(record: bytes) -> bytes:
    """Return the record. Raises NotText if it is not UTF-8."""
    _decoded(record)
    return record


def plain_line(line: bytes) -> bytes:
    """Return a line of plain text. Raises NotText if it is not UTF-8, or has a NUL byte."""
    if b"\0" in line:
        raise NotText(f"has a NUL byte (its byte {line.index(0):,}), so it is not text")
    return utf8(line)


def text_of(line: bytes, field: str) -> bytes | None:
    """Return the text of a line's object; None if it is empty or null. Raises NotText with the reason.

    The text of a conversation is ``conversation_of``, that of a pair ``preference_of``.
    """
    if field in CONVERSATION_KINDS:
        return CONVERSATION_KINDS[field][1](object_of(line, _integer))
    fields = object_of(line)
    if field not in fields:
        raise NotText(f"has no field {field!r} (text_field){_named(fields)}")
    value = fields[field]
    if value is None:
        return None
    if not isinstance(value, str):
        raise NotText(f"has {_kind_of(value)} in the field {field!r}, not text")
    try:
        return value.encode() or None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise NotText(
            f"has half of a surrogate pair, {half}, in the field {field!r}, which is not a character"
        ) from error


CONVERSATION = "messages, or prompt and completion"
"""In place of a field's name: a record is a conversation."""
CONVERSATION_FIELDS = ("messages", "prompt", "completion", "tools")
PREFERENCE = "chosen and rejected"
"""A record is a pair of conversations with the same beginning."""
PREFERENCE_FIELDS = ("prompt", "chosen", "rejected", "tools")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_BEGINNING, _RESULTS = ("system", "developer"), ("tool", "function", "ipython")


def conversation_of(record: Mapping[str, Any]) -> bytes | None:
    """Return a record's conversation, or prompt and completion, as JSON: equal ones are equal bytes.

    ``{"messages", "learn_from"}`` with ``tools`` if there are any, or ``{"prompt", "completion"}`` of two texts. None if
    these fields are null. Raises NotText with the reason.
    """
    if record.get("messages") is not None:
        own: dict[str, Any] = {"messages": _messages(record["messages"], "messages"), "learn_from": 0}
    elif record.get("prompt") is not None and record.get("completion") is not None:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise NotText("has an empty text in the field 'completion', so there is nothing to learn")
            return _as_bytes({"prompt": prompt, "completion": completion})
        before, after = _messages(prompt, "prompt"), _messages(completion, "completion")
        own = {"messages": [*before, *after], "learn_from": len(before)}
    elif _is_null(record, ("messages",)) or _is_null(record, ("prompt", "completion")):
        return None
    else:
        _require_values(record, CONVERSATION_FIELDS[:3])
        raise NotText(f"has no field 'messages', nor 'prompt' and 'completion'{_named(dict(record))}")
    _require_order(own["messages"])
    if not any(message["role"] == "assistant" for message in own["messages"][own["learn_from"] :]):
        raise NotText("has no message of the role 'assistant', so there is nothing to learn")
    if tools := record.get("tools"):
        own["tools"] = _tools(tools)
    return _as_bytes(own)


def preference_of(record: Mapping[str, Any]) -> bytes | None:
    """Return a record's ``{"chosen", "rejected"}`` as JSON, each as ``conversation_of`` has it; None if one is null.

    Raises NotText.

    Both are texts with a ``prompt``, or lists of messages: those that answer the ``prompt``, or that begin with it. Without
    a ``prompt`` it is the messages with which both begin.
    """
    prompt, chosen, rejected = (record.get(name) for name in ("prompt", "chosen", "rejected"))
    if _is_null(record, ("chosen", "rejected")):
        return None
    if chosen is None or rejected is None:
        _require_values(record, ("chosen", "rejected"))
        raise NotText(f"has no fields 'chosen' and 'rejected'{_named(dict(record))}")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if not isinstance(prompt, str):
            raise NotText("has texts in the fields 'chosen' and 'rejected', but no text in the field 'prompt'")
        sides: list[dict[str, Any]] = [{"prompt": prompt, "completion": answer} for answer in (chosen, rejected)]
    else:
        every = [_messages(chosen, "chosen"), _messages(rejected, "rejected")]
        if every[0][0]["role"] == "assistant":
            before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt, "prompt")
            every = [[*before, *messages] for messages in every]
        pairs = zip(*every, strict=False)
        alike = next((at for at, (one, other) in enumerate(pairs) if one != other), min(map(len, every)))
        tools = {"tools": record["tools"]} if record.get("tools") else {}
        sides = [{"prompt": own[:alike], "completion": own[alike:], **tools} for own in every]
    if chosen == rejected:
        raise NotText("has the same answer in the fields 'chosen' and 'rejected'")
    texts = [conversation_of(side) for side in sides]
    return _as_bytes({name: json.loads(side or b"") for name, side in zip(("chosen", "rejected"), texts, strict=True)})


CONVERSATION_KINDS: Mapping[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], bytes | None]]] = {
    CONVERSATION: (CONVERSATION_FIELDS, conversation_of),
    PREFERENCE: (PREFERENCE_FIELDS, preference_of),
}
"""What a record is, in place of a field's name: the fields of it, and what makes JSON of them."""


def _is_null(record: Mapping[str, Any], fields: Sequence[str]) -> bool:
    """Return whether the record has all of these fields, and one of them is null."""
    return all(name in record for name in fields) and any(record[name] is None for name in fields)


def _as_bytes(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise NotText("has half of a surrogate pair in a text, which is not a character") from error
    except (TypeError, ValueError) as error:
        raise NotText(f"has a value that JSON does not know ({error})") from error


def _tools(tools: Any) -> Any:
    """Return a conversation's tools; tables often have them as JSON in a text."""
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise NotText("has a text in the field 'tools' that is not JSON") from error


def _messages(value: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise NotText(f"has {_kind_of(value)} in the field {field!r}, not a list of messages")
    if not value:
        raise NotText(f"has no messages in the field {field!r}")
    messages = list[dict[str, Any]]()
    for number, message in enumerate(value, 1):
        where = f"in message {number} of {field!r}"
        if not isinstance(message, dict):
            raise NotText(f"has {_kind_of(message)} {where}, not an object with role and content")
        if message.get("role") is None:
            raise NotText(f"has no role {where}{_named({name: each for name, each in message.items() if each})}")
        if message["role"] not in ROLES:
            raise NotText(f"has the role {message['role']!r} {where}; roles are {', '.join(ROLES)}")
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise NotText(f"has a part {where} that is not text; only text is trained on")
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise NotText(f"has {_kind_of(content)} for the content {where}, not text")
        # a table has every column in every row; a template must not see those that are null
        messages.append({name: each for name, each in message.items() if each is not None or name == "content"})
    return messages


def _require_order(messages: Sequence[Mapping[str, Any]]) -> None:
    roles = [message["role"] for message in messages]
    turns = roles[next((at for at, role in enumerate(roles) if role not in _BEGINNING), len(roles)) :]
    for number, (before, role) in enumerate(zip([None, *turns], turns, strict=False), len(roles) - len(turns) + 1):
        if role in _BEGINNING:
            problem = f"has the role {role!r} in message {number}, after the conversation began"
        elif role == "assistant" and before in (None, "assistant"):
            problem = f"has the role 'assistant' in message {number}, which answers no message"
        elif role in _RESULTS and before not in ("assistant", *_RESULTS):
            problem = f"has the role {role!r} in message {number}, which follows no answer"
        else:
            continue
        raise NotText(f"{problem}. Order them as system, user, assistant, user, …")


def _integer(digits: str) -> int | float:
    """Return the number; one of thousands of digits is no int for Python."""
    return int(digits) if len(digits) < INT_DIGITS_MAX else float(digits)


def object_of(line: bytes, parse_int: Callable[[str], int | float] = float) -> dict[str, Any]:
    """Return the line's JSON object. Raises NotText.

    Integers are read as floats unless they are trained on: an id of thousands of digits is no int for Python.
    """
    if len(line) > LONG_LINE_BYTES and _has_many_values(line):
        raise NotText(f"has more than {VALUES_MAX:,} values, which need too much memory")
    try:
        value = json.loads(_decoded(line).removeprefix(_BOM), parse_int=parse_int)
    except json.JSONDecodeError as error:
        raise NotText(f"is not JSON ({error.msg.removesuffix(' at')}, at character {error.pos:,})") from error
    except RecursionError as error:
        raise NotText("is JSON that is nested too deeply") from error
    if not isinstance(value, dict):
        raise NotText(f"is {_kind_of(value)}, not a JSON object")
    return value


def _has_many_values(line: bytes) -> bool:
    """Return whether there are too many values in a line of JSON. What is in a text is no value."""
    if sum(map(line.count, (b",", b"[", b"{"))) <= VALUES_MAX:
        return False
    values = (match for match in _VALUES.finditer(line) if not match[0].startswith(b'"'))
    return next(islice(values, VALUES_MAX, None), None) is not None


def _decoded(record: bytes) -> str:
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        raise NotUtf8(f"is not UTF-8 (its byte {error.start:,} is 0x{record[error.start]:02x})") from error


def _kind_of(value: Any) -> str:
    return _KINDS.get(type(value), "a number")


def _require_values(record: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise NotText if the record has null in some of these fields, and nothing is wrong but that."""
    present = [name for name in names if name in record]
    if "messages" in present or len(present) >= 2:
        empty = [repr(name) for name in present if record[name] is None]
        raise NotText(f"has null in the {'field' if len(empty) == 1 else 'fields'} {' and '.join(empty)}")


def _named(one: dict[str, Any]) -> str:
    if not one:
        return "; it has no fields"
    names = ", ".join(repr(name[:NAME_LENGTH_MAX]) for name in list(one)[:NAMES_MAX])
    return f"; it has {names}{', …' if len(one) > NAMES_MAX else ''}"
