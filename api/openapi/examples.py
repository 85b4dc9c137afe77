"""An example of every shape that the API takes or answers with, from one job of four islands in four regions.

``api.openapi.document`` puts them into the document; a test holds each against its shape, and asks for one for every route.
"""

from __future__ import annotations

from typing import Any

_COMMAND = {
    "command": "kill-5f1d0c9be2a7",
    "job": "demo-3ef8s",
    "kind": "kill",
    "island": "asia",
    "caller": "ci",
    "requested_at": 1795292312.4,
    "state": "accepted",
    "detail": "its process is killed; it will be placed again",
}
_CHECKPOINT = {
    "number": 3,
    "url": "/srv/atoll/runs/demo-3ef8s/checkpoints/000003",
    "taken_at": 1795292350.2,
    "after_s": 60.1,
    "global_version": 96,
    "tokens_trained": 1204224,
    "islands": ["asia", "europe", "us-east", "us-west"],
    "bytes": 41873110,
}
_ISLAND = {
    "island": "asia",
    "node_group": "asia",
    "region": "asia-east1",
    "accelerator_count": 1,
    "state": "training",
    "reason": "caught up from europe",
    "incarnation": 2,
    "node": "vm",
    "pid": 27450,
    "step": 412,
    "steps_total": 405,
    "tokens_total": 414720,
    "steps_per_second": 5.1,
    "tokens_per_second": 5222.4,
    "loss": 1.912,
    "learning_rate": 0.00082,
    "gradient_norm": 0.314,
    "mfu_ratio": 0.41,
    "last_merge_after_s": 81.2,
    "restarts": 1,
}
_JOB_SUMMARY = {
    "job": "demo-3ef8s",
    "name": "demo",
    "state": "running",
    "reason": "",
    "caller": "ci",
    "submitted_at": 1795292290.0,
    "started_at": 1795292290.1,
    "ended_at": None,
    "island_count": 4,
    "islands_training": 4,
    "token_budget": 3686400,
    "tokens_trained": 1658880,
    "global_version": 152,
    "loss": 1.874,
    "goodput_ratio": 0.948,
    "run_dir": "/srv/atoll/runs/demo-3ef8s",
}
_JOB = _JOB_SUMMARY | {
    "after_s": 82.4,
    "pause_reason": None,
    "epoch": 1,
    "quorum": 1,
    "checkpoint": {"scheduled": True, "taken_at": 61.5, "bytes": 44_236_800},
    "loss_train": 1.905,
    "islands": [_ISLAND],
    "fragments": [{"fragment": 0, "version": 19, "phase": "collecting", "offered": ["europe"], "step": 408}],
    "loss_curve": [{"tokens": 1638400, "loss": 1.874, "after_s": 81.3}],
    "goodput": {"goodput_ratio": 0.948},
    "statistics": {"merges": 152},
    "report_ready": False,
}
_MERGE_SUMMARY = {
    "fragment": 5,
    "version": 40,
    "islands": ["asia", "us-east", "us-west"],
    "reason": "grace_over",
    "because": "closed because the grace window was over, after 0.65 s of grace; "
    "europe refused: late, base 39 is 1 behind; at most 0 is allowed",
    "closed_after_s": 208.3,
    "merged_after_s": 208.31,
}
_CONTRIBUTOR = {
    "island": "asia",
    "incarnation": 2,
    "step": 941,
    "step_count": 21,
    "token_count": 21504,
    "base_version": 39,
    "staleness": 0,
    "weight": 0.304,
    "arrived_after_s": 208.25,
    "on_time": True,
}
_REFUSAL = {
    "island": "europe",
    "incarnation": 1,
    "step": 963,
    "token_count": 23552,
    "base_version": 39,
    "reason": "late",
    "detail": "base 39 is 1 behind; at most 0 is allowed",
    "after_s": 208.32,
}
_MERGE = _MERGE_SUMMARY | {
    "step": 961,
    "quorum": 1,
    "opened_after_s": 207.66,
    "quorum_after_s": 207.66,
    "grace_window_s": 0.65,
    "grace_used_s": 0.65,
    "detail": "waited 0.650 s after quorum; without europe",
    "contributors": [_CONTRIBUTOR],
    "absent": [{"island": "europe", "state": "training"}],
    "refusals": [_REFUSAL],
    "refusal_count": 1,
    "merge_s": 0.003,
    "digest": "28886c7ba252018572cb7c2c3a34a2aa",
}
_NODE_GROUP = {
    "name": "asia",
    "region": "asia-east1",
    "nodes": 1,
    "cpus": 4.0,
    "cpus_free": 3.0,
    "accelerators": 0,
    "node_names": ["asia-1"],
}
_NODE_CORDON = {
    "node": "asia-2",
    "node_group": "asia",
    "cordoned_by": "the rule for bad nodes",
    "reason": "4 failures of demo-3ef8s/asia, the last one: its process died",
    "cordoned_at": 1795292312.4,
    "expires_at": 1795313912.4,
    "in_force": True,
}
_TOKEN = {
    "name": "ci",
    "role": "operator",
    "created_at": 1795292100.0,
    "created_by": "local",
    "expires_at": None,
    "revoked_at": None,
    "valid": True,
}
_AUDIT_ENTRY = {
    "number": 17,
    "at": 1795292312.4,
    "caller": "ci",
    "role": "operator",
    "address": "127.0.0.1",
    "method": "POST",
    "path": "/v1/jobs/demo-3ef8s/islands/asia/kill",
    "status": 202,
}
_CHAOS_RUN_SUMMARY = {
    "run": "chaos-5f1d0c9be2a7",
    "job": "demo-3ef8s",
    "plan": "attrition",
    "caller": "ci",
    "requested_at": 1795292300.2,
    "state": "running",
    "reason": "",
    "begun_after_s": 12.4,
    "ended_at": None,
    "struck_count": 1,
    "spared_count": 0,
}
_CHAOS_RUN = _CHAOS_RUN_SUMMARY | {
    "fault_count": 8,
    "next": {
        "told": "kill us-west",
        "kind": "kill",
        "island": "us-west",
        "planned_s": 71.9,
        "duration_s": 0.0,
        "after_s": 84.3,
    },
    "decisions": [
        {
            "told": "kill asia",
            "kind": "kill",
            "island": "asia",
            "planned_s": 20.6,
            "duration_s": 0.0,
            "after_s": 33.2,
            "spared": "",
            "command": "kill-5f1d0c9be2a7",
            "outcome": "accepted",
        }
    ],
}
_SHOWN_PLAN = {
    "name": "one-kill",
    "about": "asia dies once, and no other island may be affected.",
    "faults": ["kill asia, at 20 s"],
    "keeps": 2,
    "objectives": ["bystander_gap_max_s < 2"],
    "text": "name: one-kill\nfaults:\n  - {kind: kill, target: {name: asia}, at: 20}\n"
    "blast_radius: {keep: 2}\nobjectives: [bystander_gap_max_s < 2]\n",
}
_VERDICT = {
    "schema": "atoll-verdict/1",
    "plan": "one-kill",
    "seed": 0,
    "job": "demo-3ef8s",
    "passed": True,
    "aborted": None,
    "objectives": [
        {
            "objective": "bystander_gap_max_s < 2",
            "passed": True,
            "value": 0.44,
            "limit": 2.0,
            "margin": 1.56,
            "at": 71.3,
            "detail": "bystander_gap_max_s is 0.44: 1.56 to spare, at 71.3 s on europe",
        }
    ],
    "faults": [{"at": 32.4, "planned_at": 20.0, "kind": "kill", "island": "asia", "duration": 0.0, "spared": ""}],
}

