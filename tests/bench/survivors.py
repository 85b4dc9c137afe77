"""The cost of an island's death and standstill for the others: their steps per second meanwhile, against before and
after.

Four synthetic islands sleep through steps of ``STEP_S``. One is killed over REST and comes back; then it is stopped for
``STOP_S`` (SIGSTOP) and continues. The rates are those of the other three, by the job's own tape, in stretches of
``STRETCH_S``.
"""

from __future__ import annotations

import time

from tests.bench.goals import Goal, at_least
from tests.bench.options import Options
from tests.bench.service import end, service, step_seconds, wait
from tests.ray.jobs import EVERY_GROUP, synthetic

STEP_S, STRETCH_S, STOP_S = 0.06, 20.0, 8.0
SMALL_STRETCH_S, SMALL_STOP_S = 4.0, 1.0
RATE_GOAL = 0.97
VICTIM, SURVIVORS = EVERY_GROUP[-1], EVERY_GROUP[:-1]


def main(asked: Options) -> list[Goal]:
    stretch_s, stop_s = (SMALL_STRETCH_S, SMALL_STOP_S) if asked.small else (STRETCH_S, STOP_S)
    with service() as (client, installation):
        job = client.submit(synthetic(10_000_000, EVERY_GROUP, synthetic={"step_s": STEP_S})).job
        strikes = {
            "alone": lambda: None,
            "a SIGKILL": lambda: client.kill(job, VICTIM),
            "alone again": lambda: None,
            f"{stop_s:g} s of SIGSTOP": lambda: client.inject(job, "stop", VICTIM, stop_s),
            "at last": lambda: None,
        }
        bounds = []
        for strike in strikes.values():
            wait(lambda: client.job(job).islands_training == len(EVERY_GROUP), "all islands train")
            time.sleep(3.0)
            began_at = client.job(job).started_at
            assert began_at is not None
            bounds.append(time.time() - began_at)
            strike()
            time.sleep(stretch_s)
        end(client, job)
        run_dir = installation.runs / job
        took = [step_seconds(run_dir, [begin, begin + stretch_s], SURVIVORS)[0] for begin in bounds]
    goals = []
    for number in (1, 3):
        rate = (took[number - 1] + took[number + 1]) / 2 / took[number]
        goals.append(at_least(f"survivors' rate through {list(strikes)[number]}", rate, RATE_GOAL))
        print(f"survivors  keep {rate:.3f} of their rate through {list(strikes)[number]}   ({goals[-1]})")
    return goals
