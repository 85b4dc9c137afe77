"""The synchroniser's copy of the model: parameters, momentum and version of every fragment, and the merge itself.

A merge reads each island's encoded displacement twice: once for the Gram matrix (only if the radial average needs it), once
for the outer gradient together with the whole outer step (``kernels``).

Θ has the same bits as the islands' copies. If updates travel in a lossy codec, a merge makes the update, encodes it together
with what earlier ones lost (the *residue*), and moves Θ by what islands will decode:

   u = residue − decrement        û = decode(encode(u))        Θ' = Θ + û        residue' = u − û

Returned arrays are read-only and never change: a merge creates new ones and installs them by one assignment, so a
reader in another thread sees a fragment before or after a merge, never in between. Different fragments may be merged
in different threads at the same time, but each in one thread at a time.

The outer gradient is an average of the islands' displacements. Both averages known here are linear in the displacements,
Δ = Σ a_m Δ_m with Δ_m = Θ − θ_m, and differ only in the coefficients a_m. So a merge has three parts: the Gram matrix
⟨Δ_i, Δ_j⟩ (all that the radial average needs of the arrays), M coefficients from it, and one weighted sum. The first and the
last are ``kernels``; the second is here.

A limit of the outer gradient's norm needs the average before the step. ‖Δ‖ is over all pieces of the fragment, so it is the
same whichever shard has the fragment; fragments merge at different times, so there is no norm over all of them.

   Δ ← Δ · min(1, clip/‖Δ‖)

Nothing here knows who contributed, how weights were computed, what a payload is, or where the result goes.

Source: Decoupled DiLoCo, arXiv:2604.21428 (outer gradient anchored at the synchroniser's current Θ; momentum per fragment;
radial-directional averaging; embedding-like tensors by plain mean); error feedback: Karimireddy et al., arXiv:1901.09847,
Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.vocabulary import FragmentId, Version, is_router
from orchestrator.errors import DataError, InternalError
from orchestrator.parameters import kernels, outer_optimizer
from orchestrator.parameters.codec.registry import EXACT, CodecName
from orchestrator.parameters.fragment_map import FragmentMap
from orchestrator.parameters.kernels import Encoded
from orchestrator.parameters.outer_optimizer import OuterOptimizer, Sgd
from orchestrator.parameters.pieces import BY_NAME, Role, Roles, piece_named, role_of
from orchestrator.parameters.tensors import Array, Tensors, digest, raw_bytes, shapes
from orchestrator.parameters.validation import check_magnitude, check_numbers
from orchestrator.parameters.wire_format import EncodedTensor, EncodedTensors, rebased

DIRECTION_MIN = 1e-2
"""A mean direction shorter than this has vanished. Unit vectors that are merely orthogonal would need 10,000 islands to
get there. Float32 sums give the square of this length to within one per cent, but not of a much smaller one."""
WEIGHT_SUM_TOLERANCE = 1e-9
"""The core normalises in float64: M additions err by far less than this, and a forgotten normalisation by far more."""


class Averaging(StrEnum):
    """The average of displacements, with the values of the job specification."""

    RADIAL = "radial"
    MEAN = "mean"


def averaging_for(role: Role, chosen: Averaging) -> Averaging:
    """Return the average for tensors of this role: embedding-like ones always take the plain mean."""
    return Averaging.MEAN if role.embedding else chosen


def coefficients(products: NDArray[np.float64], weights: Sequence[float], averaging: Averaging) -> NDArray[np.float64]:
    """Return the a_m of Δ = Σ a_m Δ_m.

        products  (M, M) float64: ⟨Δ_i, Δ_j⟩
        weights   (M,) summing to one

        mean     Δ = Σ w_m Δ_m
        radial   Δ = (Σ w_m ‖Δ_m‖) · φ(Σ w_m φ(Δ_m)),   φ(x) = x/‖x‖, φ(0) = 0;   the mean if that direction vanishes

    With c_m = w_m/‖Δ_m‖ the mean direction is d = Σ c_m Δ_m and ‖d‖² = cᵀ G c, so the radial average needs only the Gram
    matrix: a_m = c_m · (Σ w_m ‖Δ_m‖)/‖d‖.
    """
    w = np.asarray(weights, np.float64)
    if averaging is Averaging.MEAN or len(w) == 1:  # both averages of one displacement are that displacement
        return w
    norms = np.sqrt(np.diag(products))
    c = np.divide(w, norms, out=np.zeros_like(w), where=norms > 0)  # φ(0) = 0
    direction_norm = np.sqrt(max(0.0, float(c @ products @ c)))
    if direction_norm < DIRECTION_MIN:
        return w
    return np.asarray(c * (float(w @ norms) / direction_norm), np.float64)


@dataclass(eq=False, kw_only=True)
class NotFinite(DataError):
    """Parameters contain NaN or Inf, or values too large to merge again. They were discarded."""


@dataclass(frozen=True, slots=True)
class FragmentState:
    """One fragment at one version: arrays by the names of its pieces.

    The arrays are read-only; ``digest`` identifies the parameters bit for bit. ``roles`` are those of tensors whose names do
    not show them. ``residue`` is what updates so far lost in their codec, empty if nothing;
    ``update`` is the encoded difference from the version before, if one was made. ``gradient_norm`` is ‖Δ‖ before
    it was clipped, if there is a limit.
    """

    version: Version
    parameters: Tensors
    momentum: Tensors
    digest: str
    roles: Roles = field(default_factory=dict)
    residue: Tensors = field(default_factory=dict)
    update: EncodedTensors | None = field(default=None, compare=False)
    gradient_norm: float | None = field(default=None, compare=False)

    def arrays(self) -> tuple[Tensors, Tensors, Tensors]:
        """Return Θ, the optimizer's state and the residue, which the next merge needs."""
        return self.parameters, self.momentum, self.residue


