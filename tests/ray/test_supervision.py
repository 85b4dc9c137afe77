"""When a helper process is made again, and what is said meanwhile; and which nodes a restored head is told are dead.

That it happens is shown live: `tests/ray/shared_job/test_helpers.py`, `tests/ray/test_killed_pairs.py`.
"""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from orchestrator.system.roots import AllowedRoots
from tests.waiting import wait_until

if TYPE_CHECKING:
    from orchestrator.runtime.supervision import SynchroniserKeeper


def test_the_first_death_is_mended_at_once_and_each_that_follows_soon_waits_longer() -> None:
    from orchestrator.runtime.supervision import WAIT_MAX_S, Condition, Health, begun, died

    health, now, waits = Health(0.0, 0.0), 100.0, []
    for _ in range(10):
        health = died(health, "it was killed", now)
        assert health.condition is Condition.DEAD
        waits.append(health.due_at - now)
        now = health.due_at + 0.5
        health = begun(health, now)
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, WAIT_MAX_S, WAIT_MAX_S, WAIT_MAX_S]
    assert health.restarts == 10
    later = died(health, "it was killed", now + 3600.0)
    assert (later.due_at, later.deaths) == (now + 3600.0, 1), "one that lived for an hour died of something new"


def test_what_cannot_be_made_is_tried_more_and_more_rarely() -> None:
    from orchestrator.runtime.supervision import Health, died

    first = died(Health(0.0, 0.0), "gone", 100.0)
    second = died(first, "the head is away", 100.0)
    third = died(second, "the head is away", second.due_at)
    assert (first.due_at, second.due_at, third.due_at) == (100.0, 101.0, 103.0)


def test_silence_is_said_and_is_no_death() -> None:
    from orchestrator.runtime.supervision import SILENCE_S, Condition, Health, answered, sentence, unanswered

    health = unanswered(Health(0.0, 10.0), 10.0 + SILENCE_S - 1)
    assert (health.condition, sentence(health, 39.0)) == (Condition.RUNNING, "")
    health = unanswered(health, 10.0 + SILENCE_S)
    assert health.condition is Condition.SILENT
    assert sentence(health, 50.0) == "it has not answered for 40 s; it may be stopped, or busy"
    assert answered(health, 51.0).condition is Condition.RUNNING


@pytest.mark.parametrize(
    ("deaths", "words"),
    [(1, "its process died: killed; it is restarted"), (4, "it is restarted in 4 s (death 4 in a row)")],
)
def test_a_death_is_said_with_its_reason_and_what_comes_next(deaths: int, words: str) -> None:
    from orchestrator.runtime.supervision import Health, died, sentence

    health = Health(0.0, 0.0)
    for _ in range(deaths):
        health = died(health, "killed", 1.0)
    assert words in sentence(health, 1.0)


class _Ray:
    """What the keeper sees of Ray: the synchroniser's node, if there is one, and errors of the next calls."""

    def __init__(self, node: str, hiccups: int = 0, has_nodes: bool = True) -> None:
        self.node: str | None = node
        self.hiccups, self.has_nodes, self.down, self.made = hiccups, has_nodes, {node}, 0

    def actor_named(self, name: str) -> object:
        if self.hiccups:
            self.hiccups -= 1
            raise RuntimeError("the head does not answer")
        return self.node

    def process_of(self, actor: str) -> SimpleNamespace:
        return SimpleNamespace(node_id=actor)

    def end_actor(self, actor: str) -> None:
        self.node = None

    def start_actor(self, *_: object) -> None:
        self.made += 1
        self.node = f"node-{self.made}"

    def actor_class(self, path: str) -> object:
        return None

    def on_head(self, name: str) -> dict[str, object]:
        return {}

    def placeable(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(group="keepers")] if self.has_nodes else []

    def selector(self) -> dict[str, str]:
        return {}

    def is_down(self, node: str) -> bool:
        return node in self.down


