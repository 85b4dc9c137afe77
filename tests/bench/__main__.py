"""``make bench``: events per second of core and fleet model, what a specification costs to be read, the merge arithmetic,
what synchronising, adopting and evaluating cost a step, how fast payloads travel, what keeping a merge and a checkpoint
costs, how soon operators are served, what attrition costs, how soon a killed island is back, and what that costs who gives
it a state, and the others; and how much code one contribution runs through.

The last line names the goals that were missed; the exit code is 1 if there is one. All parts run without arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from tests.bench import (
    adoption,
    attrition,
    attrition_real,
    channel,
    channel_line,
    checkpoints,
    checkpoints_load,
    core,
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
    surface,
    survivors,
    training,
    way,
)

PARTS: Mapping[str, Callable[[options.Options], list[goals.Goal]]] = {
    "core": core.main,
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
    "shard": shard.main,
    "island-memory": island_memory.main,
    "checkpoints": checkpoints.main,
    "checkpoints-load": checkpoints_load.main,
    "overhead": overhead.main,
    "surface": surface.main,
    "attrition": attrition.main,
    "attrition-real": attrition_real.main,
    "recovery": recovery.main,
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
