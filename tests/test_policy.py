"""The core's policy is written once, in its class: every setting reaches world files, reports and ``--set`` from there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from typing import Any

import pytest
import yaml

from orchestrator.accounting import report
from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core.vocabulary import JobPolicy, StepLimits
from orchestrator.errors import InternalError, InvalidJobSpec
from orchestrator.simulation import whatif, worldfile
from orchestrator.simulation.plan import sample_policy
from orchestrator.specification import policy_source
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.policy_source import instance_of
from tests.swarm import configurations

LIMITS = StepLimits()
PATHS = list(policy_source.paths())
JOB = parse_job({"islands": [{"node_group": "a", "count": 3}], "budget": {"steps": 100}})
NOT_SETTABLE = {
    "token_budget": "of the job, and of no setting that says when fragments merge",
    "moving_average_decay": "no field of the specification",
    "evaluation_every_merges": "in a section of its own",
    "outer_rate": "the model's business, not the schedule's",
    "evaluation": "in a section of its own",
    "health": "in a section of its own",
    "checkpoints": "in a section of its own",
    "leaving_closes": "no field of the specification: only on older tapes it is off",
}
"""What `--set` does not change, and why: a new setting is changed by it, or stands here with its reason."""
NOT_DRAWN = {
    "checkpoints.every_merges": "checkpoints are asked for by an operator instead, at drawn times",
    "checkpoints.every_s": "checkpoints are asked for by an operator instead, at drawn times",
    "checkpoints.keep": "old checkpoints are removed by the host, not by the core",
    "checkpoints.timeout_s": "depends on the model's size, and these jobs have none",
    "cut_off_timeout_s": "a simulated cut is one of silence, where suspect_timeout_s counts",
    "evaluation.at_start": "as on older tapes, whose worlds the seeds name",
    "health.displacement_ratio_max": "a payload either explodes, or it does not",
    "outer_rate.final_ratio": "moves no decision",
    "outer_rate.warmup_merges": "moves no decision",
}
"""Settings that the swarm leaves at their defaults, and why: a new setting is drawn, or stands here with its reason."""
SEEDS = [*range(60), *range(configurations.HANGS_FROM_SEED, configurations.HANGS_FROM_SEED + 60)]
SEEDS += range(configurations.ROUTERS_FROM_SEED, configurations.ROUTERS_FROM_SEED + 4)


@dataclass(frozen=True, slots=True)
class _Grown(JobPolicy):
    """A policy with fields that nothing else was told of."""

    invented_s: float | None = None
    invented_max: int = 7
    is_invented: bool = False
    invented_limits: StepLimits = LIMITS


def _grown() -> _Grown:
    own = sample_policy(2)
    common = {field.name: getattr(own, field.name) for field in fields(JobPolicy)}
    return _Grown(**common, invented_s=2.5, invented_max=3, is_invented=True, invented_limits=StepLimits(1.0, 2.0, 3.0))


def _value(policy: Any, path: str) -> Any:
    return reduce(getattr, path.split("."), policy)


@pytest.mark.parametrize("path", PATHS)
def test_every_setting_comes_from_the_specification(path: str) -> None:
    source = policy_source.source_of(path, JobSpec)
    assert source is not None or path in policy_source.COMPUTED
    if source is not None and path not in policy_source.COMPUTED:
        assert _value(JOB.policy(), path) == _value(JOB, source)


def test_the_table_of_sources_has_no_row_for_a_setting_that_is_gone() -> None:
    assert {*policy_source.RENAMED, *policy_source.COMPUTED} <= set(PATHS)
    assert set(worldfile.POLICY_BOUNDS) <= set(PATHS)


def test_a_setting_that_comes_from_nowhere_is_named() -> None:
    with pytest.raises(InternalError, match=r"JobPolicy\.invented_s comes from no field of the specification"):
        policy_source.filled(_Grown, JOB, islands=(), standbys=())


def test_a_new_setting_is_written_to_a_world_file_and_read_back() -> None:
    policy = _grown()
    section = worldfile.policy_part(_Grown)
    written = {name: value for name, value in asdict(policy).items() if name not in policy_source.PLACES}
    read = section.model_validate(yaml.safe_load(yaml.safe_dump(written)))
    assert instance_of(_Grown, read, islands=policy.islands, standbys=policy.standbys) == policy


@pytest.mark.parametrize("policy", [sample_policy(2), _grown()], ids=["as it is", "grown"])
def test_a_report_has_every_setting(policy: JobPolicy) -> None:
    settings = report.build(policy, Goodput(policy), Statistics(policy), {})["policy"]
    for field in fields(policy):
        if field.name not in policy_source.PLACES:
            name = report.POLICY_NAMES.get(field.name, field.name)
            value = getattr(policy, field.name)
            assert settings[name] == (asdict(value) if hasattr(value, "__dataclass_fields__") else value)


@pytest.mark.parametrize("path", [path for path in PATHS if not {path, path.partition(".")[0]} & NOT_SETTABLE.keys()])
def test_every_setting_of_when_and_with_whom_fragments_merge_can_be_tried(path: str) -> None:
    name = next(name for name, of_policy in whatif.SETTINGS.items() if of_policy == path)
    before = whatif.Settings(sample_policy(4), "replace")
    usual = _value(before.policy, path)
    value = 3 if usual is None else usual + 1 if isinstance(usual, int) else 3.0 if usual >= 1.0 else 0.25
    after = whatif.apply(before, {name: str(value)})
    assert _value(after.policy, path) == value
    assert name in whatif.names()


def test_what_cannot_be_tried_is_said_in_our_words() -> None:
    with pytest.raises(InvalidJobSpec, match=r"quorum: is 0, but must be at least 1"):
        whatif.apply(whatif.Settings(sample_policy(4), "replace"), {"quorum": "0"})


def test_the_swarm_draws_every_setting() -> None:
    drawn: dict[str, set[Any]] = defaultdict(set)
    for seed in SEEDS:
        policy = configurations.draw(seed).policy
        for path in PATHS:
            drawn[path].add(_value(policy, path))
    assert sorted(path for path, values in drawn.items() if len(values) == 1) == sorted(NOT_DRAWN)


def test_a_policy_of_old_is_as_it_was() -> None:
    """The policy of a specification, setting by setting, as it was written by hand before it was derived."""
    document = {
        "islands": [{"node_group": "a", "count": 2, "standby": 1}],
        "budget": {"steps": 100},
        "synchroniser": {"fragments": 3, "interval_steps": 9, "outer_optimizer": {"warmup_merges": 4}},
        "recovery": {"step_limit_s": 5.0, "first_step_limit_s": 50.0, "donors_max": 2},
        "evaluation": {"on": "islands", "sequences": 8, "every_merges": 5},
        "health": {"strikes_max": 9},
        "checkpoints": {"every_merges": 6, "folder": "/checkpoints"},
    }
    policy = parse_job(document).policy()
    assert (policy.fragment_count, policy.sync_interval_steps, policy.donors_max) == (3, 9, 2)
    assert policy.step_limits == StepLimits(5.0, 50.0, 50.0)
    assert policy.outer_rate.warmup_merges == 4
    assert policy.evaluation == replace(policy.evaluation, sequences=8, on_islands=True, at_start=True)
    assert policy.evaluation.time_ratio_max is not None
    assert (policy.evaluation_every_merges, policy.health.strikes_max) == (5, 9)
    assert policy.checkpoints.every_merges == 6
    assert policy.standbys == ()
    assert policy.token_budget == parse_job(document).token_budget


def test_a_job_continues_with_what_the_release_that_began_it_did() -> None:
    """An older tape lacks the settings that came later. Those that it has must still be the specification's."""
    document = {"islands": [{"node_group": "a", "count": 8}], "budget": {"steps": 100}}
    policy = parse_job(document).policy()
    older = replace(policy, quorum_ratio=0.0, grace_floor_steps=0.0, leaving_closes=False)
    assert policy_source.continued(policy, older) == older != policy
    assert policy_source.continued(policy, policy) == policy
    assert policy_source.continued(policy, replace(older, quorum=3)) != replace(older, quorum=3)
