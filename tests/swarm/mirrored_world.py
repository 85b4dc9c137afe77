"""A mortal world whose job has its log in an object store: the live mirror, on a store that fails as stores do.

    python -m tests.swarm --mirrored --deaths N --first N --count N

    slow            a put takes seconds. The synchroniser waits, and the rest of the world goes on
    down            the store refuses everything for a while
    torn            a put is done and its answer is lost, or it is not done
    late            a put of a process that has died is done all the same
    stale listing   the newest objects are missing in it, and deleted ones are there
    lost machine    the next synchroniser has the store alone, or the disk of a machine that was replaced earlier
    believed dead   a synchroniser is cut off from the job, but not from the store, while the next one takes over

A put that waits runs the world's events meanwhile, those of the waiting synchroniser excepted. Of two synchronisers each has
the attributes in ``OF_A_LIFE``, which are exchanged before its events happen.

Beside what the other worlds check: a synchroniser that nobody replaced is not fenced, one that was replaced announces
nothing that its successor does not have, and at the end the store has what the disk has.
"""

from __future__ import annotations

import errno
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.vocabulary import Duration, FragmentId, Instant, JobPolicy, Version
from orchestrator.errors import Fenced
from orchestrator.host.job_files import JobFiles, mirror
from orchestrator.host.retry import STORE_REFUSES
from orchestrator.simulation.island import Host
from orchestrator.simulation.plan import WorldPlan
from orchestrator.system import mirror as mirroring
from orchestrator.system.disk import Disk
from orchestrator.system.mirror import mirrored
from orchestrator.system.run_folder import TAPE
from orchestrator.tape.driver import Fold
from tests.swarm.checkers import Checkers
from tests.swarm.checkers.violation import require
from tests.swarm.checkpointing_world import WRITING_S, CheckpointingWorld
from tests.swarm.configurations import CheckpointRequests
from tests.swarm.disk import AtOnce, Died, SimulatedDisk, SimulatedStore
from tests.swarm.mortal_links import MortalLinks, unread_reports_of
from tests.swarm.mortal_merge_worker import retry_until_written
from tests.swarm.mortal_world import FOLDER, SYNC_EVERY_S
from tests.swarm.mortality import Death, DiskFaults, Mortality
from tests.swarm.rough_world import EventFaults

OF_A_LIFE = (
    "generation", "alive", "epoch", "core", "goodput", "statistics", "sink", "checkers", "held", "links", "merge_worker",
    "disk", "_driver", "_files", "_has_files", "_disk_faults", "_saver",
)  # fmt: skip
REFUSAL_S = (0.05, 0.5)
SLOW_S = (0.05, 2.0)
LATE_S = 10.0
PUTS_MAX = 12
"""A death at a put happens within so many of them."""
BASE_AFTER_BYTES = 6000
INLINE_BYTES_MAX = 400
PIECE_BYTES = 300
STALE_MAX = 5
PROCESS, MACHINE, BELIEVED = "process", "machine", "believed dead"


@dataclass(frozen=True, slots=True)
class Weather:
    """What the store does until the world is calm: windows in which it is down or slow, the probability that a put is torn,
    and whether listings are stale.
    """

    down: tuple[tuple[Instant, Instant], ...]
    slow: tuple[tuple[Instant, Instant], ...]
    torn: float
    is_stale: bool


def draw_weather(random: Random, until: Instant) -> Weather:
    def windows() -> tuple[tuple[Instant, Instant], ...]:
        begins = [random.uniform(0.0, until) for _ in range(random.randint(1, 3) if random.random() < 0.5 else 0)]
        return tuple((at, min(until, at + random.uniform(0.1, 2.0))) for at in begins)

    torn = random.uniform(0.0, 0.2) if random.random() < 0.5 else 0.0
    return Weather(windows(), windows(), torn, random.random() < 0.5)


