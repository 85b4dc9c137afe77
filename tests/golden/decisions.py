"""Digests of decisions: every event that a job's core was told, and every effect it answered with, in order.

    of_seed(seed, deaths)    one seed of the swarm, in every life of its synchroniser
    watched()                whatever is decided meanwhile

A digest holds the records and nothing else. The tape's header is left out, because a setting that is new and changes no
decision is no difference. Decisions that a loss of power took from the tape are in, because the islands acted on them.
Digests of Θ, and checksums of damage, are replaced by the order in which they appear: the last bits of Θ are the
processor's, not the core's.

With deaths, a digest also depends on how often the synchroniser touches its disk, because its deaths are counted in writes.
If the digests of mortal seeds change and those of plain ones do not, look there first.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.core.effects import Effect
from orchestrator.core.events import Event
from orchestrator.tape.driver import Driver
from orchestrator.tape.schema import Digest, Record, encode_record
from tests.swarm import trial

_ADDED_LATER = re.compile(r',"extent":"incarnation"|,"bits_per_byte":null,"sources":\[\]')
"""Fields that events have grown since, where they say nothing: no decision is another by them."""
DEATHS = 4
"""As often as in ``tests/simulation/test_mortality``."""
CHARACTERS = 12
"""Of a digest that are kept: 48 bits, so that two of a thousand are never the same by chance."""
_MACHINES_OWN = re.compile(r'"[0-9a-f]{32}"|checksum [0-9a-f]{8}, not [0-9a-f]{8}')


class Decisions:
    """The digest of the records that were added. It is also where a simulation can write its tape."""

    def __init__(self) -> None:
        self.count = 0
        self._digest = Digest()
        self._seen: dict[str, int] = {}

    def append(self, record: Record) -> None:
        self._add(encode_record(record))

    def append_lines(self, lines: bytes, count: int) -> None:
        for line in lines.decode().splitlines():
            self._add(line)

    def _add(self, line: str) -> None:
        self.count += 1
        line = _ADDED_LATER.sub("", line)
        self._digest.add(_MACHINES_OWN.sub(lambda found: str(self._seen.setdefault(found[0], len(self._seen))), line))

    @property
    def digest(self) -> str:
        """Nothing has none: a test that no longer watches a core has to fail."""
        assert self.count, "no decision was seen"
        return self._digest.hex()[:CHARACTERS]


@contextmanager
def watched() -> Iterator[Decisions]:
    """Collect what every core of this thread decides meanwhile, whatever becomes of its tape."""
    decisions, step, watching = Decisions(), Driver.step, threading.get_ident()

    def watched_step(driver: Driver, event: Event) -> tuple[Effect, ...]:
        effects = step(driver, event)
        if threading.get_ident() == watching:  # a test before may have left a job that is still simulated
            decisions.append(Record(driver.count, event, effects))
        return effects

    Driver.step = watched_step  # type: ignore[method-assign]
    try:
        yield decisions
    finally:
        Driver.step = step  # type: ignore[method-assign]


def of_seed(seed: int, deaths: int = 0) -> str:
    """The digest of the seed's decisions. If the seed fails, what it fails with comes behind."""
    logging.getLogger("orchestrator.runtime").setLevel(logging.CRITICAL)  # simulated disks refuse all the time
    with watched() as decisions:
        try:
            trial.run(seed, deaths)
        except trial.SwarmFailure as failure:
            return f"{decisions.digest} fails: {failure.detail.splitlines()[0][:100]}"
    return decisions.digest
