"""The shapes of the plain transformer, by which its memory is known without JAX; ``learners.models.plain`` computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTE_VALUES = 256
"""Tokens are bytes unless the specification has a tokenizer."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """``width`` is a multiple of ``head_size``; the hidden layer is four times as wide."""

    width: int
    layer_count: int
    head_size: int = 64
    vocabulary_size: int = BYTE_VALUES

    @property
    def parameter_count(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return parameter_shapes(self)

    @property
    def dimensions(self) -> dict[str, tuple[str, str]]:
        """What the dimensions of each tensor are, by which a mesh splits them."""
        by_end = {"embed": ("vocabulary", "width"), "unembed": ("width", "vocabulary")}
        by_end |= {"output": ("heads", "width"), "up": ("width", "hidden"), "down": ("hidden", "width")}
        return {name: by_end.get(name.rpartition(".")[2], ("width", "heads")) for name in self.shapes}


def parameter_shapes(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """Names and shapes of all tensors; a matrix maps (inputs, outputs)."""
    width, hidden = architecture.width, 4 * architecture.width
    shapes = {"embed": (architecture.vocabulary_size, width)}
    for layer in range(architecture.layer_count):
        for name in ("query", "key", "value", "output"):
            shapes[f"blocks.{layer}.attention.{name}"] = (width, width)
        shapes[f"blocks.{layer}.feedforward.up"] = (width, hidden)
        shapes[f"blocks.{layer}.feedforward.down"] = (hidden, width)
    shapes["unembed"] = (width, architecture.vocabulary_size)
    return shapes
