"""A job without a core, dictated to the folds: they hear exactly the events and decisions that are written here.

Two islands (east, west), two fragments. With the real core (``tests.harness``) a test of a fold would have to bring the core
to each decision first, and would hear of nothing but what this core decides.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Adopted, CaughtUp, Progress, Ready
from orchestrator.core.vocabulary import (
    CloseReason,
    Contribution,
    IslandPlan,
    JobOutcome,
    ReleaseReason,
    WeightedPayload,
    payload_id,
)
from orchestrator.simulation.plan import sample_policy
from orchestrator.tape.codec import parse_timer

POLICY = replace(
    sample_policy(2, quorum=1, fragment_count=2),
    islands=(IslandPlan("east", "east", "east", 1), IslandPlan("west", "west", "west", 1)),
)


class Dictation:
    """Feeds both folds, and checks conservation after every sentence."""

    def __init__(self, policy=POLICY):
        self.goodput = Goodput(policy)
        self.statistics = Statistics(policy)

    def tell(self, event, *effects):
        self.goodput.apply(event, effects)
        self.statistics.apply(event, effects)
        self.goodput.check()
        return self

    def tokens(self, island="east"):
        return self.goodput.summary()["islands"][island]["tokens"]

    def seconds(self, island="east", at=None):
        return self.goodput.summary(at)["islands"][island]["seconds"]

    # ── sentences ─────────────────────────────────────────────────────────────────────────────────────────────

    def place(self, at, island="east", incarnation=1, event=None):
        event = event or (
            e.JobStarted(at) if incarnation == 1 else e.TimerFired(at, parse_timer(f"backoff:{island}"), 1)
        )
        return self.tell(event, f.PlaceIsland(island, incarnation, island, "wanted"))

    def placed(self, at, island="east", incarnation=1):
        return self.tell(e.IslandPlaced(at, island, incarnation, "node", 7))

    def ready(self, at, island="east", incarnation=1):
        asked = f.BeginCatchUp(island, incarnation, None, 0, "why")
        return self.tell(e.IslandReported(at, island, incarnation, Ready(1, 0.5)), asked)

    def caught_up(self, at, island="east", incarnation=1, versions=(0, 0), transfer=0.1):
        event = e.IslandReported(at, island, incarnation, CaughtUp(None, versions, 0, transfer))
        return self.tell(event, f.StartTraining(island, incarnation))

    def train_from(self, at, island="east", incarnation=1):
        """Placed and training within one instant."""
        self.place(at, island, incarnation).placed(at, island, incarnation)
        return self.ready(at, island, incarnation).caught_up(at, island, incarnation)

    def progress(self, at, tokens, stepping, island="east", incarnation=1, step_s=0.1, gap=0.1, loss=3.0):
        steps = round(stepping / step_s)
        return self.tell(
            e.IslandReported(at, island, incarnation, Progress(steps, steps, tokens, stepping, step_s, gap, loss))
        )

    def contribution(self, tokens, total, fragment=0, offer=1, base=0, island="east", incarnation=1):
        name = payload_id(island, incarnation, fragment, offer)
        return Contribution(name, island, incarnation, fragment, offer, 100 * offer, base, 1, tokens, total)

    def admit(self, at, c, *before):
        return self.tell(e.ContributionArrived(at, c), *before, f.AdmitContribution(c, c.base_version + 1))

    def refuse(self, at, c, reason):
        release = f.ReleasePayload(c.payload, ReleaseReason.REFUSED)
        return self.tell(e.ContributionArrived(at, c), f.RefuseContribution(c, reason, "why"), release)

    def close(self, at, *contributions, version=1, reason=CloseReason.GRACE_OVER):
        inputs = tuple(WeightedPayload(c.payload, c.island, 1 / len(contributions)) for c in contributions)
        merge = f.MergeFragment(1, contributions[0].fragment, version, 1, inputs, reason, "why")
        return self.tell(e.TimerFired(at, parse_timer("grace:0"), 1), merge)

    def merged(self, at, *contributions, version=1):
        released = [f.ReleasePayload(c.payload, ReleaseReason.MERGED) for c in contributions]
        return self.tell(e.MergeCompleted(at, contributions[0].fragment, version, "d", 0.01), *released)

    def adopted(self, at, total, fragment=0, version=1, kept=0, island="east", incarnation=1):
        return self.tell(e.IslandReported(at, island, incarnation, Adopted(fragment, version, 1, total, kept)))

    def died(self, at, island="east", incarnation=1):
        timer = f.SetTimer(parse_timer(f"backoff:{island}"), 1, at + 1)
        return self.tell(e.ConnectionLost(at, island, incarnation, True, "gone"), timer)

    def finish(self, at, *before):
        stops = [f.StopIsland(i.island, life.incarnation, "over") for i in POLICY.islands if (life := self._life(i))]
        finish = f.FinishJob(JobOutcome.COMPLETED, "done")
        return self.tell(e.EvaluationCompleted(at, 1, 2.0), *before, *stops, finish)

    def _life(self, plan):
        life = self.goodput.times[plan.island]
        return life if life.incarnation else None