class Wire(Protocol):
    """``synchroniser.wire`` of a job specification."""

    @property
    def down(self) -> CodecName: ...


class Settings(Protocol):
    """``synchroniser`` of a job specification."""

    @property
    def averaging(self) -> str: ...

    @property
    def outer_optimizer(self) -> outer_optimizer.Settings: ...

    @property
    def wire(self) -> Wire: ...

    @property
    def staleness_max(self) -> int: ...


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The settings of a merge: the average of displacements, the optimizer, and the codec of updates.

    Displacements from the ``staleness_max`` versions before the current one can be merged, too. ``clip_norm`` limits the
    norm of a fragment's outer gradient.
    """

    averaging: Averaging
    optimizer: OuterOptimizer
    update_codec: CodecName = EXACT
    staleness_max: int = 0
    clip_norm: float | None = None

    @classmethod
    def of(cls, settings: Settings) -> OuterStep:
        """Return the outer step that a job specification asks for."""
        own = settings.outer_optimizer
        optimizer, averaging = outer_optimizer.of(own), Averaging(settings.averaging)
        return cls(averaging, optimizer, settings.wire.down, settings.staleness_max, own.clip_norm)


class OuterState:
    """Θ, μ and the version vector, from the first parameters to the merged ones."""

    def __init__(
        self,
        parameters: Tensors,
        fragment_map: FragmentMap,
        step: OuterStep,
        roles: Roles = BY_NAME,
    ) -> None:
        """Start every fragment at version 0 with a copy of ``parameters``, which ``fragment_map`` covers exactly once.

            parameters  pieces by name, float32
            roles       of tensors whose names do not show them

        Raises NotFinite if they contain NaN or Inf.
        """
        mapped = [name for members in fragment_map for name in members]
        if sorted(mapped) != sorted(parameters):
            raise InternalError(detail="The fragment map and the parameters do not name the same tensors.")
        self._step = step
        self._older: dict[FragmentId, tuple[FragmentState, ...]] = {}
        self._fragments = {
            FragmentId(p): initial_state({name: parameters[name] for name in members}, step, roles)
            for p, members in enumerate(fragment_map)
        }

    @classmethod
    def restored(
        cls,
        fragments: Mapping[FragmentId, FragmentState],
        step: OuterStep,
        older: Mapping[FragmentId, tuple[FragmentState, ...]] | None = None,
    ) -> OuterState:
        """Return the state with these fragments; ``older`` are earlier versions that displacements need."""
        restored = cls({}, (), step)
        restored._older = dict(older or {})
        restored._fragments = dict(sorted(fragments.items()))
        return restored

    def part(self, fragments: Iterable[FragmentId]) -> OuterState:
        """Return these fragments as they are, for one of several shards."""
        own = {p: self._fragments[p] for p in fragments}
        return self.restored(own, self._step, {p: self._older.get(p, ()) for p in own})

    @property
    def fragments(self) -> tuple[FragmentId, ...]:
        """The fragments in order: all of the model's, or those of one shard."""
        return tuple(self._fragments)

    @property
    def versions(self) -> tuple[Version, ...]:
        """The versions of the fragments, in their order."""
        return tuple(state.version for state in self._fragments.values())

    def version(self, fragment: FragmentId) -> Version:
        return self._fragments[fragment].version

    def state(self, fragment: FragmentId) -> FragmentState:
        """Return version, arrays and digest that belong together, even while another thread merges."""
        return self._fragments[fragment]

    def fragment(self, fragment: FragmentId) -> dict[str, Array]:
        """Return the fragment's current parameters."""
        return dict(self._fragments[fragment].parameters)

    def parameters(self) -> dict[str, Array]:
        """Return all current pieces by name. Fragments may be at different versions, as in the islands' own copies."""
        return {name: array for state in self._fragments.values() for name, array in state.parameters.items()}

    def merge(
        self,
        fragment: FragmentId,
        version: Version,
        inputs: Sequence[tuple[EncodedTensors, float]],
        lr_ratio: float = 1.0,
    ) -> str:
        """Take the fragment's outer step to ``version`` and return the digest of its parameters.

            inputs    each island's displacement Δ_m from the version before, with its weight; weights sum to one. They have
                      passed ``validation``; they are read, not kept
            lr_ratio  the fraction of the optimizer's learning rate for this step

        Idempotent: for the current version it does nothing and returns the same digest. The order of ``inputs`` affects
        the last bits: the same order gives the same bits. Raises NotFinite if the result is not finite; the fragment,
        including its momentum, then stays as it was.
        """
        before = self._fragments[fragment]
        if version == before.version:
            return before.digest
        if version != before.version + 1:
            raise InternalError(
                detail=f"Fragment {fragment} is at version {before.version} and cannot go to {version}."
            )
        weights = [weight for _, weight in inputs]
        _validate(fragment, before, [displacement for displacement, _ in inputs], weights)
        step = replace(self._step, optimizer=outer_optimizer.slowed(self._step.optimizer, lr_ratio))
        gradient_norm, clip_ratio = None, 1.0
        if step.clip_norm is not None:
            average = self._average(before, inputs)
            gradient_norm = math.sqrt(math.fsum(kernels.examine(own).square_norm for _, own in average.named_values()))
            inputs, weights = [(average, 1.0)], [1.0]
            clip_ratio = step.clip_norm / gradient_norm if gradient_norm > step.clip_norm else 1.0
        pieces: dict[str, MergedPiece] = {}
        for name, anchor in before.parameters.items():
            role = role_of(piece_named(name).tensor, anchor.ndim, before.roles)
            pieces[name] = outer_step(
                anchor,
                before.momentum[name],
                before.residue.get(name),
                [displacement.values(name) for displacement, _ in inputs],
                weights,
                replace(step, averaging=averaging_for(role, step.averaging)),
                role.stacked_axes,
                clip_ratio,
            )
        parameters = {name: piece.parameters for name, piece in pieces.items()}
        for name, piece in pieces.items():
            if (problem := check_magnitude(name, piece.largest)) is not None:
                raise NotFinite(detail=f"Version {version} of fragment {fragment} cannot be used: {problem}")
        after = FragmentState(
            version,
            parameters,
            {name: piece.momentum for name, piece in pieces.items()},
            digest(parameters),
            before.roles,
            {name: piece.residue for name, piece in pieces.items() if piece.residue is not None},
            self._update(before.version, pieces),
            gradient_norm,
        )
        if self._step.staleness_max:
            self._older[fragment] = (*self._older.get(fragment, ()), before)[-self._step.staleness_max :]
        self._fragments[fragment] = after
        return after.digest

    def router_spread(
        self, fragment: FragmentId, inputs: Sequence[tuple[EncodedTensors, float]]
    ) -> tuple[float, float] | None:
        """Return how far apart the contributions have the fragment's routers, and how far they moved them from Θ.

            distance  √ of the mean of ‖θ_i − θ_j‖² over pairs of contributions
            travel    √ of the mean of ‖Δ_m‖² over contributions

        Norms are over all router pieces of the fragment, and every contribution counts the same. If islands moved the
        routers independently, the distance is √2 times the travel; if they agree, it is 0. None for one contribution, and
        for a fragment without routers. ``inputs`` are as for a merge.
        """
        routers = [name for name in self._fragments[fragment].parameters if is_router(piece_named(name).tensor)]
        if not routers or len(inputs) < 2:
            return None
        products = sum(kernels.gram([each.values(name) for each, _ in inputs])[0] for name in routers)
        count, squares = len(inputs), float(np.trace(products))
        apart = max(0.0, count * squares - float(np.sum(products)))  # Σ over pairs of G_ii + G_jj − 2·G_ij
        return math.sqrt(2 * apart / (count * (count - 1))), math.sqrt(squares / count)

    def outer_gradient(self, fragment: FragmentId, inputs: Sequence[tuple[EncodedTensors, float]]) -> EncodedTensors:
        """Return the average of the displacements by which a merge of them steps: Δ, float32.

        A merge of it alone, with weight 1, gives the same bits as one of ``inputs``. ``inputs`` are as for a merge.
        """
        before = self._fragments[fragment]
        displacements, weights = [displacement for displacement, _ in inputs], [weight for _, weight in inputs]
        _validate(fragment, before, displacements, weights)
        return self._average(before, inputs)

    def _average(self, before: FragmentState, inputs: Sequence[tuple[EncodedTensors, float]]) -> EncodedTensors:
        displacements, weights = [displacement for displacement, _ in inputs], [weight for _, weight in inputs]
        averages: dict[str, EncodedTensor] = {}
        for name, anchor in before.parameters.items():
            role = role_of(piece_named(name).tensor, anchor.ndim, before.roles)
            own = [displacement.values(name) for displacement in displacements]
            averaging = averaging_for(role, self._step.averaging)
            average = average_of(own, mixing_of(own, weights, averaging, anchor.shape[: role.stacked_axes]))
            averages[name] = EncodedTensor(anchor.shape, raw_bytes(average, average.dtype))
        return EncodedTensors(EXACT, before.version, averages)

    def from_current(self, fragment: FragmentId, displacement: EncodedTensors) -> EncodedTensors:
        """Convert a displacement from an older version into one from the fragment's current version.

        If its base is no longer known, it counts from the current version: it is what its island learned, if not where it
        is.
        """
        current = self._fragments[fragment]
        if displacement.base == current.version:
            return displacement
        older = self._older.get(fragment, ())
        base = next((state for state in older if state.version == displacement.base), current)
        return rebased(displacement, base.parameters, current.parameters, current.version)

    def _update(self, base: Version, pieces: Mapping[str, MergedPiece]) -> EncodedTensors | None:
        updates = {name: piece.update for name, piece in pieces.items() if piece.update is not None}
        return EncodedTensors(self._step.update_codec, base, updates) if updates else None

    def restore(self, fragment: FragmentId, version: Version, state: FragmentState) -> None:
        """Replace the fragment by ``state``, as its next version. Idempotent: for that version it does nothing."""
        before = self._fragments[fragment]
        if version == before.version:
            return
        if version != before.version + 1:
            raise InternalError(
                detail=f"Fragment {fragment} is at version {before.version} and cannot go to {version}."
            )
        self._older.pop(fragment, None)
        self._fragments[fragment] = replace(state, version=version, update=None, gradient_norm=None)


