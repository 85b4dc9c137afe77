"""What islands did not read as it lies in their files, as told by small stories."""

from __future__ import annotations

import json
from dataclasses import replace

from orchestrator.core import events as e
from orchestrator.core.messages import Progress
from orchestrator.core.vocabulary import DataFlaws, SourceFlaws
from orchestrator.tape.codec import decode_tagged, to_json

from .dictation import Dictation


def report(story: Dictation, at: float, flaws: DataFlaws, island: str = "east", incarnation: int = 1) -> None:
    story.tell(e.IslandReported(at, island, incarnation, Progress(1, 1, 10, 1.0, 0.1, 0.1, 3.0, flaws)))


def summary(story: Dictation) -> dict:
    return story.statistics.summary()["data_flaws"]


def test_the_lives_of_an_island_are_added_up_and_a_report_that_is_repeated_is_not():
    story = Dictation().train_from(0.0).train_from(0.0, "west")
    first = DataFlaws(unreadable_records=2, repeated_sequences=5)
    for flaws in (first, first, replace(first, repeated_sequences=7)):
        report(story, 1.0, flaws)
    report(story, 2.0, DataFlaws(unreadable_records=1, cut_pieces=1), incarnation=2)
    report(story, 3.0, first)
    report(story, 3.0, DataFlaws(omitted_sequences=1000), "west")
    counts = summary(story)
    assert counts["islands"]["east"] == {
        "unreadable_records": 3,
        "repeated_sequences": 7,
        "omitted_sequences": 0,
        "cut_pieces": 1,
    }
    assert counts["total"]["omitted_sequences"] == 1000
    assert "3 records or pieces of files could not be read" in counts["remark"]
    assert "1,000 sequences were skipped in their epoch; `atoll data index`" in counts["remark"]


def test_where_nothing_is_amiss_nothing_is_said():
    story = Dictation().train_from(0.0)
    report(story, 1.0, DataFlaws())
    assert (summary(story)["islands"], summary(story)["remark"]) == ({}, "")


def test_a_tape_says_flaws_only_where_there_are_some():
    told = e.IslandReported(1.0, "east", 1, Progress(1, 1, 10, 1.0, 0.1, 0.1, 3.0))
    assert "flaws" not in to_json(told)
    flawed = replace(told, report=replace(told.report, flaws=DataFlaws(cut_pieces=1)))
    for event in (told, flawed):
        assert decode_tagged(json.loads(to_json(event))) == event


def test_records_that_are_not_utf8_are_counted_by_source_over_lives_and_islands():
    story = Dictation().train_from(0.0).train_from(0.0, "west")
    web, code = SourceFlaws("web", 3, 2), SourceFlaws("code", 1, 0)
    flaws = DataFlaws(unreadable_records=4, sources=(code, web))
    for at, island, incarnation in ((1.0, "east", 1), (1.5, "east", 1), (2.0, "east", 2), (3.0, "west", 1)):
        report(story, at, flaws, island, incarnation)
    counts = summary(story)
    assert counts["sources"] == {
        "code": {"unreadable_records": 3, "not_utf8_records": 0},
        "web": {"unreadable_records": 9, "not_utf8_records": 6},
    }
    assert counts["remark"].endswith("of web 6 of 9 because they are not UTF-8")
    told = e.IslandReported(1.0, "east", 1, Progress(1, 1, 10, 1.0, 0.1, 0.1, 3.0, flaws))
    assert decode_tagged(json.loads(to_json(told))) == told
