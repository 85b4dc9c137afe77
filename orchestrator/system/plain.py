"""Plain data, as JSON can express it, and its short form in messages. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

BRIEF_CHARACTERS_MAX = 60
DIGITS_MAX = 40


def finite(value: Any) -> Any:
    """Return the data with NaN and infinities as None, tuples as lists, and keys as strings."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def brief(value: Any, characters_max: int = BRIEF_CHARACTERS_MAX) -> str:
    """Return a value for a message: short and printable, at a cost that does not depend on its size."""
    match value:
        case str():
            return ascii_only(repr(value[:characters_max])) + ("…" if len(value) > characters_max else "")
        case bool() | None:
            return repr(value)
        case int():
            digits = int(value.bit_length() * math.log10(2)) + 1
            return repr(value) if digits <= DIGITS_MAX else f"an integer of about {digits:,} digits"
        case float():
            return repr(value)
        case Mapping():
            return f"a mapping of {counted(len(value), 'field')}" if value else "{}"
        case list() | tuple():
            return f"a list of {counted(len(value), 'value')}" if value else "[]"
    return f"a {type(value).__name__}"


def ascii_only(text: str) -> str:
    """Return the text with lone surrogates escaped, so that it can be encoded."""
    return text.encode("utf-8", "backslashreplace").decode()


def some_of(names: Collection[str], count_max: int = 20) -> str:
    """Return the first of these names, for a remedy, and how many more there are."""
    shown = [name for name, _ in zip(names, range(count_max), strict=False)]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 island``, ``2 islands``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
_PASSWORD = re.compile(r"[^@]*:[^@]*@")
_WEB_USER = re.compile(r"\s*https?://[^/?#]*@", re.IGNORECASE)
_SECRET_PARAMETER = re.compile(r"[?&;][^=&]*(sig|token|secret|passw|credential|key)[^=&]*=", re.IGNORECASE)


def has_secret(text: str) -> bool:
    """Return whether the text is a URL that contains a password, a key or a signature, also one that is malformed."""
    scheme = _URL.match(text)
    if scheme is None:
        return False
    is_user = _PASSWORD.match(text, scheme.end()) or _WEB_USER.match(text)
    return bool(is_user or _SECRET_PARAMETER.search(text))
