"""``python -m tests.bench.host_bytes``: the bytes of one publication of every fragment that each host of an island
receives.

They are counted by shapes alone, as the shard would cut them for an island with ``fsdp`` over all hosts' devices, equally
many on each: a host has its share along the dimension that ``fsdp`` splits, and what is not split goes whole to each.

The second part is what each host reads of a checkpoint from which the island continues: real files, written by as many
hosts or by others, and the bytes that are requested.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jax.sharding import AbstractMesh

from learners import checkpointing, mesh, plain_arrays
from learners.checkpointing import STEM
from learners.models import decoder
from orchestrator.checkpoints.blocks import Window
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import Part
from orchestrator.models.decoder import parameter_shapes
from orchestrator.models.presets import DECODERS
from orchestrator.parameters import fragment_map
from orchestrator.parameters.codec.registry import CODEC_NAMES, CodecName, codec
from orchestrator.parameters.parts import Bounds, between_units, intersection, shape_of, whole, within
from orchestrator.parameters.pieces import Shape, piece_named
from orchestrator.specification.device_mesh import AXES
from tests.checkpoints.reads import counted_reads

FRAGMENTS = 24
ROWS = (("llama3-20m", 2), ("gemma3-1b", 2), ("llama3.1-8b", 2), ("llama3.1-8b", 8), ("gemma3-12b", 8), ("moe-500m", 4))


READ = (
    *(("llama3-20m", writers, hosts) for writers, hosts in ((2, 2), (4, 2), (1, 2))),
    *(("gemma3-1b", writers, hosts) for writers, hosts in ((2, 2), (1, 2))),
)
ISLAND = "here"


def shares(preset: str, hosts: int, codec_name: CodecName) -> list[float]:
    """Return by host the part of the bytes of all fragments that it receives."""
    config = DECODERS[preset]
    shapes, along = _lying(preset, hosts)
    fragments = fragment_map.build(shapes, FRAGMENTS, decoder.roles(config))
    names = [name for own in fragments for name in own]
    total = sum(_bytes(codec_name, piece_named(n).shape(shapes[piece_named(n).tensor]), None) for n in names)
    return [sum(_of_host(host, hosts, n, shapes, along, codec_name) for n in names) / total for host in range(hosts)]


def read(preset: str, writers: int, hosts: int) -> list[float]:
    """Return by host the part of the written bytes of the parameters that it reads. Moments have the same layout."""
    shapes, along = _lying(preset, hosts)
    _, lay = _lying(preset, writers)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=Path.cwd()) as path:
        folder, files = Folder.own(Path(path)), []
        for writer in range(writers):
            bounds = {name: _held(writer, writers, shape, lay[name]) for name, shape in shapes.items()}
            own = {name for name in shapes if bounds[name] != whole(shapes[name]) or writer == 0}
            arrays = {name: np.zeros(shape_of(bounds[name]), np.float32) for name in own}
            files += plain_arrays.write(folder.sub(ISLAND), f"{STEM}-{writer}", arrays, bounds)
        part = Part(ISLAND, 1, 0, 0, 0, 0, 0, (), (), (), tuple(files))
        amounts = []
        for host in range(hosts):
            windows = {name: Window(_held(host, hosts, shape, along[name]), shape) for name, shape in shapes.items()}
            with counted_reads() as stretches:
                checkpointing.read(folder, part, windows)
            amounts.append(sum(stretches) / (4 * sum(map(math.prod, shapes.values()))))
    return amounts


def _lying(preset: str, hosts: int) -> tuple[dict[str, Shape], dict[str, tuple[str | None, ...]]]:
    """Return the shapes of the tensors, and the axes of the mesh by which each is split."""
    config = DECODERS[preset]
    shapes = parameter_shapes(config)
    abstract = AbstractMesh((1, hosts, 1, 1), AXES)
    lies = mesh.shardings(abstract, shapes, config.dimensions, decoder.roles(config))
    return dict(shapes), {name: tuple(sharding.spec) for name, sharding in lies.items()}


def _held(host: int, hosts: int, tensor: Shape, split: Sequence[str | None]) -> Bounds:
    return tuple(
        (size * host // hosts, size * (host + 1) // hosts) if axis < len(split) and split[axis] == "fsdp" else (0, size)
        for axis, size in enumerate(tensor)
    )


def _of_host(
    host: int,
    hosts: int,
    name: str,
    shapes: Mapping[str, Shape],
    along: Mapping[str, tuple[str | None, ...]],
    to: CodecName,
) -> int:
    piece = piece_named(name)
    tensor = shapes[piece.tensor]
    has = _held(host, hosts, tensor, along[piece.tensor])
    lies = list(whole(tensor))
    if piece.bounds is not None:
        lies[piece.bounds[0]] = piece.bounds[1:]
    common = intersection(has, tuple(lies))
    return 0 if common is None else _bytes(to, piece.shape(tensor), within(common, tuple(lies)))


def _bytes(codec_name: CodecName, shape: Shape, bounds: Bounds | None) -> int:
    own = shape if bounds is None else shape_of(between_units(codec_name, bounds, shape))
    return codec(codec_name).data_bytes(math.prod(own))


if __name__ == "__main__":
    for preset, hosts in ROWS:
        for codec_name in CODEC_NAMES:
            each = shares(preset, hosts, codec_name)
            print(f"{preset:12} {hosts} hosts {codec_name:9} {min(each):.4f} to {max(each):.4f} of the bytes each")
    for preset, writers, hosts in READ:
        each = read(preset, writers, hosts)
        what = f"{preset:12} saved by {writers}, read by {hosts} hosts"
        print(f"{what} {min(each):.4f} to {max(each):.4f} of the bytes each")
