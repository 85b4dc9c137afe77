"""The synchroniser's parameters through many merges: right, repeatable, and never changed under a reader."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import plain_model
import pytest
from whole_average import average

from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.errors import InternalError
from orchestrator.parameters import tensors, wire_format
from orchestrator.parameters.codec.registry import CODEC_NAMES
from orchestrator.parameters.kernels import Encoded
from orchestrator.parameters.kernels.twin import CHUNK_VALUES
from orchestrator.parameters.outer_optimizer import Nesterov, Sgd, initial_state
from orchestrator.parameters.outer_optimizer import step as optimizer_step
from orchestrator.parameters.outer_state import Averaging, NotFinite, OuterState, OuterStep, outer_step
from orchestrator.parameters.pieces import Role, joined, taken
from orchestrator.parameters.wire_format import displacement, encoded

NESTEROV = Nesterov(lr=0.7, decay=0.9)
STEP = OuterStep(Averaging.RADIAL, NESTEROV)
SHAPES = {"embed": (5, 4), "layer/kernel": (4, 6), "layer/scale": (), "norm": (3,)}
FRAGMENTS = (("embed", "norm"), ("layer/kernel", "layer/scale"))


def random_tensors(seed, names=SHAPES):
    generator = np.random.default_rng(seed)
    return {name: np.array(generator.standard_normal(SHAPES[name]), np.float32) for name in names}


def float32_values(array):
    return Encoded("float32", array.tobytes(), array.size)


def contributions(seed, fragment, count=3):
    weights = np.random.default_rng(seed).dirichlet(np.ones(count))
    return [(random_tensors([seed, island], FRAGMENTS[fragment]), float(weights[island])) for island in range(count)]


def state(averaging="radial", optimizer=NESTEROV):
    return OuterState(random_tensors(0), FRAGMENTS, OuterStep(Averaging(averaging), optimizer))


def merge(outer, fragment, version, inputs):
    """Merge what islands have, θ_m, as displacements from the fragment as it stands."""
    anchor, base = outer.fragment(fragment), outer.version(fragment)
    shapes = {name: array.shape for name, array in anchor.items()}
    fits = [{name: array.shape for name, array in arrays.items()} == shapes for arrays, _ in inputs]
    content = [
        (displacement(anchor, arrays, base) if fit else encoded(arrays, "float32", base), weight)
        for fit, (arrays, weight) in zip(fits, inputs, strict=True)
    ]
    return outer.merge(fragment, version, content)


def spread(shapes, own, codec="float32"):
    names = tuple(shapes)
    outer = OuterState({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, (names,), STEP)
    inputs = [(encoded(arrays, codec, Version(0)), 1 / len(own)) for arrays in own]
    return outer.router_spread(FragmentId(0), inputs), [content.all_decoded() for content, _ in inputs]


@pytest.mark.parametrize("codec", ["float32", "int4"])
@pytest.mark.parametrize("count", [2, 5])
def test_routers_are_apart_by_their_distances_over_all_pieces_and_pairs(codec, count):
    shapes = {"layers.feedforward.router[0:2]": (2, 7, 3), "layers.feedforward.router[2:4]": (2, 7, 3), "experts": (9,)}
    own = [
        {name: np.random.default_rng([n, count]).standard_normal(shape, np.float32) for name, shape in shapes.items()}
        for n in range(count)
    ]
    (distance, travel), decoded = spread(shapes, own, codec)
    routers = [np.concatenate([arrays[name].ravel() for name in shapes if "router" in name]) for arrays in decoded]
    pairs = [np.sum(np.square(one - other)) for n, one in enumerate(routers) for other in routers[:n]]
    assert distance == pytest.approx(np.sqrt(np.mean(pairs)), rel=1e-4)
    assert travel == pytest.approx(np.sqrt(np.mean([np.sum(np.square(own)) for own in routers])), rel=1e-4)


def test_islands_that_agree_are_not_apart_and_one_alone_or_no_router_has_no_distance():
    shapes = {"layers.feedforward.router": (2, 5), "norm": (3,)}
    same = {name: np.full(shape, 0.1, np.float32) for name, shape in shapes.items()}
    (distance, travel), _ = spread(shapes, [same] * 3)
    assert distance == pytest.approx(0.0, abs=1e-3 * travel)
    assert spread(shapes, [same])[0] is None
    assert spread({"norm": (3,)}, [{"norm": same["norm"]}] * 2)[0] is None


def merged_often(outer, fragments_in_order):
    for seed, fragment in enumerate(fragments_in_order):
        merge(outer, FragmentId(fragment), Version(outer.version(fragment) + 1), contributions(seed, fragment))
    return outer


def test_many_merges_follow_the_formulas_tensor_by_tensor():
    outer = state()
    exact = {name: array.ravel().tolist() for name, array in random_tensors(0).items()}
    momentum = {name: [0.0] * len(values) for name, values in exact.items()}
    order = [0, 1, 1, 0, 1, 0, 0, 1] * 3
    merged_often(outer, order)
    for seed, fragment in enumerate(order):
        inputs = contributions(seed, fragment)
        weights = [weight for _, weight in inputs]
        for name in FRAGMENTS[fragment]:
            replicas = [arrays[name].ravel().tolist() for arrays, _ in inputs]
            deltas = [[a - b for a, b in zip(exact[name], replica, strict=True)] for replica in replicas]
            merge = plain_model.mean if name == "embed" else plain_model.radial
            if plain_model.norm(plain_model.mean_direction(deltas, weights)) < 1e-2:
                merge = plain_model.mean
            gradient = merge(deltas, weights)
            exact[name], momentum[name] = plain_model.nesterov(exact[name], gradient, momentum[name], 0.7, 0.9)
    for name, array in outer.parameters().items():
        assert array.shape == SHAPES[name]
        np.testing.assert_allclose(array.ravel(), exact[name], rtol=1e-3, atol=1e-4)
    assert outer.versions == (12, 12)


@pytest.mark.parametrize("averaging", Averaging)
@pytest.mark.parametrize("offset", [-1, 0, 1, 12345])
def test_a_tensor_of_many_blocks_takes_the_step_of_the_whole(averaging, offset):
    generator = np.random.default_rng(5)
    size = 4 * CHUNK_VALUES + offset
    anchor, momentum = generator.standard_normal((2, size), dtype=np.float32)
    replicas = [anchor - 0.01 * generator.standard_normal(size, dtype=np.float32) for _ in range(3)]
    weights = [0.5, 0.3, 0.2]
    displacements = [anchor - replica for replica in replicas]
    inputs = [float32_values(each) for each in displacements]
    found = outer_step(anchor, momentum, None, inputs, weights, OuterStep(averaging, NESTEROV))
    decrement, next_momentum = optimizer_step(NESTEROV, average(displacements, weights, averaging), momentum)
    np.testing.assert_allclose(found.parameters, anchor - decrement, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.momentum, next_momentum, rtol=1e-5, atol=1e-6)
    assert found.residue is None
    assert found.update is None


def test_plain_mean_with_sgd_at_rate_one_is_the_islands_weighted_average():
    outer = state("mean", Sgd(lr=1.0))
    inputs = contributions(7, 1)
    merge(outer, FragmentId(1), Version(1), inputs)
    for name, array in outer.fragment(FragmentId(1)).items():
        expected = sum(weight * arrays[name].astype(np.float64) for arrays, weight in inputs)
        np.testing.assert_allclose(array, expected, atol=1e-6)


def test_asking_again_for_a_version_changes_nothing_and_gives_the_same_digest():
    outer = state()
    first = merge(outer, FragmentId(0), Version(1), contributions(1, 0))
    before = outer.state(FragmentId(0))
    assert merge(outer, FragmentId(0), Version(1), contributions(2, 0)) == first
    assert outer.state(FragmentId(0)) is before
    assert first == tensors.digest(outer.fragment(FragmentId(0)))


@pytest.mark.parametrize("version", [0, 1, 4])
def test_a_version_that_is_not_the_next_is_our_bug(version):
    outer = merged_often(state(), [0, 0])
    with pytest.raises(InternalError, match=f"version 2 and cannot go to {version}"):
        merge(outer, FragmentId(0), Version(version), contributions(1, 0))


def test_the_same_merges_give_the_same_bits():
    order = [0, 1, 1, 0]
    assert [merged_often(state(), order).state(p).digest for p in (0, 1)] == [
        merged_often(state(), order).state(p).digest for p in (0, 1)
    ]


def test_momentum_and_version_belong_to_one_fragment_alone():
    """Merges of the other fragment in between change nothing: the fragment lands on the same bits."""
    alone, mixed = state(), state()
    for version in range(1, 5):
        merge(alone, FragmentId(0), Version(version), contributions(version, 0))
        merge(mixed, FragmentId(1), Version(version), contributions(100 + version, 1))
        merge(mixed, FragmentId(0), Version(version), contributions(version, 0))
    assert mixed.state(FragmentId(0)).digest == alone.state(FragmentId(0)).digest
    assert alone.versions == (4, 0)
    assert alone.state(FragmentId(1)).digest == state().state(FragmentId(1)).digest


def test_arrays_handed_out_or_taken_in_are_never_changed():
    given_parameters = random_tensors(0)
    outer = OuterState(given_parameters, FRAGMENTS, STEP)
    handed_out = [outer.parameters(), outer.fragment(FragmentId(0)), dict(outer.state(FragmentId(0)).momentum)]
    copies = [{name: array.copy() for name, array in arrays.items()} for arrays in handed_out]
    inputs = contributions(1, 0)
    inputs_before = [tensors.digest(arrays) for arrays, _ in inputs]
    merge(outer, FragmentId(0), Version(1), inputs)
    merge(outer, FragmentId(0), Version(2), contributions(2, 0))
    assert [tensors.digest(arrays) for arrays, _ in inputs] == inputs_before
    for arrays, before in zip(handed_out, copies, strict=True):
        assert tensors.digest(arrays) == tensors.digest(before)

    later = outer.state(FragmentId(0)).digest
    for array in given_parameters.values():
        array[...] = 9.0  # the caller's own, which the state must not depend on
    for arrays, _ in inputs:
        for array in arrays.values():
            array[...] = 9.0
    assert tensors.digest(outer.fragment(FragmentId(0))) == later
    untouched = random_tensors(0)
    assert tensors.digest(outer.fragment(FragmentId(1))) == tensors.digest(
        {name: untouched[name] for name in FRAGMENTS[1]}
    )


def test_nobody_can_write_to_what_was_handed_out():
    outer = merged_often(state(), [0])
    for fragment in (FragmentId(0), FragmentId(1)):
        for array in (*outer.fragment(fragment).values(), *outer.state(fragment).momentum.values()):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_payloads_that_travelled_can_be_merged_as_they_are():
    sent, direct = state(), state()
    inputs = contributions(1, 1)
    anchor = sent.fragment(FragmentId(1))
    travelled = [
        (wire_format.parse(wire_format.written(displacement(anchor, arrays, Version(0)))), weight)
        for arrays, weight in inputs
    ]
    assert sent.merge(FragmentId(1), Version(1), travelled) == merge(direct, FragmentId(1), Version(1), inputs)


@pytest.mark.parametrize(
    "inputs",
    [
        [],
        [(random_tensors(1, FRAGMENTS[0]), 0.5)],
        [(random_tensors(1, FRAGMENTS[0]), 1.5), (random_tensors(2, FRAGMENTS[0]), -0.5)],
        [(random_tensors(1, FRAGMENTS[0]), float("nan"))],
        [(random_tensors(1, FRAGMENTS[1]), 1.0)],
        [({**random_tensors(1, FRAGMENTS[0]), "norm": np.ones(4, np.float32)}, 1.0)],
        [({"embed": random_tensors(1)["embed"]}, 1.0)],
    ],
    ids=["none", "not-normalised", "negative", "nan", "other-fragment", "other-shape", "part"],
)
def test_a_merge_the_core_could_never_ask_for_fails_loudly_and_changes_nothing(inputs):
    outer = state()
    with pytest.raises(InternalError, match="fragment 0"):
        merge(outer, FragmentId(0), Version(1), inputs)
    assert outer.versions == (0, 0)
    assert outer.state(FragmentId(0)).digest == state().state(FragmentId(0)).digest


@pytest.mark.parametrize("fragments", [FRAGMENTS[:1], (*FRAGMENTS, ("norm",)), (*FRAGMENTS, ("other",))])
def test_a_map_that_does_not_cover_the_parameters_once_is_our_bug(fragments):
    with pytest.raises(InternalError, match="same tensors"):
        OuterState(random_tensors(0), fragments, STEP)


def test_a_reader_sees_version_and_parameters_that_belong_together_while_fragments_merge_in_two_threads():
    outer = state()
    order = range(1, 200)

    def merges(fragment):
        return [merge(outer, fragment, Version(version), contributions(version, fragment)) for version in order]

    with ThreadPoolExecutor(2) as threads:
        pending = [threads.submit(merges, FragmentId(p)) for p in (0, 1)]
        seen = []
        while not all(merge.done() for merge in pending):
            for fragment in (0, 1):
                now = outer.state(FragmentId(fragment))
                assert tensors.digest(now.parameters) == now.digest
                seen.append((fragment, now.version, now.digest))
    digests = [["", *future.result()] for future in pending]
    assert seen
    assert all(digest == digests[fragment][version] for fragment, version, digest in seen if version)
    assert outer.versions == (199, 199)


def test_a_step_whose_result_is_not_finite_is_thrown_away_with_its_momentum():
    outer = merged_often(state(optimizer=Nesterov(lr=1e30, decay=0.9)), [])
    far = [({name: array * np.float32(1e12) for name, array in random_tensors(1, FRAGMENTS[0]).items()}, 1.0)]
    before = outer.state(FragmentId(0))
    said = "Version 1 of fragment 0 cannot be used: embed contains"
    with np.errstate(over="ignore"), pytest.raises(NotFinite, match=said):
        merge(outer, FragmentId(0), Version(1), far)
    assert outer.state(FragmentId(0)) is before
    same = [(dict(before.parameters), 1.0)]
    merge(outer, FragmentId(0), Version(1), same)  # the round is made again, of other contributions
    assert outer.version(FragmentId(0)) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e20])
def test_parameters_that_are_no_numbers_are_no_beginning(value):
    parameters = random_tensors(0)
    parameters["norm"][1] = value
    with pytest.raises(NotFinite, match="The initial parameters cannot be used: norm contains"):
        OuterState(parameters, FRAGMENTS, STEP)


STACKED = {"layers": Role(stacked_axes=1), "experts": Role(stacked_axes=2), "table": Role(embedding=True)}


def stacked_tensors(seed):
    generator = np.random.default_rng(seed)
    shapes = {"layers": (3, 4, 5), "experts": (2, 2, 3, 4), "table": (6, 4)}
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_every_layer_and_expert_of_a_stacked_tensor_has_a_direction_of_its_own():
    """As if each were a tensor by itself; and a role that the model gives counts more than the name."""
    anchor, weights = stacked_tensors(0), (0.5, 0.3, 0.2)
    inputs = [(stacked_tensors(seed), weight) for seed, weight in zip((1, 2, 3), weights, strict=True)]
    outer = OuterState(anchor, (tuple(anchor),), STEP, STACKED)
    merge(outer, FragmentId(0), Version(1), inputs)
    merged = outer.parameters()

    def alone(name, index, averaging=Averaging.RADIAL):
        matrix = np.ascontiguousarray(anchor[name][index])
        displacements = [float32_values(matrix - arrays[name][index]) for arrays, _ in inputs]
        momentum = initial_state(NESTEROV, matrix.size)
        return outer_step(matrix, momentum, None, displacements, weights, OuterStep(averaging, NESTEROV)).parameters

    for layer in range(3):
        assert np.array_equal(merged["layers"][layer], alone("layers", layer))
    for index in np.ndindex(2, 2):
        assert np.array_equal(merged["experts"][index], alone("experts", index))
    assert np.array_equal(merged["table"], alone("table", ..., Averaging.MEAN))
    assert not np.array_equal(merged["layers"], alone("layers", ...))


def test_pieces_of_a_stacked_tensor_are_merged_like_the_whole():
    anchor, weights = stacked_tensors(0), (0.5, 0.5)
    whole = OuterState(anchor, (tuple(anchor),), STEP, STACKED)
    names = ("experts", "layers[0:1]", "layers[1:3]", "table[:,0:1]", "table[:,1:4]")
    parts = OuterState(taken(anchor, names), (names,), STEP, STACKED)
    inputs = [(stacked_tensors(seed), weight) for seed, weight in zip((1, 2), weights, strict=True)]
    merge(whole, FragmentId(0), Version(1), inputs)
    merge(parts, FragmentId(0), Version(1), [(taken(arrays, names), weight) for arrays, weight in inputs])
    together = joined(parts.parameters())
    for name, array in whole.parameters().items():
        assert np.array_equal(together[name], array)


def test_roles_stay_with_the_fragments_of_their_tensors():
    anchor = stacked_tensors(0)
    outer = OuterState(anchor, (("layers", "table"), ("experts",)), STEP, STACKED)
    merge(outer, FragmentId(0), Version(1), [(taken(stacked_tensors(1), ("layers", "table")), 1.0)])
    assert [set(outer.state(FragmentId(p)).roles) for p in (0, 1)] == [{"layers", "table"}, {"experts"}]


@pytest.mark.parametrize("averaging", list(Averaging))
@pytest.mark.parametrize("codec_name", CODEC_NAMES)
@pytest.mark.parametrize("optimizer", [NESTEROV, Sgd(lr=0.9)])
def test_a_merge_of_the_outer_gradient_alone_has_the_bits_of_the_merge_of_its_inputs(averaging, codec_name, optimizer):
    """Also where values are −0 or smaller than any normal number, and with a direction for each layer."""
    generator, shape = np.random.default_rng(3), (3, 1500)
    step = OuterStep(averaging, optimizer, codec_name)
    first = {"experts": generator.standard_normal(shape, np.float32), "embed": np.full((300,), -0.0, np.float32)}
    fused, by_average = (OuterState(first, (tuple(first),), step, {"experts": Role(stacked_axes=1)}) for _ in range(2))
    for version in range(1, 5):
        inputs = []
        for weight in (0.125, 0.25, 0.0625, 0.5625):
            own = {name: generator.standard_normal(array.shape, np.float32) for name, array in first.items()}
            own["experts"][0] *= np.float32(1e-41)
            own["experts"][1, ::3] = own["embed"][::2] = -0.0
            inputs.append((encoded(own, codec_name, Version(version - 1)), weight))
        average_alone = by_average.outer_gradient(FragmentId(0), inputs)
        assert average_alone.value_bytes == 4 * (3 * 1500 + 300)
        one = fused.merge(FragmentId(0), Version(version), inputs)
        assert by_average.merge(FragmentId(0), Version(version), [(average_alone, 1.0)]) == one
        states = [outer.state(FragmentId(0)) for outer in (fused, by_average)]
        for mine, its in zip(*(state.arrays() for state in states), strict=True):
            assert {name: array.tobytes() for name, array in mine.items()} == {n: a.tobytes() for n, a in its.items()}
        updates = [None if state.update is None else bytes(wire_format.written(state.update)) for state in states]
        assert updates[0] == updates[1]
