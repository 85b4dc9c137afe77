"""The part of a model that is trained: low-rank adapters of its matrices, or some of its tensors. Names and shapes only.

An adapter of the matrix W of (inputs, outputs) is a pair A, (inputs, rank), and B, (rank, outputs). The model computes with

    W + alpha / rank · A · B        W is frozen; B begins at zero, so the adapted model begins as the model itself

A stack of matrices has a stack of pairs. ``orchestrator.models`` says which tensors are matrices of a built-in model;
``learners.model`` does so for a factory's, and computes with them. How PEFT calls the pairs is in ``huggingface.peft``.

Source: LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from orchestrator.errors import Problem

Shape = tuple[int, ...]
ALL_LINEAR = "all-linear"
NOT_LINEAR = (".router.", ".experts.")
"""Parts of the names of matrices that ``all-linear`` leaves out, as PEFT does: a target must name them."""
MODULES: Mapping[str, str] = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
"""The names of a decoder's matrices in transformers."""
A, B = ".lora_a", ".lora_b"
"""What an adapter's tensors have after the name of their matrix."""
SHOWN_MAX = 12


def targeted(target: str, matrices: Collection[str]) -> list[str]:
    """Return the matrices that a target names: by the last parts of their names, as a pattern, or as transformers does."""
    if target == ALL_LINEAR:
        return [name for name in matrices if not any(part in f".{name}." for part in NOT_LINEAR)]
    return [name for name in matrices if any(fnmatchcase(each, target) for each in _names(name))]


def selected(targets: Sequence[str], matrices: Collection[str]) -> list[str]:
    """Return the matrices that some target names, in their own order."""
    wanted = {name for target in targets for name in targeted(target, matrices)}
    return [name for name in matrices if name in wanted]


def adapter_shapes(rank: int, targets: Sequence[str], matrices: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the names and shapes of all adapters' tensors."""
    shapes: dict[str, Shape] = {}
    for name in selected(targets, matrices):
        *stack, inputs, outputs = matrices[name]
        shapes |= {name + A: (*stack, inputs, rank), name + B: (*stack, rank, outputs)}
    return shapes


def adapter_problems(rank: int, targets: Sequence[str], matrices: Mapping[str, Shape]) -> Iterator[Problem]:
    """Yield a problem for each target that is no matrix, and for a rank that some matrix does not have."""
    where = "trainable.lora"
    for index, target in enumerate(targets):
        if not targeted(target, matrices):
            message = f"is {target!r}, but the model has no such matrix."
            yield Problem(f"{where}.targets.{index}", message, _remedy(target, matrices))
    narrowest = min(selected(targets, matrices), key=lambda name: min(matrices[name][-2:]), default=None)
    if narrowest is not None and rank > (largest := min(matrices[narrowest][-2:])):
        inputs, outputs = matrices[narrowest][-2:]
        message = f"is {rank:,}, but {narrowest} is a matrix of {inputs:,} × {outputs:,}, of rank {largest:,} at most."
        yield Problem(f"{where}.rank", message, f"Lower it to at most {largest:,}, or leave that target out.")


def trained(patterns: Sequence[str], tensors: Collection[str]) -> list[str]:
    """Return the tensors that match one of the patterns, in their own order."""
    return [name for name in tensors if any(fnmatchcase(name, pattern) for pattern in patterns)]


def pattern_problems(patterns: Sequence[str], tensors: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each pattern that matches no tensor, and if all tensors would be trained."""
    for index, pattern in enumerate(patterns):
        if not trained((pattern,), tensors):
            message = f"is {pattern!r}, which no tensor's name matches."
            yield Problem(f"trainable.only.{index}", message, f"The model's tensors are {_listed(list(tensors))}.")
    if tensors and len(trained(patterns, tensors)) == len(tensors):
        yield Problem("trainable.only", "matches every tensor, so nothing would be frozen.", "Leave trainable out.")


def _names(matrix: str) -> Iterator[str]:
    """Yield the names by which a target may call the matrix: its own, its last parts, and those in transformers."""
    parts = matrix.split(".")
    yield from (".".join(parts[start:]) for start in range(len(parts)))
    if theirs := MODULES.get(parts[-1]):
        yield theirs


def _remedy(target: str, matrices: Collection[str]) -> str:
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in matrices))
    choices = [*ends, *(MODULES[end] for end in ends if end in MODULES), ALL_LINEAR]
    near = get_close_matches(target, choices, 1)
    return f"Did you mean {near[0]}?" if near else f"Its matrices are {_listed(ends)}; {ALL_LINEAR} takes all of them."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN_MAX]) + (" …" if len(names) > SHOWN_MAX else "")
