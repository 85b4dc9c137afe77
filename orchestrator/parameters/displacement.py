"""Displacements: how far an island's parameters are from a version of Θ, Δ = Θ − θ, in a codec.

What an island sends is Δ from the version that it has adopted, or its parameters themselves where it does not hold that
version. What a merge reads is Δ from the version that the fragment stands at.

Source: Decoupled DiLoCo, arXiv:2604.21428 (the sign is the outer gradient's).
"""

from __future__ import annotations

from orchestrator.core.vocabulary import Version
from orchestrator.parameters import kernels
from orchestrator.parameters.codec.registry import EXACT, CodecName
from orchestrator.parameters.tensors import Tensors
from orchestrator.parameters.wire_format import EncodedTensor, EncodedTensors, encoded


def displacement(anchor: Tensors, tensors: Tensors, base: Version, codec_name: CodecName = EXACT) -> EncodedTensors:
    """Δ of these tensors from ``anchor``, which is Θ at version ``base``."""
    coded = {
        name: EncodedTensor(array.shape, kernels.encode(codec_name, tensors[name], base=array).data)
        for name, array in anchor.items()
    }
    return EncodedTensors(codec_name, base, coded)


def rebased(content: EncodedTensors, old: Tensors, anchor: Tensors, base: Version) -> EncodedTensors:
    """The same parameters' displacement from ``anchor``, version ``base``, instead of from ``old``: Δ + (Θ − Θ_old)."""
    moved = {name: content.decoded(name) + (anchor[name] - old[name]) for name in content.tensors}
    return encoded(moved, EXACT, base)
