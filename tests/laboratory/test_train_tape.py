"""Training by a tape: the bits of a recorded job again, contributors and weights of a simulated one, and no decisions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from learners.contract import StepResult
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Adopted, CaughtUp, Progress
from orchestrator.core.vocabulary import Instant
from orchestrator.elastic import ElasticPolicy
from orchestrator.errors import InvalidJobSpec
from orchestrator.laboratory import trace_reader, train_tape
from orchestrator.laboratory.multiplex import MultiplexedJob
from orchestrator.laboratory.trace_reader import Exported
from orchestrator.simulation.plan import Capacity, Fault, FaultKind
from orchestrator.simulation.world import World
from orchestrator.specification.config import parse_job
from orchestrator.tape.driver import MemorySink
from orchestrator.tape.schema import FleetHeader, Header, Tape
from orchestrator.tape.storage import TapeWriter
from tests.harness.reports import of_kind
from tests.hash_seeds import said_under
from tests.laboratory.array_trainer import TOKENS
from tests.laboratory.counting import NAMES, CountingTrainer, one_hot
from tests.laboratory.quadratic import QuadraticTrainer
from tests.laboratory.train_by_tape import FRAGMENTS, INTERVAL, ISLANDS, job, train, world

ADOPTIONS = ("replace", "rebase", "mix")
PLAIN = {"wire": "float32", "averaging": "mean", "outer_optimizer": {"kind": "sgd", "lr": 1.0}}


@pytest.mark.parametrize(
    ("adoption", "transfer", "spread", "wire"),
    [
        ("replace", 1.0, 0.4, "float32"),
        ("rebase", 1.0, 0.4, "float32"),
        ("mix", 1.0, 0.4, "float32"),
        ("rebase", 2.5, 0.3, "bfloat16"),
        ("rebase", 1.0, 0.4, "int4"),
        ("replace", 1.0, 0.4, "int4"),
        ("mix", 1.0, 0.4, "int8"),
        ("rebase", 2.5, 0.3, "e3m0"),
        ("rebase", 0.0, 0.0, "int4"),
        ("replace", 0.0, 0.0, "float32"),
    ],
)
def test_a_recorded_job_trained_by_its_tape_gives_the_same_bits(
    adoption: str, transfer: float, spread: float, wire: str
) -> None:
    """Rounds are missed, and offers made early and again: all of it is on the tape."""
    spec = job(60, adoption=adoption, grace_cap_steps=0.3, wire=wire)
    sink = MemorySink()
    recorded = MultiplexedJob(spec, ClockedTrainer, transfer_steps=transfer, speed_spread=spread, recorder=sink)
    for _ in recorded.run():
        pass
    trained = train(sink.tape(Header(spec.name, spec.policy())), spec, ClockedTrainer)
    assert trained.digest == recorded.outcome.digest
    assert trained.as_recorded_count == trained.merge_count > 2 * FRAGMENTS
    assert trained.curve[-1] == recorded.outcome.curve[-1]


class ClockedTrainer(QuadraticTrainer):
    """Its parameters depend on where the schedule is at every inner step."""

    def step(self, schedule_step: int) -> StepResult:
        result = super().step(schedule_step)
        self.load({name: value * np.float32(1 - 1e-4 * schedule_step) for name, value in self.parameters.items()})
        return result


@pytest.mark.parametrize("adoption", ["replace", "rebase"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_merge_has_the_recorded_contributors_and_weights(adoption: str, seed: int) -> None:
    """By a model of one line a merge; no island takes its state from a peer, whose unmerged work the line leaves out."""
    tape = world(seed, adoption, catch_up_failure=1.0, corrupt=0.05, duplicate=0.1, reorder=0.1).run().tape
    begun = _events(tape, CaughtUp)
    assert len(begun) > ISLANDS  # somebody died and came back
    assert all(event.donor is None for event in begun)
    made: list[CountingTrainer] = []

    def make(*arguments: Any) -> CountingTrainer:
        made.append(CountingTrainer(*arguments))
        return made[-1]

    trained = train(tape, job(adoption=adoption, **PLAIN), make)
    assert [trainer.sought for trainer in made] == _cursors_of_contributors(tape)
    expected = _by_counters(tape)
    assert len(expected) == len(NAMES)
    for name, value in expected.items():
        np.testing.assert_allclose(trained.parameters[name], value, rtol=1e-4)


def _by_counters(tape: Tape) -> dict[str, np.ndarray]:
    """Θ out of the tape's counters and weights: θ_m is its base with its own steps on top, Θ' their weighted mean."""
    shards = {plan.island: index for index, plan in enumerate(tape.header.policy.islands)}
    offers = {event.contribution.payload: event.contribution for event in _events(tape, e.ContributionArrived)}
    theta = {(p, 0): np.zeros(ISLANDS) for p in range(FRAGMENTS)}
    merging: dict[tuple[int, int], f.MergeFragment] = {}
    for record in tape.records:
        merging |= {(x.fragment, x.version): x for x in record.effects if isinstance(x, f.MergeFragment)}
        if isinstance(done := record.event, e.MergeCompleted):
            weighed = [(offers[item.payload], item.weight) for item in merging[done.fragment, done.version].inputs]
            theta[done.fragment, done.version] = np.sum(
                [
                    weight * (theta[c.fragment, c.base_version] + c.step_count * one_hot(shards[c.island], ISLANDS))
                    for c, weight in weighed
                ],
                axis=0,
            )
    latest = {p: max(v for q, v in theta if q == p) for p in range(FRAGMENTS)}
    return {name: theta[p, latest[p]] for p, name in enumerate(NAMES)}


def _cursors_of_contributors(tape: Tape) -> list[list[int]]:
    """Of each island: where the data of each of its lives began that is in a merge."""
    asked = {(x.island, x.incarnation): x.cursor for x in _effects(tape, f.BeginCatchUp)}
    completed = {(event.fragment, event.version) for event in _events(tape, e.MergeCompleted)}
    merges = [merge for merge in _effects(tape, f.MergeFragment) if (merge.fragment, merge.version) in completed]
    lives = {(i.island, int(i.payload.split(".")[1])) for merge in merges for i in merge.inputs}
    return [[asked[life] for life in sorted(lives) if life[0] == plan.island] for plan in tape.header.policy.islands]


@pytest.mark.parametrize("adoption", ADOPTIONS)
def test_islands_that_took_a_peers_state_take_it_from_the_same_moment(adoption: str) -> None:
    watched = world(4, adoption, fault_count=12, kind=_Watched, letter_s=(0.0, 0.0))
    tape = watched.run().tape
    trace = trace_reader.read(tape, adoption).trace
    exports = {m.receiver: m.steps for life in trace.lives.values() for m in life.moments if isinstance(m, Exported)}
    assert len(exports) >= 3
    assert exports.items() <= watched.donor_steps.items()
    assert train(tape, job(adoption=adoption)).merge_count == len(trace.merges)


class _Watched(World):
    """Sees how many steps a donor has taken when its state is moved, which no letter says."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.donor_steps: dict[tuple[str, int], int] = {}

    def tell(self, event: e.Event) -> None:
        report = e.report_of(event)
        if isinstance(event, e.IslandReported) and isinstance(report, CaughtUp) and report.donor is not None:
            donor = max(life for life in self.hosts if life[0] == report.donor)
            self.donor_steps[event.island, event.incarnation] = self.hosts[donor].process.replica.steps_total
        super().tell(event)


