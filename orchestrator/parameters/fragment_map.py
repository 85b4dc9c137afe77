"""Cuts the parameters into P disjoint fragments of nearly equal size.

A fragment is a set of pieces. Pieces are placed in descending size, each into the lightest fragment so far; ties are broken
by name, then by fragment index. So the map depends only on names, shapes and roles: every island and the synchroniser
compute it for themselves and agree.

A tensor stays one piece if fragments are then even enough: the largest at most ``PEAK_MAX`` times the mean. Otherwise
tensors are split along one axis, into smaller and smaller pieces until they are:

   1. those that the merge arithmetic does not need whole: embedding-like ones, anywhere, and stacked ones, between
      their layers (or experts);
   2. if that is not enough, matrices. The radial average then has a direction for each piece of a matrix.

Graham's bound holds for the pieces: the heaviest fragment is at most 4/3 − 1/(3P) of the heaviest one of the best possible
map (Graham 1969, "Bounds on multiprocessing timing anomalies", theorem 2).

Source: Decoupled DiLoCo, arXiv:2604.21428 (balanced tensor fragments).

If a mixture's routers are merged by a period of their own (``synchroniser.router_interval_steps``), they are the last
fragment, and the others are cut as if there were no routers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from orchestrator.core.vocabulary import FragmentId, is_router
from orchestrator.errors import ConfigurationError, DataError
from orchestrator.parameters.pieces import (
    BY_NAME,
    Piece,
    Role,
    Roles,
    Shape,
    cut,
    piece_named,
    role_of,
    taken,
    whole_shapes,
)
from orchestrator.parameters.tensors import Array

FragmentMap = tuple[tuple[str, ...], ...]
"""The names of every fragment's pieces, by fragment index; sorted within a fragment."""

CutModel = Callable[[Mapping[str, Shape], int, Roles], FragmentMap]
"""How a model is cut into fragments. Arguments: the shapes of its tensors, P, and the roles of the tensors."""

PEAK_MAX = 1.1
"""The largest acceptable ratio of the largest fragment to the mean. Traffic is as even as fragments are."""
GRAINS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
"""The largest size of a piece relative to the mean fragment, in the order in which they are tried."""


def build(
    shapes: Mapping[str, Shape], fragment_count: int, roles: Roles = BY_NAME, routers_apart: bool = False
) -> FragmentMap:
    """Put every parameter into exactly one of ``fragment_count`` fragments, none of which is empty.

    The order of ``shapes`` does not matter. Raises ConfigurationError if there cannot be that many fragments, or routers
    are to be apart where there are none, or nothing else.
    """
    _validate(shapes, fragment_count, roles)
    if routers_apart:
        return with_routers_apart(shapes, fragment_count, roles, build)
    mean = sum(map(math.prod, shapes.values())) / fragment_count
    tensors = [(name, shapes[name], role_of(name, len(shapes[name]), roles)) for name in sorted(shapes)]
    best: tuple[float, FragmentMap] | None = None
    for pieces in _divisions(tensors, mean):
        if len(pieces) < fragment_count:
            continue
        peak, fragments = _packed(pieces, fragment_count)
        if best is None or peak < best[0]:
            best = peak, fragments
        if peak <= PEAK_MAX * mean:
            return fragments
    if best is None:
        raise ConfigurationError(
            detail=f"synchroniser.fragments is {fragment_count}, but the model has only {len(shapes)} tensors, too "
            f"small to be split that often. Lower it to at most {len(shapes)}."
        )
    return best[1]


def with_routers_apart(
    shapes: Mapping[str, Shape], fragment_count: int, roles: Roles, cut_rest: CutModel
) -> FragmentMap:
    """Put routers into the last fragment, and everything else into the others, as ``cut_rest`` cuts it."""
    routers = tuple(sorted(name for name in shapes if is_router(name)))
    others = {name: shape for name, shape in shapes.items() if name not in routers}
    if not routers or not others or fragment_count < 2:
        lack = "nothing but routers" if routers and not others else "one fragment" if routers else "no routers"
        raise ConfigurationError(
            detail=f"synchroniser.router_interval_steps gives routers a fragment of their own, but the job has {lack}. "
            "Leave it out, or train a mixture of experts in two fragments or more."
        )
    roles_of_others = {name: role for name, role in roles.items() if name in others}
    return (*cut_rest(others, fragment_count - 1, roles_of_others), routers)


def pieces_of(tensors: Mapping[str, Array], fragments: FragmentMap) -> dict[str, Array]:
    """Return whole tensors as the pieces of all fragments: views, by name."""
    return taken(tensors, [name for members in fragments for name in members])


