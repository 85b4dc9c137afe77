"""The synchroniser's copy of the model: parameters, momentum and version of every fragment, and the merge itself.

A merge reads each island's parameters twice in cache-sized blocks: once for the Gram matrix (only where the radial
average asks for it), once for the outer gradient and the outer step together. No array of the outer gradient ever exists.

Arrays handed out are read-only and never change: a merge makes new ones and puts them in place by one assignment, so a
reader in another thread sees a fragment before or after a merge, never in between. Different fragments may be merged
in different threads at once, one fragment in one thread at a time.

Refuses to know who contributed, how weights came about, what a payload is, and where the result goes.

Source: Decoupled DiLoCo, arXiv:2604.21428 (outer gradient anchored at the synchroniser's current Θ; momentum per
fragment).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.errors import DataError, InternalError
from orchestrator.parameters.fragment_map import FragmentMap
from orchestrator.parameters.outer_gradient import Averaging, averaging_for, coefficients, displacements, gram
from orchestrator.parameters.outer_optimizer import OuterOptimizer
from orchestrator.parameters.tensors import Array, Tensors, digest, shapes
from orchestrator.parameters.validation import check

WEIGHT_SUM_TOLERANCE = 1e-9
"""The core normalises in float64; M additions are off by far less than this, a forgotten normalisation by far more."""


@dataclass(eq=False, kw_only=True)
class NotFinite(DataError):
    """Parameters with NaN or Inf, or too large to be merged again. They were thrown away."""


@dataclass(frozen=True, slots=True)
class FragmentState:
    """One fragment at one version. The arrays are read-only; ``digest`` names the parameters bit for bit."""

    version: Version
    parameters: Tensors
    momentum: Tensors
    digest: str


class OuterState:
    """Θ, μ and the version vector, from the first parameters to the merged ones."""

    def __init__(
        self,
        parameters: Tensors,
        fragment_map: FragmentMap,
        averaging: Averaging | str,
        optimizer: OuterOptimizer,
    ) -> None:
        """Start every fragment at version 0 with a copy of ``parameters``, which ``fragment_map`` covers exactly once.

        Raises NotFinite where they contain NaN or Inf.
        """
        mapped = [name for members in fragment_map for name in members]
        if sorted(mapped) != sorted(parameters):
            raise InternalError(detail="The fragment map and the parameters do not name the same tensors.")
        _require_finite(parameters, "The initial parameters")
        self._averaging = Averaging(averaging)
        self._optimizer = optimizer
        self._fragments = {
            FragmentId(p): _seeded({name: parameters[name] for name in members}, optimizer)
            for p, members in enumerate(fragment_map)
        }

    @classmethod
    def restored(
        cls, fragments: Mapping[FragmentId, FragmentState], averaging: Averaging | str, optimizer: OuterOptimizer
    ) -> OuterState:
        """As it was when its fragments stood at these states."""
        restored = cls({}, (), averaging, optimizer)
        restored._fragments = dict(sorted(fragments.items()))
        return restored

    def part(self, fragments: Iterable[FragmentId]) -> OuterState:
        """These fragments as they stand: what one of several shards owns."""
        return self.restored({p: self._fragments[p] for p in fragments}, self._averaging, self._optimizer)

    @property
    def fragments(self) -> tuple[FragmentId, ...]:
        """In order; all of the model's, or those of one shard."""
        return tuple(self._fragments)

    @property
    def versions(self) -> tuple[Version, ...]:
        """Of the fragments, in their order."""
        return tuple(state.version for state in self._fragments.values())

    def version(self, fragment: FragmentId) -> Version:
        return self._fragments[fragment].version

    def state(self, fragment: FragmentId) -> FragmentState:
        """Version, arrays and digest that belong together, also while another thread merges."""
        return self._fragments[fragment]

    def fragment(self, fragment: FragmentId) -> dict[str, Array]:
        """The fragment's current parameters."""
        return dict(self._fragments[fragment].parameters)

    def parameters(self) -> dict[str, Array]:
        """All current parameters. Fragments may stand at different versions; so do the islands' own copies."""
        return {name: array for state in self._fragments.values() for name, array in state.parameters.items()}

    def merge(self, fragment: FragmentId, version: Version, inputs: Sequence[tuple[Tensors, float]]) -> str:
        """Take the fragment's outer step to ``version`` and return the digest of its parameters.

            inputs  what each island has of this fragment, θ_m, with its weight; weights sum to one. The arrays have
                    passed ``validation.check``; they are read, not kept

        Asked again for the version it stands at, it does nothing and returns the same digest. The order of ``inputs``
        shows in the last bits: who wants the same bits gives the same order. Raises NotFinite when that is what comes out;
        the fragment, its momentum included, then stays as it was.
        """
        before = self._fragments[fragment]
        if version == before.version:
            return before.digest
        if version != before.version + 1:
            raise InternalError(detail=f"Fragment {fragment} is at version {before.version}, asked to go to {version}.")
        weights = [weight for _, weight in inputs]
        _validate(fragment, before.parameters, [arrays for arrays, _ in inputs], weights)
        parameters: dict[str, Array] = {}
        momentum: dict[str, Array] = {}
        for name, anchor in before.parameters.items():
            replicas = [arrays[name] for arrays, _ in inputs]
            averaging = averaging_for(name, self._averaging)
            parameters[name], momentum[name] = outer_step(
                anchor, before.momentum[name], replicas, weights, averaging, self._optimizer
            )
        _require_finite(parameters, f"Version {version} of fragment {fragment}")
        after = FragmentState(version, parameters, momentum, digest(parameters))
        self._fragments[fragment] = after
        return after.digest

    def restore(self, fragment: FragmentId, version: Version, state: FragmentState) -> None:
        """The fragment is what ``state`` was, as its next version. Asked again for that version, it does nothing."""
        before = self._fragments[fragment]
        if version == before.version:
            return
        if version != before.version + 1:
            raise InternalError(detail=f"Fragment {fragment} is at version {before.version}, asked to go to {version}.")
        self._fragments[fragment] = FragmentState(version, state.parameters, state.momentum, state.digest)


