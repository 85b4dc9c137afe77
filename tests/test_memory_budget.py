"""Jobs that do not fit the memory of their nodes are refused before they begin, with what is needed and what there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.parameters.codec.registry import CODEC_NAMES, codec
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.memory_budget import (
    CODE_BYTES,
    HEAD,
    NodeMemory,
    demand_of,
    island_bytes_per_parameter,
    memory_problems,
    parameter_count_of,
    shard_bytes_per_parameter,
)

GIB = float(1 << 30)
BILLION = 10**9
ENTRY = {"node_group": "here", "accelerator": "gpu", "accelerators": 1}
ON_CPU = {"accelerator": "cpu", "accelerators": 0}


def spec(islands: int = 4, entry: Mapping[str, Any] = {}, **sections: Any) -> JobSpec:
    document = {
        "trainer": "learners.synthetic:create",
        "synthetic": {"parameters": BILLION},
        "islands": [ENTRY | {"count": islands} | entry],
        "synchroniser": {"fragments": 24},
        "evaluation": {"on": "islands"},
        "budget": {"steps": 1},
    }
    return parse_job(document | sections)


def fleet(head: float, *here: float) -> list[NodeMemory]:
    nodes = [NodeMemory(f"machine-{number}", "here", amount * GIB) for number, amount in enumerate(here)]
    return [NodeMemory("head", HEAD, head * GIB), *nodes]


def refusals(of: JobSpec, nodes: list[NodeMemory], count: int = BILLION) -> list[tuple[str, str, str]]:
    return [(problem.path, problem.message, problem.remedy) for problem in memory_problems(of, count, nodes)]


def test_a_codecs_bytes_are_those_that_it_writes() -> None:
    assert {name: codec(name).data_bytes(128_000) / 128_000 for name in CODEC_NAMES} == CODE_BYTES


def test_parameters_are_known_before_a_job_begins_unless_only_a_package_knows_them() -> None:
    here = {"islands": [{"node_group": "here"}], "budget": {"steps": 1}}
    assert parameter_count_of(spec()) == BILLION
    assert parameter_count_of(parse_job({**here, "model": {"preset": "small"}})) == 126_353_408
    assert parameter_count_of(parse_job({**here, "model": {"factory": "somebody.models:build"}})) is None


def test_eight_islands_in_four_bits_are_within_the_shards_stated_budget() -> None:
    assert shard_bytes_per_parameter(8, 24, "int4", "int4") <= 16


@pytest.mark.parametrize("codecs", [("float32", "int4"), ("int8", "int4"), ("bfloat16", "int8")])
def test_more_islands_wider_codecs_staler_bases_and_fewer_fragments_need_more(codecs: tuple[Any, Any]) -> None:
    wide, narrow = codecs
    least = shard_bytes_per_parameter(4, 24, narrow, "int4")
    assert shard_bytes_per_parameter(5, 24, narrow, "int4") > least
    assert shard_bytes_per_parameter(4, 24, wide, "int4") > least
    assert shard_bytes_per_parameter(4, 12, narrow, "int4") > least
    assert shard_bytes_per_parameter(4, 24, narrow, "int4", staleness_max=1) > least + 11
    assert shard_bytes_per_parameter(4, 24, narrow, "float32") < least
    assert shard_bytes_per_parameter(4, 24, narrow, "int4", moments=0) < least - 4
    assert shard_bytes_per_parameter(4, 24, narrow, "int4", moments=2) > least + 4
    assert shard_bytes_per_parameter(4, 24, narrow, "int4", clips=True) > least


def test_a_job_that_fits_is_not_refused() -> None:
    assert refusals(spec(), fleet(16, 24, 24, 24, 24)) == []


def test_a_job_at_its_nodes_limit_fits_and_one_byte_less_is_refused() -> None:
    of = spec(islands=1)
    demand = demand_of(of, BILLION)
    nodes = [NodeMemory("head", HEAD, demand.head), NodeMemory("one", "here", demand.islands[0])]
    assert memory_problems(of, BILLION, nodes) == ()
    for index in range(2):
        nodes_less = [replace(node, memory_bytes=node.memory_bytes - (n == index)) for n, node in enumerate(nodes)]
        assert len(memory_problems(of, BILLION, nodes_less)) == 1


def test_a_head_too_small_for_the_shard_is_told_with_the_model_what_is_needed_what_there_is_and_what_to_do() -> None:
    ((path, message, remedy),) = refusals(spec(), fleet(8, 24, 24, 24, 24))
    assert path == "synthetic.parameters"
    assert message == (
        "is 1,000,000,000: merging contributions of 4 islands in int4 needs 14.0 GiB on the head, which has 8.0 GiB."
    )
    assert "fewer islands or a codec of fewer bits (synchroniser.wire)" in remedy


def test_an_evaluator_on_the_head_counts_and_may_be_moved() -> None:
    nodes = fleet(20, 24, 24, 24, 24)
    assert refusals(spec(), nodes) == []
    ((_, _, remedy),) = refusals(spec(evaluation={"on": "head"}), nodes)
    assert "evaluate elsewhere (evaluation.on)" in remedy


def test_an_island_larger_than_any_node_of_its_group_is_refused_with_the_entry() -> None:
    ((path, message, _),) = refusals(spec(), fleet(64, 12, 16))
    assert path == "islands.0.node_group"
    assert message == (
        "is 'here', whose largest node has 16.0 GiB of memory: one island of 1,000,000,000 parameters needs 18.6 GiB."
    )


def test_islands_that_fit_one_by_one_and_not_together_are_refused() -> None:
    ((path, message, _),) = refusals(spec(islands=3), fleet(64, 24, 24))
    assert path == "islands"
    assert (
        "need 55.9 GiB of memory for 1,000,000,000 parameters on node group 'here', whose machines have 48.0" in message
    )


def test_standbys_need_what_islands_need() -> None:
    nodes = fleet(64, 24, 24)
    assert refusals(spec(islands=2), nodes) == []
    assert len(refusals(spec(islands=2, entry={"standby": 1}), nodes)) == 1


def test_every_host_of_an_island_has_a_node_with_its_part() -> None:
    two = {"entry": {"hosts": 2}, "evaluation": {"on": "head"}}
    assert refusals(spec(islands=1, **two), fleet(64, 19, 19)) == []
    ((path, message, _),) = refusals(spec(islands=1, **two), fleet(64, 24, 12))
    assert path == "islands.0.node_group"
    assert "of whose 2 largest nodes one has 12.0 GiB of memory: each of the 2 hosts of an island" in message
    ((path, message, _),) = refusals(spec(islands=2, **two), fleet(64, 24, 24))
    assert (path, "need 74.5 GiB" in message) == ("islands", True)


@pytest.mark.parametrize(
    ("hosts", "mesh", "published", "trained", "saved"),
    [
        (1, {}, 4, 16, 12),
        (2, {}, 4, 16, 12),  # a whole replica on each
        (2, {"fsdp": 2}, 2, 8, 6),
        (2, {"fsdp": 4, "tensor": 2}, 2, 8, 6),
        (4, {"fsdp": 2}, 2, 8, 6),  # two replicas, each on two hosts
        (2, {"data": 8}, 4, 64, 12),  # four devices of a host, each with all parameters in its memory
    ],
)
def test_what_a_mesh_splits_is_shared_by_hosts_and_the_rest_is_whole_on_each(
    hosts, mesh, published, trained, saved
) -> None:
    def needs(**where: bool) -> float:
        return island_bytes_per_parameter(**{"on_cpu": False, "saves": False, **where}, hosts=hosts, mesh=mesh)

    resting = 5 * published  # and the state that is taken
    assert needs() == resting
    assert needs(on_cpu=True) == resting + trained
    assert needs(saves=True) == resting + saved


def test_nodes_of_one_machine_share_its_memory_and_so_does_the_head() -> None:
    nodes = [NodeMemory("laptop", group, 40 * GIB) for group in (HEAD, "here", "here", "there")]
    assert refusals(spec(islands=1), nodes) == []
    ((path, message, _),) = refusals(spec(islands=2), nodes)
    assert path == "islands"
    assert "on node group 'here' and the head, whose machines have 40.0 GiB together" in message


def test_computing_on_cpu_and_saving_need_more_of_an_islands_host() -> None:
    assert refusals(spec(islands=1), fleet(64, 20)) == []
    assert len(refusals(spec(islands=1, entry=ON_CPU), fleet(64, 20))) == 1
    assert len(refusals(spec(islands=1, checkpoints={"every_merges": 8}), fleet(64, 20))) == 1
    assert island_bytes_per_parameter(on_cpu=True, saves=True) == 48


def test_where_nobody_says_what_memory_there_is_nothing_is_refused() -> None:
    assert memory_problems(spec(), BILLION, []) == ()
    assert memory_problems(spec(), BILLION, fleet(0, 0)) == ()


def test_a_model_that_only_its_package_knows_is_refused_by_the_field_that_names_it() -> None:
    of = parse_job(
        {"model": {"factory": "somebody.models:build"}, "islands": [{"node_group": "here"}], "budget": {"steps": 1}}
    )
    (problem,) = memory_problems(of, BILLION, fleet(1))
    assert problem.path == "model.factory"
    assert problem.message.startswith("is 'somebody.models:build', whose model has 1,000,000,000 parameters: merging")


def sharded(**synchroniser: Any) -> JobSpec:
    """A job whose head only has what runs on the head: islands measure."""
    return spec(synchroniser={"fragments": 24, **synchroniser})


def test_each_shard_is_counted_where_it_is_placed() -> None:
    one, four = (demand_of(sharded(shards=count), BILLION) for count in (1, 4))
    assert (one.head, one.shards) == (four.head, four.shards) == (one.head, ()), (
        "without groups they are beside the head"
    )
    away = demand_of(sharded(shards=4, shard_groups=["x", "y"]), BILLION)
    assert (away.head, len(away.shards), sum(away.shards)) == (0.0, 4, pytest.approx(one.head))
    assert away.islands == one.islands


def test_a_shard_that_no_node_of_its_group_can_hold_is_refused_with_its_group() -> None:
    of, part = sharded(shards=4, shard_groups=["x", "y"]), demand_of(sharded(shards=4), BILLION).head / 4
    here = [NodeMemory("big", "here", 10_000 * GIB), NodeMemory("head", HEAD, 1)]
    y = NodeMemory("y", "y", 3 * part)
    ((path, message, remedy),) = refusals(of, [*here, y, NodeMemory("x", "x", part * 0.9)])
    assert path == "synchroniser.shard_groups.0"
    assert "'x'" in message
    assert "one of 4 shards" in message
    assert "Raise synchroniser.shards" in remedy
    ((path, message, _),) = refusals(of, [*here, y, NodeMemory("x", "x", part * 1.1)])
    assert (path, "node group 'x'" in message) == ("synchroniser.shard_groups", True), "two of them are to be there"
    assert refusals(of, [*here, y, NodeMemory("x", "x", part * 2.1)]) == []
