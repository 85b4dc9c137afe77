"""Every message survives being written down, whatever values it carries."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import effects as f
from orchestrator.core.effects import Effect
from orchestrator.core.events import ContributionArrived, Event, FaultInjected, IslandReported, TimerFired
from orchestrator.core.messages import Progress
from orchestrator.core.saving import FragmentRestored, FromJournal
from orchestrator.core.vocabulary import Contribution, GraceTimer, IslandTimer, IslandTimerKind, JobPolicy, JobTimer
from orchestrator.errors import DataError
from orchestrator.simulation.plan import sample_policy
from orchestrator.tape.codec import REPORTED, decode, decode_tagged, name_of, to_json
from orchestrator.tape.schema import (
    Footer,
    Header,
    Record,
    decode_header,
    decode_line,
    encode_footer,
    encode_header,
    encode_record,
)

RESTORED_FROM = st.builds(FromJournal) | st.integers(min_value=1)
_VALUES = {float: st.floats(allow_nan=False), str: st.text(max_size=12)}


def _any(kind: type) -> st.SearchStrategy:
    for plain, strategy in _VALUES.items():
        st.register_type_strategy(plain, strategy)
    st.register_type_strategy(FragmentRestored, st.builds(FragmentRestored, checkpoint=RESTORED_FROM))
    return st.from_type(kind)


events = st.one_of(*[_any(kind) for kind in get_args(Event)])
effects = st.one_of(*[_any(kind) for kind in get_args(Effect)])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(n=st.integers(1), event=events, decided=st.lists(effects, max_size=4))
def test_a_record_comes_back_equal(n, event, decided):
    record = Record(n, event, tuple(decided))
    line = encode_record(record)
    assert "\n" not in line
    back = decode_line(line)
    assert back == record
    assert encode_record(back) == line


@settings(max_examples=100, deadline=None, derandomize=True)
@given(policy=_any(JobPolicy), started_at=st.floats(0, 2e9), epoch=st.integers(1, 9))
def test_a_header_comes_back_equal(policy, started_at, epoch):
    header = Header("a job", policy, started_at, epoch)
    assert decode_header(encode_header(header)) == header


def test_an_optional_field_and_a_nested_record_keep_their_types():
    effect = f.BeginCatchUp("asia", 2, ("europe", 1), 40, "why")
    assert decode_tagged(json.loads(to_json(effect))) == effect
    without = f.BeginCatchUp("asia", 2, None, 40, "why")
    assert decode_tagged(json.loads(to_json(without))) == without


def test_a_diverged_loss_does_not_stop_the_tape():
    event = IslandReported(1.0, "asia", 1, Progress(1, 1, 1, 1.0, 1.0, 1.0, float("nan")))
    line = encode_record(Record(1, event, ()))
    assert encode_record(decode_line(line)) == line


def test_footers_are_told_from_records():
    assert decode_line(encode_footer(Footer(7, "ab"))) == Footer(7, "ab")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"type": "NoSuchThing"}, "not an event or effect of this build"),
        ({"type": "JobStarted"}, "needs the field 'at'"),
        (
            {"type": "FinishJob", "outcome": "vanished", "reason": ""},
            "FinishJob.outcome cannot be 'vanished'",
        ),
    ],
)
def test_what_is_wrong_with_a_message_is_named(data, said):
    with pytest.raises(DataError, match=said):
        decode_tagged(data)


def test_a_policy_of_another_build_is_refused_by_name():
    plain = json.loads(to_json(sample_policy()))
    del plain["quorum"]
    with pytest.raises(DataError, match="JobPolicy needs the field 'quorum'"):
        decode(JobPolicy, plain)


def test_what_an_earlier_build_did_not_write_takes_its_default():
    fault = FaultInjected(1.0, "c", "somebody", "stop", "asia", 1, 6.0)
    plain = json.loads(to_json(fault))
    assert (plain.pop("bytes_per_second"), plain.pop("payloads"), plain.pop("host")) == (0.0, 0, None)
    assert decode_tagged(plain) == fault
    del plain["duration"]
    with pytest.raises(DataError, match="FaultInjected needs the field 'duration'"):
        decode_tagged(plain)

    plain = json.loads(to_json(sample_policy()))
    del plain["health"]
    assert decode(JobPolicy, plain) == sample_policy()
    c = Contribution("a.1.0.1", "a", 1, 0, 1, 4, 0, 4, 100, 100)
    event = json.loads(to_json(ContributionArrived(1.0, c, 2.5)))
    del event["displacement"]
    assert decode_tagged(event) == ContributionArrived(1.0, c, None)


@pytest.mark.parametrize("name", REPORTED)
def test_a_report_is_on_a_tape_as_it_was_before_one_event_carried_all_of_them(name):
    fields = {
        "IslandReady": {"device_count": 8, "start_seconds": 2.5},
        "IslandDrained": {},
        "IslandFlushed": {},
        "CatchUpFailed": {"donor": "europe", "reason": "it died"},
        "IslandNotSaved": {"checkpoint": 3, "reason": "the disk is full"},
        "IslandSaved": {"checkpoint": 3, "digest": "ab", "tokens_total": 512, "held_seconds": 0.1},
        "StepOverdue": {"seconds": 30.0, "usual_seconds": 0.5},
        "IslandCaughtUp": {"donor": None, "versions": [2, 1], "step": 9, "transfer_seconds": 0.5, "sources": []},
        "FragmentAdopted": {
            **{"fragment": 1, "version": 2, "step": 9, "tokens_total": 512, "kept_tokens": 64},
            "fix": {"tokens": 0, "step": 0},
        },
        "ProgressReported": {
            **{"step": 9, "steps_total": 9, "tokens_total": 512, "stepping_seconds": 4.5},
            **{"step_seconds_median": 0.5, "gap_max_seconds": 0.6, "loss": 5.0},
        },
    }[name]
    line = {"type": name, "at": 1.5, "island": "asia", "incarnation": 2, **fields}
    event = decode_tagged(line)
    assert (name_of(event), type(event.report)) == (name, REPORTED[name])
    assert to_json(event) == to_json(line)
    for field in ("at", "island", "incarnation"):
        with pytest.raises(DataError, match=f"{name} needs the field '{field}'"):
            decode_tagged({key: value for key, value in line.items() if key != field})


@pytest.mark.parametrize(
    ("timer", "text"),
    [
        (GraceTimer(3), "grace:3"),
        (IslandTimer(IslandTimerKind.BACKOFF, "asia"), "backoff:asia"),
        (IslandTimer(IslandTimerKind.SUSPECT, "a:b"), "suspect:a:b"),
        (IslandTimer(IslandTimerKind.DEPARTURE, "asia"), "departure:asia"),
        (JobTimer.FLUSH, "flush:job"),
        (JobTimer.CHECKPOINT_DUE, "checkpoint:due"),
        (JobTimer.CHECKPOINT_DEADLINE, "checkpoint:deadline"),
    ],
)
def test_a_timer_is_on_a_tape_as_its_text(timer, text):
    event = TimerFired(1.0, timer, 7)
    assert json.loads(to_json(event)) == {"type": "TimerFired", "at": 1.0, "timer": text, "serial": 7}
    assert decode_tagged(json.loads(to_json(event))) == event


@pytest.mark.parametrize("text", ["nap:asia", "grace:", "grace:asia", "flush", "", 7])
def test_a_timer_that_this_build_does_not_know_is_refused(text):
    with pytest.raises(DataError, match=r"TimerFired\.timer cannot be"):
        decode_tagged({"type": "TimerFired", "at": 1.0, "timer": text, "serial": 7})