def outer_step(
    anchor: Array,
    momentum: Array,
    replicas: Sequence[Array],
    weights: Sequence[float],
    averaging: Averaging,
    optimizer: OuterOptimizer,
) -> tuple[Array, Array]:
    """Merge one tensor and step: the next parameters and momentum, as new read-only arrays.

    anchor    Θ, any shape, float32, contiguous
    momentum  μ, flat, as the optimizer made it
    replicas  M times θ_m, shaped like Θ
    weights   M, summing to one
    """
    flat = anchor.reshape(-1)
    islands = [replica.reshape(-1) for replica in replicas]
    products = np.zeros((len(islands), len(islands)))
    if averaging is Averaging.RADIAL and len(islands) > 1:
        products = gram((block for _, block in displacements(flat, islands)), len(islands))
    mixing = coefficients(products, weights, averaging).astype(np.float32)
    next_flat, next_momentum = np.empty_like(flat), np.empty_like(momentum)
    for where, block in displacements(flat, islands):
        next_flat[where], next_momentum[where] = optimizer.step(flat[where], mixing @ block, momentum[where])
    return _read_only(next_flat.reshape(anchor.shape)), _read_only(next_momentum)


def _seeded(parameters: Tensors, optimizer: OuterOptimizer) -> FragmentState:
    copies = {name: _read_only(np.array(array, np.float32, order="C")) for name, array in parameters.items()}
    momentum = {name: _read_only(optimizer.initial_momentum(copy.reshape(-1))) for name, copy in copies.items()}
    return FragmentState(Version(0), copies, momentum, digest(copies))


def _validate(
    fragment: FragmentId,
    parameters: Tensors,
    inputs: Sequence[Tensors],
    weights: Sequence[float],
) -> None:
    """The preconditions, checked before anything is computed, because a wrong merge would be published to everyone."""
    if not all(weight > 0 for weight in weights) or abs(math.fsum(weights) - 1) > WEIGHT_SUM_TOLERANCE:
        raise InternalError(
            detail=f"The weights of a merge of fragment {fragment} are {weights}; they must sum to one."
        )
    wanted = shapes(parameters)
    for tensors in inputs:
        if shapes(tensors) != wanted:
            raise InternalError(detail=f"An input to a merge of fragment {fragment} does not have its tensors.")


def _require_finite(parameters: Tensors, name: str) -> None:
    """By the rule that contributions are held to: what a merge makes must be able to enter the next one."""
    problem = check(parameters, shapes(parameters))
    if problem is not None:
        raise NotFinite(detail=f"{name} cannot be used: {problem[1]}")


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array
