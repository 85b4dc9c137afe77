"""The cost of attrition to the model: the demo's job on real islands, each killed about once a minute, and the same left
alone.

The jobs run one after the other, the undisturbed one second, so that each has the machine to itself. Held-out losses are
compared at equal merged tokens (the disturbed job's last loss against the other's curve, interpolated), and at the end.
The first comparison favours the disturbed job, whose learning rate has come all the way down there, as the budget counts
lost tokens as well. The second favours the other, which has merged more by then. Both must hold. The budget is what two
idle cores train in ``--minutes``; kills continue until the job ends, which is later on a slower machine. Two undisturbed
jobs differ too, by who merged with whom when (README has pairs 3 % apart), so one pair of jobs cannot show a smaller
difference.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from api.client import Client
from api.installation.home import CONFIGS
from api.installation.up import Installation
from orchestrator.accounting.goodput import Goodput
from orchestrator.core.events import EvaluationCompleted, MergeCompleted
from orchestrator.specification.config import read_job_document
from orchestrator.tape.storage import read_tape
from tests.bench.attrition import wear
from tests.bench.goals import Goal, at_most
from tests.bench.options import Options
from tests.bench.service import service, wait

GAP_GOAL = 0.01
TOKENS_PER_MINUTE = 1_600_000
PATIENCE = 20.0
"""A job may take this many times as long as on two idle cores."""
Curve = list[tuple[float, float]]
"""(Merged tokens, held-out loss of the model made of them), in order."""


def main(asked: Options) -> list[Goal]:
    with service() as (client, installation):
        kills, worn = train(client, installation, "worn", asked.minutes, killed=True)
        _, alone = train(client, installation, "alone", asked.minutes, killed=False)
    tokens, loss = worn[-1]
    there = loss_at(alone, tokens)
    last_tokens, last = alone[-1]
    goals = [
        at_most("attrition-real loss gap at the same merged tokens", loss / there - 1, GAP_GOAL),
        at_most("attrition-real gap of the last losses", loss / last - 1, GAP_GOAL),
    ]
    print(f"attrition-real {kills} kills: loss {loss:.4f} after {tokens:,.0f} merged tokens, ", end="")
    print(f"left alone {there:.4f} there: gap {goals[0].value:+.2%} ({goals[0]}), ", end="")
    print(f"and {last:.4f} after {last_tokens:,.0f}: gap {goals[1].value:+.2%} ({goals[1]})")
    halves = [(x, y) for x, y in worn if tokens / 2 <= x <= last_tokens]
    gaps = ", ".join(f"{x / 1e6:.2f}M {y / loss_at(alone, x) - 1:+.2%}" for x, y in halves)
    print(f"attrition-real gaps on the way: {gaps}")
    return goals


def train(client: Client, installation: Installation, name: str, minutes: float, *, killed: bool) -> tuple[int, Curve]:
    """Run the demo's job to its end. Return how often an island was killed, and the loss curve."""
    document = read_job_document(CONFIGS / "demo.yaml")
    document |= {"name": name, "budget": {"tokens": round(TOKENS_PER_MINUTE * minutes)}}
    document["recovery"] = {"restarts_max": 1000}
    job = client.submit(document).job
    wait(lambda: client.job(job).islands_training == len(document["islands"]), "all islands train")
    islands = [island.island for island in client.islands(job) if island.state == "training"] if killed else []

    def over() -> bool:
        return client.job(job).state.final

    kills = wear(client, job, islands, PATIENCE * minutes, over)
    wait(over, "the end", timeout_s=60 * PATIENCE * minutes)
    state = client.job(job).state
    assert state == "completed", f"{name} is {state}"
    return kills, loss_curve(installation.runs / job / "tape.jsonl")


def loss_curve(tape: Path) -> Curve:
    """Return the losses by the tokens in the evaluated versions, not by those merged when the evaluation ended."""
    read = read_tape(tape)
    worth, merged, curve = Goodput(read.header.policy), [0], []
    for record in read.records:
        worth.apply(record.event, record.effects)
        match record.event:
            case MergeCompleted():
                merged.append(worth.summary()["tokens"]["merged"])
            case EvaluationCompleted(global_version=version, loss=loss):
                curve.append((float(merged[version]), loss))
    return curve


def loss_at(curve: Curve, tokens: float) -> float:
    """Interpolate the curve linearly, and constantly beyond its ends."""
    return float(np.interp(tokens, *zip(*curve, strict=True)))