def keeper_on(seen: _Ray, monkeypatch: pytest.MonkeyPatch) -> SynchroniserKeeper:
    from orchestrator.runtime import supervision

    monkeypatch.setattr(supervision, "cluster", seen)
    section = SimpleNamespace(node_groups=("keepers",))
    spec = cast(Any, SimpleNamespace(synchroniser=section, model_dump=lambda **_: {}))
    return supervision.SynchroniserKeeper("job", spec, "/runs/job", AllowedRoots(), cast(Any, seen))


def is_over() -> bool:
    """Return whether nothing is being moved: a move that outlived its test would ask the real Ray."""
    return not any(thread.name == "move" for thread in threading.enumerate())


def test_a_synchroniser_whose_node_is_down_is_made_again_although_ray_fails_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = _Ray("lost")
    keeper = keeper_on(seen, monkeypatch)
    seen.down = set()
    assert keeper.look()
    seen.hiccups = 2
    keeper.nodes_down(frozenset({"lost"}))
    wait_until(is_over, "the end of the move")
    assert seen.node == "node-1"
    assert seen.made == 1


def test_a_node_that_goes_down_before_the_synchroniser_was_seen_on_it_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = _Ray("lost")
    keeper = keeper_on(seen, monkeypatch)
    keeper.nodes_down(frozenset({"lost"}))  # the watch over nodes says it once
    assert keeper.look()
    wait_until(is_over, "the end of the move")
    assert seen.node == "node-1"


def test_a_job_that_ends_while_its_synchroniser_waits_for_a_node_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _Ray("lost", has_nodes=False)
    keeper = keeper_on(seen, monkeypatch)
    assert keeper.look()
    wait_until(lambda: seen.node is None, "the end of the old one")
    keeper.close()
    seen.has_nodes = True
    wait_until(is_over, "the end of the move")
    assert not keeper.look()
    assert seen.made == 0


def test_islands_are_recognised_by_the_names_of_their_first_processes() -> None:
    from orchestrator.runtime.settings import life_named

    names = ["j-1:us-east:3", "j-1:us-east:3/1", "j-1:shard-0-ab12", "j-1:synchroniser", "j-10:a:1", "controllers:1"]
    assert [life_named("j-1", name) for name in names] == [("us-east", 3), None, None, None, None, None]


def test_only_nodes_of_this_cluster_without_a_process_are_taken_for_dead() -> None:
    from orchestrator.runtime.dead_nodes import Registered, dead

    ours, theirs = "/tmp/atoll-ab12/europe/session/sockets/raylet", "/tmp/atoll-ab123/europe/sockets/raylet"
    living, killed, joined = (
        Registered("aa", "asia", ours),
        Registered("bb", "europe", ours),
        Registered("cc", "x", theirs),
    )
    assert dead([living, killed, joined], frozenset({"aa"}), "/tmp/atoll-ab12") == [killed]


def test_a_node_is_dead_where_its_port_is_refused_or_another_has_registered_there_since() -> None:
    from orchestrator.runtime.dead_nodes import Registered, refused, replaced

    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as closed:
        taken, free = listening.getsockname()[1], closed.getsockname()[1]
        closed.close()
        lives, killed = (
            Registered(name, name, "", "127.0.0.1", port, 2) for name, port in (("aa", taken), ("bb", free))
        )
        elsewhere = Registered("cc", "cc", "", "127.0.0.2", taken, 3)
        before = Registered("dd", "dd", "", "127.0.0.1", taken, 1)
        assert refused([lives, killed]) == [killed]
        assert replaced([lives, killed, elsewhere, before]) == [before]


def test_a_head_that_does_not_answer_about_dead_nodes_is_reported_in_our_words() -> None:
    from orchestrator.errors import InfrastructureError
    from orchestrator.runtime.dead_nodes import unregister_dead

    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(InfrastructureError, match="does not say which nodes it knows"):
        unregister_dead(f"127.0.0.1:{port}", {"aa"})
