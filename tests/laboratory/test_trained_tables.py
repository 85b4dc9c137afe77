"""Trained tables: what a cell is made of, that nothing is trained twice, and what only the laboratory can vary."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from orchestrator.core.vocabulary import FragmentId, IslandId, Version
from orchestrator.laboratory import trained_tables
from orchestrator.laboratory.baselines import FinishedRuns, Trained
from orchestrator.laboratory.train_tape import goodput_of
from orchestrator.laboratory.trained_tables import SIZES, SMALLEST, TABLES, Rate, Run, Training, exponent
from orchestrator.laboratory.variants import CUTS, ONE_BIT, LossyChannel, failing_fleet, sign_of_blocks
from orchestrator.parameters import fragment_map, wire_format
from orchestrator.parameters.pieces import piece_named
from orchestrator.simulation import published
from orchestrator.simulation.published import cells_of

RATE = Rate({"adamw": 0.001, "muon": 0.002}, 1e10)


def test_a_table_is_stored_cell_by_cell_and_nothing_is_trained_twice(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(trained_tables, "measured_rate", lambda: RATE)
    command = ["quality", "--only", "adamw, M = 1", "--steps", "31", "--into", str(tmp_path)]
    assert trained_tables.main([*command, "--estimate"]) == 0
    assert "2 of 2 trainings to do" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "quality.json").exists()
    assert trained_tables.main(command) == 0
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert len(runs) == 2
    losses = {run["name"].split(", ")[1]: run["result"]["loss"] for run in runs}
    document = json.loads((tmp_path / "quality.json").read_text())
    cells = {(cell.row, cell.column): cell for cell in cells_of(document)}
    ours = cells[f"{SMALLEST}, adamw", "M = 1"]
    assert ours.ours == pytest.approx(losses["diloco"] / losses["data-parallel"] - 1.0)
    assert ours.published == -0.001
    assert cells[f"{SMALLEST}, adamw", "data-parallel"].ours == losses["data-parallel"]
    assert cells[f"{SMALLEST}, adamw", "M = 8"].ours is None
    assert "above data-parallel" in document["agreement"]
    assert any("Not run at 3M" in note for note in document["notes"])
    before = (tmp_path / "runs.jsonl").read_bytes()
    assert trained_tables.main(command) == 0
    assert (tmp_path / "runs.jsonl").read_bytes() == before
    assert "trainings to do" not in capsys.readouterr().err.partition("finished")[2]
    monkeypatch.setattr(
        trained_tables, "measured_rate", lambda: pytest.fail("nothing is left whose cost depends on it")
    )
    assert trained_tables.main([*command, "--estimate"]) == 0
    assert "All 2 trainings are stored" in " ".join(capsys.readouterr().err.split())
    assert trained_tables.main([*command, "--estimate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trainings_left"] == 0


def test_damaged_lines_count_as_trainings_that_are_not_finished(tmp_path: Path, capsys) -> None:
    file, console = tmp_path / "runs.jsonl", Console(stderr=True, width=1000)
    result = Trained(2.5, ((9, 2.5),), 1.0, "digest")

    def keep(key: str) -> None:
        run = Run(key, f"training {key}", 0, 9, 1.0, "2026-01-01", result)
        FinishedRuns(tmp_path, Run, console).keep(run)

    keep("first")
    whole = file.read_bytes()
    file.write_bytes(b'hello\n[1, 2]\n{"key": "x"}\n\xff\xfe\n' + whole + whole[: len(whole) // 2])  # a full disk
    keep("second")
    assert f"{file}: 5 lines cannot be read" in capsys.readouterr().err
    runs = FinishedRuns(tmp_path, Run, console)
    assert [key for key in ("first", "second", "x") if runs.get(key) is not None] == ["first", "second"]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(trained_tables, "measured_rate", lambda: pytest.fail("it measures first"))
    monkeypatch.setenv("COLUMNS", "500")  # so that no path is broken
    (tmp_path / "runs.jsonl").mkdir()
    assert trained_tables.main(["quality", "--into", str(tmp_path)]) == 2
    assert "runs.jsonl cannot be read or written: Is a directory" in " ".join(capsys.readouterr().err.split())


def test_a_name_that_no_cell_has_is_refused(tmp_path: Path, capsys) -> None:
    assert trained_tables.main(["quality", "--only", "sgd", "--into", str(tmp_path)]) == 2
    assert "no cell's name" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("size", SIZES)
def test_every_cell_can_be_trained(table: str, size: str) -> None:
    wanted = list(TABLES[table](size, 0))
    assert len({(one.cell.row, one.cell.column) for one in wanted}) == len(wanted)
    for training in {training for one in wanted for training in one.trainings}:
        spec = training.spec(0)
        assert spec.island_count == training.learners
        trained = spec.horizon_steps * spec.tokens_per_step * training.learners
        assert trained == pytest.approx(20 * SIZES[size].parameters, rel=0.01)
        assert RATE.seconds(training) > 0.0


def test_the_command_line_offers_the_sizes_that_there_are() -> None:
    assert tuple(SIZES) == published.TRAINED_SIZES


def test_the_size_of_a_model_is_that_of_its_specification() -> None:
    for name, size in SIZES.items():
        shapes = Training(name, "data-parallel").spec(0).model.network.shapes
        matrices = sum(math.prod(shape) for tensor, shape in shapes.items() if "norm" not in tensor)
        assert matrices == size.parameters
        assert size.parameters == pytest.approx(float(name.removesuffix("M")) * 1e6, rel=0.17)


def test_the_exponent_is_that_of_a_power_of_m() -> None:
    results = [Trained(2.5 * learners**0.0116, (), 1.0) for learners in published.LEARNER_COUNTS]
    assert exponent(results) == pytest.approx(0.0116)


def test_the_shape_says_what_rises_and_what_does_not() -> None:
    row = [
        published.Cell("x", published.by_learners(learners), change)
        for learners, change in zip(published.LEARNER_COUNTS, (-0.01, 0.02, 0.01, 0.03), strict=True)
    ]
    agreement = published.TRAINED["quality"].agreement
    assert agreement(row) == "x: M = 1 is not above data-parallel, does not always rise in M"
    assert "rises in M" in agreement([replace(cell, ours=0.01 * (cell.at or n)) for n, cell in enumerate(row)])


@pytest.mark.parametrize("cut", CUTS)
def test_fragments_have_every_value_once(cut: str) -> None:
    shapes = {"embed": (256, 16), "query": (4, 16, 16), "up": (4, 16, 48), "norm": (4, 16)}
    roles = {name: fragment_map.Role(stacked_axes=1) for name in ("query", "up", "norm")}
    fragments = CUTS[cut](shapes, 4, roles)
    assert len(fragments) == 4
    assert sum(fragment_map.sizes(fragments, shapes)) == sum(map(math.prod, shapes.values()))
    names = [name for members in fragments for name in members]
    assert len(set(names)) == len(names)
    if cut == "tensors":
        assert {piece_named(name).bounds for name in names} == {None}
    if cut == "layers":
        assert all(sum(piece_named(name).tensor == "query" for name in members) == 1 for members in fragments)


@pytest.mark.parametrize("coding", [ONE_BIT, "int2", "int4", "bfloat16"])
def test_error_feedback_sends_in_the_end_what_it_withheld(coding: str) -> None:
    generator = np.random.default_rng(3)
    wanted = [{"w": generator.standard_normal((40, 7), dtype=np.float32)} for _ in range(60)]

    def sent(feedback: bool) -> np.ndarray:
        channel = LossyChannel(coding, feedback)
        contents = [wire_format.encode(each, base=Version(n)) for n, each in enumerate(wanted)]
        passed = [channel(IslandId("a"), FragmentId(0), content) for content in contents]
        assert [wire_format.parse(one).base for one in passed] == list(range(60))
        return np.sum([wire_format.decode(one)["w"] for one in passed], axis=0)

    total = np.sum([each["w"] for each in wanted], axis=0)
    with_it, without = (float(np.abs(sent(feedback) - total).mean()) for feedback in (True, False))
    assert with_it < 0.5 * without


def test_one_bit_is_the_sign_at_the_scale_of_least_error() -> None:
    values = np.random.default_rng(0).standard_normal((3, 50), dtype=np.float32)
    coded = sign_of_blocks(values)
    assert np.array_equal(np.sign(coded), np.where(values < 0.0, -1.0, 1.0))
    for start, stop in ((0, 128), (128, 150)):
        scales = np.unique(np.abs(coded.reshape(-1)[start:stop]))
        assert scales == pytest.approx([np.abs(values.reshape(-1)[start:stop]).mean()])


def test_a_simulated_fleet_loses_what_its_failures_cost() -> None:
    tape = failing_fleet(Training(SMALLEST, "failures", 8, overlap=4, quorum=1, grace=3.0).spec(0, 200), 7)
    assert 0.7 < goodput_of(tape) < 0.97
