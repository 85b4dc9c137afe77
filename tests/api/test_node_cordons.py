"""Cordoned nodes: by the rule for bad nodes, over the tapes of running jobs, and by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.jobs.cordons import BAD_NODE_RULE, CORDON_S, LIFTED_KEPT_S, NodeCordons, in_force, not_by_rule
from api.storage.store import JobRow, NodeCordonRow, Store
from orchestrator.core import events as e
from orchestrator.core.vocabulary import IslandTimer, IslandTimerKind
from orchestrator.errors import Conflict, NotFound
from orchestrator.status import NodeGroupRecord
from orchestrator.tape.schema import Header, encode_header, encode_record
from tests.api.clockwork import Clockwork
from tests.api.installation import Installation
from tests.harness.story import Story, policy
from tests.waiting import wait_until

BEGAN = 1_000_000.0
PAIR = ("spot-1", "spot-2")


class Ill(Story):
    """A job of four islands on spot-1 and spot-2, of which one node kills whatever is placed there."""

    def __init__(self, bad: str = "spot-2", **changed: object) -> None:
        super().__init__("abcd", wanted=policy("abcd", restarts_max=99, **changed))
        self.starts(*"abcd")
        for island in "cdcd":
            self.dies(island)
            self.comes_back(island, bad)

    def comes_back(self, island: str, node: str) -> None:
        state = self.core.state.islands[island]
        self.wait(10.0)
        self.happen(e.TimerFired, IslandTimer(IslandTimerKind.BACKOFF, island), state.current.timer_serial)
        self.happen(e.IslandPlaced, island, self.incarnation(island), node, 1000)

    def fails_again(self, bad: str = "spot-2") -> None:
        for island in "cdcd":
            self.dies(island)
            self.comes_back(island, bad)


class Fleet:
    """A store with one running job, its tape, and the port: what the rule sees."""

    def __init__(self, folder: Path, names: tuple[str, ...], hosts: int = 1) -> None:
        self.folder, self.now = folder, BEGAN + 200.0
        self.control = Clockwork(folder / "clockwork")
        self.set_nodes(names)
        self.store = Store(f"sqlite:///{folder / 'store.sqlite'}")
        islands = [{"node_group": name, "cpus": 0.01, "hosts": hosts} for name in "abcd"]
        spec = Installation(folder).spec(islands=islands)
        run_dir = folder / "job"
        run_dir.mkdir()
        about = {"job": "job", "name": "job", "run_dir": str(run_dir), "caller": "me", "submitted_at": BEGAN}
        self.store.add_job(JobRow(**about, spec=spec, state="running"))
        self.story = Ill()
        self.story.fails_again()
        self.write_tape()
        self.audited: list[str] = []
        self.cordons = self.started_anew()

    def set_nodes(self, names: tuple[str, ...]) -> None:
        (self.folder / "clockwork" / "node-names.json").write_text(json.dumps({"asia": names}))

    def write_tape(self) -> None:
        lines = [encode_header(Header("job", self.story.policy, BEGAN)), *map(encode_record, self.story.records)]
        (self.folder / "job" / "tape.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def started_anew(self, by_rule: bool = True) -> NodeCordons:
        return NodeCordons(self.control, self.store, by_rule=by_rule, audit=self.audited.append, clock=lambda: self.now)

    def enforced(self) -> list[str]:
        names: list[str] = json.loads((self.folder / "clockwork" / "cordoned-nodes.json").read_text())
        return names


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, PAIR)
    yield made
    made.store.close()


def test_a_node_that_fails_islands_is_cordoned_with_its_reason_and_stays_so_after_a_restart(fleet: Fleet) -> None:
    fleet.cordons.round()
    assert fleet.enforced() == ["spot-2"]
    (cordon,) = fleet.cordons.latest()
    assert (cordon.node, cordon.node_group, cordon.cordoned_by) == ("spot-2", "asia", BAD_NODE_RULE)
    assert "failures of job/c, job/d, the last one: process died" in cordon.reason
    assert cordon.expires_at == fleet.now + CORDON_S
    assert fleet.audited == ["/v1/node-groups/asia/nodes/spot-2/cordon"]
    (fleet.folder / "clockwork" / "cordoned-nodes.json").unlink()
    after = fleet.started_anew(by_rule=False)
    after.round()
    assert fleet.enforced() == ["spot-2"]
    assert after.latest() == (cordon,)
    assert len(fleet.audited) == 1, "it is cordoned once"


def test_without_the_option_no_node_is_cordoned(fleet: Fleet) -> None:
    fleet.started_anew(by_rule=False).round()
    assert fleet.enforced() == []


def test_uncordoning_resets_the_count_so_that_it_takes_new_failures(fleet: Fleet) -> None:
    fleet.cordons.round()
    fleet.cordons.change("asia", "spot-2", "me", cordoned=False)
    assert fleet.enforced() == []
    fleet.cordons.round()
    assert fleet.enforced() == []
    fleet.story.wait(300.0)
    fleet.story.fails_again()
    fleet.story.fails_again()
    fleet.write_tape()
    fleet.now = BEGAN + fleet.story.now
    fleet.cordons.round()
    assert fleet.enforced() == ["spot-2"]


def test_a_cordon_of_the_rule_expires(fleet: Fleet) -> None:
    fleet.cordons.round()
    fleet.now += CORDON_S - 1.0
    fleet.cordons.round()
    assert fleet.enforced() == ["spot-2"]
    fleet.now += 1.0
    fleet.cordons.round()
    assert fleet.enforced() == []


def test_a_lifted_cordon_is_kept_while_it_decides_which_failures_count_and_no_longer(fleet: Fleet) -> None:
    fleet.cordons.round()
    fleet.cordons.change("asia", "spot-2", "me", cordoned=False)
    fleet.cordons.change("asia", "spot-1", "me", cordoned=True)
    fleet.now += LIFTED_KEPT_S + 1.0
    fleet.cordons.round()
    assert set(fleet.store.node_cordons()) == {"spot-1", "spot-2"}, "the failures of a running job are older"
    fleet.store.update_job("job", state="completed")
    fleet.cordons.round()
    assert set(fleet.store.node_cordons()) == {"spot-1"}


def test_the_last_node_of_a_group_is_never_cordoned(fleet: Fleet) -> None:
    fleet.set_nodes(("spot-2",))
    fleet.cordons.round()
    assert fleet.enforced() == []
    with pytest.raises(Conflict, match="spot-2 is the last node of asia"):
        fleet.cordons.change("asia", "spot-2", "me", cordoned=True)


def test_a_cordon_is_not_in_force_while_the_other_nodes_are_gone(fleet: Fleet) -> None:
    fleet.cordons.round()
    fleet.set_nodes(("spot-2",))
    fleet.cordons.round()
    assert fleet.enforced() == []
    assert [cordon.in_force for cordon in fleet.cordons.latest()] == [False]
    fleet.set_nodes(PAIR)
    fleet.cordons.round()
    assert fleet.enforced() == ["spot-2"]


def test_islands_of_several_hosts_do_not_count(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, PAIR, hosts=2)
    fleet.cordons.round()
    assert fleet.enforced() == []
    fleet.store.close()


def test_an_operator_cordons_a_node_that_is_there(fleet: Fleet) -> None:
    cordons = fleet.started_anew(by_rule=False)
    cordons.change("asia", "spot-1", "me", cordoned=True)
    assert [(one.node, one.cordoned_by, one.expires_at) for one in cordons.latest()] == [("spot-1", "me", None)]
    with pytest.raises(NotFound, match="has no node 'spot-9'"):
        cordons.change("asia", "spot-9", "me", cordoned=True)
    with pytest.raises(NotFound, match="has no node 'spot-1'"):
        cordons.change("europe", "spot-1", "me", cordoned=True)


def group(count: int) -> NodeGroupRecord:
    names = [f"n{number}" for number in range(count)]
    facts = {"name": "g", "region": "r", "nodes": count, "cpus": 1.0, "cpus_free": 1.0, "accelerators": 0}
    return NodeGroupRecord(**facts, builds=[], node_names=names)  # type: ignore[typeddict-item]


@pytest.mark.parametrize(("count", "allowed"), [(1, 0), (2, 1), (3, 1), (7, 1), (8, 2), (40, 10)])
def test_the_rule_takes_a_quarter_of_a_group_at_most(count: int, allowed: int) -> None:
    taken: set[str] = set()
    for name in group(count).get("node_names", []):
        if not not_by_rule(name, group(count), taken):
            taken.add(name)
    assert len(taken) == allowed


def test_cordons_of_a_whole_group_are_not_in_force() -> None:
    rows = [NodeCordonRow(node=f"n{number}", node_group="g") for number in range(3)]
    assert in_force(rows[:2], [group(3)]) == {"n0", "n1"}
    assert in_force(rows, [group(3)]) == set()


def test_nodes_are_cordoned_by_command_and_shown_with_who_did_it(cold: Installation) -> None:
    names = cold.home.path / "clockwork" / "node-names.json"
    names.parent.mkdir(parents=True)
    names.write_text(json.dumps({"asia": ["rack-1", "rack-2"]}))
    cold.up("--cordon-bad-nodes")
    assert "rack-2 of asia is cordoned" in cold.atoll("cordon", "asia", "--node", "rack-2")
    listed = cold.atoll("node-groups")
    assert "yes, but on 1 of its nodes" in listed
    assert "rack-2" in listed
    assert "cordoned by local" in listed
    assert "rack-1 is the last node of asia" in cold.atoll("cordon", "asia", "--node", "rack-1", code=1)
    assert "has no node 'rack-9'" in cold.atoll("cordon", "asia", "--node", "rack-9", code=2)
    with cold.client() as client:
        job = client.submit(cold.spec()).job
        wait_until(lambda: [one.node for one in client.job(job).cordoned_nodes] == ["rack-2"])
        assert "node rack-2 is cordoned by local" in cold.atoll("status", job)
        paths = [entry.path for entry in client.audit().entries]
        assert "/v1/node-groups/asia/nodes/rack-2/cordon" in paths
        client.cancel(job)
    with cold.http() as http:
        assert 'atoll_nodes_cordoned{group="asia",region="asia"} 1.0' in http.get("/metrics").text
    assert "rack-2 of asia accepts islands" in cold.atoll("uncordon", "asia", "--node", "rack-2")
    assert json.loads((names.parent / "cordoned-nodes.json").read_text()) == []
