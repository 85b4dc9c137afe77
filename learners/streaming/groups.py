"""The groups of pieces that an island draws from: the one at hand, and the next one, which a thread reads meanwhile.

Responsible for what is read when, and for what is counted ahead. Refuses to know what a group's text is (``streamed``) and
where a sequence is (``order``).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from learners.streaming.order import Group, Place, Section, Sections
from learners.streaming.source_tokens import GroupText, Window

READERS = 2


@dataclass(slots=True)
class Present:
    """A group that is being drawn from, and the one that follows in its section."""

    section: int
    group: Group
    text: Future[GroupText]
    following: Future[GroupText]


class Groups:
    """The tokens of each shard's and source's present group, and of the next one, which a thread reads meanwhile."""

    def __init__(self, read: Callable[[int, Group], GroupText]) -> None:
        self._read = read
        self._threads = ThreadPoolExecutor(READERS, "text")
        self._counting = ThreadPoolExecutor(1, "counting")
        self._present: dict[tuple[int, int], Present] = {}
        self._ahead: dict[tuple[int, int], tuple[int, int]] = {}

    def window(
        self,
        whose: tuple[int, int],
        section_number: int,
        source: int,
        section: Section,
        group: Group,
        first: int,
        count: int,
    ) -> Window:
        """``count`` tokens from the ``first`` of a group, the last of them from the beginning of the next one."""
        present = self._moved_to(whose, section_number, source, section, group)
        window = present.text.result().window(first, count)
        if len(window.tokens) == count:
            return window
        more = present.following.result().window(0, count - len(window.tokens))
        tokens = np.concatenate([window.tokens, more.tokens])
        return Window(tokens, window.is_repeated, window.omitted + more.omitted)

    def count_ahead(self, whose: tuple[int, int], sections: Sections, place: Place, number: int) -> None:
        """While sequence ``number`` and its neighbours are drawn, count what the next section needs.

        On a node that is new in a later epoch that is all of the section, and may take longer than a step should.
        """
        if len(sections.sections) == 1 or self._ahead.get(whose) == (place.epoch, place.section):
            return
        self._ahead[whose] = place.epoch, place.section
        following = sections.place(number - place.rank + sections.quotas[place.section])
        # what cannot be read is raised again when it is drawn
        self._counting.submit(sections.sections[following.section].place, following.number)

    def _moved_to(
        self, whose: tuple[int, int], section_number: int, source: int, section: Section, group: Group
    ) -> Present:
        before = self._present.get(whose)
        if before is not None and (before.section, before.group.number) == (section_number, group.number):
            return before
        text = None
        if before is not None:
            if before.section == section_number and before.group.number < group.number:
                text = before.following if section.place(before.group.following)[0].number == group.number else None
            if text is None:
                before.following.cancel()
        present = Present(
            section_number,
            group,
            text or self._threads.submit(self._read, source, group),
            self._threads.submit(self._read_following, source, section, group),
        )
        self._present[whose] = present
        return present

    def _read_following(self, source: int, section: Section, group: Group) -> GroupText:
        """Here and not before, because the pieces up to the end of that group may have to be counted for it."""
        following, _ = section.place(group.following)
        return self._read(source, following)
