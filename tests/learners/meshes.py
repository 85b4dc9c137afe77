"""Trainers on meshes of eight host devices, in a process of its own: ``test_meshes.py`` says by line which of ``SITUATIONS``
it wants, and gets what came of it as JSON.

The model has every kind of dimension that a mesh splits: stacked layers, a mixture of experts, heads, a hidden layer, a
vocabulary; and a matrix that it says nothing of.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from learners import mesh, shards
from learners.jax_trainer import JaxTrainer
from learners.model import Model, build
from learners.models.attention import Attention
from learners.text import Text
from orchestrator.parameters.pieces import Role, piece_named, taken
from orchestrator.specification import device_mesh
from orchestrator.specification.config import JobSpec, parse_job
from tests.bench.device_memory import highest
from tests.learners.conftest import job

WIDTH, LAYERS, EXPERTS, HIDDEN, VOCABULARY = 32, 2, 4, 64, 256
SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed": (VOCABULARY, WIDTH),
    "layers.norm": (LAYERS, WIDTH),
    "layers.query": (LAYERS, WIDTH, WIDTH),
    "layers.router": (LAYERS, WIDTH, EXPERTS),
    "layers.up": (LAYERS, EXPERTS, WIDTH, HIDDEN),
    "layers.down": (LAYERS, EXPERTS, HIDDEN, WIDTH),
    "mix": (WIDTH, WIDTH),
    "unembed": (WIDTH, VOCABULARY),
}
AXES: Mapping[str, tuple[str | None, ...]] = {
    "embed": ("vocabulary", "width"),
    "layers.norm": ("layers", "width"),
    "layers.query": ("layers", "width", "heads"),
    "layers.router": ("layers", "width", None),
    "layers.up": ("layers", "experts", "width", "hidden"),
    "layers.down": ("layers", "experts", "hidden", "width"),
    "unembed": ("width", "vocabulary"),
}
MESHES: Mapping[str, dict[str, int]] = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "tensor": {"data": 1, "fsdp": 1, "tensor": 8},
    "expert": {"expert": 4, "data": 2},
    "mixed": {"fsdp": 2, "tensor": 2, "expert": 2},
}
PIECES = (
    *("embed[0:100]", "embed[100:256]", "unembed[:,0:7]", "unembed[:,7:250]", "unembed[:,250:256]"),
    *("layers.query[0:1]", "layers.query[1:2]", "layers.up[0:1]", "layers.up[1:2]", "layers.down[:,0:3]"),
    *("layers.down[:,3:4]", "layers.norm", "layers.router", "mix[5:32]", "mix[0:5]"),
)
"""All of the model, cut along axes that meshes split and along others."""
MIXTURE_EXPERTS = 12
"""Nothing else has this length."""
MIXTURE: Mapping[str, Any] = {
    **{"width": WIDTH, "layer_count": LAYERS, "head_count": 4, "key_value_head_count": 2, "head_size": 8},
    "experts": {"count": MIXTURE_EXPERTS, "active": 2, "hidden_size": HIDDEN},
}
"""A built-in decoder, whose experts multiply by ``jax.lax.ragged_dot``."""
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def model(spec: Mapping[str, Any]) -> Model:
    """As ``model.factory``."""
    return Model(
        _initial, _loss, {"layers.up": Role(stacked_axes=2), "layers.down": Role(stacked_axes=2)}, AXES, traceable=True
    )


def document(of_mesh: Mapping[str, int] | None, hosts: int = 1) -> dict[str, Any]:
    """The specification of one island with this mesh, as its process gets it."""
    section = {"node_group": "here", "count": 2, "hosts": hosts, "mesh": of_mesh or {}}
    settings = {"islands": [section], "training": {"batch_size": 8, "inner_optimizer": {"warmup_steps": 1, "lr": 0.01}}}
    spec = JobSpec.model_validate(job(model={"factory": "tests.learners.meshes:model"}, **settings))
    return spec.island_document(spec.islands[0])


@cache
def text() -> Text:
    return Text(document(None))


@cache
def compiled(name: str) -> JaxTrainer:
    """One trainer on each mesh, whose step is compiled once for all situations."""
    return trainer(MESHES[name])


def trainer(of_mesh: Mapping[str, int] | None, hosts: int = 1) -> JaxTrainer:
    spec = document(of_mesh, hosts)
    return JaxTrainer(spec, model(spec), lambda shard: text().draw(shard, 2), text=text())


def losses(of: JaxTrainer, first: int, count: int) -> list[float]:
    return [of.step(step).loss for step in range(first, first + count)]


def equal(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# ── situations ────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def trained() -> dict[str, Any]:
    """Losses on each mesh, of the training and held out; where every tensor and its moments lie after it."""
    return {name: _trained(compiled(name)) for name in ("fsdp", "mixed")}


@cache
def trained_by_other_axes() -> dict[str, Any]:
    return {name: _trained(compiled(name)) for name in ("data", "tensor", "expert")}


def _trained(one: JaxTrainer) -> dict[str, Any]:
    one.warm_up()
    found = losses(one, 0, 3)
    parameters, state = one.arrays_on_devices()
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    return {
        "losses": found,
        "held out": one.evaluate(one.snapshot(PIECES).arrays()).loss,
        "shards": {name: array.sharding.shard_shape(array.shape) for name, array in parameters.items()},
        "moments alike": [leaf.sharding for leaf in moments] == [array.sharding for array in parameters.values()] * 2,
    }


def pieces() -> dict[str, Any]:
    """Whether pieces leave and reach the devices as NumPy would cut, replace and add them."""
    return {name: _pieces(trainer(MESHES[name])) for name in ("fsdp", "mixed")}


def _pieces(one: JaxTrainer) -> dict[str, bool]:
    whole = {name: array.copy() for name, array in one.snapshot(SHAPES).arrays().items()}
    cut = one.snapshot(PIECES).arrays()
    found = {"taken": equal(cut, taken(whole, PIECES)), "initial": equal(one.initial_parameters(PIECES), cut)}
    draw = np.random.default_rng(1)
    given = {name: draw.standard_normal(array.shape, np.float32) for name, array in cut.items()}
    for name in PIECES[::2]:
        piece = piece_named(name)
        one.load({name: given[name]})
        whole[piece.tensor][piece.index] = given[name]
    found["loaded"] = equal(one.snapshot(SHAPES).arrays(), whole)
    for name in (*PIECES[1::2], "mix"):
        piece = piece_named(name)
        added = given.get(name, np.ones((WIDTH, WIDTH), np.float32))
        one.add({name: added})
        whole[piece.tensor][piece.index] += added
    found["added"] = equal(one.snapshot(SHAPES).arrays(), whole)
    return found


def moved() -> dict[str, Any]:
    """Whether a state that left one mesh, whole or in pieces, is the same on the next, and goes on as it would have."""
    found = {}
    for name, following in (("data", "mixed"), ("mixed", "fsdp")):
        donor, peer = compiled(name), compiled(following)
        start = donor.cursor()
        whole = donor.export_state().arrays()
        in_pieces = donor.export_state(PIECES[::2]).arrays() | donor.export_state(PIECES[1::2]).arrays()
        peer.import_state(in_pieces)
        same = equal(peer.export_state().arrays(), whole)
        peer.seek(start)
        found[f"{name} to {following}"] = [same, losses(donor, start, 1), losses(peer, start, 1)]
    return found


def gathered() -> dict[str, Any]:
    """The collectives in the programs that move pieces, and bytes on one device at the highest, over those before."""
    one = compiled("mixed")
    parameters, _ = one.arrays_on_devices()
    programs = [text for name in PIECES for text in shards.programs(parameters[piece_named(name).tensor], name)]
    state = one.export_state().arrays()
    ratios = [highest(work)[1] for work in (one.export_state, lambda: one.import_state(state))]
    before = _highest_device()
    copy = one.snapshot(PIECES)
    during = _highest_device() - before
    arrays = copy.arrays()
    for name, array in arrays.items():
        one.add({name: array})
    return {
        "collectives": sorted({word for text in programs for word in COLLECTIVES if word in text}),
        "programs": len(programs),
        "ratios": ratios,
        "snapshot": during / _highest_shards(parameters),
        "left": _highest_device() / before,
    }


def mixed_experts() -> dict[str, Any]:
    """Losses of the built-in mixture of experts on meshes with an expert axis, and shapes that its step gathers."""
    found = {}
    for name in ("expert", "mixed"):
        one = mixture(MESHES[name])
        one.warm_up()
        gathered = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* all-gather(?:-start)?\(", one.program.as_text())
        found[name] = {
            "losses": losses(one, 0, 2),
            "gathered": [list(map(int, filter(None, s.split(",")))) for s in gathered],
        }
    return found


def adapted() -> dict[str, Any]:
    """Losses of the mixture of which only adapters are trained, on the meshes; and where a frozen matrix lies."""
    found = {}
    for name in ("fsdp", "mixed"):
        one = mixture(MESHES[name], ADAPTERS)
        frozen = one.arrays_frozen()["layers.attention.query"]
        found[name] = {
            "losses": losses(one, 0, 2),
            "part": int(np.prod(frozen.sharding.shard_shape(frozen.shape))) / frozen.size,
        }
    return found


ADAPTERS = {"lora": {"rank": 2, "targets": ["all-linear", "router", "experts.*"]}}


def mixture(of_mesh: Mapping[str, int] | None, part: Mapping[str, Any] | None = None) -> JaxTrainer:
    spec = document(of_mesh) | {
        "model": parse_job(job(model={"decoder": MIXTURE, "compute_dtype": "float32"})).model.model_dump(mode="json"),
        "trainable": part,
    }
    return JaxTrainer(spec, build(spec), lambda shard: text().draw(shard, 2), text=text())


def placed_tensor_by_tensor() -> dict[str, Any]:
    """Entries of the largest array on one device, while a model in NumPy is put there, and of the largest tensor."""
    spec = document({"fsdp": 8}) | {"model": {"preset": "nano", "compute_dtype": "float32"}}
    one, largest = JaxTrainer(spec, build(spec), lambda shard: text().draw(shard, 2), text=text()), []
    make = jax.make_array_from_callback

    def made(*arguments: Any) -> jax.Array:
        array = make(*arguments)
        largest.append(max(shard.data.size for shard in array.addressable_shards))
        return array

    with patch.object(jax, "make_array_from_callback", made):
        one.arrays_on_devices()
    return {"largest": max(largest), "tensor": max(int(np.prod(shape)) for shape in one.tensor_shapes().values())}


def attended() -> dict[str, Any]:
    """How far splash attention of split sequences and heads is from that of one device, and how many devices it used."""
    random = np.random.default_rng(5)
    query, key, value = (jnp.asarray(random.standard_normal((2, 256, n, 128)), jnp.float32) for n in (4, 2, 2))
    segments = (jnp.arange(256)[None, :] >= jnp.asarray([[100], [37]])).astype(jnp.int32)
    attention = Attention("splash", 128**-0.5, interpreted=True)
    alone = attention(query, key, value, 70, segments)
    grid = Mesh(np.array(jax.devices()[:4]).reshape(1, 2, 1, 2), device_mesh.AXES)
    with jax.set_mesh(grid):
        split = jax.jit(lambda *qkv: attention(*qkv, 70, segments))(query, key, value)
    return {"difference": float(jnp.abs(alone - split).max()), "devices": len(split.sharding.device_set)}


SITUATIONS: Mapping[str, Callable[[], Any]] = {
    situation.__name__: situation
    for situation in (
        trained,
        trained_by_other_axes,
        pieces,
        moved,
        gathered,
        mixed_experts,
        adapted,
        placed_tensor_by_tensor,
        attended,
    )
}


def _highest_device() -> int:
    """Bytes on the device that has most: of each buffer once, for shards are arrays as well."""
    of_device: dict[Any, dict[int, int]] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            of_device.setdefault(shard.device, {})[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return max(sum(buffers.values()) for buffers in of_device.values())


def _highest_shards(arrays: Mapping[str, jax.Array]) -> int:
    return sum(4 * int(np.prod(array.sharding.shard_shape(array.shape))) for array in arrays.values())


def _initial(seed: int) -> dict[str, jax.Array]:
    """No draw from ``jax.random``, which takes seconds to compile for eight devices."""
    return {name: _one(index + seed, shape) for index, (name, shape) in enumerate(SHAPES.items())}


def _one(seed: int, shape: tuple[int, ...]) -> jax.Array:
    phase = sum((seed + 7.3 * axis) * jax.lax.broadcasted_iota(jnp.float32, shape, axis) for axis in range(len(shape)))
    return jnp.sin(12.9898 * phase + seed) * 0.15


def _loss(parameters: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    stacked = {name: tensor for name, tensor in parameters.items() if name.startswith("layers.")}
    stream = mesh.constrained(parameters["embed"][tokens[:, :-1]] @ parameters["mix"], "batch", None, "width")

    def layer(stream: jax.Array, block: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
        stream = stream * block["layers.norm"]
        stream = stream + jnp.cumsum(mesh.constrained(stream @ block["layers.query"], "batch", None, "heads"), 1) * 0.1
        shares = jax.nn.softmax(stream @ block["layers.router"])
        hidden = jax.nn.relu(jnp.einsum("blw,ewh->bleh", stream, block["layers.up"]))
        hidden = mesh.constrained(hidden, "batch", None, "experts", "hidden")
        mixed = jnp.einsum("bleh,ehw,ble->blw", hidden, block["layers.down"], shares)
        return mesh.constrained(stream + mixed, "batch", None, "width"), None

    stream, _ = jax.lax.scan(layer, stream, stacked)
    scores = mesh.constrained(stream @ parameters["unembed"], "batch", None, "vocabulary")
    chosen = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - chosen)


def _answers(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            yield {"found": SITUATIONS[line.strip()]()}
        except Exception:
            yield {"failed": traceback.format_exc(limit=-8)}


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    for answer in _answers(iter(sys.stdin.readline, "")):
        print(json.dumps(answer), flush=True)
