"""What an island is sent of a publication: updates from what it holds while they are fewer bytes, else the values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from orchestrator.channel.endpoint import Membership, Payload, Terms
from orchestrator.channel.frames import SHARD
from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import (
    NO_ANCHOR,
    CloseReason,
    Epoch,
    FragmentId,
    IslandId,
    PayloadId,
    Version,
    WeightedPayload,
)
from orchestrator.parameters import wire_format
from orchestrator.parameters.codec.registry import CodecName
from orchestrator.parameters.holding import EVERYTHING, Holding
from orchestrator.parameters.journal import Journal
from orchestrator.parameters.outer_optimizer import Nesterov
from orchestrator.parameters.outer_state import Averaging, OuterState, OuterStep
from orchestrator.parameters.shard import ParameterShard, Publication
from orchestrator.parameters.tensors import digest

if TYPE_CHECKING:
    from orchestrator.runtime.published import Published, Shipment

P, SIZE = FragmentId(0), 20_000


class InCalls:
    """The end of a channel by which nothing travels: all of it is small enough for a call."""

    membership = Membership("job", SHARD, 1, Terms(inline_bytes_max=1 << 30))

    def payload(self, name: str, content: memoryview) -> Payload:
        return Payload(IN_CALLS, name, content)


IN_CALLS: Any = InCalls()


def published(publication: Publication, before: Published | None) -> Published:
    from orchestrator.runtime.published import Published  # here, because it imports Ray

    return Published(publication, before, IN_CALLS)


def published_versions(folder: Path, codec: CodecName, count: int) -> list[tuple[Published, dict[str, np.ndarray]]]:
    """Versions 0 to ``count`` as they were published, each with Θ."""
    shard = ParameterShard(Journal(folder), Epoch(1), lambda _, work: work())
    step = OuterStep(Averaging.MEAN, Nesterov(0.7, 0.9), codec)
    generator = np.random.default_rng(1)
    initial = {"w": generator.standard_normal(SIZE, dtype=np.float32)}
    (first,) = shard.seed(OuterState(initial, (("w",),), step), {})
    all_of_them = [(published(first.publication, None), dict(shard.state(P).parameters))]
    for version in range(1, count + 1):
        learned = {"w": generator.standard_normal(SIZE, dtype=np.float32)}
        name = PayloadId(str(version))
        shard.receive(name, P, wire_format.encode(learned, codec, Version(version - 1)))
        item = WeightedPayload(name, IslandId("a"), 1.0)
        new = shard.merge(MergeFragment(Epoch(1), P, Version(version), 1, (item,), CloseReason.EVERYONE_IN, ""))
        all_of_them.append((published(new.publication, all_of_them[-1][0]), dict(shard.state(P).parameters)))
    return all_of_them


def payloads_of(shipment: Shipment) -> list[memoryview]:
    return [np.asarray(payload.carried("europe:1")).data for payload in shipment.payloads]


@pytest.mark.parametrize("codec", ["int4", "int8", "bfloat16"])
@pytest.mark.parametrize("held", range(13))
def test_whatever_an_island_holds_it_is_sent_what_leads_to_the_newest_for_the_fewest_bytes(
    tmp_path: Path, codec: CodecName, held: int
) -> None:
    versions = published_versions(tmp_path, codec, 12)
    newest, theta = versions[-1]
    shipment = newest.since(Version(held))
    if shipment.since is None:
        arrays = wire_format.decode(payloads_of(shipment)[0])
    else:
        assert shipment.since == held
        arrays = versions[held][1]
        for payload in payloads_of(shipment):
            update = wire_format.parse(payload)
            arrays = {name: array + update.decoded(name) for name, array in arrays.items()}
    assert digest(arrays) == digest(theta) == newest.digest_of(EVERYTHING)
    assert shipment.byte_count == sum(map(len, payloads_of(shipment)))
    one_update, values = newest.since(Version(11)).byte_count, len(wire_format.encode(theta))
    assert shipment.byte_count <= min((12 - held) * one_update, values) * 1.02


def test_who_is_not_known_is_sent_the_latest_update_and_who_has_nothing_the_values(tmp_path: Path) -> None:
    newest, _ = published_versions(tmp_path, "int4", 3)[-1]
    assert newest.since(None).since == 2
    assert newest.since(Version(-1)).since is None


@pytest.mark.parametrize("codec", ["float32", "int4"])
@pytest.mark.parametrize("held", [3, 4])
def test_who_holds_the_version_or_a_later_one_is_sent_no_bytes(tmp_path: Path, codec: CodecName, held: int) -> None:
    newest, _ = published_versions(tmp_path, codec, 3)[-1]
    shipment = newest.since(Version(held))
    assert (shipment.since, tuple(shipment.payloads), shipment.byte_count) == (held, (), 0)
    assert not shipment.is_pulled


def test_without_a_codec_that_loses_something_values_are_sent(tmp_path: Path) -> None:
    newest, theta = published_versions(tmp_path, "float32", 3)[-1]
    for held in (None, Version(2), Version(-1)):
        shipment = newest.since(held)
        assert shipment.since is None
        assert digest(wire_format.decode(payloads_of(shipment)[0])) == digest(theta)


def test_what_is_restored_is_sent_as_values(tmp_path: Path) -> None:
    versions = published_versions(tmp_path, "int4", 3)
    shard = ParameterShard(Journal(tmp_path / "other"), Epoch(1), lambda _, work: work())
    step = OuterStep(Averaging.MEAN, Nesterov(0.7, 0.9), "int4")
    shard.seed(OuterState(versions[0][1], (("w",),), step), {})
    restored = shard.restore(P, Version(1), 0, shard.state(P))
    assert published(restored.publication, versions[0][0]).since(Version(0)).since is None


@pytest.mark.parametrize("codec", ["float32", "int4"])
@pytest.mark.parametrize("held", [-1, 1, 3])
def test_each_host_of_an_island_is_sent_its_half_and_alike_ones_the_same_payload(
    tmp_path: Path, codec: CodecName, held: int
) -> None:
    versions = published_versions(tmp_path, codec, 4)
    newest, theta = versions[-1]
    whole = newest.since(Version(held))
    for bounds in ((0, 9984), (9984, SIZE)):
        holding = Holding((("w", (bounds,)),))
        shipment = newest.since(Version(held), holding)
        assert shipment.since == whole.since
        assert shipment.byte_count < 0.52 * whole.byte_count
        again = newest.since(Version(held), Holding((("w", (bounds,)),)))
        assert all(one is other for one, other in zip(shipment.payloads, again.payloads, strict=True))
        contents = [wire_format.parse(payload) for payload in payloads_of(shipment)]
        if shipment.since is None:
            own = holding.own_values(contents[0], ["w"])
        else:
            own = holding.values_of(versions[shipment.since][1])
            for content in contents:
                own = holding.added_to(own, content)
        assert digest(own) == holding.digest_of(theta) == newest.digest_of(holding)


# ── an island that holds another version than its link believes ───────────────────────────────────────────────────────


HELD_REALLY = {"nothing": -1, "an older version": 1, "a damaged older version": 2, "the version": 3, "a newer one": 4}


@pytest.mark.parametrize("codec", ["float32", "int4"])
@pytest.mark.parametrize("believed", [None, -1, 1, 2, 3, 4])
@pytest.mark.parametrize("really", HELD_REALLY)
def test_whatever_a_link_believes_an_island_holds_it_gets_the_version_or_says_what_it_holds(
    tmp_path: Path, codec: CodecName, believed: int | None, really: str
) -> None:
    from learners.handed_over import PublishedFragments
    from learners.island import Island

    versions = published_versions(tmp_path, codec, 4)
    version, _ = versions[3]
    here = PublishedFragments([["w"]])
    if (held := HELD_REALLY[really]) >= 0:
        arrays = {name: array.copy() for name, array in versions[held][1].items()}
        if "damaged" in really:
            arrays["w"][7] += 1.0
        here.hold(P, Version(held), arrays)

    def receive(publication: Any, since: Version | None, named: str, contents: Any, epoch: Epoch) -> int:
        here.take(P, publication.version, since, named, contents, epoch)
        return here.version(P)

    loop = SimpleNamespace(published=here, receive=receive)
    island: Any = SimpleNamespace(
        _outbox=SimpleNamespace(check_epoch=lambda epoch: None),
        _receiving=lambda: loop,
        _handed_over=SimpleNamespace(published=lambda epoch, fragment, payloads: payloads),
    )
    answers: list[int | None] = [believed]
    while (answers[-1] is None or answers[-1] < version.version) or len(answers) == 1:
        shipment = version.since(None if answers[-1] is None else Version(answers[-1]))
        named, content = version.digest_of(EVERYTHING), payloads_of(shipment)
        facts = (Epoch(1), P, version.version, 16, 0, NO_ANCHOR, shipment.since, named)
        answers.append(Island.deliver(island, *facts, *content))
        assert len(answers) <= 4, "a wrong guess, an update that does not fit, and the values are the longest way"
    assert answers[-1] == max(held, 3)
    copy = here.at(P, Version(max(held, 3)))
    assert copy is not None
    assert digest(copy.arrays) == digest(versions[max(held, 3)][1])