class MirroredWorld(CheckpointingWorld):
    """``befallen`` counts what befell the store and its writers."""

    def __init__(
        self,
        policy: JobPolicy,
        plan: WorldPlan,
        seed: int,
        event_faults: EventFaults,
        mortality: Mortality,
        checkers: Callable[[], Checkers],
        requests: CheckpointRequests | None,
    ) -> None:
        super().__init__(policy, plan, seed, event_faults, replace(mortality, merges_max=0), checkers, requests)
        self.store_random = Random(f"atoll swarm {seed} store")
        self.weather = draw_weather(self.store_random, plan.calm_at)
        self.befallen: Counter[str] = Counter()
        self.store = UnreliableStore(self)
        self._newest = 0
        self._contexts: dict[int, dict[str, Any]] = {}
        """The attributes of the lives that are not at work."""
        self._cut_off: set[int] = set()
        self._fenced: set[int] = set()
        self._ended: set[int] = set()
        self._waiting: set[int] = set()
        self._parked: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        self._frames: Counter[int] = Counter()
        self._recovered: dict[int, dict[FragmentId, Version]] = {}
        self._former: list[SimulatedDisk] = []
        self._loses_machine = False

    def run(self, until: Instant = float("inf")) -> MirroredWorld:
        with (
            patch.object(mirroring, "INLINE_BYTES_MAX", INLINE_BYTES_MAX),
            patch.object(mirroring, "PIECE_BYTES", PIECE_BYTES),
            patch.object(mirroring.LogWriter, "base_after_bytes", BASE_AFTER_BYTES),
        ):
            super().run(until)
            self._check_store()
        return self

    @property
    def is_succeeding(self) -> bool:
        """Whether this synchroniser begins while one before it is still alive."""
        return not self._has_files and bool(self._cut_off - self._ended)

    # ── whose turn it is ──────────────────────────────────────────────────────────────────────────────────────────

    def wait(self, seconds: Duration) -> bool:
        """Let the world go on without the synchroniser that waits for its store. Return whether it still lives."""
        mine, until = self.generation, self.now + seconds
        self._waiting.add(mine)
        self._load(self._newest)
        while self._heap and self._heap[0][0] <= until:
            self._go_on(until, 1)
        self.now = max(self.now, until)
        self._waiting.discard(mine)
        if mine in self._ended:
            return False
        self._load(mine)
        for thunk in self._parked.pop(mine, ()):
            self.later(0.0, thunk)
        return True

    def later(self, seconds: Duration, thunk: Callable[[], None]) -> None:
        """Schedule ``thunk``. Each event begins with the newest synchroniser at work, whoever waited in the one before."""

        def event() -> None:
            thunk()
            self._load(self._newest)

        super().later(seconds, event)

    def ours(self, thunk: Callable[[], None]) -> Callable[[], None]:
        mine = self.generation

        def here() -> None:
            if self.finished is not None or mine in self._ended:
                return
            if mine in self._waiting:
                self._parked[mine].append(here)
                return
            self._load(mine)
            if self.alive:
                self._mortally(thunk)

        return here

    def tell(self, event: e.Event) -> None:
        mine = self.generation
        if mine in self._waiting:
            self._parked[mine].append(lambda: self.tell(replace(event, at=self.now)))
        elif mine in self._cut_off and not self._frames[mine]:
            self._unheard += [event] if isinstance(event, e.CommandRequested) else []
        else:
            super().tell(event)

    def _mortally(self, work: Callable[[], None]) -> None:
        mine = self.generation
        self._frames[mine] += 1
        try:
            work()
        except (Died, Fenced) as error:
            if isinstance(error, Fenced):
                require(mine in self._cut_off, "a synchroniser that nobody replaced is not fenced", error)
            if mine not in self._ended:
                self._die()
            if self._frames[mine] > 1:
                raise Died from None  # the rest of what this process was doing is not done either
        finally:
            self._frames[mine] -= 1

    def _load(self, generation: int) -> None:
        if generation != self.generation:
            self._contexts[self.generation] = {name: getattr(self, name) for name in OF_A_LIFE}
            for name, value in self._contexts.pop(generation).items():
                setattr(self, name, value)

    # ── death, and the next life ──────────────────────────────────────────────────────────────────────────────────

    def _strike(self, death: Death) -> None:
        if not self.alive or self.finished is not None or self.generation in self._cut_off:
            return
        kind = self.store_random.choice((PROCESS, MACHINE, MACHINE, BELIEVED, BELIEVED))
        if kind == BELIEVED and self._has_files:
            self._cut(death)
            return
        self._loses_machine = kind != PROCESS
        if self.store_random.random() < 0.5:
            self._disk_faults.arm(replace(death, operation=-1))
            puts, lands = self.store_random.randint(1, PUTS_MAX), self.store_random.random() < 0.5
            self.store.strike(self.generation, puts, lands=lands)
        else:
            super()._strike(death)

    def _cut(self, death: Death) -> None:
        """Cut the synchroniser off from all but the store. It lives on and misses its islands, and another one begins."""
        self._cut_off.add(self.generation)
        self.links.is_cut = True
        for (island, incarnation), host in self.hosts.items():
            host.carrying = False
            if unread_reports_of(host).connected:
                unanswered = e.ConnectionLost(0.0, island, incarnation, False, "no answer")
                self.links.say(unanswered, self.plan.silence_s)
            unread_reports_of(host).hang_up()
        self.later(death.away_s, self._live)

    def _live(self) -> None:
        if self.generation in self._cut_off:
            self._contexts[self.generation] = {name: getattr(self, name) for name in OF_A_LIFE}
            self._on_another_machine()
        self.links, self.held, self._saver = MortalLinks(self), set(), None
        self._newest = self.generation + 1
        super()._live()

    def _on_another_machine(self) -> None:
        """Go on with an empty disk, or with one that a former synchroniser has left."""
        self._disk_faults = DiskFaults()
        if self._former and self.store_random.random() < 0.5:
            self.disk = self._former.pop()
            self.befallen["disk of a former machine"] += 1
        else:
            self.disk = SimulatedDisk()
        self.disk.fault_source = self._disk_faults

    def _die(self) -> None:
        mine = self.generation
        self._ended.add(mine)
        if mine in self._cut_off:
            self.alive = False
            self._files.tape.let_go()
            self.disk.lose_process()
            self._former.append(self.disk)
            return
        super()._die()
        if self._loses_machine:
            self.befallen[MACHINE] += 1
            self._on_another_machine()
        self._loses_machine = False

    def _opened(self, folds: tuple[Fold, ...], disk: Disk | None = None) -> JobFiles:
        """Open the files as ``runtime.restart`` does: what the store refuses is done again, in the store's time."""
        take_over = partial(mirror, FOLDER, self.store, self.disk, AtOnce(), self._compact_later)
        mirrored_disk = retry_until_written(STORE_REFUSES, take_over)
        mirrored_disk.writer.on_fenced = partial(self._be_fenced, self.generation)
        return retry_until_written(STORE_REFUSES, partial(super()._opened, folds, mirrored_disk))

    def _be_fenced(self, generation: int, error: Fenced) -> None:
        require(generation in self._cut_off, "a synchroniser that nobody replaced is not fenced", error)
        self.befallen["fenced"] += 1
        self._fenced.add(generation)

    def _compact_later(self, work: Callable[[], None]) -> None:
        self.while_alive(self.store_random.uniform(*WRITING_S), work)

    def _reconnect(self, files: JobFiles) -> None:
        fragments = map(FragmentId, range(self.policy.fragment_count))
        outer = files.outer
        self._recovered[self.generation] = {p: outer.version(p) for p in fragments} if outer is not None else {}
        super()._reconnect(files)

    # ── what a synchroniser that is cut off cannot do ─────────────────────────────────────────────────────────────

    def addressed(self, host: Host, call: Callable[[], None]) -> Callable[[], None]:
        deliver = super().addressed(host, call)
        if self.generation not in self._cut_off:
            return deliver
        return lambda: self.later(self.store_random.uniform(0.0, LATE_S), deliver)

    def publish_fragment(self, effect: f.PublishFragment) -> None:
        for successor, versions in self._recovered.items():
            if successor > self.generation and effect.recipients:
                has_it = effect.version <= versions.get(effect.fragment, -1)
                require(has_it, "who was replaced announces only what its successor has", (effect, successor, versions))
        super().publish_fragment(effect)

    def place_island(self, effect: f.PlaceIsland) -> None:
        if self.generation not in self._cut_off:
            super().place_island(effect)

    def kill_island(self, effect: f.KillIsland) -> None:
        if self.generation not in self._cut_off:
            super().kill_island(effect)

    def stop_island(self, effect: f.StopIsland) -> None:
        if self.generation not in self._cut_off:
            super().stop_island(effect)

    def finish_job(self, effect: f.FinishJob) -> None:
        if self.generation not in self._cut_off:
            super().finish_job(effect)
            return
        retry_until_written("the tape cannot be written", self._files.tape.close)
        raise Died  # the job is over, as its successor will find

    def _sync(self) -> None:
        if self.generation not in self._cut_off:
            super()._sync()
            return
        retry_until_written("the tape cannot be written", self._files.tape.sync)
        self.while_alive(SYNC_EVERY_S, self._sync)

    def _post(self, make: Callable[[float], e.Event]) -> int:
        return super()._post(make) if self.generation not in self._fenced else 0

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_store(self) -> None:
        """Check that another machine would find in the store what the disk has."""
        if self.finished is None:
            return
        copy, disk = SimulatedStore(), SimulatedDisk()
        copy.objects = dict(self.store.objects)
        mirrored(copy, disk, Path("/other"), AtOnce(), lambda work: work())
        in_store, here = disk.read(Path("/other", TAPE)), self.disk.read(FOLDER / TAPE)
        require(in_store == here, "the store has what the disk has", (len(in_store), len(here)))