@dataclass(frozen=True, slots=True)
class MergedPiece:
    """A piece after its outer step, as new read-only arrays.

    parameters  Θ', shaped like Θ
    momentum    the optimizer's next state, flat
    residue     what its updates lost so far, shaped like Θ; None if the codec is lossless
    update      Θ' − Θ in the codec; None if values are sent
    largest     the largest magnitude in Θ', NaN if a value is not a number
    """

    parameters: Array
    momentum: Array
    residue: Array | None
    update: EncodedTensor | None
    largest: float


def outer_step(
    anchor: Array,
    momentum: Array,
    residue: Array | None,
    displacements: Sequence[Encoded],
    weights: Sequence[float],
    step: OuterStep,
    stacked_axes: int = 0,
    clip_ratio: float = 1.0,
) -> MergedPiece:
    """Merge one piece and step.

    anchor         Θ, any shape, float32, contiguous
    momentum       the optimizer's state, flat
    residue        shaped like Θ; None for zeros
    displacements  M times Δ_m = Θ − θ_m, with as many values as Θ
    weights        M, summing to one
    stacked_axes   the number of leading axes that number matrices, each with its own direction in the radial average
    clip_ratio     what is left of the average by the limit of its norm
    """
    mixing = mixing_of(displacements, weights, step.averaging, anchor.shape[:stacked_axes])
    result = kernels.step(
        anchor,
        momentum,
        residue,
        displacements,
        mixing if clip_ratio == 1.0 else mixing * np.float32(clip_ratio),
        step.optimizer,
        step.update_codec,
    )
    return MergedPiece(
        _read_only(result.parameters.reshape(anchor.shape)),
        _read_only(result.momentum),
        None if result.residue is None else _read_only(result.residue.reshape(anchor.shape)),
        None if result.update is None else EncodedTensor(anchor.shape, result.update.data),
        result.largest,
    )


