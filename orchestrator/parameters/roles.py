"""The role of a tensor: what the merge and the inner optimizer must know of it besides its shape.

A model says it (``Model.roles``); where it says nothing the tensor's name does, by ``role_by_name``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

Shape = tuple[int, ...]

_EMBEDDING_LIKE = re.compile(r"(^|[/.])([^/.]*embed[^/.]*|([^/.]*_)?head)([/.]|$)")


@dataclass(frozen=True, slots=True)
class Role:
    """The role of one tensor.

    embedding     its rows are looked up, or scored, one by one: its outer gradient is the plain mean of the islands'
                  (Decoupled DiLoCo, arXiv:2604.21428), and it may be split anywhere
    stacked_axes  so many leading axes number layers, or layers and experts: every entry of them is a matrix of its
                  own, which has a direction of its own in the radial average
    decays        the inner optimizer's weight decay applies to it
    """

    embedding: bool = False
    stacked_axes: int = 0
    decays: bool = True


Roles = Mapping[str, Role]
"""Roles by tensor name. A tensor that is missing has the role that its name says."""
BY_NAME: Roles = MappingProxyType({})
"""Every tensor has the role that its name says."""


RoleRow = tuple[str, bool, int, bool]
"""A tensor and its role, as journals and checkpoints have it: name, embedding, stacked_axes, decays."""


def rows_of(roles: Roles) -> tuple[RoleRow, ...]:
    return tuple((name, role.embedding, role.stacked_axes, role.decays) for name, role in sorted(roles.items()))


def from_rows(rows: Iterable[RoleRow]) -> dict[str, Role]:
    return {name: Role(embedding, stacked_axes, decays) for name, embedding, stacked_axes, decays in rows}


def role_by_name(tensor: str, dimension_count: int) -> Role:
    """The role of a tensor whose model says nothing of it.

    Embedding-like: a part of the path (parts are separated by ``/`` or ``.``) contains ``embed``, is ``head`` or ends in
    ``_head``: ``token_embedding``, ``unembed/kernel``, ``lm_head``; but not ``multi_head_attention``. Weight decay spares
    vectors, and tensors with ``embed`` in their name.
    """
    return Role(
        embedding=_EMBEDDING_LIKE.search(tensor.lower()) is not None,
        decays=dimension_count >= 2 and "embed" not in tensor,
    )


def role_of(tensor: str, dimension_count: int, roles: Roles) -> Role:
    """The role in ``roles``, or by the tensor's name."""
    return roles.get(tensor) or role_by_name(tensor, dimension_count)