class UnreliableStore(SimulatedStore):
    """The store of a ``MirroredWorld``, in its time."""

    def __init__(self, world: MirroredWorld) -> None:
        super().__init__()
        self._world = world
        self._struck = self._puts_left = 0
        self._lands = False
        self._deleted: dict[str, int] = {}

    def strike(self, generation: int, puts: int, *, lands: bool) -> None:
        """Let this process die at its put of this number from now on. The put is done or not."""
        self._struck, self._puts_left, self._lands = generation, puts, lands

    def _put(self, name: str, content: bytes, *, may_exist: bool) -> None:
        world, random = self._world, self._world.store_random
        self._refuse_if_down()
        self._puts_left -= self._struck == world.generation
        dies, lands = self._struck == world.generation and self._puts_left == 0, self._lands
        if dies and not lands:
            raise Died
        calm = world.now >= world.plan.calm_at
        if self._is_within(world.weather.slow) or (world.is_succeeding and not calm and random.random() < 0.5):
            world.befallen["slow"] += 1
            self._take_time(SLOW_S)
        done = partial(super()._put, name, content, may_exist=may_exist)
        if random.random() < (0.0 if calm else world.weather.torn):
            world.befallen["torn"] += 1
            if random.random() < 0.5:
                with suppress(FileExistsError):
                    done()
            raise OSError(errno.EIO, "the store memory did not answer in time")
        if dies:
            done()
            raise Died
        done()
        if self._is_within(world.weather.slow):
            self._take_time(SLOW_S)

    def _take_time(self, seconds: tuple[float, float]) -> None:
        world = self._world
        left = max(0.0, world.plan.calm_at - world.now)
        if not world.wait(min(left, world.store_random.uniform(*seconds))):
            raise Died

    def get(self, name: str) -> bytes:
        self._refuse_if_down()
        return super().get(name)

    def sizes(self, prefix: str) -> dict[str, int]:
        self._refuse_if_down()
        world = self._world
        if not world.weather.is_stale or world.now >= world.plan.calm_at:
            return super().sizes(prefix)
        world.befallen["stale listing"] += 1
        self.stale_count = min(len(self.objects), world.store_random.randint(0, STALE_MAX))
        deleted = {name: size for name, size in self._deleted.items() if name.startswith(prefix)}
        return dict(sorted({**deleted, **super().sizes(prefix)}.items()))

    def delete(self, names: Iterable[str]) -> None:
        self._refuse_if_down()
        for name in names:
            if name in self.objects:
                self._deleted[name] = len(self.objects[name])
            super().delete([name])
        self._deleted = dict(list(self._deleted.items())[-STALE_MAX:])

    def _refuse_if_down(self) -> None:
        if self._is_within(self._world.weather.down):
            self._world.befallen["down"] += 1
            self._take_time(REFUSAL_S)
            raise OSError(errno.EIO, "the store memory cannot be reached")

    def _is_within(self, windows: tuple[tuple[Instant, Instant], ...]) -> bool:
        return any(since <= self._world.now < until for since, until in windows)