def test_twice_gives_the_same_bits_in_any_process() -> None:
    said = {_digest_in_a_process_of_its_own("0"), _digest_in_a_process_of_its_own("4242")}
    assert len(said) == 1
    assert len(said.pop().strip()) == 32


def _digest_in_a_process_of_its_own(hash_seed: str) -> str:
    return said_under(hash_seed, "-m", "tests.laboratory.train_by_tape", "5")


def test_an_island_short_of_capacity_trains_as_many_tokens_in_fewer_whole_steps() -> None:
    calm = world(0, "rebase", fault_count=0)
    first = calm.policy.islands[0].island
    tape = World(calm.policy, replace(calm.plan, capacity=(Capacity(2.0, first, 0.5),)), 0).run().tape
    trace = trace_reader.read(tape, "rebase").trace
    half = next(life for life in trace.lives.values() if life.id[0] == first)
    reports = [event for event in _events(tape, Progress) if event.island == first]
    assert trace.tokens_per_step == TOKENS
    assert half.step_count == reports[-1].tokens_total // TOKENS < 0.8 * reports[-1].steps_total


def test_a_job_without_failures_has_the_same_budget_and_nobody_away() -> None:
    tape = world(2, "rebase").run().tape
    trace = trace_reader.read(tape, "rebase").trace
    calm = train_tape.tape_without_failures(tape, trace, "rebase", trace.horizon_steps(trace.policy.token_budget))
    quiet = trace_reader.read(calm, "rebase").trace
    assert {incarnation for _, incarnation in quiet.lives} == {1}
    assert 0 <= quiet.tokens_trained - trace.policy.token_budget < 2 * ISLANDS * TOKENS
    assert train_tape.goodput_of(calm) > train_tape.goodput_of(tape)


