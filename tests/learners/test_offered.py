"""Offers in a codec that loses something: what is lost stays with the island, once, whatever becomes of the offer."""

import numpy as np
import pytest

from learners.handed_over import PublishedFragments
from learners.outbox import OfferedFragment, PublishedVersion
from orchestrator.core.messages import Announcement
from orchestrator.core.vocabulary import Epoch, FragmentId, Version
from orchestrator.errors import Fenced
from orchestrator.parameters import wire_format
from orchestrator.parameters.codec.registry import CODEC_NAMES
from orchestrator.parameters.tensors import digest
from orchestrator.parameters.wire_format import InvalidPayload, displacement, encoded

LOSSY = [name for name in CODEC_NAMES if name != "float32"]
SHAPES = {"kernel": (30, 11), "bias": (5,)}
P, FIRST = FragmentId(0), Version(4)


def drawn(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: np.float32(scale) * generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


class Taken:
    """A snapshot that is on the host."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays

    def arrays(self) -> dict[str, np.ndarray]:
        return self._arrays


def minus(one, other):
    return {name: one[name] - other[name] for name in one}


def plus(one, other):
    return {name: one[name] + other[name] for name in one}


def near(one, other, tolerance=1e-5):
    return all(np.allclose(one[name], other[name], rtol=0, atol=tolerance) for name in one)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_what_is_decoded_is_the_same_here_and_there_and_a_repeated_pull_gives_the_same_bytes(codec):
    base, own = drawn(1), drawn(2)
    offered = OfferedFragment(Taken(own), PublishedVersion(FIRST, base), codec)
    payload = bytes(offered.payload())
    assert bytes(offered.payload()) == payload
    content = wire_format.parse(payload)
    assert content.base == FIRST
    there = minus(base, content.all_decoded())
    assert near(offered.arrays(), there, 0 if codec != "float32" else 1e-6)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_residue_is_what_the_island_has_and_the_synchroniser_has_not(codec):
    base, own = drawn(1), plus(drawn(1), drawn(2, 0.1))
    offered = OfferedFragment(Taken(own), PublishedVersion(FIRST, base), codec, residue_wanted=True)
    assert offered.residue() is None
    there = minus(base, wire_format.parse(offered.payload()).all_decoded())
    residue = offered.residue()
    assert residue is not None
    assert near(plus(there, residue), own, 1e-6)
    assert any(np.abs(array).max() > 0 for array in residue.values())


def test_without_the_values_it_builds_on_an_island_sends_its_own_and_loses_nothing():
    own = drawn(2)
    content = wire_format.parse(OfferedFragment(Taken(own), None, "int4").payload())
    assert (content.codec, content.base) == ("float32", None)
    assert all(np.array_equal(content.decoded(name), own[name]) for name in own)


def update(seed: int, base: int, codec: str):
    return encoded(drawn(seed, 0.1), codec, Version(base))


@pytest.mark.parametrize("codec", LOSSY)
def test_updates_lead_to_the_bits_that_the_synchroniser_has_one_by_one_or_several_at_once(codec):
    first = drawn(1)
    updates = [update(seed, 4 + seed, codec) for seed in range(3)]
    states = [first]
    for content in updates:
        states.append(plus(states[-1], content.all_decoded()))
    payloads = [wire_format.written(content) for content in updates]
    single, several = PublishedFragments([tuple(drawn(1))]), PublishedFragments([tuple(drawn(1))])
    for held in (single, several):
        held.hold(P, FIRST, first)
    for step, payload in enumerate(payloads):
        arrays = single.take(P, Version(5 + step), Version(4 + step), digest(states[step + 1]), [payload])
        assert arrays is not None
        assert digest(arrays) == digest(states[step + 1])
    arrays = several.take(P, Version(7), FIRST, digest(states[3]), payloads)
    assert arrays is not None
    assert digest(arrays) == digest(states[3])
    assert several.version(P) == 7


def test_updates_that_do_not_lead_on_are_not_taken_and_the_sender_hears_what_is_here():
    held, content = PublishedFragments([tuple(drawn(1))]), wire_format.written(update(1, 6, "int4"))
    assert held.version(P) == -1
    assert held.take(P, Version(7), Version(6), "", [content]) is None
    held.hold(P, FIRST, drawn(1))
    assert held.take(P, Version(7), Version(6), "", [content]) is None
    assert held.version(P) == FIRST
    assert held.take(P, Version(9), None, "", [wire_format.encode(drawn(3))]) is not None
    assert held.take(P, Version(7), None, "", [wire_format.encode(drawn(1))]) is None
    assert held.version(P) == 9


def test_bits_that_are_not_those_of_the_synchroniser_are_let_go_of():
    held = PublishedFragments([tuple(drawn(1))])
    held.hold(P, FIRST, drawn(1))
    assert held.take(P, Version(5), FIRST, "another", [wire_format.written(update(1, 4, "int4"))]) is None
    assert held.version(P) == -1


def test_a_version_of_a_replaced_synchroniser_is_not_taken_once_its_successor_has_asked_what_is_held():
    """Its call was pulling bytes meanwhile. The successor makes a version of that number with other bytes."""
    held = PublishedFragments([tuple(drawn(1))])
    held.hold(P, FIRST, drawn(1))
    held.announce(Announcement(P, Version(5), digest(drawn(2)), 20, ()))
    held.fence(Epoch(3))
    before = held.held_versions()
    with pytest.raises(Fenced, match="epoch 2"):
        held.take(P, Version(5), None, digest(drawn(2)), [wire_format.encode(drawn(2))], Epoch(2))
    assert held.held_versions() == before
    assert held.take(P, Version(5), None, digest(drawn(3)), [wire_format.encode(drawn(3))], Epoch(3)) is not None
    (now,) = held.held_versions()
    assert (now.digest, now.announced) == (digest(drawn(3)), None), (
        "what was announced of the lost version is forgotten"
    )


def test_a_damaged_update_is_refused_and_changes_nothing():
    held = PublishedFragments([tuple(drawn(1))])
    held.hold(P, FIRST, drawn(1))
    damaged = bytearray(wire_format.written(update(1, 4, "int4")))
    damaged[-20] ^= 1
    with pytest.raises(InvalidPayload):
        held.take(P, Version(5), FIRST, "", [memoryview(damaged)])
    newest = held.at(P, FIRST)
    assert newest is not None
    assert digest(newest.arrays) == digest(drawn(1))


@pytest.mark.parametrize("codec", LOSSY)
def test_over_many_offers_what_is_sent_adds_up_to_what_was_learned(codec):
    """As an island rebases: each version has what was decoded, and θ keeps the rest."""
    published, own, learned = drawn(1), drawn(1), minus(drawn(1), drawn(1))
    start = dict(published)
    for version in range(40):
        work = drawn(100 + version, 0.01)
        own, learned = plus(own, work), plus(learned, work)
        offered = OfferedFragment(Taken(own), PublishedVersion(Version(version), published), codec)
        there = minus(published, wire_format.parse(offered.payload()).all_decoded())
        own = plus(own, minus(there, offered.arrays()))
        published = there
    residue = minus(own, published)
    assert near(plus(minus(published, start), residue), learned, 1e-4)
    largest = max(np.abs(array).max() for array in learned.values())
    assert max(np.abs(array).max() for array in residue.values()) < 0.5 * largest
    exact = displacement(start, published, FIRST)
    assert exact.base == FIRST
