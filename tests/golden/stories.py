"""Recorded stories: each shows one idea of the protocol, as what happened and what the core decided on it.

    python -m tests.golden.stories      record all of them anew, and show what differs

The digests beside them notice a changed decision, and these texts show it. They are in ``stories/NAME.txt``. A change that
means to change no decision must leave them alone. One that means to records them anew in the same commit, so that its diff
shows a reviewer what is decided otherwise.

A story is written in the small language of ``tests/harness/story.py``. Its text starts at ``begins``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.core import commands, events, fragment_round, saving
from orchestrator.core.effects import Effect, SetTimer
from orchestrator.core.messages import Adopted, CatchUpFailure, CaughtUp, Drained, NotSaved, Ready, Saved
from orchestrator.core.vocabulary import IslandPlan, NodeGroupId, RefusalReason
from tests.golden.story_text import text_of
from tests.harness.story import Story, all_of, policy, the

FOLDER = Path(__file__).parent / "stories"
COMMAND = "python -m tests.golden.stories"
USUAL_DISPLACEMENT, EXPLODED_DISPLACEMENT = 2.0, 1e6
SPARE = IslandPlan("spare", "group-b", "region-b", 1)
HERE = NodeGroupId("here")


class Scenario(Story):
    """A story that is written down from ``begins`` on, with remarks between its events."""

    def __init__(self, islands: str = "abc", **changed: Any) -> None:
        self._remarks: dict[int, str] = {}
        self._title = self._about = ""
        self._first = 0
        super().__init__(islands, **changed)

    def begins(self, title: str, about: str) -> None:
        """Start the text here. ``about`` says what has happened before."""
        self._title, self._about, self._first = title, about, len(self.records)

    def remark(self, text: str) -> None:
        """Put a remark before the next event."""
        self._remarks[len(self.records) + 1] = text

    def later(self, seconds: float, text: str) -> None:
        self.wait(seconds)
        self.remark(text)

    def comes(self, name: str, text: str) -> None:
        """Tell that the process is ready, and half a second later, with ``text``, that it holds the state it asked for."""
        asked = self.is_ready(name)
        assert asked is not None
        self.later(0.5, text)
        self.catches_up(name, asked.donor and asked.donor[0])

    def catches_up(self, name: str, donor: str | None = None, seconds: float = 0.5) -> tuple[Effect, ...]:
        versions = tuple(fragment.version for fragment in self.core.state.rounds)
        return self.reports(name, self.incarnation(name), CaughtUp(donor, versions, 8, seconds))

    @property
    def text(self) -> str:
        return text_of(self._title, self._about, self.records[self._first :], self._remarks)


def full_quorum() -> Scenario:
    story = Scenario("abc", quorum=2)
    story.starts("a", "b", "c")
    story.begins(
        "A round merges at once when everyone is in",
        "Islands a, b and c train, a step a second. The model has two fragments. A merge needs the contributions of "
        "two islands (quorum 2).",
    )
    story.later(4.0, "Island a offers its fragment 0. It is held, and the round waits for a second one.")
    story.offers_fragment("a")
    story.later(0.1, "With b the quorum is reached. The grace window begins: c may still come.")
    story.offers_fragment("b", tokens=200)
    story.later(0.2, "No training island is missing, so the round closes at once. b trained twice the tokens of a.")
    story.offers_fragment("c")
    story.later(0.1, "The shard has made the outer step, and its journal has it. Now the version may be published.")
    story.merges(0, 1)
    story.later(0.5, "An island adopts it at its next boundary between two steps.")
    story.reports("a", 1, Adopted(0, 1, 5, 500, 0))
    return story


def grace_window() -> Scenario:
    story = Scenario("abc", quorum=2)
    story.starts("a", "b", "c")
    story.begins(
        "The grace window closes without the slowest island",
        "Islands a, b and c train, a step a second; quorum 2. A publication may arrive two steps late (overlap_steps), "
        "and half of that slack may be waited (grace_margin), but at most a step (grace_cap_steps).",
    )
    story.later(4.0, "The first contribution.")
    story.offers_fragment("a")
    story.later(
        0.5,
        "Half a second later the quorum is there. Nothing is known of earlier rounds, so half of two steps is waited.",
    )
    timer = the(SetTimer, story.offers_fragment("b"))
    story.remark("The timer fires, and c is not in. The merge says who was waited for.")
    story.timer(timer)
    story.later(0.1, "The merge is done. c gets the version as well, and learns that none of its work is in it.")
    story.merges(0, 1)
    story.later(0.3, "The contribution of c, built on version 0, arrives after the merge.")
    story.offers_fragment("c", base=0)
    story.later(0.1, "a adopts version 1: half a second after its round closed (sync).")
    story.reports("a", 1, Adopted(0, 1, 6, 600, 0))
    story.later(2.5, "The next round.")
    story.offers_fragment("a")
    story.later(
        0.8,
        "The quorum is there. Two steps of a second, less the 0.5 s that the last round took to its quorum and the 0.5 s "
        "to its adoption, leave a slack of a second. Half of it is waited.",
    )
    timer = the(SetTimer, story.offers_fragment("b"))
    story.remark("c is late again.")
    story.timer(timer)
    return story


def stale_contribution() -> Scenario:
    story = Scenario("ab", staleness_max=1)
    story.starts("a", "b")
    for version in (1, 2):
        story.wait(4.0)
        for timer in all_of(SetTimer, story.offers_fragment("a")):
            story.timer(timer)
        story.merges(0, version)
    story.begins(
        "A contribution that is too old is refused",
        "Islands a and b train; a contribution may be built on a version one older than the newest (staleness_max 1). "
        "Island a has made two merges alone, so fragment 0 is at version 2. Nothing of b is in it.",
    )
    story.later(1.0, "b built on version 0, which is two behind. It is refused, and its bytes are let go of.")
    story.offers_fragment("b", base=0)
    story.later(2.0, "Built on version 1 it may enter.")
    story.offers_fragment("b", base=1)
    story.later(0.1, "The same offer arrives once more, as after a lost answer. It is refused as a duplicate.")
    story.offers_fragment("b", base=1, offer=2)
    return story


def death_in_a_round() -> Scenario:
    story = Scenario("abc", quorum=2)
    story.starts("a", "b", "c")
    story.begins(
        "An island dies in the middle of a round, and comes back",
        "Islands a, b and c train; quorum 2. What an island has contributed stays good when it dies.",
    )
    story.later(4.0, "c contributes.")
    story.offers_fragment("c")
    story.later(0.2, "The process of c dies. Its contribution stays; a new process is made after a back-off.")
    backoff = the(SetTimer, story.dies("c"))
    story.later(0.3, "With a the quorum is reached, and b is the only one that is waited for.")
    story.offers_fragment("a")
    story.later(0.2, "b comes. The work of the dead c is in the merge.")
    story.offers_fragment("b")
    story.later(0.1, "The merge is done. c has no process that it could be published to.")
    story.merges(0, 1)
    story.remark("The back-off is over. The next process of c is its incarnation 2.")
    story.timer(backoff)
    story.later(2.0, "The process exists, and then has compiled its model. It is to take the state of a peer.")
    story.comes("c", "It has that state, and trains.")
    return story


def silent_island() -> Scenario:
    story = Scenario("abc", quorum=2)
    story.starts("a", "b", "c")
    story.begins(
        "An island falls silent, answers again, and is given up in the end",
        "Islands a, b and c train; quorum 2. After 30 s of silence an island is given up (suspect_timeout_s).",
    )
    story.later(4.0, "b does not answer. It may still train behind a broken line, so it is not replaced yet.")
    story.falls_silent("b")
    story.later(1.0, "a contributes.")
    story.offers_fragment("a")
    story.later(0.2, "c contributes. No other island can be waited for, so there is no grace window.")
    story.offers_fragment("c")
    story.later(0.1, "The version goes to b as well, which may be reachable again at any moment.")
    story.merges(0, 1)
    story.later(10.0, "b answers again. It gets the version once more.")
    story.happen(events.ConnectionRestored, "b", 1)
    story.later(4.0, "It falls silent once more, and now for too long.")
    suspicion = the(SetTimer, story.falls_silent("b"))
    story.remark("The time is over. Its process is to end before another one is placed.")
    story.timer(suspicion)
    return story


def quarantine() -> Scenario:
    story = Scenario("ab")
    story.starts("a", "b")
    for version in range(1, fragment_round.VERSIONS_BEFORE_JUDGING + 1):
        for name in "ab":
            story.happen(events.ContributionArrived, story.contribution(name), USUAL_DISPLACEMENT)
        story.merges(0, version)
    story.begins(
        "An island that sends what would spoil a merge is quarantined",
        f"Islands a and b train. {fragment_round.VERSIONS_BEFORE_JUDGING} merges showed how far a contribution is from "
        "Θ: about 2. More than 100 times that is refused; three such in a row end the process (strikes_max).",
    )
    for text in ("b has diverged.", "Again.", "The third time: its process ends, and begins anew after a back-off."):
        story.later(4.0, text)
        effects = story.happen(events.ContributionArrived, story.contribution("b"), EXPLODED_DISPLACEMENT)
    backoff = the(SetTimer, effects)
    story.later(0.5, "Another payload of the old process arrives. It does not count against the new one.")
    story.happen(events.ContributionUnusable, story.contribution("b", 1), RefusalReason.NON_FINITE, "NaN in layer 3")
    story.remark("The back-off is over.")
    story.timer(backoff)
    story.later(2.0, "It is given the state of a healthy island, and not its own.")
    story.is_ready("b")
    return story


def drain() -> Scenario:
    story = Scenario("abc", quorum=2)
    story.starts("a", "b", "c")
    story.begins(
        "An island is drained: none of its work is lost",
        "Islands a, b and c train; quorum 2. An operator wants c's machine.",
    )
    story.later(4.0, "a has contributed.")
    story.offers_fragment("a")
    story.later(0.5, "The operator's command. c is to step no more, and no round waits for it any more.")
    story.command("drain-1", commands.Drain("c"))
    story.later(0.5, "c offers the last of its work, which enters the round as any other.")
    story.offers_fragment("c")
    story.later(0.2, "b is in: everyone who trains is.")
    story.offers_fragment("b")
    story.later(0.1, "c gets the version: it has to see that its work is in it.")
    story.merges(0, 1)
    story.later(1.0, "c holds versions with all of its work. Only now is its process ended.")
    story.reports("c", 1, Drained())
    story.later(60.0, "The operator wants it back. The next process goes on with its data where it was.")
    story.command("readd-1", commands.Readd("c"))
    return story


def scaling() -> Scenario:
    plans = policy("abc")
    wanted = replace(plans, islands=tuple(replace(plan, node_group=HERE) for plan in plans.islands))
    at_first = events.CommandRequested(0.0, "at the start", "operator", commands.Scale(HERE, 2))
    story = Scenario(wanted=wanted, before=(at_first,))
    story.starts("a", "b")
    story.begins(
        "A node group is scaled up and down while the job trains",
        "The job may have three islands on the node group 'here', and two of them are wanted: a and b train.",
    )
    story.later(4.0, "Three are wanted: the first spare one, c, is placed.")
    story.command("up-1", commands.Scale(HERE, 3))
    story.later(2.0, "Its process exists, and then has compiled its model. No fragment has merged yet.")
    story.comes("c", "It trains as the others do.")
    story.later(4.0, "One is wanted. The last islands of the group are drained, not killed.")
    story.command("down-1", commands.Scale(HERE, 1))
    story.later(0.5, "All work of c is in versions.")
    story.reports("c", 1, Drained())
    story.later(0.5, "Two are wanted after all, while b still drains: it trains on as it was.")
    story.command("up-2", commands.Scale(HERE, 2))
    story.later(0.5, "A command that cannot be carried out is refused, with a reason.")
    story.command("up-3", commands.Scale(HERE, 9))
    return story


def checkpoint() -> Scenario:
    story = Scenario("abc", quorum=2)
    story.starts("a", "b", "c")
    story.begins(
        "A checkpoint is a cut through the job",
        "Islands a, b and c train; quorum 2. Every contribution is either in the checkpoint's Θ or in its island's "
        "part, never in both.",
    )
    story.wait(4.0)
    for name in "abc":
        story.remark(f"{name} contributes to fragment 0{', which closes the round' * (name == 'c')}.")
        story.offers_fragment(name)
        story.wait(0.1)
    story.remark(
        "A checkpoint is asked for. The merge that is under way is in its cut (fragment 0 at version 1), and the "
        "islands are sent the marker."
    )
    deadline = the(SetTimer, story.command("save-1", commands.Checkpoint()))
    story.later(0.1, "The merge is done. It changes nothing about the cut.")
    story.merges(0, 1)
    story.later(0.5, "a has written its part, at its first boundary behind the marker.")
    story.reports("a", 1, Saved(1, "digest-of-a", 500, 0.01))
    story.later(0.5, "b cannot. The checkpoint goes on without it.")
    story.reports("b", 1, NotSaved(1, "No space left on device"))
    story.remark("c does not answer in time. It is left out, and the checkpoint is sealed with what there is.")
    story.timer(deadline)
    story.later(0.3, "All files are written and synced.")
    story.happen(saving.CheckpointTaken, 1, 36_000, 60.9)
    return story


def rollback() -> Scenario:
    story = Scenario("ab", grace_margin=0.0)
    story.starts("a", "b")
    story.offers_fragment("a")
    story.merges(0, 1)
    story.command("save-1", commands.Checkpoint())
    for name in "ab":
        story.reports(name, 1, Saved(1, f"digest-of-{name}", 100, 0.01))
    story.happen(saving.CheckpointTaken, 1, 24_000, 0.5)
    story.wait(8.0)
    story.offers_fragment("a")
    story.merges(0, 2)
    story.begins(
        "A running job goes back to a checkpoint",
        "Islands a and b train; no grace window. Checkpoint 1 has fragment 0 at version 1. Another merge has made "
        "version 2 since, and the operator wants to undo it.",
    )
    story.later(4.0, "b contributes, which begins another merge.")
    story.offers_fragment("b", 0)
    story.later(0.1, "The command comes while that merge is under way. Nothing is restored before it is done.")
    story.command("back-1", commands.Rollback(0))
    story.later(0.1, "A round of the other fragment has its quorum, and is kept from merging meanwhile.")
    story.offers_fragment("b", 1)
    story.later(0.1, "The merge is done. Versions never fall: version 4 shall hold what version 1 held.")
    story.merges(0, 3)
    story.later(0.2, "Fragment 0 is restored, and every island takes it, whatever it has trained since.")
    story.happen(saving.FragmentRestored, 0, 4, 1, "digest-then", "digest-now")
    story.later(0.1, "So is fragment 1: the rollback is done.")
    story.happen(saving.FragmentRestored, 1, 1, 1, "digest-then", "digest-now")
    story.later(1.0, "What is built on a version that was undone is not taken any more.")
    story.offers_fragment("a", 0, base=2)
    return story


def restart() -> Scenario:
    story = Scenario("abc", quorum=2)
    story.starts("a", "b")
    story.is_ready("c")
    story.begins(
        "The synchroniser's process dies, and another one goes on",
        "Islands a and b train; c is taking its first state from the synchroniser; quorum 2. Bytes that only the dead "
        "process held are lost, and everything that was asked of islands is asked again.",
    )
    story.wait(4.0)
    first, second = story.contribution("a"), story.contribution("b")
    story.remark("a contributes.")
    story.happen(events.ContributionArrived, first)
    story.later(0.2, "b does, and the merge begins. Before its result is in the journal, the process is killed.")
    story.happen(events.ContributionArrived, second)
    story.later(
        3.0,
        "The next process has replayed the tape. Its epoch is 2, and islands refuse calls of a lower one. The payloads "
        "are declared lost.",
    )
    story.happen(events.SynchroniserRestarted, 2)
    story.later(0.5, "The result of the old merge arrives late. It is ignored, because its inputs are gone.")
    story.merges(0, 1)
    story.later(0.5, "The islands kept the work that is in no version. a offers it again.")
    story.happen(events.ContributionArrived, first)
    story.later(0.1, "The same merge is decided again, under the new epoch.")
    story.happen(events.ContributionArrived, second)
    return story


def standby() -> Scenario:
    story = Scenario("ab", standbys=(SPARE,))
    story.starts("a", "b")
    story.is_ready("spare")
    story.catches_up("spare")
    story.trains("b", 400, steps=4)
    story.begins(
        "A standby takes the place of an island that died",
        "Islands a and b train. The standby 'spare' holds a state, adopts what is published, and trains nothing.",
    )
    story.later(4.0, "The process of b dies. b goes on as the process of the standby; a new standby is placed.")
    story.dies("b")
    story.later(0.1, "The process answers as incarnation 2 of b.")
    story.happen(events.IslandPlaced, "b", 2, "node", 1001)
    story.later(0.1, "It is compiled already. It need take no state, for it holds one.")
    story.reports("b", 2, Ready(1, 0.0))
    story.later(0.1, "It trains, a third of a second after the death. Its data goes on where b was.")
    story.catches_up("b", seconds=0.0)
    story.later(20.0, "The process of the new standby exists, and then has compiled its model.")
    story.comes("spare", "It stands by.")
    return story


def catch_up() -> Scenario:
    story = Scenario("abcd", donors_max=2)
    story.starts(*"abcd")
    for timer in all_of(SetTimer, story.offers_fragment("a")):
        story.timer(timer)
    story.merges(0, 1)
    backoff = the(SetTimer, story.dies("d"))
    story.begins(
        "An island takes its state from others, of which one dies",
        "Islands a, b and c train; d has died after a first merge. Its state may come from two others at once "
        "(donors_max 2).",
    )
    story.remark("The back-off is over: d is placed anew.")
    story.timer(backoff)
    story.later(2.0, "It is ready, and is to ask the two that have trained furthest.")
    story.is_ready("d")
    story.later(0.2, "b dies while it gives. c takes its place; the transfer from a continues.")
    story.dies("b")
    story.later(0.3, "d reports that the transfer from b failed. The core has dealt with it already.")
    story.reports("d", 2, CatchUpFailure("b", "connection reset"))
    story.later(0.2, "d has a state: fragment 0 came from a, fragment 1 from c. It trains.")
    story.reports("d", 2, CaughtUp("a", (1, 0), 4, 0.7, ("a", "c")))
    return story


STORIES: dict[str, Callable[[], Scenario]] = {
    "full-quorum": full_quorum,
    "grace-window": grace_window,
    "stale-contribution": stale_contribution,
    "death-in-a-round": death_in_a_round,
    "silent-island": silent_island,
    "quarantine": quarantine,
    "drain": drain,
    "scaling": scaling,
    "checkpoint": checkpoint,
    "rollback": rollback,
    "restart": restart,
    "standby": standby,
    "catch-up": catch_up,
}


def recorded(name: str) -> str:
    """Return the recorded text; an empty text before the first recording."""
    path = FOLDER / f"{name}.txt"
    return path.read_text() if path.exists() else ""


def difference(name: str, text: str) -> str:
    """Return a unified diff from the recorded text to ``text``; empty if they are the same."""
    before, after = recorded(name).splitlines(), text.splitlines()
    return "\n".join(difflib.unified_diff(before, after, f"stories/{name}.txt", "this build", lineterm="", n=2))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.txt"):
        if path.stem not in STORIES:
            path.unlink()
            print(f"{path.name}: removed")
    for name, tell in STORIES.items():
        text = tell().text
        if changed := difference(name, text):
            print(changed)
            (FOLDER / f"{name}.txt").write_text(text)
    print(f"{len(STORIES)} stories are recorded in tests/golden/{FOLDER.name}")


if __name__ == "__main__":
    main()
