"""Fleet tapes are tapes: written fast, read by the one reader, replayed by the one replay, the same in every process."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from orchestrator.elastic import BeginStall, DuringStall, SliceFailed
from orchestrator.errors import DataError
from orchestrator.simulation.fleet import FleetPlan, System
from orchestrator.simulation.fleet_world import FleetTape, FleetWorld, fleet_header
from orchestrator.tape.replay import replay
from orchestrator.tape.schema import FleetHeader, decode_header, decode_line, encode_header, encode_record
from orchestrator.tape.storage import TapeWriter, read_tape
from tests.hash_seeds import said_under
from tests.simulation.fleet_tapes import DigestSink, TextSink, plan_of
from tests.simulation.print_fleet_digests import plan


def _write(path, made, seed=11):
    with TapeWriter(path, fleet_header(made, seed)) as writer:
        world = FleetWorld(made, seed, tape=FleetTape(made, writer))
        for _ in world.batches():
            pass
    return world


@pytest.mark.parametrize("system", list(System))
@pytest.mark.parametrize("during", list(DuringStall))
def test_a_fleet_tape_is_read_and_replayed_like_any_other(tmp_path, system, during):
    """The flat loop's decisions are those of ``handle``, and its lines those of the schema's encoder."""
    made = replace(plan(system), during_stall=during, returns_join=during is DuringStall.JOINS, duration=15_000.0)
    world = _write(tmp_path / "tape.jsonl", made)
    tape = read_tape(tmp_path / "tape.jsonl")
    assert len(tape.records) == tape.footer.end == world.events > 400
    again = replay(tape)
    assert again.exact
    assert again.digest == tape.footer.digest
    lines = (tmp_path / "tape.jsonl").read_text().splitlines()
    assert [encode_record(record) for record in tape.records] == lines[1:-1]


def test_the_header_holds_the_plan_and_the_seed(tmp_path):
    _write(tmp_path / "tape.jsonl", plan(System.DILOCO), seed=4)
    header = read_tape(tmp_path / "tape.jsonl").header
    assert isinstance(header, FleetHeader)
    assert plan_of(header) == plan(System.DILOCO)
    assert header.seed == 4
    assert decode_header(encode_header(header)) == header
    sink = DigestSink(fleet_header(plan_of(header), header.seed))
    for _ in FleetWorld(plan_of(header), header.seed, tape=FleetTape(plan_of(header), sink)).batches():
        pass
    assert sink.digest.hex() == read_tape(tmp_path / "tape.jsonl").footer.digest


def test_a_changed_decision_is_found(tmp_path):
    _write(tmp_path / "tape.jsonl", plan(System.DECOUPLED))
    tape = read_tape(tmp_path / "tape.jsonl")
    index = next(n for n, r in enumerate(tape.records) if isinstance(r.event, SliceFailed) and len(r.effects) == 2)
    record = tape.records[index]
    begin = next(effect for effect in record.effects if isinstance(effect, BeginStall))
    changed = replace(record, effects=(record.effects[0], replace(begin, learner=begin.learner + 1)))
    again = replay(replace(tape, records=(*tape.records[:index], changed, *tape.records[index + 1 :])))
    assert again.divergence.n == index + 1
    assert again.divergence.decided == record.effects
    elastic = replace(tape.header.policy, during_stall=DuringStall.RESTARTS)
    assert not replay(replace(tape, header=replace(tape.header, policy=elastic))).exact


def test_a_changed_line_breaks_the_seal(tmp_path):
    path = tmp_path / "tape.jsonl"
    _write(path, plan(System.DATA_PARALLEL))
    lines = path.read_text().splitlines()
    lines[5] = lines[5].replace('"slice":', '"slice":1')
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="changed after it was sealed"):
        read_tape(path)


def test_every_sink_seals_the_same_digest(tmp_path):
    made = FleetPlan(1_200_000, 90_000.0)  # more than one block of lines
    world = _write(tmp_path / "tape.jsonl", made, 2)
    sink = TextSink(fleet_header(made, 2))
    for _ in FleetWorld(made, 2, tape=FleetTape(made, sink)).batches():
        pass
    assert world.events > 8_192
    assert sink.sealed() == (tmp_path / "tape.jsonl").read_text()


def test_a_tape_that_breaks_off_can_be_read_to_its_end(tmp_path):
    made, path = FleetPlan(1_200_000, 90_000.0), tmp_path / "tape.jsonl"
    writer = TapeWriter(path, fleet_header(made, 2))
    for _, _ in zip(range(5), FleetWorld(made, 2, tape=FleetTape(made, writer)).batches(), strict=False):
        pass
    tape = read_tape(path)
    assert tape.footer is None
    assert replay(tape).exact
    writer.close()
    assert read_tape(path).footer.end == len(tape.records) > 100


def test_lines_are_json_with_the_schema_of_every_tape():
    made = plan(System.ELASTIC_DATA_PARALLEL)
    sink = TextSink(fleet_header(made, 1))
    for _ in FleetWorld(made, 1, tape=FleetTape(made, sink)).batches():
        pass
    header, *records, footer = (json.loads(line) for line in sink.sealed().splitlines())
    assert header["schema"] == "atoll-tape/1"
    assert header["fleet"] is True
    assert [record["n"] for record in records] == list(range(1, footer["end"] + 1))
    kinds = {record["event"]["type"] for record in records}
    assert kinds == {"SliceFailed", "SliceReturned", "StallEnded", "BlockArrived", "BlockLeft"}
    times = [record["event"]["at"] for record in records]
    assert times == sorted(times)
    assert decode_line(sink.sealed().splitlines()[1]).n == 1


def test_tapes_do_not_depend_on_the_hash_seed():
    said = {said_under(seed, "-m", "tests.simulation.print_fleet_digests") for seed in ("0", "1", "4242")}
    assert len(said) == 1
    assert len(said.pop().splitlines()) == len(System)
