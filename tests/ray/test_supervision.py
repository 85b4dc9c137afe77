"""When a helper process is made again, and what is said meanwhile; and which nodes a restored head is told are dead.

That it happens is shown live: `tests/ray/shared_job/test_helpers.py`, `tests/ray/test_killed_pairs.py`.
"""

from __future__ import annotations

import socket

import pytest


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
