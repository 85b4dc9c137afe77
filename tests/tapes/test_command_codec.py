"""Commands as documents: what is written is read as the same; what this build does not know is refused, never guessed."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.commands import Cancel, Command, Kill, kind_of
from orchestrator.errors import DataError
from orchestrator.tape import codec

KINDS = {"kill", "drain", "readd", "scale", "cordon", "uncordon", "checkpoint", "rollback", "cancel", "inject"}
st.register_type_strategy(int, st.integers(-(2**62), 2**62))
commands = st.one_of(*[st.from_type(kind) for kind in get_args(Command)])


@settings(max_examples=200, derandomize=True)
@given(command=commands)
def test_a_command_comes_back_equal(command: Command) -> None:
    assert codec.decode_command(json.loads(json.dumps(codec.encode_command(command)))) == command


def test_the_words_of_the_store_and_of_calls_stay_as_they_are() -> None:
    assert set(codec.KINDS) >= KINDS
    assert codec.encode_command(Kill("asia", restart=False)) == {"kind": "kill", "island": "asia", "restart": False}
    assert codec.encode_command(Cancel()) == {"kind": "cancel"}
    assert kind_of(codec.decode_command({"kind": "inject", "fault": "stop", "island": "asia"})) == "stop"


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"kind": "banish", "island": "asia"}, "'banish' is known"),
        ({"island": "asia"}, "None is known"),
        ({"kind": ["kill"]}, "a list"),
        ({"kind": "kill", "island": "asia", "restart": True, "grace_s": 5.0}, "grace_s"),
        ({"kind": "drain"}, "lacks island"),
        ({"kind": "scale", "node_group": "asia", "count": "2"}, "not an integer"),
        ({"kind": "scale", "node_group": "asia", "count": True}, "not an integer"),
        ([], "a mapping"),
        (None, "a mapping"),
    ],
)
def test_what_this_build_does_not_know_is_refused_with_the_reason(document: Any, says: str) -> None:
    with pytest.raises(DataError) as refused:
        codec.decode_command(document)
    assert says in str(refused.value)
