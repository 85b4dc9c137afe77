"""A world whose synchroniser dies: at given instants all that only its process knew is gone, and another goes on at once.

Gone are the payloads held, merges and evaluations under way. Some merges had reached the journal: those are told first, as
``runtime.files`` does. Letters, calls and timers that are on their way stay on their way, as they do when islands keep
them until they are acknowledged; islands offer again what the dead one held and they still have. Refuses to know: files
(their order is tested with real ones, in ``tests/journal``).
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Offer
from orchestrator.core.vocabulary import Contribution, FragmentId, Instant, JobPolicy
from orchestrator.simulation.plan import WorldPlan
from orchestrator.simulation.swarm.weather import RoughWorld, Weather
from orchestrator.simulation.workshop import Workshop
from orchestrator.tape.driver import Driver, Fold
from orchestrator.tape.recovery import remember


class MortalWorkshop(Workshop):
    """One whose merges die with it, unless they are in the journal."""

    def __init__(self, world: MortalWorld) -> None:
        super().__init__(world)
        self._under_way: dict[FragmentId, f.MergeFragment] = {}

    def merge(self, effect: f.MergeFragment) -> None:
        self.check_held(effect)
        self._under_way[effect.fragment] = effect
        self._world.later(self._world.draw(self._world.plan.merge_s), lambda: self._complete(effect))

    def die(self) -> tuple[f.MergeFragment, ...]:
        """Forget everything; the merges that had reached the journal."""
        merging, self._under_way = self._under_way, {}
        return tuple(effect for effect in merging.values() if self._world.random.random() < 0.5)

    def _complete(self, effect: f.MergeFragment) -> None:
        if self._under_way.get(effect.fragment) is effect:
            del self._under_way[effect.fragment]
            self.told(effect)

    def told(self, effect: f.MergeFragment) -> None:
        self.outer[effect.fragment] = (effect.version, effect.step)
        self._world.unless_over(e.MergeCompleted(self._world.now, effect.fragment, effect.version, "made", 0.0))


class MortalWorld(RoughWorld):
    """``deaths`` are the instants at which the synchroniser dies."""

    def __init__(
        self,
        policy: JobPolicy,
        plan: WorldPlan,
        seed: int,
        weather: Weather,
        deaths: Iterable[Instant],
        *,
        folds: tuple[Fold, ...] = (),
    ) -> None:
        super().__init__(policy, plan, seed, weather, folds=folds)
        self.workshop: MortalWorkshop = MortalWorkshop(self)
        for at in deaths:
            self.later(at, self._die)

    def _die(self) -> None:
        if self.finished is not None or not self.sink.records:
            return
        lost = [c for current in self.core.state.rounds for c in current.offered.values()]
        past = remember(self.tape)
        self.core = past.core
        self._driver = Driver(past.core, self._driver.folds, self.sink, past.count)
        for effect in self.workshop.die():
            self.workshop.told(effect)
        self.tell(e.SynchroniserRestarted(self.now, past.next_epoch))
        for c in lost:
            self._offer_again(c)

    def _offer_again(self, c: Contribution) -> None:
        host = self.hosts[c.island, c.incarnation]
        offer = Offer(c.fragment, c.offer, c.step, c.base_version, c.step_count, c.token_count, c.tokens_total)
        if host.alive and host.process.stands(offer):
            host.post([offer])
            self.links.carry(host)

    def _act(self, effect: f.Effect) -> None:
        """A placement asked for again is answered once: the controller makes one process of an incarnation."""
        if not isinstance(effect, f.PlaceIsland) or (effect.island, effect.incarnation) not in self.hosts:
            super()._act(effect)
