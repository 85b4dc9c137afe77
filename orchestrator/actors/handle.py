"""A handle to an actor in another process, typed by the class or interface that says which calls it answers.

    reply = island.call(IslandInterface.reports, epoch, read, acknowledged, POLL_S)
    reports = ray.get(reply, timeout=3.0)       # list[tuple[int, IslandReport]]

Only the method's name and the arguments travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    import ray  # a process that joins a cluster imports it, once its environment is set

ActorT = TypeVar("ActorT")
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class ActorHandle(Generic[ActorT]):
    """``ray_handle`` is Ray's own, on which nothing is typed."""

    ray_handle: Any

    def call(
        self,
        method: Callable[Concatenate[ActorT, Arguments], Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> ray.ObjectRef[Answer]:
        """Call the method and return at once with the reply to come. Raises AttributeError where the actor has none."""
        reply: ray.ObjectRef[Answer] = getattr(self.ray_handle, method.__name__).remote(*arguments, **named)
        return reply

    def has(self, method: Callable[Concatenate[ActorT, Arguments], Answer]) -> bool:
        """Return whether the actor, which may be of another build, has this method."""
        return hasattr(self.ray_handle, method.__name__)