SPECIFICATION = {
    "name": "first",
    "islands": [{"node_group": "us-east"}, {"node_group": "europe"}],
    "synchroniser": {"fragments": 4, "interval_steps": 8},
    "budget": {"steps": 200},
}
_ADVISED = (
    "interval_steps 24 to 12: merged tokens 3,492 to 3,648 a second, 4.5 % ± 0.2 % more, because time lost with the island "
    "falls from 8.2 % to 4.1 %"
)
_EFFECT = {
    "tokens_per_second": 3492.0,
    "spread": 14.3,
    "goodput_ratio": 0.853,
    "contributors": 3.73,
    "drift_steps": 24.0,
    "badput": {"lost with the island": 0.082},
}
SHAPES: dict[str, Any] = {
    "ChaosRun": _CHAOS_RUN,
    "ChaosRunList": {"runs": [_CHAOS_RUN_SUMMARY]},
    "ShownPlans": {"plans": [_SHOWN_PLAN]},
    "VerdictDocument": _VERDICT,
    "AuditTrail": {"entries": [_AUDIT_ENTRY], "next_cursor": None},
    "Checkpoints": {"checkpoints": [_CHECKPOINT]},
    "Command": _COMMAND,
    "Commands": {"commands": [_COMMAND]},
    "Diagnosis": {
        "job": "demo-3ef8s",
        "outcome": None,
        "reason": "",
        "goodput_ratio": 0.81,
        "cause": {
            "cause": "a straggler",
            "subject": "asia",
            "island_seconds": 41.5,
            "share": 0.12,
            "statement": "asia takes 0.48 s a step where the others take 0.24 s: 41.5 s of island time, 12 % of all",
            "remedy": "Look for heat, clocks and other processes on its machine, or drain the island.",
            "records": [2439],
        },
        "others": [],
        "islands": [
            {
                "island": "asia",
                "node": "d45c…",
                "step_s": 0.48,
                "step_z": 10.0,
                "pull_s": 0.05,
                "pull_z": 0.1,
                "delivery_s": 0.03,
                "delivery_z": 0.0,
                "waiting_ratio": 0.01,
                "waiting_z": 0.0,
                "failure_count": 0,
            }
        ],
        "node_failures": {},
    },
    "Advice": {
        "job": "demo-3ef8s",
        "kind": "observe",
        "looks": [
            {
                "looked_at_time": 1795292312.4,
                "record": 19012,
                "at": 1500.0,
                "settings": {"interval_steps": 24.0, "quorum": 1.0, "grace": 3.0, "standbys": 0.0},
                "fit_error_ratio": 0.004,
                "looked_at": 8,
                "outcome": _ADVISED,
                "advice": {
                    "setting": "interval_steps",
                    "before": 24.0,
                    "after": 12.0,
                    "gain_ratio": 0.045,
                    "error_ratio": 0.002,
                    "now": _EFFECT,
                    "then": _EFFECT | {"tokens_per_second": 3648.0, "goodput_ratio": 0.891, "drift_steps": 12.0},
                    "reason": _ADVISED,
                    "held_by": "",
                },
                "command": None,
            }
        ],
    },
    "Health": {"status": "ok", "detail": "4 node groups"},
    "Island": _ISLAND,
    "Islands": {"islands": [_ISLAND]},
    "Job": _JOB,
    "JobCheck": {
        "name": "demo",
        "island_count": 4,
        "token_budget": 3686400,
        "steps": 900,
        "specification": {"name": "demo", "islands": [{"node_group": "us-east"}], "budget": {"steps": 900}},
    },
    "Specification": {
        "job": "demo-3ef8s",
        "specification": {"name": "demo", "islands": [{"node_group": "us-east"}], "budget": {"steps": 900}},
    },
    "Jobs": {"jobs": [_JOB_SUMMARY], "next_cursor": None},
    "KillOptions": {"restart": True},
    "Logs": {"logs": [{"source": "asia", "incarnation": 2, "bytes": 2304, "written_at": 1795292312.4}]},
    "Merge": _MERGE,
    "Merges": {"merges": [_MERGE_SUMMARY], "next_cursor": "5:40"},
    "NewToken": _TOKEN | {"token": "atoll_…"},
    "NodeGroupChange": {"node_group": _NODE_GROUP, "commands": []},
    "Restart": {
        "job": "demo-3ef8s",
        "detail": "process 27391 of its synchroniser was ended; a new one continues from tape and journal",
    },
    "Profile": {
        "profile": "b5e0d0a1",
        "job": "demo-3ef8s",
        "island": "asia",
        "incarnation": 1,
        "steps": 5,
        "steps_taken": 5,
        "seconds": 2.61,
        "stalled_s": 0.82,
        "byte_count": 482311,
        "problem": "",
    },
    "ProfileOptions": {"steps": 5},
    "NodeGroups": {"node_groups": [_NODE_GROUP | {"cordoned_nodes": [_NODE_CORDON]}]},
    "RetentionPlan": {
        "days": 30.0,
        "failed_days": None,
        "bytes": None,
        "ended_count": 12,
        "ended_bytes": 48318382080,
        "kept_for_others": ["demo-x7k2p"],
        "removals": [
            {
                "job": "demo-a1b2c",
                "state": "completed",
                "ended_days": 31.2,
                "bytes": 4026531840,
                "reason": "it completed 31.2 days ago, more than 30",
            }
        ],
    },
    "Token": _TOKEN,
    "TokenList": {"tokens": [_TOKEN]},
    "TokenOptions": {"name": "ci", "role": "operator", "expires_in_s": 2592000.0},
    "Whoami": {"name": "ci", "role": "operator"},
    "RollbackOptions": {"checkpoint": 3},
    "ProblemDocument": {
        "type": "urn:atoll:problem:not-found",
        "title": "Not found",
        "status": 404,
        "detail": "Job 'demo-9' does not exist.",
        "instance": "/v1/jobs/demo-9",
        "remedy": "`atoll jobs` lists them.",
    },
}
"""By the shape's name. Shapes that carry their own examples are not listed."""

PARAMETERS: dict[str, Any] = {
    "job": "latest",
    "island": "asia",
    "command": "kill-5f1d0c9be2a7",
    "node_group": "asia",
    "run": "latest",
    "fragment": 0,
    "version": 1,
    "name": "ci",
    "state": "running",
    "source": "asia",
    "incarnation": 1,
    "tail": 20,
    "priority": 10,
    "limit": 20,
    "after": 0,
    "follow": False,
    "days": 30.0,
    "failed_days": 90.0,
    "bytes": 500000000000,
    "last-event-id": 12,
    "if-match": '"14.9f2c41d07be85a36"',
    "if-none-match": '"14.9f2c41d07be85a36"',
    "Idempotency-Key": "5f1d0c9b-e2a7",
}
