"""``python -m tests.bench.host_bytes``: the bytes that each host of an island is sent of one publication of every fragment.

Counted by shapes alone, as the shard would cut them for an island with ``fsdp`` over all hosts' devices, of which each has
as many: along the dimension that ``fsdp`` splits a host has its share, and what is not split goes whole to each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jax.sharding import AbstractMesh

from learners import mesh
from learners.models import decoder
from orchestrator.device_mesh import AXES
from orchestrator.models.decoder import parameter_shapes
from orchestrator.models.presets import DECODERS
from orchestrator.parameters import fragment_map
from orchestrator.parameters.codec.registry import CODEC_NAMES, CodecName, codec
from orchestrator.parameters.parts import Bounds, between_units, intersection, shape_of, whole, within
from orchestrator.parameters.pieces import piece_named
from orchestrator.parameters.roles import Shape

FRAGMENTS = 24
ROWS = (("llama3-20m", 2), ("gemma3-1b", 2), ("llama3.1-8b", 2), ("llama3.1-8b", 8), ("gemma3-12b", 8), ("moe-500m", 4))


def shares(preset: str, hosts: int, codec_name: CodecName) -> list[float]:
    """By host, how much of the bytes of all fragments it is sent."""
    config = DECODERS[preset]
    shapes = parameter_shapes(config)
    abstract = AbstractMesh((1, hosts, 1, 1), AXES)
    lies = mesh.shardings(abstract, shapes, decoder.axes(config), decoder.roles(config))
    along = {name: tuple(sharding.spec) for name, sharding in lies.items()}
    fragments = fragment_map.build(shapes, FRAGMENTS, decoder.roles(config))
    names = [name for own in fragments for name in own]
    total = sum(_bytes(codec_name, piece_named(n).shape(shapes[piece_named(n).tensor]), None) for n in names)
    return [sum(_of_host(host, hosts, n, shapes, along, codec_name) for n in names) / total for host in range(hosts)]


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
    split = along[piece.tensor]
    has = tuple(
        (size * host // hosts, size * (host + 1) // hosts) if axis < len(split) and split[axis] == "fsdp" else (0, size)
        for axis, size in enumerate(tensor)
    )
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
