"""Cut the parameters into P disjoint fragments of nearly equal size.

Tensors in descending size, each into the lightest fragment so far; ties break by name, then by fragment index. So the
map is a function of names and sizes alone: every island and the synchroniser compute it for themselves and agree. It
refuses to know what a tensor is for, and never splits one.

The heaviest fragment is at most 4/3 − 1/(3P) of what the best possible map would have (Graham 1969, "Bounds on
multiprocessing timing anomalies", theorem 2). A tensor larger than total/P bounds that best map from below, so a model
with one huge embedding is as uneven as that embedding makes it.

Source: Decoupled DiLoCo, arXiv:2604.21428 (balanced tensor fragments).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from orchestrator.errors import ConfigurationError

FragmentMap = tuple[tuple[str, ...], ...]
"""The tensor names of every fragment, by fragment index; names sorted within a fragment."""


def build(sizes: Mapping[str, int], fragment_count: int) -> FragmentMap:
    """Put every tensor into exactly one of ``fragment_count`` fragments, none of which is empty.

        sizes  elements (or bytes) of each tensor, at least 1

    The order of ``sizes`` does not matter. Raises ConfigurationError when there cannot be that many fragments.
    """
    _validate(sizes, fragment_count)
    lightest = [(0, fragment) for fragment in range(fragment_count)]  # a heap of (size so far, fragment)
    names: list[list[str]] = [[] for _ in range(fragment_count)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, fragment = lightest[0]
        names[fragment].append(name)
        heapq.heapreplace(lightest, (load + sizes[name], fragment))
    return tuple(tuple(sorted(members)) for members in names)


def _validate(sizes: Mapping[str, int], fragment_count: int) -> None:
    if fragment_count < 1:
        raise ConfigurationError(
            detail=f"synchroniser.fragments is {fragment_count}, but the parameters are at least one fragment. "
            "Set it to 1 or more."
        )
    if empty := sorted(name for name, size in sizes.items() if size < 1):
        raise ConfigurationError(
            detail=f"The tensors {', '.join(map(repr, empty))} have no elements, so there is nothing to train or merge "
            "in them. Remove them from the model."
        )
    if len(sizes) < fragment_count:
        raise ConfigurationError(
            detail=f"synchroniser.fragments is {fragment_count} but the model has only {len(sizes)} tensors, and a "
            f"tensor is never split. Lower it to at most {len(sizes)}."
        )
