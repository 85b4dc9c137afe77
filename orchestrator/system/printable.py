"""Make foreign text safe to show: control and invisible characters become visible ones.

A requested path, an island's output, a reason on a tape: all end up in a terminal or log, where an escape sequence could
rewrite the screen, a line break forge a line, and a direction mark reverse words. Each such character is replaced by one
visible character, so that columns stay aligned.

Source: Unicode's Cc, Cf, Zl and Zp; "Trojan Source", arXiv:2111.00169, for the direction marks.
"""

from __future__ import annotations

import codecs
import re
import unicodedata

_HIDDEN = ("Cc", "Cf", "Zl", "Zp", "Cs", "Co")
_JOINERS = "\u200c\u200d"
"""Some scripts and emoji need these two of the hidden characters."""
_SYMBOL_OF_DELETE, _SYMBOLS_OF_CONTROLS, _REPLACEMENT = "\u2421", 0x2400, "\ufffd"


def _visible(number: int) -> str:
    if number < 0x20:
        return chr(_SYMBOLS_OF_CONTROLS + number)
    return _SYMBOL_OF_DELETE if number == 0x7F else _REPLACEMENT


class _Shown(dict[int, str]):
    """Maps characters to visible ones, for ``str.translate``. A table that is filled at once would delay every command."""

    def __missing__(self, number: int) -> str:
        character = chr(number)
        hidden = unicodedata.category(character) in _HIDDEN and character not in _JOINERS
        self[number] = shown = _visible(number) if hidden else character
        return shown


_TABLE = _Shown()
_TABLE_OF_LINES = _Shown({ord(character): character for character in "\n\t"})
_HAZARD_IN_JSON = re.compile(
    "[\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\U000e0000-\U000e0fff]"
)


_NEAREST = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\u2500\u2501", "-"),
        **dict.fromkeys("\u2018\u2019\u2032", "'"),
        **dict.fromkeys("\u201c\u201d\u2033", '"'),
        **dict.fromkeys("\u2190\u2264", "<"),
        **dict.fromkeys("\u2192\u2265\u25b6", ">"),
        **dict.fromkeys("\u2026\u00b7", "."),
        **dict.fromkeys("\u2022\u25cf", "*"),
        **dict.fromkeys("\u00d7\u2717", "x"),
        **dict.fromkeys("\u2502\u2503", "|"),
        **dict.fromkeys(map(chr, range(0x250C, 0x254C)), "+"),
        **dict.fromkeys(map(chr, range(0x2581, 0x2590)), "#"),
        "\u00a0": " ",
    }
)
"""Replacements for dashes, arrows and line drawings, for terminals whose encoding lacks them."""
ENCODING_ERRORS = "atoll.nearest"
"""The name of the error handler, registered below, for characters that a stream's encoding lacks."""


def nearest(error: UnicodeError) -> tuple[str, int]:
    """Replace each character by a similar one, or "?", so that columns stay aligned. For ``codecs.register_error``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    wanted = error.object[error.start : error.end].translate(_NEAREST)
    return "".join(character if character.isascii() else "?" for character in wanted), error.end


codecs.register_error(ENCODING_ERRORS, nearest)


def line(text: str) -> str:
    """Return the text as one safe line."""
    return text if text.isascii() and text.isprintable() else text.translate(_TABLE)


def lines(text: str) -> str:
    """Return a text of several lines made safe, with its line breaks and tabs."""
    return text.translate(_TABLE_OF_LINES)


def json_text(text: str) -> str:
    """Return equivalent JSON with hazardous characters escaped."""
    return _HAZARD_IN_JSON.sub(lambda match: _escape(ord(match.group())), text)


def _escape(number: int) -> str:
    if number < 0x10000:
        return f"\\u{number:04x}"
    high, low = divmod(number - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
