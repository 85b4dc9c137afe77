"""``python -m tests.api.mortal_feeder KIND HOME JOB STATE STRIKE``: feed a real tracker, die at delivery STRIKE.

Strike 0 never comes. Even strikes hit in the middle of a delivery, odd ones behind it, before the cursor is stored.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

from api import tracker_feed
from api.client import Client
from api.trackers import MlflowSink, WandbSink
from tests.api.test_tracking import EVERY_S, Mortal


def main(kind: str, home: str, job: str, state: str, strike: int) -> None:
    tracker_feed.RECORDS_MAX = 40
    options = ast.literal_eval(os.environ["FEEDER_OPTIONS"])
    if kind == "mlflow":
        sink = MlflowSink(**options)
    else:
        sink = WandbSink(Path(options["folder"]), options["mode"], options["project"], options["entity"])
    client = Client.at(Path(home))
    follower = tracker_feed.Follower(
        "it", Mortal(sink, strike, late=bool(strike % 2)), client, Path(state), EVERY_S, print, [job]
    )
    assert tracker_feed.follow_all([follower], 0.01, once=True) == []


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
