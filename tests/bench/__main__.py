"""``make bench``: the speed of core and fleet model, reading a specification, the merge arithmetic, the cost of
synchronising, adopting and evaluating, the payload channel, the cost of journalling a merge and of checkpoints, the
response time for operators, many jobs and an overloaded machine, the cost of attrition, the recovery time of a killed
island and its cost for the donor, and the other parts, as well as the amount of code that one contribution runs through.

The last line names the missed goals, and the exit code is 1 if there is one. All parts run without arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from tests.bench import (
    adoption,
    attrition,
    attrition_real,
    autopilot,
    channel,
    channel_line,
    checkpoints,
    checkpoints_load,
    core,
    crowd,
    device_memory,
    documents,
    donors,
    evaluation,
    fleet,
    goals,
    island_memory,
    journal,
    merge,
    options,
    overhead,
    recovery,
    shard,
    shard_lines,
    surface,
    survivors,
    tape,
    training,
    way,
)

PARTS: Mapping[str, Callable[[options.Options], list[goals.Goal]]] = {
    "core": core.main,
    "capacity": core.capacity,
    "documents": documents.main,
    "fleet": fleet.main,
    "merge": merge.main,
    "adoption": adoption.main,
    "evaluation": evaluation.main,
    "device-memory": device_memory.main,
    "training": training.main,
    "channel": channel.main,
    "channel-line": channel_line.main,
    "journal": journal.main,
    "mirror-cost": journal.mirror_cost,
    "shard": shard.main,
    "shard-lines": shard_lines.main,
    "tape": tape.main,
    "island-memory": island_memory.main,
    "checkpoints": checkpoints.main,
    "checkpoints-load": checkpoints_load.main,
    "overhead": overhead.main,
    "surface": surface.main,
    "jobs": crowd.jobs,
    "overload": crowd.overload,
    "attrition": attrition.main,
    "attrition-states": attrition.states,
    "attrition-real": attrition_real.main,
    "recovery": recovery.main,
    "autopilot": autopilot.main,
    "donors": donors.main,
    "survivors": survivors.main,
    "way": way.main,
}


def main(arguments: Sequence[str]) -> int:
    parts, asked = options.parse(arguments, PARTS, __doc__)
    judged = [goal for part in parts for goal in PARTS[part](asked)]
    print(goals.told(judged), file=sys.stderr if asked.as_json else sys.stdout)
    return goals.exit_code(judged)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
