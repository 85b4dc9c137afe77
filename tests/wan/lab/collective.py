"""One region's process of a job that is held together by all-reduces: data-parallel, DiLoCo, or Streaming DiLoCo.

    python -m tests.wan.lab.collective '{"method": …}'        in a network namespace, and a UTS namespace of its own

The all-reduce is JAX's over gloo, one process a region; a process says where it is by its host's name, so that name is its
address here. gloo sends float32, whatever it is given. The three methods give themselves every advantage of the formulas
in ``simulation.bandwidth``: data-parallel sends during its backward pass, two thirds of a step; Streaming DiLoCo has τ
steps. (A real backward pass is one compiled function here, and overlaps with nothing.)

A line of JSON a step goes to standard output: when it ended, by the machine's monotonic clock. It steps until its standard
input ends, or up to ``steps``; then one more line has the parameters' held-out losses, if there is text.

Sources: DiLoCo, arXiv:2311.08105, Algorithm 1; Streaming DiLoCo, arXiv:2501.18512, sections 2.2 and 2.3, with its α of 0.5.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from orchestrator.parameters import fragment_map
from orchestrator.parameters.outer_optimizer import Nesterov, initial_state
from orchestrator.parameters.outer_optimizer import step as outer_step
from orchestrator.simulation.bandwidth import BACKWARD_RATIO

METHODS = ("data-parallel", "diloco", "streaming-diloco")
MIXING = 0.5
"""How much of its own parameters an island keeps when a fragment comes back late."""
PORT = 7777
Vector = np.ndarray


class Island(Protocol):
    """What trains: its parameters as one vector a fragment, (n,) float32."""

    fragments: list[list[str]]

    def step(self) -> None: ...

    def gradient(self) -> Vector: ...

    def descend(self, gradient: Vector) -> None: ...

    def vector(self, fragment: int) -> Vector: ...

    def replace(self, fragment: int, vector: Vector) -> None: ...


class Sleeper:
    """An island whose steps take a fixed time and no processor: two cores carry four of them."""

    def __init__(self, setting: dict[str, Any], fragment_count: int) -> None:
        self._step_s: float = setting["step_s"]
        sizes = [len(part) for part in np.array_split(np.arange(setting["parameters"]), fragment_count)]
        self.fragments = [[f"{index}"] for index in range(fragment_count)]
        self._vectors = [np.zeros(size, np.float32) for size in sizes]

    def step(self) -> None:
        time.sleep(self._step_s)

    def gradient(self) -> Vector:
        time.sleep((1 - BACKWARD_RATIO) * self._step_s)
        return np.concatenate(self._vectors)

    def descend(self, gradient: Vector) -> None:
        """Nothing is learned."""

    def backward(self) -> None:
        time.sleep(BACKWARD_RATIO * self._step_s)

    def vector(self, fragment: int) -> Vector:
        return self._vectors[fragment]

    def replace(self, fragment: int, vector: Vector) -> None:
        self._vectors[fragment] = vector


class Learner:
    """A real island: the product's trainer on its shard; data-parallel takes the same model and optimizer apart."""

    def __init__(self, setting: dict[str, Any], fragment_count: int) -> None:
        from learners import jax_trainer
        from learners.island_spec import IslandSpec
        from learners.text import Text
        from orchestrator.system.roots import EVERYTHING

        self._spec = IslandSpec.of(setting["spec"] | {"roots": EVERYTHING})
        self.trainer = jax_trainer.create(self._spec.document, setting["rank"], setting["count"])
        self._draw = Text(self._spec).draw(setting["rank"], setting["count"])
        self._steps = 0
        self.trainer.warm_up()
        self._shapes = self.trainer.tensor_shapes()
        self.fragments = [
            list(names) for names in fragment_map.build(self._shapes, fragment_count, self.trainer.roles())
        ]
        if setting["method"] == METHODS[0]:
            self._prepare_descent()

    def step(self) -> None:
        self.trainer.step(self._steps)
        self._steps += 1

    def gradient(self) -> Vector:
        gradient = self._gradient(self._parameters, self._draw(self._steps))
        return np.concatenate([np.asarray(gradient[name]).ravel() for name in sorted(self._shapes)])

    def descend(self, gradient: Vector) -> None:
        from learners.optimizer_settings import update_scale

        parts = dict(zip(sorted(self._shapes), np.split(gradient, self._cuts), strict=True))
        tensors = {name: part.reshape(self._shapes[name]) for name, part in parts.items()}
        job = self._spec.job
        scale = update_scale(job.training.inner_optimizer, job.horizon_steps, self._steps)
        self._parameters, self._state = self._update(self._parameters, self._state, tensors, scale)
        self._steps += 1

    def backward(self) -> None:
        """Was in the gradient: one compiled function does both passes."""

    def vector(self, fragment: int) -> Vector:
        arrays = self.trainer.snapshot(self.fragments[fragment]).arrays()
        return np.concatenate([np.asarray(arrays[name]).ravel() for name in self.fragments[fragment]])

    def replace(self, fragment: int, vector: Vector) -> None:
        names = self.fragments[fragment]
        shapes = {name: array.shape for name, array in self.trainer.snapshot(names).arrays().items()}
        cuts = np.cumsum([int(np.prod(shapes[name])) for name in names])[:-1]
        parts = zip(names, np.split(vector, cuts), strict=True)
        self.trainer.load({name: part.reshape(shapes[name]) for name, part in parts})

    def tensors(self) -> dict[str, np.ndarray]:
        """All of it as it is now, for its held-out loss later."""
        own = getattr(self, "_parameters", None)
        arrays = own if own is not None else self.trainer.snapshot(list(self._shapes)).arrays()
        return {name: np.array(array) for name, array in arrays.items()}

    def _prepare_descent(self) -> None:
        import jax

        from learners import model, optimizers

        built = model.build(self._spec)
        optimizer = optimizers.build(self._spec.job.training.inner_optimizer, built.roles)
        self._parameters: Any = built.initialise(self._spec.job.seed)
        self._state: Any = optimizer.init(self._parameters)
        self._gradient = jax.jit(jax.grad(built.loss))
        self._cuts = np.cumsum([int(np.prod(self._shapes[name])) for name in sorted(self._shapes)])[:-1]

        @jax.jit
        def update(parameters: Any, state: Any, gradient: Any, scale: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(gradient, state, parameters)
            return jax.tree.map(lambda one, change: one + scale * change, parameters, updates), state

        self._update = update


class AllReduce:
    """The mean over all regions of a vector of at most ``length`` values; calls are answered in their order."""

    def __init__(self, setting: dict[str, Any], length: int) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as Part

        self._count, self._length = setting["count"], length
        mesh = Mesh(np.array(jax.devices()), ("region",))
        self._sharding, self._device = NamedSharding(mesh, Part("region")), jax.local_devices()[0]
        self._make = jax.make_array_from_single_device_arrays
        self._put = jax.device_put
        self._sum = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, "region"), mesh=mesh, in_specs=Part("region"), out_specs=Part("region")
            )
        )
        self._line = ThreadPoolExecutor(1)
        self.start(np.zeros(length, np.float32)).result()  # compiled, and connected

    def start(self, vector: Vector) -> Future[Vector]:
        return self._line.submit(self._mean, vector)

    def _mean(self, vector: Vector) -> Vector:
        row = np.zeros((1, self._length), np.float32)
        row[0, : vector.size] = vector
        mine = self._put(row, self._device)
        total = self._sum(self._make((self._count, self._length), self._sharding, [mine]))
        return np.array(total.addressable_shards[0].data[0, : vector.size]) / np.float32(self._count)


