"""A streamed job's batches: each island's own text, the same however often it begins again, mixed, and bounded."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from learners import jax_trainer
from learners.island_spec import IslandSpec
from learners.streaming import files, order, streamed
from learners.text import Text
from learners.tokenizer import Bytes
from orchestrator.core.vocabulary import NO_FLAWS, DataFlaws, SourceFlaws
from orchestrator.errors import ConfigurationError, UnreadableData
from orchestrator.system.roots import AllowedRoots

LENGTH = 32


def word(kind: str, number: int) -> str:
    """A document of one line that says which it is, so that a window of it can be found again."""
    return " ".join(f"{kind}{number:04d}{place:02d}" for place in range(12))


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "PIECE_BYTES_MIN", 2_000)
        patch.setattr(order, "PIECE_BYTES_MAX", 4_000)
        patch.setattr(order, "GROUP_BYTES", 12_000)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, kind, counts in (("web", "w", (400, 1, 300)), ("code", "c", (500,))):
        first = 0
        for file, count in enumerate(counts):
            lines = [json.dumps({"text": word(kind, first + number)}) for number in range(count)]
            (folder / f"{name}-{file}.jsonl").write_text("\n".join(lines) + "\n")
            first += count
    return folder


@pytest.fixture
def make_text(make_job, folder):
    def make(seed=0, batch_size=4, legs=(), unreadable_max=0, sources=None, root=None, **changes):
        section = {
            "source": "streamed",
            "sources": sources
            or [
                {"name": "web", "files": sorted(map(str, folder.glob("web*"))), "weight": 3},
                {"name": "code", "files": [str(folder / "code-0.jsonl")], "weight": 1},
            ],
            "sequence_length": LENGTH,
            "held_out_ratio": 0.1,
            "unreadable_max": unreadable_max,
        }
        spec = make_job(data=section, seed=seed, training={"batch_size": batch_size}, **changes)
        document = {**spec, "roots": AllowedRoots.only(root or folder), "legs": legs}
        text = Text(document)
        text.spec = document
        return text

    return make


def documents_of(batches) -> Counter:
    """How often each document is in these tokens, as far as its name is whole there."""
    counts: Counter = Counter()
    for sequence in np.concatenate(batches):
        text = bytes(sequence.astype(np.uint8)).decode()
        counts.update({name[:5] for name in text.split() if len(name) == 7 and name[0] in "wc"})
    return counts


def test_batches_follow_from_their_number_alone(make_text) -> None:
    forwards, again, other = (make_text(seed=seed).draw(0, 2) for seed in (5, 5, 6))
    drawn = [forwards(number) for number in range(120)]
    assert all(np.array_equal(drawn[number], again(number)) for number in (119, 3, 60, 0))
    assert drawn[0].dtype == np.int32
    assert drawn[0].shape == (4, LENGTH + 1)
    assert not np.array_equal(drawn[0], other(0))


def test_islands_have_documents_of_their_own_and_nobody_has_those_held_out(make_text) -> None:
    text = make_text()
    held_out = set(documents_of(text.held_out_batches(4)))
    first, second = (set(documents_of(list(map(text.draw(shard, 2), range(600))))) for shard in range(2))
    assert not first & second
    assert not held_out & (first | second)
    assert len(first | second) > 900, "of 1,201 documents, a tenth of them held out"


@pytest.fixture(params=["small", "by ratio"])
def size_of_sources(request, monkeypatch) -> None:
    """Sources that are looked through for documents to hold out, and those that are not."""
    if request.param == "by ratio":
        monkeypatch.setattr(files, "SMALL_BYTES", 0)


@pytest.mark.usefixtures("size_of_sources")
def test_equal_documents_are_on_one_side_in_whatever_files_and_sources_they_are(make_text, tmp_path, folder) -> None:
    lines = (folder / "code-0.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "backwards.jsonl").write_bytes(b"".join(reversed(lines)))
    (tmp_path / "some.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[::2])))
    texts = [json.loads(line)["text"] for line in lines]
    pyarrow.parquet.write_table(pa.table({"text": texts[100:]}), tmp_path / "rest.parquet", row_group_size=50)
    sources = [
        {"name": "one", "files": [str(folder / "code-0.jsonl"), str(tmp_path / "some.jsonl.gz")]},
        {"name": "other", "files": [str(tmp_path / "rest.parquet"), str(tmp_path / "backwards.jsonl")]},
    ]
    text = make_text(sources=sources, root=tmp_path.parent.parent, evaluation={"sequences": 60})
    held_out = set(documents_of(text.held_out_batches(4)))
    trained = set(documents_of(list(map(text.draw(0, 1), range(900)))))
    assert len(held_out) > 10
    assert not held_out & trained
    assert len(trained) > 350


@pytest.mark.usefixtures("size_of_sources")
def test_files_that_a_source_reserves_are_measured_and_nowhere_trained_on(make_text, tmp_path, folder) -> None:
    lines = (folder / "code-0.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "reserved.jsonl").write_bytes(b"".join(lines[100:200:5]))
    sources = [
        {"name": "web", "files": sorted(map(str, folder.glob("web*")))},
        {"name": "code", "files": [str(folder / "code-0.jsonl")], "held_out": [str(tmp_path / "reserved.jsonl")]},
    ]
    text = make_text(sources=sources, root=tmp_path.parent.parent, evaluation={"sequences": 60})
    held_out = set(documents_of(text.held_out_batches(4)))
    trained = set(documents_of(list(map(text.draw(0, 1), range(900)))))
    of_code = {name for name in held_out if name[0] == "c"}
    assert of_code <= {f"c{number:04d}" for number in range(100, 200, 5)}
    assert len(of_code) > 10
    assert not held_out & trained


def test_what_an_island_did_not_read_as_it_lies_there_is_counted(make_text, tmp_path, folder) -> None:
    lines = (folder / "code-0.jsonl").read_bytes().splitlines(keepends=True)
    lines[250] = b"{damaged\n"
    (tmp_path / "damaged.jsonl").write_bytes(b"".join(lines))
    sources = [{"name": "damaged", "files": [str(tmp_path / "damaged.jsonl")]}]
    model = {"factory": "tests.own_models:smallest"}
    spec = make_text(sources=sources, root=tmp_path, unreadable_max=1, batch_size=28, model=model).spec
    trainer = jax_trainer.create(spec, 0, 1)
    assert [trainer.step(0).flaws for _ in range(60)][-1] == DataFlaws(1, sources=(SourceFlaws("damaged", 1, 0),))


def test_sources_are_mixed_by_their_weights(make_text) -> None:
    counts = documents_of(list(map(make_text().draw(0, 1), range(256))))
    web = sum(count for name, count in counts.items() if name[0] == "w")
    assert web / counts.total() == pytest.approx(0.75, abs=0.02)


def windows_of(draw, first: int, count: int) -> list[bytes]:
    return [bytes(row[1:]) for number in range(first, count) for row in draw(number).astype(np.uint8)]


@pytest.mark.parametrize("sample", [0.8, 1.0, 1.3])
def test_what_is_drawn_twice_of_a_part_in_sections_is_counted_and_what_is_passed_over_comes_next(
    make_text, folder, monkeypatch, sample
) -> None:
    """The sample is right, or promises too much or too little."""
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    monkeypatch.setattr(order, "SECTION_BYTES", 20_000)
    sampled = streamed.Streamed._sampled

    def wrong(self, *of):
        tokens, stored = sampled(self, *of)
        return int(tokens * sample), stored

    monkeypatch.setattr(streamed.Streamed, "_sampled", wrong)
    sources = [{"name": "code", "files": [str(folder / "code-0.jsonl")]}]
    text = make_text(sources=sources, batch_size=1)
    (sections,) = streamed.Streamed(IslandSpec.of(text.spec), Bytes()).sections(0, 1)
    assert len(sections.sections) > 2
    epoch = sum(sections.quotas)
    for section in sections.sections:
        section.place(10_000)
    draw = text.draw(0, 1)
    drawn = windows_of(draw, 0, epoch)
    once = len(set(drawn))
    draw(epoch)  # the next section, or the same again: what is left of the last one is known
    has, flaws = sum(section.sequence_count for section in sections.sections), text.flaws()
    assert flaws.repeated_sequences == pytest.approx(epoch - once, abs=5)
    assert (once < 0.9 * epoch) == (sample > 1)
    assert flaws.omitted_sequences == pytest.approx(has - once, abs=0.02 * has)
    if sample < 1:
        following = windows_of(draw, epoch, 2 * epoch)
        assert len({*drawn, *following}) > 0.98 * has, "what was passed over was not drawn next"


def test_what_was_not_drawn_of_a_promise_is_not_counted(make_text, folder, monkeypatch) -> None:
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    monkeypatch.setattr(order, "SECTION_BYTES", 20_000)
    monkeypatch.setattr(streamed, "SAMPLED_PIECES_MAX", 1)
    text = make_text(batch_size=1)
    list(map(text.draw(0, 1), range(50)))
    flaws = text.flaws()
    assert flaws.repeated_sequences + flaws.omitted_sequences == 0


def test_islands_with_other_batches_and_in_other_numbers_go_on_behind_the_cursors(make_text) -> None:
    """Two islands, with batches of 4 and 6, are resumed by three with batches of 2, 5 and 3."""
    before = [make_text(batch_size=size).draw(shard, 2) for shard, size in enumerate((4, 6))]
    drawn = [batch for draw, count in zip(before, (9, 4), strict=True) for batch in map(draw, range(count))]
    legs = [(2, (4 * 9 // 2, 6 * 4 // 2))]
    after = [make_text(batch_size=size, legs=legs).draw(shard, 3) for shard, size in enumerate((2, 5, 3))]
    drawn += [batch for draw, count in zip(after, (20, 8, 14), strict=True) for batch in map(draw, range(count))]
    straight = [make_text(batch_size=1).draw(shard, 2) for shard in range(2)]
    streams = [Counter(bytes(draw(n).astype(np.uint8)) for n in range(150)) for draw in straight]
    sequences = Counter(bytes(row) for row in np.concatenate(drawn).astype(np.uint8))
    assert sequences <= streams[0] + streams[1]


def test_the_loss_is_by_source_and_per_byte(make_text) -> None:
    measured = make_text(evaluation={"sequences": 40}).measure(lambda batch: float(batch[0, 0] == ord("c")) + 1, 4, 1e9)
    assert [source.source for source in measured.sources] == ["code", "web"]
    assert 40 <= measured.sequence_count <= 44
    assert measured.bits_per_byte == pytest.approx(measured.loss / math.log(2))
    assert measured.loss == pytest.approx(1 + 12 / measured.sequence_count)


def test_where_time_is_short_every_source_is_still_measured(make_text) -> None:
    clock = iter(range(10_000))
    text = make_text(evaluation={"sequences": 40})
    measured = streamed_measure(text, clock)
    assert [source.source for source in measured.sources] == ["code", "web"]
    assert measured.sequence_count < 40


def streamed_measure(text, clock):
    from learners.held_out import measure_by_source

    return measure_by_source(text._text.held_out_batches(4), lambda _: 1.0, 6.0, lambda: next(clock))


def test_the_unigram_loss_is_that_of_letters(make_text) -> None:
    assert 1.0 < make_text().unigram_loss() < math.log(20)


def test_two_groups_of_each_source_are_held_and_no_more(make_text, monkeypatch) -> None:
    monkeypatch.setattr(files, "SMALL_BYTES", 0)  # else all of it is looked through
    read = []
    documents = streamed.Reader.documents
    monkeypatch.setattr(
        streamed.Reader, "documents", lambda self, *piece: read.append(piece) or documents(self, *piece)
    )
    draw = make_text().draw(0, 2)
    draw(0)
    total = len(set(read))
    pieces_of_group = 12_000 // 2_000 + 1
    assert total <= 2 * (streamed.SAMPLED_PIECES + 2 * pieces_of_group)
    once = len(read)
    draw(0)
    assert len(read) == once


def test_a_shard_without_text_is_refused(make_text, folder) -> None:
    with pytest.raises(ConfigurationError, match="too few to give each of 100 islands a sequence"):
        make_text().draw(0, 100)
    one = [{"name": "one", "files": [str(folder / "web-1.jsonl")]}]
    with pytest.raises(ConfigurationError, match="no text to train on"):
        make_text(sources=one).draw(0, 1)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_islands_share_a_small_compressed_file_though_most_pieces_of_it_are_empty(make_text, tmp_path, ending) -> None:
    """Its lines are known by what was decompressed with them: here several pieces at once."""
    draw = np.random.default_rng(4)
    lines = [json.dumps({"text": draw.bytes(40).hex()}) + "\n" for _ in range(900)]
    compress = gzip.compress if ending == ".gz" else zstandard.compress
    parts = ["".join(lines[at : at + 100]).encode() for at in range(0, 900, 100)]
    (tmp_path / f"a.jsonl{ending}").write_bytes(b"".join(map(compress, parts)))
    sources = [{"name": "a", "files": [str(tmp_path / f"a.jsonl{ending}")]}]
    for shard in range(2):
        text = make_text(sources=sources, root=tmp_path)
        batches = np.concatenate(list(map(text.draw(shard, 2), range(100))))
        assert min(len(set(row)) for row in batches.tolist()) > 8, "a sequence of hardly anything but separators"
        assert text.flaws().repeated_sequences < 20


def test_pieces_without_text_have_no_sequences(make_text, tmp_path, monkeypatch) -> None:
    """A long line is all in one piece, and the pieces that it goes on in have no text."""
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    lines = [word("c", number) for number in range(300)]
    lines.insert(150, " ".join(word("w", number) for number in range(700)))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    monkeypatch.setattr(order, "GROUP_BYTES", 4_000)
    text = make_text(sources=[{"name": "a", "files": [str(tmp_path / "a.jsonl")]}], root=tmp_path)
    batches = np.concatenate(list(map(text.draw(0, 1), range(600))))
    assert min(len(set(row)) for row in batches.tolist()) > 3
    assert text.flaws() == NO_FLAWS


def test_a_shard_without_a_sequence_is_refused_though_it_has_many_pieces(make_text, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": word("c", 1) * 9}) + "\n" * 20_000)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": word("w", n)}) + "\n" for n in range(99)))
    sources = [{"name": "a", "files": [str(tmp_path / "a.jsonl")], "held_out": [str(tmp_path / "b.jsonl")]}]
    text = make_text(sources=sources, root=tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"island's part of a has 0 tokens, less than one sequence of 32\. .*Add text"
    ):
        [text.draw(shard, 2)(0) for shard in range(2)]


def test_text_without_lines_is_several_documents(make_text, tmp_path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(word("c", number) for number in range(5000)))
    text = make_text(sources=[{"name": "a", "files": [str(tmp_path / "a.txt")]}], root=tmp_path)
    trained = documents_of(list(map(text.draw(0, 1), range(60))))
    assert len(trained) > 100
    assert trained.keys().isdisjoint(documents_of(text.held_out_batches(4)))


def test_a_damaged_record_ends_the_job_or_is_passed_over(make_text, tmp_path, folder) -> None:
    content = (folder / "code-0.jsonl").read_bytes().splitlines(keepends=True)
    content[250] = b"{damaged\n"
    (folder / "damaged.jsonl").write_bytes(b"".join(content))
    sources = [{"name": "damaged", "files": [str(folder / "damaged.jsonl")]}]

    def everything(text):
        draw = text.draw(0, 1)
        return [draw(number) for number in range(420)], text.held_out_batches(4)

    with pytest.raises(UnreadableData, match=r"data\.unreadable_max is 0"):
        everything(make_text(sources=sources))
    everything(make_text(sources=sources, unreadable_max=1))


def test_the_real_trainer_trains_and_evaluates_on_streamed_text(make_text, make_job, folder) -> None:
    sources = [
        {"name": "web", "files": sorted(map(str, folder.glob("web*")))},
        {"name": "code", "files": [str(folder / "code-0.jsonl")]},
    ]
    spec = make_job(data={"source": "streamed", "sources": sources, "sequence_length": LENGTH, "held_out_ratio": 0.1})
    trainer = jax_trainer.create({**spec, "roots": AllowedRoots.only(folder)}, 0, 2)
    assert math.isfinite(trainer.step(0).loss)
    measured = trainer.evaluate(trainer.snapshot(trainer.tensor_shapes()).arrays())
    assert [source.source for source in measured.sources] == ["code", "web"]
    assert measured.bits_per_byte == pytest.approx(measured.loss / math.log(2))