def test_a_job_without_failures_ends_as_the_tape_does_with_as_much_work_in_flight() -> None:
    whole = world(2, "rebase").run().tape
    cut = world(2, "rebase").run(until=0.6 * whole.records[-1].event.at).tape
    in_flight = []
    for tape in (whole, cut):
        trace = trace_reader.read(tape, "rebase").trace
        tokens = trace.horizon_steps(trace.tokens_trained) * ISLANDS * TOKENS
        calm = train_tape.tape_without_failures(tape, trace, "rebase", trace.horizon_steps(trace.tokens_trained))
        quiet = trace_reader.read(calm, "rebase").trace
        assert quiet.ended == trace.ended
        assert 0 <= quiet.tokens_trained - tokens < 2 * ISLANDS * TOKENS
        in_flight.append(quiet.tokens_trained - _merged_tokens(calm) / FRAGMENTS)
    assert in_flight[0] < ISLANDS * TOKENS < in_flight[1]


def _merged_tokens(tape: Tape) -> int:
    """Over all fragments."""
    given = {event.contribution.payload: event.contribution for event in _events(tape, e.ContributionArrived)}
    return sum(given[item.payload].token_count for merge in _effects(tape, f.MergeFragment) for item in merge.inputs)


# ── what does not fit ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tape_that_does_not_fit_the_job_is_refused_with_every_problem_and_remedy(tmp_path, capsys) -> None:
    path, config = tmp_path / "tape.jsonl", tmp_path / "job.json"
    _write(world(1, "rebase").run().tape, path)
    document = job(fragments=3, interval_steps=24).model_dump(mode="json") | {"islands": [{"node_group": "here"}]}
    config.write_text(json.dumps(document | {"trainer": "learners.synthetic:create"}))
    assert train_tape.main([str(path), "--config", str(config), "--runs", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "(4 problems)" in said
    for part in ("List 4 islands", "Set it to 4.", "Set it to 12.", "trains no model"):
        assert part in said


@pytest.mark.parametrize(("recorded", "asked"), [("rebase", "replace"), ("replace", "rebase")])
def test_a_tape_whose_islands_adopted_otherwise_is_refused(recorded: str, asked: str) -> None:
    spec = job(60, adoption=recorded, grace_cap_steps=0.3)
    sink = MemorySink()
    for _ in MultiplexedJob(spec, QuadraticTrainer, transfer_steps=1.0, speed_spread=0.4, recorder=sink).run():
        pass
    tape = sink.tape(Header(spec.name, spec.policy()))
    with pytest.raises(InvalidJobSpec, match=f"Set it to {recorded}"):
        train_tape.match(tape, job(adoption=asked))


def test_a_tape_that_lost_an_adoption_is_refused() -> None:
    tape = world(1, "rebase").run().tape
    adopted = [n for n, record in enumerate(tape.records) if isinstance(e.report_of(record.event), Adopted)]
    gone = adopted[len(adopted) // 2]
    with pytest.raises(InvalidJobSpec, match="contradicts itself"):
        train_tape.match(replace(tape, records=tape.records[:gone] + tape.records[gone + 1 :]), job())


def test_a_tape_without_its_beginning_and_one_without_merges_are_refused() -> None:
    tape = world(1, "rebase").run().tape
    for records, told in (
        (tape.records[len(tape.records) // 2 :], "of unknown islands"),
        (tape.records[:8], "has no merge"),
    ):
        with pytest.raises(InvalidJobSpec, match=told):
            train_tape.match(replace(tape, records=records), job())


def test_a_fleets_tape_is_refused() -> None:
    header = FleetHeader("fleet", ElasticPolicy(blocks=()), {}, 0)
    with pytest.raises(InvalidJobSpec, match="level: protocol"):
        train_tape.match(Tape(header, ()), job())


def test_a_tape_that_breaks_off_is_trained_as_far_as_it_goes() -> None:
    whole = world(1, "rebase").run().tape
    half = replace(whole, records=whole.records[: len(whole.records) // 2])
    match = train_tape.match(half, job(adoption="rebase"))
    assert any("ends before its job" in note for note in match.notes)
    assert 0 < train(half, match.spec).merge_count < train(whole, match.spec).merge_count


def test_the_budget_is_the_jobs_where_it_was_reached_and_what_the_tape_trained_where_not() -> None:
    whole = world(2, "rebase", calm_at=5.0).run().tape
    ended = train_tape.match(whole, job(150, adoption="rebase"))
    assert ended.spec.horizon_steps == 200
    half = replace(whole, records=whole.records[: len(whole.records) // 2])
    broken_off = train_tape.match(half, job(150, adoption="rebase"))
    assert broken_off.spec.horizon_steps == broken_off.trace.tokens_trained // (ISLANDS * TOKENS)


def test_the_schedule_of_a_job_that_loses_islands_ends_with_its_budget_though_clocks_run_on() -> None:
    tape = world(2, "rebase", fault_count=12, calm_at=9.0).run().tape
    spec = job(adoption="rebase")
    taken: list[int] = []

    class Scheduled(QuadraticTrainer):
        def step(self, schedule_step: int) -> StepResult:
            taken.append(schedule_step)
            return super().step(schedule_step)

    train(tape, spec, Scheduled)
    clock = max(event.step for event in _events(tape, Progress))
    assert clock > 1.1 * spec.horizon_steps
    assert spec.horizon_steps - INTERVAL < max(taken) < spec.horizon_steps + INTERVAL


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.soak("a real model, where the others have a quadratic")
def test_the_command_trains_a_real_model_keeps_it_and_finds_the_same_bits_again(tmp_path, capsys) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
    lines = [json.dumps({"text": " ".join(str(n * n) for n in range(at, at + 50))}) for at in range(0, 5000, 50)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    document: dict[str, Any] = {
        "name": "tiny",
        "islands": [{"node_group": "here", "count": 2}],
        "budget": {"steps": 18},
        "model": {"factory": "tests.own_models:smallest"},
        "data": {"source": "files", "files": ["text.jsonl"], "sequence_length": 16},
        "training": {"batch_size": 2, "inner_optimizer": {"warmup_steps": 5, "lr": 0.01}},
        "synchroniser": {"fragments": 2, "interval_steps": 6, "overlap_steps": 2, "adoption": "rebase"},
        "evaluation": {"sequences": 8},
    }
    (tmp_path / "job.json").write_text(json.dumps(document))
    policy = parse_job(document | {"data": {"sequence_length": 16}}).policy()
    plan = replace(world(0, "rebase").plan, step_s=(0.05, 0.05), tokens_per_step=32, faults=_one_crash(policy, 0.9))
    _write(World(policy, plan, 0).run().tape, tmp_path / "tape.jsonl")
    command = [str(tmp_path), "--config", str(tmp_path / "job.json"), "--runs", str(tmp_path / "runs"), "--json"]
    said = []
    for extra in (["--baseline", "data-parallel"], ["--baseline", "data-parallel"], ["--again"], ["--seeds", "2"]):
        assert train_tape.main([*command, *extra]) == 0
        out, err = capsys.readouterr()
        told = json.loads(out)
        said.append(told["rows"])
        assert err.count("bit-identical to") == (extra == ["--again"])
    assert said[0] == said[1]
    assert said[0][:1] == said[2]
    assert [row["method"] for row in said[0]] == ["tape", "data-parallel"]
    assert all(2.0 < row["loss"] < 5.0 for row in said[0])
    assert said[0][0]["gap"] == 0.0 != said[0][1]["gap"]
    assert [row["seed"] for row in said[3]] == [0, 1]
    assert said[3][0] == said[0][0]
    assert said[3][1]["loss"] != said[3][0]["loss"]
    assert told["means"][0]["loss"] == pytest.approx((said[3][0]["loss"] + said[3][1]["loss"]) / 2)
    kept = (tmp_path / "runs" / "train-tape-tiny" / "runs.jsonl").read_text().splitlines()
    assert len(kept) == 4  # two, one again, and one of another seed


def test_the_mean_over_seeds_has_the_standard_error_of_its_gap() -> None:
    losses = {0: (1.02, 1.0), 1: (1.98, 2.0), 2: (3.09, 3.0)}
    rows = [row for seed, two in losses.items() for row in train_tape.judge(seed, _two_runs(*two))]
    tape, calm = train_tape.means(rows)
    assert (tape.method, tape.gap, tape.gap_stderr) == ("tape", 0.0, 0.0)
    assert (calm.loss, calm.gap) == (pytest.approx(2.0), pytest.approx(0.04 / 3))
    assert calm.gap_stderr == pytest.approx(np.std([0.02, -0.01, 0.03], ddof=1) / np.sqrt(3))
    assert train_tape.means(rows[:2]) == []


def _two_runs(tape: float, calm: float) -> list[train_tape.Run]:
    return [
        train_tape.Run("tape", "", tape, (), 1, 1.0, ""),
        train_tape.Run("no-failures", "", calm, (), 1, 1.0, ""),
    ]


def _one_crash(policy, at: Instant) -> tuple[Fault, ...]:
    return (Fault(at, FaultKind.CRASH, policy.islands[1].island),)


def _events(tape: Tape, kind: type) -> list[Any]:
    return of_kind((record.event for record in tape.records), kind)


def _effects(tape: Tape, kind: type) -> list[Any]:
    return [effect for record in tape.records for effect in record.effects if isinstance(effect, kind)]


def _write(tape: Tape, path: Path) -> None:
    with TapeWriter(path, tape.header) as writer:
        for record in tape.records:
            writer.append(record)
