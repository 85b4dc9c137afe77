"""Text that would be a document: what is no plain data is refused in words, and no text costs more than its length."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.errors import ConfigurationError
from orchestrator.specification.documents import DEPTH_MAX, FILE, REQUEST, dump, read_json, read_yaml

NINES = "9" * 5_000
NO_PLAIN_YAML = {
    "a tag with nothing": "a: !!int ''",
    "a tag of a float": "a: !!float ''",
    "a tag of a bool": "a: !!bool 'x'",
    "a tag of bytes": "model: {!!binary aGk=: a}",
    "a tag of Python": "a: !!python/object/apply:os.system [id]",
    "a tag of a set": "a: !!set {b, c}",
    "a local tag": "a: !mine 1",
    "no tag at all": "a: ! 1",
    "a number as key": "model: {1: a, b: c}",
    "nothing as key": "model: {~: a, b: c}",
    "true as key": "true: 1",
    "a list as key": "? [a]\n: b",
    "a mapping as key": "{{a: b}: c}",
    "the same key twice": "seed: 1\nseed: 2",
    "the same key twice, once in quotes": "a: 1\n'a': 2",
    "an anchor": "a: &x 1",
    "an alias": "a: *x",
    "a bomb": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "a merge key": "<<: {a: 1}",
    "infinity": "a: .inf",
    "less than nothing": "a: -.INF",
    "no number": "a: .nan",
    "a float too large": "a: 1e999",
    "an integer too large": "a: 9223372036854775808",
    "an integer of many digits": f"a: {NINES}",
    "a hexadecimal of many digits": f"a: 0x{'f' * 5_000}",
    "an integer of many underscores": f"a: 1{'_' * 100_000}1",
    "a decimal of many digits": f"a: 0.{NINES}",
    "octal or decimal": "a: 010",
    "NUL": 'a: "\\0"',
    "escape": 'a: "\\e[2J"',
    "a raw bell": "a: \x07",
    "half a pair": 'a: "\\ud800"',
    "a raw half of a pair": "a: \ud800",
    "a directive": "%YAML 1.1\n---\na: 1",
    "a directive behind comments": "# a\n\n  # b\n%TAG ! b\n---\na: 1",
    "two documents": "a: 1\n---\nb: 2",
    "too deep": "[" * (DEPTH_MAX + 2) + "]" * (DEPTH_MAX + 2),
    "too deep in blocks": "- " * 1_000 + "a",
    "a crowded mapping": "".join(f"k{n}: 1\n" for n in range(10_001)),
    "unbalanced": "a: [",
    "a tab": "a:\n\t- b",
}
NO_PLAIN_JSON = {
    "the same key twice": '{"seed": 1, "seed": 2}',
    "the same key twice, once escaped": '{"a": 1, "\\u0061": 2}',
    "no number": "[NaN]",
    "infinity": "[Infinity]",
    "less than nothing": "[-Infinity]",
    "a float too large": "[1e999]",
    "an integer too large": "[9223372036854775808]",
    "an integer of many digits": f"[{NINES}]",
    "a decimal of many digits": f"[0.{NINES}]",
    "half a pair": '["\\ud800"]',
    "half a pair as key": '{"\\udfff": 1}',
    "NUL": '["\\u0000"]',
    "escape": '["\\u001b[2J"]',
    "a raw DEL": '["\x7f"]',
    "too deep": "[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1),
    "far too deep": "[" * 200_000,
    "too deep in mappings": '{"a":' * 1_000 + "1" + "}" * 1_000,
    "a comma too many": "[1,]",
    "a string without end": '"\\"\\"',
    "nothing": "",
}


@pytest.mark.parametrize("text", NO_PLAIN_YAML.values(), ids=NO_PLAIN_YAML)
def test_yaml_that_is_no_plain_data_is_refused_with_words(text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_yaml(text)
    assert 20 < len(str(refused.value)) < 600
    str(refused.value).encode()


@pytest.mark.parametrize("text", NO_PLAIN_JSON.values(), ids=NO_PLAIN_JSON)
def test_json_that_is_no_plain_data_is_refused_with_words(text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_json(text)
    assert 20 < len(str(refused.value)) < 600
    str(refused.value).encode()


@pytest.mark.parametrize(
    "content", [b"\xff\xfea\x00:\x00", b"\xfe\xff\x00a", b"a: \xff", b"a: \x80", '{"a": 1}'.encode("utf-32")]
)
@pytest.mark.parametrize("read", [read_yaml, read_json])
def test_other_encodings_than_utf_8_are_refused(read: Callable[[bytes], Any], content: bytes) -> None:
    with pytest.raises(ConfigurationError):
        read(content)


def test_a_mark_of_utf_8_is_no_part_of_the_document() -> None:
    assert read_yaml(b"\xef\xbb\xbfa: 1") == read_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("200_000", 200_000),
        ("0x1f", 31),
        ("0o17", 15),
        ("-0b11", -3),
        ("1e-3", 0.001),
        ("12e9", 12e9),
        ("+.5", 0.5),
        ("1:1:1", "1:1:1"),
        ("2020-01-01", "2020-01-01"),
        ("yes", "yes"),
        ("no", "no"),
        ("~", None),
        ("True", True),
        ("'1'", "1"),
        ("0x", "0x"),
        ("=", "="),
        ('"a\\tb"', "a\tb"),
    ],
)
def test_a_word_of_yaml_has_one_meaning(text: str, value: object) -> None:
    read = read_yaml(text)
    assert (read, type(read)) == (value, type(value))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]))
    | st.from_regex(r"[-+.0-9_exobXOB~<=]{1,9}", fullmatch=True),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc019_.~<e-", max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN)
@example({"a": "1e5", "b": "0o17", "1": "010", "<<": "~", "=": ".inf"})
def test_what_is_written_as_yaml_is_read_as_the_same(document: Any) -> None:
    assert read_yaml(dump(document)) == document


@given(st.text() | st.text("{}[],:&*!|>'\"%@`-? \n\t\\#~<1e.a"))
@example("%\n" * 100)
@example("!<")
@example("\ufeff\ufeff")
def test_any_text_is_read_or_refused_and_nothing_else(text: str) -> None:
    for read in (read_yaml, read_json):
        try:
            read(text)
        except ConfigurationError as refused:
            str(refused).encode()


TRIES = 6
"""Of a text that costs too much: another process may have had the caches meanwhile."""
COSTLY = {
    "ones": lambda n: "a: [" + "1," * (n // 2) + "1]",
    "words": lambda n: "- a\n" * (n // 4),
    "mappings": lambda n: "[" + "{a: 1}," * (n // 7) + "]",
    "openings": lambda n: "[" * n,
    "openings of mappings": lambda n: "{a: " * (n // 4),
    "dashes": lambda n: "- " * (n // 2),
    "question marks": lambda n: "? " * (n // 2),
    "documents": lambda n: "---\n" * (n // 4),
    "directives": lambda n: "".join(f"%TAG !a{i}! b\n" for i in range(n // 12)),
    "comments": lambda n: "#\n" * (n // 2),
    "a long number": lambda n: "a: " + "1" * n,
    "a long decimal": lambda n: "a: 1." + "1" * n,
    "a long text": lambda n: '"' + "\\x41" * (n // 4) + '"',
    "quotes without end": lambda n: '"\\"' * (n // 3),
    "keys": lambda n: (
        "[" + ",".join("{" + ",".join(f"k{i}: 1" for i in range(99)) + "}" for _ in range(n // 800)) + "]"
    ),
    "underscores": lambda n: "a: 1" + "_" * n,
    "lines": lambda n: "a\n" * (n // 2),
    "depth within bounds": lambda n: "[" + ("[" * 60 + "]" * 60 + ",") * (n // 121) + "]",
}


@pytest.mark.parametrize("made", COSTLY.values(), ids=COSTLY)
def test_no_text_costs_more_than_its_length(made: Callable[[int], str]) -> None:
    """How much it is, tests/bench says."""

    def cost(text: str) -> float:
        began = time.thread_time()
        for read in (read_yaml, read_json):
            with suppress(ConfigurationError):
                read(text, FILE)
        return time.thread_time() - began

    short, long = made(25_000), made(REQUEST.yaml_bytes_max - 100)
    few = min(cost(short) for _ in range(3))
    for _ in range(TRIES):
        many = cost(long)
        if many < 40 * max(few, 0.005):
            return
    raise AssertionError(
        f"{many:.3f} s, and {few:.3f} s of a tenth of it"
    )  # as the square it would be 100 times as much


def test_a_request_has_limits_of_its_own() -> None:
    with pytest.raises(ConfigurationError, match="Send it as JSON"):
        read_yaml("a: " + "x" * REQUEST.yaml_bytes_max)
    with pytest.raises(ConfigurationError, match="Shorten it"):
        read_json('"' + "x" * REQUEST.json_bytes_max + '"')
    with pytest.raises(ConfigurationError, match="300,000 keys and values"):
        read_json("[" + "1," * 400_000 + "1]")