def mixing_of(
    displacements: Sequence[Encoded], weights: Sequence[float], averaging: Averaging, stacked: Sequence[int]
) -> Array:
    """Return the a_m of Δ = Σ a_m Δ_m: (matrices, M) float32. ``stacked`` are the extents that number a piece's matrices."""
    if averaging is Averaging.RADIAL and len(displacements) > 1:
        products = kernels.gram(displacements, math.prod(stacked))
    else:
        products = np.zeros((1, len(displacements), len(displacements)))
    return np.array([coefficients(matrix, weights, averaging) for matrix in products], np.float32)


def average_of(displacements: Sequence[Encoded], mixing: Array) -> Array:
    """Return Δ = Σ a_m Δ_m, flat, added in the order in which an outer step adds.

    It is the result of plain descent with lr = −1 from −0: −0 − (−Δ) is Δ to the bit, including the sign of a zero.
    """
    nowhere = np.full(displacements[0].value_count, -0.0, np.float32)
    return kernels.step(nowhere, nowhere[:0], None, displacements, mixing, Sgd(-1.0)).parameters


def initial_state(parameters: Tensors, step: OuterStep, roles: Roles = BY_NAME) -> FragmentState:
    """Return a fragment at version 0, with a copy of these pieces. Raises NotFinite if they contain NaN or Inf."""
    if (problem := check_numbers(parameters)) is not None:
        raise NotFinite(detail=f"The initial parameters cannot be used: {problem}")
    copies = {name: _read_only(np.array(array, np.float32, order="C")) for name, array in parameters.items()}
    momentum = {
        name: _read_only(outer_optimizer.initial_state(step.optimizer, copy.size)) for name, copy in copies.items()
    }
    tensors = {piece_named(name).tensor for name in parameters}
    own = {tensor: role for tensor, role in sorted(roles.items()) if tensor in tensors}
    return FragmentState(Version(0), copies, momentum, digest(copies), own)


def _validate(
    fragment: FragmentId, before: FragmentState, inputs: Sequence[EncodedTensors], weights: Sequence[float]
) -> None:
    """Check the preconditions before anything is computed, because a wrong merge would be published to everyone."""
    if not all(weight > 0 for weight in weights) or abs(math.fsum(weights) - 1) > WEIGHT_SUM_TOLERANCE:
        raise InternalError(detail=f"The weights of a merge of fragment {fragment} are {weights}, but must sum to one.")
    wanted = shapes(before.parameters)
    for displacement in inputs:
        if displacement.shapes() != wanted:
            raise InternalError(
                detail=f"An input to a merge of fragment {fragment} has other tensors than the fragment."
            )
        if displacement.base != before.version:
            raise InternalError(
                detail=f"An input to a merge of fragment {fragment} is the difference from version {displacement.base}, "
                f"not {before.version}."
            )


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array