def data_parallel(island: Any, reduce: AllReduce, _setting: dict[str, Any]) -> Iterator[None]:
    while True:
        under_way = reduce.start(island.gradient())
        island.backward()
        island.descend(under_way.result())
        yield


def diloco(island: Island, reduce: AllReduce, setting: dict[str, Any]) -> Iterator[None]:
    """Everybody waits while all of it travels, every H steps."""
    outer, interval = _outer(setting), setting["interval_steps"]
    anchor = island.vector(0).copy()
    momentum, steps = initial_state(outer, anchor.size), 0
    while True:
        island.step()
        steps += 1
        if steps % interval == 0:
            mean = reduce.start(anchor - island.vector(0)).result()
            decrement, momentum = outer_step(outer, mean, momentum)
            anchor = anchor - decrement
            island.replace(0, anchor)
        yield


def streaming_diloco(island: Island, reduce: AllReduce, setting: dict[str, Any]) -> Iterator[None]:
    """A fragment is due every H/P steps, and must be back τ steps later."""
    outer, count = _outer(setting), len(island.fragments)
    gap, overlap = max(1, setting["interval_steps"] // count), setting["overlap_steps"]
    anchors = [island.vector(fragment).copy() for fragment in range(count)]
    momenta = [initial_state(outer, anchor.size) for anchor in anchors]
    under_way: list[tuple[int, int, Future[Vector]]] = []
    steps = 0
    while True:
        island.step()
        steps += 1
        if steps % gap == 0:
            fragment = steps // gap % count
            under_way.append((steps + overlap, fragment, reduce.start(anchors[fragment] - island.vector(fragment))))
        if under_way and under_way[0][0] <= steps:
            _, fragment, mean = under_way.pop(0)
            decrement, momenta[fragment] = outer_step(outer, mean.result(), momenta[fragment])
            anchors[fragment] = anchors[fragment] - decrement
            island.replace(fragment, MIXING * island.vector(fragment) + (1 - MIXING) * anchors[fragment])
        yield


RUN: dict[str, Callable[..., Iterator[None]]] = dict(
    zip(METHODS, (data_parallel, diloco, streaming_diloco), strict=True)
)


def main(setting: dict[str, Any]) -> None:
    socket.sethostname(setting["address"])  # of this process' own namespace: where gloo says that it is
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"{setting['coordinator']}:{PORT}",
        setting["count"],
        setting["rank"],
        coordinator_bind_address=f"{setting['coordinator']}:{PORT}" if setting["rank"] == 0 else None,
    )
    threading.Thread(target=_end_with_input, daemon=True).start()
    method = setting["method"]
    fragment_count = setting["fragments"] if method == METHODS[2] else 1
    island: Any = (Learner if "spec" in setting else Sleeper)(setting, fragment_count)
    length = max(island.vector(fragment).size for fragment in range(fragment_count))
    stepping = RUN[method](island, AllReduce(setting, length), setting)
    moments, every = [], setting.get("evaluate_every_steps", 0)
    print(json.dumps({"ready": time.monotonic()}), flush=True)
    for number in range(1, setting["steps"] + 1):
        next(stepping)
        print(json.dumps({"step": number, "at": time.monotonic()}), flush=True)
        if every and setting["rank"] == 0 and number % every == 0:
            moments.append((number, time.monotonic(), island.tensors()))
    if setting["rank"] != 0:
        threading.Event().wait()  # gone before rank 0 is done, it would take that along
    losses = [(number, at, island.trainer.evaluate(tensors).loss) for number, at, tensors in moments]
    print(json.dumps({"losses": losses}), flush=True)
    os._exit(0)


def _outer(setting: dict[str, Any]) -> Nesterov:
    return Nesterov(setting.get("outer_lr", 0.7), setting.get("outer_momentum", 0.9))


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