def sizes(fragments: FragmentMap, shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    """Return the number of parameters of each fragment. ``shapes`` are those of whole tensors."""
    pieces = [[piece_named(name) for name in members] for members in fragments]
    return tuple(sum(math.prod(piece.shape(shapes[piece.tensor])) for piece in members) for members in pieces)


def require_own(pieces: Sequence[Mapping[str, Shape]], roles: Roles = BY_NAME, routers_apart: bool = False) -> None:
    """Raise DataError unless these shapes of every fragment's pieces are fragments as this build cuts them.

    Islands compute the map themselves, so they would otherwise offer other pieces than Θ has.
    """
    shapes = whole_shapes({name: shape for members in pieces for name, shape in members.items()})
    if build(shapes, len(pieces), roles, routers_apart) != tuple(tuple(sorted(members)) for members in pieces):
        raise DataError(
            detail="Another build of this program cut the model into other fragments, so islands of this build cannot "
            "continue from there. Continue with the build that wrote them."
        )


def _divisions(tensors: Sequence[tuple[str, Shape, Role]], mean: float) -> Iterable[dict[str, int]]:
    """Yield ways to divide the tensors, fewest splits first: the size of each piece by its name."""
    yield {name: math.prod(shape) for name, shape, _ in tensors}
    for matrices in (False, True):
        for grain in GRAINS:
            pieces: dict[str, int] = {}
            for name, shape, role in tensors:
                splittable = matrices or role.embedding or role.stacked_axes > 0
                parts = _split(name, shape, role, grain * mean) if splittable else (Piece(name),)
                pieces |= {piece.name: math.prod(piece.shape(shape)) for piece in parts}
            yield pieces


def _split(name: str, shape: Shape, role: Role, size_max: float) -> tuple[Piece, ...]:
    """Split into equal parts of at most ``size_max`` along the first axis that is long enough, or else the longest.

    A stacked tensor is split between its layers, or its experts if there are more of those, so that every matrix stays
    whole.
    """
    count = math.ceil(math.prod(shape) / size_max)
    if count <= 1 or not shape:
        return (Piece(name),)
    lengths = range(role.stacked_axes or len(shape))
    axis = next((axis for axis in lengths if shape[axis] >= count), max(lengths, key=shape.__getitem__))
    count = min(count, shape[axis])
    return (Piece(name),) if count == 1 else cut(name, shape, axis, count)


def _packed(sizes: Mapping[str, int], fragment_count: int) -> tuple[int, FragmentMap]:
    """Return the size of the largest fragment, and the map."""
    lightest = [(0, fragment) for fragment in range(fragment_count)]  # a heap of (size so far, fragment)
    names: list[list[str]] = [[] for _ in range(fragment_count)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, fragment = lightest[0]
        names[fragment].append(name)
        heapq.heapreplace(lightest, (load + sizes[name], fragment))
    return max(load for load, _ in lightest), tuple(tuple(sorted(members)) for members in names)


def _validate(shapes: Mapping[str, Shape], fragment_count: int, roles: Roles) -> None:
    if fragment_count < 1:
        raise ConfigurationError(
            detail=f"synchroniser.fragments is {fragment_count}, but there must be at least one fragment. "
            "Set it to 1 or more."
        )
    if empty := sorted(name for name, shape in shapes.items() if math.prod(shape) < 1):
        raise ConfigurationError(
            detail=f"The tensors {', '.join(map(repr, empty))} have no elements, so they cannot be trained or merged. "
            "Remove them from the model."
        )
    for name, role in sorted(roles.items()):
        if name not in shapes or not 0 <= role.stacked_axes < max(1, len(shapes[name])):
            raise ConfigurationError(
                detail=f"The model gives {name!r} a role with {role.stacked_axes} stacked axes, but it has "
                f"{f'the shape {shapes[name]}' if name in shapes else 'no such tensor'}. Correct its roles."
            )
    if ambiguous := sorted(name for name in shapes if piece_named(name).bounds is not None):
        raise ConfigurationError(
            detail=f"The tensors {', '.join(map(repr, ambiguous))} have names like parts of other tensors. Rename them."
        )


def dealt(sizes: Sequence[int], shard_count: int) -> tuple[tuple[FragmentId, ...], ...]:
    """Deal fragments of these sizes to shards: in descending size, each to the shard with the fewest bytes so far.

    Ties are broken by index, so every process deals alike.
    """
    lightest = [(0, number) for number in range(shard_count)]
    hands: list[list[FragmentId]] = [[] for _ in lightest]
    for p in sorted(range(len(sizes)), key=lambda p: (-sizes[p], p)):
        weight, number = heapq.heappop(lightest)
        hands[number].append(FragmentId(p))
        heapq.heappush(lightest, (weight + sizes[p], number))
    return tuple(tuple(sorted(hand)) for hand in hands)
