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
from dataclasses import dataclass, field, replace

import numpy as np

from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.errors import DataError, InternalError
from orchestrator.parameters.fragment_map import FragmentMap
from orchestrator.parameters.outer_gradient import Averaging, averaging_for, coefficients, displacements, gram
from orchestrator.parameters.outer_optimizer import OuterOptimizer
from orchestrator.parameters.pieces import piece_named
from orchestrator.parameters.roles import BY_NAME, Roles, role_of
from orchestrator.parameters.tensors import Array, Tensors, digest, shapes
from orchestrator.parameters.validation import check

WEIGHT_SUM_TOLERANCE = 1e-9
"""The core normalises in float64; M additions are off by far less than this, a forgotten normalisation by far more."""


@dataclass(eq=False, kw_only=True)
class NotFinite(DataError):
    """Parameters with NaN or Inf, or too large to be merged again. They were thrown away."""


@dataclass(frozen=True, slots=True)
class FragmentState:
    """One fragment at one version: arrays by the names of its pieces.

    The arrays are read-only; ``digest`` names the parameters bit for bit. ``roles`` are those of its tensors whose model
    says something else than their names.
    """

    version: Version
    parameters: Tensors
    momentum: Tensors
    digest: str
    roles: Roles = field(default_factory=dict)


class OuterState:
    """Θ, μ and the version vector, from the first parameters to the merged ones."""

    def __init__(
        self,
        parameters: Tensors,
        fragment_map: FragmentMap,
        averaging: Averaging | str,
        optimizer: OuterOptimizer,
        roles: Roles = BY_NAME,
    ) -> None:
        """Start every fragment at version 0 with a copy of ``parameters``, which ``fragment_map`` covers exactly once.

            parameters  pieces by name, float32
            roles       of the tensors, where their names do not say them

        Raises NotFinite where they contain NaN or Inf.
        """
        mapped = [name for members in fragment_map for name in members]
        if sorted(mapped) != sorted(parameters):
            raise InternalError(detail="The fragment map and the parameters do not name the same tensors.")
        _require_finite(parameters, "The initial parameters")
        self._averaging = Averaging(averaging)
        self._optimizer = optimizer
        self._fragments = {
            FragmentId(p): _seeded({name: parameters[name] for name in members}, optimizer, roles)
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
        """All current pieces by name. Fragments may stand at different versions; so do the islands' own copies."""
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
            role = role_of(piece_named(name).tensor, anchor.ndim, before.roles)
            averaging = averaging_for(role, self._averaging)
            parameters[name], momentum[name] = outer_step(
                anchor, before.momentum[name], replicas, weights, averaging, self._optimizer, role.stacked_axes
            )
        _require_finite(parameters, f"Version {version} of fragment {fragment}")
        after = FragmentState(version, parameters, momentum, digest(parameters), before.roles)
        self._fragments[fragment] = after
        return after.digest

    def restore(self, fragment: FragmentId, version: Version, state: FragmentState) -> None:
        """The fragment is what ``state`` was, as its next version. Asked again for that version, it does nothing."""
        before = self._fragments[fragment]
        if version == before.version:
            return
        if version != before.version + 1:
            raise InternalError(detail=f"Fragment {fragment} is at version {before.version}, asked to go to {version}.")
        self._fragments[fragment] = replace(state, version=version)


def outer_step(
    anchor: Array,
    momentum: Array,
    replicas: Sequence[Array],
    weights: Sequence[float],
    averaging: Averaging,
    optimizer: OuterOptimizer,
    stacked_axes: int = 0,
) -> tuple[Array, Array]:
    """Merge one piece and step: the next parameters and momentum, as new read-only arrays.

    anchor        Θ, any shape, float32, contiguous
    momentum      μ, flat, as the optimizer made it
    replicas      M times θ_m, shaped like Θ
    weights       M, summing to one
    stacked_axes  so many leading axes number matrices, each of which has a direction of its own in the radial average
    """
    flat = anchor.reshape(-1)
    islands = [replica.reshape(-1) for replica in replicas]
    radial = averaging is Averaging.RADIAL and len(islands) > 1
    matrix_count = math.prod(anchor.shape[:stacked_axes]) if radial else 1
    length = flat.size // matrix_count
    next_flat, next_momentum = np.empty_like(flat), np.empty_like(momentum)
    for start in range(0, matrix_count * length, length):
        matrix, own = flat[start : start + length], [island[start : start + length] for island in islands]
        before, after = momentum[start : start + length], next_flat[start : start + length]
        products = np.zeros((len(islands), len(islands)))
        if radial:
            products = gram((block for _, block in displacements(matrix, own)), len(islands))
        mixing = coefficients(products, weights, averaging).astype(np.float32)
        next_before = next_momentum[start : start + length]
        for where, block in displacements(matrix, own):
            after[where], next_before[where] = optimizer.step(matrix[where], mixing @ block, before[where])
    return _read_only(next_flat.reshape(anchor.shape)), _read_only(next_momentum)


def _seeded(parameters: Tensors, optimizer: OuterOptimizer, roles: Roles) -> FragmentState:
    copies = {name: _read_only(np.array(array, np.float32, order="C")) for name, array in parameters.items()}
    momentum = {name: _read_only(optimizer.initial_momentum(copy.reshape(-1))) for name, copy in copies.items()}
    tensors = {piece_named(name).tensor for name in parameters}
    own = {tensor: role for tensor, role in sorted(roles.items()) if tensor in tensors}
    return FragmentState(Version(0), copies, momentum, digest(copies), own)


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
