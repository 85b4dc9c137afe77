"""A parameter shard: what is held may merge, what is journalled is published, and several shards do what one does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import (
    CloseReason,
    Epoch,
    FragmentId,
    IslandId,
    PayloadId,
    RefusalReason,
    Version,
    WeightedPayload,
)
from orchestrator.errors import InternalError
from orchestrator.parameters import wire_format
from orchestrator.parameters.codec.registry import CODEC_NAMES, CodecName, codec
from orchestrator.parameters.holding import EVERYTHING
from orchestrator.parameters.journal import Journal
from orchestrator.parameters.journaled_store import recovered
from orchestrator.parameters.outer_optimizer import Nesterov
from orchestrator.parameters.outer_state import Averaging, NotFinite, OuterState, OuterStep
from orchestrator.parameters.shard import Held, ParameterShard, Publication, Unusable

P = FragmentId
EPOCH = Epoch(1)
STEP = OuterStep(Averaging.RADIAL, Nesterov(lr=0.7, decay=0.9))
MAP = (("a",), ("b",), ("c",))


def outer() -> OuterState:
    generator = np.random.default_rng(0)
    tensors = {name: generator.standard_normal((4, 3), dtype=np.float32) for name in "abc"}
    return OuterState(tensors, MAP, STEP)


def shard(folder: Path, *fragments: int) -> ParameterShard:
    made = ParameterShard(Journal(folder), EPOCH, lambda _, work: work())
    made.seed(outer().part(map(P, fragments)), {})
    return made


def offered(fragment: int, island: int, codec_name: CodecName = "float32", base: int | None = 0) -> memoryview:
    learned = np.random.default_rng(island).standard_normal((4, 3), dtype=np.float32)
    return wire_format.encode({"abc"[fragment]: learned}, codec_name, None if base is None else Version(base))


def order(fragment: int, *payloads: str) -> MergeFragment:
    weighted = tuple(WeightedPayload(PayloadId(name), IslandId(name), 1 / len(payloads)) for name in payloads)
    return MergeFragment(EPOCH, P(fragment), Version(1), 12, weighted, CloseReason.EVERYONE_IN, "")


def same(one: Publication, other: Publication) -> bool:
    facts = [
        (
            p.fragment,
            p.version,
            p.digest,
            p.update and p.update.payload(EVERYTHING),
            p.values(EVERYTHING),
            p.values_bytes,
        )
        for p in (one, other)
    ]
    return facts[0] == facts[1]


@pytest.mark.parametrize("codec_name", CODEC_NAMES)
def test_what_arrives_in_any_codec_is_held_merged_and_published(tmp_path: Path, codec_name: CodecName) -> None:
    one = shard(tmp_path, 0, 1, 2)
    for island in (1, 2):
        assert isinstance(one.receive(PayloadId(str(island)), P(1), offered(1, island, codec_name)), Held)
    new = one.merge(order(1, "1", "2"))
    assert (new.facts.fragment, new.facts.version, new.facts.step) == (1, 1, 12)
    published = wire_format.decode(new.publication.values(EVERYTHING))
    np.testing.assert_array_equal(published["b"], one.state(P(1)).parameters["b"])
    assert same(new.publication, one.publication(P(1)))
    assert Journal(tmp_path).facts(P(1), Version(1)) == new.facts
    assert one.step() == 12


def test_what_may_not_enter_a_merge_is_refused_with_the_reason_and_not_held(tmp_path: Path) -> None:
    one = shard(tmp_path, 0, 1, 2)
    refused = one.receive(PayloadId("1"), P(1), offered(0, 1))
    assert isinstance(refused, Unusable)
    assert refused.reason is RefusalReason.WRONG_SHAPE
    with pytest.raises(InternalError, match="not held"):
        one.merge(order(1, "1"))


def test_a_merge_that_comes_to_nothing_is_neither_journalled_nor_published(tmp_path: Path) -> None:
    one = shard(tmp_path, 0)
    before = one.publication(P(0))
    far = wire_format.encode({"a": np.full((4, 3), np.float32(9e14))}, base=Version(0))
    assert isinstance(one.receive(PayloadId("1"), P(0), far), Held)
    with pytest.raises(NotFinite):
        one.merge(order(0, "1"))
    assert same(one.publication(P(0)), before)
    assert Journal(tmp_path).newest(P(0)) == 0


def test_shards_that_own_a_part_each_make_the_bits_of_one_that_owns_all(tmp_path: Path) -> None:
    whole = shard(tmp_path / "whole", 0, 1, 2)
    parts = [shard(tmp_path / "first", 0, 2), shard(tmp_path / "second", 1)]
    assert [part.fragments for part in parts] == [(0, 2), (1,)]
    for fragment, part in ((0, parts[0]), (1, parts[1]), (2, parts[0])):
        for owner in (whole, part):
            owner.receive(PayloadId("1"), P(fragment), offered(fragment, 1))
        ours, whole_ones = part.merge(order(fragment, "1")), whole.merge(order(fragment, "1"))
        assert same(ours.publication, whole_ones.publication)
        assert ours.facts.digest == whole_ones.facts.digest


def test_a_shard_goes_on_from_its_own_journal(tmp_path: Path) -> None:
    one = shard(tmp_path, 0, 2)
    one.receive(PayloadId("1"), P(2), offered(2, 1))
    one.merge(order(2, "1"))
    again = ParameterShard(Journal(tmp_path), Epoch(2), lambda _, work: work())
    publications = again.recover(*recovered(Journal(tmp_path), one.fragments, STEP))
    assert [(p.fragment, p.version) for p in publications] == [(0, 0), (2, 1)]
    assert all(map(same, publications, map(one.publication, one.fragments)))
    assert again.step() == one.step() == 12


@pytest.mark.parametrize("codec_name", CODEC_NAMES)
@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 1000])
def test_a_codec_takes_as_many_bytes_as_it_says_and_always_the_same(codec_name: CodecName, count: int) -> None:
    coder, values = codec(codec_name), np.random.default_rng(1).standard_normal(count, dtype=np.float32)
    data = b"".join(coder.encode(values))
    assert len(data) == coder.data_bytes(count)
    decoded = coder.decode(memoryview(data), count)
    assert (decoded.dtype, decoded.shape) == (np.float32, (count,))
    assert b"".join(coder.encode(values)) == data
    error_max = 1.0 if codec_name == "int2" else 0.26  # four values for a block leave its largest far from any
    assert np.abs(decoded - values).max(initial=0.0) <= error_max * np.abs(values).max(initial=0.0)
