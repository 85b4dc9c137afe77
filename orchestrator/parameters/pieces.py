"""The pieces of tensors, which fragments and everything that travels consist of; and the roles of tensors.

A piece is a tensor, or the entries from ``start`` to ``stop`` of it along one axis. Its name is the tensor's, or that and
the part in NumPy's notation: ``embed[0:512]``, ``layers.up[3:6]``, ``head[:,0:512]``. So named pieces can be joined to
tensors without another table. Which pieces make a fragment is decided in ``fragment_map``.

A role is what the merge and the inner optimizer must know of a tensor besides its shape. A model gives it (``Model.roles``);
otherwise the tensor's name determines it (``role_by_name``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import EllipsisType, MappingProxyType
from typing import Any

import numpy as np

from orchestrator.errors import DataError

Shape = tuple[int, ...]
_EMBEDDING_LIKE = re.compile(r"(^|[/.])([^/.]*embed[^/.]*|([^/.]*_)?head)([/.]|$)")
BY_NAME: Roles = MappingProxyType({})
"""Every tensor has the role that its name determines."""
RoleRow = tuple[str, bool, int, bool]
"""A tensor and its role, as in journals and checkpoints: name, embedding, stacked_axes, decays."""
_PART = re.compile(r"(?P<tensor>.*)\[(?P<before>(?::,)*)(?P<start>\d+):(?P<stop>\d+)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Role:
    """The role of one tensor.

    embedding     its rows are looked up, or scored, one by one: its outer gradient is the plain mean of the islands'
                  (Decoupled DiLoCo, arXiv:2604.21428), and it may be split anywhere
    stacked_axes  the number of leading axes that number layers, or layers and experts: every entry of them is a separate
                  matrix, with its own direction in the radial average
    decays        the inner optimizer's weight decay applies to it
    """

    embedding: bool = False
    stacked_axes: int = 0
    decays: bool = True


Roles = Mapping[str, Role]
"""Roles by tensor name. A tensor that is missing has the role that its name determines."""


def rows_of(roles: Roles) -> tuple[RoleRow, ...]:
    return tuple((name, role.embedding, role.stacked_axes, role.decays) for name, role in sorted(roles.items()))


def from_rows(rows: Iterable[RoleRow]) -> dict[str, Role]:
    return {name: Role(embedding, stacked_axes, decays) for name, embedding, stacked_axes, decays in rows}


def role_by_name(tensor: str, dimension_count: int) -> Role:
    """Return the role of a tensor by its name.

    Embedding-like: a part of the path (parts are separated by ``/`` or ``.``) contains ``embed``, is ``head`` or ends in
    ``_head``: ``token_embedding``, ``unembed/kernel``, ``lm_head``; but not ``multi_head_attention``. Weight decay excludes
    vectors, and tensors with ``embed`` in their name.
    """
    return Role(
        embedding=_EMBEDDING_LIKE.search(tensor.lower()) is not None,
        decays=dimension_count >= 2 and "embed" not in tensor,
    )


def role_of(tensor: str, dimension_count: int, roles: Roles) -> Role:
    """Return the role in ``roles``, or by the tensor's name."""
    return roles.get(tensor) or role_by_name(tensor, dimension_count)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a tensor. ``bounds`` are (axis, start, stop); None is the whole tensor."""

    tensor: str
    bounds: tuple[int, int, int] | None = None

    @property
    def name(self) -> str:
        if self.bounds is None:
            return self.tensor
        axis, start, stop = self.bounds
        return f"{self.tensor}[{':,' * axis}{start}:{stop}]"

    @property
    def index(self) -> tuple[slice | EllipsisType, ...]:
        """The index of the piece in its tensor."""
        if self.bounds is None:
            return (...,)
        axis, start, stop = self.bounds
        return (*(slice(None),) * axis, slice(start, stop))

    def shape(self, of_tensor: Shape) -> Shape:
        if self.bounds is None:
            return of_tensor
        axis, start, stop = self.bounds
        return (*of_tensor[:axis], stop - start, *of_tensor[axis + 1 :])


def piece_named(name: str) -> Piece:
    """Return the piece with this name."""
    match = _PART.fullmatch(name)
    if match is None:
        return Piece(name)
    return Piece(match["tensor"], (len(match["before"]) // 2, int(match["start"]), int(match["stop"])))


def cut(tensor: str, shape: Shape, axis: int, count: int) -> tuple[Piece, ...]:
    """Return ``count`` pieces along ``axis``, whose lengths differ by at most one."""
    bounds = [shape[axis] * part // count for part in range(count + 1)]
    return tuple(Piece(tensor, (axis, start, stop)) for start, stop in pairwise(bounds))


def taken(tensors: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the pieces with these names, as views of ``tensors``."""
    pieces = {name: piece_named(name) for name in names}
    return {name: tensors[piece.tensor][piece.index] for name, piece in pieces.items()}


def whole_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of the tensors, from those of all their pieces."""
    lengths: dict[str, Shape] = {}
    for name, shape in shapes.items():
        piece = piece_named(name)
        if piece.bounds is None:
            lengths[name] = shape
            continue
        axis, _, stop = piece.bounds
        length = max(stop, lengths[piece.tensor][axis]) if piece.tensor in lengths else stop
        lengths[piece.tensor] = (*shape[:axis], length, *shape[axis + 1 :])
    return lengths


def joined(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join pieces to tensors; whole ones stay as they are. Raises DataError if a part is missing."""
    by_tensor: dict[str, list[tuple[Piece, np.ndarray]]] = defaultdict(list)
    for name, array in arrays.items():
        piece = piece_named(name)
        by_tensor[piece.tensor].append((piece, array))
    return {tensor: _one(tensor, parts) for tensor, parts in by_tensor.items()}


def _one(tensor: str, parts: list[tuple[Piece, np.ndarray]]) -> np.ndarray:
    if len(parts) == 1 and parts[0][0].bounds is None:
        return parts[0][1]
    parts.sort(key=lambda part: part[0].bounds or (-1, 0, 0))
    bounds = [piece.bounds for piece, _ in parts]
    expected = 0
    for bound in bounds:
        if bound is None or bounds[0] is None or bound[0] != bounds[0][0] or bound[1] != expected:
            raise DataError(detail=f"The pieces {', '.join(piece.name for piece, _ in parts)} do not cover {tensor}.")
        expected = bound[2]
    assert bounds[0] is not None
    return np.concatenate([array for _, array in parts], axis=bounds[0][0])
