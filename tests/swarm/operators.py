"""Draws an operator's checkpoints, rollbacks and upgrades for a drawn job, by a generator of their own."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from orchestrator.core import commands
from orchestrator.core import events as e
from orchestrator.core.vocabulary import CheckpointPolicy, CommandId, Instant

_OPERATOR = "operator"

_Request = tuple[Instant, CommandId, commands.JobCommand]


@dataclass(frozen=True, slots=True)
class CheckpointRequests:
    """The instants of an operator's requests. A rollback is to the newest checkpoint."""

    policy: CheckpointPolicy
    checkpoints: tuple[Instant, ...]
    rollbacks: tuple[Instant, ...]
    upgrades: tuple[Instant, ...]

    def commands(self) -> list[tuple[Instant, e.CommandRequested]]:
        saves: list[_Request] = [(at, CommandId(f"save-{at!r}"), commands.Checkpoint()) for at in self.checkpoints]
        backs: list[_Request] = [(at, CommandId(f"back-{at!r}"), commands.Rollback(0)) for at in self.rollbacks]
        new: list[_Request] = [(at, CommandId(f"new-{at!r}"), commands.Upgrade("next", "")) for at in self.upgrades]
        requests = sorted([*saves, *backs, *new], key=lambda request: request[0])
        return [(at, e.CommandRequested(at, command, _OPERATOR, request)) for at, command, request in requests]


def draw_checkpoint_requests(random: Random, until: Instant, *, upgrades: bool) -> CheckpointRequests:
    """Draw requests before ``until``, with upgrades if wanted. Automatic checkpoints continue after it."""
    policy = CheckpointPolicy(
        every_merges=random.choice((0, 2, 2, 7)),
        every_s=random.choice((0.0, random.uniform(0.5, 3.0))),
        keep=random.randint(1, 3),
        timeout_s=random.uniform(0.3, 3.0),
    )
    saves = sorted(random.uniform(0.0, until) for _ in range(random.randint(0, 4)))
    backs = sorted(random.uniform(until / 4, until) for _ in range(random.randint(0, 4)))
    new = sorted(random.uniform(0.0, until) for _ in range(random.randint(0, 2))) if upgrades else []
    return CheckpointRequests(policy, tuple(saves), tuple(backs), tuple(new))
