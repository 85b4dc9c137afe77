"""The torn tail of a tape: whether a damaged line had been synced, by the evidence of the lines behind it.

A loss of power may leave anything of what was not synced: a part, zeros, a good line behind a bad one. Such a tail is cut
off, and nothing is lost: its reports are sent again, its decisions are made again. A line that was synced and is damaged
now is another matter: it is never sent again, and a tape without it would tell another story.

Responsible for: which records prove that those before them were synced. Refuses to know files.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.core.effects import MergeFragment
from orchestrator.core.events import MergeCompleted, SynchroniserRestarted
from orchestrator.errors import DataError
from orchestrator.tape.schema import Footer, Record, decode_line


def was_synced(before: Iterable[Record], after: Iterable[str]) -> bool:
    """Whether the lines ``after`` a damaged one prove that it was durable, knowing the records ``before`` it.

    A merge is announced only once the tape is durable up to its decision (``journal.storage``), and after an epoch began
    nothing is done until that is durable (``host.retry``). With durability async the first is no proof, and taken for one.
    """
    decided_before = {(x.fragment, x.version) for r in before for x in r.effects if isinstance(x, MergeFragment)}
    began = False
    for line in after:
        try:
            record = decode_line(line)
        except DataError:
            continue
        if began or isinstance(record, Footer):
            return True
        event = record.event
        if isinstance(event, MergeCompleted) and (event.fragment, event.version) not in decided_before:
            return bool(event.base_digest)  # a build without a journal synced nothing
        began = isinstance(event, SynchroniserRestarted)
    return False
