"""Plain data, as JSON can express it, and its short form for people: values in messages, and numbers. Pure.

A missing number is an en dash.
"""

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


def count(value: float | None) -> str:
    """Return a count with a unit prefix: 1234567 → 1.23 M."""
    if value is None:
        return "–"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f}"


def scaled(value: float, unit: str) -> str:
    """Return a quantity with three digits and a unit prefix, never an exponent above 1: 2.75e12, bps → 2.75 Tbps."""
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    size = 0
    while float(f"{abs(value):.3g}") >= 1000.0 and size < len(prefixes) - 1:
        value, size = value / 1000.0, size + 1
    return f"{three_digits(value)} {prefixes[size]}{unit}"


def three_digits(value: float) -> str:
    """Return a number with three significant digits, and a large one in full: 2,610 and not 2.61e+03."""
    return f"{float(f'{value:.3g}'):,.0f}" if 1000.0 <= abs(value) < 1e15 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """Return a duration in ms or s up to two minutes, then in minutes, then in hours."""
    if value is None:
        return "–"
    if abs(value) < 0.0995:
        return f"{value * 1e3:.0f} ms"
    if abs(value) < 10:
        return f"{value:.2f} s"
    if abs(value) < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if abs(value) < 7200 else f"{value / 3600:.1f} h"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def money(value: float | None, currency: str) -> str:
    """Return a sum with its currency: with cents, and a small one with three digits."""
    if value is None:
        return "–"
    return f"{value:.3g} {currency}" if 0 < abs(value) < 1 else f"{value:,.2f} {currency}"


def loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def tick_text(value: float) -> str:
    """Return the value of a tick without trailing zeros."""
    return f"{value:.6g}"


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
